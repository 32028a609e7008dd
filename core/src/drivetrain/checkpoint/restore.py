"""Putting a checkpoint's state back into a session, at this world size, under this backend."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from drivetrain.checkpoint._agree import Agreement
from drivetrain.checkpoint.capture import canonical, content_name
from drivetrain.checkpoint.plain import decode
from drivetrain.checkpoint.session import Session
from drivetrain.checkpoint.source import Source
from drivetrain.checkpoint.store import TensorStore
from drivetrain.checkpoint.tensors import is_dtensor, is_sharded
from drivetrain.errors import CheckpointError
from drivetrain.interfaces.shards import Shards

__all__ = ["LoadReport", "restore"]


@dataclass(slots=True)
class LoadReport:
    """What a load that isn't strict left out.

    Args:
        missing: Names that the session has and the checkpoint lacks, with the model's name in front if it isn't the first.
        unexpected: Names that the checkpoint has and the session lacks.
        notes: Clauses about other things that weren't restored.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Read:
    """Everything that was read, before anything of the session is changed."""

    models: dict[int, dict[str, Any]]
    optimizers: list[dict[str, Any]]
    objects: dict[str, Any]
    own: dict[str, Any] | None
    first: dict[str, Any]
    window: dict[str, float]
    gradients: list[dict[str, torch.Tensor]]
    report: LoadReport


def restore(
    session: Session, source: Source, agreement: Agreement, *, strict: bool, models: Collection[int]
) -> LoadReport:
    """Read a checkpoint and put its state into the session. Collective.

    All is read and compared first; only then the session changes.

    Args:
        session: Has the objects, prepared in the order in which the saved session had them.
        source: The checkpoint.
        agreement: Of the ranks.
        strict: Whether names or objects that are only on one side are an error.
        models: Positions of the models to load; hooks may have loaded the others.

    Raises:
        CheckpointError: On every rank, if anything is missing, unexpected or of another shape on any.
    """
    with agreement.together(f"reading {source.directory}"):
        read = _read(session, source, strict, models)
    with agreement.together(f"restoring {source.directory}"):
        _apply(session, source, read)
    return read.report


def _read(session: Session, source: Source, strict: bool, models: Collection[int]) -> _Read:
    report = LoadReport()
    _compare_counts(session, source, strict, report)
    states = {}
    for i in sorted(models):
        if i < len(source.state["models"]):
            states[i] = _model_state(session, source, i, strict, report)
    optimizers = [
        _optimizer_state(session, source, i, *entry)
        for i, entry in enumerate(session.optimizers)
        if i < len(source.state["optimizers"])
    ]
    own, first = _rank_states(session, source, report)
    window, gradients = _window(session, source, own)
    return _Read(states, optimizers, source.part("objects"), own, first, window, gradients, report)


def _compare_counts(session: Session, source: Source, strict: bool, report: LoadReport) -> None:
    here: dict[str, Sequence[Any]] = {
        "models": [session.backend.unwrap(m) for m in session.models],
        "optimizers": [optimizer for optimizer, _ in session.optimizers],
        "schedulers": session.schedulers,
        "loaders": session.loaders,
        "custom_objects": session.custom_objects,
    }
    for kind, objects in here.items():
        if source.state[kind] is None:  # a converted checkpoint
            report.notes.append(f"the checkpoint doesn't know about {kind.replace('_', ' ')}: they start afresh")
            continue
        saved = [entry["class"] if isinstance(entry, dict) else entry for entry in source.state[kind]]
        present = [type(o).__name__ for o in objects]
        if len(saved) != len(present):
            noun = kind.replace("_", " ")
            text = f"the checkpoint has {len(saved)} {noun} ({_some(saved)}), this session {len(present)} ({_some(present)})"
            if strict:
                raise CheckpointError(
                    f"{source.directory}: {text}. Prepare (or register) the same objects in the same order, or load with strict=False."
                )
            report.notes.append(text)


def _some(names: Iterable[str], limit: int = 10) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return (", ".join(names[:limit]) or "none") + more


# -- models ----------------------------------------------------------------------------------------------------------------


