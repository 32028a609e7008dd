"""The `drivetrain launch` command as it is typed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time

import click
import pytest
from click.testing import CliRunner

from drivetrain.cli import main
from drivetrain.cli.launch import launch
from drivetrain.config import CoreSettings
from drivetrain.testing.launching import marked_processes


def drivetrain(*arguments, cwd=None, timeout=60, **environ):
    """Run the program itself."""
    return subprocess.run(
        [sys.executable, "-m", "drivetrain", *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=timeout,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(
        "import os, sys\n"
        "names = ['RANK', 'WORLD_SIZE', 'DRIVETRAIN_CPU', 'DRIVETRAIN_MIXED_PRECISION']\n"
        "print(*(os.environ.get(n, '-') for n in names), sys.argv[1:])\n"
    )
    return path


@pytest.fixture
def dry(script, monkeypatch):
    """``dry(*flags)``: what would be run, without starting anything."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*flags, words=()):
        result = CliRunner().invoke(launch, ["--dry-run", *flags, str(script), *words])
        assert result.exit_code == 0, result.output
        return result.stdout.splitlines()

    return run


def test_two_ranks_on_the_cpu(script):
    result = drivetrain("launch", "--cpu", "--num-processes", 2, "--mixed-precision", "bf16", script, "--lr", "0.1")
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [
        f"[rank {rank}] {rank} 2 true bf16 ['--lr', '0.1']" for rank in (0, 1)
    ]
    assert result.stderr == ""


def test_one_process_is_started_without_torch_in_the_launcher(script):
    code = (
        "import sys\n"
        "from drivetrain.cli import main\n"
        f"sys.argv = ['drivetrain', 'launch', '--num-processes', '1', {str(script)!r}]\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    print('torch' in sys.modules, 'rich' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "0 1 - - []\nFalse False\n"


def test_without_a_number_it_says_what_was_found_and_why(script):
    result = drivetrain("launch", "--cpu", script)
    assert result.stdout == "0 1 true - []\n"
    assert result.stderr == "drivetrain: one process, on the CPU: it was asked for. For more: --num-processes N.\n"
    assert drivetrain("launch", "--cpu", "--quiet", script).stderr == ""


def test_a_rank_that_exits_7_while_another_hangs(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, time\nif os.environ['RANK'] == '1': os._exit(7)\ntime.sleep(60)\n")
    begin = time.monotonic()
    result = drivetrain("launch", "--cpu", "-n", 2, script, MARK="cli-launch-7")
    assert result.returncode == 7
    assert time.monotonic() - begin < 20
    assert "rank 1 of 2 failed with exit code 7" in result.stderr
    assert marked_processes("cli-launch-7", within=5) == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["absent.py"], 2, "There is no script absent.py"),
        (["--num-processes", "0", "script.py"], 2, "at least 1"),
        (["--num-processes", "two", "script.py"], 2, "not a valid int"),
        (["-m", "absent"], 2, "no module 'absent'"),
        ([], 2, "Give a script to run"),
        (["--nunmachines", "2", "script.py"], 2, "No such option"),
        (["--nnodes", "4:1", "script.py"], 2, "MIN:MAX"),
        (["--nnodes", "1:4", "script.py"], 2, "where to meet"),
        (
            ["--nnodes", "1:4", "--rdzv-backend", "static", "--rdzv-endpoint", "127.0.0.1:1", "script.py"],
            2,
            "to be there",
        ),
        (["--min-machines", "2", "--nnodes", "1:4", "script.py"], 2, "contradict"),
        (["--tee", "3", "script.py"], 2, "--log-dir"),
        (["--log-dir", "logs", "--tee", "7", "script.py"], 2, "0 (none), 1 (stdout)"),
        (["--log-dir", "logs", "--redirects", "5:1", "script.py"], 2, "no local rank 5"),
        (["--cpu", "--num-processes", "9999", "--cpu-binding", "cores", "script.py"], 2, "cores of their own"),
        (["--ddp-bucket-cap-mb", "large", "script.py"], 2, "expected a number"),
        (["--ddp-bucket-cap-mbs", "3", "script.py"], 2, "Did you mean '--ddp-bucket-cap-mb'"),
        (["--use-ddp", "--backend", "single", "script.py"], 2, "contradict"),
        (["--multi-gpu", "--cpu", "script.py"], 2, "no accelerator"),
        (
            [
                "--main-process-ip",
                "no.such.host.invalid",
                "--main-process-port",
                "1",
                "--nnodes",
                "2",
                "-n",
                "2",
                "script.py",
            ],
            1,
            "isn't known",
        ),
        (["--cpu", "--mixed-precision", "bf17", "script.py"], 1, "bf16"),
        (["--on", "mars", "script.py"], 1, "mars"),
        (["--rdzv-endpoint", "a:b", "script.py"], 2, "HOST:PORT"),
        (["--rdzv-endpoint", "a:1", "--master-addr", "a", "script.py"], 2, "same thing"),
        (["--standalone", "--nnodes", "2", "script.py"], 2, "one machine"),
        (["--rdzv-conf", "timeout", "script.py"], 2, "KEY=VALUE"),
        (["--config-file", "absent.toml", "script.py"], 2, "absent.toml"),
    ],
)
def test_mistakes_end_at_once_with_a_message_and_no_traceback(arguments, code, message, script, monkeypatch):
    monkeypatch.chdir(script.parent)
    result = CliRunner().invoke(main, ["launch", *arguments])
    assert result.exit_code == code, result.output
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "flags",
    [
        ("--num-processes", "2", "--cpu", "--main-process-port", "1234"),
        ("--num_processes=2", "--cpu", "--main_process_port=1234"),
        ("--nproc-per-node", "2", "--cpu", "--master-port", "1234"),
        ("--nproc_per_node=2", "--nnodes=1", "--node_rank=0", "--cpu", "--master_port=1234"),
    ],
)
def test_every_spelling_means_the_same(dry, flags, script):
    lines = dry(*flags)
    assert len(lines) == 2
    for rank, line in enumerate(lines):
        assert line == (
            f"DRIVETRAIN_CPU=true RANK={rank} WORLD_SIZE=2 LOCAL_RANK={rank} LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 "
            f"MASTER_PORT=1234 {sys.executable} -u {script}"
        )


def test_what_stands_after_the_script_is_the_scripts(dry, script):
    (line,) = dry("--cpu", "-n", "1", words=("--num-processes", "9", "--", "--dry_run", "-m", "a b"))
    assert line.endswith(f"{script} --num-processes 9 -- --dry_run -m 'a b'")


def test_the_ranks_of_another_machine(dry):
    lines = dry("--cpu", "-n", "4", "--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "10.0.0.7:29500")
    assert [re.search(r"RANK=(\d) .*LOCAL_RANK=(\d)", line).groups() for line in lines] == [("2", "0"), ("3", "1")]
    assert all("MASTER_ADDR=10.0.0.7 MASTER_PORT=29500" in line for line in lines)


def test_help_groups_its_options():
    result = CliRunner().invoke(launch, ["--help"])
    headings = re.findall(r"^([A-Z][\w ]+):$", result.output, re.MULTILINE)
    assert headings == [
        "What to run", "How many", "Training", "Several machines", "Output", "Failures", "Launcher", "Other"
    ]  # fmt: skip
    assert "--machine-rank, --node-rank" in result.output


def test_every_flag_has_a_meaning():
    """A flag that nothing reads would be accepted and ignored."""
    from drivetrain.cli import launch as module
    from drivetrain.launch.options import LaunchOptions, LocalOptions

    assert set(module._LAUNCH) == set(LaunchOptions.hints())
    assert set(module._LOCAL) == set(LocalOptions.hints())
    assert set(module._CORE) <= set(CoreSettings.hints())
    own = {"command", "module", "no_python", "nproc_per_node", "rdzv_endpoint", "standalone", "quiet", "dry_run"}
    own |= {"multi_gpu", "enable_cpu_affinity"}
    assert {p.name for p in launch.params} == own | set(module._LAUNCH) | set(module._LOCAL) | set(module._CORE)


def test_core_settings_without_a_flag_of_their_own_have_a_generated_one():
    names = {p.name for p in launch.get_params(click.Context(launch))}
    assert set(CoreSettings.hints()) <= names


def test_no_two_flags_have_the_same_name():
    parameters = launch.get_params(click.Context(launch))
    flags = [flag for p in parameters if isinstance(p, click.Option) for flag in [*p.opts, *p.secondary_opts]]
    assert sorted({f for f in flags if flags.count(f) > 1}) == []
    names = [p.name for p in parameters]
    assert sorted({n for n in names if names.count(n) > 1}) == []


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--ddp-bucket-cap-mb", "50"], "DRIVETRAIN_DDP_BUCKET_CAP_MB=50"),
        (["--ddp_find_unused_parameters"], "DRIVETRAIN_DDP_FIND_UNUSED_PARAMETERS=true"),
        (["--no-ddp-find-unused-parameters"], "DRIVETRAIN_DDP_FIND_UNUSED_PARAMETERS=false"),
        (["--use_ddp"], "DRIVETRAIN_BACKEND=ddp"),
        (["--log-with", "jsonl,tensorboard"], "DRIVETRAIN_LOG_WITH=jsonl,tensorboard"),
        (["--device", "cpu"], "DRIVETRAIN_DEVICE=cpu"),
        (["--debug"], "TORCH_DISTRIBUTED_DEBUG=DETAIL"),
        (["--enable-cpu-affinity"], "taskset -c"),
    ],
)
def test_settings_of_everything_installed_are_flags(dry, flags, wanted):
    lines = dry("--cpu", "-n", "2", *flags)
    assert len(lines) == 2
    assert all(wanted in line for line in lines)


