import json
import os
import pty
import subprocess
import sys

import pytest
from click.testing import CliRunner

from drivetrain._plugins import Registry
from drivetrain.cli import main
from drivetrain.cli.explain import make_plan
from drivetrain.errors import PluginNotFoundError
from drivetrain.testing.catalog import MemoryRegistry, devices

CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("DRIVETRAIN_", "RANK", "WORLD_SIZE", "LOCAL_"))}
CODE = "from drivetrain.cli import main; main()"


def run(*arguments, environ=None):
    return CliRunner().invoke(main, ["explain", *arguments], env=environ)


def test_plain_text_says_what_why_and_from_where():
    result = run("--cpu", "--mixed_precision", "bf16", environ={"DRIVETRAIN_GRADIENT_ACCUMULATION_STEPS": "4"})
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.output.splitlines()]
    assert ["Chosen"] in lines
    assert ["mixed_precision", "bf16", "argument"] in lines
    place = lines.index(["gradient_accumulation_steps", "4"])
    assert lines[place + 1] == ["DRIVETRAIN_GRADIENT_ACCUMULATION_STEPS"]
    assert ["cpu", "yes", "argument"] in lines
    assert any(line[:2] == ["backend", "single"] for line in lines)
    assert max(map(len, result.output.splitlines())) <= 80


def test_as_if_there_were_several_processes():
    data = json.loads(run("--cpu", "--num-processes", "3", "--json").output)
    assert data["process"]["world_size"] == 3
    assert {c["kind"]: c["name"] for c in data["chosen"]}["device"] == "cpu"
    assert any(r["name"] == "single" and "there are 3" in r["reason"] for r in data["rejected"])


def test_the_configuration_file_counts(tmp_path):
    path = tmp_path / "drivetrain.toml"
    path.write_text('mixed_precision = "bf16"\n')
    data = json.loads(run("--cpu", "--json", "--config-file", str(path)).output)
    assert data["settings"]["mixed_precision"] == {"value": "bf16", "origin": f"{path}:1"}


@pytest.mark.parametrize(
    ("arguments", "environ", "text"),
    [
        (["--mixed-precision", "fp17"], {}, "There is no precision 'fp17'"),
        (["--gradient-accumulation-steps", "0"], {}, "gradient_accumulation_steps"),
        ([], {"RANK": "1"}, "WORLD_SIZE isn't set"),
        ([], {"DRIVETRAIN_CPU": "perhaps"}, "DRIVETRAIN_CPU='perhaps'"),
        (["--num-processes", "0"], {}, "--num-processes"),
    ],
)
def test_what_cannot_be_is_a_message_and_an_exit_code(arguments, environ, text):
    result = run(*arguments, environ=environ)
    assert result.exit_code != 0
    assert text in result.output
    assert "Traceback" not in result.output


def test_without_a_plugin_for_several_processes_the_install_command_is_said():
    registry = Registry.discover(environ={}, entry_points=[])
    availability = devices(MemoryRegistry(specs=registry.specs("device").values()))
    with pytest.raises(PluginNotFoundError, match=r'Install one: pip install "drivetrain\[ddp\]"'):
        make_plan({}, num_processes=2, registry=registry, environ={}, availability=availability)


def test_a_terminal_gets_tables_within_its_width():
    leader, follower = pty.openpty()
    environ = {**CLEAN, "COLUMNS": "80", "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, "explain", "--cpu"], stdout=follower, stderr=subprocess.STDOUT, env=environ
    )
    os.close(follower)
    output = b""
    while True:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # the other end is closed
            break
        if not chunk:
            break
        output += chunk
    os.close(leader)
    assert process.wait(60) == 0
    assert b"\x1b[" in output
    assert b"Not chosen" in output


def test_the_cpu_is_explained_without_torch():
    code = f"import sys\ntry:\n    {CODE}\nexcept SystemExit as end:\n    sys.exit(end.code or 2 * ('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, "explain", "--cpu"], env=CLEAN, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
