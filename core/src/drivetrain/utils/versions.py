"""Comparing versions of packages."""

from __future__ import annotations

import importlib.metadata
import operator
from collections.abc import Callable
from typing import Any

from drivetrain.errors import ConfigurationError

__all__ = ["compare_versions", "is_torch_version"]

_OPERATIONS: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
    "<=": operator.le,
    "<": operator.lt,
}


def compare_versions(library_or_version: Any, operation: str, requirement_version: str) -> bool:
    """Compare a version, or the installed one of a package.

    Args:
        library_or_version: Name of a package, or a `packaging.version.Version`.
        operation: ">", ">=", "==", "!=", "<=" or "<".
        requirement_version: What to compare with.

    Example:
        >>> compare_versions("torch", ">=", "2.0")
        True
    """
    from packaging.version import Version

    if operation not in _OPERATIONS:
        raise ConfigurationError(f"operation {operation!r}: use one of {', '.join(_OPERATIONS)}.")
    version = library_or_version
    if isinstance(version, str):
        version = Version(importlib.metadata.version(version))
    return _OPERATIONS[operation](version, Version(requirement_version))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare torch's version, without a local part such as ``+cpu``.

    Example:
        >>> is_torch_version(">=", "2.0")
        True
    """
    from packaging.version import Version

    installed = Version(importlib.metadata.version("torch"))
    return compare_versions(Version(installed.base_version), operation, version)
