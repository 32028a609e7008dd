"""One process on one device."""

from __future__ import annotations

from drivetrain.interfaces import Backend

__all__ = ["SingleBackend"]


class SingleBackend(Backend):
    """One process on one device: the base class as it is.

    Example:
        >>> from drivetrain.interfaces import Backend
        >>> issubclass(SingleBackend, Backend)
        True
    """
