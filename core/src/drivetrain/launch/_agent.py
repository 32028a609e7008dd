"""Our ranks under torch's elastic agent: it does rendezvous, rank assignment, restarts and the end; we own the processes.

Imports torch: `drivetrain.launch.local` imports this module as late as it can.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from drivetrain.config.settings import STOPPED_FILE
from drivetrain.errors import ConfigurationError
from drivetrain.interfaces.launcher import LaunchRequest
from drivetrain.launch._checks import command_line, local_world_size
from drivetrain.launch._environment import rank_environment
from drivetrain.launch._first_time import first_time
from drivetrain.launch._processes import FAILURE_GRACE, RankProcesses
from drivetrain.launch.options import LocalOptions

__all__ = ["Agent", "Loopback", "rendezvous_of"]

_HOST = "127.0.0.1"
_NOT_SHARED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class Loopback(RendezvousHandler):
    """The rendezvous of one machine, which has nobody to wait for: a fresh store for each attempt.

    The store listens on the loopback address alone: nobody outside can reach it, and no port can be taken from under it.

    Args:
        port: A port to use, or 0 for a free one.
        run_id: Name of the run.
    """

    def __init__(self, port: int, run_id: str) -> None:
        self._port = port
        self._run_id = run_id
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        """Name of this kind of rendezvous."""
        return "loopback"

    @property
    def use_agent_store(self) -> bool:
        """Ranks meet at the agent's store."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Open the store of the next attempt."""
        self._store = None  # closes the one before, which may hold the port
        listening = socket.create_server((_HOST, self._port))
        port = listening.getsockname()[1]
        self._store = TCPStore(
            _HOST,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(minutes=5),
            master_listen_fd=listening.detach(),
        )
        return RendezvousInfo(PrefixStore(self._run_id, self._store), 0, 1, RendezvousStoreInfo(_HOST, port))

    def is_closed(self) -> bool:
        """Never: there is one participant."""
        return False

    def set_closed(self) -> None:
        """Nothing to do: there is one participant."""

    def num_nodes_waiting(self) -> int:
        """Nobody else can come."""
        return 0

    def get_run_id(self) -> str:
        """Name of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Close the store."""
        self._store = None
        return True


