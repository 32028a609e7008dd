"""The sections ``optimizer`` and ``scheduler``: what DeepSpeed builds itself, without compiling anything unless it is asked to."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from drivetrain.config import nearest
from drivetrain.errors import ConfigurationError, UnsupportedError
from drivetrain_deepspeed.document import AUTO, MISSING

if TYPE_CHECKING:
    from drivetrain_deepspeed.facts import Facts

__all__ = ["fill_optimizer", "fill_scheduler"]

#: DeepSpeed's own Adams, which it compiles when they are first used, by the names of their classes.
_OWN_ADAMS = ("deepspeedcpuadam", "fusedadam")
_ADAMS = ("adam", "adamw")
#: Keywords of DeepSpeed's section that its optimizer isn't given.
_ADAM_KEYWORDS = ("torch_adam", "adam_w_mode", "fp32_optimizer_states")
#: Fields of `Facts` by parameter of an optimizer.
_OF_DUMMY = {"lr": "learning_rate", "weight_decay": "weight_decay", "betas": "betas", "eps": "eps"}
#: What a placeholder stands for if it isn't told, as in Accelerate.
_DUMMY_DEFAULTS = {"lr": 0.001, "weight_decay": 0.0}


def fill_optimizer(config: dict[str, Any], facts: Facts, place: str) -> None:
    """Decide the section, in place.

    Adam and AdamW are torch's, which compile nothing, unless ``torch_adam`` is false or DeepSpeed's own is asked for by its class's name:
    "FusedAdam", or "DeepSpeedCPUAdam" with offload.

    Raises:
        ConfigurationError: If there are two optimizers, or none of that name; for an unknown parameter; for two values of one.
    """
    section = config.get("optimizer")
    if facts.client_optimizer and section is not None:
        raise ConfigurationError(
            f"{place} has a section 'optimizer', and prepare() was given an optimizer, too. Give prepare() a DummyOptim in its place, or remove the "
            "section."
        )
    if not facts.config_optimizer:
        config.pop("optimizer", None)
        return
    section = {"type": "AdamW", "params": {"lr": AUTO, "weight_decay": AUTO}} if section is None else dict(section)
    params = section["params"] = dict(section.get("params") or {})
    if "type" not in section:
        raise ConfigurationError(f"{place}: the section 'optimizer' needs a type, for example \"AdamW\".")
    if "max_grad_norm" in params:
        raise ConfigurationError(f"{place}: optimizer.params.max_grad_norm: write it as gradient_clipping, at the top.")
    cls = _choose_optimizer(section, config, place)
    known = _parameters(cls, ("params", "foreach")) if cls is not None else {}
    for name, field in _OF_DUMMY.items():
        _take(params, name, getattr(facts, field), f"DummyOptim's {name}", f"{place}: optimizer.params.{name}")
    for name, value in _DUMMY_DEFAULTS.items():
        if params.get(name, MISSING) == AUTO or (name == "lr" and name not in params):
            params[name] = value
    _fill_defaults(params, known, f"{place}: optimizer.params")
    _check_names(params, known, (*_ADAM_KEYWORDS, "foreach"), f"{place}: optimizer.params", str(section["type"]))
    if "betas" in params:
        params["betas"] = list(params["betas"])
    config["optimizer"] = section


def _choose_optimizer(section: dict[str, Any], config: Mapping[str, Any], place: str) -> Any:
    """The class that will be built, None for one of DeepSpeed's."""
    import torch
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    kind, params = str(section["type"]), section["params"]
    if kind.lower() in _OWN_ADAMS:
        offloads = config["zero_optimization"].get("offload_optimizer") is not None
        if offloads is not (kind.lower() == "deepspeedcpuadam"):
            raise ConfigurationError(
                f"{place}: optimizer.type={kind!r} {'computes on the device' if offloads else 'computes on the CPU'}, and optimizer state "
                f"{'is offloaded' if offloads else 'is not offloaded'}. Use {'DeepSpeedCPUAdam' if offloads else 'FusedAdam'}, or AdamW for torch's."
            )
        section["type"] = "AdamW"
        if params.get("torch_adam"):
            raise ConfigurationError(
                f"{place}: optimizer.type={kind!r} and torch_adam=true contradict each other. Keep one."
            )
        params["torch_adam"] = False
        return None
    if kind.lower() in _ADAMS:
        if not params.setdefault("torch_adam", True):
            return None
        by_name = kind.lower() == "adamw" or params.get("adam_w_mode", True)
        return torch.optim.AdamW if by_name else torch.optim.Adam
    if kind.lower() in DEEPSPEED_OPTIMIZERS:
        return None
    cls = getattr(torch.optim, kind, None)
    if not (inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer)):
        classes = [n for n, c in vars(torch.optim).items() if inspect.isclass(c) and n != "Optimizer"]
        raise ConfigurationError(
            f"{place}: optimizer.type={kind!r} is neither DeepSpeed's nor torch's.{nearest(kind, {*classes, *DEEPSPEED_OPTIMIZERS})}"
        )
    return cls


