"""Settings of DeepSpeed, under the names that Accelerate has for them. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from drivetrain.config import Options
from drivetrain.errors import ConfigurationError, UnsupportedError
from drivetrain_deepspeed.document import AUTO, MISSING, PATHS, look, name_of, read_document

__all__ = ["DeepSpeedPlugin"]

if TYPE_CHECKING:
    Document = dict[str, Any] | str | Any
else:
    Document = dict[str, Any] | str  # what files and variables can say; other objects are looked at when they are read

Names = list[str]
#: Fields that mean something at stage 3 alone, and the values that ask for nothing.
_STAGE_3 = {"offload_param_device": "none", "zero3_init_flag": None, "zero3_save_16bit_model": False}
#: What a document says where it says nothing: DeepSpeed's defaults of fields whose defaults here are others.
_UNSAID = {"zero_stage": 0}
#: Where a document switches a precision on.
_PRECISIONS = {"bf16": ("bf16", "enabled"), "fp16": ("fp16", "enabled")}
_AUTOCAST = {"bfloat16": "bf16", "bf16": "bf16", "float16": "fp16", "fp16": "fp16", "half": "fp16"}
_CONTRADICT = 'contradict each other. Give one of them, or write "auto" in the document.'


@dataclass
class DeepSpeedPlugin(Options):
    """What is sharded and where it lives, and the JSON that DeepSpeed is configured with.

    A setting may stand here, in ``hf_ds_config``, or be a setting of the Accelerator; where it stands twice, both must say the same. What
    ``hf_ds_config`` leaves at "auto" is taken from here, from the Accelerator, the loaders and the model.

    Args:
        hf_ds_config: DeepSpeed's own configuration: path of a JSON file, a dict, JSON, or JSON in base64. None: one is made.
        gradient_accumulation_steps: Micro-batches per optimizer step; "auto": what the Accelerator says.
        gradient_clipping: Norm to which the engine clips in each step, 0 to not clip; "auto": what ``clip_grad_norm_`` is called with.
        zero_stage: 0: nothing is sharded; 1: optimizer state; 2: gradients, too; 3: parameters, too.
        is_train_batch_min: Of loaders with different batch sizes the smallest says the micro-batch; else the largest.
        offload_optimizer_device: Where optimizer state lives and the step is computed: "none" (on the device), "cpu", or "nvme" (state on disk).
        offload_param_device: Where parameters live at stage 3.
        offload_optimizer_nvme_path: Folder on the disk for optimizer state.
        offload_param_nvme_path: Folder on the disk for parameters.
        zero3_init_flag: At stage 3, a model made under ``init_empty_weights`` is filled and sharded module by module, and never whole on a process.
            None: so where a model has no values; False refuses such models.
        zero3_save_16bit_model: Lets the engine's own ``save_16bit_model`` write whole weights at stage 3. (``accelerator.save_model`` always does.)
        transformer_moe_cls_names: Classes whose modules stage 3 gathers as one, as mixtures of experts need it, with or without their module's path.
        enable_msamp: Refused.
        msamp_opt_level: Refused but for its default.
        train_micro_batch_size_per_gpu: Rows per process and micro-batch; "auto": what the loader says.
        torch_autocast: In bf16 and fp16, keep float32 weights and compute under ``torch.autocast``; otherwise weights are converted.

    Example:
        >>> DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 3}}).zero_stage
        3
        >>> DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 3}}, zero_stage=2)
        Traceback (most recent call last):
        ...
        drivetrain.errors.ConfigurationError: DeepSpeedPlugin.zero_stage=2 and hf_ds_config: zero_optimization.stage=3 contradict each other. Give one of them, or write "auto" in the document.
    """

    hf_ds_config: Document | None = None
    gradient_accumulation_steps: int | Literal["auto"] = "auto"
    gradient_clipping: float | Literal["auto"] = "auto"
    zero_stage: Literal[0, 1, 2, 3] = 2
    is_train_batch_min: bool = True
    offload_optimizer_device: Literal["none", "cpu", "nvme"] = "none"
    offload_param_device: Literal["none", "cpu", "nvme"] = "none"
    offload_optimizer_nvme_path: str | None = None
    offload_param_nvme_path: str | None = None
    zero3_init_flag: bool | None = None
    zero3_save_16bit_model: bool = False
    transformer_moe_cls_names: Names = field(default_factory=list)
    enable_msamp: bool = False
    msamp_opt_level: Literal["O1", "O2"] = "O1"
    train_micro_batch_size_per_gpu: int | Literal["auto"] = "auto"
    torch_autocast: bool = False

    def __post_init__(self) -> None:
        given: Any = self
        for name in ("gradient_accumulation_steps", "gradient_clipping", "train_micro_batch_size_per_gpu"):
            if getattr(self, name) is None:
                setattr(self, name, AUTO)
        for name in ("offload_optimizer_device", "offload_param_device"):
            if getattr(self, name) is None:
                setattr(self, name, "none")
        names = given.transformer_moe_cls_names or []
        self.transformer_moe_cls_names = [n.strip() for n in names.split(",")] if isinstance(names, str) else names
        self.validate()
        self._document, self._place = (
            ({}, "deepspeed_config") if self.hf_ds_config is None else read_document(self.hf_ds_config)
        )
        self._taken: dict[str, Any] = {}
        if self.hf_ds_config is not None:
            self._take_over()
        self._check_numbers()
        self._check_folders()
        self._check_stage()
        self._refuse()

    # -- one value per setting ---------------------------------------------------------------------------------------------

    def explicit(self) -> dict[str, Any]:
        """The fields that were given, without those that only say what the document says."""
        taken = self._taken if "_taken" in vars(self) else {}
        return {k: v for k, v in super().explicit().items() if k in self._given or taken.get(k, MISSING) != v}

    @property
    def deepspeed_config(self) -> dict[str, Any]:
        """The document, with "auto" where values are found out when an engine is made. Changes of it count for engines made later.

        Example:
            >>> DeepSpeedPlugin(hf_ds_config={"bf16": {"enabled": "auto"}}).deepspeed_config
            {'bf16': {'enabled': 'auto'}}
        """
        return self._document

    @property
    def place(self) -> str:
        """Where the document is written, for messages."""
        return self._place

    def value_of(self, name: str) -> Any:
        """A field's value, or the document's at its place where only that says one.

        Raises:
            ConfigurationError: If both say one, and they differ.
        """
        said = look(self._document, PATHS[name])
        mine = getattr(self, name)
        if said is MISSING or said is None or said == AUTO:
            return mine
        is_given = name in self._given or (name in self._taken and self._taken[name] != mine)
        if is_given and mine != AUTO and said != mine:
            raise ConfigurationError(
                f"DeepSpeedPlugin.{name}={mine!r} and {self.place}: {name_of(PATHS[name])}={said!r} {_CONTRADICT}"
            )
        return said

    def place_of(self, name: str) -> str:
        """Where a field's value is written, for messages."""
        said = look(self._document, PATHS[name])
        written = said is not MISSING and said is not None and said != AUTO
        return f"{self.place}: {name_of(PATHS[name])}" if written else f"DeepSpeedPlugin.{name}"

    def settings(self) -> Mapping[str, tuple[Any, str]]:
        """What is also a setting of the Accelerator: micro-batches per step, and the precision that the document switches on."""
        found: dict[str, tuple[Any, str]] = {}
        steps = self.value_of("gradient_accumulation_steps")
        if steps != AUTO:
            found["gradient_accumulation_steps"] = (steps, self.place_of("gradient_accumulation_steps"))
        for name, path in _PRECISIONS.items():
            if look(self._document, path) is True:
                found["mixed_precision"] = (name, f"{self.place}: {name_of(path)}")
        dtype = str(look(self._document, ("torch_autocast", "dtype"))).removeprefix("torch.")
        if look(self._document, PATHS["torch_autocast"]) is True and dtype in _AUTOCAST:
            found["mixed_precision"] = (_AUTOCAST[dtype], f"{self.place}: torch_autocast.dtype")
        return found

    def _take_over(self) -> None:
        """Fields say what the document says, so that who asks the fields isn't told a default that doesn't hold."""
        if "bfloat16" in self._document:  # DeepSpeed reads the section by two names
            if "bf16" in self._document:
                raise ConfigurationError(
                    f"{self.place} has both 'bf16' and 'bfloat16', which are one section. Keep one of them."
                )
            self._document["bf16"] = self._document.pop("bfloat16")
        for name in PATHS:
            value = self.value_of(name)
            if look(self._document, PATHS[name]) is MISSING and name not in self._given:
                value = _UNSAID.get(name, value)
            setattr(self, name, value)
            self._taken[name] = value
        try:
            self.validate()
        except ConfigurationError as error:
            raise ConfigurationError(f"{self.place}: {error}") from None

    # -- what can be said without DeepSpeed ----------------------------------------------------------------------------------

    def _check_numbers(self) -> None:
        for name, least in (
            ("gradient_accumulation_steps", 1),
            ("train_micro_batch_size_per_gpu", 1),
            ("gradient_clipping", 0),
        ):
            value = getattr(self, name)
            if value != AUTO and (isinstance(value, bool) or value < least):
                raise ConfigurationError(f'DeepSpeedPlugin: {name}={value!r} must be {least} or more, or "auto".')

    def _check_folders(self) -> None:
        for kind in ("optimizer", "param"):
            device, path = getattr(self, f"offload_{kind}_device"), getattr(self, f"offload_{kind}_nvme_path")
            if device == "nvme" and path is None:
                raise ConfigurationError(
                    f"offload_{kind}_device='nvme' keeps state on a disk: say in which folder, with offload_{kind}_nvme_path."
                )
            if path is not None and path != AUTO and device != "nvme":
                raise ConfigurationError(
                    f"offload_{kind}_nvme_path={path!r} has no effect with offload_{kind}_device={device!r}: leave it out, or offload to 'nvme'."
                )

    def _check_stage(self) -> None:
        stage = self.zero_stage
        if stage != 3:
            for name, nothing in _STAGE_3.items():
                if getattr(self, name) not in (nothing, False):
                    raise ConfigurationError(
                        f"{name}={getattr(self, name)!r} needs zero_stage=3, where parameters are sharded; here it is {stage}. Leave it out, or "
                        "choose stage 3."
                    )
        if stage == 0 and self.offload_optimizer_device != "none":
            raise ConfigurationError(
                f"offload_optimizer_device={self.offload_optimizer_device!r} needs zero_stage 1, 2 or 3; at stage 0 the engine keeps optimizer "
                "state on the device."
            )

    def _refuse(self) -> None:
        if self.enable_msamp or self.msamp_opt_level != "O1":
            raise UnsupportedError(
                "enable_msamp and msamp_opt_level: MS-AMP isn't maintained and isn't used here. Leave them out; for fp8 use mixed_precision='fp8' with "
                "a backend that takes it (`drivetrain plugins --kind backend`)."
            )
