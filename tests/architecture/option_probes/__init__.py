"""Probes of options: for each one two values, and what must be seen through the real Accelerator (or launcher) when they are set.

A probe is a function ``observe(value, folder)``. Its cases say what it must return for each value; an error of Drivetrain's is seen as the name
of its class. What two cases see must differ: an option for which no such pair can be found has no effect.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.errors import DrivetrainError

__all__ = ["PROBES", "Case", "Probe", "effect", "look"]


@dataclass(frozen=True)
class Case:
    value: Any
    seen: Any


@dataclass(frozen=True)
class Probe:
    option: str
    cases: tuple[Case, ...]
    observe: Callable[[Any, Path], Any]
    ranks: int


#: By the option's name: ``"GradScalerKwargs.init_scale"``, ``"Accelerator.split_batches"``.
PROBES: dict[str, Probe] = {}


def effect(option, *cases, ranks=1):
    """Register a probe; each case is a value and what is seen with it. With several ranks, what each of them sees, by rank."""

    def register(observe):
        assert option not in PROBES, f"{option} has two probes"
        PROBES[option] = Probe(option, tuple(Case(*case) for case in cases), observe, ranks)
        return observe

    return register


def look(probe, folder):
    """What is seen in each case, in this process or on this rank."""
    seen = []
    for index, case in enumerate(probe.cases):
        place = Path(folder, probe.option, str(index))
        place.mkdir(parents=True, exist_ok=True)
        try:
            seen.append(probe.observe(case.value, place))
        except DrivetrainError as error:
            seen.append(type(error).__name__)
        except Exception:  # the other probes go on; a traceback is never what a case expects
            seen.append(traceback.format_exc())
    return seen
