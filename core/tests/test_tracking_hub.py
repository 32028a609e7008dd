import logging
import math
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
import torch

from drivetrain._builtin.jsonl import JSONL_SPEC
from drivetrain.errors import ConfigurationError, TrackerError
from drivetrain.interfaces import Tracker
from drivetrain.specs import ProcessInfo, TrackerSpec
from drivetrain.tracking import GeneralTracker, TrackerHub, TrackingOptions, read_run
from drivetrain.tracking.handle import InertTracker


class Memory(Tracker):
    """Keeps everything that it is given, with the thread that gave it."""

    log_options = frozenset({"commit"})

    def start(self):
        self.calls = []

    @property
    def run(self):
        return self.calls

    def log_config(self, values):
        self.calls.append(("config", dict(values)))
        return True

    def log_scalars(self, values, step):
        self.calls.append(("row", dict(values), step, self.time, dict(self.call_options), threading.current_thread()))

    def finish(self):
        self.calls.append(("finish", self.status))


class EveryRank(Memory):
    @classmethod
    def runs_here(cls, context):
        return context.process.rank != 2


MEMORY = TrackerSpec(name="memory", target=f"{__name__}:Memory")
EVERY_RANK = TrackerSpec(name="every", target=f"{__name__}:EveryRank", every_rank=True)
QUICK = TrackingOptions(interval=0.005)


def make(*entries, **kwargs):
    return TrackerHub.from_plan(entries or [MEMORY], options=QUICK, **kwargs)


def rows(calls):
    return [(call[1], call[2]) for call in calls if call[0] == "row"]


def test_values_are_snapshotted_at_the_call_and_stored_in_order_from_another_thread():
    hub = make()
    hub.start("p", {"a": {"b": 1}})
    running, mutable = torch.zeros(()), {"x": 1}
    before = time.time()
    for step in range(100):
        running += 1
        mutable["x"] = step
        hub.log({"loss": running, "nested": mutable}, step=step)
        running.mul_(1.0)
    running.zero_()
    calls = hub.get("memory", unwrap=True)
    assert hub.finish()
    assert calls[0] == ("config", {"a/b": 1}) and calls[-1] == ("finish", "finished")
    assert rows(calls) == [({"loss": s + 1.0, "nested/x": s}, s) for s in range(100)]
    assert all(before <= call[3] <= time.time() for call in calls[1:-1])
    assert {call[5] for call in calls[1:-1]} != {threading.current_thread()}


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_tensors_of_one_element_become_numbers_of_their_kind(dtype, shape):
    hub = make()
    hub.start("p")
    hub.log({"v": torch.ones(shape, dtype=dtype)})
    calls = hub.get("memory", unwrap=True)
    hub.finish()
    [(values, step)] = rows(calls)
    assert values["v"] == 1 and step is None
    assert type(values["v"]) is (bool if dtype is torch.bool else float if dtype.is_floating_point else int)


def test_numpy_scalars_and_special_floats_become_python_numbers():
    hub = make()
    hub.start("p")
    given = {"f": np.float32(0.5), "d": np.float64(0.1), "i": np.int32(3), "b": np.bool_(True), "a": np.array([[2.0]])}
    hub.log({**given, "nan": np.float32("nan"), "inf": -math.inf}, step=np.int64(4))
    calls = hub.get("memory", unwrap=True)
    hub.finish()
    [(values, step)] = rows(calls)
    assert step == 4 and type(step) is int
    assert math.isnan(values.pop("nan")) and values.pop("inf") == -math.inf
    assert values == {"f": 0.5, "d": 0.1, "i": 3, "b": True, "a": 2.0}
    assert [type(v) for v in values.values()] == [float, float, int, bool, float]


def test_what_is_no_number_becomes_text_with_one_note_per_name(caplog):
    hub = make()
    hub.start("p")
    for _ in range(3):
        hub.log({"many": torch.arange(3), "object": object, "none": None, "complex": 1 + 2j})
    calls = hub.get("memory", unwrap=True)
    hub.finish()
    assert rows(calls)[0][0] == {"many": "[0, 1, 2]", "object": "<class 'object'>", "none": "None", "complex": "(1+2j)"}
    notes = [r.getMessage() for r in caplog.records if "kept as the text" in r.getMessage()]
    assert len(notes) == 4


class Device:
    """Plays an accelerator: what `read_later` returns is known only when `finish_computing` is called."""

    def __init__(self):
        self.futures = []
        self.batches = []

    def read_later(self, tensors):
        self.batches.append(len(tensors))
        future = Future()
        self.futures.append(future)
        return future