def _model_state(session: Session, source: Source, index: int, strict: bool, report: LoadReport) -> dict[str, Any]:
    content = content_name("model", index)
    if not source.state["models"][index]["saved"]:
        raise CheckpointError(
            f"{source.directory} holds no weights of model {index}: a save hook kept them out. "
            "Register the load hook that reads what it wrote, and takes the model out of the list."
        )
    store = source.store(content)
    extras = source.part(content)
    template = session.backend.model_state(session.models[index])
    state: dict[str, Any] = {}
    problems: list[str] = []
    missing = []
    for name, value in template.items():
        saved = canonical(name)
        if not isinstance(value, (torch.Tensor, Shards)):
            if saved in extras:
                state[name] = extras[saved]
            else:
                missing.append(saved)
        elif saved not in store:
            missing.append(saved)
        elif store.shape(saved) != tuple(value.shape):
            problems.append(
                f"{saved} has shape {list(store.shape(saved))} in the checkpoint and {list(value.shape)} here"
            )
        else:
            state[name] = store.read_like(saved, value, shared=True)
    known = {canonical(name) for name in template}
    unexpected = sorted(name for name in (*store.names(), *extras) if name not in known)
    if strict and missing:
        problems.append(f"missing in the checkpoint: {_some(missing)}")
    if strict and unexpected:
        problems.append(f"unexpected in the checkpoint: {_some(unexpected)}")
    if problems:
        which = f"model {index} ({type(session.backend.unwrap(session.models[index])).__name__})"
        hint = " strict=False loads what both have." if strict and (missing or unexpected) else ""
        raise CheckpointError(f"{source.directory} doesn't fit {which}: {'; '.join(problems)}.{hint}")
    prefix = "" if index == 0 else f"{content}."
    report.missing += [prefix + n for n in missing]
    report.unexpected += [prefix + n for n in unexpected]
    return state


# -- optimizers ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stored:
    """Stands for a tensor that is read once it is known how it must be laid out."""

    name: str


def _optimizer_state(
    session: Session, source: Source, index: int, optimizer: Any, models: Sequence[torch.nn.Module]
) -> dict[str, Any]:
    content = content_name("optimizer", index)
    state = decode(source.raw_part(content)[0], _Stored)
    store = source.store(content)
    names = session.backend.parameter_names(models)
    layouts = {
        names[id(p)]: session.backend.state_layout(p)
        for m in models
        for p in session.backend.unwrap(m).parameters()
        if id(p) in names
    }
    here = {canonical(name): name for name in layouts}
    if source.state["optimizers"][index].get("by") == "position":  # converted from files that know no names
        order = [names[id(p)] for p in session.backend.optimizer_parameters(optimizer)]
        here = {str(position): name for position, name in enumerate(order)}
    values = {
        here.get(name, name): _fill(entry, store, layouts.get(here.get(name, name)))
        for name, entry in state["state"].items()
    }
    groups = [
        {**_fill(group, store, None), "params": [here.get(n, n) for n in group["params"]]}
        for group in state["param_groups"]
    ]
    rest = {k: _fill(v, store, None) for k, v in state.items() if k not in ("state", "param_groups")}
    return {**rest, "state": values, "param_groups": groups}


def _fill(value: Any, store: TensorStore, layout: Any) -> Any:
    """Replace stand-ins by tensors; those of a sharded parameter's shape are laid out as its state is."""
    if isinstance(value, _Stored):
        # Scalars are step counts, which no optimizer shards.
        alike = is_sharded(layout) and store.shape(value.name) == tuple(layout.shape) != ()
        return store.read_like(value.name, layout) if alike else store.read(value.name)
    if type(value) is dict:
        return {k: _fill(v, store, layout) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_fill(v, store, layout) for v in value)
    return value


# -- what each rank has for itself -----------------------------------------------------------------------------------------


def _rank_states(session: Session, source: Source, report: LoadReport) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    rank, ranks = session.process.rank, source.manifest.ranks
    own = source.own(rank) if rank in ranks else None
    if own is None:
        report.notes.append(
            f"rank {rank} has no random number generators in the checkpoint, which {source.manifest.world_size} processes saved: "
            "its present ones go on"
        )
    if own is not None and source.manifest.world_size == session.process.world_size:
        return own, own
    return own, source.own(ranks[0])


