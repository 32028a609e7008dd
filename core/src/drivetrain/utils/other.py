"""Small things that scripts import from ``accelerate.utils``."""

from __future__ import annotations

import socket
from typing import Any

from drivetrain._foreign import from_utils

__all__ = ["is_port_in_use", "merge_dicts", "wait_for_everyone"]

__getattr__ = from_utils


def is_port_in_use(port: int | None = None) -> bool:
    """Whether something listens on a port of this machine; 29500, the usual one for a rendezvous, by default.

    Example:
        >>> is_port_in_use(1)
        False
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.settimeout(1.0)
        return s.connect_ex(("127.0.0.1", 29500 if port is None else port)) == 0


def merge_dicts(source: dict[Any, Any], destination: dict[Any, Any]) -> dict[Any, Any]:
    """Put one nested dict's values into another, in place.

    Example:
        >>> merge_dicts({"a": {"b": 1}}, {"a": {"c": 2}})
        {'a': {'c': 2, 'b': 1}}
    """
    for key, value in source.items():
        if isinstance(value, dict):
            merge_dicts(value, destination.setdefault(key, {}))
        else:
            destination[key] = value
    return destination


def wait_for_everyone() -> None:
    """Wait until every process has come here."""
    from drivetrain.parallel.process_group import barrier

    barrier()
