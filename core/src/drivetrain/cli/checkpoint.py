"""``drivetrain checkpoint``: list, look into, check, export, compare and convert checkpoints."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from drivetrain.checkpoint.location import Location, is_remote, locate
from drivetrain.checkpoint.manifest import Manifest
from drivetrain.checkpoint.naming import list_checkpoints
from drivetrain.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from drivetrain.checkpoint.adopting import ForeignState
    from drivetrain.checkpoint.source import Source
    from drivetrain.checkpoint.store import TensorStore

__all__ = ["checkpoint", "export"]

_UNITS = ("B", "KB", "MB", "GB", "TB")
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class _LocationType(click.ParamType):  # type: ignore[type-arg]  # older versions of click have no arguments
    """A directory, or a URL that fsspec understands."""

    name = "path or URL"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Location:
        return locate(value) if is_remote(value) else Path(value)


_location = _LocationType()
_directory = click.argument("directory", type=_location)


@click.group()
def checkpoint() -> None:
    """List, look into, check, export, compare and convert checkpoints."""


@checkpoint.command("list")
@click.argument("folder", type=_location, default=".")
@_json_option
def list_command(folder: Location, as_json: bool) -> None:
    """List the checkpoints of a folder or project, whole or not."""
    inside = folder / "checkpoints"
    found = list_checkpoints(inside if inside.is_dir() else folder)
    rows = [{"path": str(entry.path), "name": entry.path.name, **_summary(entry.path)} for entry in found]
    if as_json:
        _print_json(rows)
        return
    if not rows:
        click.echo(f"There are no checkpoints in {folder}.")
        return
    table = [("checkpoint", "step", "epoch", "size", "processes", "saved", "")]
    for row in rows:
        counters = row.get("counters", {})
        table.append(
            (
                row["name"],
                str(counters.get("step", "")),
                str(counters.get("epoch", "")),
                size_text(row["size"]) if "size" in row else "",
                str(row.get("world_size", "")),
                row.get("created", ""),
                row["problem"] and f"broken: {row['problem']}",
            )
        )
    click.echo("\n".join(_columns(table)))


@checkpoint.command()
@_directory
@click.option("--tensors", is_flag=True, help="List every tensor with dtype, shape and size.")
@_json_option
def inspect(directory: Location, tensors: bool, as_json: bool) -> None:
    """Show what a checkpoint consists of."""
    manifest = Manifest.read(directory)
    rows = list(_tensor_rows(directory, manifest)) if tensors else []
    if as_json:
        _print_json({**_about(manifest), "files": _files(manifest), **({"tensors": rows} if tensors else {})})
        return
    for key, value in _about(manifest).items():
        if key == "size":
            value = size_text(value)
        if isinstance(value, Mapping):
            value = ", ".join(f"{k} {v}" for k, v in value.items())
        click.echo(f"{key.replace('_', ' '):<16}{value}")
    click.echo()
    table = [(name, size_text(e["size"]), e["content"], e["checksum"]) for name, e in _files(manifest).items()]
    click.echo("\n".join(_columns([("file", "size", "holds", "checksum"), *table])))
    if tensors:
        click.echo()
        lines = [
            (r["of"], r["name"], r["dtype"], "x".join(map(str, r["shape"])) or "scalar", size_text(r["size"]))
            for r in rows
        ]
        click.echo("\n".join(_columns([("of", "tensor", "dtype", "shape", "size"), *lines])))


@checkpoint.command()
@_directory
@click.pass_context
def verify(ctx: click.Context, directory: Location) -> None:
    """Check every file against the manifest.

    Exits with 1 and names the broken files if any is damaged.
    """
    from drivetrain.checkpoint.verification import verify as check

    size = Manifest.read(directory).size
    with _progress("checking", length=size) as bar:
        result = check(directory, progress=bar.update)
    for clause in result.damage:
        click.echo(f"{click.style('broken:', fg='red')} {clause}", err=True)
    for name in result.foreign:
        click.echo(f"not part of it, and never read: {name}")
    if result.damage:
        ctx.exit(1)
    click.echo(f"{directory} is whole: {len(result.manifest.files)} files, {size_text(size)}.")


@checkpoint.command()
@_directory
@click.argument("output", type=_location)
@click.option("--model", "index", default=0, show_default=True, help="Which model, in the order of prepare.")
@click.option("--max-shard-size", default="10GB", show_default=True, help="Largest file, as in 10GB or 500MiB.")
@click.option("--unsafe-serialization", is_flag=True, help="Write a pickle, for tools that read nothing else.")
def export(directory: Location, output: Location, index: int, max_shard_size: str, unsafe_serialization: bool) -> None:
    """Write a model's weights alone: model.safetensors, or shards with an index.

    OUTPUT is a directory, or a URL that fsspec understands.
    """
    from drivetrain.checkpoint.capture import content_name
    from drivetrain.checkpoint.export import parse_size, save_model

    parse_size(max_shard_size)
    with _open(directory) as source:
        models = source.state["models"]
        if not 0 <= index < len(models) or not models[index]["saved"]:
            raise CheckpointError(f"{directory} holds no weights of a model {index}; it has {len(models)} models")
        store = source.store(content_name("model", index))
        weights = {}
        with _progress("reading", iterable=store.names()) as names:
            for name in names:
                weights[name] = store.read(name)
        weights.update((alias, weights[kept]) for alias, kept in models[index]["aliases"].items())
        files = save_model(
            weights, str(output), max_shard_size=max_shard_size, safe_serialization=not unsafe_serialization
        )
    for file in files:
        click.echo(f"{file}{_size_of(file)}")


@checkpoint.command()
@click.argument("first", type=_location)
@click.argument("second", type=_location)
@click.option(
    "--tolerance", type=click.FloatRange(min=0), default=0.0, help="Largest difference of values to pass over."
)
@_json_option
@click.pass_context
def diff(ctx: click.Context, first: Location, second: Location, tolerance: float, as_json: bool) -> None:
    """Compare two checkpoints: counters, facts, and every tensor of models and optimizers.

    Exits with 1 if tensors differ.
    """
    with _open(first) as a, _open(second) as b:
        about = _different(_about(a.manifest), _about(b.manifest))
        with _progress("comparing", length=max(a.manifest.size, b.manifest.size)) as bar:
            tensors = list(_tensor_differences(a, b, tolerance, bar.update))
    if as_json:
        _print_json({"about": about, "tensors": tensors})
    else:
        for key, (left, right) in about.items():
            click.echo(f"{key}: {left} | {right}")
        for row in tensors:
            click.echo(f"{row['of']} {row['name']}: {row['difference']}")
        if not tensors:
            click.echo("All tensors are equal." if tolerance == 0 else f"All tensors are equal within {tolerance:g}.")
    if tensors:
        ctx.exit(1)


@checkpoint.command()
@click.argument("source", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option("--key", default="", help="The entry that holds the weights, where a file has others: model, state_dict.")
@click.option("--max-shard-size", default="10GB", show_default=True, help="Largest file of weights.")
@click.option("--step", type=click.IntRange(min=0), help="Optimizer steps so far; default: what the optimizers say.")
@click.option("--epoch", type=click.IntRange(min=0), default=0, show_default=True, help="The epoch to go on in.")
def convert(source: Path, output: Path, key: str, max_shard_size: str, step: int | None, epoch: int) -> None:
    """Make safetensors of other programs' files, and a checkpoint of a whole state that Accelerate or a backend's vendor saved.

    SOURCE is a file of torch.save (.bin, .pt, .pth, .ckpt), a directory with such files, a directory of torch's distributed
    checkpoints, a directory of Accelerate's save_state, or a checkpoint in the own format of an installed backend's vendor. Nothing that stands in them is run: they may hold plain data, tensors and
    arrays, and are refused otherwise.
    """
    from drivetrain.checkpoint.adopting import adopt, adopt_state, is_session
    from drivetrain.checkpoint.export import parse_size, save_model
    from drivetrain.checkpoint.foreign import read_foreign_weights

    parse_size(max_shard_size)
    session = is_session(source)
    state = None if session else _foreign_state(source)
    whole = session or state is not None
    if whole and key:
        raise CheckpointError(f"{source} is converted as a whole: leave out --key")
    if not whole and (step is not None or epoch):
        raise CheckpointError(f"{source} holds weights alone: leave out --step and --epoch")
    paths = [source] if source.is_file() else sorted(p for p in source.rglob("*") if p.is_file())
    with _progress("reading", length=sum(p.stat().st_size for p in paths)) as bar:
        if state is not None:
            adopted = adopt_state(state, output, step=step, epoch=epoch)
        elif session:
            adopted = adopt(source, output, step=step, epoch=epoch, progress=bar.update)
        else:
            found = read_foreign_weights(source, key=key, progress=bar.update)
    if whole:
        for note in adopted.notes:
            click.echo(f"{note}.", err=True)
        click.echo(f"{adopted.path}: accelerator.load_state() takes it.")
        return
    if found.left_out:
        shown = ", ".join(found.left_out[:10]) + (" ..." if len(found.left_out) > 10 else "")
        click.echo(f"left out: {shown}", err=True)
    for file in save_model(found.weights, str(output), max_shard_size=max_shard_size):
        click.echo(f"{file}{_size_of(file)}")


def _foreign_state(source: Path) -> ForeignState | None:
    """What a backend's vendor saved there; None if no installed backend knows the folder."""
    from drivetrain._plugins import get_registry

    if not source.is_dir():
        return None
    registry = get_registry()
    for name, spec in registry.specs("backend").items():
        if spec.adopts:
            found: ForeignState | None = registry.load("backend", name, spec.adopts)(source)
            if found is not None:
                return found
    return None