def test_tensors_on_an_accelerator_are_read_later_in_one_batch_without_waiting():
    device = Device()
    hub = make(read_later=device.read_later)
    hub.start("p")
    meta = {"loss": torch.empty((), device="meta"), "n": torch.empty(1, dtype=torch.int64, device="meta")}
    hub.log({"first": 0.5, **meta, "last": 1}, step=1)
    hub.log({"after": 2.0}, step=2)
    calls = hub.get("memory", unwrap=True)
    time.sleep(0.05)
    assert device.batches == [2] and rows(calls) == []  # nothing overtakes a row whose values are still being computed
    device.futures[0].set_result([0.25, 7.0])
    assert hub.finish()
    assert rows(calls) == [({"first": 0.5, "loss": 0.25, "n": 7, "last": 1}, 1), ({"after": 2.0}, 2)]
    assert type(rows(calls)[0][0]["n"]) is int and list(rows(calls)[0][0]) == ["first", "loss", "n", "last"]


def test_a_failed_device_read_leaves_the_other_values_and_says_why():
    device = Device()
    hub = make(read_later=device.read_later)
    hub.start("p")
    hub.log({"ok": 1.0, "bad": torch.empty((), device="meta")})
    device.futures[0].set_exception(RuntimeError("device lost"))
    calls = hub.get("memory", unwrap=True)
    assert hub.finish()
    assert rows(calls)[0][0] == {"ok": 1.0, "bad": "<unreadable: RuntimeError: device lost>"}


def test_two_trackers_share_a_pending_row():
    device = Device()
    second = TrackerSpec(name="second", target=f"{__name__}:Memory")
    hub = make(MEMORY, second, read_later=device.read_later)
    hub.start("p")
    hub.log({"loss": torch.empty((), device="meta")})
    both = [hub.get(n, unwrap=True) for n in ("memory", "second")]
    device.futures[0].set_result([3.0])
    hub.finish()
    assert [rows(calls) for calls in both] == [[({"loss": 3.0}, None)]] * 2 and device.batches == [1]


def test_a_sharded_tensor_is_refused_since_reading_it_would_hang(ranks):
    def check():
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

        from drivetrain.errors import TrackerError
        from drivetrain.tracking.values import Snapshot

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        replicated = distribute_tensor(torch.tensor(2.0), mesh, [Replicate()])
        assert Snapshot().scalars({"x": replicated})[0] == {"x": 2.0}
        partial = DTensor.from_local(torch.tensor(1.0), mesh, [Partial()])
        try:
            Snapshot().scalars({"x": partial})
        except TrackerError as error:
            return "full_tensor" in str(error)
        return False

    assert ranks.run(check) == [True, True]


def test_other_ranks_do_nothing_and_get_an_inert_tracker(tmp_path):
    hub = make(JSONL_SPEC, logging_dir=tmp_path, process=ProcessInfo(rank=1, world_size=2))
    threads = threading.active_count()
    hub.start("p", {"lr": 1})
    hub.log({"x": object()}, step="nonsense")
    hub.log_images({"x": 1})
    tracker = hub.get("jsonl")
    assert isinstance(tracker, InertTracker) and isinstance(hub.get("jsonl", unwrap=True), InertTracker)
    tracker.log({"x": 1}, step=1)
    tracker.run.summary["x"] = 1
    assert hub.trackers == [] and hub.run_ids() == {} and hub.flush() and hub.finish()
    assert threading.active_count() == threads and not list(tmp_path.iterdir())
    with pytest.raises(TrackerError, match="Did you mean 'jsonl'"):
        hub.get("json")


@pytest.mark.parametrize(("rank", "runs"), [(0, True), (1, True), (2, False)])
def test_a_tracker_may_ask_to_run_on_every_rank(rank, runs):
    hub = make(EVERY_RANK, process=ProcessInfo(rank=rank, world_size=3))
    hub.start("p")
    hub.log({"rank": rank})
    if runs:
        calls = hub.get("every", unwrap=True)
        hub.finish()
        assert rows(calls) == [({"rank": rank}, None)]
    else:
        assert isinstance(hub.get("every"), InertTracker)


def test_log_kwargs_reach_their_tracker_and_unknown_ones_are_refused(caplog):
    second = TrackerSpec(name="second", target=f"{__name__}:Memory")
    hub = make(MEMORY, second)
    hub.start("p", init_kwargs={"wandb": {"entity": "me"}})
    hub.log({"x": 1}, 1, {"memory": {"commit": False}, "wandb": {"sync": True}})
    with pytest.raises(ConfigurationError, match="'memory' has no log keyword 'comit'"):
        hub.log({"x": 2}, 2, {"memory": {"comit": False}})
    hub.get("second").log({"x": 3}, step=3, commit=True)
    calls, others = hub.get("memory", unwrap=True), hub.get("second", unwrap=True)
    hub.finish()
    assert [(c[1], c[4]) for c in calls if c[0] == "row"] == [({"x": 1}, {"commit": False})]
    assert [(c[1], c[4]) for c in others if c[0] == "row"] == [({"x": 1}, {}), ({"x": 3}, {"commit": True})]
    warned = [r.getMessage() for r in caplog.records]
    assert sum("init_kwargs for 'wandb' are not used" in w for w in warned) == 1
    assert sum("log_kwargs for 'wandb' are not used" in w for w in warned) == 1


