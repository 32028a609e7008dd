"""pytest fixtures of the kit. Use with ``pytest_plugins = ["drivetrain.testing.pytest_plugin"]`` in a conftest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest

from drivetrain.testing.workers import WorkerPool

# The kit's tests live outside of test files: let pytest explain their assertions, too.
pytest.register_assert_rewrite(
    *(
        f"drivetrain.testing.{name}"
        for name in (
            "_backend_models",
            "_backend_objects",
            "_backend_state",
            "_backend_training",
            "_backend_windows",
            "backend",
            "checkpoint_format",
            "device",
            "precision",
            "static",
            "tracker",
        )
    )
)

__all__ = ["Workers", "ranks", "workers"]


class Workers:
    """Pools of live ranks by size and environment, each started when it is first asked for.

    Example:
        >>> pools = Workers()
        >>> pools(2) is pools(2), pools(2) is pools(2, {"NAME": "value"})
        (True, False)
    """

    def __init__(self) -> None:
        self._pools: dict[tuple[int, tuple[tuple[str, str], ...]], WorkerPool] = {}

    def __call__(self, world_size: int, environment: Mapping[str, str] | None = None) -> WorkerPool:
        """The pool of so many ranks, which start with these variables besides a launcher's."""
        key = world_size, tuple(sorted((environment or {}).items()))
        if key not in self._pools:
            self._pools[key] = WorkerPool(world_size, environment=dict(key[1]))
        return self._pools[key]

    def close(self) -> None:
        """End all ranks."""
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()


def pytest_configure(config: pytest.Config) -> None:
    """Declare the kit's marker."""
    config.addinivalue_line("markers", "full: the full product of cases, where others run a selection")


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """The session's pools of live ranks: ``workers(2).run(function, *args)``."""
    pools = Workers()
    yield pools
    pools.close()


@pytest.fixture
def ranks(workers: Workers) -> WorkerPool:
    """The session's pool of two live ranks."""
    return workers(2)
