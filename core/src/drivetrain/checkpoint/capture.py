"""Taking the state of a session: what this rank will write, decided together with the others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from drivetrain.checkpoint._agree import Agreement
from drivetrain.checkpoint.layout import Piece, Plan, describe, make_plan, piece_key
from drivetrain.checkpoint.plain import Encoded, dumps, encode, encode_parts
from drivetrain.checkpoint.session import Session
from drivetrain.checkpoint.store import pieces_metadata
from drivetrain.checkpoint.tensors import is_dtensor, is_sharded, local_blocks, tensor_identity
from drivetrain.interfaces.shards import Shards
from drivetrain.specs import Capability

__all__ = ["Document", "Snapshot", "TensorFile", "add_own", "capture", "canonical", "content_name", "rank_file"]

#: Tensors of at most so many bytes stand in the JSON: step counts, small generator states.
_INLINE_SHARED = 16
_INLINE_RANK = 64 << 10

Stage = Callable[[str, torch.Tensor], torch.Tensor]


def _share(place: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def content_name(kind: str, index: int) -> str:
    """Name of the i-th model or optimizer, as Accelerate names files.

    Example:
        >>> content_name("model", 0), content_name("model", 1)
        ('model', 'model_1')
    """
    return kind if index == 0 else f"{kind}_{index}"


def rank_file(rank: int) -> str:
    """Name, without suffix, of the files with one rank's own state.

    Example:
        >>> rank_file(3)
        'rank_00003'
    """
    return f"rank_{rank:05d}"


def canonical(name: str) -> str:
    """A parameter's name in the model as the user wrote it: without what ``torch.compile`` puts around modules.

    Example:
        >>> canonical("_orig_mod.layer.weight")
        'layer.weight'
    """
    return name.replace("_orig_mod.", "")


@dataclass(slots=True)
class Document:
    """A JSON file to be written.

    Args:
        content: What it holds, for the manifest.
        data: The text.
    """

    content: str
    data: bytes


@dataclass(slots=True)
class TensorFile:
    """A file of tensors to be written.

    Args:
        content: What it holds, for the manifest.
        tensors: The tensors by their names in the file.
        metadata: Strings for the file.
    """

    content: str
    tensors: dict[str, torch.Tensor]
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Snapshot:
    """What this rank writes.

    Args:
        documents: By file name.
        tensors: By file name without suffix.
    """

    documents: dict[str, Document] = field(default_factory=dict)
    tensors: dict[str, TensorFile] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(t.nbytes for file in self.tensors.values() for t in file.tensors.values())


@dataclass(slots=True)
class _Shared:
    """State that all ranks have in common: encoded, with the tensors of each content."""

    parts: dict[str, Encoded] = field(default_factory=dict)
    tensors: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    pieces: list[Piece] = field(default_factory=list)

    def add(self, content: str, encoded: Encoded) -> None:
        self.parts[content] = encoded
        self.add_tensors(content, encoded.tensors)

    def add_tensors(
        self, content: str, tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str] | None = None
    ) -> None:
        self.tensors[content] = dict(tensors)
        for name, tensor in tensors.items():
            self.pieces.extend(describe(content, name, tensor, (aliases or {}).get(name, "")))


def capture(
    session: Session,
    agreement: Agreement,
    *,
    weights: Sequence[Mapping[str, Any] | None],
    suffix: str,
    plans: MutableMapping[Any, Plan],
    stage: Stage = _share,
) -> Snapshot:
    """Take the session's state, and decide with the other ranks who writes what. Collective.

    Only what this rank writes is staged; sharded model weights are put together one at a time.

    Args:
        session: The session.
        agreement: Of the ranks.
        weights: State of each model under canonical names, or None for one that is not to be saved.
        suffix: Of tensor files.
        plans: Plans of earlier saves, to be used again while the tensors stay the same.
        stage: Called with the place and value of each tensor; what it returns is written. By default that is the live tensor.

    Raises:
        CheckpointError: If something can't be stored.
    """
    leads = agreement.leads
    with agreement.together("collecting the state"):
        shared, own, summary = _collect(session, weights, leads)
    models = [content_name("model", i) for i, state in enumerate(weights) if state is not None]
    plan, trees = _plan(agreement, shared, models, plans)
    snapshot = Snapshot()
    _add_models(snapshot, shared, plan, agreement, suffix, stage)
    for content, pieces in plan.pieces.items():
        name = content if len(plan.writers[content]) == 1 else f"{content}.{rank_file(agreement.process.rank)}"
        tensors = {
            piece_key(p): stage(f"{content}/{piece_key(p)}", _values(shared.tensors[content][p.name], p))
            for p in pieces
        }
        snapshot.tensors[name] = TensorFile(f"tensors:{content}", tensors, pieces_metadata(pieces))
    add_own(snapshot, own, agreement.process.rank, stage)
    if agreement.leads:
        summary["models"] = [
            {**model, "aliases": plan.aliases.get(content_name("model", i), {})}
            for i, model in enumerate(summary["models"])
        ]
        snapshot.documents["state.json"] = Document("state", dumps({**summary, "parts": trees}))
    return snapshot


def _collect(
    session: Session, weights: Sequence[Mapping[str, Any] | None], leads: bool
) -> tuple[_Shared, Encoded, dict[str, Any]]:
    shared = _Shared()
    window = {"reduction": session.window_reduction, "data_world_size": session.backend.data_world_size}
    summary: dict[str, Any] = {"models": [], "optimizers": [], "window": window if session.mid_window else None}
    for i, (model, state) in enumerate(zip(session.models, weights, strict=True)):
        kind = type(session.backend.unwrap(model)).__name__
        summary["models"].append({"class": kind, "saved": state is not None})
        if state is not None:
            _add_model_state(shared, content_name("model", i), state)
    for i, (optimizer, models) in enumerate(session.optimizers):
        summary["optimizers"].append({"class": type(optimizer).__name__})
        state = _canonical_optimizer(session.backend.optimizer_state(optimizer, models))
        shared.add(content_name("optimizer", i), encode(state, path=f"optimizer[{i}]", inline_limit=_INLINE_SHARED))
    objects = encode_parts(_objects(session), inline_limit=_INLINE_SHARED)
    if not leads:  # these may differ between ranks: the leader has the say, the others give their shards
        objects.tensors = {name: t for name, t in objects.tensors.items() if is_sharded(t)}
    shared.add("objects", objects)
    for kind in ("schedulers", "loaders", "custom_objects"):
        summary[kind] = [type(o).__name__ for o in getattr(session, kind)]
    own: dict[str, Any] = {f"loader[{i}]": loader.state_dict() for i, loader in enumerate(session.loaders)}
    own["rng"] = session.rng_state()
    if session.mid_window:
        own["window"] = dict(session.window_state())
        own["gradients"] = _gradients(session, shared)
    return shared, encode_parts(own, inline_limit=_INLINE_RANK), summary


def _add_model_state(shared: _Shared, content: str, state: Mapping[str, Any]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    extras: dict[str, Any] = {}
    first: dict[Any, str] = {}
    aliases: dict[str, str] = {}
    for name, value in state.items():
        if not isinstance(value, (torch.Tensor, Shards)):
            extras[canonical(name)] = value
            continue
        checked = encode(value, path=f"{content}.{name}")  # refuses what has no plain values
        tensors[canonical(name)] = tensor = next(iter(checked.tensors.values()))
        kept = first.setdefault(tensor_identity(tensor), canonical(name))
        if kept != canonical(name):
            aliases[canonical(name)] = kept
    shared.add_tensors(content, tensors, aliases)
    extra = encode(extras, path=content, inline_limit=_INLINE_SHARED)
    shared.parts[content] = extra
    if extra.tensors:
        shared.add_tensors(f"{content}.extra", extra.tensors)


def _canonical_optimizer(state: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **state,
        "state": {canonical(name): values for name, values in state["state"].items()},
        "param_groups": [{**g, "params": [canonical(n) for n in g["params"]]} for g in state["param_groups"]],
    }


def _objects(session: Session) -> dict[str, Any]:
    parts: dict[str, Any] = {f"scheduler[{i}]": s.state_dict() for i, s in enumerate(session.schedulers)}
    parts["precision"] = session.precision.state_dict()
    parts |= {f"custom_object[{i}]": o.state_dict() for i, o in enumerate(session.custom_objects)}
    parts["counters"] = dict(session.counters())
    parts["tracker_run_ids"] = dict(session.tracker_run_ids())
    parts["facts"] = dict(session.plan_facts())
    return parts


def _gradients(session: Session, shared: _Shared) -> list[dict[str, torch.Tensor]]:
    """This rank's gradients so far, per model; sharded ones join the shared state."""
    session.backend.require(Capability.MID_WINDOW_STATE, "saving inside an accumulation window")
    own: list[dict[str, torch.Tensor]] = []
    sharded: dict[str, torch.Tensor] = {}
    for i, model in enumerate(session.models):
        own.append({})
        for name, gradient in session.backend.window_gradients(model).items():
            if is_dtensor(gradient):
                sharded[f"{i}.{canonical(name)}"] = gradient
            else:
                own[i][canonical(name)] = gradient
    if sharded:
        shared.add_tensors("gradients", sharded)
    return own


