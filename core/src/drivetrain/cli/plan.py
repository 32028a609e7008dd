"""``drivetrain plan``: what a training needs, and how it may be divided over devices."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain.interfaces import ShardingPlan
    from drivetrain.memory import Hardware, ModelProfile, PlanReport

__all__ = ["plan"]


_EXAMPLES = """\b
Examples:
  drivetrain plan --params 7e9 --layers 32 --hidden 4096 --devices 8 --device-memory 80GB --batch 64
  drivetrain plan mymodels.gpt:build --devices 8 --accelerator h100-sxm --batch 64 --precision bf16
"""


@click.command(epilog=_EXAMPLES)
@click.argument("target", required=False)
@click.option("--model", help="Function that makes the model: package.module:function. See below.")
@click.option("--params", type=float, help="Number of parameters, as 7e9; with --layers and --hidden.")
@click.option("--layers", type=click.IntRange(min=1), help="Blocks.")
@click.option("--hidden", type=click.IntRange(min=1), help="Width.")
@click.option("--heads", type=click.IntRange(min=1), help="Attention heads.")
@click.option("--intermediate", type=click.IntRange(min=1), help="Width of the MLP.")
@click.option("--vocabulary", type=click.IntRange(min=1), help="Rows of the embedding.")
@click.option("--tied", is_flag=True, default=None, help="Embedding and head are one matrix.")
@click.option("--seq", "--sequence-length", "sequence", type=click.IntRange(min=1), help="Tokens per sample.")
@click.option(
    "--devices", "--num-processes", type=click.IntRange(min=1), default=1, show_default=True, help="Devices in all."
)
@click.option("--devices-per-machine", type=click.IntRange(min=1), help="Devices of one machine.")
@click.option("--device-memory", help="Memory per device, as 80GB.")
@click.option("--accelerator", "accelerator_name", help="What the devices are, as h100-sxm; default: what is here.")
@click.option(
    "--batch", "--batch-size", "batch", type=click.IntRange(min=1), help="Samples per optimizer step, over all devices."
)
@click.option(
    "--micro-batch", type=click.IntRange(min=1), help="Samples per device and micro-batch; default: the best."
)
@click.option(
    "--precision", "--mixed-precision", "precision", default="no", show_default=True, help="no, bf16, fp16, pure-bf16."
)
@click.option("--optimizer", default="adamw", show_default=True, help="Name of a torch optimizer.")
@click.option("--backend", default="auto", show_default=True, help="Only plans for this backend.")
@click.option("--no-recompute", is_flag=True, help="Don't compute activations again.")
@click.option("--no-offload", is_flag=True, help="Keep all state on the devices.")
@click.option(
    "--headroom",
    type=click.FloatRange(0, 0.9),
    default=0.1,
    show_default=True,
    help="Share of the memory to leave free.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write what was chosen: settings for drivetrain.toml if the name ends in .toml, else what the backend's own library takes.",
)
def plan(**given: Any) -> None:
    """Predict memory, communication and time of a training, and choose how to divide it.

    TARGET is the config.json of a transformer (or its directory), or a function like --model's. That function takes no argument and returns the model, or
    (model, batch), or (model, batch, loss), where loss(model, batch) computes the loss. It is called under init_empty_weights(): no weights are made.
    The model's step is traced on fake tensors; of counts and configurations, rules of thumb are used.
    """
    from drivetrain.memory.planning import make_plans, micro_batch_sizes

    devices = given["devices"]
    profile = _profile(given)
    hardware = _hardware(given)
    batch = given["batch"] or devices * (given["micro_batch"] or 1)
    report = make_plans(
        profile, hardware, _request(given, profile, batch, micro_batch_sizes(batch, devices)), backend=given["backend"]
    )
    if given["as_json"]:
        click.echo(json.dumps(report.to_dict(), indent=2))
    else:
        _show(report)
    if report.best is None:
        click.get_current_context().exit(1)
    elif given["output"]:
        _write(given["output"], report, report.best)


def _write(path: Path, report: PlanReport, best: ShardingPlan) -> None:
    from drivetrain._plugins import get_registry
    from drivetrain.cli._plan_text import settings_of

    if path.suffix == ".toml":
        text: str | None = settings_of(report, best) + "\n"
    else:
        registry = get_registry()
        specs = registry.specs("sharding-planner").values()
        spec = next(s for s in specs if s.backend == best.backend)
        text = registry.load("sharding-planner", spec.name)(spec).document(best)
    if text is None:
        raise ConfigurationError(
            f"--output {path}: the backend {best.backend!r} has no file of its own. Give a name that ends in .toml, for settings of Drivetrain."
        )
    path.write_text(text, encoding="utf-8")


def _show(report: PlanReport) -> None:
    from rich.console import Console

    from drivetrain.cli._plan_text import render

    console = Console(highlight=False)
    render(report, console if sys.stdout.isatty() else Console(width=max(100, console.width), highlight=False))


def _request(given: dict[str, Any], profile: ModelProfile, batch: int, sizes: tuple[int, ...]) -> Any:
    from drivetrain.interfaces import TrainingRequest

    if given["micro_batch"]:
        if batch % (given["micro_batch"] * given["devices"]):
            raise ConfigurationError(
                f"--batch {batch} isn't a multiple of {given['devices']} devices times --micro-batch {given['micro_batch']}."
            )
        sizes = (given["micro_batch"],)
    return TrainingRequest(
        batch_size=batch,
        micro_batches=sizes,
        precision=profile.precision,
        recompute=("none",) if given["no_recompute"] else tuple(profile.timelines),
        offload=not given["no_offload"],
        headroom=given["headroom"],
    )


# -- the model -----------------------------------------------------------------------------------------------------------------


def _profile(given: dict[str, Any]) -> ModelProfile:
    from drivetrain.memory import profile_of_config, profile_of_counts

    target, model = given["target"], given["model"]
    ways = [name for name, said in (("TARGET", target), ("--model", model), ("--params", given["params"])) if said]
    if len(ways) != 1:
        raise ConfigurationError(
            f"Say which model: --model package.module:function, --params with --layers and --hidden, or a path to a config.json. "
            f"Given: {', '.join(ways) or 'nothing'}."
        )
    precision = {"no": "fp32"}.get(given["precision"], given["precision"])
    names = ("layers", "hidden", "heads", "intermediate", "vocabulary", "tied", "sequence")
    counts = {name: given[name] for name in names if given[name] is not None}
    settings = {**counts, "precision": precision, "optimizer": given["optimizer"]}
    if given["params"]:
        missing = [f"--{name}" for name in ("layers", "hidden") if name not in counts]
        if missing:
            raise ConfigurationError(f"--params needs {' and '.join(missing)}: activations depend on them.")
        return profile_of_counts(parameters=given["params"], **settings)
    if target and Path(target).exists():
        return profile_of_config(target, **settings)
    name = model or target
    if ":" not in name:
        raise ConfigurationError(
            f"{name!r} is no file or directory here, and no package.module:function. Nothing is downloaded: give the path to a model's config.json."
        )
    return _trace(name, given, counts)


def _trace(name: str, given: dict[str, Any], counts: dict[str, Any]) -> ModelProfile:
    import torch

    from drivetrain.big_model.initialization import init_empty_weights
    from drivetrain.memory.profiler import profile_model

    unused = sorted(set(counts) - {"sequence"})
    if unused:
        raise ConfigurationError(f"--{unused[0]} is for rules of thumb; {name} is traced as it is.")
    if "" not in sys.path:
        sys.path.insert(0, "")
    with init_empty_weights():
        made = _load(name)()
    model, batch, loss = (*made, None)[:3] if isinstance(made, tuple) and len(made) in (2, 3) else (made, None, None)
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(
            f"{name} must return a model, (model, batch) or (model, batch, loss), not {type(made).__name__}."
        )
    batch = _tokens(model, name, given["sequence"]) if batch is None else batch
    return profile_model(
        model, batch, optimizer=_optimizer(given["optimizer"]), loss=loss, precision=_precision(given["precision"])
    )


def _load(name: str) -> Any:
    import importlib

    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"{name} can't be loaded: {error}") from error
    return found


def _tokens(model: Any, name: str, sequence: int | None) -> Any:
    """Token ids for a model that says how many there are."""
    import torch

    config = getattr(model, "config", None)
    vocabulary = getattr(config, "vocab_size", None)
    if vocabulary is None:
        raise ConfigurationError(
            f"{name} returns a model alone, and it isn't known what goes in: return (model, batch)."
        )
    length = sequence or min(int(getattr(config, "max_position_embeddings", 2048)), 2048)
    ids = torch.zeros(2, length, dtype=torch.long)
    return {"input_ids": ids, "labels": ids.clone()}


def _optimizer(name: str) -> Any:
    import torch

    known: dict[str, Any] = {
        n.lower(): c
        for n, c in vars(torch.optim).items()
        if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)
    }
    cls = known.get(name.lower().replace("sgd-momentum", "sgd"))
    if cls is None:
        raise ConfigurationError(f"torch has no optimizer {name!r}. It has: {', '.join(sorted(known))}.")
    momentum = {"momentum": 0.9} if name.lower() == "sgd-momentum" else {}
    return lambda parameters: cls(parameters, lr=1e-3, **momentum)


def _precision(name: str) -> Any:
    from drivetrain._plugins import get_registry

    registry = get_registry()
    spec = registry.get("precision", name)
    return registry.load("precision", spec.name)(spec, device_type="cpu", options={})


# -- the devices ---------------------------------------------------------------------------------------------------------------


def _hardware(given: dict[str, Any]) -> Hardware:
    from drivetrain.memory import known_accelerators, known_hardware, parse_bytes

    devices, near = given["devices"], given["devices_per_machine"]
    memory = parse_bytes(given["device_memory"]) if given["device_memory"] else None
    if given["accelerator_name"]:
        hardware = known_hardware(given["accelerator_name"], devices=devices, per_machine=near)
        return hardware if memory is None else replace(hardware, memory=memory)
    if memory is not None:
        # Of those with so much memory the first one that was sold: no promises of speed are made on a guess.
        known = known_accelerators()
        nearest = min(known, key=lambda n: (abs(known[n]["memory"] - memory), known[n]["flops"]["float32"]))
        hardware = known_hardware(nearest, devices=devices, per_machine=near)
        return replace(hardware, memory=memory, name=f"speed of {nearest} assumed")
    import torch

    from drivetrain.memory.machine import present_hardware

    device = torch.accelerator.current_accelerator() or torch.device("cpu")
    return present_hardware(device, devices=devices, per_machine=near)
