"""The chip."""

from __future__ import annotations

from drivetrain.interfaces import TorchDevice


class ToyChip(TorchDevice):
    """Computes on the CPU, and counts how often it was made current."""

    activations = 0

    def activate(self, device):
        ToyChip.activations += 1

    def memory_stats(self):
        return {"total": 1 << 20}