def _plan(
    agreement: Agreement, shared: _Shared, models: Sequence[str], plans: MutableMapping[Any, Plan]
) -> tuple[Plan, dict[str, Any]]:
    """Who writes what, and the trees of the shared state as all ranks together have it."""
    trees = {content: {"tree": e.tree, "inline": e.inline} for content, e in shared.parts.items()}
    described = [piece.to_json() for piece in shared.pieces]
    objects = trees.pop("objects")
    digests = agreement.exchange([_digest(described), _digest(trees)])
    members = agreement.members
    pieces_alike = len({digests[r][0] for r in members}) == 1
    trees_alike = len({digests[r][1] for r in members}) == 1
    key = tuple(d[0] for d in digests)
    # Every domain takes part in the exchanges, so whether to make one depends on what all ranks said.
    if key not in plans:
        plans.clear()
        held: dict[int, Sequence[Piece]] = dict.fromkeys(members, shared.pieces)
        if len({d[0] for d in digests}) > 1:
            answers = agreement.exchange(None if pieces_alike else described)
            if not pieces_alike:
                held = {r: [Piece.from_json(p) for p in answers[r]] for r in members}
        with agreement.together("planning the files"):
            plan = make_plan(held, rank=agreement.process.rank, models=models)
        plans[key] = plan  # on every rank or on none
    if len({d[1] for d in digests}) > 1:
        answers = agreement.exchange(None if trees_alike else trees)
        if not trees_alike:
            trees = _merge([answers[r] for r in members])
    return plans[key], {**trees, "objects": objects}


