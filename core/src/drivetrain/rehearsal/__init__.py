"""Rehearsing a script: one rank of a large job on one CPU, on shapes alone.

`drivetrain rehearse` runs the user's script under torch's fake process group and with fake tensors; what it finds is a `Report`. `record_collectives` notes the
messages of a real run, to compare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._lazy import lazy_exports

if TYPE_CHECKING:
    from drivetrain.rehearsal.collectives import Collective, record_collectives
    from drivetrain.rehearsal.report import Failure, Message, Report

__all__ = ["Collective", "Failure", "Message", "Report", "record_collectives"]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {"collectives": ["Collective", "record_collectives"], "report": ["Failure", "Message", "Report"]},
)
