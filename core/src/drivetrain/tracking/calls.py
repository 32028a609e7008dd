"""What is logged besides rows: each call takes a snapshot and enqueues it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain.errors import TrackerError
from drivetrain.tracking import media
from drivetrain.tracking.record import Record
from drivetrain.tracking.values import Snapshot

__all__ = ["LogKwargs", "LoggingCalls", "as_step"]

LogKwargs = Mapping[str, Mapping[str, Any]]


class LoggingCalls:
    """The calls of a `drivetrain.tracking.TrackerHub` that store images, tables, texts, files and the like."""

    _snapshot: Snapshot

    def log_images(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        *,
        dataformats: str | None = None,
        log_kwargs: LogKwargs | None = None,
        only: str | None = None,
    ) -> None:
        """Store images: for each name a PIL image, array or tensor, or a list of these; see `drivetrain.tracking.media.normalize_images`.

        Raises:
            TrackerError: For what isn't an image.
        """
        for name, images in values.items() if self._hears("log_images") else ():
            arrays = media.normalize_images(images, dataformats=dataformats)
            weight = sum(array.nbytes for array in arrays) // 100
            self._enqueue(self._record("images", name, arrays, step, weight), log_kwargs, only)

    def log_figure(
        self,
        name: str,
        figure: Any,
        step: int | None = None,
        *,
        log_kwargs: LogKwargs | None = None,
        only: str | None = None,
    ) -> None:
        """Store a matplotlib or plotly figure."""
        if self._hears("log_figure"):
            record = self._record("figure", name, media.snapshot_figure(figure), step, 10_000)
            self._enqueue(record, log_kwargs, only)

    def log_table(
        self,
        name: str,
        columns: Sequence[str] | None = None,
        data: Any = None,
        dataframe: Any = None,
        step: int | None = None,
        *,
        log_kwargs: LogKwargs | None = None,
        only: str | None = None,
    ) -> None:
        """Store a table: columns and rows, or rows that are mappings, or a dataframe.

        Raises:
            TrackerError: If rows and columns don't fit.
        """
        if self._hears("log_table"):
            table = media.normalize_table(columns, data, dataframe, self._snapshot)
            weight = len(table[0]) * (len(table[1]) + 1)
            self._enqueue(self._record("table", name, table, step, weight), log_kwargs, only)

    def log_histogram(
        self,
        name: str,
        values: Any,
        step: int | None = None,
        *,
        log_kwargs: LogKwargs | None = None,
        only: str | None = None,
    ) -> None:
        """Store the distribution of all elements of an array or tensor.

        Raises:
            TrackerError: If they aren't numbers.
        """
        if self._hears("log_histogram"):
            array = media.snapshot_histogram(values)
            self._enqueue(self._record("histogram", name, array, step, array.nbytes // 100), log_kwargs, only)

    def log_text(
        self,
        name: str,
        text: str,
        step: int | None = None,
        *,
        log_kwargs: LogKwargs | None = None,
        only: str | None = None,
    ) -> None:
        """Store a text."""
        if self._hears("log_text"):
            text = self._snapshot.text(text)
            self._enqueue(self._record("text", name, text, step, 1 + len(text) // 100), log_kwargs, only)

    def log_artifact(
        self,
        path: str | Path,
        name: str | None = None,
        step: int | None = None,
        *,
        log_kwargs: LogKwargs | None = None,
        only: str | None = None,
    ) -> None:
        """Store a file. It isn't copied at the call: it must stay as it is until `flush` or `finish`.

        Raises:
            TrackerError: If there is no such file.
        """
        if self._hears("log_artifact"):
            path = Path(path).absolute()
            if not path.is_file():
                hint = " It is a directory: use log_artifacts()." if path.is_dir() else ""
                raise TrackerError(f"There is no file {path}.{hint}")
            self._enqueue(self._record("artifact", name or path.name, path, step), log_kwargs, only)

    def log_artifacts(
        self,
        directory: str | Path,
        name: str | None = None,
        step: int | None = None,
        *,
        log_kwargs: LogKwargs | None = None,
        only: str | None = None,
    ) -> None:
        """Store all files below a directory, named by their path from there, after ``name/`` if given.

        Raises:
            TrackerError: If there is no such directory.
        """
        if not self._hears("log_artifacts"):
            return
        directory = Path(directory)
        if not directory.is_dir():
            raise TrackerError(f"There is no directory {directory.absolute()}.")
        for path in sorted(p for p in directory.rglob("*") if p.is_file()):
            relative = path.relative_to(directory).as_posix()
            self.log_artifact(path, f"{name}/{relative}" if name else relative, step, log_kwargs=log_kwargs, only=only)

    def log_config(self, values: Mapping[str, Any], *, only: str | None = None) -> None:
        """Store hyperparameters, nested or not, beside those given to `start`."""
        if self._hears("log_config"):
            config = self._snapshot.config(values)
            self._enqueue(self._record("config", "", config, None, len(config)), None, only)

    def log_summary(self, values: Mapping[str, Any], *, only: str | None = None) -> None:
        """Store final values of the run."""
        if self._hears("log_summary"):
            summary = self._snapshot.config(values)
            self._enqueue(self._record("summary", "", summary, None, len(summary)), None, only)

    def _record(self, kind: str, name: str, payload: Any, step: Any, weight: int = 1) -> Record:
        return Record(kind, str(name), payload, None if step is None else as_step(step), time.time(), 1 + weight)

    def _hears(self, method: str) -> bool:
        raise NotImplementedError

    def _enqueue(self, record: Record, log_kwargs: LogKwargs | None, only: str | None) -> None:
        raise NotImplementedError


def as_step(step: Any) -> int:
    """The step as a whole number.

    Raises:
        TrackerError: If it isn't one.

    Example:
        >>> as_step(3.0)
        3
    """
    try:
        return int(step)
    except (TypeError, ValueError) as error:
        raise TrackerError(f"step must be a whole number, not {step!r}: {error}") from None
