"""Conformance of trackers: subclass `TrackerConformance` in a test file, say how to read back what was stored, and run pytest.

Each test drives the tracker through a `drivetrain.tracking.TrackerHub`, as training does, and compares what the system stored with what was logged::

    class TestToy(TrackerConformance):
        spec = TrackerSpec(name="toy", target="toy.tracker:ToyTracker", needs_directory=True, kinds=frozenset({"config"}))

        def read_back(self, directory):
            return StoredRun(scalars=..., config=...)
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest

from drivetrain._lazy import load_target
from drivetrain.interfaces.tracker import Tracker
from drivetrain.specs import ProcessInfo, TrackerSpec
from drivetrain.tracking.hub import TrackerHub
from drivetrain.tracking.options import TrackingOptions

__all__ = ["HARD_CONFIG", "HARD_NAMES", "HARD_VALUES", "StoredRun", "TrackerConformance"]


class _Opaque:
    """An object that no tracker knows."""

    def __str__(self) -> str:
        return "an opaque object"


#: Values that have broken trackers, by a plain name.
HARD_VALUES: dict[str, float | int | str | bool] = {
    "nan": math.nan,
    "inf": math.inf,
    "minus_inf": -math.inf,
    "tiny": 1e-30,
    "negative": -2.5,
    "zero": 0,
    "integer": 12345,
    "true": True,
    "text": "abc",
    "unicode_text": "é ü 漢",
}

#: Names that have broken trackers, or left their directory.
HARD_NAMES: tuple[str, ...] = (
    "../x",
    "/abs",
    "../../../tmp/escaped",
    "a//b",
    "a/./b",
    "C:\\x",
    "with space",
    '/a b:c*?"<>|é#%.x//y',
    "brackets[0](1)@`$",
    "nul\0inside",
    "line\nbreak",
    "tab\there",
    ".",
    "..",
    ".hidden",
    "x" * 300,
)

#: Hyperparameters that have broken trackers.
HARD_CONFIG: dict[str, Any] = {
    "lr": 0.1,
    "layers": 3,
    "nested": {"a": {"b": 1, "c": "two"}, "empty": {}},
    "flag": True,
    "nothing": None,
    "list": [1, 2, 3],
    "object": _Opaque(),
    "nan": math.nan,
    "long": "p" * 7000,
    "../x": 1,
    "/abs": 2,
    "nul\0inside": 3,
    "line\nbreak": 4,
    "large": 2**60 + 1,
}


@dataclass(kw_only=True)
class StoredRun:
    """What a system stored, under the names that were logged (undo what was done to make them legal).

    Args:
        scalars: Steps and values of each name in the order stored, numbers and texts alike; a number stored as text beside may be that text.
        config: Hyperparameters by flat name; numbers may be texts where the system has only texts.
        images: uint8 arrays of shape (height, width, 3 or 4) of each name with their steps, in order.
        figures: Steps with a figure, of each name.
        texts: Steps and texts of each name.
        tables: Columns and rows of each name, the last one logged.
        histograms: Smallest and largest value and number of values of each name, the last one logged.
        artifacts: Contents by name, the last one logged.
        summary: Final values.
    """

    scalars: dict[str, list[tuple[int | None, Any]]] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    images: dict[str, list[tuple[int | None, Any]]] = field(default_factory=dict)
    figures: dict[str, list[int | None]] = field(default_factory=dict)
    texts: dict[str, list[tuple[int | None, str]]] = field(default_factory=dict)
    tables: dict[str, tuple[list[str], list[list[Any]]]] = field(default_factory=dict)
    histograms: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    artifacts: dict[str, bytes] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)


class TrackerConformance:
    """What every tracker must do. Needs pytest; each test has a directory of its own (``tmp_path``)."""

    #: The tracker's descriptor.
    spec: ClassVar[TrackerSpec]
    #: ``init_kwargs`` for the tracker.
    init_kwargs: ClassVar[Mapping[str, Any]] = {}
    #: Relative error with which the system stores numbers; 1e-6 for float32.
    tolerance: ClassVar[float] = 0.0
    #: Relative width of a histogram's bins, where they are all that the system keeps of the smallest and largest value.
    bin_width: ClassVar[float] = 0.0
    #: Seconds that a run may take to open or close.
    timeout: ClassVar[float] = 60.0

    def read_back(self, directory: Path) -> StoredRun:
        """Read all that was stored by runs with this logging directory."""
        raise NotImplementedError

    # -- helpers ---------------------------------------------------------------------------------------------------------------

    def make_hub(self, directory: Path, *, rank: int = 0) -> TrackerHub:
        """A hub with this tracker alone."""
        bounds = TrackingOptions(
            start_timeout=self.timeout, finish_timeout=self.timeout, flush_timeout=self.timeout, interval=0.01
        )
        process = ProcessInfo(rank=rank, world_size=2, local_rank=rank, local_world_size=2)
        return TrackerHub([self.spec], process=process, logging_dir=directory, options=bounds)

    def start(self, hub: TrackerHub, config: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Open a run."""
        hub.start("conformance", config, {self.spec.name: self.init_kwargs} if self.init_kwargs else None, **kwargs)

    def finish(self, hub: TrackerHub) -> None:
        """Close the run; everything must have been taken."""
        assert hub.finish(), "the tracker raised, hung, or refused values: see the warnings in the log"

    def same(self, stored: Any, logged: Any) -> bool:
        """Whether a stored value is what was logged, up to the system's precision; not-finite numbers may be texts."""
        if isinstance(logged, str):
            return bool(stored == logged)
        if isinstance(stored, str):
            try:
                stored = {"True": 1.0, "False": 0.0}.get(stored) if isinstance(logged, bool) else float(stored)
            except ValueError:
                return False
        if stored is None:
            return False
        if math.isnan(logged):
            return math.isnan(stored)
        return bool(stored == logged) or math.isclose(stored, logged, rel_tol=self.tolerance)

    def check_series(self, stored: StoredRun, name: str, points: Sequence[tuple[int | None, Any]]) -> None:
        """Assert that a name has exactly these steps and values, in this order; a step None stands for any."""
        got = stored.scalars.get(name, [])
        assert len(got) == len(points), f"{name!r}: logged {len(points)} values, stored {len(got)}: {got[:5]}"
        for (step, value), (logged_step, logged_value) in zip(got, points, strict=True):
            assert logged_step is None or step == logged_step, f"{name!r}: logged step {logged_step}, stored {step}"
            assert self.same(value, logged_value), f"{name!r}: logged {logged_value!r}, stored {value!r}"

    # -- values ----------------------------------------------------------------------------------------------------------------

    def test_rows_are_stored_once_in_order_with_their_steps(self, tmp_path: Path) -> None:
        """Each value of each row, exactly once."""
        hub = self.make_hub(tmp_path)
        self.start(hub)
        for step in range(50):
            hub.log({"train/loss": 1 / (step + 1), "lr": 0.5 * step}, step=step)
        self.finish(hub)
        stored = self.read_back(tmp_path)
        self.check_series(stored, "train/loss", [(s, 1 / (s + 1)) for s in range(50)])
        self.check_series(stored, "lr", [(s, 0.5 * s) for s in range(50)])

    def test_hard_values_are_kept(self, tmp_path: Path) -> None:
        """NaN, infinities, texts and the rest of `HARD_VALUES`, alone and among others."""
        hub = self.make_hub(tmp_path)
        self.start(hub)
        hub.log(HARD_VALUES, step=1)
        hub.log({"object": _Opaque(), "list": [1, 2], "nested": {"a": {"b": 2.0}}}, step=2)
        self.finish(hub)
        stored = self.read_back(tmp_path)
        for name, value in HARD_VALUES.items():
            self.check_series(stored, name, [(1, value)])
        flat: dict[str, Any] = {"object": "an opaque object", "list": "[1, 2]", "nested/a/b": 2.0}
        for name, value in flat.items():
            self.check_series(stored, name, [(2, value)])

    def test_tensors_and_array_scalars_are_numbers(self, tmp_path: Path) -> None:
        """0-d tensors of several dtypes and NumPy scalars; changing a tensor after the call changes nothing."""
        import numpy as np
        import torch

        hub = self.make_hub(tmp_path)
        self.start(hub)
        live = torch.tensor(3.0, requires_grad=True)
        values = {
            "bf16": torch.tensor(1.5, dtype=torch.bfloat16),
            "one_element": torch.tensor([[4]]),
            "bool": torch.tensor(True),
            "numpy": np.float32(0.25),
            "numpy_int": np.int64(7),
            "live": live,
        }
        hub.log(values, step=0)
        with torch.no_grad():
            live.zero_()
        self.finish(hub)
        stored = self.read_back(tmp_path)
        for name, value in {
            "bf16": 1.5,
            "one_element": 4,
            "bool": 1,
            "numpy": 0.25,
            "numpy_int": 7,
            "live": 3.0,
        }.items():
            self.check_series(stored, name, [(0, value)])

    def test_steps_may_go_back_be_missing_or_be_large(self, tmp_path: Path) -> None:
        """Rows are stored as they come, whatever their steps."""
        hub = self.make_hub(tmp_path)
        self.start(hub)
        steps = [5, 10, 3, 3, 2**39]
        for index, step in enumerate(steps):
            hub.log({"back": index}, step=step)
        hub.log({"free": 1.0})
        hub.log({"free": 2.0})
        self.finish(hub)
        stored = self.read_back(tmp_path)
        self.check_series(stored, "back", [(step, index) for index, step in enumerate(steps)])
        self.check_series(stored, "free", [(None, 1.0), (None, 2.0)])

    def test_hard_names_are_kept(self, tmp_path: Path) -> None:
        """Each name of `HARD_NAMES` is found again under itself."""
        hub = self.make_hub(tmp_path)
        self.start(hub)
        hub.log({name: float(i) for i, name in enumerate(HARD_NAMES)}, step=0)
        self.finish(hub)
        stored = self.read_back(tmp_path)
        for i, name in enumerate(HARD_NAMES):
            self.check_series(stored, name, [(0, float(i))])

    def test_nothing_is_written_outside_the_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whatever names say."""
        import numpy as np

        room = tmp_path / "a" / "b" / "c"
        inside = room / "logs"
        inside.mkdir(parents=True)
        monkeypatch.chdir(room)
        source = room / "source.bin"
        source.write_bytes(b"content")
        hub = self.make_hub(inside)
        hub.start("../../project", HARD_CONFIG, {self.spec.name: self.init_kwargs} if self.init_kwargs else None)
        for i, name in enumerate((*HARD_NAMES, str(tmp_path / "absolute"))):
            hub.log({name: 1.0}, step=i)
            hub.log_text(name, "text", i)
            hub.log_images({name: np.zeros((4, 4, 3), np.uint8)}, i)
            hub.log_table(name, ["x"], [[1]], step=i)
            hub.log_histogram(name, [1.0, 2.0], i)
            hub.log_artifact(source, name, i)
        self.finish(hub)
        outside = [p for p in tmp_path.rglob("*") if p.is_file() and inside not in p.parents and p != source]
        assert not outside, f"written outside the logging directory: {outside}"
        assert not Path("/tmp/escaped").exists() and not Path("/abs").exists()

    def test_many_metrics_at_once(self, tmp_path: Path) -> None:
        """1,500 values in one row."""
        hub = self.make_hub(tmp_path)
        self.start(hub)
        hub.log({f"m/{i}": float(i) for i in range(1500)}, step=3)
        self.finish(hub)
        stored = self.read_back(tmp_path)
        for i in range(1500):
            self.check_series(stored, f"m/{i}", [(3, float(i))])

    def test_config_is_stored_flat_and_whole(self, tmp_path: Path) -> None:
        """`HARD_CONFIG`: nested, objects, None, 7,000 characters, odd names; also in a run that logs nothing else."""
        if "config" not in self.spec.kinds:
            return
        hub = self.make_hub(tmp_path)
        self.start(hub, HARD_CONFIG)
        self.finish(hub)
        stored = self.read_back(tmp_path).config
        expected = {k: v for k, v in HARD_CONFIG.items() if k not in ("nested", "list", "object", "nothing")}
        expected |= {"nested/a/b": 1, "nested/a/c": "two", "list": "[1, 2, 3]", "object": "an opaque object"}
        for name, value in expected.items():
            assert name in stored, f"the hyperparameter {name[:40]!r} is missing; there are {sorted(stored)}"
            assert self.same(stored[name], value), f"{name!r}: logged {value!r:.80}, stored {stored[name]!r:.80}"
        assert stored.get("nothing", "") in (None, "None"), f"None was stored as {stored.get('nothing')!r}"

    # -- kinds -----------------------------------------------------------------------------------------------------------------

    def test_declared_kinds_are_stored(self, tmp_path: Path) -> None:
        """What ``spec.kinds`` says is found again, equal."""
        hub = self.make_hub(tmp_path / "logs")
        self.start(hub)
        self._log_kinds(hub, tmp_path)
        self.finish(hub)
        stored = self.read_back(tmp_path / "logs")
        for kind in sorted(self.spec.kinds - {"config"}):
            getattr(self, f"_check_{kind}")(stored)

    def test_undeclared_kinds_fall_back(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """A method for what ``spec.kinds`` lacks returns False, which the hub says once and stores the nearest kind."""
        missing = {"images", "figure", "table", "histogram", "text", "artifact", "summary"} - self.spec.kinds
        hub = self.make_hub(tmp_path / "logs")
        self.start(hub)
        for _ in range(2):
            self._log_kinds(hub, tmp_path)
        self.finish(hub)
        said = [r.getMessage() for r in caplog.records if "are stored instead" in r.getMessage()]
        words = {
            kind: kind if kind == "images" else "summaries" if kind == "summary" else f"{kind}s" for kind in missing
        }
        for kind, word in words.items():
            count = sum(f"has no {word}:" in message for message in said)
            assert count == 1, (
                f"{kind!r} isn't declared: expected one message about the nearest kind, got {count}: {said}"
            )

    def _log_kinds(self, hub: TrackerHub, directory: Path) -> None:
        import numpy as np

        source = directory / "weights.bin"
        source.write_bytes(bytes(range(256)))
        hub.log_images({"sample": self._image()}, 4)
        hub.log_table("scores", ["name", "score"], [["a", 0.5], ["b", None]], step=4)
        hub.log_histogram("grads", np.array([-1.0, 0.0, 3.0]), 4)
        hub.log_text("note", "hello\nworld é", 4)
        hub.log_artifact(source, "models/weights.bin", 4)
        hub.log_summary({"best": 0.75})
        figure = _figure()
        if figure is not None:
            hub.log_figure("curve", figure, 4)

    @staticmethod
    def _image() -> Any:
        import numpy as np

        return np.arange(1, 6 * 5 * 3 + 1, dtype=np.uint8).reshape(6, 5, 3)

    def _check_images(self, stored: StoredRun) -> None:
        import numpy as np

        [(step, image)] = stored.images.get("sample", [(None, None)])
        assert image is not None and np.array_equal(image[..., :3], self._image()), "the image differs"
        assert step == 4, f"the image was logged at step 4, stored at {step}"

    def _check_figure(self, stored: StoredRun) -> None:
        assert _figure() is None or stored.figures.get("curve") == [4], f"figures stored: {stored.figures}"

    def _check_table(self, stored: StoredRun) -> None:
        assert stored.tables.get("scores") == (["name", "score"], [["a", 0.5], ["b", None]]), f"stored {stored.tables}"

    def _check_histogram(self, stored: StoredRun) -> None:
        low, high, count = stored.histograms.get("grads", (0.0, 0.0, 0))
        near = [math.isclose(*pair, rel_tol=self.bin_width or self.tolerance) for pair in ((low, -1.0), (high, 3.0))]
        assert count == 3 and all(near), f"stored {stored.histograms}"

    def _check_text(self, stored: StoredRun) -> None:
        assert stored.texts.get("note") == [(4, "hello\nworld é")], f"stored {stored.texts}"

    def _check_artifact(self, stored: StoredRun) -> None:
        assert stored.artifacts.get("models/weights.bin") == bytes(range(256)), f"stored {list(stored.artifacts)}"

    def _check_summary(self, stored: StoredRun) -> None:
        assert self.same(stored.summary.get("best"), 0.75), f"stored {stored.summary}"

    # -- life ------------------------------------------------------------------------------------------------------------------

    def test_a_flush_makes_durable_what_was_logged(self, tmp_path: Path) -> None:
        """After a flush, another reader finds everything though the run is open."""
        hub = self.make_hub(tmp_path)
        self.start(hub)
        try:
            for step in range(20):
                hub.log({"loss": float(step)}, step=step)
            assert hub.flush(), "the flush didn't end, or values weren't taken"
            self.check_series(self.read_back(tmp_path), "loss", [(s, float(s)) for s in range(20)])
        finally:
            hub.finish()

    def test_a_run_is_resumed_by_its_id(self, tmp_path: Path) -> None:
        """A tracker with run ids goes on in the same run."""
        hub = self.make_hub(tmp_path)
        self.start(hub)
        hub.log({"loss": 1.0}, step=1)
        run_ids = hub.run_ids()
        self.finish(hub)
        if not run_ids:
            return
        again = self.make_hub(tmp_path)
        self.start(again, run_ids=run_ids)
        again.log({"loss": 2.0}, step=2)
        assert again.run_ids() == run_ids, "a resumed run has another id"
        self.finish(again)
        self.check_series(self.read_back(tmp_path), "loss", [(1, 1.0), (2, 2.0)])

    def test_only_the_main_process_stores(self, tmp_path: Path) -> None:
        """On another rank nothing is made, unless the spec says ``every_rank`` and the tracker wants to run there."""
        from drivetrain.interfaces.tracker import TrackerContext

        context = TrackerContext(project_name="p", options=self.init_kwargs, process=ProcessInfo(rank=1, world_size=2))
        if self.spec.every_rank and load_target(self.spec.target).runs_here(context):
            return
        hub = self.make_hub(tmp_path, rank=1)
        self.start(hub, {"lr": 0.1})
        hub.log({"loss": 1.0}, step=1)
        hub.get(self.spec.name).log_text("note", "text")
        assert hub.finish() and not list(tmp_path.iterdir())

    def test_making_a_tracker_does_nothing_yet(self, tmp_path: Path) -> None:
        """The constructor starts no thread, writes nothing and sets no variable; finishing twice, or before a start, is fine."""
        from drivetrain.interfaces.tracker import TrackerContext

        environment, threads = dict(os.environ), threading.active_count()
        context = TrackerContext(
            project_name="p", directory=tmp_path / "logs", options=self.init_kwargs, process=ProcessInfo(world_size=2)
        )
        tracker: Tracker = load_target(self.spec.target)(self.spec, context)
        assert not list(tmp_path.iterdir()), f"the constructor wrote {list(tmp_path.iterdir())}"
        assert threading.active_count() == threads, "the constructor started a thread"
        assert dict(os.environ) == environment, "the constructor changed the environment"
        tracker.finish()
        tracker.start()
        tracker.finish()
        tracker.finish()


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(2, 2), dpi=50)
    figure.add_subplot().plot([1, 2, 3])
    return figure
