"""Runs a script under verification, in each of its processes: seeds, records, and ends it after so many steps.

``python _run.py {"directory": ..., "steps": 10, "kind": "script", ...} SCRIPT ARGUMENTS...``
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
import time
from typing import Any


def main() -> None:
    """Run the script as ``__main__``, as Python itself would."""
    order: dict[str, Any] = json.loads(sys.argv[1])
    sys.argv[:] = sys.argv[2:]

    from drivetrain._rank import current_rank
    from drivetrain.parity.recorder import Recorder, recording
    from drivetrain.utils import set_seed

    set_seed(order["seed"] + current_rank())  # what the script doesn't seed differs by rank, as it would without us
    recorder = Recorder(order["directory"], steps=order["steps"], layouts=order.get("layouts"))
    _end_after_silence(recorder, order["timeout"])
    with recording(recorder):
        if order["kind"] == "module":
            sys.path[0] = os.getcwd()  # noqa: PTH109
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.realpath(sys.argv[0]))  # noqa: PTH120
            runpy.run_path(sys.argv[0], run_name="__main__")


def _end_after_silence(recorder: Any, seconds: float) -> None:
    """End this process once it has recorded nothing for so long: ranks that have parted may wait for each other for ever."""

    def watch() -> None:
        while True:
            time.sleep(min(1.0, seconds / 4))
            if time.monotonic() - recorder.last_event > seconds:
                sys.stderr.write(f"drivetrain verify: nothing happened for {seconds:g} s; ending this process.\n")
                sys.stderr.flush()
                os._exit(3)

    threading.Thread(target=watch, name="drivetrain-verify", daemon=True).start()


if __name__ == "__main__":
    main()
