"""Sizes, public names, vendors' names, and what must not stand in any file."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: "About 250" and "about 40", with the tolerance that the word about grants.
FILE_LIMIT = 275
FUNCTION_LIMIT = 45
TEST_FILE_LIMIT = 400


def _statements(node: ast.AST) -> int:
    """Number of statements inside of a node; docstrings don't count."""
    count = 0
    for child in ast.walk(node):
        if isinstance(child, ast.stmt) and child is not node:
            docstring = (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Constant)
                and isinstance(child.value.value, str)
            )
            count += not docstring
    return count


def _tracked(pattern: str = "") -> list[Path]:
    names = subprocess.run(
        ["git", "ls-files", pattern or "."], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    return [ROOT / name for name in names.splitlines() if (ROOT / name).is_file()]


def test_a_file_does_one_job_and_so_does_a_function(package):
    long = []
    for file in package.files:
        tree = ast.parse(file.read_text())
        if (n := _statements(tree)) > FILE_LIMIT:
            long.append(f"{file.relative_to(ROOT)}: {n} statements")
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        long += [
            f"{file.relative_to(ROOT)}: {node.name} has {n} statements"
            for node in functions
            if (n := _statements(node)) > FUNCTION_LIMIT
        ]
    assert long == []


def test_test_files_are_short_and_named_once():
    files = [f for f in _tracked() if f.name.startswith("test_") and f.suffix == ".py"]
    long = [
        f"{f.relative_to(ROOT)}: {n}" for f in files if (n := _statements(ast.parse(f.read_text()))) > TEST_FILE_LIMIT
    ]
    assert long == []
    names = [f.name for f in files]
    assert sorted({n for n in names if names.count(n) > 1}) == []


def test_public_modules_say_what_is_public(package):
    silent = []
    for file in package.files:
        parts = file.relative_to(package.folder / "src").with_suffix("").parts
        if any(p.startswith("_") and p != "__init__" for p in parts) or parts[-1] == "plugin":
            continue
        tree = ast.parse(file.read_text())
        names = {
            t.id for node in tree.body if isinstance(node, ast.Assign) for t in node.targets if isinstance(t, ast.Name)
        }
        has_code = any(not isinstance(node, ast.Expr) for node in tree.body)
        if has_code and "__all__" not in names:
            silent.append(str(file.relative_to(ROOT)))
    assert silent == []


#: Plugins' and vendors' names; core has them in one data file alone.
VENDORS = re.compile(
    r"deepspeed|fsdp|fully_?shard|megatron|torch_?xla|wandb|mlflow|comet_?ml|neptune|tensor_?board|slurm|kubernetes|torchao|transformer_?engine",
    re.IGNORECASE,
)


def _words(tree: ast.AST) -> list[tuple[int, str]]:
    """Identifiers and texts of a module, without docstrings, with their lines."""
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    found = []
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Name):
            found.append((line, node.id))
        elif isinstance(node, ast.Attribute):
            found.append((line, node.attr))
        elif isinstance(node, ast.arg | ast.keyword) and node.arg:
            found.append((line, node.arg))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append((line, node.name))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found.extend((line, alias.name) for alias in node.names)
            found.append((line, getattr(node, "module", "") or ""))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            found.append((line, node.value))
    return found


def test_core_has_no_vendors_name_in_its_code(core):
    named = [
        f"{file.relative_to(ROOT)}:{line}: {word[:60]!r}"
        for file in core.files
        for line, word in _words(ast.parse(file.read_text()))
        if VENDORS.search(word)
    ]
    assert named == []


def test_known_plugins_are_those_of_this_repository_or_announced(packages):
    (data,) = ROOT.glob("core/src/drivetrain/_plugins/known_plugins.json")
    assert VENDORS.search(data.read_text())
    json.loads(data.read_text())


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("a path of one machine", r"/(?:work|opt/dt)/|/root/\."),
        (
            "a package registry's host",
            r"https?://[\w.-]*(?:pypi|pythonhosted|npmjs|download\.pytorch)\.\w+|--(?:extra-)?index-url",
        ),
        ("a blanket type: ignore", r"#\s*type:\s*ignore(?!\[)"),
        ("a blanket noqa", r"#\s*(?:ruff:\s*)?noqa(?!:)"),
        ("a note for later", r"\b(?:TODO|FIXME|XXX)\b"),
    ],
)
def test_no_file_has(what, pattern):
    here = Path(__file__).resolve()
    wrong = []
    for file in _tracked():
        if file.resolve() == here or file.name == "LICENSE":
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        wrong += [
            f"{file.relative_to(ROOT)}:{i}" for i, line in enumerate(text.splitlines(), 1) if re.search(pattern, line)
        ]
    assert wrong == [], what