def fill_scheduler(config: dict[str, Any], facts: Facts, place: str) -> None:
    """Decide the section, in place. Where the configuration has none, a placeholder stands for a linear rise and fall.

    Raises:
        ConfigurationError: If there are two schedulers, or none of that name; for an unknown parameter; for two values of one, or for a missing one.
        UnsupportedError: For a scheduler that can't follow the engine's optimizer.
    """
    section = config.get("scheduler")
    if facts.client_scheduler and section is not None:
        raise ConfigurationError(
            f"{place} has a section 'scheduler', and prepare() was given a scheduler, too. Give prepare() a DummyScheduler in its place, or remove the "
            "section."
        )
    if not facts.trains or (section is None and not facts.config_scheduler):
        config.pop("scheduler", None)
        return
    if section is None:
        kind = "WarmupLR" if facts.total_num_steps is None else "WarmupDecayLR"
        section = {"type": kind, "params": {"warmup_type": "linear", "warmup_min_lr": AUTO, "warmup_max_lr": AUTO}}
    section = dict(section)
    params = section["params"] = dict(section.get("params") or {})
    if "type" not in section:
        raise ConfigurationError(f"{place}: the section 'scheduler' needs a type, for example \"WarmupDecayLR\".")
    known = _parameters(_choose_scheduler(str(section["type"]), config, place), ("optimizer",))
    _fill_steps(params, known, facts, f"{place}: scheduler.params")
    rate = config["optimizer"]["params"]["lr"] if "optimizer" in config else facts.learning_rate
    _fill_warmup(params, known, rate, f"{place}: scheduler.params")
    _fill_defaults(params, known, f"{place}: scheduler.params")
    _check_names(params, known, (), f"{place}: scheduler.params", str(section["type"]))
    config["scheduler"] = section


def _choose_scheduler(kind: str, config: Mapping[str, Any], place: str) -> Any:
    import torch
    from deepspeed.runtime import lr_schedules

    if kind in lr_schedules.VALID_LR_SCHEDULES:
        return getattr(lr_schedules, kind)
    cls = getattr(torch.optim.lr_scheduler, kind, None)
    if not inspect.isclass(cls):
        raise ConfigurationError(
            f"{place}: scheduler.type={kind!r} is no scheduler of DeepSpeed.{nearest(kind, lr_schedules.VALID_LR_SCHEDULES)}"
        )
    halves = any(config.get(name, {}).get("enabled") for name in ("bf16", "fp16"))
    if config["zero_optimization"]["stage"] or halves:
        raise UnsupportedError(
            f"{place}: scheduler.type={kind!r} is torch's, which can't follow the engine's own optimizer. Give prepare() that scheduler instead, or use "
            f"one of {', '.join(lr_schedules.VALID_LR_SCHEDULES)}."
        )
    return cls


