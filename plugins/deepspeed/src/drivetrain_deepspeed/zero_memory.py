"""What one process holds at each moment of a step under ZeRO, as DeepSpeed 0.19 implements it. Imports no torch.

With E trained elements of A in all, N processes, W bytes per computed element and S bytes of optimizer state:

- stages 1 and 2: all weights flat (A W), fp32 copies of a part (4 E / N), state of it (S / N), a bucket for reductions; gradients are whole until they
  are reduced at the window's end (stage 1), or a part of them (stage 2);
- stage 3: parts of the weights (A W / N) and small ones whole, fp32 copies (4 E / N), state (S / N), gradients of the part (W E / N) and a bucket all the
  time; gathered weights up to the limit of living ones, and a unit's flat buffer while it is gathered;
- the step: fp32 gradients of the part (4 E / N), and the optimizer's temporaries for one flat tensor of that size.

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), for what is divided; buffers as measured.
"""

from __future__ import annotations

from collections.abc import Iterator

from drivetrain.memory import Hardware, ModelProfile, Moment, Timeline
from drivetrain_deepspeed.sizes import Sizes

__all__ = ["ZeroMemory"]


class ZeroMemory:
    """Bytes of one process.

    Args:
        profile: The model, undivided.
        hardware: The devices.
        stage: ZeRO's stage.
        offload: State in the CPU's memory: "parameters", "optimizer", "gradients".
        sizes: Of buckets.

    Example:
        >>> from drivetrain.memory import known_hardware, profile_of_counts
        >>> profile = profile_of_counts(parameters=1e8, layers=4, hidden=512, sequence=128)
        >>> memory = ZeroMemory(profile, known_hardware("a100-80gb", devices=4), stage=3, offload=(), sizes=Sizes(bucket=10**6))
        >>> name, held = memory.peak(profile.timelines["none"], samples=1, accumulation=1)
        >>> held["parameters"] < profile.parameter_bytes / 3
        True
    """

    def __init__(
        self, profile: ModelProfile, hardware: Hardware, *, stage: int, offload: tuple[str, ...], sizes: Sizes
    ) -> None:
        self.profile, self.stage, self.offload, self.sizes = profile, stage, offload, sizes
        self.devices = hardware.devices
        self.staging = hardware.staging if hardware.devices > 1 else 0.0
        self.width = profile.compute_itemsize
        trained = [p for p in profile.parameters if p.trainable]
        self.trained = sum(p.numel for p in trained)
        self.largest = max((p.numel for p in trained), default=0)
        part = self.trained / (self.devices if stage else 1)
        self.masters = round(4 * part) if stage or self.width < 4 else 0
        self.state = round(profile.optimizer.state * part / max(self.trained, 1))
        self.part_gradients = round(self.width * part)
        sizes_of_trained = [p.numel for p in trained]
        # Below stage 3 a process keeps gradients of all parameters of which a piece is its own, and keeps them whole.
        self.touched_gradients = self.width * _touched(sizes_of_trained, self.devices)
        # One that is larger than the bucket waits beside it until the next one comes.
        waiting = sum(n for n in sorted(sizes_of_trained)[-2:] if n > sizes.bucket)
        self.waiting = self.width * max(waiting, self.largest)
        at_once = hardware.steps_at_once and "optimizer" not in offload
        optimizer = profile.optimizer
        # Per element that is stepped on: DeepSpeed gives the optimizer one flat tensor.
        per_element = (
            optimizer.temporaries_at_once / max(self.trained, 1)
            if at_once
            else (optimizer.temporaries_alone if stage else optimizer.temporaries) / max(self.largest, 1)
        )
        stepped = part if stage else (self.trained if at_once else self.largest)
        self.temporaries = round(per_element * stepped)
        self.fresh = round(4 * part) if stage else 0  # fp32 gradients that the step makes
        self.alone = max((p.numel for p in profile.parameters if not p.unit), default=0)
        self.units = [0] * len(profile.units)
        for parameter in profile.parameters:
            if stage < 3 or parameter.numel >= sizes.persistent:
                self.units[parameter.unit] += parameter.numel

    @property
    def host_bytes(self) -> int:
        """Bytes in the CPU's memory."""
        held = 0
        if "optimizer" in self.offload:
            held += self.masters + self.state + self.fresh + self.temporaries
        return held + (self._parameters() if "parameters" in self.offload else 0)

    def peak(self, timeline: Timeline, *, samples: int, accumulation: int) -> tuple[str, dict[str, int]]:
        """The fullest moment: its name, and bytes by category.

        Args:
            timeline: Forward and backward of a micro-batch.
            samples: Samples of a micro-batch.
            accumulation: Micro-batches per step.
        """
        return max(self._moments(timeline, samples, accumulation), key=lambda m: sum(m[1].values()))

    def _moments(self, timeline: Timeline, samples: int, accumulation: int) -> Iterator[tuple[str, dict[str, int]]]:
        inputs = round(self.profile.inputs * samples)
        for stretch in timeline.stretches:
            name = self.profile.units[stretch.unit] or "what belongs to no unit"
            for moment in stretch.peaks:
                yield (
                    f"{stretch.phase} of {name}",
                    self._held(
                        activations=moment.activations(samples) + inputs,
                        gradients=self._gradients(moment, stretch.phase, accumulates=accumulation > 1),
                        gathered=self._gathered(stretch.unit),
                        staged=self._staged(moment, stretch.phase),
                    ),
                )
        if self.stage == 1:
            # All gradients, and room for those that the part touches.
            yield "reduction", self._held(gradients=self.width * self.trained + self.touched_gradients)
        if self.stage in (1, 2) and not self.offload:
            # They are made one flat tensor, which is then copied into float32, unless it is in that already.
            flat = self.part_gradients if self.width < 4 else 0
            yield "flat gradients", self._held(gradients=self.touched_gradients + flat + self.fresh)
        if "optimizer" not in self.offload:
            gradients = self.fresh + (self.width * self.trained if not self.stage else 0)
            yield "optimizer step", self._held(gradients=gradients, activations=self.temporaries)

    def _held(self, *, activations: int = 0, gradients: int = 0, gathered: int = 0, staged: int = 0) -> dict[str, int]:
        off = "optimizer" in self.offload
        bucket = min(self.sizes.bucket, 2**62) * self.width if self.stage else 0
        constant = self.part_gradients if self.stage == 3 and "gradients" not in self.offload else 0
        return {
            "parameters": 0 if "parameters" in self.offload else self._parameters(),
            "gradients": gradients + constant,
            "optimizer": 0 if off else self.masters + self.state,
            "activations": activations,
            "gathered": gathered,
            "communication": bucket + staged,
            "buffers": self.profile.buffers,
        }

    def _parameters(self) -> int:
        count = self.profile.parameter_count
        if self.stage < 3:
            return count * self.width
        divided = sum(self.units)
        return round(self.width * (divided / self.devices + count - divided))

    def _gradients(self, moment: Moment, phase: str, *, accumulates: bool) -> int:
        """Gradients besides those that are in buckets; from the second micro-batch on there are some from the start."""
        made = round(moment.gradients * self.width / 4) if phase == "backward" else 0
        fresh = min(made, self.width * self.largest)  # from stage 2 on, each goes into a bucket as soon as it is made
        if self.stage < 2:
            return self.width * self.trained + fresh if accumulates else made
        if self.stage == 3 or "gradients" in self.offload:
            return fresh
        # The part's gradients are there once a bucket was full, and are added to those of earlier micro-batches at the end.
        part = self.touched_gradients if made > self.width * self.sizes.bucket else 0
        return min(made, self.waiting) + part + (self.touched_gradients if accumulates else 0)

    def _staged(self, moment: Moment, phase: str) -> int:
        """Stage 3: what the communication backend copies of a bucket, or of a parameter that is larger, while it scatters sums."""
        if self.stage < 3 or phase != "backward":
            return 0
        made = round(moment.gradients * self.width / 4)
        return round(self.staging * min(made, self.width * max(self.sizes.bucket, self.largest)))

    def _gathered(self, unit: int) -> int:
        if self.stage < 3:
            return 0
        # What belongs to no unit is gathered module by module.
        own = self.units[unit] if unit else self.alone
        live = min(sum(self.units), max(self.sizes.live, own))
        flat = max(own, min(self.sizes.prefetch, max(self.units)))
        return self.width * (live + flat)


def _touched(sizes: list[int], processes: int) -> int:
    """Elements of all parameters of which a piece belongs to a process: of the process with most, where all lie in one row that is cut into equal parts."""
    part = sum(sizes) / max(processes, 1)
    held = [0] * max(processes, 1)
    start = 0
    for size in sizes:
        first, last = int(start // part), int((start + size - 1) // part)
        for process in range(first, min(last, len(held) - 1) + 1):
            held[process] += size
        start += size
    return max(held)
