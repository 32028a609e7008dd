"""Settings of sharding, under the names that Accelerate has for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from drivetrain.config import Options
from drivetrain.errors import ConfigurationError, UnsupportedError

__all__ = ["FullyShardedDataParallelPlugin"]

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "no": "float32"}
_POLICY = ("param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs")
_WRAP = {
    "auto": "auto",
    "transformer_based_wrap": "TRANSFORMER_BASED_WRAP",
    "size_based_wrap": "SIZE_BASED_WRAP",
    "no_wrap": "NO_WRAP",
}

#: Keeps parameters whole between forward and backward, by strategy; None leaves it to torch, which does so for the root alone.
_RESHARD = {
    "FULL_SHARD": None,
    "HYBRID_SHARD": None,
    "SHARD_GRAD_OP": False,
    "HYBRID_SHARD_ZERO2": False,
    "NO_SHARD": False,
    "AUTO": None,
}

if TYPE_CHECKING:
    WrapPolicy = str | Callable[..., bool]
else:
    WrapPolicy = str  # what files and variables can say; functions are looked at when they are used

Names = list[str]


@dataclass
class FullyShardedDataParallelPlugin(Options):
    """How parameters, gradients and optimizer state are sharded.

    Args:
        sharding_strategy: "FULL_SHARD": everything is sharded, and parameters are whole only around their use. "SHARD_GRAD_OP": parameters stay
            whole from forward to backward. "NO_SHARD": a replica on each process. "HYBRID_SHARD" and "HYBRID_SHARD_ZERO2": the first two within
            a machine, replicas across machines (other meshes: ``ParallelismConfig``). "auto": the fastest that fits, found when the model is
            prepared; state goes to the CPU's memory if nothing else fits.
        reshard_after_forward: Whether parameters are sharded again after forward; a number: over so many processes only. None: as the
            strategy says.
        auto_wrap_policy: Which modules are gathered as one unit. "auto": those that the model declares in ``_no_split_modules``, or the
            blocks that it repeats. "TRANSFORMER_BASED_WRAP": by class name. "SIZE_BASED_WRAP": by ``min_num_params``. "NO_WRAP": the
            whole model. Or a function that is given a module and answers yes or no. What is left belongs to the model's own unit.
        transformer_cls_names_to_wrap: Names of the classes to wrap.
        min_num_params: Parameters that a unit must have.
        ignored_modules: Names of modules (or a regular expression of them, or the modules) whose parameters aren't sharded: every process keeps them,
            and their gradients aren't averaged, so that they must be frozen.
        mixed_precision_policy: Dtypes as a mapping with ``param_dtype`` (gathered parameters), ``reduce_dtype`` (gradients on their way),
            ``output_dtype`` and ``cast_forward_inputs``, or one name for the first three. None: in bf16 and fp16 parameters are gathered in
            that dtype, and gradients reduced in float32.
        cpu_offload: Shards, gradients and optimizer state live in the CPU's memory.
        backward_prefetch: "BACKWARD_PRE": the next unit is gathered while one computes backward. "NO_PREFETCH": when it is needed. A number:
            so many units ahead.
        forward_prefetch: Units that are gathered ahead in forward, in the order in which the model holds them; True for one.
        sync_module_states: All processes start with the weights of rank 0; without it, each cuts its shard from the weights that it made.
        param_init_fn: Called with each module of a model on the meta device that has parameters of its own, to fill them; None:
            ``reset_parameters`` or the model's ``_init_weights``.
        cpu_ram_efficient_loading: Rank 0 alone may have weights, and other processes a model on the meta device: shards are sent. False refuses that.
        activation_checkpointing: Recompute the units' activations in backward; more settings: ``ActivationCheckpointing``.
        state_dict_type: Checkpoints are read at any number of processes and hold a whole ``model.safetensors``, so "FULL_STATE_DICT" and
            "SHARDED_STATE_DICT" change nothing; "LOCAL_STATE_DICT" is refused.
        fsdp_version: 2; version 1 is refused.
        limit_all_gathers: Always on.
        use_orig_params: Always so.

    Example:
        >>> FullyShardedDataParallelPlugin(sharding_strategy="SHARD_GRAD_OP").reshard()
        False
        >>> FullyShardedDataParallelPlugin(mixed_precision_policy="bf16").mixed_precision_policy
        {'param_dtype': 'bfloat16', 'reduce_dtype': 'bfloat16', 'output_dtype': 'bfloat16'}
    """

    sharding_strategy: Literal[
        "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "AUTO"
    ] = "FULL_SHARD"
    reshard_after_forward: bool | int | None = None
    auto_wrap_policy: WrapPolicy = "auto"
    transformer_cls_names_to_wrap: Names = field(default_factory=list)
    min_num_params: int = 0
    ignored_modules: str | Names | None = None
    mixed_precision_policy: dict[str, str | bool | None] | str | None = None
    cpu_offload: bool = False
    backward_prefetch: int | str | None = "BACKWARD_PRE"
    forward_prefetch: bool | int = False
    sync_module_states: bool = True
    param_init_fn: Callable[..., Any] | None = None
    cpu_ram_efficient_loading: bool = True
    activation_checkpointing: bool = False
    state_dict_type: Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"] = "SHARDED_STATE_DICT"
    fsdp_version: int = 2
    limit_all_gathers: bool = True
    use_orig_params: bool = True

    def __post_init__(self) -> None:
        for name in ("sharding_strategy", "state_dict_type", "backward_prefetch"):
            setattr(self, name, _enum_name(getattr(self, name)))
        names: Any = self.transformer_cls_names_to_wrap
        if isinstance(names, str):
            self.transformer_cls_names_to_wrap = [n.strip() for n in names.split(",") if n.strip()]
        self.mixed_precision_policy = _policy(self.mixed_precision_policy)
        self._check_wrapping()
        self.validate()
        self._check_strategy()
        self._check_prefetch()
        self._refuse()

    def _check_strategy(self) -> None:
        if self.reshard_after_forward is None or "reshard_after_forward" not in self._given:
            return
        said = _RESHARD[self.sharding_strategy]
        if "sharding_strategy" in self._given and (said is False) is not (self.reshard_after_forward is False):
            raise ConfigurationError(
                f"sharding_strategy={self.sharding_strategy!r} and reshard_after_forward={self.reshard_after_forward!r} "
                "contradict each other. Give one of them."
            )

    def _check_wrapping(self) -> None:
        if not isinstance(self.auto_wrap_policy, str):
            return
        policy = _WRAP.get(self.auto_wrap_policy.lower())
        if policy is None:
            raise ConfigurationError(
                f"auto_wrap_policy={self.auto_wrap_policy!r}: use one of {', '.join(_WRAP.values())}, or a function of a module."
            )
        if policy == "SIZE_BASED_WRAP" and not self.min_num_params:
            raise ConfigurationError("auto_wrap_policy='SIZE_BASED_WRAP' needs min_num_params above 0.")
        if self.min_num_params and self.transformer_cls_names_to_wrap and policy == "auto":
            raise ConfigurationError("transformer_cls_names_to_wrap and min_num_params exclude each other: give one.")
        if policy == "auto" and self.transformer_cls_names_to_wrap:
            policy = "TRANSFORMER_BASED_WRAP"
        elif policy == "auto" and self.min_num_params:
            policy = "SIZE_BASED_WRAP"
        unused = {
            "transformer_cls_names_to_wrap": self.transformer_cls_names_to_wrap and policy != "TRANSFORMER_BASED_WRAP",
            "min_num_params": self.min_num_params and policy != "SIZE_BASED_WRAP",
        }
        for name, wrong in unused.items():
            if wrong:
                raise ConfigurationError(
                    f"{name} has no effect with auto_wrap_policy={policy!r}: leave one of them out."
                )
        self.auto_wrap_policy = policy

    def _check_prefetch(self) -> None:
        value = self.backward_prefetch
        if value is None:
            self.backward_prefetch = "NO_PREFETCH"
        elif isinstance(value, str) and value.upper() in ("BACKWARD_PRE", "NO_PREFETCH"):
            self.backward_prefetch = value.upper()
        elif isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigurationError(
                f"backward_prefetch={value!r}: use 'BACKWARD_PRE', 'NO_PREFETCH' or a number of units. ('BACKWARD_POST' was version 1's; "
                "'NO_PREFETCH' needs as little memory.)"
            )
        for name in ("forward_prefetch", "min_num_params"):
            if getattr(self, name) < 0:
                raise ConfigurationError(f"{name}={getattr(self, name)} must be 0 or more.")

    def _refuse(self) -> None:
        if self.fsdp_version != 2:
            raise UnsupportedError(
                f"fsdp_version={self.fsdp_version}: Drivetrain shards with fully_shard, which is version 2. Leave it out; "
                "all strategies of version 1 are there under the same names."
            )
        if self.state_dict_type == "LOCAL_STATE_DICT":
            raise UnsupportedError(
                "state_dict_type='LOCAL_STATE_DICT' ties a checkpoint to the number of processes that wrote it. Leave it out: checkpoints are "
                "written by shards, and read at any number."
            )
        for name in ("limit_all_gathers", "use_orig_params"):
            if getattr(self, name) is not True:
                raise UnsupportedError(f"{name}=False has no counterpart in fully_shard. Leave it out.")

    def notes(self) -> list[str]:
        """What changes nothing."""
        if "state_dict_type" not in self._given:
            return []
        return [
            f"state_dict_type={self.state_dict_type!r} has no effect: checkpoints hold a whole model.safetensors, and are read at any number of "
            "processes."
        ]

    @property
    def replicates(self) -> bool:
        """Whether there is more than one replica, within the machine or across machines."""
        return self.sharding_strategy in ("NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")

    def reshard(self) -> bool | int | None:
        """What ``fully_shard(reshard_after_forward=...)`` gets."""
        if self.reshard_after_forward is not None:
            return self.reshard_after_forward
        return _RESHARD[self.sharding_strategy]

    @property
    def backward_units(self) -> int | None:
        """Units to gather ahead in backward; None for torch's own way, which is one."""
        if self.backward_prefetch == "BACKWARD_PRE":
            return None
        return 0 if isinstance(self.backward_prefetch, str) else self.backward_prefetch


