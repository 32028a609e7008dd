"""Each promise of TrackerConformance is shown to be checked: a tracker that breaks it fails the test of that promise."""

import dataclasses
import os
import threading
from pathlib import Path

import pytest

from drivetrain._builtin.jsonl import JSONL_SPEC, JsonlTracker
from drivetrain.interfaces.tracker import Row
from drivetrain.testing.tracker import StoredRun, TrackerConformance
from drivetrain.tracking import read_run


class Faulty(JsonlTracker):
    """A tracker whose rows each pass through `change`, which may drop, repeat or alter them."""

    def change(self, row):
        return [row]

    def log_rows(self, rows):
        super().log_rows([new for row in rows for new in self.change(row)])


class StoresTwice(Faulty):
    def change(self, row):
        return [row, row]


class LosesEveryTenth(Faulty):
    def change(self, row):
        return [row] if row.step is None or row.step % 10 else []


class ShiftsSteps(Faulty):
    def change(self, row):
        return [Row(row.values, None if row.step is None else row.step + 1, row.time)]


class MakesNanZero(Faulty):
    def change(self, row):
        return [Row({k: 0.0 if v != v else v for k, v in row.values.items()}, row.step, row.time)]


class ClampsInfinity(Faulty):
    def change(self, row):
        clamped = {k: 1.7e308 if v == float("inf") else v for k, v in row.values.items()}
        return [Row(clamped, row.step, row.time)]


class DropsTexts(Faulty):
    def change(self, row):
        return [Row({k: v for k, v in row.values.items() if not isinstance(v, str)}, row.step, row.time)]


class RefusesTexts(Faulty):
    def change(self, row):
        return [Row({k: float(v) for k, v in row.values.items()}, row.step, row.time)]


class LosesPrecision(Faulty):
    def change(self, row):
        return [Row({k: round(v, 1) for k, v in row.values.items()}, row.step, row.time)]


class KeepsStepsMonotone(Faulty):
    last = -1

    def change(self, row):
        if row.step is not None and row.step < self.last:
            return []
        self.last = self.last if row.step is None else row.step
        return [row]


class NeedsAStep(Faulty):
    def change(self, row):
        return [] if row.step is None else [row]


class SanitizesNames(Faulty):
    def change(self, row):
        return [Row({k.replace("/", "_").strip("."): v for k, v in row.values.items()}, row.step, row.time)]


class UsesNamesAsPaths(JsonlTracker):
    def log_text(self, name, text, step):
        path = Path(self._directory, "texts", name.replace("\0", ""))
        # stays inside the test's own directory, whatever the name
        if path.is_absolute() and str(path).startswith(str(self.context.directory.parents[2])) and len(name) < 200:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_dir():
                path.write_text(text)
        return True


class TakesThousandValues(Faulty):
    def change(self, row):
        return [Row(dict(list(row.values.items())[:1000]), row.step, row.time)]


class LosesConfig(JsonlTracker):
    def log_config(self, values):
        return True


class TruncatesConfig(JsonlTracker):
    def log_config(self, values):
        return super().log_config({k: v[:500] if isinstance(v, str) else v for k, v in values.items()})


class WritesConfigWithTheFirstRow(JsonlTracker):
    waiting = None

    def log_config(self, values):
        self.waiting = values
        return True

    def log_rows(self, rows):
        if self.waiting:
            super().log_config(self.waiting)
        super().log_rows(rows)


class FlipsImages(JsonlTracker):
    def log_images(self, name, images, step):
        return super().log_images(name, [image[::-1] for image in images], step)


class StoresNoTable(JsonlTracker):
    def log_table(self, name, columns, rows, step):
        return True


class CountsFiniteBinsOnly(JsonlTracker):
    def log_histogram(self, name, values, step):
        return super().log_histogram(name, values[:-1], step)


class LosesFigures(JsonlTracker):
    def log_figure(self, name, figure, step):
        return True


class MangleTexts(JsonlTracker):
    def log_text(self, name, text, step):
        return super().log_text(name, text.replace("\n", " "), step)


class CopiesEmptyArtifacts(JsonlTracker):
    def log_artifact(self, path, name, step):
        empty = self._directory / "empty"
        empty.touch()
        return super().log_artifact(empty, name, step)


class LosesSummary(JsonlTracker):
    def log_summary(self, values):
        return True


class ClaimsToStoreTables(JsonlTracker):
    """Its spec says that it has no tables, but it takes them."""


class Buffers(JsonlTracker):
    """Writes rows only when it is closed."""

    rows_per_call = 1

    def start(self):
        super().start()
        self.buffer = []

    def log_rows(self, rows):
        self.buffer += rows

    def finish(self):
        if self._rows is not None:
            super().log_rows(self.buffer)
        super().finish()


class FailsToFlush(JsonlTracker):
    def log_rows(self, rows):
        raise ConnectionError("the network is down")


class StartsAnew(JsonlTracker):
    def start(self):
        if self._directory.exists():
            (self._directory / "metrics.jsonl").unlink()
        super().start()


