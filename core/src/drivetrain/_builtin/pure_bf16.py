"""bf16 parameters and gradients: half the memory of weights and of their exchange, and what is done about weights too coarse for small steps.

A bf16 number has 8 significant bits, so that a step below 1/256 of a weight would be lost. Each step is therefore made in float32, on float32
weights that the optimizer's state keeps ("master"), or on a float32 copy that is rounded up or down by chance, so that the mean is right
("stochastic"). Optimizer state is float32 in both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from drivetrain.errors import UnsupportedError
from drivetrain.interfaces import AutocastPrecision
from drivetrain.interfaces.norms import keeps_statistics, narrow_inputs, stop_narrowing
from drivetrain.specs import PrecisionSpec

__all__ = ["PureBFloat16", "round_by_chance"]

#: Name of the float32 weights in the optimizer's state.
MASTER = "master_weight"
_SEED = 0x5EED


class PureBFloat16(AutocastPrecision):
    """Parameters and gradients in bf16, steps in float32.

    Autocast stays on around the forward, so that inputs and modules kept in float32 fit; batch norms, whose running statistics are float32, are kept so.

    Example:
        >>> p = PureBFloat16(PrecisionSpec(name="pure-bf16"), device_type="cpu")
        >>> model = p.convert_module(torch.nn.Linear(2, 2))
        >>> model.weight.dtype
        torch.bfloat16
    """

    compute_dtype = torch.bfloat16

    def __init__(self, spec: PrecisionSpec, *, device_type: str, options: Mapping[str, Any] | None = None) -> None:
        super().__init__(spec, device_type=device_type, options=options)
        chosen = self.options.get("PureBF16Kwargs")
        self.keeps_masters = chosen is None or chosen.weights == "master"
        self._rounds = 0  # steps rounded by chance so far: equal on all ranks, as rounding must be
        self._versions: Any = WeakTensorKeyDictionary()  # parameter -> its version when its master was last right

    def convert_module(self, model: torch.nn.Module) -> torch.nn.Module:
        """Cast float32 parameters in place, but for those of modules that are kept."""
        tops = [*self.kept(model).values(), *(m for m in model.modules() if keeps_statistics(m))]
        kept = {id(p) for top in tops for p in top.parameters()}
        for parameter in model.parameters():
            if parameter.dtype is torch.float32 and id(parameter) not in kept:
                gradient, parameter.grad = parameter.grad, None
                parameter.data = parameter.data.to(torch.bfloat16)
                parameter.grad = None if gradient is None else gradient.to(torch.bfloat16)
        return model

    def wrap_forward(self, model: torch.nn.Module) -> torch.nn.Module:
        """Autocast, and norms that take what is still float32."""
        wrapped = model.__dict__.get("forward")
        model = super().wrap_forward(model)
        if model.__dict__.get("forward") is not wrapped:
            narrow_inputs(model, self.device_type)
        return model

    def unwrap_forward(self, model: torch.nn.Module) -> torch.nn.Module:
        """As it was."""
        stop_narrowing(model)
        return super().unwrap_forward(model)

    def adopt_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Torch casts loaded state to the parameters' dtype; float32 state must stay so."""
        waiting: list[dict[Any, dict[str, torch.Tensor]]] = []

        def before(owner: Any, state_dict: dict[str, Any]) -> None:
            waiting.append(
                {
                    i: {k: v for k, v in s.items() if isinstance(v, torch.Tensor) and v.dtype is torch.float32}
                    for i, s in state_dict["state"].items()
                }
            )

        def after(owner: Any) -> None:
            exact = waiting.pop()
            for i, parameter in enumerate(_parameters(owner)):
                for name, value in exact.get(i, {}).items():
                    present = owner.state[parameter][name]
                    if present.dtype is not torch.float32:
                        owner.state[parameter][name] = value.detach().clone().to(present.device)
                self._versions[parameter] = parameter._version

        optimizer.register_load_state_dict_pre_hook(before)
        optimizer.register_load_state_dict_post_hook(after)

    def step(self, optimizer: torch.optim.Optimizer, closure: Any | None = None) -> Any:
        """Step on float32 weights, and give the parameters their bf16 values."""
        if closure is not None:
            raise UnsupportedError(
                "Pure bf16 steps on float32 copies of the weights, which a closure's forward wouldn't see: step without a closure, or use "
                "mixed_precision='bf16'."
            )
        standing_in: dict[torch.Tensor, torch.Tensor] = {}
        groups = [list(group["params"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [self._stand_in(optimizer, p, standing_in) for p in group["params"]]
        try:
            return optimizer.step()
        finally:
            for group, parameters in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = parameters
            self._give_back(optimizer, standing_in)

    def _stand_in(
        self, optimizer: torch.optim.Optimizer, parameter: torch.Tensor, standing_in: dict[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        if parameter.dtype is not torch.bfloat16 or parameter.grad is None:
            return parameter
        state = optimizer.state.pop(parameter, {})
        master: torch.Tensor | None = state.pop(MASTER, None)
        if (
            master is None or self._versions.get(parameter) != parameter._version
        ):  # the weights were changed from outside
            master = parameter.detach().float()
        master.grad = parameter.grad.float()
        if state:
            optimizer.state[master] = state
        standing_in[parameter] = master
        return master

    @torch.no_grad()
    def _give_back(self, optimizer: torch.optim.Optimizer, standing_in: dict[torch.Tensor, torch.Tensor]) -> None:
        generator = None
        for parameter, master in standing_in.items():
            master.grad = None
            state = optimizer.state.pop(master, {})
            if self.keeps_masters:
                state[MASTER] = master
                parameter.copy_(master)
            else:
                if generator is None:
                    generator = torch.Generator(parameter.device).manual_seed(_SEED + self._rounds)
                    self._rounds += 1
                _here(parameter).copy_(round_by_chance(_here(master), generator))
            self._versions[parameter] = parameter._version
            optimizer.state[parameter] = state

    def describe(self, model: torch.nn.Module) -> dict[str, str]:
        """Also says how steps are made."""
        lines = super().describe(model)
        how = "float32 weights in the optimizer's state" if self.keeps_masters else "steps rounded by chance"
        return {**lines, "*": f"bfloat16, parameters and gradients too; optimizer state float32, {how}"}

    def state_dict(self) -> dict[str, Any]:
        """Where the random rounding is."""
        return {} if self.keeps_masters else {"rounds": self._rounds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there."""
        self._rounds = int(state.get("rounds", 0))


def round_by_chance(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """bf16 values of float32 ones: one of the two neighbours, the nearer one the more often, so that the mean is the value itself.

    Args:
        values: Any shape, float32.
        generator: Of the same device.

    Example:
        >>> value = torch.full((10000,), 1.0 + 1 / 512)  # between 1 and 1 + 1/128
        >>> rounded = round_by_chance(value, torch.Generator().manual_seed(0))
        >>> sorted(set(rounded.tolist())), round(float(rounded.float().mean()), 3)
        ([1.0, 1.0078125], 1.002)
    """
    bits = values.contiguous().view(torch.int32)
    chance = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=values.device, generator=generator)
    rounded = ((bits + chance) & -(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _here(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a sharded tensor that is here."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
