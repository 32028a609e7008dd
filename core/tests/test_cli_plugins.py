import importlib.metadata
import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner

from drivetrain._plugins.process import _process_registry
from drivetrain.cli import main
from drivetrain.testing.distributions import write_plugin

TOY = """
    from drivetrain.hookspecs import hookimpl
    from drivetrain.specs import BackendSpec, Capability, CommandSpec, TrackerSpec

    DRIVETRAIN_API = 1

    @hookimpl
    def drivetrain_register_trackers():
        return [TrackerSpec(name="toy", summary="A toy.", target="toy_code:Tracker", options="toy_code:ToyOptions")]

    @hookimpl
    def drivetrain_register_backends():
        return [BackendSpec(name="toyback", target="toy_code:Back", capabilities=frozenset({Capability.NO_SYNC, Capability.COMPILE}))]

    @hookimpl
    def drivetrain_register_commands():
        return [
            CommandSpec(name="toy-do", summary="Does a toy's work.", target="toy_commands:do", aliases=("toy-act",)),
            CommandSpec(name="toy-secret", target="toy_commands:do", hidden=True),
            CommandSpec(name="toy-gone", target="no_such_module:do"),
            CommandSpec(name="toy-none", target="toy_commands:Path"),
        ]
"""

COMMANDS = """
    from pathlib import Path
    import click
    from drivetrain.errors import ConfigurationError, LaunchError

    @click.command()
    @click.option("--num-items", type=int, default=1)
    @click.option("--fail", is_flag=True)
    @click.option("--exit-code", type=int)
    @click.argument("rest", nargs=-1)
    def do(num_items, fail, exit_code, rest):
        if fail:
            raise ConfigurationError("the toy is out of order")
        if exit_code:
            error = LaunchError("rank 1 failed")
            error.exit_code = exit_code
            raise error
        click.echo(f"{num_items} {' '.join(rest)}")
"""

