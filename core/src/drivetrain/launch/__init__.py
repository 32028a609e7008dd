"""Starting processes: on this machine, and from a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._lazy import lazy_exports

if TYPE_CHECKING:
    from drivetrain.launch.local import LocalLauncher
    from drivetrain.launch.notebook import debug_launcher, notebook_launcher

__all__ = ["LocalLauncher", "debug_launcher", "notebook_launcher"]

__getattr__, __dir__ = lazy_exports(
    __name__, {"local": ["LocalLauncher"], "notebook": ["debug_launcher", "notebook_launcher"]}
)
