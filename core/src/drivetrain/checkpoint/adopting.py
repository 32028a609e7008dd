"""Making a checkpoint of what another program saved, so that a training goes on from it."""

from __future__ import annotations

import datetime
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from drivetrain.checkpoint._agree import Agreement
from drivetrain.checkpoint.capture import Document, Snapshot, TensorFile, add_own, content_name
from drivetrain.checkpoint.commit import Target, Transaction
from drivetrain.checkpoint.export import read_weights, without_aliases
from drivetrain.checkpoint.plain import Encoded, dumps, encode, encode_parts
from drivetrain.checkpoint.safetensors_format import SafetensorsFormat
from drivetrain.checkpoint.unpickling import load_plain
from drivetrain.errors import CheckpointError
from drivetrain.specs import CheckpointFormatSpec, ProcessInfo

__all__ = ["Adopted", "ForeignState", "adopt", "adopt_state", "is_session"]

_RANK = re.compile(r"random_states_(\d+)\.pkl")


@dataclass(slots=True)
class Adopted:
    """A checkpoint that was made.

    Args:
        path: Where.
        notes: What it lacks, in sentences.
    """

    path: Path
    notes: list[str] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class ForeignState:
    """What stood in the checkpoint of another program with one model and one optimizer; the function that a backend's ``adopts`` names gives it.

    Args:
        weights: Tensors by the names of the plain model; tied ones are one tensor.
        optimizer: An optimizer's state by names of parameters, ``{"state": {name: values}, "param_groups": [{"params": [name]}]}``, or None without one.
        by_position: The names in ``optimizer`` are positions of parameters, as texts.
        schedulers: States of schedulers.
        step: Optimizer steps so far.
        world_size: Number of processes that saved it.
        notes: What it lacks, in clauses.
    """

    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Any] | None = None
    by_position: bool = False
    schedulers: list[Any] = field(default_factory=list)
    step: int = 0
    world_size: int = 1
    notes: list[str] = field(default_factory=list)


def adopt_state(state: ForeignState, output: Path, *, step: int | None = None, epoch: int = 0) -> Adopted:
    """Make a checkpoint of it.

    Args:
        state: What was read.
        output: The checkpoint to be made.
        step: Optimizer steps so far; default: what the state says.
        epoch: The epoch to go on in.

    Raises:
        CheckpointError: If something in it can't be stored.

    Example:
        >>> import tempfile
        >>> made = adopt_state(ForeignState(weights={"w": torch.ones(2)}, step=3), Path(tempfile.mkdtemp(), "first"))
        >>> sorted(file.name for file in made.path.iterdir())
        ['manifest.json', 'model.safetensors', 'rank_00000.json', 'state.json']
    """
    snapshot, summary = Snapshot(), _summary()
    parts: dict[str, Encoded] = {}
    _add_weights(snapshot, summary, parts, 0, state.weights)
    if state.optimizer is not None:
        _add_optimizer(snapshot, summary, parts, 0, state.optimizer)
        if not state.by_position:
            summary["optimizers"][0].pop("by")
    counters = {"step": state.step if step is None else step, "epoch": epoch}
    summary["schedulers"] = ["?"] * len(state.schedulers)
    objects = {f"scheduler[{i}]": s for i, s in enumerate(state.schedulers)}
    _add_objects(snapshot, summary, parts, {**objects, "precision": {}}, counters)
    add_own(snapshot, encode_parts({}), 0)  # nothing is known of single processes
    path = _write(snapshot, output, counters, (0,), state.world_size)
    notes = ["loaders and random generators start afresh: they aren't in such a directory", *state.notes]
    return Adopted(path, notes)


def is_session(folder: Path) -> bool:
    """Whether a directory looks like what ``save_state`` of Accelerate writes."""
    return folder.is_dir() and any(_RANK.fullmatch(p.name) for p in folder.iterdir())


