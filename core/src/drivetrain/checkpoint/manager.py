"""Saving and loading the state of a training session."""

from __future__ import annotations

import datetime
import logging
import math
import platform
import time
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drivetrain.checkpoint._agree import Agreement
from drivetrain.checkpoint._background import Background
from drivetrain.checkpoint.capture import Snapshot, capture
from drivetrain.checkpoint.commit import Target, Transaction, remove_old
from drivetrain.checkpoint.finding import Finder
from drivetrain.checkpoint.hooks import HookHandle, HookList, remaining
from drivetrain.checkpoint.layout import Plan
from drivetrain.checkpoint.location import Directory, Location, is_remote, locate
from drivetrain.checkpoint.manifest import Manifest
from drivetrain.checkpoint.mirror import Mirror
from drivetrain.checkpoint.naming import list_checkpoints, newest_checkpoint
from drivetrain.checkpoint.plain import encode
from drivetrain.checkpoint.project import ProjectConfiguration
from drivetrain.checkpoint.remote import RemoteTransaction
from drivetrain.checkpoint.restore import LoadReport, restore
from drivetrain.checkpoint.retention import Keep
from drivetrain.checkpoint.session import Session
from drivetrain.checkpoint.source import Source
from drivetrain.checkpoint.staging import Staging
from drivetrain.errors import CheckpointError
from drivetrain.interfaces.checkpoint_format import CheckpointFormat
from drivetrain.specs import CheckpointFormatSpec

__all__ = ["CheckpointManager", "SaveRecord", "safetensors_format"]

_logger = logging.getLogger(__name__)


def safetensors_format() -> CheckpointFormat:
    """The builtin format.

    Example:
        >>> safetensors_format().spec.name
        'safetensors'
    """
    from drivetrain.checkpoint.safetensors_format import SafetensorsFormat

    return SafetensorsFormat(CheckpointFormatSpec(name="safetensors", suffix=".safetensors"))


@dataclass(frozen=True, slots=True)
class SaveRecord:
    """A save that has ended well; what is worth logging.

    Args:
        path: The checkpoint.
        nbytes: Bytes of its files.
        seconds: From the call to the commit.
        blocked_seconds: How long the call kept the training waiting.
        counters: Steps, epochs and the like.
        metadata: As given to ``save_state``.
    """

    path: Location
    nbytes: int
    seconds: float
    blocked_seconds: float
    counters: Mapping[str, Any]
    metadata: Mapping[str, Any]


