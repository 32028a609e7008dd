"""What a distribution says of itself, read without the standard library's parser of mail, which takes a millisecond for each."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable

__all__ = ["headers", "installed_version"]


def headers(distribution: importlib.metadata.Distribution, names: Iterable[str]) -> dict[str, list[str]]:
    """The values of some fields of the core metadata, in the order in which they stand there.

    Args:
        distribution: An installed distribution.
        names: Fields whose values stand on one line, such as "Name", "Version", "Requires-Dist".

    Example:
        >>> found = headers(importlib.metadata.distribution("click"), ["Name", "Version"])
        >>> found["Name"], found["Version"] == [importlib.metadata.version("click")]
        (['click'], True)
    """
    found: dict[str, list[str]] = {name: [] for name in names}
    by_lower = {name.lower(): values for name, values in found.items()}
    # As importlib.metadata looks for it: wheels have the first, eggs the second, the third is a file that is the metadata.
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or distribution.read_text("") or ""
    for line in text.splitlines():
        if not line:
            break  # the description follows
        name, colon, value = line.partition(":")
        values = by_lower.get(name.lower()) if colon else None
        if values is not None:
            values.append(value.strip())
    return found


def installed_version(name: str) -> str | None:
    """The version of an installed distribution as its metadata says; None without any.

    Example:
        >>> installed_version("no-such-distribution") is None
        True
    """
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return next(iter(headers(distribution, ["Version"])["Version"]), None)