def adopt(
    folder: Path,
    output: Path,
    *,
    step: int | None = None,
    epoch: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Adopted:
    """Make a checkpoint of such a directory: models, optimizers, schedulers, loss scale, custom objects, random generators.

    Args:
        folder: What ``save_state`` wrote.
        output: The checkpoint to be made.
        step: Optimizer steps so far; default: what the optimizers' state says.
        epoch: The epoch to go on in.
        progress: Called with the bytes of each file that was read.

    Raises:
        CheckpointError: If it can't be read, or a file holds more than plain data.
    """
    reader = _Reader(folder, progress or (lambda nbytes: None))
    snapshot, summary = Snapshot(), _summary()
    parts: dict[str, Encoded] = {}
    for i, weights in enumerate(reader.models()):
        _add_weights(snapshot, summary, parts, i, weights)
    optimizers = list(reader.numbered("optimizer", ".bin"))
    for i, state in enumerate(optimizers):
        _add_optimizer(snapshot, summary, parts, i, _by_position(state))
    counters = {"step": _step_of(optimizers) if step is None else step, "epoch": epoch}
    _add_objects(snapshot, summary, parts, _objects(reader, summary), counters)
    ranks = reader.ranks()
    for rank in ranks:
        state = encode_parts({"rng": _generators(reader.read(f"random_states_{rank}.pkl"))}, inline_limit=64 << 10)
        add_own(snapshot, state, rank)
    path = _write(snapshot, output, counters, ranks, len(ranks))
    return Adopted(path, reader.notes(step is None and counters["step"] == 0))


def _add_weights(
    snapshot: Snapshot,
    summary: dict[str, Any],
    parts: dict[str, Encoded],
    index: int,
    weights: Mapping[str, torch.Tensor],
) -> None:
    content = content_name("model", index)
    tensors, aliases = without_aliases(weights)
    metadata = {"format": "pt", **{a: kept for a, kept in aliases.items() if a != "format"}}
    snapshot.tensors[content] = TensorFile(f"tensors:{content}", tensors, metadata)
    summary["models"].append({"class": "?", "saved": True, "aliases": aliases})
    parts[content] = encode({}, path=content)


def _add_optimizer(
    snapshot: Snapshot, summary: dict[str, Any], parts: dict[str, Encoded], index: int, state: Mapping[str, Any]
) -> None:
    content = content_name("optimizer", index)
    parts[content] = encode(dict(state), path=f"optimizer[{index}]")
    snapshot.tensors[content] = TensorFile(f"tensors:{content}", dict(parts[content].tensors))
    summary["optimizers"].append({"class": "?", "by": "position"})


def _add_objects(
    snapshot: Snapshot,
    summary: dict[str, Any],
    parts: dict[str, Encoded],
    objects: Mapping[str, Any],
    counters: Mapping[str, int],
) -> None:
    """Everything else that all processes have in common, and the document that lists it all."""
    encoded = encode_parts({**objects, "counters": dict(counters), "tracker_run_ids": {}, "facts": {}})
    parts["objects"] = encoded
    if encoded.tensors:
        snapshot.tensors["objects"] = TensorFile("tensors:objects", dict(encoded.tensors))
    trees = {content: {"tree": e.tree, "inline": e.inline} for content, e in parts.items()}
    snapshot.documents["state.json"] = Document("state", dumps({**summary, "parts": trees}))


class _Reader:
    """Files of the directory by the names that they have."""

    def __init__(self, folder: Path, tell: Callable[[int], None]) -> None:
        self.folder = folder
        self._tell = tell
        self._seen: set[str] = set()

    def read(self, name: str) -> Any:
        self._seen.add(name)
        content = load_plain(self.folder / name)
        self._tell((self.folder / name).stat().st_size)
        return content

    def numbered(self, stem: str, suffix: str) -> list[Any]:
        found: list[Any] = []
        while (self.folder / (name := f"{content_name(stem, len(found))}{suffix}")).is_file():
            found.append(self.read(name))
        return found

    def models(self) -> list[Mapping[str, torch.Tensor]]:
        found: list[Mapping[str, torch.Tensor]] = []
        while True:
            safe = self.folder / f"{content_name('model', len(found))}.safetensors"
            pickled = f"{content_name('pytorch_model', len(found))}.bin"
            if safe.is_file():
                self._seen.add(safe.name)
                found.append(read_weights(safe))
                self._tell(safe.stat().st_size)
            elif (self.folder / pickled).is_file():
                found.append(self.read(pickled))
            else:
                break
        if not found:
            inside = ", ".join(sorted(p.name for p in self.folder.iterdir() if p.is_dir())) or "none"
            raise CheckpointError(
                f"{self.folder} has neither model.safetensors nor pytorch_model.bin. If a folder in it ({inside}) holds the weights, convert that"
            )
        return found

    def custom_objects(self) -> list[Any]:
        found: list[Any] = []
        while (self.folder / (name := f"custom_checkpoint_{len(found)}.pkl")).is_file():
            found.append(self.read(name))
        return found

    def ranks(self) -> tuple[int, ...]:
        ranks = sorted(int(m[1]) for p in self.folder.iterdir() if (m := _RANK.fullmatch(p.name)))
        if ranks != list(range(len(ranks))):
            raise CheckpointError(f"{self.folder} has random states of ranks {ranks}: some are missing")
        return tuple(ranks)

    def notes(self, no_step: bool) -> list[str]:
        """What isn't in the checkpoint."""
        rest = sorted(p.name for p in self.folder.iterdir() if p.name not in self._seen)
        notes = [f"left out: {', '.join(rest)}"] if rest else []
        notes.append("loaders start at the beginning of an epoch: their positions aren't in such a directory")
        if len(self.ranks()) > 1 and "scheduler.bin" in self._seen:
            notes.append(
                "schedulers count as they were saved: there they step once per process, here once per optimizer step. Give them lengths in optimizer steps"
            )
        if no_step:
            notes.append("the optimizers count no steps: accelerator.step starts at 0 (or give --step)")
        return notes


def _summary() -> dict[str, Any]:
    return {
        "models": [],
        "optimizers": [],
        "schedulers": [],
        "loaders": None,  # not known: they start afresh
        "custom_objects": [],
        "window": None,
    }


def _objects(reader: _Reader, summary: dict[str, Any]) -> dict[str, Any]:
    schedulers = reader.numbered("scheduler", ".bin")
    custom = reader.custom_objects()
    summary["schedulers"], summary["custom_objects"] = ["?"] * len(schedulers), ["?"] * len(custom)
    objects = {f"scheduler[{i}]": state for i, state in enumerate(schedulers)}
    objects["precision"] = reader.read("scaler.pt") if (reader.folder / "scaler.pt").is_file() else {}
    return objects | {f"custom_object[{i}]": state for i, state in enumerate(custom)}


def _by_position(state: Any) -> dict[str, Any]:
    """An optimizer's state dict, with texts for the positions of parameters."""
    try:
        groups = [{**group, "params": [str(p) for p in group["params"]]} for group in state["param_groups"]]
        return {**state, "state": {str(p): values for p, values in state["state"].items()}, "param_groups": groups}
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"optimizer.bin holds no optimizer's state: {error}") from error