def _digest(tree: Any) -> str:
    return hashlib.blake2b(dumps(tree), digest_size=16).hexdigest()


def _merge(trees: Sequence[Any]) -> Any:
    """What several ranks have together, where each knows only its part of a model: the first that has a value has the say."""
    first = trees[0]
    if isinstance(first, dict):
        keys = dict.fromkeys(k for t in trees if isinstance(t, dict) for k in t)
        return {k: _merge([t[k] for t in trees if isinstance(t, dict) and k in t]) for k in keys}
    if isinstance(first, list) and all(isinstance(t, list) for t in trees):
        if all(isinstance(item, str) for t in trees for item in t):  # names of a group's parameters
            return list(dict.fromkeys(item for t in trees for item in t))
        if all(len(t) == len(first) for t in trees):
            return [_merge(items) for items in zip(*trees, strict=True)]
    return first


def _add_models(
    snapshot: Snapshot, shared: _Shared, plan: Plan, agreement: Agreement, suffix: str, stage: Stage
) -> None:
    for content, shards in plan.models.items():
        tensors = shared.tensors[content]
        for shard in shards:
            mine = shard.owner == agreement.process.rank
            whole = {name: stage(f"{content}/{name}", t) for name, t in _whole(tensors, shard.names, mine)}
            if not mine:
                continue
            aliases = {a: kept for a, kept in plan.aliases[content].items() if kept in whole and a != "format"}
            snapshot.tensors[shard.file] = TensorFile(f"tensors:{content}", whole, {"format": "pt", **aliases})
        if len(shards) > 1 and agreement.leads:
            index = {
                "metadata": {"total_size": sum(s.nbytes for s in shards)},
                "weight_map": {name: s.file + suffix for s in shards for name in s.names},
            }
            snapshot.documents[f"{content}{suffix}.index.json"] = Document(f"index:{content}", dumps(index))


def _whole(tensors: Mapping[str, Any], names: Iterable[str], mine: bool) -> Iterable[tuple[str, torch.Tensor]]:
    """Tensors of a file, for its writer; every rank takes part in putting sharded ones together, in the same order."""
    for name in names:
        tensor = tensors.get(name)
        if tensor is None:
            continue
        if is_sharded(tensor):
            full = tensor.full_tensor()
            if mine:
                yield name, full
        elif mine:
            yield name, tensor


def _values(tensor: Any, piece: Piece) -> torch.Tensor:
    """What a piece of this rank's holds."""
    if piece.offsets is None:
        whole: torch.Tensor = tensor
        return whole
    return next(block.values for block in local_blocks(tensor) if block.offsets == piece.offsets)


def add_own(snapshot: Snapshot, own: Encoded, rank: int, stage: Stage = _share) -> None:
    """Add the files with one rank's own state."""
    name = rank_file(rank)
    snapshot.documents[f"{name}.json"] = Document(f"rank:{rank}", dumps({"tree": own.tree, "inline": own.inline}))
    if own.tensors:
        tensors = {key: stage(f"{name}/{key}", tensor) for key, tensor in own.tensors.items()}
        snapshot.tensors[name] = TensorFile(f"tensors:rank:{rank}", tensors)
