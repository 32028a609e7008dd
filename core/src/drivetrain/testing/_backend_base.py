"""What all parts of the backends' kit share: what a subclass says, and how functions get to the ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch

from drivetrain.specs import BackendSpec, Capability
from drivetrain.testing.pairwise import pairwise
from drivetrain.testing.pytest_plugin import Workers

__all__ = ["BackendKit", "check_all_close", "check_close"]


class BackendKit:
    """The attributes of `BackendConformance`, which see; and its parametrization."""

    spec: BackendSpec
    world_sizes: ClassVar[Sequence[int]] = (1, 2)
    precisions: ClassVar[Sequence[str]] = ("fp32", "bf16")
    arguments: ClassVar[Mapping[str, Any]] = {"cpu": True}
    tolerance: ClassVar[Mapping[str, float]] = {"fp32": 1e-5, "bf16": 5e-2, "fp16": 1e-2}
    reads: ClassVar[Mapping[str, int]] = {"fp32": 0, "bf16": 0, "fp16": 1}
    autocast: ClassVar[Mapping[str, str]] = {"bf16": "bfloat16", "fp16": "float16"}

    # -- on the ranks ----------------------------------------------------------------------------------------------------------

    def make_accelerator(self, **kwargs: Any) -> Any:
        """The Accelerator of every test, made on a rank; a subclass may do more."""
        from drivetrain import Accelerator
        from drivetrain.config import GradScalerKwargs

        if kwargs.get("mixed_precision") == "fp16":  # the default scale overflows at first, which plain PyTorch doesn't
            kwargs.setdefault("kwargs_handlers", [GradScalerKwargs(init_scale=128.0)])
        return Accelerator(**{"backend": self.spec.name, **self.arguments, **kwargs})

    # -- in the test's process -------------------------------------------------------------------------------------------------

    def has(self, capability: Capability) -> bool:
        """Whether the backend declares it."""
        return capability in self.spec.capabilities

    @property
    def largest_world(self) -> int:
        """The largest world size that is tested."""
        return max(self.world_sizes)

    def run(self, workers: Workers, world_size: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``function(self, ...)`` on every rank; the results by rank."""
        return workers(world_size, self.spec.launch_environment).run(function, self, *args, **kwargs)

    def pytest_generate_tests(self, metafunc: Any) -> None:
        """Give tests their world sizes, precisions and cases."""
        names = metafunc.fixturenames
        if "situation" in names:
            metafunc.parametrize("situation", self.situations())
        if "world_size" in names:
            metafunc.parametrize("world_size", list(self.world_sizes))
        if "precision" in names:
            metafunc.parametrize("precision", list(self.precisions))

    def situations(self) -> list[Any]:
        """World size, precision and settings of a training: a selection in which every two meet, then the rest, marked ``full``."""
        axes: dict[str, Sequence[Any]] = {
            "world_size": self.world_sizes,
            "precision": self.precisions,
            "accumulation": (4, 1),
            "max_norm": (0.5, None),
            "optimizer": ("adamw", "sgd"),
            "weighted": (False, True) if self.has(Capability.ITEM_WEIGHTS) else (False,),
            "samples": (45, 64),
            "scheduler": (True, False),
            "sized": (True, False),
        }
        selection = pairwise(axes)
        product = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
        params = [pytest.param(s, id=_name(s)) for s in selection]
        return params + [pytest.param(s, id=_name(s), marks=pytest.mark.full) for s in product if s not in selection]


def _name(situation: Mapping[str, Any]) -> str:
    parts = [f"{situation['world_size']}ranks", situation["precision"], f"{situation['accumulation']}x"]
    parts += [situation["optimizer"], f"{situation['samples']}rows"]
    parts += ["clipped"] * (situation["max_norm"] is not None) + ["weighted"] * situation["weighted"]
    parts += ["scheduled"] * situation["scheduler"] + ["stream"] * (not situation["sized"])
    return "-".join(parts)


def check_close(ours: Any, theirs: Any, tolerance: float, what: str) -> None:
    """Compare two tensors: differences up to ``tolerance``, relative for values above 1."""
    mine, expected = (torch.as_tensor(t).detach().cpu().double() for t in (ours, theirs))
    assert mine.shape == expected.shape, f"{what}: the shape is {tuple(mine.shape)}, not {tuple(expected.shape)}"
    difference = (mine - expected).abs()
    wrong = ~(difference <= tolerance * expected.abs().clamp(min=1.0))  # a NaN is wrong, too
    assert not wrong.any(), (
        f"{what}: {mine.flatten()[:5].tolist()}, not {expected.flatten()[:5].tolist()}; "
        f"the largest difference is {float(difference.max()):.3g}, and {tolerance:g} is allowed"
    )


def check_all_close(ours: Mapping[str, Any], theirs: Mapping[str, Any], tolerance: float, what: str) -> None:
    """`check_close` for each name; the names must be the same, in any order."""
    assert ours.keys() == theirs.keys(), f"{what}: there are {sorted(ours)}, not {sorted(theirs)}"
    for name, value in theirs.items():
        check_close(ours[name], value, tolerance, f"{what}: {name}")
