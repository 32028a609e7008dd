"""A tracker that fails, hangs, or is slow: training goes on, others are unaffected, nothing is lost, order is kept."""

import json
import statistics
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from drivetrain._builtin.jsonl import JSONL_SPEC
from drivetrain.errors import TrackerError
from drivetrain.interfaces import Tracker
from drivetrain.specs import TrackerSpec
from drivetrain.tracking import TrackerHub, TrackingOptions, read_run, read_spool


class Scripted(Tracker):
    """Fails, hangs or dawdles as `script` says: called with each record's kind and values, and how many calls there were."""

    script = staticmethod(lambda kind, values, calls: None)
    on_start = staticmethod(lambda starts: None)

    def __init__(self, spec, context):
        super().__init__(spec, context)
        self.stored = []
        self.calls = 0
        self.starts = 0

    @property
    def run(self):
        return self

    def start(self):
        self.starts += 1
        type(self).on_start(self.starts)

    def log_config(self, values):
        return self._do("config", values)

    def log_scalars(self, values, step):
        self._do("row", values)

    def log_images(self, name, images, step):
        return self._do("images", (name, images))

    def log_histogram(self, name, values, step):
        return self._do("histogram", (name, values))

    def log_artifact(self, path, name, step):
        return self._do("artifact", (name, path.read_bytes()))

    def _do(self, kind, values):
        self.calls += 1
        type(self).script(kind, values, self.calls)
        self.stored.append((kind, values))
        return True


class Batched(Scripted):
    """Takes several rows at once, all or none."""

    rows_per_call = 8

    def log_rows(self, rows):
        self.calls += 1
        for row in rows:
            type(self).script("row", row.values, self.calls)
        self.stored += [("row", row.values) for row in rows]


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Start a hub with a scripted tracker and the JSONL tracker."""
    hubs = []

    def start(script=None, *, on_start=None, batched=False, config=None, **bounds):
        cls = Batched if batched else Scripted
        monkeypatch.setattr(cls, "script", staticmethod(script or (lambda *a: None)), raising=False)
        monkeypatch.setattr(cls, "on_start", staticmethod(on_start or (lambda starts: None)), raising=False)
        spec = TrackerSpec(name="scripted", target=f"{__name__}:{cls.__name__}")
        options = TrackingOptions(**{"interval": 0.005, "retry_after": 0.02, "finish_timeout": 10.0, **bounds})
        hub = TrackerHub.from_plan([spec, JSONL_SPEC], logging_dir=tmp_path / "logs", options=options)
        hubs.append(hub)
        hub.start("demo", config)
        return hub, hub._lanes[0]

    yield start
    for hub in hubs:
        hub.finish(timeout=0.5)


def log(hub, count, start=0):
    for i in range(start, start + count):
        hub.log({"v": i}, step=i)


def values(rows):
    return [v["v"] for kind, v in rows if kind == "row"]


def spooled(lane):
    header, records = read_spool(lane.spool.path)
    assert header["tracker"] == "scripted" and header["project"] == "demo"
    return [r.payload["v"] for r in records if r.kind == "row"]


def warnings(caplog):
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


def other_tracker_has(tmp_path, count):
    return [v for _, v in read_run(tmp_path / "logs" / "demo").series("v")] == list(range(count))


def wait_until(condition, seconds=5.0):
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "it didn't happen in time"
        time.sleep(0.005)


def down(*_):
    raise ConnectionError("network is down")


def test_what_a_failing_tracker_cannot_take_is_in_its_spool_and_others_are_unaffected(play, tmp_path, caplog):
    hub, lane = play(down, config={"lr": 0.1})
    log(hub, 300)
    start = time.monotonic()
    assert hub.finish() is False
    assert time.monotonic() - start < 5
    assert spooled(lane) == list(range(300)) and lane.tracker.stored == []
    assert read_spool(lane.spool.path)[1][0].payload == {"lr": 0.1}
    assert other_tracker_has(tmp_path, 300)
    assert len([w for w in warnings(caplog) if "failed (ConnectionError: network is down)" in w]) == 1
    assert (
        f"301 records for the tracker 'scripted' were not delivered; they are in {lane.spool.path}"
        in warnings(caplog)[-1]
    )
    assert lane.spool.path.is_relative_to(tmp_path / "logs" / "drivetrain-spool")


def test_a_tracker_that_works_again_gets_everything_in_order_once(play, tmp_path, caplog):
    working = threading.Event()
    hub, lane = play(lambda *a: None if working.is_set() else down())
    log(hub, 100)
    wait_until(lambda: lane.spool.pending == 100)
    working.set()
    wait_until(lambda: not lane.spool.pending)
    log(hub, 100, start=100)
    assert hub.finish()
    assert values(lane.tracker.stored) == list(range(200))
    assert not lane.spool.path.exists() and len(warnings(caplog)) == 1


def test_a_record_refused_for_its_own_sake_is_set_aside_and_the_others_arrive(play, caplog):
    def refuse(kind, row, calls):
        if row["v"] in (3, 7, 8):
            raise ValueError(f"bad value {row['v']}")

    hub, lane = play(refuse)
    log(hub, 12)
    assert hub.finish()
    assert values(lane.tracker.stored) == [0, 1, 2, 4, 5, 6, 9, 10, 11]
    lines = [json.loads(line) for line in lane.spool.rejected_path.read_text().splitlines()]
    assert [(d["payload"]["v"], d["error"]) for d in lines] == [(i, f"ValueError: bad value {i}") for i in (3, 7, 8)]
    assert any("refuses a row" in w for w in warnings(caplog))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(failures=st.sets(st.integers(0, 120)), poison=st.sets(st.integers(0, 39), max_size=3), batched=st.booleans())
def test_whatever_fails_each_row_is_stored_once_in_order_or_kept(play, failures, poison, batched):
    def script(kind, row, calls):
        if calls in failures or row["v"] in poison:
            raise OSError("planted")

    hub, lane = play(script, batched=batched, retry_after=0.001, retry_at_most=0.002)
    log(hub, 40)
    hub.finish()
    stored = values(lane.tracker.stored)
    kept = spooled(lane) if lane.spool.pending else []
    rejected = []
    if lane.spool.rejected:
        rejected = [json.loads(x)["payload"]["v"] for x in lane.spool.rejected_path.read_text().splitlines()]
    assert stored == sorted(set(stored)) and kept == sorted(set(kept))
    assert sorted(stored + kept + rejected) == list(range(40))
    assert not kept or not stored or stored[-1] < kept[0]


def test_a_hanging_tracker_is_left_behind_with_everything_on_disk(play, tmp_path, caplog):
    never = threading.Event()
    hub, lane = play(lambda kind, row, calls: never.wait() if row["v"] == 5 else None, hang_timeout=0.1)
    log(hub, 50)
    time.sleep(0.3)
    log(hub, 50, start=50)
    wait_until(
        lambda: lane.spool.pending == 95
    )  # while training goes on: the row in the tracker's hands, and all after it
    start = time.monotonic()
    assert hub.finish(timeout=0.5) is False
    assert time.monotonic() - start < 3
    assert values(lane.tracker.stored) == list(range(5)) and spooled(lane) == list(range(5, 100))
    assert other_tracker_has(tmp_path, 100)
    assert len([w for w in warnings(caplog) if "hangs" in w]) == 1
    never.set()


def test_a_tracker_that_hung_for_a_while_gets_everything_in_order_once(play):
    answer = threading.Event()
    hub, lane = play(lambda kind, row, calls: answer.wait() if row["v"] == 5 else None, hang_timeout=0.1)
    log(hub, 50)
    time.sleep(0.2)
    log(hub, 50, start=50)
    wait_until(lambda: lane.spool.pending == 95)
    answer.set()
    assert hub.finish()
    assert values(lane.tracker.stored) == list(range(100)) and not lane.spool.path.exists()


@pytest.mark.parametrize("batched", [False, True])
def test_a_slow_tracker_neither_stops_training_nor_fills_memory(play, caplog, batched):
    logged = threading.Event()  # slow means here: it takes nothing more until all is logged
    hub, lane = play(lambda *a: logged.wait(), most_pending=20, batched=batched)
    log(hub, 300)
    logged.set()
    assert hub.finish()
    assert values(lane.tracker.stored) == list(range(300)) and not lane.spool.path.exists()
    assert len([w for w in warnings(caplog) if "slower than values come" in w]) == 1


def test_a_flush_of_a_hanging_tracker_ends_and_leaves_everything_on_disk(play):
    never = threading.Event()
    hub, lane = play(lambda kind, row, calls: never.wait() if row["v"] == 2 else None)
    log(hub, 10)
    start = time.monotonic()
    assert hub.flush(timeout=0.3) is False
    assert time.monotonic() - start < 2 and spooled(lane) == list(range(2, 10))
    never.set()
    assert hub.finish() and values(lane.tracker.stored) == list(range(10))


def test_a_run_that_cannot_be_opened_yet_is_one_warning_and_gets_everything_later(play, caplog):
    def on_start(starts):
        if starts < 3:
            raise ConnectionError("no route to host")

    hub, lane = play(on_start=on_start, config={"lr": 0.1})
    log(hub, 10)
    wait_until(lambda: len(lane.tracker.stored) == 11)
    log(hub, 10, start=10)
    assert hub.finish()
    assert lane.tracker.starts == 3 and lane.tracker.stored[0] == ("config", {"lr": 0.1})
    assert values(lane.tracker.stored) == list(range(20))
    assert [w for w in warnings(caplog) if "could not open its run (ConnectionError: no route to host)" in w]


def test_a_start_that_takes_too_long_does_not_hold_training_up(play, caplog):
    opened = threading.Event()
    start = time.monotonic()
    hub, lane = play(on_start=lambda starts: opened.wait(), start_timeout=0.2)
    assert time.monotonic() - start < 2
    log(hub, 10)
    opened.set()
    assert hub.finish() and values(lane.tracker.stored) == list(range(10))
    assert [w for w in warnings(caplog) if "hasn't opened its run after 0.2 s" in w]


@pytest.mark.parametrize(("error", "message"), [(TrackerError("no key"), "no key"), (ImportError("no sdk"), "no sdk")])
def test_what_the_user_must_do_something_about_is_raised(play, error, message):
    def on_start(starts):
        raise error

    threads = threading.active_count()
    with pytest.raises(TrackerError, match=message):
        play(on_start=on_start)
    wait_until(lambda: threading.active_count() == threads)


def test_images_histograms_and_artifacts_survive_an_outage(play, tmp_path):
    working = threading.Event()
    hub, lane = play(lambda *a: None if working.is_set() else down())
    image, source = np.arange(60, dtype=np.uint8).reshape(4, 5, 3), tmp_path / "weights.bin"
    source.write_bytes(b"weights")
    hub.log_images({"im": image}, 1)
    hub.log_histogram("h", torch.tensor([1.0, 2.0]), 1)
    hub.log_artifact(source, step=1)
    hub.log({"v": 0}, step=2)
    wait_until(lambda: lane.spool.pending == 4)
    source.unlink()
    working.set()
    assert hub.finish()
    stored = dict(lane.tracker.stored)
    assert np.array_equal(stored["images"][1][0], image) and stored["histogram"][1].tolist() == [1.0, 2.0]
    assert stored["artifact"] == ("weights.bin", b"weights") and stored["row"] == {"v": 0}
    assert not list(lane.spool.path.parent.iterdir())


def test_rows_that_a_full_disk_refuses_are_announced(play, tmp_path, caplog):
    hub, lane = play(down)
    lane.spool.path.parent.parent.mkdir(parents=True)
    lane.spool.path.parent.write_text("a file where the directory should be")
    log(hub, 3)
    hub.finish()
    assert [w for w in warnings(caplog) if "are lost" in w]


def test_a_spool_that_vanished_does_not_stop_the_tracker(play, caplog):
    working = threading.Event()
    hub, lane = play(lambda *a: None if working.is_set() else down())
    log(hub, 3)
    wait_until(lambda: lane.spool.pending == 3)
    lane.spool.path.unlink()
    working.set()
    wait_until(lambda: not lane.spool.pending)
    log(hub, 3, start=3)
    assert hub.finish() and values(lane.tracker.stored) == [3, 4, 5]
    assert [w for w in warnings(caplog) if "can't be read" in w]


def _nothing(*_):
    pass


@pytest.mark.parametrize("script", [_nothing, down, lambda *a: time.sleep(0.01), lambda *a: time.sleep(20)])
def test_log_costs_the_training_thread_little_whatever_the_tracker_does(play, script):
    hub, _ = play(script, hang_timeout=0.1)
    rows = [
        {f"metric/{i}": i * 0.5 for i in range(10)},
        {f"metric/{i}": torch.tensor(i * 0.5) for i in range(10)},
        {f"metric/{i}": np.float32(i) for i in range(10)},
    ]
    for row in rows:
        times = []
        for step in range(400):
            start = time.perf_counter()
            hub.log(row, step=step)
            times.append(time.perf_counter() - start)
            if step % 20 == 0:
                time.sleep(0.002)
        assert statistics.median(times) < 20e-6
    hub.finish(timeout=0.2)


def test_the_spool_can_be_somewhere_else(play, tmp_path):
    hub, lane = play(down, spool_directory=str(tmp_path / "elsewhere"))
    log(hub, 1)
    hub.finish()
    assert lane.spool.path.is_relative_to(tmp_path / "elsewhere" / "demo") and Path(lane.spool.path).exists()
