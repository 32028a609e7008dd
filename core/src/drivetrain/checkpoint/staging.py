"""Host memory that holds a state while it is written in the background and training goes on."""

from __future__ import annotations

import torch

__all__ = ["Staging"]


class Staging:
    """Buffers for copies of tensors, allocated once and used again by the next save: fresh memory costs several times the copy.

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
        buffer.copy_(source.reshape(-1).view(torch.uint8), non_blocking=on_device)
        if on_device:
            self._devices.add(source.device)
        return buffer.view(source.dtype).reshape(source.shape)

    def finish(self) -> None:
        """Wait until all copies are made, and drop buffers that this save didn't use."""
        for device in self._devices:
            torch.get_device_module(device).synchronize(device)
        self._devices.clear()
        for place in self._buffers.keys() - self._used:
            del self._buffers[place]
        self._used.clear()

    def release(self) -> None:
        """Free all buffers."""
        self._buffers.clear()
        self._used.clear()