class Anew(RendezvousHandler):
    """A rendezvous whose every round says anew where ranks meet.

    torch's own keeps that from the first round on: a machine that joins later waits for it forever, and one that was rank 0 and isn't any
    more stays with its old store. Its switch against that is a variable, set here for the duration of the call alone.

    Args:
        inner: torch's rendezvous.
    """

    def __init__(self, inner: RendezvousHandler) -> None:
        self._inner = inner

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other machines."""
        before = os.environ.get(_NOT_SHARED)
        os.environ[_NOT_SHARED] = "1"
        try:
            return self._inner.next_rendezvous()
        finally:
            if before is None:
                del os.environ[_NOT_SHARED]
            else:
                os.environ[_NOT_SHARED] = before

    @property
    def use_agent_store(self) -> bool:
        """Rank 0 opens a store of its own."""
        return False

    def get_backend(self) -> str:
        """Name of torch's rendezvous."""
        return self._inner.get_backend()

    def is_closed(self) -> bool:
        """Whether the job is over."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """Say that the job is over."""
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """Machines that want to join."""
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        """Name of the run."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """Let go of everything."""
        return self._inner.shutdown()


def rendezvous_of(request: LaunchRequest, options: LocalOptions) -> RendezvousHandler:
    """How the machines of a request meet.

    On several machines torch's "static" rendezvous is the default, and "c10d" where restarts are wanted or machines may come and go:
    it gives each attempt a store of its own.
    """
    if request.num_machines == 1 and not request.elastic:
        return Loopback(request.main_process_port or 0, options.rdzv_id)
    several_tries = request.max_restarts or request.elastic
    backend = options.rdzv_backend or ("c10d" if several_tries else "static")
    settings: dict[str, Any] = {"timeout": 900, **options.rdzv_conf}
    if backend == "static" and request.elastic:
        raise ConfigurationError("rdzv_backend='static' needs all machines to be there. Leave it out, or use 'c10d'.")
    if backend == "static":
        settings["rank"] = request.machine_rank
    elif (
        backend == "c10d" and not request.elastic
    ):  # elastic: machines have no ranks of their own, torch finds the host
        settings.setdefault("is_host", request.machine_rank == 0)
    parameters = RendezvousParameters(
        backend=backend,
        endpoint=f"{request.main_process_ip}:{request.main_process_port}",
        run_id=options.rdzv_id,
        min_nodes=request.min_machines or request.num_machines,
        max_nodes=request.num_machines,
        local_addr=options.local_addr,
        **settings,
    )

    def make() -> RendezvousHandler:
        handler = get_rendezvous_handler(parameters)
        return handler if backend == "static" else Anew(handler)

    try:
        if not options.lookup_timeout:
            return make()
        return first_time(make, machine=request.machine_rank, seconds=options.lookup_timeout)
    except ValueError as error:
        raise ConfigurationError(
            f"Machines can't meet with rdzv_backend={backend!r} and rdzv_conf={dict(options.rdzv_conf)}: {error} "
            "Leave it out, or use 'static' or 'c10d'."
        ) from None


class Agent(SimpleElasticAgent):
    """Runs the ranks of one machine.

    Args:
        request: What to start.
        options: The launcher's own settings.
        environment: Variables that all ranks share.
        processes: Where they are started.
        interrupt: The signal that the launcher got, or None, at any time.
        hurry: Set when the user doesn't want to wait any more.
        grace: Seconds that ranks have to end after a signal to the launcher.
        on_restart: Called before ranks are started again: how many restarts after failures there have been, and the new world size.
    """

    def __init__(
        self,
        request: LaunchRequest,
        options: LocalOptions,
        environment: Mapping[str, str],
        processes: RankProcesses,
        *,
        interrupt: Callable[[], int | None],
        hurry: threading.Event,
        grace: float,
        on_restart: Callable[[int, int], None],
    ) -> None:
        handler = rendezvous_of(request, options)
        static = request.num_machines > 1 and handler.get_backend() == "static"
        spec = WorkerSpec(
            role=options.role,
            local_world_size=local_world_size(request),
            rdzv_handler=handler,
            entrypoint=sys.executable,
            max_restarts=request.max_restarts,
            monitor_interval=0.01,  # it waits in _monitor_workers, which wakes when a rank ends
            master_addr=request.main_process_ip if static else None,
            master_port=request.main_process_port if static else None,
        )
        super().__init__(spec)
        self._again = False
        self._argv = command_line(request)
        self._environment = environment
        self._processes = processes
        self._interrupt = interrupt
        self._hurry = hurry
        self._grace = grace
        self._on_restart = on_restart

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        spec = worker_group.spec
        attempt = spec.max_restarts - self._remaining_restarts
        environments = {}
        for worker in worker_group.workers:
            environments[worker.global_rank] = {
                **self._environment,
                **rank_environment(
                    rank=worker.global_rank,
                    world_size=worker.world_size,
                    local_rank=worker.local_rank,
                    local_world_size=spec.local_world_size,
                    master_addr=str(worker_group.master_addr),
                    master_port=int(worker_group.master_port or 0),
                ),
                "GROUP_RANK": str(worker_group.group_rank),
                "GROUP_WORLD_SIZE": str(worker_group.group_world_size),
                "ROLE_NAME": spec.role,
                "ROLE_RANK": str(worker.role_rank),
                "ROLE_WORLD_SIZE": str(worker.role_world_size),
                "TORCHELASTIC_RESTART_COUNT": str(attempt),
                "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
                "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
                "TORCHELASTIC_USE_AGENT_STORE": str(spec.rdzv_handler.use_agent_store),
            }
        if self._again:
            self._on_restart(attempt, worker_group.workers[0].world_size)
        self._again = True
        self._processes.start(environments, self._argv)
        pids = self._processes.pids
        return {worker.local_rank: pids[worker.global_rank] for worker in worker_group.workers}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        outcome = self._processes.wait(0.5)
        if outcome is None:
            return RunResult(state=WorkerState.HEALTHY)
        if outcome:
            return RunResult(
                state=WorkerState.SUCCEEDED, return_values={w.global_rank: None for w in worker_group.workers}
            )
        self._processes.locate()
        self._processes.stop(signal.SIGTERM, grace=FAILURE_GRACE, hurry=self._hurry)
        pids = self._processes.pids
        failures = {
            f.rank: ProcessFailure(local_rank=i, pid=pids[f.rank], exitcode=f.returncode, error_file="")
            for i, f in enumerate(self._processes.failures())
        }
        return RunResult(state=WorkerState.FAILED, failures=failures)

    def _stop_workers(self, *_: Any, **__: Any) -> None:
        self._processes.stop(signal.SIGTERM, grace=FAILURE_GRACE, hurry=self._hurry)

    def _exit_barrier(self) -> None:
        """Wait for the other machines' ranks, unless a signal to some launcher ended them all: that one doesn't come here."""
        note = self._environment.get(STOPPED_FILE)
        if note is None or not Path(note).exists():
            super()._exit_barrier()  # type: ignore[no-untyped-call]

    def _shutdown(self, *_: Any, **__: Any) -> None:
        signum = self._interrupt()
        if signum is None:
            self._processes.stop(signal.SIGTERM, grace=FAILURE_GRACE, hurry=self._hurry)
        else:
            self._processes.stop(signum, grace=self._grace, hurry=self._hurry)