def _fill_steps(params: dict[str, Any], known: Mapping[str, Any], facts: Facts, where: str) -> None:
    for name in ("total_num_steps", "warmup_num_steps"):
        value = getattr(facts, name)
        if name in known:
            _take(params, name, value, f"DummyScheduler's {name}", f"{where}.{name}")
        elif value and facts.config_scheduler:
            raise ConfigurationError(
                f"DummyScheduler's {name}={value} has no effect: {where} has no such parameter. Leave it out."
            )
    if params.get("total_num_steps", AUTO) == AUTO and "total_num_steps" in known:
        raise ConfigurationError(
            f"{where}.total_num_steps isn't known: give prepare() DummyScheduler(optimizer, total_num_steps=...), in optimizer steps, or write the number."
        )
    if params.get("warmup_num_steps") == AUTO:
        params["warmup_num_steps"] = 0


def _fill_warmup(params: dict[str, Any], known: Mapping[str, Any], rate: float | None, where: str) -> None:
    """A warm-up of no steps is one from the rate to the rate: DeepSpeed's schedules take two steps at least."""
    if params.get("warmup_max_lr") == AUTO:
        if rate is None:
            params.pop("warmup_max_lr")  # DeepSpeed takes the optimizer's
        else:
            params["warmup_max_lr"] = rate
    if params.get("warmup_num_steps") != 0:
        for start in ("warmup_min_lr", "warmup_min_ratio"):
            if params.get(start) == AUTO:
                params[start] = 0.0
        return
    start = "warmup_min_ratio" if "warmup_min_ratio" in known else "warmup_min_lr"
    highest = 1.0 if start == "warmup_min_ratio" else params.get("warmup_max_lr", known.get("warmup_max_lr") or rate)
    if highest is None:
        raise ConfigurationError(f"{where}: without a warm-up, write warmup_max_lr: the optimizer's learning rate.")
    if params.setdefault(start, AUTO) not in (AUTO, highest):
        raise ConfigurationError(
            f"{where}: warmup_num_steps=0 and {start}={params[start]!r}: DeepSpeed's schedules warm up for at least two steps. Leave {start} at "
            '"auto" for a schedule that starts at its full rate.'
        )
    params[start], params["warmup_num_steps"] = highest, 1


def _take(params: dict[str, Any], name: str, value: Any, said_by: str, where: str) -> None:
    """One value from a placeholder and the document."""
    if value is None:
        return
    written = params.get(name, AUTO)
    if written != AUTO and _comparable(written) != _comparable(value):
        raise ConfigurationError(
            f'{said_by}={value!r} and {where}={written!r} contradict each other. Give one of them, or write "auto" in the document.'
        )
    params[name] = value


def _comparable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


def _fill_defaults(params: dict[str, Any], known: Mapping[str, Any], where: str) -> None:
    """What nothing says is what the class takes by itself."""
    for name, value in list(params.items()):
        if value != AUTO:
            continue
        if name in known and known[name] is not inspect.Parameter.empty:
            params[name] = known[name]
        elif not known:
            del params[name]  # DeepSpeed's own: its default is its own affair
        else:
            raise ConfigurationError(f'{where}.{name}="auto" isn\'t known from anywhere: write a value.')


def _parameters(cls: Any, without: Iterable[str]) -> dict[str, Any]:
    """Parameters of a class's constructor with their defaults; none if it takes any."""
    found = inspect.signature(cls).parameters
    return {n: p.default for n, p in found.items() if n not in without and n != "self"}


def _check_names(
    params: Mapping[str, Any], known: Mapping[str, Any], more: Iterable[str], where: str, kind: str
) -> None:
    for name in params if known else ():
        if name not in known and name not in more:
            own = ' DeepSpeed\'s own Adam is used with "torch_adam": false.' if "torch_adam" in params else ""
            raise ConfigurationError(f"{where}: {kind} has no parameter {name!r}.{nearest(name, known)}{own}")
