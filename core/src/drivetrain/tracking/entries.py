"""From what was chosen to trackers: checking it, and making them with their spools."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain._lazy import load_target
from drivetrain.errors import ConfigurationError, TrackerError
from drivetrain.interfaces.tracker import Tracker, TrackerContext
from drivetrain.specs import TrackerSpec
from drivetrain.tracking.compat import GeneralTrackerAdapter
from drivetrain.tracking.encoding import safe_name
from drivetrain.tracking.redaction import Redactor
from drivetrain.tracking.spool import Spool

__all__ = ["check_entries", "check_options", "make_spool", "make_tracker"]


def check_entries(entries: Sequence[TrackerSpec | Any], logging_dir: Path | None) -> dict[str, tuple[TrackerSpec, Any]]:
    """Specs by name, with the user's object if it is one.

    Raises:
        ConfigurationError: If two have the same name, one needs a directory and there is none, or an entry is something else.
    """
    checked: dict[str, tuple[TrackerSpec, Any]] = {}
    for entry in entries:
        if isinstance(entry, TrackerSpec):
            spec, user_object = entry, None
        elif all(hasattr(entry, a) for a in ("name", "log", "store_init_configuration")) and not isinstance(
            entry, type
        ):
            spec, user_object = GeneralTrackerAdapter.spec_of(entry), entry
        else:
            raise ConfigurationError(
                f"log_with takes names of trackers and instances of GeneralTracker, not {entry!r}."
                + (" Give an instance of the class." if isinstance(entry, type) else "")
            )
        if spec.name in checked:
            raise ConfigurationError(f"The tracker {spec.name!r} was given twice. Trackers need different names.")
        if spec.needs_directory and logging_dir is None:
            raise ConfigurationError(
                f"The tracker {spec.name!r} writes files and needs a directory. Pass project_dir=... or "
                "ProjectConfiguration(logging_dir=...) to the Accelerator."
            )
        checked[spec.name] = (spec, user_object)
    return checked


def check_options(tracker: Tracker, options: Mapping[str, Any]) -> None:
    """Refuse keywords of ``log`` that the tracker doesn't honour.

    Raises:
        ConfigurationError: Naming the first one.
    """
    known = tracker.log_options
    for name in options:
        if name not in known and "*" not in known:
            listed = f"It knows {', '.join(sorted(known))}." if known else "It has none."
            raise ConfigurationError(f"The tracker {tracker.spec.name!r} has no log keyword {name!r}. {listed}")


def make_tracker(spec: TrackerSpec, user_object: Any, context: TrackerContext) -> Tracker | None:
    """The tracker, or None if it doesn't run on this rank.

    Raises:
        TrackerError: If its class can't be imported.
    """
    elsewhere = context.process.rank != 0
    if elsewhere and not spec.every_rank:
        return None
    if user_object is not None:
        return GeneralTrackerAdapter(spec, context, user_object)
    try:
        cls = load_target(spec.target)
    except (ImportError, AttributeError) as error:
        raise TrackerError(f"The tracker {spec.name!r} ({spec.target}) can't be imported: {error}") from error
    if elsewhere and not cls.runs_here(context):
        return None
    tracker: Tracker = cls(spec, context)
    return tracker


def make_spool(tracker: Tracker, directory: str | Path | None) -> Spool:
    """The tracker's spool, in a directory of the project's; no file is made yet.

    Args:
        tracker: The tracker.
        directory: Where; None: ``drivetrain-spool`` in the logging directory, or else here.
    """
    context, name = tracker.context, tracker.spec.name
    base = Path(directory) if directory else (context.directory or Path.cwd()) / "drivetrain-spool"
    unique = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"
    rank = context.process.rank
    header = {
        "tracker": name,
        "project": context.project_name,
        "run_id": context.run_id,
        "rank": rank,
        "directory": None if context.directory is None else str(context.directory.absolute()),
        "options": _keepable(context),
    }
    return Spool(base / safe_name(context.project_name) / f"{safe_name(name)}-{unique}-rank{rank}.jsonl", header)


def _keepable(context: TrackerContext) -> dict[str, Any]:
    """The tracker's options that may be written down: plain ones without secrets."""
    given = {**(context.settings.explicit() if context.settings is not None else {}), **context.options}
    redactor = Redactor()
    kept = {}
    for name, value in given.items():
        plain = list(value) if isinstance(value, (list, tuple)) else value
        items = plain if isinstance(plain, list) else plain.values() if isinstance(plain, dict) else [plain]
        names = plain if isinstance(plain, dict) else [name] * len(items)
        if all(
            isinstance(i, (str, int, float, bool, type(None))) and redactor.setting(str(n), i) == i
            for n, i in zip(names, items, strict=True)
        ):
            kept[name] = plain
    return kept
