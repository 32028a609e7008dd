"""Offline experiments whose data lies in the logging directory from the start, where a crash leaves it, not in the system's temporary folder."""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
import time
from pathlib import Path
from typing import Any

__all__ = ["make_offline", "wait_until_written"]


def make_offline(base: Any, directory: str | None, **keywords: Any) -> Any:
    """Make an offline experiment.

    Args:
        base: ``comet_ml.OfflineExperiment`` or ``comet_ml.ExistingOfflineExperiment``.
        directory: Where its archive goes, and its data until then, in ``.comet-<random>``; None for Comet's own choice.
        **keywords: For the class.
    """
    if directory is None:
        return base(**keywords)
    Path(directory).mkdir(parents=True, exist_ok=True)
    place = tempfile.mkdtemp(prefix=".comet-", dir=directory)

    class Offline(base):  # type: ignore[misc]  # one of two classes
        @property
        def tmpdir(self) -> str:
            return place

        @tmpdir.setter
        def tmpdir(self, path: str) -> None:
            with contextlib.suppress(OSError):
                Path(path).rmdir()  # made by the class a moment ago, empty

    Offline.__name__ = base.__name__
    return Offline(offline_directory=directory, **keywords)


def wait_until_written(experiment: Any, timeout: float) -> bool:
    """Wait until an offline experiment's thread has written what was logged before, and the disk has it.

    A last word is logged and looked for in the file, for the thread tells nothing.

    Returns:
        Whether it was found in time.
    """
    path, word = Path(experiment.tmpdir, "messages.json"), secrets.token_hex(8)
    experiment.log_other("drivetrain.flushed", word)
    limit = time.monotonic() + timeout
    while time.monotonic() < limit:
        if path.exists():
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 4096))
                if word.encode() in file.read():
                    os.fsync(file.fileno())
                    return True
        time.sleep(0.005)
    return False