def size_text(size: float) -> str:
    """A size for people, in decimal units.

    Example:
        >>> size_text(999), size_text(1_500_000)
        ('999 B', '1.5 MB')
    """
    unit = 0
    while size >= 1000 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return f"{size:.3g} {_UNITS[unit]}"


def _size_of(file: Location) -> str:
    return f"  {size_text(file.stat().st_size)}" if isinstance(file, Path) else ""


def _summary(path: Location) -> dict[str, Any]:
    try:
        manifest = Manifest.read(path)
        problem = ""
        try:
            manifest.check_files(path)
        except CheckpointError as error:
            problem = str(error)
        return {**_about(manifest), "problem": problem}
    except CheckpointError as error:
        return {"problem": str(error)}


def _about(manifest: Manifest) -> dict[str, Any]:
    return {
        "created": manifest.created,
        "run": manifest.run,
        "counters": {k: v for k, v in manifest.counters.items() if not isinstance(v, Mapping)},
        "size": manifest.size,
        "world_size": manifest.world_size,
        "ranks": len(manifest.ranks),
        "format": f"{manifest.format}, layout version {manifest.version}",
        "facts": dict(manifest.facts),
        "metadata": dict(manifest.metadata),
    }


def _files(manifest: Manifest) -> dict[str, dict[str, Any]]:
    return {n: {"size": e.size, "content": e.content, "checksum": e.checksum} for n, e in manifest.files.items()}


