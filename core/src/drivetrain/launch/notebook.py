"""Starting ranks from a notebook cell or another program: a function in place of a script."""

from __future__ import annotations

import contextlib
import io
import linecache
import os
import pickle
import signal
import sys
import tempfile
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, ClassVar, Literal

from drivetrain.config.settings import variable
from drivetrain.errors import LaunchError
from drivetrain.interfaces.launcher import LaunchRequest
from drivetrain.launch._checks import check_request, local_world_size
from drivetrain.launch._failures import exit_code_of, first_of, report
from drivetrain.launch._job import Job
from drivetrain.launch._output import Sink
from drivetrain.launch.options import LocalOptions

__all__ = ["debug_launcher", "notebook_launcher"]

_RANK = Path(__file__).with_name("_function_rank.py")


def notebook_launcher(
    function: Callable[..., Any],
    args: Sequence[Any] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: int | str | None = None,
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, Any] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
    *,
    returns: Literal["first", "all"] = "first",
) -> Any:
    """Run ``function(*args)`` on several ranks.

    Each rank is a fresh Python process, so that nothing which this one has initialised (an accelerator, threads) is in its way. The
    function and its arguments travel by value: it may be defined in a cell, nested, or a lambda. What ranks print appears here, with
    their labels. One rank on one machine runs in this process.

    Args:
        function: What to run.
        args: Its arguments.
        num_processes: Number of ranks on this machine; None for one per accelerator found, or one on the CPU.
        mixed_precision: Name of the precision that Accelerators in the ranks have by default.
        use_port: Port at which ranks meet; None for a free one on one machine, 29500 on several.
        master_addr: Address of machine 0.
        node_rank: Rank of this machine.
        num_nodes: Number of machines.
        rdzv_backend: How several machines meet: "static" or "c10d".
        rdzv_endpoint: Host and port of machine 0, in place of ``master_addr`` and ``use_port``.
        rdzv_conf: Further settings of the rendezvous.
        rdzv_id: Name of the run.
        max_restarts: How often all ranks are started again after a failure.
        monitor_interval: There for scripts that give it: here a rank's end is noticed at once, sooner than any interval.
        log_line_prefix_template: What stands before each line of a rank, with ``${rank}``, ``${local_rank}`` and ``${role_name}``; None
            for ``"[rank ${rank}] "``.
        returns: "first" for the value of the first rank of this machine, "all" for a list of those of all its ranks.

    Returns:
        What the function returned. It travels back by value: tensors should be on the CPU.

    Raises:
        LaunchError: With the traceback of the rank that failed first. No rank is left running.
        KeyboardInterrupt: If the cell was interrupted. No rank is left running.

    Example:
        >>> notebook_launcher(lambda x: x + 1, (2,), num_processes=1)
        3
    """
    settings = {} if mixed_precision == "no" else {variable("mixed_precision"): mixed_precision}
    ranks = _default_ranks() if num_processes is None else num_processes
    if ranks == 1 and num_nodes == 1 and max_restarts == 0:
        with _environment(settings):
            value = function(*args)
        return [value] if returns == "all" else value
    host, _, port = rdzv_endpoint.rpartition(":") if rdzv_endpoint else (master_addr, "", use_port)
    if port is None and num_nodes > 1:
        port = 29500
    request = LaunchRequest(
        command=[str(_RANK)],
        num_processes=ranks * num_nodes,
        num_machines=num_nodes,
        machine_rank=node_rank,
        main_process_ip=str(host) if num_nodes > 1 else None,
        main_process_port=None if port is None else int(port),
        environment=settings,
        max_restarts=max_restarts,
    )
    options = LocalOptions(rdzv_backend=rdzv_backend, rdzv_id=rdzv_id, rdzv_conf=dict(rdzv_conf or {}))
    values = _launch(function, args, request, options, prefix=log_line_prefix_template)
    return values if returns == "all" else values[0]


