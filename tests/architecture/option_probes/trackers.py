"""Bounds of tracking, and the options of the trackers that come with the repository."""

from __future__ import annotations

import contextlib
import logging
import struct

from drivetrain import Accelerator
from drivetrain._builtin.jsonl import JsonlOptions
from drivetrain.tracking import TrackingOptions
from drivetrain_tensorboard.options import TensorBoardOptions

from . import effect
from .scene import Recorder, files, quiet, soon

# -- bounds ----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tracking(folder, tracker, **options):
    """An Accelerator that logs to a tracker of ours, within bounds."""
    bounds = TrackingOptions(**{"interval": 0.0, "spool_directory": str(folder / "spool"), **options})
    logging.getLogger("drivetrain.tracking").setLevel(logging.CRITICAL)
    accelerator = Accelerator(cpu=True, log_with=tracker, project_dir=folder, kwargs_handlers=[bounds])
    try:
        accelerator.init_trackers("probe")
        yield accelerator
    finally:
        tracker.released.set()
        accelerator.end_training()
        logging.getLogger("drivetrain.tracking").setLevel(logging.NOTSET)


def spooled(folder):
    return any(f.startswith("spool/") for f in files(folder))


@effect("TrackingOptions.start_timeout", (30.0, True), (0.01, False))
def start_timeout(value, folder):
    """Whether the run is open when init_trackers returns."""
    tracker = Recorder(start_seconds=0.3)
    with tracking(folder, tracker, start_timeout=value):
        return tracker.started


@effect("TrackingOptions.flush_timeout", (30.0, False), (0.01, True))
def flush_timeout(value, folder):
    """Whether a checkpoint puts on disk what a slow tracker hasn't taken."""
    with tracking(folder, Recorder(slow=0.3), flush_timeout=value) as accelerator:
        accelerator.log({"loss": 1.0})
        accelerator.save_state(folder / "saved")
        return spooled(folder)


@effect("TrackingOptions.finish_timeout", (30.0, 1), (0.01, 0))
def finish_timeout(value, folder):
    """Rows that a slow tracker has at the end."""
    tracker = Recorder(slow=0.3)
    with tracking(folder, tracker, finish_timeout=value) as accelerator:
        accelerator.log({"loss": 1.0})
    return len(tracker.rows)


@effect("TrackingOptions.hang_timeout", (60.0, False), (0.05, True))
def hang_timeout(value, folder):
    tracker = Recorder(held=True)
    with tracking(folder, tracker, hang_timeout=value) as accelerator:
        accelerator.log({"loss": 1.0})
        soon(lambda: tracker.attempts)
        soon(lambda: False, 0.2)
        accelerator.log({"loss": 2.0})
        return soon(lambda: spooled(folder), 3.0 if value < 1 else 0.3)


@effect("TrackingOptions.retry_after", (0.05, True), (60.0, False))
def retry_after(value, folder):
    tracker = Recorder(failures=1)
    with tracking(folder, tracker, retry_after=value) as accelerator:
        accelerator.log({"loss": 1.0})
        return soon(lambda: tracker.rows, 3.0 if value < 1 else 0.3)


@effect("TrackingOptions.retry_at_most", (0.05, True), (300.0, False))
def retry_at_most(value, folder):
    """Six attempts come soon, unless the time between them doubles."""
    tracker = Recorder(failures=100)
    with tracking(folder, tracker, retry_after=0.05, retry_at_most=value) as accelerator:
        accelerator.log({"loss": 1.0})
        return soon(lambda: tracker.attempts >= 6, 5.0 if value < 1 else 0.8)


@effect("TrackingOptions.most_pending", (200_000, False), (10, True))
def most_pending(value, folder):
    tracker = Recorder(held=True)
    with tracking(folder, tracker, most_pending=value) as accelerator:
        for i in range(50):
            accelerator.log({"loss": float(i)})
        return soon(lambda: spooled(folder), 3.0 if value < 50 else 0.3)


@effect("TrackingOptions.interval", (0.0, True), (30.0, False))
def interval(value, folder):
    tracker = Recorder()
    with tracking(folder, tracker, interval=value) as accelerator:
        accelerator.log({"loss": 1.0})
        return soon(lambda: tracker.rows, 3.0 if value < 1 else 0.3)


@effect("TrackingOptions.run_facts", (False, False), (True, True))
def run_facts(value, folder):
    """Whether checkpoints come with memory."""
    tracker = Recorder()
    with tracking(folder, tracker, run_facts=value) as accelerator:
        accelerator.save_state(folder / "saved")
    return any("memory/process_rss" in values for _, values in tracker.rows)


