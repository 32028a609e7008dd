"""`drivetrain config`: the wizard, with answers and through a terminal; show, check, update."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner

from drivetrain._plugins import get_registry
from drivetrain.cli import main
from drivetrain.config import read_config_file


@pytest.fixture
def config(tmp_path, monkeypatch):
    """``config(*arguments)`` in a directory of its own; its output and exit code."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DRIVETRAIN_CONFIG_FILE", raising=False)

    def run(*arguments, code=0, **environ):
        result = CliRunner().invoke(main, ["config", *arguments], env=environ)
        assert result.exit_code == code, result.output
        return result.output

    return run


def written(path):
    file = read_config_file(path)
    return dict(file.core), {name: dict(values) for name, values in file.sections.items()}


def test_answers_on_the_command_line_are_not_asked_for(config, tmp_path):
    config("--yes", "--set", "mixed-precision=bf16", "--set", "launch.num_processes=4", "--set", "ddp.bucket-cap-mb=50")
    core, sections = written(tmp_path / "drivetrain.toml")
    assert core == {"mixed_precision": "bf16"}
    assert sections == {"launch": {"num_processes": 4}, "ddp": {"bucket_cap_mb": 50.0}}


def test_several_machines_need_a_place_to_meet(config, tmp_path):
    config("--yes", "--set", "launch.num_machines=2", "--set", "launch.main_process_ip=10.0.0.7")
    _, sections = written(tmp_path / "drivetrain.toml")
    assert (
        sections["launch"].items()
        >= {
            "num_machines": 2,
            "main_process_ip": "10.0.0.7",
            "main_process_port": 29500,
        }.items()
    )
    assert sections["launch"]["num_processes"] % 2 == 0


def test_what_it_writes_launches(config, tmp_path):
    config("--yes", "--set", "launch.num_processes=2", "--set", "cpu=true", "--set", "mixed_precision=bf16")
    (tmp_path / "train.py").touch()
    result = CliRunner().invoke(main, ["launch", "--dry-run", "train.py"])
    assert result.exit_code == 0, result.output
    assert result.stdout.count(" WORLD_SIZE=2") == 2
    assert f"DRIVETRAIN_CONFIG_FILE={tmp_path / 'drivetrain.toml'}" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--yes", "--set", "lanch.num_processes=3"], "Did you mean 'launch.num_processes'?"),
        (["--yes", "--set", "launch.num_processes=two"], "expected an integer"),
        (["--yes", "--set", "cpu"], "isn't KEY=VALUE"),
        ([], "no terminal to ask on"),
        (["check", "absent.toml"], "absent.toml"),
        (["show", "absent.toml"], "absent.toml"),
        (["update", "--set", "cpu=true"], "no file drivetrain.toml"),
    ],
)
def test_mistakes(config, tmp_path, arguments, message):
    assert message in config(*arguments, code=2)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_is_not_overwritten_unless_asked_to(config, tmp_path):
    (tmp_path / "drivetrain.toml").write_text("# mine\ncpu = true\n")
    assert "update" in config("--yes", code=2)
    assert (tmp_path / "drivetrain.toml").read_text() == "# mine\ncpu = true\n"
    config("--yes", "--force")
    assert "mine" not in (tmp_path / "drivetrain.toml").read_text()


def test_show_says_where_each_value_comes_from(config, tmp_path):
    (tmp_path / "drivetrain.toml").write_text('mixed_precision = "bf16"\n[ddp]\nbucket_cap_mb = 3\n[moon]\nphase = 1\n')
    environ = {"DRIVETRAIN_DDP_BUCKET_CAP_MB": "7", "DRIVETRAIN_LAUNCH_NUM_PROCESSES": "4"}
    lines = [line.split(None, 1) for line in config("show", **environ).splitlines()]
    assert ["mixed_precision", '"bf16"  (drivetrain.toml:1)'] in lines
    assert ["ddp.bucket_cap_mb", "7.0  (DRIVETRAIN_DDP_BUCKET_CAP_MB)"] in lines
    assert ["launch.num_processes", "4  (DRIVETRAIN_LAUNCH_NUM_PROCESSES)"] in lines
    data = json.loads(config("show", "--json", "--all"))
    by_key = {row["key"]: (row["value"], row["origin"]) for row in data["settings"]}
    assert by_key["ddp.bucket_cap_mb"] == (3.0, "drivetrain.toml:3")
    assert by_key["gradient_accumulation_steps"] == (1, "default")
    assert ["[moon]" in note for note in data["notes"]] == [True]


