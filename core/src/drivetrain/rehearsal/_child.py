"""The process in which a script is rehearsed: ``python -m drivetrain.rehearsal._child RESULT SETTINGS script|module TARGET ARGUMENTS...``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from drivetrain.launch import _worker
from drivetrain.rehearsal._session import Rehearsal, rehearse

__all__ = ["main"]


def main() -> None:
    """Rehearse, and write down what was found."""
    result, settings, kind, target = sys.argv[1:5]
    sys.argv[:] = sys.argv[4:]
    ours = sys.modules["__main__"]  # keeps this module's globals alive while another one bears its name

    def script() -> None:
        code, module = _worker._module(target) if kind == "module" else _worker._script(target)
        sys.modules["__main__"] = module
        exec(code, module.__dict__)

    report = rehearse(script, Rehearsal(**json.loads(settings)))
    sys.modules["__main__"] = ours
    Path(result).write_text(json.dumps(report.to_dict()), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # without exit handlers: groups that were never real have nobody to say goodbye to


if __name__ == "__main__":
    main()
