"""The tracker."""

from __future__ import annotations

import json

from drivetrain.interfaces import Tracker


class AcmeTracker(Tracker):
    """Appends one JSON line per row to ``acme.log``."""

    _file = None

    def start(self):
        folder = self.context.directory / self.context.project_name.replace("/", "_")
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "acme.log").open("a", encoding="utf-8")

    @property
    def run(self):
        return self._file

    def log_config(self, values):
        self._write({"config": dict(values)})
        return True

    def log_scalars(self, values, step):
        self._write({"step": step, "values": dict(values)})
        return True

    def _write(self, record):
        self._file.write(json.dumps(record) + "\n")

    def flush(self):
        self._file.flush()

    def finish(self):
        if self._file is not None:
            self._file.close()