class ChangesItsId(JsonlTracker):
    run_id = property(lambda self: f"{self._directory.name}-{self.context.run_id is not None}")


class RunsOnEveryRank(JsonlTracker):
    """Stands for a hub that asks nobody: it is started on rank 1 as if that were the main process."""


class WritesWhenMade(JsonlTracker):
    def __init__(self, spec, context):
        super().__init__(spec, context)
        self._directory.mkdir(parents=True)


class StartsAThreadWhenMade(JsonlTracker):
    def __init__(self, spec, context):
        super().__init__(spec, context)
        threading.Thread(target=threading.Event().wait, args=(2,), daemon=True).start()


class SetsAVariable(JsonlTracker):
    def __init__(self, spec, context):
        super().__init__(spec, context)
        os.environ["DRIVETRAIN_TEST_FAULT"] = "1"


class FinishesOnlyOnce(JsonlTracker):
    def finish(self):
        assert self._rows is not None, "not open"
        super().finish()


FAULTS = {
    "rows_are_stored_once_in_order_with_their_steps": [StoresTwice, LosesEveryTenth, ShiftsSteps, LosesPrecision],
    "hard_values_are_kept": [MakesNanZero, ClampsInfinity, DropsTexts, RefusesTexts],
    "tensors_and_array_scalars_are_numbers": [LosesPrecision],
    "steps_may_go_back_be_missing_or_be_large": [KeepsStepsMonotone, NeedsAStep],
    "hard_names_are_kept": [SanitizesNames],
    "nothing_is_written_outside_the_directory": [UsesNamesAsPaths],
    "many_metrics_at_once": [TakesThousandValues],
    "config_is_stored_flat_and_whole": [LosesConfig, TruncatesConfig, WritesConfigWithTheFirstRow],
    "declared_kinds_are_stored": [
        FlipsImages,
        StoresNoTable,
        CountsFiniteBinsOnly,
        LosesFigures,
        MangleTexts,
        CopiesEmptyArtifacts,
        LosesSummary,
    ],
    "undeclared_kinds_fall_back": [ClaimsToStoreTables],
    "a_flush_makes_durable_what_was_logged": [Buffers, FailsToFlush],
    "a_run_is_resumed_by_its_id": [StartsAnew, ChangesItsId],
    "only_the_main_process_stores": [RunsOnEveryRank],
    "making_a_tracker_does_nothing_yet": [WritesWhenMade, StartsAThreadWhenMade, SetsAVariable, FinishesOnlyOnce],
}

SPEC_CHANGES = {ClaimsToStoreTables: {"kinds": JSONL_SPEC.kinds - {"table"}}}


def kit_for(tracker):
    class Kit(TrackerConformance):
        timeout = 10.0
        spec = dataclasses.replace(JSONL_SPEC, target=f"{__name__}:{tracker.__name__}", **SPEC_CHANGES.get(tracker, {}))

        def read_back(self, directory):
            run = read_run(directory)
            return StoredRun(
                scalars={name: run.series(name) for name in run.names},
                config=run.config,
                images={m.name: [(m.step, _decode_png(f)) for f in m.files] for m in run.find("images")},
                figures={m.name: [m.step] for m in run.find("figure")},
                texts={m.name: [(m.step, m.data)] for m in run.find("text")},
                tables={m.name: (m.data["columns"], m.data["rows"]) for m in run.find("table")},
                histograms={m.name: (m.data["min"], m.data["max"], m.data["count"]) for m in run.find("histogram")},
                artifacts={m.name: m.files[0].read_bytes() for m in run.find("artifact")},
                summary=run.summary,
            )

        def make_hub(self, directory, *, rank=0):
            return super().make_hub(directory, rank=0 if tracker is RunsOnEveryRank else rank)

    Kit.__test__ = False
    return Kit()


def _decode_png(path):
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(path))


def run(kit, promise, tmp_path, monkeypatch, caplog):
    test = getattr(kit, f"test_{promise}")
    wanted = test.__code__.co_varnames[: test.__code__.co_argcount]
    fixtures = {"tmp_path": tmp_path, "monkeypatch": monkeypatch, "caplog": caplog}
    test(**{name: fixtures[name] for name in wanted if name != "self"})


def test_every_promise_has_a_planted_fault():
    promises = {name.removeprefix("test_") for name in dir(TrackerConformance) if name.startswith("test_")}
    assert promises == set(FAULTS)


@pytest.mark.parametrize(
    ("promise", "tracker"),
    [pytest.param(p, t, id=f"{t.__name__}-{p}") for p, trackers in FAULTS.items() for t in trackers],
)
def test_a_planted_fault_is_found(promise, tracker, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("DRIVETRAIN_TEST_FAULT", "")  # restored afterwards
    with pytest.raises(AssertionError):
        run(kit_for(tracker), promise, tmp_path, monkeypatch, caplog)


@pytest.mark.parametrize("promise", list(FAULTS))
def test_the_tracker_without_a_fault_passes(promise, tmp_path, monkeypatch, caplog):
    run(kit_for(Faulty), promise, tmp_path, monkeypatch, caplog)
