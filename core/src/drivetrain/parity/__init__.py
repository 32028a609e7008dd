"""Whether a script trains the same on several processes as on one: what `drivetrain verify` does, for Python.

`Recorder` and `recording` write down what a training does; `compare_records` finds the first step, module and tensor where two records part, and the likely cause.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._lazy import lazy_exports

if TYPE_CHECKING:
    from drivetrain.parity.recorder import Enough, Recorder, recording
    from drivetrain.parity.report import Report, compare_records
    from drivetrain.parity.results import Cause, Difference, Tolerance

__all__ = ["Cause", "Difference", "Enough", "Recorder", "Report", "Tolerance", "compare_records", "recording"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "recorder": ["Enough", "Recorder", "recording"],
        "report": ["Report", "compare_records"],
        "results": ["Cause", "Difference", "Tolerance"],
    },
)