def _different(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    skipped = ("created", "run", "size")
    return {k: (a.get(k), b.get(k)) for k in {**a, **b} if a.get(k) != b.get(k) and k not in skipped}


def _open(directory: Location) -> Source:
    from drivetrain._plugins import get_registry
    from drivetrain.checkpoint.mirror import Mirror
    from drivetrain.checkpoint.source import Source

    manifest = Manifest.read(directory)
    manifest.check_files(directory)
    registry = get_registry()
    spec = registry.get("checkpoint-format", manifest.format)
    return Source(Mirror(directory, manifest), registry.load("checkpoint-format", spec.name)(spec))


def _stores(source: Source) -> Iterator[tuple[str, TensorStore]]:
    """Tensors of models, optimizers and the rest; not those of single ranks."""
    held = {
        e.content.removeprefix("tensors:") for e in source.manifest.files.values() if e.content.startswith("tensors:")
    }
    for content in sorted({*held, *source.state["parts"]}):
        if not content.startswith("rank:"):
            yield content, source.store(content)


def _tensor_rows(directory: Location, manifest: Manifest) -> Iterator[dict[str, Any]]:
    import math

    from drivetrain.checkpoint.tensors import dtype_name

    with _open(directory) as source:
        for content, store in _stores(source):
            for name in store.names():
                dtype, shape = store.dtype(name), store.shape(name)
                size = math.prod(shape) * dtype.itemsize
                yield {"of": content, "name": name, "dtype": dtype_name(dtype), "shape": list(shape), "size": size}


def _tensor_differences(
    a: Source, b: Source, tolerance: float, tell: Callable[[int], None]
) -> Iterator[dict[str, Any]]:
    left, right = dict(_stores(a)), dict(_stores(b))
    for content in sorted({*left, *right}):
        names = [set(side[content].names()) if content in side else set() for side in (left, right)]
        for name in sorted(names[0] | names[1]):
            if name not in names[0] or name not in names[1]:
                text: str | None = f"only in {(b if name in names[1] else a).directory}"
            else:
                values = left[content].read(name)
                text = _difference(values, right[content].read(name), tolerance)
                tell(values.nbytes)
            if text is not None:
                yield {"of": content, "name": name, "difference": text}


def _difference(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> str | None:
    import torch

    if a.shape != b.shape:
        return f"shape {list(a.shape)} | {list(b.shape)}"
    if a.dtype != b.dtype:
        return f"dtype {a.dtype} | {b.dtype}"
    if torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) if a.ndim else a.equal(b):
        return None
    wide = torch.complex128 if a.is_complex() else torch.float64
    distance = (a.to(wide) - b.to(wide)).abs()
    distance[torch.isnan(a.to(wide)) & torch.isnan(b.to(wide))] = 0
    largest = float(distance.max())
    if largest <= tolerance:
        return None
    return f"{int((distance > tolerance).sum())} of {a.numel()} values differ, by up to {largest:.3g}"


def _progress(label: str, **kwargs: Any) -> Any:
    """A bar for people; logs and other programs get nothing of it."""
    return click.progressbar(label=label, file=sys.stderr if sys.stderr.isatty() else io.StringIO(), **kwargs)


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2))
