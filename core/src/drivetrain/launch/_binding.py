"""Which processor cores a rank runs on."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from drivetrain.errors import ConfigurationError

__all__ = ["as_ranges", "bound_to", "core_shares", "read_ranges", "shares_of"]

_SYSTEM = Path("/sys/devices/system")


def shares_of(mode: str, ranks: int) -> list[frozenset[int]] | None:
    """The processors of each local rank; None where the system decides.

    Raises:
        ConfigurationError: Where this system can't bind processes, or has too few cores.

    Example:
        >>> shares_of("none", 2) is None
        True
    """
    if mode == "none":
        return None
    if not hasattr(os, "sched_getaffinity"):
        raise ConfigurationError(f"cpu_binding={mode!r}: this system can't bind processes to cores. Leave it out.")
    allowed = os.sched_getaffinity(0)
    if mode == "numa":
        files = sorted(_SYSTEM.glob("node/node[0-9]*/cpulist"), key=lambda p: int(p.parent.name.removeprefix("node")))
        nodes = [read_ranges(file.read_text()) & allowed for file in files]
        nodes = [node for node in nodes if node] or [frozenset(allowed)]
        return [nodes[rank * len(nodes) // ranks] for rank in range(ranks)]
    return core_shares(_cores(allowed), ranks)


def core_shares(cores: Sequence[frozenset[int]], ranks: int) -> list[frozenset[int]]:
    """Disjoint shares of whole cores, as even as they can be, neighbours together.

    Args:
        cores: The processors (hardware threads) of each core.
        ranks: Number of shares.

    Raises:
        ConfigurationError: If there are fewer cores than ranks.

    Example:
        >>> [sorted(s) for s in core_shares([frozenset({0, 4}), frozenset({1, 5}), frozenset({2})], 2)]
        [[0, 4], [1, 2, 5]]
    """
    if len(cores) < ranks:
        raise ConfigurationError(
            f"cpu_binding='cores': {ranks} processes on this machine can't each have cores of their own, there are {len(cores)}. "
            "Start fewer, or leave the binding out."
        )
    bounds = [rank * len(cores) // ranks for rank in range(ranks + 1)]
    return [frozenset().union(*cores[low:high]) for low, high in itertools.pairwise(bounds)]


def _cores(allowed: set[int]) -> list[frozenset[int]]:
    """The allowed processors by physical core."""
    cores = {}
    for cpu in sorted(allowed):
        try:
            siblings = read_ranges((_SYSTEM / f"cpu/cpu{cpu}/topology/thread_siblings_list").read_text()) & allowed
        except OSError:
            siblings = frozenset({cpu})
        cores[min(siblings)] = siblings
    return list(cores.values())


def read_ranges(text: str) -> frozenset[int]:
    """The numbers of Linux's lists of processors.

    Example:
        >>> sorted(read_ranges("0-2,8"))
        [0, 1, 2, 8]
    """
    found: set[int] = set()
    for part in text.strip().split(","):
        low, _, high = part.partition("-")
        if low:
            found.update(range(int(low), int(high or low) + 1))
    return frozenset(found)


def as_ranges(numbers: frozenset[int]) -> str:
    """The inverse of `read_ranges`.

    Example:
        >>> as_ranges(frozenset({0, 1, 2, 8}))
        '0-2,8'
    """
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


@contextlib.contextmanager
def bound_to(cpus: frozenset[int] | None) -> Iterator[None]:
    """Processes started inside of the block by this thread run on these processors: a child has its parent's binding from its first moment on."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