class CheckpointManager:
    """Saves and loads the state of a session. All methods are called on every rank, in the same order.

    Args:
        session: The session.
        project: Where checkpoints go when no directory is given.
        format: How tensors are stored; safetensors by default.
        find_format: Gives the format of a name, for checkpoints written in another one.
        notify: Called with "before_save", "after_save", "before_load" or "after_load" and the directory.
        before_commit: Called on each rank when its files are written, on the thread that wrote them: what must be durable no later than the checkpoint.
        on_saved: Called with each save that has ended well, on the thread that wrote it.
        keep: Which checkpoints to keep; by default the newest ``project.total_limit``.
        timeout: Seconds to wait for the slowest rank.
        visibility_timeout: Seconds until a directory that one rank made must be seen by the others.
    """

    def __init__(
        self,
        session: Session,
        *,
        project: ProjectConfiguration | None = None,
        format: CheckpointFormat | None = None,
        find_format: Callable[[str], CheckpointFormat] | None = None,
        notify: Callable[[str, Location], None] | None = None,
        before_commit: Callable[[], Any] | None = None,
        on_saved: Callable[[SaveRecord], None] | None = None,
        keep: Keep | None = None,
        timeout: float = 3600.0,
        visibility_timeout: float = 30.0,
    ) -> None:
        self.project = project or ProjectConfiguration()
        #: The last save that ended well, and what the last load left out.
        self.last_save: SaveRecord | None = None
        self.last_load: LoadReport | None = None
        self._session = session
        self._format = format or safetensors_format()
        self._find_format = find_format
        self._notify = notify or (lambda event, directory: None)
        self._before_commit = before_commit or (lambda: None)
        self._on_saved = on_saved or (lambda record: None)
        self._keep = keep or Keep(last=self.project.total_limit)
        self._visibility_timeout = visibility_timeout
        self._agreement = Agreement(session.process, per_node=self.project.save_on_each_node, timeout=timeout)
        self._finder = Finder(self._agreement, visibility_timeout=visibility_timeout)
        self._save_hooks = HookList()
        self._load_hooks = HookList()
        self._staging = Staging()
        self._plans: dict[Any, Plan] = {}
        self._pending: Background[SaveRecord] | None = None
        self._run = ""

    # -- hooks -------------------------------------------------------------------------------------------------------------

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> HookHandle:
        """Have ``hook(models, weights, output_dir)`` called before a save, on every rank.

        ``weights`` are the models' states. What the main process's hook takes out of the list is not saved; files that a hook writes to
        ``output_dir`` become part of the checkpoint.
        """
        return self._save_hooks.register(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> HookHandle:
        """Have ``hook(models, input_dir)`` called before a load, on every rank. Models that it takes out of the list are not loaded."""
        return self._load_hooks.register(hook)

    # -- saving ------------------------------------------------------------------------------------------------------------

    def save_state(
        self,
        directory: Directory | None = None,
        *,
        blocking: bool = True,
        metadata: Mapping[str, Any] | None = None,
        numbered: bool = False,
        keep: Keep | None = None,
    ) -> Location:
        """Save the session's state. Collective.

        Args:
            directory: The checkpoint's own directory; an earlier checkpoint there is replaced. Without it, and with
                ``automatic_checkpoint_naming``, the next ``checkpoint_<n>``.
            blocking: With False the state is copied and written in the background; `wait` ends it, and so do the next save and load.
            metadata: Plain data to be kept in the manifest: metrics, notes.
            numbered: Make the project's next ``checkpoint_<n>`` whatever ``automatic_checkpoint_naming`` says.
            keep: Which numbered checkpoints to keep from now on, in place of the manager's rule.

        Returns:
            The checkpoint's path; in the background it may still change if another run takes the number.

        Raises:
            CheckpointError: On every rank, if it fails on any. No checkpoint is made then, and earlier ones are as they were.
        """
        started = time.perf_counter()
        self.wait()
        self._keep = keep or self._keep
        target = self._target(directory, numbered=numbered)
        about = self._about(metadata)
        path = locate(self._agreement.lead("choosing the checkpoint's directory", lambda: str(target.path())))
        with self._agreement.together("a hook before saving"):
            self._notify("before_save", path)
        kind = RemoteTransaction if is_remote(target.folder) else Transaction
        transaction = kind(self._agreement, target, run=self._run, visibility_timeout=self._visibility_timeout)
        try:
            transaction.begin()
            snapshot = self._capture(transaction.directory, blocking)
        except BaseException:
            transaction.abort()
            raise
        blocked: list[float] = []

        def finish() -> SaveRecord:
            record = self._finish(transaction, snapshot, about, started, blocked)
            if target.name is None:
                self._agreement.lead("removing old checkpoints", lambda: self._remove_expired(record.path.parent))
            return record

        if not blocking:
            blocked.append(time.perf_counter() - started)
            self._pending = Background(finish, name="drivetrain-checkpoint")
            return path
        return self._committed(finish())

    def expected_path(self, directory: Directory | None = None, *, numbered: bool = False) -> Location:
        """Where a save with these arguments would go now. Collective."""
        target = self._target(directory, numbered=numbered)
        return locate(self._agreement.lead("choosing the checkpoint's directory", lambda: str(target.path())))

    def wait(self) -> Location | None:
        """Wait for the save in the background, if there is one. Collective.

        Returns:
            Its path, or None if there was none.

        Raises:
            CheckpointError: If it failed.
        """
        if self._pending is None:
            return None
        pending, self._pending = self._pending, None
        return self._committed(pending.wait())

    @property
    def failed(self) -> bool:
        """Whether a save in the background has failed, on any rank: `wait` raises its error. Ranks may notice at different times."""
        return self._pending is not None and self._pending.failed

    def close(self) -> None:
        """Wait for the save in the background and give memory and process group back."""
        try:
            self.wait()
        finally:
            self._staging.release()
            self._agreement.close()

    def _target(self, directory: Directory | None, *, numbered: bool) -> Target:
        if directory is not None:
            path = locate(directory)
            return Target(path.parent, path.name)
        return Target(self._folder("save_state()", numbered=numbered), at_least=self.project.iteration)

    def _folder(self, call: str, *, numbered: bool = False) -> Location:
        if self.project.project_dir is None or not (numbered or self.project.automatic_checkpoint_naming):
            naming = "" if numbered else ", automatic_checkpoint_naming=True"
            raise CheckpointError(f"{call} needs a directory, or ProjectConfiguration(project_dir=...{naming})")
        return locate(self.project.project_dir) / "checkpoints"

    def _about(self, metadata: Mapping[str, Any] | None) -> dict[str, Any]:
        """The manifest's fields, but for the files. Collective."""
        if not self._run:
            self._run = str(self._agreement.lead("naming the run", lambda: uuid.uuid4().hex))
        with self._agreement.together("describing the checkpoint"):
            plain = {key: _number(value) for key, value in (metadata or {}).items()}
            encoded = encode(plain, path="metadata")
            if encoded.tensors:
                raise CheckpointError(
                    f"metadata holds tensors: {', '.join(encoded.tensors)}. Register an object that has them."
                )
            backend, precision = self._session.backend.spec.name, self._session.precision.spec.name
            return {
                "format": self._format.spec.name,
                "world_size": self._session.process.world_size,
                "ranks": self._agreement.members,
                "run": self._run,
                "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
                "counters": {k: v for k, v in self._session.counters().items() if _is_simple(v)},
                "facts": {"backend": backend, "precision": precision, **_versions()},
                "metadata": encoded.tree,
            }

    def _capture(self, directory: Path, blocking: bool) -> Snapshot:
        session = self._session
        with self._agreement.together("collecting the models' weights"):
            states = [session.backend.model_state(m) for m in session.models]
        weights: list[dict[str, Any] | None] = list(states)
        if len(self._save_hooks):
            weights = self._call_save_hooks(states, directory)
        stage = {} if blocking else {"stage": self._staging.copy}
        suffix = self._format.spec.suffix or ".bin"
        snapshot = capture(session, self._agreement, weights=weights, suffix=suffix, plans=self._plans, **stage)
        if not blocking:
            self._staging.finish()
        return snapshot

    def _call_save_hooks(self, states: list[dict[str, Any]], directory: Path) -> list[dict[str, Any] | None]:
        """States to save, as the main process's hooks left them."""
        before = [set(state) for state in states]
        left = list(states)
        with self._agreement.together("a hook before saving"):
            self._save_hooks(list(self._session.models), left, str(directory))
        kept = self._agreement.exchange(remaining(states, left))[0]
        after = dict(zip(remaining(states, left), left, strict=True))
        dropped = self._agreement.exchange([sorted(b - set(after.get(i, b))) for i, b in enumerate(before)])[0]
        return [
            {k: v for k, v in after.get(i, state).items() if k not in dropped[i]} if i in kept else None
            for i, state in enumerate(states)
        ]

    def _finish(
        self, transaction: Transaction, snapshot: Snapshot, about: dict[str, Any], started: float, blocked: list[float]
    ) -> SaveRecord:
        """Write, commit, and remove what has expired. Collective; may run in the background."""
        try:
            with self._agreement.together("writing the checkpoint"):
                entries = transaction.write(snapshot, self._format)
                self._before_commit()
            path = transaction.commit(entries, about)
        except BaseException:
            transaction.abort()
            raise
        nbytes = int(self._agreement.lead("reading the manifest", lambda: Manifest.read(path).size))
        seconds = time.perf_counter() - started
        record = SaveRecord(
            path, nbytes, seconds, blocked[0] if blocked else seconds, about["counters"], about["metadata"]
        )
        self._on_saved(record)
        return record

    def _remove_expired(self, folder: Location) -> None:
        """On the leader: remove what the rule doesn't keep."""
        if self._keep.keeps_all:
            return
        present = []
        for found in list_checkpoints(folder):
            try:
                present.append((found, Manifest.read(found.path)))
            except CheckpointError:
                continue  # not ours to remove
        for found in self._keep.expired(present, run=self._run):
            remove_old(found.path)

    def _committed(self, record: SaveRecord) -> Location:
        self.last_save = record
        with self._agreement.together("a hook after saving"):
            self._notify("after_save", record.path)
        return record.path

    # -- loading -----------------------------------------------------------------------------------------------------------

    def load_state(self, directory: Directory | None = None, *, strict: bool = True, verify: bool = True) -> Location:
        """Load a state into the session, at this world size, under this backend and precision. Collective.

        Args:
            directory: A checkpoint. Without it, the newest whole one of the project; broken and foreign ones are skipped with a warning.
            strict: Whether names or objects that only the session or only the checkpoint has are an error.
            verify: Whether to check the files' content before anything is read, each rank its share.

        Returns:
            The checkpoint's path. `last_load` says what a load that isn't strict left out.

        Raises:
            CheckpointError: On every rank, if it can't be loaded on any; the session is unchanged if the cause lies in the checkpoint.
        """
        self.wait()
        if directory is not None:
            return self._load(self._finder.given(locate(directory), verify=verify), strict=strict)
        folder = self._project_folder("load_state()")
        found = self._finder.newest(folder, verify=verify)
        if found is None:
            raise CheckpointError(f"there is no whole checkpoint in {folder}")
        return self._load(found, strict=strict)

    def load_newest(self) -> Location | None:
        """Load the project's newest whole checkpoint, however ``automatic_checkpoint_naming`` is set. Collective.

        Returns:
            Its path, or None if there is none, and nothing was changed.

        Raises:
            CheckpointError: As for `load_state`.
        """
        self.wait()
        found = self._finder.newest(self._project_folder("resume='auto'", numbered=True), verify=True)
        return None if found is None else self._load(found, strict=True)

    def peek(self, directory: Directory | None = None) -> tuple[Manifest, dict[str, str]] | None:
        """The manifest, and ids of trackers' runs, of a checkpoint or the project's newest; None if there is none. Not collective; reads no tensors."""
        path = (
            newest_checkpoint(self._folder("resume='auto'", numbered=True)) if directory is None else locate(directory)
        )
        if path is None:
            return None
        manifest = Manifest.read(path)
        with Source(Mirror(path, manifest), self._format_of(manifest)) as source:
            return manifest, source.run_ids()

    def _project_folder(self, call: str, *, numbered: bool = False) -> Location:
        """The project's folder of checkpoints. Collective."""
        with self._agreement.together("finding the newest checkpoint"):
            return self._folder(call, numbered=numbered)

    def _load(self, files: Mirror, *, strict: bool) -> Location:
        path, manifest = files.directory, files.manifest
        with files:
            with self._agreement.together("a hook before loading"):
                self._notify("before_load", path)
            models: list[Any] = list(self._session.models)
            with self._agreement.together("a hook before loading"):
                if len(self._load_hooks):
                    self._load_hooks(models, str(files.folder()))
            with self._agreement.together(f"opening {path}"):
                source = Source(files, self._format_of(manifest))
            with source:
                left = remaining(self._session.models, models)
                self.last_load = restore(self._session, source, self._agreement, strict=strict, models=left)
        self._run = manifest.run
        self._report(path, self.last_load)
        with self._agreement.together("a hook after loading"):
            self._notify("after_load", path)
        return path

    def _format_of(self, manifest: Manifest) -> CheckpointFormat:
        if manifest.format == self._format.spec.name:
            return self._format
        if self._find_format is not None:
            return self._find_format(manifest.format)
        if manifest.format == "safetensors":
            return safetensors_format()
        raise CheckpointError(f"the checkpoint's format is {manifest.format!r}, which isn't installed")

    def _report(self, path: Location, report: LoadReport) -> None:
        for kind in ("missing", "unexpected"):
            names = getattr(report, kind)
            if names and self._agreement.leads:
                warnings.warn(f"{path}: {kind} in the checkpoint: {', '.join(names)}", stacklevel=3)
        for note in report.notes:
            _logger.info("%s: %s", path, note)


def _is_simple(value: Any) -> bool:
    return isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))


def _number(value: Any) -> Any:
    """Metrics come as 0-d tensors and NumPy scalars."""
    if isinstance(value, torch.Tensor) and value.ndim == 0:
        return value.item()
    return value.item() if type(value).__module__ == "numpy" and hasattr(value, "dtype") and value.ndim == 0 else value


def _versions() -> dict[str, str]:
    import importlib.metadata as metadata

    versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("drivetrain", "safetensors"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return versions
