"""Host memory that holds a state while it is written in the background and training goes on."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

__all__ = ["Staging"]

#: Bytes that one thread copies at a time, and bytes after which copies are made without waiting for `finish`: sources may be temporary.
_CHUNK = 8 << 20
_PENDING = 512 << 20
_MOST_THREADS = 4


class Staging:
    """Buffers for copies of tensors, allocated once and used again by the next save: fresh memory costs several times the copy.

    Tensors on the CPU are copied by threads of our own. Those of torch's operators wait for each other at the end of each one, which takes many times
    as long as the copy where cores are busy with something else.

    Example:
        >>> staging = Staging()
        >>> live = torch.ones(2)
        >>> copy = staging.copy("model/w", live)
        >>> staging.finish()
        >>> _ = live.zero_()
        >>> copy, staging.nbytes
        (tensor([1., 1.]), 8)
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._used: set[str] = set()
        self._devices: set[torch.device] = set()
        self._pending: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._pending_nbytes = 0
        self._pool: ThreadPoolExecutor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(b.nbytes for b in self._buffers.values())

    def copy(self, place: str, tensor: torch.Tensor) -> torch.Tensor:
        """Start copying a tensor to the host; the copy holds its values after `finish`.

        Args:
            place: Names the buffer; a place is used once per save.
            tensor: A dense tensor on any device.
        """
        source = tensor.detach().resolve_conj().resolve_neg().contiguous()
        on_device = source.device.type != "cpu"
        buffer = self._buffers.get(place)
        if buffer is None or buffer.nbytes != source.nbytes:
            pin = on_device and source.device.type == "cuda"
            buffer = torch.empty(source.nbytes, dtype=torch.uint8, device="cpu", pin_memory=pin)
            self._buffers[place] = buffer
        self._used.add(place)
        if source.numel() == 0:
            return torch.empty(source.shape, dtype=source.dtype, device="cpu")
        if on_device:
            flat = source.reshape(-1)
            buffer.copy_(flat.as_strided(flat.shape, (1,)).view(torch.uint8), non_blocking=True)
            self._devices.add(source.device)
        else:
            self._pending.append((buffer, source))
            self._pending_nbytes += source.nbytes
            if self._pending_nbytes > _PENDING:
                self._copy_pending()
        return buffer.view(source.dtype).reshape(source.shape)

    def finish(self) -> None:
        """Wait until all copies are made, and drop buffers that this save didn't use."""
        self._copy_pending()
        for device in self._devices:
            torch.get_device_module(device).synchronize(device)
        self._devices.clear()
        for place in self._buffers.keys() - self._used:
            del self._buffers[place]
        self._used.clear()

    def release(self) -> None:
        """Free all buffers, and end the threads."""
        self._pending.clear()
        self._buffers.clear()
        self._used.clear()
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None

    def _copy_pending(self) -> None:
        pieces = [
            (target.data_ptr() + start, source.data_ptr() + start, min(_CHUNK, source.nbytes - start))
            for target, source in self._pending
            for start in range(0, source.nbytes, _CHUNK)
        ]
        if self._pending_nbytes <= _CHUNK:
            for piece in pieces:
                ctypes.memmove(*piece)
        else:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), "drivetrain-staging")
            queue = iter(pieces)  # `next` on it is atomic: each piece has one taker
            for work in [self._pool.submit(_copy_all, queue) for _ in range(self._pool._max_workers)]:
                work.result()
        self._pending.clear()
        self._pending_nbytes = 0


def _copy_all(pieces: Iterator[tuple[int, int, int]]) -> None:
    for piece in pieces:
        ctypes.memmove(*piece)  # without the interpreter's lock
