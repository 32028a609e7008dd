"""Memory of activations: what isn't kept from forward to backward is computed again, or waits in the CPU's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from drivetrain.config.options import Options
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    import torch

__all__ = ["ActivationCheckpointing", "checkpoint_activations"]


@dataclass
class ActivationCheckpointing(Options):
    """Which blocks of a model don't keep their activations on the device from forward to backward.

    Numbers stay the same: randomness (dropout) is repeated.

    Args:
        every: Every k-th block: 1 for all, 2 for each second one.
        classes: Names of the classes of blocks; none: the blocks that the model repeats.
        keep: What a block keeps all the same. "nothing"; "matmuls": results of matrix products and attention, which are dear to compute again.
        budget: Instead of ``every``: the share of the blocks' activations that may be kept, from 0 (all are computed again) to 1.
        offload: Instead of computing again: what these blocks keep waits in the CPU's memory.

    Example:
        >>> ActivationCheckpointing(every=2).to_kwargs()
        {'every': 2}
    """

    every: Annotated[int, msgspec.Meta(ge=1)] = 1
    classes: list[str] = field(default_factory=list)
    keep: Literal["nothing", "matmuls"] = "nothing"
    budget: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        self.validate()
        if self.budget is not None and self.every != 1:
            raise ConfigurationError("ActivationCheckpointing: budget and every both say how many blocks. Give one.")
        if self.offload and self.keep != "nothing":
            raise ConfigurationError("ActivationCheckpointing: with offload nothing is computed again. Leave keep out.")


def checkpoint_activations(
    model: torch.nn.Module, options: ActivationCheckpointing, blocks: Sequence[torch.nn.Module] | None = None
) -> list[torch.nn.Module]:
    """Make blocks of a model compute their activations again, in place; names, types and state dicts stay as they are.

    Args:
        model: The model.
        options: Which blocks, and how.
        blocks: The blocks to choose from; None: as ``options`` say.

    Returns:
        The blocks that do.

    Raises:
        ConfigurationError: If there is no such block.

    Example:
        >>> import torch
        >>> block = lambda: torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
        >>> model = torch.nn.Sequential(block(), block())
        >>> len(checkpoint_activations(model, ActivationCheckpointing()))
        2
        >>> model(torch.ones(1, 2)).sum().backward()
    """
    found = list(blocks) if blocks and not options.classes else _find(model, options)
    chosen = [b for i, b in enumerate(found) if _is_chosen(i, len(found), options)]
    for block in chosen:
        if not isinstance(block.__dict__.get("forward"), _Recomputed):
            block.forward = _Recomputed(block, options.keep, options.offload)
    return chosen


def _find(model: torch.nn.Module, options: ActivationCheckpointing) -> list[torch.nn.Module]:
    from drivetrain.memory.blocks import repeated_blocks

    if not options.classes:
        found = repeated_blocks(model)
        if not found:
            raise ConfigurationError(
                f"ActivationCheckpointing: {type(model).__name__} repeats no block. Name the classes: "
                "ActivationCheckpointing(classes=[...])."
            )
        return found
    found = [m for m in model.modules() if type(m).__name__ in options.classes]
    absent = sorted(set(options.classes) - {type(m).__name__ for m in found})
    if absent:
        raise ConfigurationError(
            f"ActivationCheckpointing: no module of {type(model).__name__} is a {' or a '.join(absent)}."
        )
    return found


def _is_chosen(index: int, count: int, options: ActivationCheckpointing) -> bool:
    if options.budget is None:
        return index % options.every == 0
    # Blocks are alike: a share of them has a share of the activations. Those that keep theirs are spread evenly.
    kept = int(options.budget * count + 1e-9)
    return (index + 1) * kept // count == index * kept // count


class _Recomputed:
    """Takes the place of a block's ``forward``; an object, so that a deep copy of the block gets its own.

    Hooks of the block stay outside: whatever gathers its parameters has done so when it is computed again.
    """

    def __init__(self, module: torch.nn.Module, keep: str, offload: bool) -> None:
        self.module = module
        self.keep = keep
        self.offload = offload
        self.replaced = module.__dict__.get("forward")
        self.__wrapped__ = self.replaced or type(module).forward.__get__(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Recomputed:
        import copy

        new = object.__new__(_Recomputed)
        new.module, new.keep, new.offload = copy.deepcopy(self.module, memo), self.keep, self.offload
        new.replaced = copy.deepcopy(self.replaced, memo)
        new.__wrapped__ = new.replaced or type(new.module).forward.__get__(new.module)
        return new

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch
        from torch.utils.checkpoint import checkpoint

        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        if self.offload:
            with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
                return self.__wrapped__(*args, **kwargs)
        settings: dict[str, Any] = {"context_fn": _keep_matmuls} if self.keep == "matmuls" else {}
        return checkpoint(self.__wrapped__, *args, use_reentrant=False, **settings, **kwargs)


def _keep_matmuls() -> Any:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    return create_selective_checkpoint_contexts(_matmuls())


def _matmuls() -> list[Callable[..., Any]]:
    import torch

    names = (
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "convolution",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    )
    return [getattr(torch.ops.aten, n).default for n in names if hasattr(torch.ops.aten, n)]