def _step_of(optimizers: list[Any]) -> int:
    steps = [v["step"] for o in optimizers for v in o["state"].values() if isinstance(v, Mapping) and "step" in v]
    return max((int(step) for step in steps), default=0)


def _generators(saved: Mapping[str, Any]) -> dict[str, Any]:
    """States of generators in our form; those of accelerators aren't taken over."""
    version, numbers, gauss = saved["random_state"]
    kind, key, position, has_gauss, cached = saved["numpy_random_seed"]
    return {
        "python": [version, list(numbers), gauss],
        "numpy": {
            "bit_generator": kind,
            "state": {"key": key.tolist(), "pos": int(position)},
            "has_gauss": int(has_gauss),
            "gauss": float(cached),
        },
        "torch": saved["torch_manual_seed"],
        "devices": {},
    }


def _write(
    snapshot: Snapshot, output: Path, counters: Mapping[str, int], ranks: tuple[int, ...], world_size: int
) -> Path:
    format = SafetensorsFormat(CheckpointFormatSpec(name="safetensors", suffix=".safetensors"))
    path = output.absolute()
    transaction = Transaction(Agreement(ProcessInfo()), Target(path.parent, path.name))
    try:
        transaction.begin()
        entries = transaction.write(snapshot, format)
        about = {
            "format": "safetensors",
            "world_size": world_size,
            "ranks": ranks,
            "run": uuid.uuid4().hex,
            "created": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "counters": dict(counters),
            "facts": {"converted": "from another program's files", "torch": str(torch.__version__)},
        }
        transaction.commit(entries, about)
    except BaseException:
        transaction.abort()
        raise
    return path