def test_check_names_every_mistake_with_its_line_and_the_nearest_name(config, tmp_path):
    (tmp_path / "drivetrain.toml").write_text(
        'cpu = true\n[ddp]\nbucket_cap = 3\nstatic_graph = "perhaps"\n[launch]\nnum-proceses = 2\n[moon]\nphase = 1\n'
    )
    lines = config("check", code=2).splitlines()
    assert "drivetrain.toml:3: [ddp] has no setting 'bucket_cap'. Did you mean 'bucket_cap_mb'?" in lines
    assert "drivetrain.toml:6: [launch] has no setting 'num_proceses'. Did you mean 'num_processes'?" in lines
    assert any(line.startswith("drivetrain.toml:4:") and "static_graph" in line for line in lines)
    assert any(line.startswith("note: drivetrain.toml:7:") and "[moon]" in line for line in lines)
    assert len(lines) == 4


def test_a_plugin_that_is_not_installed_is_no_mistake(config, tmp_path):
    (tmp_path / "drivetrain.toml").write_text("[moon]\nphase = 1\n")
    assert "drivetrain.toml: fine" in config("check")


def test_update_keeps_comments_order_and_spelling(config, tmp_path):
    path = tmp_path / "drivetrain.toml"
    path.write_text('# why\nmixed-precision = "no"  # for now\n\n[data-loader]\nprefetch = 0\ndata-seed = 3\n')
    config(
        "update", "--set", "mixed_precision=bf16", "--set", "data_loader.data_seed=4", "--unset", "data-loader.prefetch"
    )
    assert path.read_text() == '# why\nmixed-precision = "bf16"  # for now\n\n[data-loader]\ndata-seed = 4\n'
    assert "has no cpu" in config("update", "--unset", "cpu", code=2)


class Terminal:
    """The wizard on a pseudo-terminal."""

    def __init__(self, directory, *arguments):
        self._leader, follower = pty.openpty()
        environ = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
        command = [sys.executable, "-m", "drivetrain", "config", *arguments]
        self.process = subprocess.Popen(
            command,
            stdin=follower,
            stdout=follower,
            stderr=follower,
            cwd=directory,
            env=environ,
            start_new_session=True,
        )
        os.close(follower)
        self.seen = ""

    def wait_for(self, text, seconds=30):
        """Read until something is shown."""
        deadline = time.monotonic() + seconds
        start = len(self.seen)
        while text not in self.plain(start):
            assert time.monotonic() < deadline, self.plain(start)
            if select.select([self._leader], [], [], 0.1)[0]:
                data = os.read(self._leader, 65536)
                if b"\x1b[6n" in data:  # it asks where the cursor is
                    os.write(self._leader, b"\x1b[1;1R")
                self.seen += data.decode("utf-8", "replace")

    def plain(self, start=0):
        return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.seen[start:])

    def type(self, keys):
        os.write(self._leader, keys.encode())

    def end(self, seconds=30):
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < deadline:
            if select.select([self._leader], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self._leader, 65536).decode("utf-8", "replace")
                except OSError:
                    break
        return self.process.wait(5)


UP, DOWN, ENTER = "\x1b[A", "\x1b[B", "\r"


def test_the_wizard_on_a_terminal_with_arrow_keys(tmp_path):
    terminal = Terminal(tmp_path, "--set", "launch.num_machines=1", "--set", "backend=auto")
    terminal.wait_for("How many processes?")
    assert "How many machines" not in terminal.plain()
    terminal.type("\x08" * 4 + "2" + ENTER)
    terminal.wait_for("Which precision?")
    precisions = [p.aliases[0] if p.aliases else p.name for p in get_registry().specs("precision").values()]
    following = precisions[(precisions.index("no") + 1) % len(precisions)]
    if precisions[-1] not in terminal.plain():
        terminal.wait_for(precisions[-1])
    terminal.type(DOWN + ENTER)
    assert terminal.end() == 0, terminal.plain()
    core, sections = written(tmp_path / "drivetrain.toml")
    assert core == {"backend": "auto", "mixed_precision": following}
    assert sections == {"launch": {"num_machines": 1, "num_processes": 2}}


def test_giving_up_writes_nothing(tmp_path):
    terminal = Terminal(tmp_path)
    terminal.wait_for("How many machines?")
    terminal.type("\x03")
    assert terminal.end() != 0
    assert "Traceback" not in terminal.plain()
    assert list(tmp_path.iterdir()) == []
