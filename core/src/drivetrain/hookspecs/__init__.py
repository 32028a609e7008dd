"""The hooks that plugins implement, one module per concern.

A plugin's entry module implements the hooks it needs with `hookimpl`, and says which plugin API it was written for:

Example:
    >>> from drivetrain.hookspecs import hookimpl
    >>> from drivetrain.specs import TrackerSpec
    >>> DRIVETRAIN_API = 1
    >>> @hookimpl
    ... def drivetrain_register_trackers():
    ...     return [TrackerSpec(name="toy", target="toy.tracker:ToyTracker")]
"""

from drivetrain.hookspecs._markers import PROJECT, hookimpl, hookspec

__all__ = ["PROJECT", "SPEC_MODULES", "hookimpl", "hookspec"]

#: Modules with hookspecs, by concern.
SPEC_MODULES = (
    "detection",
    "precision",
    "sharding",
    "tracking",
    "checkpointing",
    "launching",
    "lifecycle",
    "cli",
)