CODE = """
    from dataclasses import dataclass, field
    from drivetrain.config import Options
    from drivetrain.interfaces import Backend as Base, Tracker as TrackerBase

    @dataclass
    class ToyOptions(Options):
        size: int = 3

    class Tracker(TrackerBase): ...
    class Back: ...
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Three distributions: good, broken, and one that lacks something."""
    monkeypatch.syspath_prepend(tmp_path)
    installed = {entry.name for entry in importlib.metadata.entry_points(group="drivetrain.plugins")}
    monkeypatch.setenv("DRIVETRAIN_DISABLE_PLUGINS", ",".join([*sorted(installed), "off-plugin"]))
    before = set(sys.modules)
    write_plugin(tmp_path, "toy", TOY, version="2.0", files={"toy_code.py": CODE, "toy_commands.py": COMMANDS})
    write_plugin(tmp_path, "wonky", "def helper():\n    raise ValueError('planted')\nhelper()")
    write_plugin(tmp_path, "needy", "DRIVETRAIN_API = 1", requires=["no-such-thing>=2"])
    write_plugin(tmp_path, "off", "raise RuntimeError('must not be imported')")
    _process_registry.cache_clear()
    yield tmp_path
    _process_registry.cache_clear()
    for name in set(sys.modules) - before:
        if str(tmp_path) in (getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def run(*arguments, code=0, **kwargs):
    result = CliRunner().invoke(main, list(arguments), prog_name="drivetrain", **kwargs)
    assert result.exit_code == code, result.output
    return result


# -- the group -------------------------------------------------------------------------------------------------------------


def test_help_lists_the_commands_of_plugins_without_importing_them(site):
    output = run("-h").output
    assert "plugins" in output
    assert "toy-do      Does a toy's work." in output
    assert "toy-secret" not in output
    assert "toy_commands" not in sys.modules


def test_commands_run_and_dashes_and_underscores_are_the_same_in_flags(site):
    assert run("toy-do", "--num_items", "3").output == "3 \n"
    assert run("toy-do", "--num-items=4", "a_b", "--", "--c_d").output == "4 a_b --c_d\n"
    assert run("toy_do").output == "1 \n"
    assert run("toy-act").output == "1 \n"
    assert run("toy-secret").output == "1 \n"


def test_an_unknown_command_names_the_closest(site):
    output = run("plugns", code=2).output
    assert "There is no command 'plugns'. Did you mean 'plugins'?" in output


def test_an_error_is_one_message_without_a_traceback(site, monkeypatch):
    monkeypatch.delenv("DRIVETRAIN_DEBUG", raising=False)
    result = run("toy-do", "--fail", code=1)
    assert result.stderr == "error: the toy is out of order\n"
    assert result.stdout == ""
    assert run("toy-do", "--fail", code=1, color=True).stderr.startswith("\x1b[31m\x1b[1merror:")
    for result in (
        run("--debug", "toy-do", "--fail", code=1),
        run("toy-do", "--fail", code=1, env={"DRIVETRAIN_DEBUG": "1"}),
    ):
        assert type(result.exception).__name__ == "ConfigurationError"


def test_the_exit_code_of_a_failed_process_is_passed_on(site):
    assert run("toy-do", "--exit-code", "7", code=7).stderr == "error: rank 1 failed\n"


def test_a_command_that_cannot_be_loaded_names_its_plugin(site):
    assert "command 'toy-gone' of plugin 'toy' (toy-plugin 2.0) can't be loaded" in run("toy-gone", code=1).stderr
    assert "'toy_commands:Path' is not a click command" in run("toy-none", code=1).stderr


def test_version(site):
    assert run("--version").output == "drivetrain, version 0.1.0\n"


def test_completion_offers_commands_without_importing_them(site):
    context = main.make_context("drivetrain", ["toy-do"])
    names = [item.value for item in main.shell_complete(context, "toy")]
    assert names == ["toy-do", "toy-gone", "toy-none"]
    assert "--debug" in [item.value for item in main.shell_complete(context, "--d")]
    assert "toy_commands" not in sys.modules


# -- plugins ---------------------------------------------------------------------------------------------------------------


def test_the_list(site):
    output = run("plugins").output
    assert output == run("plugins", "list").output
    lines = output.splitlines()
    assert lines[0].split() == ["NAME", "STATUS", "VERSION", "DISTRIBUTION"]
    toy = next(i for i, line in enumerate(lines) if line.startswith("toy "))
    assert lines[toy].split() == ["toy", "ok", "2.0", "toy-plugin"]
    assert [line.strip() for line in lines[toy + 1 : toy + 4]] == [
        "backend: toyback",
        "tracker: toy",
        "command: toy-do, toy-secret, toy-gone, toy-none",
    ]
    wonky = next(i for i, line in enumerate(lines) if line.startswith("wonky "))
    assert lines[wonky].split()[1] == "failed"
    assert lines[wonky + 1].strip() == "ValueError: planted"
    assert "needs no-such-thing>=2, which isn't installed" in output
    assert "it is named in DRIVETRAIN_DISABLE_PLUGINS" in output


def test_the_table_fits_80_columns(site):
    table = [line for line in run("plugins").output.splitlines() if not line.startswith(" ")]
    assert max(map(len, table)) <= 80


def test_a_terminal_gets_wrapped_lines(site, monkeypatch):
    from drivetrain.cli import _plugin_text as text

    monkeypatch.setattr("sys.stdout", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.setenv("COLUMNS", "60")
    lines = text._wrap("word " * 40, "    ", "      ").splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[1].startswith("      word")


def test_what_could_be_installed_is_listed(site, monkeypatch):
    assert "pip install" not in run("plugins").output, "both are installed here, though disabled"
    from drivetrain.cli import _plugin_text as text

    assert [line for line in text.available([]) if line.startswith("ddp")] == [
        'ddp: Data parallel training with DistributedDataParallel. pip install "drivetrain[ddp]"'
    ]
    assert not any(line.startswith("ddp") for line in text.available([], "tracker"))


def test_json(site):
    records = {record["name"]: record for record in json.loads(run("plugins", "--json").output)}
    toy = records["toy"]
    assert (toy["status"], toy["version"], toy["distribution"], toy["api"]) == ("ok", "2.0", "toy-plugin", 1)
    assert toy["kinds"] == ["backend", "tracker", "command"]
    assert toy["location"] == str(site / "toy_plugin_entry.py")
    backend = toy["specs"][0]
    assert (backend["kind"], backend["name"], backend["usable"]) == ("backend", "toyback", True)
    assert backend["capabilities"] == ["compile", "no-sync"]
    assert records["wonky"]["reason"] == "ValueError: planted"
    assert run("plugins", "--json").output == run("plugins", "list", "--json").output


def test_kind(site):
    records = json.loads(run("plugins", "--json", "--kind", "tracker").output)
    assert [record["name"] for record in records] == ["builtin", "needy", "toy", "wonky"]
    assert [spec["name"] for record in records for spec in record["specs"]] == ["jsonl", "toy"]
    output = run("plugins", "list", "--kind", "backend").output
    assert "toyback" in output
    assert "tracker" not in output
    assert "'backend', 'device'" in run("plugins", "--kind", "backnd", code=2).output


def test_options_before_a_subcommand_are_not_ignored(site):
    assert "options come after the subcommand" in run("plugins", "--json", "show", "toy", code=2).output


def test_show_by_plugin_distribution_and_spec(site):
    output = run("plugins", "show", "toy").output
    assert output == run("plugins", "show", "toy-plugin").output == run("plugins", "show", "toyback").output
    for expected in ("status        ok", f"location      {site}", "capabilities  compile, no-sync", "A toy."):
        assert expected in output
    assert "builtin" in run("plugins", "show", "fp32").output
    assert json.loads(run("plugins", "show", "toy", "--json").output)[0]["name"] == "toy"


def test_show_of_a_broken_plugin_ends_with_its_own_traceback(site):
    output = run("plugins", "show", "wonky").output
    assert "reason        ValueError: planted" in output
    assert "in helper" in output
    assert "importlib" not in output
    assert "loader.py" not in output


def test_show_of_what_is_not_there(site):
    assert "There is no plugin 'tyo'. Did you mean 'toy'?" in run("plugins", "show", "tyo", code=1).stderr
    assert (
        "plugin 'megatron' isn't installed. It belongs to drivetrain-megatron"
        in run("plugins", "show", "megatron", code=1).stderr
    )


def test_check_loads_all_that_a_plugin_names(site):
    result = run("plugins", "check", "toy", code=1)
    assert result.stdout.splitlines() == [
        "plugin 'toy' (toy-plugin 2.0): failed",
        "  - backend 'toyback': target 'toy_code:Back' doesn't derive from drivetrain.interfaces.Backend",
        "  - command 'toy-gone': target 'no_such_module:do' can't be imported: ModuleNotFoundError: No module named 'no_such_module'",
        "  - command 'toy-none': target 'toy_commands:Path' isn't a click command",
    ]
    checked = json.loads(run("plugins", "check", "toy", "--json", code=1).stdout)
    assert checked[0]["ok"] is False
    assert len(checked[0]["problems"]) == 3
    assert "needs no-such-thing" in run("plugins", "check", "needy", code=1).stdout


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("class ToyOptions: ...", "isn't a dataclass that derives from drivetrain.config.Options"),
        ("@dataclass\nclass ToyOptions(Options):\n    size: int", "without a default, size can't come from a file"),
        ("@dataclass\nclass ToyOptions(Options):\n    size: int = 'x'", "the defaults don't fit the schema"),
        ("ToyOptions = 7", "isn't a dataclass that derives"),
    ],
)
def test_check_of_options(site, options, problem):
    head = "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom drivetrain.config import Options\nfrom drivetrain.interfaces import Tracker\n"
    (site / "toy_code.py").write_text(head + options)
    assert problem in run("plugins", "check", "toy", code=1).stdout


