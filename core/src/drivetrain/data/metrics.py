"""Gathering results over ranks, each sample's exactly once.

The loader knows, for every rank, how many samples of the present step are repeated ones, always each rank's last. Each rank drops its own
before anything is sent; ranks may send different numbers of rows. No failure is swallowed: what can't be told apart is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from drivetrain.data.batch import BatchInfo
from drivetrain.errors import DistributedOperationError
from drivetrain.parallel._containers import walk
from drivetrain.parallel._frames import tell_failure
from drivetrain.parallel._groups import members
from drivetrain.parallel.collectives import gather as gather_tensors
from drivetrain.parallel.object_collectives import all_gather_object, gather_object
from drivetrain.parallel.structure import concatenate, find_device, map_tensors, send_to_device

__all__ = ["drop_repeats", "gather_for_metrics", "gather_rows"]


def gather_for_metrics(
    input_data: Any, loader: Any = None, *, use_gather_object: bool = False, group: dist.ProcessGroup | None = None
) -> Any:
    """Gather results for the loader's present batch, each sample's once.

    Args:
        input_data: A structure whose tensors and lists have the batch's rows first (or the same number of rows for each sample); or a list of
            objects.
        loader: The loader being iterated; None outside of loops: everything is gathered.
        use_gather_object: Gather objects, whatever they are.
        group: The ranks that hold different data; None for all.

    Returns:
        The rows of all ranks, by rank, on every rank. Over an epoch of an interleaved loader that is the loader's global order.

    Raises:
        DistributedOperationError: If it can't be known which rows belong to repeated samples, or ranks disagree.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> from drivetrain.data import DataLoaderConfiguration, prepare_data_loader
        >>> config = DataLoaderConfiguration(even_batches="repeat")
        >>> loader = prepare_data_loader(DataLoader(range(3), batch_size=2), config=config)
        >>> [(batch.tolist(), gather_for_metrics(batch, loader).tolist()) for batch in loader]
        [([0, 1], [0, 1]), ([2, 0], [2])]
    """
    info = None if loader is None else loader.batch
    return gather_rows(input_data, info, use_gather_object=use_gather_object, group=group)


def gather_rows(
    data: Any,
    info: BatchInfo | None,
    *,
    use_gather_object: bool = False,
    group: dist.ProcessGroup | None = None,
    gather: Callable[..., Any] = gather_tensors,
) -> Any:
    """`gather_for_metrics` for what is known about a batch.

    Args:
        data: As there.
        info: ``loader.batch``; None gathers everything.
        use_gather_object: As there.
        group: As there.
        gather: Gathers a structure of tensors, ``gather(data, group=group)``.

    Example:
        >>> gather_rows({"loss": torch.tensor([0.5, 0.1])}, None)
        {'loss': tensor([0.5000, 0.1000])}
    """
    rank = members(group)[0]
    kinds = {isinstance(value, torch.Tensor) for _, value, _ in walk(data)}
    objects = use_gather_object or True not in kinds
    cut = None if info is None else info.round
    if cut is not None and cut.repeats:
        try:
            data = drop_repeats(data, cut.new[rank], cut.received[rank])
        except DistributedOperationError as error:
            if members(group)[1] > 1:
                tell_failure(
                    "gather_object" if objects else "all_gather_object" if len(kinds) > 1 else "gather", error, group
                )
            raise
    if objects:
        return gather_object(data, group=group)
    if len(kinds) > 1:
        return _gather_mixed(data, group)
    return gather(data, group=group)


def _gather_mixed(data: Any, group: dist.ProcessGroup | None) -> Any:
    """A structure with other values besides tensors: lists of strings have rows too."""
    if members(group)[1] == 1:
        return data
    device = find_device(data)
    parts = all_gather_object(send_to_device(data, "cpu"), group=group)
    return send_to_device(concatenate(parts), device or "cpu")


def drop_repeats(data: Any, new: int, received: int) -> Any:
    """The rows of a rank's results that belong to samples seen for the first time.

    Args:
        data: Results for one batch.
        new: Samples of the batch that are new, its first.
        received: Samples of the batch.

    Raises:
        DistributedOperationError: If a number of rows is no multiple of ``received``, unless all rows stay or none.

    Example:
        >>> drop_repeats({"boxes": torch.arange(6), "names": ["a", "b", "c"]}, new=2, received=3)
        {'boxes': tensor([0, 1, 2, 3]), 'names': ['a', 'b']}
    """
    if isinstance(data, (list, tuple)) and not any(isinstance(value, torch.Tensor) for _, value, _ in walk(data)):
        return data[: _kept(len(data), new, received)]
    if not isinstance(data, torch.Tensor) and next(walk(data), ("", None, True))[0] == "" and new == 0:
        return []  # one object for the whole batch
    return _drop(data, new, received)


def _drop(data: Any, new: int, received: int) -> Any:
    def cut(tensor: torch.Tensor) -> torch.Tensor:
        rows = tensor.reshape(1) if tensor.ndim == 0 else tensor
        if tensor.ndim == 0:  # one value per batch
            return rows if new else rows[:0]
        return rows[: _kept(len(rows), new, received)]

    def is_row_list(value: Any) -> bool:
        if isinstance(value, torch.Tensor):
            return True
        return type(value) is list and not any(isinstance(item, torch.Tensor) for _, item, _ in walk(value))

    def cut_any(value: Any) -> Any:
        return cut(value) if isinstance(value, torch.Tensor) else value[: _kept(len(value), new, received)]

    return map_tensors(cut_any, data, is_leaf=is_row_list)


def _kept(rows: int, new: int, received: int) -> int:
    """How many of ``rows`` belong to new samples; a sample may have several rows."""
    if new == received:
        return rows
    if new == 0:
        return 0
    if rows % received:
        raise DistributedOperationError(
            f"gather_for_metrics got {rows} rows for a batch of {received} samples of which {received - new} are repeated: which rows are theirs can't "
            "be told. Pass the same number of rows for each sample, or use even_batches=True instead of 'repeat'."
        )
    return rows // received * new
