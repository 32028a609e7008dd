"""From records to a tracker's methods, with the nearest kind for what it lacks."""

from __future__ import annotations

import hashlib
import logging
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drivetrain.errors import TrackerError
from drivetrain.interfaces.tracker import Row, Tracker
from drivetrain.tracking.encoding import encode, safe_name
from drivetrain.tracking.media import (
    describe_histogram,
    figure_bytes,
    figure_image,
    table_csv,
    table_markdown,
)
from drivetrain.tracking.record import Record

__all__ = ["Delivery"]

logger = logging.getLogger("drivetrain.tracking")


class Delivery:
    """Stores records with one tracker. Raises what the tracker raises.

    Args:
        tracker: The tracker.

    Example:
        >>> from drivetrain.interfaces import Tracker, TrackerContext
        >>> from drivetrain.specs import TrackerSpec
        >>> class Print(Tracker):
        ...     def log_scalars(self, values, step):
        ...         print(step, values)
        >>> delivery = Delivery(Print(TrackerSpec(name="print"), TrackerContext(project_name="demo")))
        >>> delivery.send([Record("row", "", {"loss": 0.5}, 3, 0.0)])
        3 {'loss': 0.5}
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._said: set[str] = set()
        self._scratch: Path | None = None

    def send(self, records: Sequence[Record]) -> None:
        """Store one record of any kind, or several rows without options."""
        tracker = self._tracker
        first = records[0]
        tracker.call_options = first.options
        tracker.time = first.time
        if first.kind == "row" and not first.options:
            tracker.log_rows([Row(r.payload, r.step, r.time) for r in records])
            return
        getattr(self, f"_send_{first.kind}")(first.name, first.payload, first.step)

    def close(self) -> None:
        """Remove files that were made on the way."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _send_row(self, name: str, values: dict[str, Any], step: int | None) -> None:
        if self._tracker.log_scalars(values, step) is False:
            raise TrackerError(f"the tracker {self._tracker.spec.name!r} stored nothing of {list(values)[:5]}")

    def _send_config(self, name: str, values: dict[str, Any], step: int | None) -> None:
        if not self._tracker.log_config(values):
            self._say("configurations", "a text")
            self._send_text("config", encode(values).decode(), None)

    def _send_summary(self, name: str, values: dict[str, Any], step: int | None) -> None:
        if not self._tracker.log_summary(values):
            self._say("summaries", "values named summary/...")
            self._send_row("", {f"summary/{k}": "None" if v is None else v for k, v in values.items()}, None)

    def _send_text(self, name: str, text: str, step: int | None) -> None:
        if not self._tracker.log_text(name, text, step):
            self._say("texts", "values")
            self._send_row("", {name: text}, step)

    def _send_images(self, name: str, images: Sequence[Any], step: int | None) -> None:
        from drivetrain.tracking.png import encode_png

        if self._tracker.log_images(name, images, step):
            return
        self._say("images", "artifacts")
        for index, image in enumerate(images):
            label = name if len(images) == 1 else f"{name}/{index}"
            self._send_file(label, encode_png(image), ".png", step)

    def _send_figure(self, name: str, figure: Any, step: int | None) -> None:
        import numpy as np

        # A figure that couldn't be copied was drawn when it was logged: it comes as an array.
        if not isinstance(figure, np.ndarray) and self._tracker.log_figure(name, figure, step):
            return
        image = figure_image(figure)
        if image is not None:
            self._say("figures", "images")
            self._send_images(name, [image], step)
            return
        self._say("figures", "artifacts")
        self._send_file(name, *figure_bytes(figure), step)

    def _send_table(self, name: str, table: tuple[Sequence[str], Sequence[Sequence[Any]]], step: int | None) -> None:
        columns, rows = table
        if self._tracker.log_table(name, columns, rows, step):
            return
        text = table_markdown(columns, rows)
        if self._tracker.log_text(name, text, step):
            self._say("tables", "texts")
            return
        self._say("tables", "artifacts")
        self._send_file(name, table_csv(columns, rows).encode("utf-8", "surrogatepass"), ".csv", step)

    def _send_histogram(self, name: str, values: Any, step: int | None) -> None:
        if not self._tracker.log_histogram(name, values, step):
            self._say("histograms", "their minimum, maximum, mean and standard deviation")
            self._send_row("", {f"{name}/{k}": v for k, v in describe_histogram(values).items()}, step)

    def _send_artifact(self, name: str, path: Path, step: int | None) -> None:
        if not path.is_file():
            raise TrackerError(
                f"the artifact {path} is gone; artifacts must stay where they are until flush() or end_training()"
            )
        if not self._tracker.log_artifact(path, name or None, step):
            self._say("artifacts", "a text with their names and checksums")
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256") if hasattr(hashlib, "file_digest") else _digest(file)
            text = f"{path} ({path.stat().st_size} bytes, sha256 {digest.hexdigest()})"
            self._send_text(name or path.name, text, step)

    def _send_file(self, name: str, content: bytes, suffix: str, step: int | None) -> None:
        if self._scratch is None:
            self._scratch = Path(tempfile.mkdtemp(prefix="drivetrain-"))
        directory = Path(tempfile.mkdtemp(dir=self._scratch))
        path = directory / (safe_name(name) + suffix)
        path.write_bytes(content)
        self._send_artifact(name + suffix, path, step)

    def _say(self, what: str, instead: str) -> None:
        if what not in self._said:
            self._said.add(what)
            logger.warning("The tracker %r has no %s: %s are stored instead.", self._tracker.spec.name, what, instead)


def _digest(file: Any) -> Any:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest
