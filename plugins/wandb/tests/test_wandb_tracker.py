import importlib.util
import logging
import pathlib
import subprocess
import sys

import pytest
import torch.distributed as dist

from drivetrain.errors import ConfigurationError, TrackerError
from drivetrain.specs import ProcessInfo
from drivetrain.tracking import TrackerHub, TrackingOptions, read_spool
from drivetrain.tracking.sync import find_spools
from drivetrain_wandb.plugin import SPEC
from drivetrain_wandb.tracker import STEP

_spec = importlib.util.spec_from_file_location("wandb_reader", pathlib.Path(__file__).with_name("wandb_reader.py"))
wandb_reader = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(wandb_reader)

SETTINGS = {"console": "off", "x_disable_stats": True, "silent": True, "x_save_requirements": False}
OFFLINE = {"mode": "offline", "settings": SETTINGS}


def make_hub(directory, **options):
    return TrackerHub.from_plan([SPEC], logging_dir=directory, options=TrackingOptions(**{"interval": 0.0, **options}))


def runs(directory):
    return [wandb_reader.read(path) for path in sorted(directory.glob("wandb/offline-run-*/run-*.wandb"))]


@pytest.fixture(autouse=True)
def _silent(monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")


def test_the_entry_module_imports_neither_torch_nor_the_sdk():
    code = "import sys, drivetrain_wandb.plugin; print({'torch', 'wandb'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def test_what_a_run_is_called_and_belongs_to(tmp_path):
    hub = make_hub(tmp_path)
    named = {"run_name": "first", "group": "g", "tags": ["a", "b"], "notes": "why", "entity": "me", "job_type": "train"}
    hub.start("p/q", None, {"wandb": {**OFFLINE, **named}})
    run = hub.get("wandb", unwrap=True)
    assert (run.name, run.group, run.tags, run.notes, run.project) == ("first", "g", ("a", "b"), "why", "p_x2F_q")
    assert hub.run_ids() == {"wandb": run.id}
    hub.log({"x": 1.0}, 1, {"wandb": {"commit": False}})
    hub.log({"y": 2.0}, 1)
    hub.finish()
    [stored] = runs(tmp_path)
    assert (stored["run"].entity, stored["run"].job_type, stored["exit"]) == ("me", "train", 0)
    assert [{k: v for k, v in row.items() if not k.startswith("_")} for row in stored["history"]] == [
        {"x": 1.0, "y": 2.0, STEP: 1}
    ]


def test_a_failed_run_says_so(tmp_path):
    hub = make_hub(tmp_path)
    hub.start("p", None, {"wandb": OFFLINE})
    hub._status = "failed"
    hub.finish()
    assert runs(tmp_path)[0]["exit"] == 1


def test_unknown_options_are_refused_with_the_nearest(tmp_path):
    hub = make_hub(tmp_path)
    for wrong, message in (
        ({"job_typ": "x"}, "'job_type'"),
        ({"project": "x"}, "can't set 'project'"),
        ({"mode": "of"}, "mode"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            hub.start("p", None, {"wandb": {**OFFLINE, **wrong}})


def test_online_without_a_key_is_an_error_that_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    with pytest.raises(TrackerError, match="mode='offline'"):
        make_hub(tmp_path).start("p", None, {"wandb": {**OFFLINE, "mode": "online"}})


def test_online_without_a_network_keeps_values_within_its_bound(tmp_path, monkeypatch, caplog):
    """A server that refuses connections, so that nothing leaves this machine."""
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    hub = make_hub(tmp_path, finish_timeout=2.0, retry_after=60.0)
    settings = {**SETTINGS, "x_graphql_retry_max": 0}
    with caplog.at_level(logging.WARNING, "drivetrain.tracking"):
        hub.start("p", None, {"wandb": {"mode": "online", "init_timeout": 2.0, "settings": settings}})
        hub.log({"x": 1.0}, step=1)
        assert not hub.finish()
    [spool] = find_spools(tmp_path)
    assert [r.payload for r in read_spool(spool)[1]] == [{"x": 1.0}]
    assert "aaaaaaaa" not in caplog.text and len([r for r in caplog.records if "kept in" in r.getMessage()]) >= 1


def _shared(directory):
    """The mode "shared", on both ranks; offline it can't write, so the run is looked at before."""
    from drivetrain.interfaces import TrackerContext
    from drivetrain_wandb.tracker import WandbTracker

    rank = dist.get_rank()
    process = ProcessInfo(rank=rank, world_size=2)
    started = []

    class Looking(WandbTracker):
        def start(self):
            import wandb

            started.append((self.run_id, self._settings(wandb, {}).x_label, self._settings(wandb, {}).x_primary))

        def flush(self):
            pass

    import drivetrain_wandb.tracker as module

    original, module.WandbTracker = module.WandbTracker, Looking
    try:
        hub = TrackerHub.from_plan([SPEC], process=process, logging_dir=directory)
        hub.start("p", None, {"wandb": {"mode": "shared"}})
        hub.finish()
    finally:
        module.WandbTracker = original
    alone = WandbTracker.runs_here(TrackerContext(project_name="p", options={"mode": "offline"}, process=process))
    return started[0], alone


def test_in_the_mode_shared_every_rank_joins_the_main_one_s_run(ranks, tmp_path):
    ((first, label, primary), alone), ((second, other_label, other_primary), _) = ranks.run(_shared, str(tmp_path))
    assert first == second and (label, other_label) == ("rank-0", "rank-1")
    assert (primary, other_primary, alone) == (True, False, False)
