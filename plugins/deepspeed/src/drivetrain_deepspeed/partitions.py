"""Where an engine keeps the fp32 values of parameters and their optimizer state, stage by stage."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import deepspeed
import torch

from drivetrain.interfaces import Shards

__all__ = ["Masters", "Partition", "Stage3", "Stage12", "make_partition"]


class Partition:
    """Parameters that are updated themselves: stage 0 in fp32. Other stages derive from it.

    Args:
        engine: DeepSpeed's engine.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.zero = engine.optimizer

    def buffers(self) -> Iterator[tuple[torch.Tensor, Sequence[Any]]]:
        """What the torch optimizer updates, each with the parameters that it holds parts of, here or on other processes."""
        for group in self.zero.param_groups:
            for parameter in group["params"]:
                yield parameter, [parameter]

    def read(self, parameter: Any, buffer_value: torch.Tensor | None = None) -> Any:
        """This process's part of a parameter's fp32 values, or of a state of its buffer's shape; a plain tensor where it is whole.

        Args:
            parameter: The parameter.
            buffer_value: A tensor like the parameter's buffer.
        """
        return parameter if buffer_value is None else buffer_value

    def layout(self, parameter: Any) -> Any:
        """What `read` would give, as far as shape and place go; its values may be any."""
        return self.read(parameter)

    def held(self, buffer: torch.Tensor, *, write: bool = False) -> contextlib.AbstractContextManager[Any]:
        """Inside, a buffer, its optimizer state and its gradients are in memory. What is read then outlives it.

        Args:
            buffer: One of `buffers`.
            write: Whether they are changed.
        """
        return contextlib.nullcontext()

    def forget_state(self, buffer: torch.Tensor) -> None:
        """Drop a buffer's optimizer state, which is made anew."""
        self.engine.basic_optimizer.state.pop(buffer, None)

    def cut(self, parameter: Any, values: torch.Tensor | None) -> Any:
        """Values of the range that this process has of a parameter, as `read` gives them; None for zeros."""
        template = self.layout(parameter)
        if not isinstance(template, Shards):
            return torch.zeros_like(template) if values is None else values
        counts = [block.values.numel() for block in template.blocks]
        flat = torch.zeros(sum(counts), device=template.device) if values is None else values.reshape(-1)
        taken = iter(flat[: sum(counts)].split(counts))  # the last process's range is padded
        return template.like(lambda _, sizes: next(taken).view(sizes))

    def write(self, parameter: Any, value: Any, buffer_value: torch.Tensor | None = None) -> None:
        """Put a whole tensor, or `Shards` like those that `read` gives, in their place."""
        target = self._target(parameter, buffer_value)
        with torch.no_grad():
            if isinstance(target, Shards):
                cut = value if isinstance(value, Shards) else target.like(_reader(value))
                for block, new in zip(target.blocks, cut.blocks, strict=True):
                    block.values.copy_(new.values)
            else:
                target.copy_(value.full_tensor() if isinstance(value, Shards) else value)

    def _target(self, parameter: Any, buffer_value: torch.Tensor | None) -> Any:
        return self.read(parameter, buffer_value)

    def refresh(self) -> None:
        """The fp32 values were written: parameters that forward uses follow. Collective."""

    def whole(self, module: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Inside, the model's parameters are whole. Collective.

        Args:
            module: The user's model.
        """
        return contextlib.nullcontext()

    def link(self) -> None:
        """The torch optimizer's state was made or replaced."""

    def pairs(self) -> list[tuple[Any, torch.Tensor]]:
        """Each parameter with fp32 values beside it, where there are such."""
        return []

    def gradients(self) -> list[tuple[Any, torch.Tensor]]:
        """What this process has of the window's reduced gradients, still scaled."""
        module = self.engine.module
        return [(p, p.grad) for p in module.parameters() if p.requires_grad and p.grad is not None]

    def clear(self) -> None:
        """Drop the window's gradients."""
        for parameter in self.engine.module.parameters():
            parameter.grad = None


def _reader(value: torch.Tensor) -> Any:
    def read(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> torch.Tensor:
        return value[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]

    return read


class Masters(Partition):
    """Stage 0 in bf16 or fp16: each process has all fp32 values."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        pairs = zip(self.zero.fp16_groups, self.zero.fp32_groups, strict=True)
        self._pairs = [pair for low, high in pairs for pair in zip(low, high, strict=True)]
        self._masters = {id(low): high for low, high in self._pairs}

    def pairs(self) -> list[tuple[Any, torch.Tensor]]:
        """Each parameter with its fp32 values."""
        return self._pairs

    def buffers(self) -> Iterator[tuple[torch.Tensor, Sequence[Any]]]:
        """One for each parameter."""
        for low, high in self._pairs:
            yield high, [low]

    def read(self, parameter: Any, buffer_value: torch.Tensor | None = None) -> Any:
        """Whole; frozen parameters have no others than their own values."""
        return self._masters.get(id(parameter), parameter) if buffer_value is None else buffer_value

    def refresh(self) -> None:
        """Round them."""
        for low, high in self._pairs:
            low.data.copy_(high.data)


class Stage12(Partition):
    """Stages 1 and 2: flat buffers over all parameters of a group, cut into equal parts."""

    def buffers(self) -> Iterator[tuple[torch.Tensor, Sequence[Any]]]:
        """One per parameter group."""
        yield from zip(self.zero.single_partition_of_fp32_groups, self.zero.bit16_groups, strict=True)

    def read(self, parameter: Any, buffer_value: torch.Tensor | None = None) -> Any:
        """A range of the parameter; frozen parameters are whole."""
        if not hasattr(parameter, "_hp_mapping"):
            return parameter
        mapping = parameter._hp_mapping
        if mapping is None:  # all of it is on other processes
            return Shards.of_range(torch.empty(0, device=self._device), start=0, shape=parameter.shape)
        if buffer_value is None:
            values = mapping.hp_fragment
        else:
            place = mapping.hp_fragment_address
            values = buffer_value.narrow(0, place.start, place.numel)
        return Shards.of_range(values.detach(), start=mapping.lp_fragment_address.start, shape=parameter.shape)

    @property
    def _device(self) -> torch.device:
        device: torch.device = self.zero.single_partition_of_fp32_groups[0].device
        return device

    def refresh(self) -> None:
        """Each process rounds its part, and all gather them."""
        self.zero.update_lp_params()

    def link(self) -> None:
        """DeepSpeed's own view of the state goes through the parameters."""
        zero = self.zero
        if all(zero.optimizer.state.get(flat) for flat, _ in self.buffers()):
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()

    def gradients(self) -> list[tuple[Any, torch.Tensor]]:
        """Parts of what this process updates."""
        zero = self.zero
        found: list[tuple[Any, torch.Tensor]] = []
        for i, parameters in enumerate(zero.params_in_partition):
            if zero.cpu_offload:
                parts = zero.offload_gradient_dict[i]
            else:
                parts = [g for g in zero.averaged_gradients.get(i) or () if not getattr(g, "_zero_padding", False)]
            found += zip(parameters, parts, strict=False)
        return found

    def clear(self) -> None:
        """As the optimizer does after an overflow."""
        zero = self.zero
        zero.zero_grad(set_to_none=True)
        zero._release_preflattened_grad_buffers()
        zero.micro_step_id = -1
        zero._epilogue_ran_this_backward = False
        if zero.cpu_offload:
            zero._offload_accumulated_param_ids = set()
            zero.reset_cpu_buffers()
            return
        for key in zero.averaged_gradients:
            zero.averaged_gradients[key] = None
        for key in zero.all_grad_tensors:
            zero.all_grad_tensors[key] = None


class Stage3(Partition):
    """Stage 3: each parameter is cut into equal ranges, joined in flat buffers."""

    def buffers(self) -> Iterator[tuple[torch.Tensor, Sequence[Any]]]:
        """One per sub-group of parameters."""
        if self.trains:
            yield from zip(self.zero.fp32_partitioned_groups_flat, self.zero.fp16_groups, strict=True)

    @property
    def trains(self) -> bool:
        """Whether there is an optimizer, and not only parameters that are gathered and released."""
        return hasattr(self.zero, "fp32_partitioned_groups_flat")

    @contextlib.contextmanager
    def held(self, buffer: torch.Tensor, *, write: bool = False) -> Iterator[None]:
        """Fetch a sub-group that is kept on a disk; write it back, or let go of it."""
        group = next(i for i, flat in enumerate(self.zero.fp32_partitioned_groups_flat) if flat is buffer)
        if not self.on_disk(group) or group in self._fetched:
            yield
            return
        self.zero._optimizer_states_and_gradient_swap_in(group)
        self._fetched.add(group)
        try:
            yield
            if write:
                self.zero._optimizer_states_and_gradient_swap_out(group)
            else:
                self.zero._release_swap_buffers(group)
        finally:
            self._fetched.discard(group)

    def forget_state(self, buffer: Any) -> None:
        """Drop it; on a disk its place, too."""
        super().forget_state(buffer)
        swapper = self.zero.optimizer_swapper
        info = None if swapper is None else swapper.swap_params_info.get(buffer.ds_id)
        if info is not None:
            del info.tensors[1:]
            info.has_state_tensors = False

    @functools.cached_property
    def _fetched(self) -> set[int]:
        """Sub-groups that are in memory for the time being."""
        return set()

    def on_disk(self, group: int) -> bool:
        """Whether a sub-group's values and state are kept on a disk: DeepSpeed keeps small ones in memory."""
        return bool(self.zero._swappable_optimizer_subgroup(group))

    def layout(self, parameter: Any) -> Any:
        """As `read`; what is on a disk stays there."""
        place = self._place(parameter)
        if place is None or not self.on_disk(place[0]):
            return self.read(parameter)
        return self._range(parameter, torch.empty(place[2]))

    def read(self, parameter: Any, buffer_value: torch.Tensor | None = None) -> Any:
        """A range of the parameter, without the padding of the last one; a copy of what is on a disk."""
        place = self._place(parameter)
        if place is None or not self.on_disk(place[0]):
            return self._target(parameter, buffer_value)
        with self.held(self.zero.fp32_partitioned_groups_flat[place[0]]):
            return self._range(parameter, self._values(parameter, buffer_value).clone())

    def write(self, parameter: Any, value: Any, buffer_value: torch.Tensor | None = None) -> None:
        """As everywhere; onto a disk, if it is there."""
        place = self._place(parameter)
        if place is None:
            super().write(parameter, value, buffer_value)
            return
        with self.held(self.zero.fp32_partitioned_groups_flat[place[0]], write=True):
            super().write(parameter, value, buffer_value)

    def _target(self, parameter: Any, buffer_value: torch.Tensor | None) -> Any:
        return self._range(parameter, self._values(parameter, buffer_value))

    def _values(self, parameter: Any, buffer_value: torch.Tensor | None) -> torch.Tensor:
        place = self._place(parameter)
        if place is None:
            frozen: torch.Tensor = parameter.ds_tensor.data
            return frozen  # as forward uses it
        group, offset, count = place
        flat: torch.Tensor = self.zero.fp32_partitioned_groups_flat[group] if buffer_value is None else buffer_value
        return flat.detach().narrow(0, offset, count)

    def _place(self, parameter: Any) -> tuple[int, int, int] | None:
        known = self.trains and parameter.requires_grad and id(parameter) in self._places
        return self._places[id(parameter)] if known else None

    def _range(self, parameter: Any, values: torch.Tensor) -> Shards:
        size = parameter.ds_tensor.ds_numel
        start = min(self._rank(parameter) * size, parameter.ds_numel)
        count = min(size, parameter.ds_numel - start)
        return Shards.of_range(values.view(-1)[:count], start=start, shape=parameter.ds_shape)

    @staticmethod
    def _rank(parameter: Any) -> int:
        return torch.distributed.get_rank(parameter.ds_process_group)

    @functools.cached_property
    def _places(self) -> dict[int, tuple[int, int, int]]:
        """Sub-group, offset and length of each trained parameter's range."""
        zero = self.zero
        return {id(p): zero.grad_position[zero.get_param_id(p)] for _, parameters in self.buffers() for p in parameters}

    def refresh(self) -> None:
        """As after a step: ranges that forward uses follow, and those that stay gathered are gathered again."""
        zero = self.zero
        offload = zero.parameter_offload if self.trains else zero
        offload.partition_all_parameters()  # what is whole now is whole with old values
        if self.trains:
            for number, (buffer, _) in enumerate(self.buffers()):
                with self.held(buffer):
                    zero._reassign_or_swap_out_partitioned_parameters(number)
            zero.invalidate_secondary_tensor()
        if offload.persistent_parameters:
            offload.persistent_parameters[0].all_gather(offload.persistent_parameters)

    def whole(self, module: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Gathered on every process."""
        gathered: contextlib.AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(list(module.parameters()))
        return gathered

    def gradients(self) -> list[tuple[Any, torch.Tensor]]:
        """This process's ranges."""
        zero = self.zero
        found: list[tuple[Any, torch.Tensor]] = []
        if zero.offload_optimizer:
            for group, (flat, parameters) in enumerate(self.buffers()):
                with self.held(flat):
                    gradient = flat.grad
                    if gradient is None:
                        continue
                    for p in parameters:
                        part = gradient.narrow(0, *self._places[id(p)][1:])
                        found.append((p, part.clone() if self.on_disk(group) else part))
            return found
        for i, (_, parameters) in enumerate(self.buffers()):
            found += zip(parameters, zero.averaged_gradients.get(i) or (), strict=False)
        return found

    def clear(self) -> None:
        """The next backward overwrites them."""
        zero = self.zero
        zero.zero_grad(set_to_none=True)
        zero._offload_boundary_param_ids = set()
        if zero.offload_optimizer:
            zero.reset_cpu_buffers()
        else:
            zero.averaged_gradients = {}


def make_partition(engine: Any, stage: int) -> Partition:
    """What fits an engine.

    Args:
        engine: DeepSpeed's engine.
        stage: Its ZeRO stage.
    """
    if stage == 3:
        return Stage3(engine)
    if stage in (1, 2):
        return Stage12(engine)
    return Masters(engine) if hasattr(engine.optimizer, "fp32_groups") else Partition(engine)
