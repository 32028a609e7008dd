"""The page for plugin authors, executed: its files become a distribution, its commands and its script are run."""

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from drivetrain.testing.distributions import write_plugin

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGE = (Path(__file__).parents[2] / "docs" / "writing-a-plugin.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r'```\w+ title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL))
CONSOLE = re.findall(r"```console\n\$ drivetrain (.*?)\n(.*?)```", PAGE, re.DOTALL)
CLI = 'import sys; sys.argv[0] = "drivetrain"; from drivetrain.cli import main; main()'


@pytest.fixture
def site(tmp_path):
    """The page's distribution, as if pip had installed it."""
    project = tomllib.loads(FILES["pyproject.toml"])["project"]
    (name, module), *_ = project["entry-points"]["drivetrain.plugins"].items()
    files = {path.removeprefix("src/"): text for path, text in FILES.items() if path.startswith("src/")}
    source = files.pop(module.replace(".", "/") + ".py")
    write_plugin(
        tmp_path,
        name,
        source,
        distribution=project["name"],
        version=project["version"],
        requires=project["dependencies"],
        module=module,
        files={**files, "csv_tracker/__init__.py": ""},
    )
    return tmp_path


def run(site, *arguments, **environ):
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(site), *sys.path]),
        "DRIVETRAIN_PLUGINS": "csv",
        **environ,
    }
    done = subprocess.run(
        [sys.executable, *arguments], cwd=site, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_commands_print_what_the_page_says(site):
    assert CONSOLE
    for arguments, output in CONSOLE:
        assert run(site, "-c", CLI, *arguments.split()) == output


def test_the_script_writes_what_it_logs(site):
    (site / "train.py").write_text(FILES["train.py"])
    run(site, "train.py", DRIVETRAIN_CSV_DELIMITER=";")
    (file,) = site.glob("runs/**/metrics.csv")
    rows = list(csv.reader(file.open(), delimiter=";"))
    assert [(row[0], row[1], float(row[2])) for row in rows] == [
        ("0", "loss", 1.0),
        ("1", "loss", 0.5),
        ("2", "loss", 1 / 3),
    ]
    assert (file.parent / "config.json").read_text() == '{"lr": 0.1}'


def test_the_statuses_are_all_explained():
    from drivetrain._plugins import Status

    assert re.findall(r"^\| `([a-z-]+)` \|", PAGE, re.MULTILINE) == [str(status) for status in Status]
