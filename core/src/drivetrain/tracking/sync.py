"""Delivering what spools hold after the process that wrote them has ended: ``drivetrain tracking sync``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.errors import DrivetrainError, TrackerError
from drivetrain.interfaces.tracker import TrackerContext
from drivetrain.specs import ProcessInfo
from drivetrain.tracking.entries import make_tracker
from drivetrain.tracking.options import TrackingOptions
from drivetrain.tracking.spool import Spool
from drivetrain.tracking.worker import Lane

__all__ = ["SyncResult", "find_spools", "sync_spool"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncResult:
    """What became of one spool.

    Args:
        path: The file.
        tracker: Whose values.
        run_id: The run that they went to; None if it has none.
        delivered: Records that the tracker took.
        rejected: Records that it refused while it took others; they are in ``<path>.rejected``.
        remaining: Records that are still in the file.
    """

    path: Path
    tracker: str
    run_id: str | None
    delivered: int
    rejected: int
    remaining: int


def find_spools(path: str | Path) -> Iterator[Path]:
    """Spool files in a run's or project's directory, oldest first; a spool file itself is one.

    Raises:
        TrackerError: If there is no such path.

    Example:
        >>> list(find_spools("."))
        []
    """
    path = Path(path)
    if path.is_file():
        yield path
        return
    if not path.is_dir():
        raise TrackerError(f"There is no directory {path}.")
    found = []
    for file in path.rglob("*-rank*.jsonl"):
        with file.open("rb") as opened:
            if opened.read(19) == b'{"drivetrain_spool"':
                found.append((file.stat().st_mtime_ns, file))
    yield from (file for _, file in sorted(found))


def sync_spool(path: Path, registry: Any, *, timeout: float = 600.0) -> SyncResult:
    """Deliver what one spool holds to its tracker, in the run that it belongs to (a new one if none was ever opened).

    Args:
        path: The file.
        registry: The plugins' registry, which knows trackers by name.
        timeout: Seconds that it may take; what isn't delivered by then stays.

    Raises:
        TrackerError: If a process still writes to it, or its tracker was written in a script.
        DrivetrainError: If the tracker can't be used.
    """
    spool = Spool.reopen(path)
    try:
        header, before = spool.header, spool.pending
        spec = registry.specs("tracker").get(header["tracker"])
        if spec is None:
            try:
                spec = registry.get("tracker", header["tracker"])
            except DrivetrainError as error:
                raise TrackerError(
                    f"{path} holds values for the tracker {header['tracker']!r}, which can't be used here: {error} If it is one that a script defines, read "
                    "them with drivetrain.tracking.read_spool."
                ) from error
        directory = header.get("directory")
        context = TrackerContext(
            project_name=header["project"],
            directory=Path(directory) if directory else None,
            run_id=header.get("run_id"),
            options=header.get("options", {}),
            process=ProcessInfo(rank=header.get("rank", 0), world_size=header.get("rank", 0) + 1),
        )
        tracker = make_tracker(spec, None, context)
        if tracker is None:
            raise TrackerError(f"{path} holds values of rank {header['rank']}, on which {spec.name!r} doesn't run.")
        lane = Lane(tracker, spool=spool, options=TrackingOptions(), on_trouble=lambda lane: None)
        lane.request_stop(_status(header))
        lane.begin()
        lane.ended.wait(timeout)
        if lane.start_error is not None:
            raise lane.start_error
        return SyncResult(
            path=path,
            tracker=spec.name,
            run_id=tracker.run_id,
            delivered=before - spool.pending - spool.rejected,
            rejected=spool.rejected,
            remaining=spool.pending,
        )
    finally:
        spool.close()


def _status(header: dict[str, Any]) -> str:
    """How the run ended; one whose process was killed has no word of it."""
    status = header.get("status")
    return status if status in ("finished", "failed", "killed") else "killed"