def debug_launcher(function: Callable[..., Any], args: Sequence[Any] = (), num_processes: int = 2) -> Any:
    """Run ``function(*args)`` on several ranks on the CPU: a rehearsal of what will run on accelerators.

    Args:
        function: What to run; it travels by value, as for `notebook_launcher`.
        args: Its arguments.
        num_processes: Number of ranks.

    Returns:
        What the function returned on rank 0.

    Raises:
        LaunchError: With the traceback of the rank that failed first. No rank is left running.

    Example:
        >>> import os
        >>> debug_launcher(lambda: os.environ["DRIVETRAIN_CPU"], num_processes=1)
        'true'
    """
    settings = {variable("cpu"): "true"}
    request = LaunchRequest(command=[str(_RANK)], num_processes=num_processes, environment=settings)
    return _launch(function, args, request, LocalOptions())[0]


def _launch(
    function: Callable[..., Any],
    args: Sequence[Any],
    request: LaunchRequest,
    options: LocalOptions,
    *,
    prefix: str | None = None,
) -> list[Any]:
    """What the function returned on each rank of this machine."""
    check_request(request)
    with tempfile.TemporaryDirectory(prefix="drivetrain-") as scratch:
        folder = Path(scratch)
        _write(function, args, folder)
        command = [*request.command, scratch]
        request = _with_command(request, command)
        streams = {"stdout": Sink(sys.stdout, direct=False), "stderr": Sink(sys.stderr, direct=False)}
        outcome = Job(request, options, folder, prefix=prefix, **streams).run()
        if outcome.signum is not None:
            if outcome.signum != signal.SIGINT:
                os.kill(os.getpid(), outcome.signum)  # this process's own handlers are back in place
            raise KeyboardInterrupt
        if outcome.failures:
            error = LaunchError(
                report(outcome.failures, world_size=outcome.world_size, seconds=outcome.seconds, parted=outcome.parted)
            )
            error.exit_code = exit_code_of(first_of(outcome.failures).returncode)  # type: ignore[attr-defined]
            raise error
        return [_read(folder / f"value-{i}.pkl") for i in range(local_world_size(request))]


def _with_command(request: LaunchRequest, command: Sequence[str]) -> LaunchRequest:
    import dataclasses

    return dataclasses.replace(request, command=command)


def _write(function: Callable[..., Any], args: Sequence[Any], folder: Path) -> None:
    """Lay out for the ranks: where to import from, the source of cells (for tracebacks), and the call itself."""
    try:
        call = _by_value((function, tuple(args)))
    except Exception as error:  # pickling runs the objects' own code
        name = getattr(function, "__qualname__", repr(function))
        raise LaunchError(
            f"{name} can't be sent to other processes: {type(error).__name__}: {error}. Make objects such as models, loaders, locks "
            f"and open files inside of the function."
        ) from error
    cells = {name: entry for name, entry in linecache.cache.items() if len(entry) == 4 and not Path(name).exists()}
    around = {"path": sys.path, "cells": cells}
    (folder / "around.pkl").write_bytes(pickle.dumps(around))
    (folder / "call.pkl").write_bytes(call)


def _by_value(value: Any) -> bytes:
    """Pickle functions by value, with the names of their files: cloudpickle drops those, and a traceback then shows no source."""
    import cloudpickle

    def reduce_code(code: CodeType) -> Any:
        rebuild, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)
        return rebuild, tuple(code.co_filename if part == "<dynamic-code>" else part for part in parts)

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        dispatch_table: ClassVar = ChainMap({CodeType: reduce_code}, cloudpickle.Pickler.dispatch_table)

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


def _read(file: Path) -> Any:
    """The value that a rank left."""
    import cloudpickle

    try:
        return cloudpickle.loads(file.read_bytes())
    except Exception as error:  # unpickling runs the objects' own code
        raise LaunchError(f"What the function returned can't be read here: {type(error).__name__}: {error}") from error


def _default_ranks() -> int:
    from drivetrain._engine.availability import detect_devices
    from drivetrain._engine.plan import Arguments
    from drivetrain._engine.resolve import resolve
    from drivetrain._plugins import get_registry
    from drivetrain.specs import ProcessInfo

    registry = get_registry()
    availability = detect_devices(registry.specs("device").values())
    environ = {**os.environ, variable("backend"): "auto"}
    plan = resolve(Arguments(process=ProcessInfo()), registry=registry, environ=environ, availability=availability)
    return 1 if plan.device.torch_type == "cpu" else availability.status(plan.device.name).count


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the duration of a call in this process."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
