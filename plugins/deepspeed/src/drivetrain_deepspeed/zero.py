"""The section ``zero_optimization``: what is sharded, where it lives, and how large buckets are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from drivetrain.errors import ConfigurationError, UnsupportedError
from drivetrain_deepspeed.checking import section_model
from drivetrain_deepspeed.document import AUTO, name_of

if TYPE_CHECKING:
    from drivetrain_deepspeed.facts import Facts
    from drivetrain_deepspeed.options import DeepSpeedPlugin

__all__ = ["bucket_sizes", "fill_zero", "use_aliases"]

_ZERO = "zero_optimization"


def fill_zero(config: dict[str, Any], options: DeepSpeedPlugin, facts: Facts) -> None:
    """Decide the section, in place.

    Raises:
        ConfigurationError: For what has no effect at the stage, and for a folder that isn't there.
        UnsupportedError: Where DeepSpeed would keep state in memory that belongs on a disk, or round parameters that it keeps there.
    """
    zero: dict[str, Any] = config.setdefault(_ZERO, {})
    stage = int(options.value_of("zero_stage"))
    zero["stage"] = stage
    for kind in ("optimizer", "param"):
        _fill_offload(zero, kind, options)
    if options.value_of("zero3_save_16bit_model"):
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    if options.transformer_moe_cls_names:
        zero.setdefault("leaf_module", {})["classes"] = list(options.value_of("transformer_moe_cls_names"))
    _only_at_stage_3(zero, stage, options.place)
    if stage and options.hf_ds_config is None:
        for name in bucket_sizes(stage, facts):
            zero.setdefault(name, AUTO)
    for name, size in bucket_sizes(stage, facts).items():
        if zero.get(name) == AUTO:
            zero[name] = size
    _check_disk(zero, facts)
    if not facts.trains:
        _without_optimizer(zero)


def bucket_sizes(stage: int, facts: Facts) -> dict[str, int]:
    """Sizes in elements for what is left open.

    From the model's hidden size h: a reduce bucket holds one h x h matrix, 90 % of one is prefetched, and what is smaller than ten rows stays whole on
    each process. Where h isn't known, DeepSpeed's defaults, but never more than the model has: buckets are allocated whatever they hold.

    Example:
        >>> from drivetrain_deepspeed.facts import Facts
        >>> bucket_sizes(3, Facts(world_size=2, hidden_size=100))["reduce_bucket_size"]
        10000
        >>> bucket_sizes(2, Facts(world_size=2, parameter_count=1000))
        {'reduce_bucket_size': 1000, 'allgather_bucket_size': 1000}
    """
    h = facts.hidden_size
    most = max(facts.parameter_count, 1) if facts.parameter_count else 500_000_000
    reduce = h * h if h else min(500_000_000, most)
    sizes = {"reduce_bucket_size": reduce}
    if stage < 3:
        sizes["allgather_bucket_size"] = reduce + reduce % 2  # DeepSpeed asserts that it is even
    else:
        sizes["stage3_prefetch_bucket_size"] = int(0.9 * h * h) if h else min(50_000_000, most)
        sizes["stage3_param_persistence_threshold"] = 10 * h if h else min(100_000, most // 100)
    return sizes


def use_aliases(config: dict[str, Any], place: str) -> None:
    """DeepSpeed takes fields by two names ("prefetch_bucket_size", "stage3_prefetch_bucket_size"); here they have the second one, in place.

    Raises:
        ConfigurationError: If both are there.
    """
    zero = config.get(_ZERO)
    if not isinstance(zero, dict):
        return
    for name, field in section_model(_ZERO).model_fields.items():
        if field.alias and name in zero:
            if field.alias in zero:
                raise ConfigurationError(
                    f"{place}: {_ZERO} has both {name!r} and {field.alias!r}, which are one setting. Keep one of them."
                )
            zero[field.alias] = zero.pop(name)


def _fill_offload(zero: dict[str, Any], kind: str, options: DeepSpeedPlugin) -> None:
    device = options.value_of(f"offload_{kind}_device")
    section = f"offload_{kind}"
    if device == "none":
        zero.pop(section, None)
        return
    values = zero[section] = dict(zero.get(section) or {})
    values["device"] = device
    if device != "nvme":
        values.pop("nvme_path", None)
        return
    path = options.value_of(f"offload_{kind}_nvme_path")
    if path is None or path == AUTO:
        raise ConfigurationError(f"{section} keeps state on a disk: say in which folder, with {section}_nvme_path.")
    values["nvme_path"] = str(path)


def _only_at_stage_3(zero: dict[str, Any], stage: int, place: str) -> None:
    if stage == 3:
        return
    for name, field in _stage_3_fields():
        value = zero.get(name, field.default)
        if value == AUTO:
            del zero[name]
        elif value != field.default:
            raise ConfigurationError(
                f"{place}: {name_of((_ZERO, name))}={value!r} has an effect at stage 3 alone, and the stage is {stage}. Leave it out, write "
                '"auto", or choose stage 3.'
            )


def _stage_3_fields() -> Iterator[tuple[str, Any]]:
    for name, field in section_model(_ZERO).model_fields.items():
        if (field.alias or name).startswith("stage3_"):
            yield field.alias or name, field


def _check_disk(zero: dict[str, Any], facts: Facts) -> None:
    """DeepSpeed up to 0.19 takes "nvme" for "cpu" below stage 3, and keeps float32 parameters on disk as bf16 where the device has no fp16."""
    if zero["stage"] < 3 and (zero.get("offload_optimizer") or {}).get("device") == "nvme":
        raise UnsupportedError(
            f"offload_optimizer_device='nvme' at stage {zero['stage']}: DeepSpeed keeps optimizer state on a disk at stage 3 alone; below, it would stay in "
            "the CPU's memory. Use zero_stage=3, or offload_optimizer_device='cpu'."
        )
    on_disk = zero.get("offload_param", {}).get("device") == "nvme"
    if not on_disk or facts.precision != "no":
        return
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().is_fp16_supported():
        raise UnsupportedError(
            "offload_param_device='nvme' in full precision: on a device without fp16, DeepSpeed rounds the parameters that it keeps on the disk to "
            "bf16. Use mixed_precision='bf16', or offload_param_device='cpu'."
        )


def _without_optimizer(zero: dict[str, Any]) -> None:
    """A model that no optimizer belongs to: stages 1 and 2 have nothing to shard, and DeepSpeed refuses them."""
    if zero["stage"] in (1, 2):
        zero["stage"] = 0
    zero.pop("offload_optimizer", None)