def _enum_name(value: Any) -> Any:
    """Members of torch's enumerations of version 1, and their names in any case."""
    name = getattr(value, "name", value)
    return name.upper() if isinstance(name, str) else name


def _policy(given: Any) -> Any:
    """Dtypes of a policy as names.

    Raises:
        ConfigurationError: For what is none.
    """
    if given is None:
        return None
    if isinstance(given, str):
        dtype = _dtype_name(given, "mixed_precision_policy")
        return {"param_dtype": dtype, "reduce_dtype": dtype, "output_dtype": dtype}
    if not isinstance(given, dict):  # torch's own MixedPrecisionPolicy
        given = {name: getattr(given, name, None) for name in _POLICY}
    unknown = sorted(set(given) - set(_POLICY))
    if unknown:
        raise ConfigurationError(f"mixed_precision_policy has no {unknown[0]!r}. It has {', '.join(_POLICY)}.")
    return {
        name: value if name == "cast_forward_inputs" else _dtype_name(value, f"mixed_precision_policy: {name}")
        for name, value in given.items()
        if value is not None
    }


def _dtype_name(value: Any, what: str) -> str:
    name = str(value).removeprefix("torch.").lower()
    name = _SHORT.get(name, name)
    if name not in _DTYPES:
        raise ConfigurationError(f"{what}={value!r} is no floating-point dtype. Use one of {', '.join(_DTYPES)}.")
    return name
