"""What the pages say is true: their Python runs, their commands and settings exist, their tables are those of the schema, their links lead somewhere."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import sys
from pathlib import Path

import click
import pytest

from drivetrain._engine.collecting import Sections
from drivetrain._plugins import get_registry
from drivetrain.cli import main
from drivetrain.config import read_config_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
PAGES = sorted(p for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("plugins/*/README.md")])
PROGRAMS = {"drivetrain", "pip", "pre-commit", "python", "python3", "pytest"}


def name_of(page):
    return str(page.relative_to(ROOT))


def blocks(page, language):
    """Blocks of a language with the lines on which they begin; those with a title have a test of their own (the plugin authors' page)."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}([^\n]*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [(text[: m.start()].count("\n") + 2, m[1].strip(), m[2]) for m in found]


def untitled(page, language):
    return [(line, code) for line, title, code in blocks(page, language) if not title]


@pytest.mark.parametrize("page", [p for p in PAGES if untitled(p, "python")], ids=name_of)
def test_python_runs(page, tmp_path, monkeypatch):
    """The blocks of a page are one script, like cells of a notebook."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    before = variables()
    scope = {"__name__": "page", **SCENES.get(name_of(page), dict)()}
    for line, code in untitled(page, "python"):
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), scope)
    assert variables() == before


def variables():
    """The environment, without what torch's compiler, wandb's own process and the imports of MLflow and DeepSpeed change in it."""
    theirs = ("TORCHINDUCTOR_", "WANDB_SERVICE", "_MLFLOW_", "PYTORCH_NVML_BASED_CUDA_CHECK")
    return {k: v for k, v in os.environ.items() if not k.startswith(theirs)}


def a_training():
    """What the first page leaves out: a model and data."""
    import torch

    model = torch.nn.Linear(4, 2)
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randint(0, 2, (8,)))
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": torch.utils.data.DataLoader(data, batch_size=4),
    }


SCENES = {"README.md": a_training}


def commands(page):
    for line, code in [*untitled(page, "bash"), *untitled(page, "console")]:
        for text in code.replace("\\\n", " ").splitlines():
            words = shlex.split(text.removeprefix("$ "), comments=True)
            if words and (text.startswith("$ ") or (line, code) in untitled(page, "bash")):
                yield words


@pytest.mark.parametrize("page", [p for p in PAGES if list(commands(p))], ids=name_of)
def test_commands_exist(page):
    for words in commands(page):
        words = [w for w in words if not re.fullmatch(r"[A-Z_]+=.*", w)]
        assert words[0] in PROGRAMS, words
        if words[0] == "drivetrain":
            check_command(words[1:])
        if words[1:2] == ["noxfile.py"] and "-s" in words:
            text = (ROOT / "noxfile.py").read_text()
            assert f"def {words[words.index('-s') + 1]}(" in text, words


def check_command(words):
    """The subcommand is there and has these flags."""
    command = main
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        command, words = command.get_command(click.Context(command), words[0]), words[1:]
        assert command is not None, words
    parameters = command.get_params(click.Context(command))  # some are made from schemas
    flags = {option for parameter in parameters for option in [*parameter.opts, *parameter.secondary_opts]}
    for word in words:
        if word.endswith(".py"):
            break  # what follows is the script's
        if word.startswith("-"):
            assert word.split("=")[0] in {*flags, "--help", "--version"}, words


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "toml")], ids=name_of)
def test_configuration_files_say_what_is_read(page, tmp_path):
    for _, title, code in blocks(page, "toml"):
        if "pyproject" in title:
            tomllib.loads(code)
            continue
        path = tmp_path / "drivetrain.toml"
        path.write_text(code)
        notes = Sections(get_registry()).check(read_config_file(path))
        assert [n for n in notes if "csv" not in n] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        if not re.match(r"https?:|mailto:", target):
            assert (page.parent / target).exists(), target


def test_the_tables_of_settings_are_those_of_the_schema():
    tool = runpy.run_path(str(ROOT / "docs" / "tools" / "configuration.py"))
    text = tool["PAGE"].read_text(encoding="utf-8")
    assert tool["page_with_tables"](text) == text, "run `python docs/tools/configuration.py`"


def test_every_page_is_in_the_site():
    nav = (ROOT / "mkdocs.yml").read_text()
    pages = [str(p.relative_to(ROOT / "docs")) for p in PAGES if (ROOT / "docs") in p.parents]
    assert [p for p in pages if p not in nav] == []