def _window(
    session: Session, source: Source, own: dict[str, Any] | None
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Sums and gradients of the open window: this rank's own, or at another world size an equal share of all ranks'."""
    about = source.state["window"]
    if about is None:
        return {}, []
    saved, here = source.manifest.world_size, session.backend.data_world_size
    # Gradients reach the optimizer as a mean over the data ranks of today; a sum must not depend on their number.
    factor = about["data_world_size"] / here if about["reduction"] == "sum" else 1.0
    same = saved == session.process.world_size and about["data_world_size"] == here
    # Where ranks now share one gradient by its shards, what each had for itself must be combined.
    if own is not None and same and not (_shares_gradients(session) and any(own["gradients"])):
        window, gradients = own["window"], own["gradients"]
    else:
        if len(source.manifest.ranks) != saved:
            raise CheckpointError(
                f"{source.directory} was saved inside an accumulation window by {saved} processes, and holds the gradients of "
                f"{len(source.manifest.ranks)} of them: load it with {saved} processes"
            )
        window, gradients = _mean_window(source, factor)
    store = source.store("gradients")
    for i, model in enumerate(session.models[: len(gradients)]):
        for name, parameter in session.backend.unwrap(model).named_parameters():
            if f"{i}.{canonical(name)}" in store:
                gradients[i][canonical(name)] = store.read_like(f"{i}.{canonical(name)}", parameter) * factor
    return window, gradients


def _shares_gradients(session: Session) -> bool:
    if session.backend.keeps_own_gradients:
        return False
    return any(is_dtensor(p) for model in session.models for p in session.backend.unwrap(model).parameters())


def _mean_window(source: Source, factor: float) -> tuple[dict[str, float], list[dict[str, Any]]]:
    ranks = source.manifest.ranks
    scale = factor / len(ranks)
    window: dict[str, float] = {}
    gradients: list[dict[str, Any]] = []
    for rank in ranks:
        own = source.own(rank)
        for key, value in own["window"].items():
            window[key] = window.get(key, 0) + value * scale
        gradients = gradients or [{} for _ in own["gradients"]]
        for total, part in zip(gradients, own["gradients"], strict=True):
            for name, value in part.items():
                total[name] = total[name] + value * scale if name in total else value * scale
    return window, gradients


# -- changing the session --------------------------------------------------------------------------------------------------


def _apply(session: Session, source: Source, read: _Read) -> None:
    for i, state in read.models.items():
        with _naming(f"model {i}"):
            session.backend.load_model_state(
                session.models[i], state, strict=not (read.report.missing or read.report.unexpected)
            )
    for i, ((optimizer, models), state) in enumerate(zip(session.optimizers, read.optimizers, strict=False)):
        with _naming(f"optimizer {i}"):
            session.backend.load_optimizer_state(optimizer, models, state)
    for i, scheduler in enumerate(session.schedulers):
        _put(scheduler.load_state_dict, read.objects, f"scheduler[{i}]")
    if read.objects["precision"]:  # saved under a precision that has a state
        _put(session.precision.load_state_dict, read.objects, "precision")
    for i, custom in enumerate(session.custom_objects):
        _put(custom.load_state_dict, read.objects, f"custom_object[{i}]")
    for i, loader in enumerate(session.loaders):
        own = (
            read.own if getattr(loader, "state_per_rank", False) else None
        )  # a stream that each rank reads its part of
        _put(loader.load_state_dict, own or read.first, f"loader[{i}]")
    _put(session.set_counters, read.objects, "counters")
    _put(session.set_tracker_run_ids, read.objects, "tracker_run_ids")
    _set_gradients(session, read.gradients)
    session.set_window_state(read.window)
    if read.own is not None and "rng" in read.own:  # last: whatever ran before may have drawn numbers
        session.set_rng_state(read.own["rng"])


def _put(function: Callable[[Any], Any], parts: Mapping[str, Any], name: str) -> None:
    if name in parts:
        with _naming(name):
            function(parts[name])


class _naming:
    """Says in errors which object couldn't take its state."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, Exception) and hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"while loading the state of {self._what}")


def _set_gradients(session: Session, gradients: Sequence[Mapping[str, torch.Tensor]]) -> None:
    for i, model in enumerate(session.models):
        saved = gradients[i] if i < len(gradients) else {}
        named = session.backend.unwrap(model).named_parameters()
        here = {name: saved[canonical(name)] for name, _ in named if canonical(name) in saved}
        session.backend.load_window_gradients(model, here)
