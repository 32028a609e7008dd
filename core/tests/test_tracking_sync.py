import json

import numpy as np
import pytest
from click.testing import CliRunner

from drivetrain._builtin.jsonl import JSONL_SPEC
from drivetrain._plugins import get_registry
from drivetrain.cli import main
from drivetrain.errors import TrackerError
from drivetrain.tracking import TrackerHub, TrackingOptions, read_run, read_spool
from drivetrain.tracking.sync import find_spools, sync_spool


def blocked_hub(directory, **options):
    """A hub whose tracker can't open its run, since a file is in its place, until that is removed."""
    (directory / "p").write_text("in the way")
    bounds = TrackingOptions(interval=0.0, finish_timeout=5.0, spool_directory=str(directory / "spool"), **options)
    return TrackerHub.from_plan([JSONL_SPEC], logging_dir=directory, options=bounds)


def log_everything(hub, directory):
    source = directory / "weights.bin"
    source.write_bytes(b"weights")
    for step in range(50):
        hub.log({"loss": step / 3, "nan": float("nan")}, step=step)
    hub.log_images({"sample": np.full((2, 2, 3), 7, np.uint8)}, 50)
    hub.log_histogram("h", [1.0, 2.0], 50)
    hub.log_table("t", ["a"], [[1], [None]], step=50)
    hub.log_artifact(source, step=50)


def run_command(*arguments):
    return CliRunner().invoke(main, ["tracking", "sync", *map(str, arguments)])


def test_what_was_kept_is_delivered_later_once_with_its_times(tmp_path):
    hub = blocked_hub(tmp_path)
    init_kwargs = {"jsonl": {"run_name": "mine"}}
    hub.start("p", {"lr": 0.1, "api_key": "abcdefgh"}, init_kwargs)
    log_everything(hub, tmp_path)
    assert not hub.finish()
    [spool] = find_spools(tmp_path)
    header, records = read_spool(spool)
    assert header["options"] == {"run_name": "mine"} and header["status"] == "finished" and len(records) == 55
    assert "abcdefgh" not in spool.read_text()

    listed = run_command(tmp_path, "--dry-run", "--json")
    assert listed.exit_code == 0 and json.loads(listed.output)["spools"][0]["waiting"] == 55
    still = run_command(tmp_path)
    assert still.exit_code == 1 and "55 remaining" in still.output

    (tmp_path / "p").unlink()
    done = run_command(tmp_path)
    assert done.exit_code == 0 and "55 delivered" in done.output
    run = read_run(tmp_path / "p" / "mine")
    assert run.series("loss") == [(s, s / 3) for s in range(50)]
    assert run.config == {"lr": 0.1, "api_key": "(left out)"} and run.status == "finished"
    assert [row.time for row in run.rows] == [r.time for r in records if r.kind == "row"]
    assert run.find("artifact")[0].files[0].read_bytes() == b"weights" and len(run.find("images", "sample")) == 1
    assert not list(find_spools(tmp_path)) and "Nothing is waiting" in run_command(tmp_path).output


def test_values_go_to_the_run_that_was_open(tmp_path):
    """A tracker that works, then doesn't: what remains belongs to the run that it had opened."""
    hub = TrackerHub.from_plan([JSONL_SPEC], logging_dir=tmp_path, options=TrackingOptions(interval=0.0))
    hub.start("p")
    hub.log({"loss": 1.0}, step=1)
    assert hub.flush()
    lane = hub._lanes[0]
    rows = lane.tracker._rows
    lane.tracker._rows = None  # from here on it fails
    hub.log({"loss": 2.0}, step=2)
    hub.flush()
    run_id = hub.run_ids()["jsonl"]
    [spool] = find_spools(tmp_path)
    with pytest.raises(TrackerError, match="still writes to"):
        sync_spool(spool, get_registry())
    assert run_command(tmp_path).exit_code == 1
    assert not hub.finish()
    rows.close()
    result = sync_spool(spool, get_registry())
    assert (result.run_id, result.delivered, result.remaining) == (run_id, 1, 0)
    assert read_run(tmp_path).series("loss") == [(1, 1.0), (2, 2.0)]


def test_what_was_delivered_already_is_not_delivered_again(tmp_path):
    hub = blocked_hub(tmp_path)
    hub.start("p")
    for step in range(4):
        hub.log({"x": step}, step=step)
    hub.finish()
    [path] = find_spools(tmp_path)
    second = path.read_bytes().splitlines(keepends=True)
    path.with_name(path.name + ".done").write_text(str(len(second[0]) + len(second[1])))
    (tmp_path / "p").unlink()
    assert sync_spool(path, get_registry()).delivered == 3
    assert read_run(tmp_path).series("x") == [(1, 1), (2, 2), (3, 3)]


def test_a_spool_of_a_script_s_own_tracker_and_other_files_are_refused(tmp_path):
    other = tmp_path / "a-rank0.jsonl"
    other.write_text('{"drivetrain_spool": 1, "tracker": "memory", "project": "p", "run_id": null, "rank": 0}\n')
    with pytest.raises(TrackerError, match="'memory'.*read_spool"):
        sync_spool(other, get_registry())
    other.write_text('{"loss": 1}\n')
    with pytest.raises(TrackerError, match="isn't a spool"):
        sync_spool(other, get_registry())
    with pytest.raises(TrackerError, match="There is no directory"):
        list(find_spools(tmp_path / "none"))
