"""Every hookspec says when it is called, by whom, and shows an implementation that runs."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re

import pytest

from drivetrain.hookspecs import SPEC_MODULES

HEADINGS = ["Called", "Result", "Ranks", "Since", "Example"]
SPECS = [
    (module, name)
    for module in SPEC_MODULES
    for name in importlib.import_module(f"drivetrain.hookspecs.{module}").__all__
]


@pytest.mark.parametrize(("module", "name"), SPECS, ids=[name for _, name in SPECS])
def test_a_hookspec_is_documented_and_its_example_runs(module, name):
    spec = getattr(importlib.import_module(f"drivetrain.hookspecs.{module}"), name)
    text = inspect.getdoc(spec)
    assert re.findall(r"^(\w+):$", text, re.MULTILINE) == HEADINGS
    assert re.match(r"drivetrain_(register|detect|before|after)_[a-z_]+$", name)
    finder = doctest.DocTestFinder(recurse=False)
    (test,) = finder.find(spec, name, globs={})
    assert test.examples
    results = doctest.DocTestRunner().run(test)
    assert results.failed == 0


def _decorated(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names = [d.func if isinstance(d, ast.Call) else d for d in node.decorator_list]
            if any(isinstance(d, ast.Name) and d.id == "hookimpl" for d in names):
                yield node


def test_hookimpls_take_plain_arguments(package):
    """pluggy's versions treat an argument with a default, and starred ones, differently."""
    wrong = []
    for file in package.files:
        for node in _decorated(ast.parse(file.read_text())):
            a = node.args
            if a.defaults or a.kw_defaults or a.kwonlyargs or a.posonlyargs or a.vararg or a.kwarg:
                wrong.append(f"{file.name}: {node.name}")
    assert wrong == []