def test_check_of_a_good_plugin(site):
    source = TOY.split("@hookimpl\n    def drivetrain_register_backends")[0]
    write_plugin(site, "good", source.replace('"toy"', '"good"'))
    _process_registry.cache_clear()
    assert run("plugins", "check", "good").stdout == "plugin 'good' (good-plugin 1.0): ok\n"


def test_interfaces_of_check_exist():
    from drivetrain._lazy import load_target
    from drivetrain._plugins.check import INTERFACES

    assert all(isinstance(load_target(target), type) for target in INTERFACES.values())


# -- a fresh interpreter ---------------------------------------------------------------------------------------------------

PROBE = """
import sys
sys.argv[0] = "drivetrain"
from drivetrain.cli import main
try:
    main()
finally:
    heavy = [m for m in ("torch", "rich", "numpy", "msgspec", "packaging.requirements") if m in sys.modules]
    print("HEAVY", heavy, file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["plugins"], ["plugins", "--json"], ["plugins", "show", "builtin"]])
def test_torch_and_rich_stay_out(tmp_path, arguments):
    exports = TOY.replace('options="toy_code:ToyOptions"', 'options="toy_code:ToyOptions", exports=("ToyOptions",)')
    write_plugin(tmp_path, "toy", exports, requires=["torch>=2", "rich; extra == 'x'"], files={"toy_code.py": CODE})
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, env=environ, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "HEAVY []"
    if arguments == ["plugins"]:
        assert "tracker: toy\n" in done.stdout
