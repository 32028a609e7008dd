"""What takes the place of everything that leaves the process: process groups, files, trackers, compilers.

A rehearsal has a process of its own, in which these stand in for the originals from before the script starts until it ends.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from drivetrain.checkpoint import CheckpointManager
from drivetrain.checkpoint.location import Location
from drivetrain.errors import TrackerError
from drivetrain.rehearsal._mode import Stage
from drivetrain.rehearsal._places import place
from drivetrain.tracking import TrackerHub
from drivetrain.tracking.handle import InertTracker
from drivetrain.tracking.reducer import check_reduction

__all__ = ["Notes", "substituted"]


class Notes:
    """What was left out, once each.

    Example:
        >>> notes = Notes()
        >>> notes.add("no file"), notes.add("no file"), list(notes)
        (None, None, ['no file'])
    """

    def __init__(self) -> None:
        self._texts: dict[str, None] = {}

    def add(self, text: str) -> None:
        """Note something."""
        self._texts[text] = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)


def _at(text: str) -> str:
    where = place()
    return f"{text} ({where})" if where else text


def unwritten_checkpoints(notes: Notes) -> type[CheckpointManager]:
    """Checkpoints that are collected and not written; none is loaded."""

    class UnwrittenCheckpoints(CheckpointManager):
        def save_state(self, directory: Any = None, *, numbered: bool = False, **how: Any) -> Location:
            session = self._session
            for model in session.models:
                session.backend.model_state(model)
            for optimizer, models in session.optimizers:
                session.backend.optimizer_state(optimizer, models)
            for thing in session.custom_objects:
                thing.state_dict()
            notes.add(_at("checkpoints are collected and not written"))
            return self._target(directory, numbered=numbered).path()

        def load_state(self, directory: Any = None, **how: Any) -> Location:
            notes.add(_at("no checkpoint is loaded"))
            return self._target(directory, numbered=True).path()

        def load_newest(self) -> Location | None:
            notes.add(_at("no checkpoint is loaded"))
            return None

        def peek(self, directory: Any = None) -> Any:
            return None

        def wait(self) -> Location | None:
            return None

    return UnwrittenCheckpoints


def unwritten_hub(notes: Notes) -> type[TrackerHub]:
    """Trackers that are checked and not started."""

    class UnwrittenHub(TrackerHub):
        def start(self, project_name: str, *args: Any, **kwargs: Any) -> None:
            notes.add(f"trackers aren't started: {', '.join(self.names)}")

        def log(self, values: Any, step: Any = None, log_kwargs: Any = None, *, reduce: Any = None, **how: Any) -> None:
            if not isinstance(values, Mapping):
                raise TrackerError(f"log() takes a mapping of names to values, not a {type(values).__name__}.")
            if reduce is not None:
                check_reduction(reduce, how.get("weight"))

        def get(self, name: str, unwrap: bool = False) -> Any:
            return InertTracker(name)

        def end(self) -> None:
            pass

        def _hears(self, call: str) -> bool:
            return False

    return UnwrittenHub


def _replacements(stage: Stage, rank: int, world_size: int, notes: Notes) -> dict[str, Callable[..., Any]]:
    """By the name of the original, what is called in its place."""
    init, new_group, all_reduce, save = dist.init_process_group, dist.new_group, dist.all_reduce, torch.save

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        init("fake", store=FakeStore(), rank=rank, world_size=world_size)

    def new_fake_group(ranks: Any = None, timeout: Any = None, backend: Any = None, **kwargs: Any) -> Any:
        return new_group(ranks, timeout, None, **kwargs)

    def reduced(tensor: Any, op: Any = dist.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        stage.reduction = op
        try:
            return all_reduce(tensor, op, *args, **kwargs)
        finally:
            stage.reduction = None

    def not_saved(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(f, str | os.PathLike):
            return save(obj, f, *args, **kwargs)
        notes.add(_at("files aren't written: torch.save"))
        return None

    def not_written(*args: Any, **kwargs: Any) -> None:
        notes.add(_at("files aren't written"))

    def not_compiled(model: Any = None, **kwargs: Any) -> Any:
        notes.add(_at("nothing is compiled"))
        return (lambda function: function) if model is None else model

    return {
        "drivetrain.parallel.process_group:_meet": lambda *_, **__: FakeStore(),
        "torch.distributed:init_process_group": init_process_group,
        "torch.distributed.distributed_c10d:init_process_group": init_process_group,
        "torch.distributed:new_group": new_fake_group,
        "torch.distributed.distributed_c10d:new_group": new_fake_group,
        "torch.distributed:all_reduce": reduced,
        "torch:save": not_saved,
        "torch:compile": not_compiled,
        "safetensors.torch:save_file": not_written,
        "safetensors.torch:save_model": not_written,
        "drivetrain.checkpoint:save": not_written,
        "drivetrain.checkpoint:save_model": not_written,
        "drivetrain.checkpoint:CheckpointManager": unwritten_checkpoints(notes),
        "drivetrain.tracking:TrackerHub": unwritten_hub(notes),
    }


@contextlib.contextmanager
def substituted(
    stage: Stage, *, rank: int, world_size: int, notes: Notes, **more: Callable[..., Any]
) -> Iterator[None]:
    """Inside, nothing leaves the process.

    Args:
        stage: What is being rehearsed.
        rank: As which rank.
        world_size: Of how many.
        notes: What was left out.
        **more: Further replacements, by ``"module:attribute"``.
    """
    with contextlib.ExitStack() as ending:
        for name, value in {**_replacements(stage, rank, world_size, notes), **more}.items():
            module_name, _, attribute = name.partition(":")
            module = importlib.import_module(module_name)
            ending.callback(setattr, module, attribute, getattr(module, attribute))
            setattr(module, attribute, value)
        resize = torch.UntypedStorage.resize_

        def noted_resize(storage: Any, size: int) -> Any:
            resize(storage, size)
            stage.memory.resized(storage)
            return storage

        apply = torch.nn.Module._apply
        ending.callback(setattr, torch.nn.Module, "_apply", apply)
        torch.nn.Module._apply = _apply_to_fakes(apply)  # type: ignore[method-assign]
        ending.callback(setattr, torch.UntypedStorage, "resize_", resize)
        torch.UntypedStorage.resize_ = noted_resize  # type: ignore[method-assign, assignment]
        yield


def _apply_to_fakes(original: Callable[..., Any]) -> Callable[..., Any]:
    """What ``module.to()`` and its like do, for parameters that are fake: torch would swap tensors, which it can't once there are weak references."""

    def apply(self: torch.nn.Module, fn: Callable[[Any], Any], recurse: bool = True) -> torch.nn.Module:
        own = dict(self._parameters)
        fakes: dict[str, Any] = {name: p for name, p in own.items() if isinstance(p, FakeTensor)}
        with torch.no_grad():
            for parameter in fakes.values():
                changed = fn(parameter)
                if changed is not parameter:
                    parameter.data = changed
                if parameter.grad is not None:
                    parameter.grad = fn(parameter.grad)
        for name in fakes:
            del self._parameters[name]
        try:
            original(self, fn, recurse)
        finally:
            changed_ones = dict(self._parameters)
            self._parameters.clear()
            self._parameters.update({name: fakes.get(name, changed_ones.get(name)) for name in own})
        return self

    return apply