def test_a_launch_imports_no_plugins_options_unless_they_are_spoken_of(script):
    code = (
        "import sys\n"
        "from drivetrain.cli import main\n"
        f"sys.argv = ['drivetrain', 'launch', '--cpu', '--dry-run', '-n', '1', {str(script)!r}]\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        "    print([m for m in sys.modules if m.endswith('_ddp.options')])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout.splitlines()[-1] == "[]", result.stderr


def test_the_file_that_config_writes_counts_without_being_named(script, tmp_path):
    (tmp_path / "drivetrain.toml").write_text("mixed_precision = 'bf16'\n[launch]\nnum_processes = 2\n")
    result = drivetrain("launch", "--cpu", script, cwd=tmp_path)
    assert sorted(result.stdout.splitlines()) == [f"[rank {r}] {r} 2 true - []" for r in (0, 1)]
    assert "settings of drivetrain.toml" in result.stderr


def test_a_typo_in_the_file_ends_the_launch_with_line_and_nearest_match(script, tmp_path):
    (tmp_path / "drivetrain.toml").write_text("[ddp]\nbucket_cap = 3\n")
    result = drivetrain("launch", "--cpu", script, cwd=tmp_path)
    assert result.returncode == 2
    assert "drivetrain.toml:2: [ddp] has no setting 'bucket_cap'. Did you mean 'bucket_cap_mb'?" in result.stderr


def test_a_section_of_a_plugin_that_is_not_installed_is_named_and_not_fatal(script, tmp_path):
    (tmp_path / "drivetrain.toml").write_text("[moon]\nphase = 3\n")
    result = drivetrain("launch", "--cpu", "-n", "1", script, cwd=tmp_path)
    assert result.returncode == 0
    assert "drivetrain.toml:1: no installed plugin has the section [moon]" in result.stderr
