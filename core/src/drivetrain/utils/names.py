"""Names that Accelerate offers as enumerations, and other names of its own.

A member of an enumeration is its own value here, so that plugins' names need no list in core.
"""

from __future__ import annotations

from drivetrain.config.options import Options as KwargsHandler
from drivetrain.errors import DistributedOperationError as DistributedOperationException

__all__ = [
    "DistributedOperationException",
    "DynamoBackend",
    "KwargsHandler",
    "LoggerType",
    "PrecisionType",
    "RNGType",
]


class _Names(type):
    """``Class.NAME`` is ``"name"``; whether there is such a thing is said where the name is used."""

    def __getattr__(cls, name: str) -> str:
        if not name.isupper():
            raise AttributeError(name)
        return name.lower()

    def __call__(cls, value: str) -> str:
        return str(value).lower()


class DynamoBackend(metaclass=_Names):
    """Names of compiler backends of ``torch.compile``.

    Example:
        >>> DynamoBackend.INDUCTOR
        'inductor'
    """


class LoggerType(metaclass=_Names):
    """Names of trackers.

    Example:
        >>> LoggerType.JSONL, LoggerType("ALL")
        ('jsonl', 'all')
    """


class PrecisionType(metaclass=_Names):
    """Names of precisions.

    Example:
        >>> PrecisionType.BF16
        'bf16'
    """


class RNGType(metaclass=_Names):
    """Names of kinds of random generators.

    Example:
        >>> RNGType.GENERATOR
        'generator'
    """
