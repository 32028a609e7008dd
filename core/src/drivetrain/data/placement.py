"""Moving batches to the device, the next one while the present one computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from drivetrain.data.batch import BatchInfo
from drivetrain.parallel.structure import iterate_tensors, send_to_device

__all__ = ["Placement"]

Pairs = Iterator[tuple[Any, BatchInfo]]


class Placement:
    """Puts batches on a device.

    Args:
        device: Where to; None leaves batches where they are.
        non_blocking: Don't wait for copies.
        prefetch: With ``non_blocking``, on a device that has streams: copy the next batch on a stream of its own before the present one is
            handed out, so that it moves during the present one's computation.

    Example:
        >>> Placement(torch.device("meta")).move({"x": torch.ones(2), "id": ["a", "b"]})
        {'x': tensor(..., device='meta', size=(2,)), 'id': ['a', 'b']}
    """

    def __init__(self, device: torch.device | None, *, non_blocking: bool = False, prefetch: int = 1) -> None:
        self.device = device
        self.non_blocking = non_blocking
        self._is_cpu = device is not None and device.type == "cpu"
        #: Whether tensors are where they should be without a look: this build of torch knows no device besides the CPU.
        self.is_idle = self._is_cpu and torch.accelerator.current_accelerator() is None
        #: Without an accelerator there is no other place for some of a batch's tensors.
        self._alike = not torch.accelerator.is_available()
        self.overlaps = bool(prefetch and non_blocking and device is not None and _has_streams(device))

    def move(self, batch: Any) -> Any:
        """A batch on the device."""
        assert self.device is not None
        if self._is_cpu and _is_on_cpu(batch, alike=self._alike):
            return batch
        return send_to_device(batch, self.device, non_blocking=self.non_blocking)

    def overlapped(self, feed: Pairs) -> Pairs:
        """The feed with its batches on the device, each copied while the one before is computed on."""
        assert self.device is not None
        return self._overlapped(feed, self.device)

    def _overlapped(self, feed: Pairs, device: torch.device) -> Pairs:
        module = torch.get_device_module(device)
        stream = module.Stream(device=device)

        def take() -> tuple[Any, BatchInfo] | None:
            pair = next(feed, None)
            if pair is None:
                return None
            with module.stream(stream):
                return send_to_device(pair[0], device, non_blocking=True), pair[1]

        ahead = take()
        while ahead is not None:
            batch, info = ahead
            current = module.current_stream(device)
            current.wait_stream(stream)
            for tensor in iterate_tensors(batch):
                if tensor.device == device:
                    tensor.record_stream(current)  # its memory belongs to the copying stream
            ahead, failure = _try(take)
            yield batch, info
            if failure is not None:
                raise failure


def _is_on_cpu(batch: Any, *, alike: bool) -> bool:
    """Whether a batch is surely on the CPU: the usual shapes are told at once, others take `send_to_device`'s walk.

    Args:
        batch: The batch.
        alike: Whether its tensors are on one device, so that the first tells for all.
    """
    kind = type(batch)
    values = batch.values() if kind is dict else batch if kind is list or kind is tuple else (batch,)
    if alike and len(values) > 8:  # no step of the interpreter for each
        return set(map(type, values)) == {torch.Tensor} and next(iter(values)).is_cpu
    for value in values:  # noqa: SIM110 (a generator costs more than the check)
        if type(value) is not torch.Tensor or not value.is_cpu:
            return False
    return True


def _try(take: Any) -> tuple[Any, BaseException | None]:
    """A failure of the next batch must not cost the present one."""
    try:
        return take(), None
    except Exception as error:
        return None, error


def _has_streams(device: torch.device) -> bool:
    if device.type == "cpu":
        return False
    module = getattr(torch, device.type, None)  # a lazy device has none
    return all(hasattr(module, name) for name in ("Stream", "stream", "current_stream"))
