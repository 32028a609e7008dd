"""Preparing loaders without an Accelerator, where Accelerate has it and with its arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader

from drivetrain.data import DataLoaderConfiguration, skip_first_batches
from drivetrain.data import prepare_data_loader as _prepare
from drivetrain.data.loader import PreparedDataLoader as DataLoaderShard
from drivetrain.errors import UnsupportedError
from drivetrain.state import PartialState

__all__ = ["DataLoaderShard", "prepare_data_loader", "skip_first_batches"]


def prepare_data_loader(
    dataloader: DataLoader[Any],
    device: torch.device | None = None,
    num_processes: int | None = None,
    process_index: int | None = None,
    split_batches: bool = False,
    put_on_device: bool = False,
    rng_types: Sequence[Any] | None = None,
    dispatch_batches: bool | None = None,
    even_batches: Any = True,
    slice_fn_for_dispatch: Callable[..., Any] | None = None,
    use_seedable_sampler: bool = False,
    data_seed: int | None = None,
    non_blocking: bool = False,
    use_stateful_dataloader: bool = False,
    torch_device_mesh: Any = None,
) -> DataLoaderShard[Any]:
    """Prepare a loader; see `drivetrain.data.prepare_data_loader` for the same with a `DataLoaderConfiguration`.

    ``use_seedable_sampler`` and ``use_stateful_dataloader`` make no difference: orders always follow from seed and epoch, and loaders
    always have a state.

    Raises:
        UnsupportedError: For a ``torch_device_mesh``.

    Example:
        >>> [batch.tolist() for batch in prepare_data_loader(DataLoader(range(3), batch_size=2))]
        [[0, 1], [2]]
    """
    if torch_device_mesh is not None:
        raise UnsupportedError(
            "prepare_data_loader(torch_device_mesh=...): the ranks that hold different data are the backend's to know. Use accelerator.prepare()."
        )
    state = PartialState() if num_processes is None or process_index is None else None
    config = DataLoaderConfiguration(
        split_batches=split_batches,
        dispatch_batches=dispatch_batches,
        even_batches=even_batches,
        data_seed=data_seed,
        non_blocking=non_blocking,
    )
    return _prepare(
        dataloader,
        device=device,
        num_processes=state.num_processes if state is not None else num_processes or 1,
        process_index=state.process_index if state is not None else process_index or 0,
        config=config,
        put_on_device=put_on_device,
        rng_types=rng_types or (),
        slice_fn_for_dispatch=slice_fn_for_dispatch,
    )


def __getattr__(name: str) -> Any:
    from drivetrain._foreign import missing

    missing(__name__, name, AttributeError(f"module {__name__!r} has no attribute {name!r}"))