@effect("TrackingOptions.reduce_timeout", (0.1, [True, False]), (600.0, [False, False]), ranks=2)
def reduce_timeout(value, folder):
    """Whether a call that a process doesn't take part in, and nothing proves that it won't, fails on the other."""
    import torch.distributed as dist

    with tracking(folder / str(dist.get_rank()), Recorder(), reduce_timeout=value) as accelerator:
        if accelerator.is_main_process:
            accelerator.log({"loss": 1.0}, reduce="mean")
        failed = soon(lambda: accelerator._hub._reducer.error, 5.0 if value < 1 else 3.0)
        accelerator._hub._reducer.error = None
        dist.barrier()
        if not accelerator.is_main_process:
            accelerator.log({"loss": 1.0}, reduce="mean")  # the other one's call, if it still waits
        accelerator._hub._reducer.wait(20.0)  # until it is through, or has failed
        accelerator._hub._reducer.error = None
        return bool(failed)


@effect("TrackingOptions.spool_directory", ("a", {"a"}), ("b", {"b"}))
def spool_directory(value, folder):
    with tracking(folder, Recorder(failures=1), spool_directory=str(folder / value), retry_after=60.0) as accelerator:
        accelerator.log({"loss": 1.0})
        soon(lambda: files(folder))
        return {f.split("/")[0] for f in files(folder)}


# -- the builtin tracker, and TensorBoard's -------------------------------------------------------------------------------------


@contextlib.contextmanager
def logging_with(folder, name, options):
    with quiet():
        accelerator = Accelerator(cpu=True, log_with=name, project_dir=folder, kwargs_handlers=[options])
    accelerator.init_trackers("probe")
    yield accelerator
    accelerator.end_training()


@effect("JsonlOptions.run_name", ("first", "first"), ("second", "second"))
def jsonl_run_name(value, folder):
    with logging_with(folder, "jsonl", JsonlOptions(run_name=value)):
        pass
    (about,) = [f for f in files(folder) if f.endswith("run.json")]
    return about.split("/")[1]


def event_files(folder, **options):
    with logging_with(folder, "tensorboard", TensorBoardOptions(**options)) as accelerator:
        accelerator.log({"loss": 1.0}, step=5)
    return [f for f in files(folder) if "events" in f]


@effect("TensorBoardOptions.run_name", ("first", "first"), ("second", "second"))
def tensorboard_run_name(value, folder):
    (path,) = event_files(folder, run_name=value)
    return path.split("/")[1]


@effect("TensorBoardOptions.log_dir", ("a", "a"), ("b", "b"))
def log_dir(value, folder):
    (path,) = event_files(folder, log_dir=str(folder / value))
    return path.split("/")[0]


@effect("TensorBoardOptions.filename_suffix", (".a", ".a"), (".b", ".b"))
def filename_suffix(value, folder):
    (path,) = event_files(folder, filename_suffix=value)
    return path[-2:]


@effect("TensorBoardOptions.purge_step", (3, 3), (7, 7))
def purge_step(value, folder):
    """The step from which on the file voids what an earlier one says."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    (path,) = event_files(folder, purge_step=value)
    content = (folder / path).read_bytes()
    steps = []
    while content:
        (length,) = struct.unpack("<Q", content[:8])
        event = Event.FromString(content[12 : 12 + length])
        content = content[16 + length :]
        if event.session_log.status == SessionLog.START:
            steps.append(event.step)
    return steps[0]


@effect("TensorBoardOptions.flush_secs", (1, 1), (120, 120))
def flush_secs(value, folder):
    """Seconds until TensorBoard's own writer flushes a file, which without TensorFlow's files has nothing to flush."""
    with logging_with(folder, "tensorboard", TensorBoardOptions(flush_secs=value)) as accelerator:
        writer = accelerator.get_tracker("tensorboard", unwrap=True).file_writer.event_writer
        return writer._async_writer._worker._flush_secs


@effect("TensorBoardOptions.max_queue", (1, 1), (50, 50))
def max_queue(value, folder):
    """Events for which TensorBoard's own writer has room."""
    with logging_with(folder, "tensorboard", TensorBoardOptions(max_queue=value)) as accelerator:
        writer = accelerator.get_tracker("tensorboard", unwrap=True).file_writer.event_writer
        return writer._async_writer._byte_queue.maxsize
