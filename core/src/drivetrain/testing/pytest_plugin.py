"""pytest fixtures of the kit. Use with ``pytest_plugins = ["drivetrain.testing.pytest_plugin"]`` in a conftest."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from drivetrain.testing.workers import WorkerPool

__all__ = ["ranks", "workers"]


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[int], WorkerPool]]:
    """A function that gives the session's pool of n live ranks: ``workers(2).run(function, *args)``."""
    pools: dict[int, WorkerPool] = {}

    def get(world_size: int) -> WorkerPool:
        if world_size not in pools:
            pools[world_size] = WorkerPool(world_size)
        return pools[world_size]

    yield get
    for pool in pools.values():
        pool.close()


@pytest.fixture
def ranks(workers: Callable[[int], WorkerPool]) -> WorkerPool:
    """The session's pool of two live ranks."""
    return workers(2)
