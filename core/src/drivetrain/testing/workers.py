"""Live ranks that run functions on demand, so that a test pays for no process start.

Importing torch takes seconds; a pool starts its processes once (per test session) and sends them work. Each rank has the
variables of a launcher (RANK, WORLD_SIZE, ...), one thread, and a gloo process group over all ranks.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

__all__ = ["STARTUP", "RemoteError", "WorkerPool"]

#: Seconds that ranks may take to start on a busy machine.
STARTUP = 120.0


class RemoteError(AssertionError):
    """A function raised on a rank; the message holds each failing rank's traceback."""

    def __init__(self, failures: dict[int, str]) -> None:
        super().__init__("\n".join(f"[rank {rank}] {text}" for rank, text in sorted(failures.items())))
        self.failures = failures


class WorkerPool:
    """``world_size`` processes that live until `close`.

    Args:
        world_size: Number of ranks.
        timeout: Seconds after which a call is given up: the ranks are killed and started anew for the next call. The first call has
            `STARTUP` seconds more, in which the ranks import torch.
        environment: Variables to set in each rank before torch is imported.

    Example:
        >>> import operator
        >>> with WorkerPool(2) as pool:  # doctest: +SKIP
        ...     pool.run(operator.add, 1, 2)
        [3, 3]
    """

    def __init__(self, world_size: int, *, timeout: float = 60.0, environment: dict[str, str] | None = None) -> None:
        self.world_size = world_size
        self.timeout = timeout
        self._environment = dict(environment or {})
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on every rank at once; return the results by rank.

        Functions and classes of test modules (the function's own, and those of the arguments), nested functions and lambdas travel by value.

        Raises:
            RemoteError: If it raised on any rank. If the others don't follow within seconds (they wait for the failed one in a
                collective), they are killed.
            TimeoutError: If a rank didn't answer in time.
        """
        import cloudpickle

        started = self._start()
        by_value = _test_modules((function, *args, *kwargs.values()))
        for module in by_value:
            cloudpickle.register_pickle_by_value(module)
        try:
            payload = cloudpickle.dumps((function, args, kwargs))
        finally:
            for module in by_value:
                cloudpickle.unregister_pickle_by_value(module)
        for pipe in self._pipes:
            pipe.send_bytes(payload)
        return self._collect(self.timeout + (STARTUP if started else 0.0))

    def close(self) -> None:
        """End the ranks."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send_bytes(b"")
                pipe.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        self._processes, self._pipes = [], []

    def kill(self) -> None:
        """Kill all ranks at once; the next `run` starts new ones."""
        for process in self._processes:
            process.kill()
        self.close()

    def _start(self) -> bool:
        if self._processes and all(p.is_alive() for p in self._processes):
            return False
        self.kill()
        context = mp.get_context("spawn")
        port = _free_port()
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self.world_size, port, self._environment), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)
        return True

    def _collect(self, timeout: float) -> list[Any]:
        import cloudpickle

        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + timeout
        while len(results) + len(failures) < self.world_size:
            pending = [p for r, p in enumerate(self._pipes) if r not in results and r not in failures]
            limit = min(deadline, time.monotonic() + 5.0) if failures else deadline
            ready = wait(pending, max(0.0, limit - time.monotonic()))
            if not ready:
                self.kill()
                if failures:
                    raise RemoteError(failures)
                missing = [r for r in range(self.world_size) if r not in results]
                raise TimeoutError(f"ranks {missing} didn't answer within {timeout} s")
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    ok, value = cloudpickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    self._processes[rank].join(5)
                    failures[rank] = f"the process died with exit code {self._processes[rank].exitcode}"
                    continue
                if ok:
                    results[rank] = value
                else:
                    failures[rank] = value
        if failures:
            if any("the process died" in text for text in failures.values()):
                self.kill()
            raise RemoteError(failures)
        return [results[r] for r in range(self.world_size)]


def _test_modules(values: tuple[Any, ...]) -> list[Any]:
    """Modules of these functions, classes and objects that the ranks can't import."""
    names = set()
    for value in values:
        names.add(getattr(value, "__module__", None))
        names.update(cls.__module__ for cls in (value if isinstance(value, type) else type(value)).__mro__)
    modules = [sys.modules[name] for name in sorted(n for n in names if n in sys.modules)]
    return [module for module in modules if not _is_installed(module)]


def _is_installed(module: Any) -> bool:
    file = getattr(module, "__file__", None)
    return file is None or not ("tests" in Path(file).parts or Path(file).name.startswith("test_"))


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _serve(pipe: Connection, rank: int, world_size: int, port: int, environment: dict[str, str]) -> None:
    os.environ.update(
        OMP_NUM_THREADS="1",
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        **environment,
    )
    import cloudpickle
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo")
    while True:
        try:
            payload = pipe.recv_bytes()
        except (EOFError, OSError):
            break
        if not payload:
            break
        torch.manual_seed(0)
        try:
            function, args, kwargs = cloudpickle.loads(payload)
            answer = (True, function(*args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        try:
            data = cloudpickle.dumps(answer)
        except Exception:
            data = cloudpickle.dumps((False, f"the result can't be sent back:\n{traceback.format_exc()}"))
        pipe.send_bytes(data)
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the interpreter's own end takes seconds once torch is loaded
