"""Lazy module attributes (PEP 562): a public name is imported from where it lives when it is first used."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

__all__ = ["lazy_exports", "load_target"]


def lazy_exports(
    package: str, names: Mapping[str, Iterable[str]], fallback: Callable[[str], Any] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make a module's ``__getattr__`` and ``__dir__`` from a table.

    Args:
        package: ``__name__`` of the module.
        names: Submodule (relative to ``package``, or absolute when it contains "drivetrain.") to the names that live in it.
        fallback: Called with names that neither the table nor a submodule has; raises AttributeError for those that it doesn't know either.

    Returns:
        The two functions.

    Example:
        >>> getattr_, dir_ = lazy_exports("drivetrain", {"errors": ["DrivetrainError"]})
        >>> getattr_("DrivetrainError").__name__
        'DrivetrainError'
    """
    home = {
        name: (module if module.startswith("drivetrain.") else f"{package}.{module}")
        for module, members in names.items()
        for name in members
    }

    def module_getattr(name: str) -> Any:
        if name in home:
            with _no_collection():
                value = getattr(importlib.import_module(home[name]), name)
            setattr(sys.modules[package], name, value)
            return value
        if fallback is not None and not name.startswith("_"):
            # `from package import submodule` asks for the attribute first: no reason to search all plugins for it.
            if importlib.util.find_spec(f"{package}.{name}") is not None:
                return importlib.import_module(f"{package}.{name}")
            return fallback(name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def module_dir() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home})

    return module_getattr, module_dir


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Importing makes objects that stay: looking for garbage among them, and once among all of torch's, takes longer than the import."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def load_target(target: str) -> Any:
    """Import ``"package.module:Name"``.

    Example:
        >>> load_target("drivetrain.errors:DrivetrainError").__name__
        'DrivetrainError'
    """
    module, _, attribute = target.partition(":")
    value: Any = importlib.import_module(module)
    for part in attribute.split("."):
        value = getattr(value, part)
    return value
