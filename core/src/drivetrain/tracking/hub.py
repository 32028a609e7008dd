"""The hub: what ``accelerator.log`` and its family talk to.

On the main process each tracker has a background thread (see `drivetrain.tracking.worker`). A call on the training thread takes a snapshot of
the values, puts it into the trackers' queues and returns. What the training thread never does is wait for a tracker:

- a queue over its bound, or that of a tracker that hangs, is moved to a spool file on disk by another thread;
- a tracker that fails gets its values from the spool, in order, once it works again; what remains at the end stays in the file;
- only `TrackerHub.start`, `TrackerHub.flush` and `TrackerHub.finish` wait, each with a bound.

On other ranks there are no threads and every call returns at once.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from drivetrain.config.options import nearest
from drivetrain.errors import ConfigurationError, DrivetrainError, TrackerError
from drivetrain.interfaces.tracker import TrackerContext
from drivetrain.specs import ProcessInfo, TrackerSpec
from drivetrain.tracking.calls import LoggingCalls, LogKwargs, as_step
from drivetrain.tracking.compat import GeneralTrackerAdapter
from drivetrain.tracking.entries import check_entries, check_options, make_spool, make_tracker
from drivetrain.tracking.exits import ExitGuard
from drivetrain.tracking.handle import InertTracker, TrackerHandle
from drivetrain.tracking.keeper import Keeper
from drivetrain.tracking.options import TrackingOptions
from drivetrain.tracking.record import Record
from drivetrain.tracking.reducer import Reducer, check_reduction, make_call, reduce_rows
from drivetrain.tracking.shared_runs import RunBoard
from drivetrain.tracking.values import ReadLater, Snapshot
from drivetrain.tracking.worker import Lane

__all__ = ["TrackerHub"]

logger = logging.getLogger("drivetrain.tracking")


class TrackerHub(LoggingCalls):
    """All trackers of one Accelerator.

    Args:
        entries: Specs, and trackers that users wrote (`drivetrain.tracking.GeneralTracker`).
        process: Who this process is.
        logging_dir: Where trackers write that need a directory.
        read_later: The backend's reader of tensors on an accelerator.
        settings: Resolved options objects of specs, by class name.
        options: Bounds.
        key: Tells this hub apart from others of the job, the same on all processes; default: the order in which they are made.

    Raises:
        ConfigurationError: If two have the same name, one needs a directory and there is none, or an entry is something else.

    Example:
        >>> import tempfile
        >>> from drivetrain.tracking import read_run
        >>> spec = TrackerSpec(name="jsonl", target="drivetrain._builtin.jsonl:JsonlTracker", needs_directory=True)
        >>> hub = TrackerHub.from_plan([spec], logging_dir=tempfile.mkdtemp())
        >>> hub.start("demo", {"lr": 0.1})
        >>> hub.log({"loss": 0.5}, step=1)
        >>> directory = hub.get("jsonl", unwrap=True)
        >>> hub.finish()
        True
        >>> read_run(directory).series("loss")
        [(1, 0.5)]
    """

    def __init__(
        self,
        entries: Sequence[TrackerSpec | Any],
        *,
        process: ProcessInfo | None = None,
        logging_dir: str | Path | None = None,
        read_later: ReadLater | None = None,
        settings: Mapping[str, Any] | None = None,
        options: TrackingOptions | None = None,
        key: str | None = None,
    ) -> None:
        self.process = process if process is not None else ProcessInfo()
        self.logging_dir = Path(logging_dir) if logging_dir is not None else None
        self.options = options if options is not None else TrackingOptions()
        self._settings = dict(settings or {})
        self._entries = check_entries(entries, self.logging_dir)
        self._aliases = {
            alias.replace("-", mark): spec.name
            for spec, _ in self._entries.values()
            for alias in (spec.name, *spec.aliases)
            for mark in "-_"
        }
        self._snapshot = Snapshot(read_later)
        self._keeper = Keeper()
        self._board = RunBoard()
        self._reducer = Reducer(self.process, self.options.reduce_timeout, key)
        self._lock = threading.RLock()  # one order of records for all trackers, also when several threads log
        self._lanes: tuple[Lane, ...] = ()
        self._ended: tuple[Lane, ...] = ()
        self._status = "finished"
        self._warned: set[str] = set()
        self._guard = ExitGuard(on_exit=self.finish, on_exception=self._failed, on_signal=self._terminated)

    @classmethod
    def from_plan(
        cls,
        specs_or_objects: Sequence[TrackerSpec | Any],
        *,
        process: ProcessInfo | None = None,
        logging_dir: str | Path | None = None,
        read_later: ReadLater | None = None,
        settings: Mapping[str, Any] | None = None,
        options: TrackingOptions | None = None,
        key: str | None = None,
    ) -> TrackerHub:
        """Make a hub of what resolve chose; the arguments are those of the class."""
        return cls(
            specs_or_objects,
            process=process,
            logging_dir=logging_dir,
            read_later=read_later,
            settings=settings,
            options=options,
            key=key,
        )

    # -- life ------------------------------------------------------------------------------------------------------------------

    def start(
        self,
        project_name: str,
        config: Mapping[str, Any] | None = None,
        init_kwargs: LogKwargs | None = None,
        run_ids: Mapping[str, str] | None = None,
        *,
        resume_step: int | None = None,
    ) -> None:
        """Open the runs. Runs that are still open are finished first.

        A run that can't be opened because of the system's trouble (no network), or not within ``options.start_timeout``, is one warning: its
        values are kept and delivered once it opens.

        Args:
            project_name: Name of the project.
            config: Hyperparameters, nested or not.
            init_kwargs: What to pass on to each tracker, by its name.
            run_ids: Ids of runs to go on with, by tracker, from `run_ids`.
            resume_step: The last step that the checkpoint holds. Rows of later steps that the resumed runs have already are void.

        Raises:
            TrackerError: If a tracker can't be made or its package is missing.
            DrivetrainError: What a tracker raises for the user's mistakes.
        """
        self.finish()
        self._status = "finished"
        self._board.next_start()
        init_kwargs = self._by_name("init_kwargs", init_kwargs)
        lanes = []
        for spec, user_object in self._entries.values():
            options = dict(init_kwargs.get(spec.name, {}))
            context = TrackerContext(
                project_name=project_name,
                directory=self.logging_dir,
                run_id=(run_ids or {}).get(spec.name),
                resume_step=resume_step,
                options=options,
                settings=self._settings.get(spec.options.rpartition(":")[2]) if spec.options else None,
                process=self.process,
            )
            tracker = make_tracker(spec, user_object, context)
            if tracker is not None and self.process.rank != 0 and context.run_id is None and user_object is None:
                run_id = self._board.fetch(spec.name, self.options.start_timeout)
                tracker = make_tracker(spec, None, replace(context, run_id=run_id))
            if tracker is not None:
                spool = make_spool(tracker, self.options.spool_directory)
                lanes.append(Lane(tracker, spool=spool, options=self.options, on_trouble=self._keeper.watch))
        if self.process.rank == 0:
            shared = {lane.name: lane.tracker.run_id for lane in lanes if lane.tracker.spec.every_rank}
            self._board.publish({name: run_id for name, run_id in shared.items() if run_id is not None})
        if lanes:
            self._begin(lanes, config)

    def flush(self, timeout: float | None = None) -> bool:
        """Make all that was logged durable: with the trackers, or in their spools on disk.

        Args:
            timeout: Seconds to wait; default ``options.flush_timeout``. What isn't stored by then goes to the spools.

        Returns:
            Whether the trackers have it all.
        """
        lanes = self._lanes
        numbers = [lane.request_flush() for lane in lanes]
        limit = self.options.flush_timeout if timeout is None else timeout
        done = _wait(lambda: all(map(Lane.flushed, lanes, numbers)), limit)
        if not done:
            self._spill([lane for lane, number in zip(lanes, numbers, strict=True) if not lane.flushed(number)])
        return done and not any(lane.spool.pending for lane in lanes)

    def outlive_signal(self) -> None:
        """From now on a SIGTERM makes what was logged durable and no more: the training loop ends the process when it has stopped."""
        self._guard.outlives_signal = True

    def finish(self, timeout: float | None = None) -> bool:
        """Deliver what waits, close the runs and end the threads. Does nothing when no run is open.

        Args:
            timeout: Seconds to wait; default ``options.finish_timeout``. What isn't delivered by then stays in the spools, and the threads
                are left behind.

        Returns:
            Whether the trackers have it all.
        """
        lanes, self._lanes = self._lanes, ()
        if not lanes:
            return True
        self._ended = lanes
        limit = self.options.finish_timeout if timeout is None else timeout
        for lane in lanes:
            lane.request_stop(self._status)
        _wait(lambda: all(lane.ended.is_set() for lane in lanes), limit)
        self._spill([lane for lane in lanes if not lane.ended.is_set()])
        self._guard.remove()
        for lane in lanes:
            if lane.spool.pending:
                logger.warning(
                    "%d records for the tracker %r were not delivered; they are in %s.",
                    lane.spool.pending,
                    lane.name,
                    lane.spool.path,
                )
        return all(lane.ended.is_set() and not lane.spool.pending for lane in lanes)

    # -- logging ---------------------------------------------------------------------------------------------------------------

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: LogKwargs | None = None,
        *,
        reduce: str | None = None,
        weight: Any = None,
        only: str | None = None,
    ) -> None:
        """Store one row of values.

        Args:
            values: Numbers, tensors and arrays of one element (of any dtype, on any device), texts, nested mappings of these. Read at the call:
                changing a tensor afterwards changes nothing.
            step: Any number of the user's; may be lower than an earlier one.
            log_kwargs: Further keywords for each tracker, by its name.
            reduce: "mean", "sum", "max" or "min" of all processes' values instead of the main one's: then every process must call it.
            weight: Of this process's values in the mean: their number of items. A number, a 0-d tensor, or a mapping of these by name.
            only: Name of the one tracker to store it with.

        Raises:
            TrackerError: If ``values`` isn't a mapping, or holds a sharded tensor, or a text that is to be reduced.
            ConfigurationError: If a tracker doesn't know one of its keywords.
            DistributedOperationError: If an earlier call with ``reduce`` failed: a process didn't take part, or called something else.
        """
        if reduce is not None or weight is not None:
            self._log_reduced(values, step, log_kwargs, reduce, weight, only)
            return
        lanes = self._lanes
        if not lanes:
            if self._entries:
                self._unheard("log")
            return
        try:
            row, pending, weight = self._snapshot.scalars(values)
        except AttributeError:
            if isinstance(values, Mapping):
                raise
            raise TrackerError(f"log() takes a mapping of names to values, not a {type(values).__name__}.") from None
        if step is not None and type(step) is not int:
            step = as_step(step)
        record = Record("row", "", row, step, time.time(), weight, pending)
        if log_kwargs is not None or only is not None:
            self._enqueue(record, log_kwargs, only)
            return
        now = time.monotonic()
        with self._lock:
            for lane in lanes:
                lane.put(record, now)

    def met(self, count: int = 1) -> None:
        """Note that all processes have met (an optimizer step; two for a barrier or gather), see `drivetrain.tracking.reducer`."""
        self._reducer.met(count)

    def end(self) -> None:
        """Finish, at the end of training: this process makes no more calls with ``reduce``.

        Raises:
            DistributedOperationError: If a call with ``reduce`` has failed. The runs are closed all the same.
        """
        self._reducer.leave()
        self._reducer.wait(self.options.finish_timeout)
        self.finish()
        self._reducer.close()
        self._reducer.check()

    def _log_reduced(
        self, values: Any, step: Any, log_kwargs: LogKwargs | None, reduce: str | None, weight: Any, only: str | None
    ) -> None:
        """Take this process's part in a reduction; on the main one, the row waits in its place for the results."""
        if reduce is None:
            raise ConfigurationError("log(weight=...) weighs a mean over processes: say reduce='mean'.")
        check_reduction(reduce, weight)
        if not isinstance(values, Mapping):
            raise TrackerError(f"log() takes a mapping of names to values, not a {type(values).__name__}.")
        call, results = make_call(self._snapshot, values, reduce, weight)
        if self.process.world_size > 1:
            self._reducer.submit(call)
        else:
            numbers, weights = call.read()
            call.future.set_result(reduce_rows(reduce, [numbers], [weights]))
        if self._hears("log") and self.process.rank == 0:
            record = self._record("row", "", dict.fromkeys(call.names), step, len(call.names))
            record.pending = results
            self._enqueue(record, log_kwargs, only)

    # -- trackers --------------------------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the chosen trackers, on every rank."""
        return tuple(self._entries)

    @property
    def trackers(self) -> list[Any]:
        """The trackers of the open runs as `get` returns them; empty where none runs."""
        return [self.get(lane.name) for lane in self._lanes]

    def get(self, name: str, unwrap: bool = False) -> Any:
        """The tracker of that name.

        Args:
            name: One of `names`.
            unwrap: Return the system's own run object instead, once the run is open.

        Returns:
            A `drivetrain.tracking.handle.TrackerHandle`, or the user's own tracker; on ranks where it doesn't run, an object whose methods
            do nothing.

        Raises:
            TrackerError: For an unknown name; if no run is open; or (unwrap) if the run isn't open yet.
        """
        name = self._aliases.get(name, name)
        if name not in self._entries:
            raise TrackerError(
                f"There is no tracker {name!r}.{nearest(name, self.names)}"
                if self._entries
                else f"There is no tracker {name!r}: none was chosen. Pass log_with={name!r} to the Accelerator."
            )
        lane = next((lane for lane in self._lanes or self._ended if lane.name == name), None)
        if lane is None:
            if self.process.rank != 0:
                return InertTracker(name)
            raise TrackerError(f"The tracker {name!r} has no run yet. Call init_trackers() first.")
        if not unwrap:
            tracker = lane.tracker
            return tracker.wrapped if isinstance(tracker, GeneralTrackerAdapter) else TrackerHandle(self, tracker)
        if not lane.started.wait(self.options.start_timeout):
            raise TrackerError(f"The run of tracker {name!r} isn't open after {self.options.start_timeout} s.")
        return lane.tracker.run

    def run_ids(self) -> dict[str, str]:
        """Ids of the open runs by tracker, for checkpoints."""
        ids = {lane.name: lane.tracker.run_id for lane in self._lanes}
        return {name: run_id for name, run_id in ids.items() if run_id is not None}

    # -- inside ----------------------------------------------------------------------------------------------------------------

    def _begin(self, lanes: list[Lane], config: Mapping[str, Any] | None) -> None:
        self._lanes = tuple(lanes)
        self._ended = ()
        if config:
            self.log_config(config)
        for lane in lanes:
            lane.begin()
        limit = time.monotonic() + self.options.start_timeout
        for lane in lanes:
            if not lane.started.wait(max(0.0, limit - time.monotonic())):
                lane.warn(
                    "start",
                    "The tracker %r hasn't opened its run after %g s. Training goes on; values are kept until it has.",
                    lane.name,
                    self.options.start_timeout,
                )
        self._guard.install()  # after the systems' own exit handlers: handlers registered last run first
        if "fork" not in self._warned:
            self._warned.add("fork")
            _forget_in_children(self)
        for lane in lanes:
            if lane.start_error is not None:
                self._status = "failed"
                self.finish()
                if isinstance(lane.start_error, DrivetrainError):
                    raise lane.start_error
                raise TrackerError(
                    f"The tracker {lane.name!r} needs a package that can't be imported: {lane.start_error}. Install it, or choose "
                    "another tracker with log_with."
                ) from lane.start_error

    def _enqueue(self, record: Record, log_kwargs: LogKwargs | None, only: str | None) -> None:
        log_kwargs = self._by_name("log_kwargs", log_kwargs)
        now = time.monotonic()
        with self._lock:
            for lane in self._lanes:
                if only is not None and lane.name != only:
                    continue
                options = dict(log_kwargs.get(lane.name, {}))
                mine = record
                if options:
                    check_options(lane.tracker, options)
                    mine = Record(
                        record.kind,
                        record.name,
                        record.payload,
                        record.step,
                        record.time,
                        record.weight,
                        record.pending,
                        options,
                    )
                lane.put(mine, now)

    def _hears(self, method: str) -> bool:
        if self._lanes:
            return True
        if self._entries:
            self._unheard(method)
        return False

    def _unheard(self, method: str) -> None:
        """Warn once, on the main process, that nothing is stored: no run is open."""
        if self.process.rank == 0 and "unheard" not in self._warned:
            self._warned.add("unheard")
            when = "after end_training()" if self._ended else "before init_trackers()"
            logger.warning("%s() was called %s: its values are not stored.", method, when)

    def _by_name(self, what: str, by_tracker: LogKwargs | None) -> LogKwargs:
        """Keywords by the trackers' own names; a warning, once, about those for a tracker that wasn't chosen: scripts keep those of several."""
        named = {self._aliases.get(name, name): keywords for name, keywords in (by_tracker or {}).items()}
        for name in named:
            if name not in self._entries and f"{what} {name}" not in self._warned and self.process.rank == 0:
                self._warned.add(f"{what} {name}")
                logger.warning("%s for %r are not used: the trackers are %s.", what, name, ", ".join(self.names))
        return named

    def _spill(self, lanes: Sequence[Lane], timeout: float = 5.0) -> None:
        """Put what waits for these lanes on disk, on another thread, for the disk may hang too."""
        if not lanes:
            return

        def spill() -> None:
            for lane in lanes:
                lane.warn(
                    "hung",
                    "The tracker %r doesn't answer in time; what it hasn't taken is kept in %s.",
                    lane.name,
                    lane.spool.path,
                )
                lane.spill()
                lane.note_run()
                lane.sync()

        thread = threading.Thread(target=spill, name="drivetrain-tracking-spill", daemon=True)
        thread.start()
        thread.join(timeout)

    # -- the end of the process ------------------------------------------------------------------------------------------------

    def _failed(self) -> None:
        """An uncaught exception. In an interactive session the process goes on."""
        if hasattr(sys, "ps1"):
            self.flush()
        else:
            self._status = "failed"
            self.finish()

    def _terminated(self, ends: bool) -> None:
        """SIGTERM, between any two instructions of the main thread, which may hold the hub's lock: take none."""
        if ends:
            self._status = "killed"
            self.finish(self.options.flush_timeout)
        else:
            self.flush()


def _wait(done: Callable[[], bool], timeout: float) -> bool:
    """Wait without taking a lock, so that a signal handler may."""
    limit = time.monotonic() + timeout
    pause = 0.0005
    while not done():
        if time.monotonic() >= limit:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.01)
    return True


def _forget_in_children(hub: TrackerHub) -> None:
    """A forked child has none of the threads: there the hub has no run."""
    reference = weakref.ref(hub)

    def forget() -> None:
        child = reference()
        if child is not None:
            child._lanes = child._ended = ()
            child._entries = {}

    with contextlib.suppress(AttributeError):  # systems without fork
        os.register_at_fork(after_in_child=forget)