def test_mistakes_of_the_user_are_errors_at_once(tmp_path):
    with pytest.raises(ConfigurationError, match="given twice"):
        make(MEMORY, MEMORY)
    with pytest.raises(ConfigurationError, match="needs a directory"):
        make(JSONL_SPEC)
    with pytest.raises(ConfigurationError, match="Give an instance"):
        make(Custom)
    with pytest.raises(ConfigurationError, match="not 'memory'"):
        make("memory")
    with pytest.raises(TrackerError, match="can't be imported"):
        make(TrackerSpec(name="lost", target="no.such.module:Tracker")).start("p")
    with pytest.raises(ConfigurationError, match="run_nam"):
        make(JSONL_SPEC, logging_dir=tmp_path).start("p", init_kwargs={"jsonl": {"run_nam": "x"}})
    hub = make()
    with pytest.raises(TrackerError, match="init_trackers"):
        hub.get("memory")
    hub.start("p")
    with pytest.raises(TrackerError, match="takes a mapping"):
        hub.log([1, 2])
    with pytest.raises(TrackerError, match="whole number"):
        hub.log({"x": 1}, step="one")
    with pytest.raises(TrackerError, match="There is no file"):
        hub.log_artifact(tmp_path / "missing")
    with pytest.raises(TrackerError, match="log_artifacts"):
        hub.log_artifact(tmp_path)
    hub.finish()


def test_logging_without_an_open_run_warns_once(caplog):
    hub = make()
    for _ in range(3):
        hub.log({"x": 1})
        hub.log_text("a", "b")
    hub.start("p")
    hub.finish()
    hub.log({"x": 1})
    assert [r.getMessage() for r in caplog.records] == [
        "log() was called before init_trackers(): its values are not stored."
    ]
    caplog.clear()
    nothing = make()
    nothing._entries.clear()
    TrackerHub.from_plan([]).log({"x": 1})
    assert not caplog.records


def test_a_hub_can_be_started_again_for_a_second_run(tmp_path):
    hub = make(JSONL_SPEC, logging_dir=tmp_path)
    directories = []
    for run in range(2):
        hub.start("sweep", {"run": run})
        hub.log({"x": run}, step=0)
        directories.append(hub.get("jsonl", unwrap=True))
    hub.start("sweep")  # an open run is finished first
    hub.finish()
    runs = [read_run(d) for d in directories]
    assert [(r.config, r.series("x"), r.status) for r in runs] == [({"run": i}, [(0, i)], "finished") for i in range(2)]


class Custom(GeneralTracker):
    name = "custom"
    requires_logging_directory = False

    def __init__(self, *, fail=False):
        super().__init__()
        self.events = []
        self.fail = fail

    @property
    def tracker(self):
        return self.events

    def start(self):
        self.events.append("start")

    def store_init_configuration(self, values):
        self.events.append(("config", values))

    def log(self, values, step=None, **kwargs):
        if self.fail:
            raise ValueError("planted")
        self.events.append(("log", values, step, kwargs))

    def log_images(self, values, step=None):
        self.events.append(("images", {k: [i.shape for i in v] for k, v in values.items()}, step))

    def finish(self):
        self.events.append("finish")


def test_a_general_tracker_works_as_an_instance(tmp_path):
    custom = Custom()
    hub = make(custom, JSONL_SPEC, logging_dir=tmp_path)
    hub.start("p", {"opt": {"lr": 0.1}, "layers": [1, 2]})
    hub.log({"loss": torch.tensor(0.5)}, 1, {"custom": {"extra": 1}})
    hub.log_images({"im": np.zeros((4, 5))}, 2)
    hub.log_histogram("h", [1.0, 3.0], 3)
    assert hub.get("custom") is custom and hub.get("custom", unwrap=True) is custom.events
    assert [t.name for t in hub.trackers] == ["custom", "jsonl"]
    hub.finish()
    assert custom.events == [
        "start",
        ("config", {"opt/lr": 0.1, "layers": "[1, 2]"}),
        ("log", {"loss": 0.5}, 1, {"extra": 1}),
        ("images", {"im": [(4, 5, 3)]}, 2),
        ("log", {"h/min": 1.0, "h/max": 3.0, "h/mean": 2.0, "h/std": 1.0, "h/count": 2, "h/nonfinite": 0}, 3, {}),
        "finish",
    ]


def test_a_general_tracker_without_its_attributes_is_refused():
    class Nameless(GeneralTracker):
        requires_logging_directory = False

    with pytest.raises(ConfigurationError, match="Nameless lacks 'name', 'tracker'"):
        Nameless()


def test_values_logged_from_several_threads_all_arrive(caplog):
    hub = make()
    hub.start("p")
    threads = [threading.Thread(target=lambda k=k: [hub.log({"v": i}, step=k) for i in range(200)]) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    calls = hub.get("memory", unwrap=True)
    assert hub.finish()
    for k in range(4):
        assert [v["v"] for v, step in rows(calls) if step == k] == list(range(200))
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]
