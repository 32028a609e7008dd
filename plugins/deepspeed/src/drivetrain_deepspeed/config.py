"""The configuration that an engine is made with: every value decided, and each said once."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from drivetrain.errors import ConfigurationError, UnsupportedError
from drivetrain_deepspeed.checking import check_document, section_model
from drivetrain_deepspeed.document import AUTO, MISSING, Path, look, name_of, put
from drivetrain_deepspeed.facts import Facts, micro_batch_of
from drivetrain_deepspeed.options import DeepSpeedPlugin
from drivetrain_deepspeed.sections import fill_optimizer, fill_scheduler
from drivetrain_deepspeed.zero import fill_zero, use_aliases

__all__ = ["Facts", "micro_batch_of", "resolve"]

#: Parts of DeepSpeed that the Accelerator's own take the place of, with what to do instead.
_ELSEWHERE: Mapping[Path, str] = {
    ("dataloader_drop_last",): "data loaders are the script's: say drop_last=True there",
    (
        "data_efficiency",
        "data_sampling",
        "enabled",
    ): "data loaders are the script's, and DeepSpeed's samplers aren't used",
    (
        "autotuning",
        "enabled",
    ): "DeepSpeed's own launcher tunes; `drivetrain plan --backend deepspeed` proposes a configuration",
}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16"}


def resolve(options: DeepSpeedPlugin, facts: Facts) -> dict[str, Any]:
    """The complete configuration of one engine, without any "auto": plain DeepSpeed takes it as it is.

    Args:
        options: The settings, with the document.
        facts: What the script and the Accelerator say.

    Raises:
        ConfigurationError: For what DeepSpeed doesn't know, what is said twice and differently, and what nothing says.
        UnsupportedError: For what the device or DeepSpeed can't do.

    Example:
        >>> config = resolve(DeepSpeedPlugin(zero_stage=1), Facts(world_size=2, micro_batch_size=4, accumulation_steps=3))
        >>> config["train_batch_size"], config["zero_optimization"]["stage"]
        (24, 1)
    """
    place = options.place
    config: dict[str, Any] = copy.deepcopy(options.deepspeed_config)
    use_aliases(config, place)
    defaults = check_document(config, place)
    for path, instead in _ELSEWHERE.items():
        if look(config, path) not in (MISSING, False, AUTO):
            raise UnsupportedError(f"{place}: {name_of(path)} has no effect here: {instead}. Leave it out.")
    _fill_batch(config, options, facts)
    _fill_clipping(config, options, facts)
    _fill_precision(config, options, facts)
    fill_zero(config, options, facts)
    fill_optimizer(config, facts, place)
    fill_scheduler(config, facts, place)
    _fill_permissions(config, facts)
    _fill_rest(config, (), defaults, place)
    return config


def _fill_batch(config: dict[str, Any], options: DeepSpeedPlugin, facts: Facts) -> None:
    """Rows per step = rows per micro-batch x micro-batches x processes."""
    steps = options.value_of("gradient_accumulation_steps")
    if steps not in (AUTO, facts.accumulation_steps):
        raise ConfigurationError(
            f"{options.place_of('gradient_accumulation_steps')}={steps} and the Accelerator's "
            f"gradient_accumulation_steps={facts.accumulation_steps} contradict each other. Give one of them."
        )
    steps = facts.accumulation_steps
    micro = options.value_of("train_micro_batch_size_per_gpu")
    total = config.get("train_batch_size", AUTO)
    if micro == AUTO:
        micro = facts.micro_batch_size
    elif facts.micro_batch_size not in (None, micro):
        raise ConfigurationError(
            f"{options.place_of('train_micro_batch_size_per_gpu')}={micro} and the batch size {facts.micro_batch_size} of the data loader "
            'given to prepare() contradict each other. Change one of them, or write "auto".'
        )
    if micro is None and total != AUTO:
        micro, rest = divmod(total, steps * facts.world_size)
        if rest:
            raise ConfigurationError(
                f"{options.place}: train_batch_size={total} can't be divided into {facts.world_size} processes of {steps} micro-batches each."
            )
    if micro is None and (options.hf_ds_config is None or not facts.trains):
        micro = 1  # an engine without loaders of its own only reports it
    if micro is None:
        raise ConfigurationError(
            "The micro-batch size isn't known: give prepare() the training data loader together with the model, or set train_micro_batch_size_per_gpu "
            "(DeepSpeedPlugin, or the DeepSpeed configuration)."
        )
    product = int(micro) * steps * facts.world_size
    if total not in (AUTO, product):
        raise ConfigurationError(
            f"{options.place}: train_batch_size={total} contradicts train_micro_batch_size_per_gpu={micro} x gradient_accumulation_steps={steps} x "
            f'{facts.world_size} processes = {product}. Write "auto", or change one of them.'
        )
    config["train_micro_batch_size_per_gpu"] = int(micro)
    config["gradient_accumulation_steps"] = steps
    config["train_batch_size"] = product


def _fill_clipping(config: dict[str, Any], options: DeepSpeedPlugin, facts: Facts) -> None:
    """What the script asks for, where nothing else says a norm; no clipping where it asks for none."""
    norm = options.value_of("gradient_clipping")
    asked = facts.max_grad_norm
    if norm == AUTO:
        norm = 0.0 if asked is None else asked
    elif asked is not None and asked != norm:
        raise ConfigurationError(
            f"{options.place_of('gradient_clipping')}={norm} and the norm {asked} that the script clips to contradict each other. Give "
            'one of them, or write "auto".'
        )
    config["gradient_clipping"] = float(norm)


def _fill_permissions(config: dict[str, Any], facts: Facts) -> None:
    """Optimizers stay what they are: DeepSpeed neither insists on one of its own nor on those that it knows."""
    own = not facts.client_optimizer and look(config, ("optimizer", "params", "torch_adam")) is not True
    for name, value in {"zero_force_ds_cpu_optimizer": own, "zero_allow_untested_optimizer": True}.items():
        if facts.trains and config.get(name, AUTO) == AUTO:
            config[name] = value


def _fill_precision(config: dict[str, Any], options: DeepSpeedPlugin, facts: Facts) -> None:
    _check_device(facts)
    autocast = bool(options.value_of("torch_autocast"))
    for name in _DTYPES:
        said = look(config, (name, "enabled"))
        wanted = facts.precision == name and not autocast
        if said not in (MISSING, AUTO) and bool(said) is not wanted:
            other = (
                f"torch_autocast for {facts.precision}"
                if autocast
                else f"mixed_precision={facts.precision!r} of the Accelerator"
            )
            raise ConfigurationError(
                f'{options.place}: {name}.enabled={said!r} and {other} contradict each other. Give one of them, or write "auto".'
            )
        if wanted or name in config:
            put(config, (name, "enabled"), wanted)
    if facts.precision == "fp16" and not autocast and "fp16" not in options.deepspeed_config:
        config["fp16"]["hysteresis"] = 1  # the scale falls with the first overflow, as torch's does
    if autocast or "torch_autocast" in config:
        _fill_autocast(config, autocast, options, facts)


def _fill_autocast(config: dict[str, Any], autocast: bool, options: DeepSpeedPlugin, facts: Facts) -> None:
    if autocast and facts.precision == "no":
        raise ConfigurationError(
            "torch_autocast needs mixed_precision='bf16' or 'fp16', which say in what dtype is computed."
        )
    section = config.setdefault("torch_autocast", {})
    section["enabled"] = autocast
    if not autocast:
        if section.get("dtype") == AUTO:
            del section["dtype"]
        return
    dtype, said = _DTYPES[facts.precision], section.get("dtype", AUTO)
    if said not in (AUTO, dtype, f"torch.{dtype}", facts.precision):
        raise ConfigurationError(
            f"{options.place}: torch_autocast.dtype={said!r} and mixed_precision={facts.precision!r} of the Accelerator contradict each other. Give one "
            'of them, or write "auto".'
        )
    section["dtype"] = dtype


def _check_device(facts: Facts) -> None:
    if facts.precision == "no":
        return
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    has = accelerator.is_fp16_supported() if facts.precision == "fp16" else accelerator.is_bf16_supported()
    if not has:
        other = "'bf16' or 'no'" if facts.precision == "fp16" else "'no'"
        raise UnsupportedError(
            f"mixed_precision={facts.precision!r}: DeepSpeed doesn't train in it on this {facts.device_type} device. Use {other}."
        )


def _fill_rest(values: dict[str, Any], above: Path, defaults: Mapping[Path, Any], place: str) -> None:
    """Where "auto" is left, DeepSpeed's default is written down: DeepSpeed itself would take it for true, false or a number, silently."""
    for key, value in list(values.items()):
        path = (*above, key)
        if isinstance(value, dict):
            _fill_rest(value, path, defaults, place)
        elif value == AUTO:
            default = _default(path, defaults)
            if isinstance(default, bool | int | float | str):
                values[key] = default
            elif default is None:
                del values[key]
            else:
                raise ConfigurationError(f'{place}: {name_of(path)}="auto" isn\'t known from anywhere: write a value.')


def _default(path: Path, defaults: Mapping[Path, Any]) -> Any:
    if path in defaults:
        return defaults[path]
    model = section_model(path[0])
    for key in path[1:]:
        fields = {f.alias or name: f for name, f in model.model_fields.items()} if model is not None else {}
        if key not in fields:
            return MISSING
        field, model = fields[key], _inner_model(fields[key].annotation)
    return field.default if len(path) > 1 and model is None else MISSING


def _inner_model(annotation: Any) -> Any:
    candidates = getattr(annotation, "__args__", (annotation,))
    return next((c for c in candidates if hasattr(c, "model_fields")), None)
