"""Saving and loading."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.errors import UnsupportedError
from drivetrain.specs import Capability

if TYPE_CHECKING:
    from drivetrain._engine.accumulation import Accumulator
    from drivetrain._engine.assemble import Parts
    from drivetrain.checkpoint import CheckpointManager, HookHandle, ProjectConfiguration, SaveRecord
    from drivetrain.checkpoint.location import Location
    from drivetrain.data.stack import LoaderStack
    from drivetrain.interfaces import Backend

__all__ = ["CheckpointFacade"]


class CheckpointFacade:
    """Checkpoints of the whole training state, and models alone."""

    backend: Backend
    project_configuration: ProjectConfiguration
    _parts: Parts
    _custom_objects: list[Any]
    _hub: Any  # the tracking part's
    _met: Any  # the tracking part's
    gradient_state: Accumulator
    _loader_stack: LoaderStack
    _manager: CheckpointManager | None = None
    #: A save that was asked for inside a window, and is made at its end: directory and keywords.
    _deferred: tuple[Any, dict[str, Any]] | None = None
    _log_memory: Callable[[], None]

    @property
    def _checkpoints(self) -> CheckpointManager:
        if self._manager is None:
            self._manager = self._make_manager()
        return self._manager

    def _make_manager(self) -> CheckpointManager:
        from drivetrain._engine.session import AcceleratorSession
        from drivetrain.checkpoint import CheckpointManager

        registry, plan = self._parts.registry, self._parts.plan

        def find_format(name: str) -> Any:
            return registry.load("checkpoint-format", name)(registry.get("checkpoint-format", name))

        def notify(event: str, directory: Location) -> None:
            registry.notify(f"drivetrain_{event}", accelerator=self, directory=directory)

        return CheckpointManager(
            AcceleratorSession(self),  # type: ignore[arg-type]  # the Accelerator, of which this is a part
            project=self.project_configuration,
            format=find_format(plan.checkpoint_format.name),
            find_format=find_format,
            notify=notify,
            before_commit=self._hub.flush,
            on_saved=self._tell_trackers,
        )

    def _tell_trackers(self, record: SaveRecord) -> None:
        """Log a checkpoint where experiments are tracked and facts of the run are asked for; called on the thread that wrote it."""
        if not self._hub.options.run_facts or not self._hub.trackers:
            return
        facts = {
            "path": str(record.path),
            "step": record.counters.get("step", 0),
            "bytes": record.nbytes,
            "seconds": record.seconds,
            "blocked_seconds": record.blocked_seconds,
        }
        numbers = {k: v for k, v in record.metadata.items() if isinstance(v, (bool, int, float, str))}
        # Without a step: the script's own axis isn't known here, and systems drop rows that come late on it.
        self._hub.log({"checkpoint": {**facts, **numbers}})

    def _finish_checkpoints(self) -> None:
        self._save_deferred()
        if self._deferred is not None:
            self._defer(None)
            warnings.warn(
                "Training ended inside an accumulation window: the save that was to be made at its end wasn't.",
                stacklevel=3,
            )
        if self._manager is not None:
            self._manager.close()

    @property
    def project_dir(self) -> str | None:
        """Directory for checkpoints and logs."""
        return self.project_configuration.project_dir

    @property
    def logging_dir(self) -> str | None:
        """Directory for logs."""
        return self.project_configuration.logging_dir

    @property
    def save_iteration(self) -> int:
        """The lowest number that the next automatically named checkpoint may have."""
        return self.project_configuration.iteration

    def save_state(
        self,
        output_dir: str | os.PathLike[str] | None = None,
        safe_serialization: bool = True,
        *,
        blocking: bool = True,
        metadata: Mapping[str, Any] | None = None,
    ) -> str:
        """Save models, optimizers, schedulers, loaders, random generators, counters and registered objects. Collective.

        The checkpoint exists whole or not at all: it is written beside its final name and renamed at the end.

        Args:
            output_dir: The checkpoint's directory. Without it, and with ``ProjectConfiguration(automatic_checkpoint_naming=True)``,
                ``<project_dir>/checkpoints/checkpoint_<n>``.
            safe_serialization: True: nothing is stored as a pickle.
            blocking: False: training goes on while the copy of the state is written; `wait_for_checkpoint` waits for it.
            metadata: Plain data to keep in the manifest, such as metrics.

        Returns:
            The checkpoint's path. Inside an accumulation window, a backend that has no access to the gradients so far makes it
            when the window ends, and a warning says so.

        Raises:
            CheckpointError: On every process, if anything fails on one; earlier checkpoints stay as they were.

        Example:
            >>> import tempfile, torch
            >>> from drivetrain import Accelerator
            >>> accelerator = Accelerator(cpu=True)
            >>> model = accelerator.prepare(torch.nn.Linear(1, 1))
            >>> path = accelerator.save_state(tempfile.mkdtemp() + "/first")
            >>> accelerator.load_state(path) == path
            True
        """
        if not safe_serialization:
            raise UnsupportedError(
                "save_state(safe_serialization=False) would store pickles, which checkpoints never hold: leave it out. "
                "save_model(..., safe_serialization=False) writes a pickle of a model for other tools."
            )
        path = self._save_or_defer(output_dir, blocking=blocking, metadata=metadata)
        self._met(2)
        self._log_memory()
        return path

    def _save_or_defer(self, directory: str | os.PathLike[str] | None, **how: Any) -> str:
        """Save now, or at the window's end where the backend can't give the state of one that is open."""
        if self.gradient_state.is_open and Capability.MID_WINDOW_STATE not in self.backend.spec.capabilities:
            warnings.warn(
                f"The backend {self.backend.spec.name!r} can't save inside an accumulation window: the checkpoint is made when the window ends.",
                stacklevel=3,
            )
            self._defer((directory, how))
            return str(self._checkpoints.expected_path(directory))
        self._save_deferred()
        return self._save(directory, **how)

    def _save(self, directory: str | os.PathLike[str] | None, **how: Any) -> str:
        if self.gradient_state.guard is not None:
            self.gradient_state.guard.settle()  # no checkpoint of what came after a NaN
        return str(self._checkpoints.save_state(directory, **how))

    def _defer(self, save: tuple[Any, dict[str, Any]] | None) -> None:
        self._deferred = save
        # After a batch the loop's body has run to its end, with the scheduler's step; outside of loaders it has when the next window begins.
        self.gradient_state.between_windows = self._loader_stack.after_batch = (
            None if save is None else self._save_deferred
        )

    def _save_deferred(self) -> None:
        """Make the save that was put off to the window's end, if that has come."""
        if self._deferred is None or self.gradient_state.is_open:
            return
        directory, how = self._deferred
        self._defer(None)
        self._save(directory, **how)

    def wait_for_checkpoint(self) -> str | None:
        """Wait until a checkpoint begun with ``blocking=False`` is whole; return its path, or None if there was none. Collective."""
        self._save_deferred()
        path = self._checkpoints.wait()
        return None if path is None else str(path)

    def load_state(
        self, input_dir: str | os.PathLike[str] | None = None, *, strict: bool = True, verify: bool = True
    ) -> str:
        """Load what `save_state` saved, at this or another number of processes. Collective. Objects must be prepared already.

        Args:
            input_dir: The checkpoint's directory; default: the newest whole one of the project.
            strict: Raise for what is missing or unexpected; False loads what fits.
            verify: Compare checksums first.

        Returns:
            The checkpoint's path.

        Raises:
            CheckpointError: On every process, if it can't be loaded on one; nothing was changed then.
        """
        path = str(self._checkpoints.load_state(input_dir, strict=strict, verify=verify))
        self._loaded()
        self._log_memory()
        return path

    def _loaded(self) -> None:
        """A checkpoint was loaded."""
        self._defer(None)

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load further objects with the state: any with ``state_dict`` and ``load_state_dict`` of plain data and tensors.

        Raises:
            CheckpointError: Naming the objects that lack these methods.
        """
        from drivetrain.checkpoint import check_stateful

        check_stateful(objects)
        self._custom_objects.extend(objects)

    def register_save_state_pre_hook(self, hook: Callable[..., Any]) -> HookHandle:
        """Call ``hook(models, weights, output_dir)`` before each save; what it removes from ``weights`` isn't saved. Returns a handle with ``remove()``."""
        return self._checkpoints.register_save_state_pre_hook(hook)

    def register_load_state_pre_hook(self, hook: Callable[..., Any]) -> HookHandle:
        """Call ``hook(models, input_dir)`` before each load; what it removes from ``models`` isn't loaded. Returns a handle with ``remove()``."""
        return self._checkpoints.register_load_state_pre_hook(hook)

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """A model's whole weights by the unwrapped model's names. Collective.

        Shards are put together one tensor at a time, in the CPU's memory of each machine's first process; on the others they are left out, since
        the whole model may not fit there.

        Args:
            model: A prepared model.
            unwrap: False keeps the names of the wrapper, where it has its own.
        """
        if not unwrap:
            return dict(model.state_dict())
        state = self.backend.model_state(model)
        keeps = self._parts.control.is_local_main_process
        whole: dict[str, Any] = {}
        for name, value in state.items():
            if not hasattr(value, "full_tensor"):
                whole[name] = value
                continue
            full = value.full_tensor()  # every process takes part
            if keeps:
                whole[name] = full.cpu()
        return whole

    def save_model(
        self,
        model: torch.nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Save a model's weights in the layout that other tools read. Collective; the main process writes.

        Args:
            model: A prepared model.
            save_directory: Where ``model.safetensors`` goes (or several files and an index).
            max_shard_size: Largest file, in bytes or like "5GB".
            safe_serialization: False writes a pickle, for tools that read nothing else.
        """
        from drivetrain.checkpoint import save_model

        state = self.get_state_dict(model)
        if self.project_configuration.save_on_each_node:
            writes = self._parts.control.is_local_main_process
        else:
            writes = self._parts.control.is_main_process
        if writes:
            save_model(state, save_directory, max_shard_size=max_shard_size, safe_serialization=safe_serialization)
        self._parts.control.wait_for_everyone()

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Save an object to a file, on the main process only.

        Args:
            obj: Anything ``torch.save`` takes; tensors by name with ``safe_serialization``.
            f: Path of the file.
            safe_serialization: Write safetensors instead of a pickle.
        """
        from drivetrain.checkpoint import save

        save(
            obj,
            f,
            process=self._parts.plan.process,
            save_on_each_node=self.project_configuration.save_on_each_node,
            safe_serialization=safe_serialization,
        )
