"""Who may import whom. The graph is that of the sources; imports for type checkers alone don't count."""

from __future__ import annotations

import re
import sys

import grimp
import pytest

#: Where a requirement's name isn't that of its module.
_MODULES = {"typing-extensions": "typing_extensions", "tomli": "tomli", "pyyaml": "yaml", "ruamel.yaml": "ruamel"}


@pytest.fixture(scope="module")
def graph(packages):
    return grimp.build_graph(
        *(p.module for p in packages), include_external_packages=True, exclude_type_checking_imports=True
    )


def _imports(graph, package):
    """Pairs of a module of a package and what it imports."""
    own = [m for m in graph.modules if m == package or m.startswith(package + ".")]
    return sorted((m, found) for m in own for found in graph.find_modules_directly_imported_by(m))


def _requirements(package, *extras):
    project = package.metadata["project"]
    optional = project.get("optional-dependencies", {})
    texts = [*project["dependencies"], *(t for extra in extras for t in optional.get(extra, ()))]
    names = [re.match(r"[\w.-]+", text)[0].lower() for text in texts]
    return {_MODULES.get(name, name.replace("-", "_")) for name in names}


def _is_private(module: str) -> bool:
    return any(part.startswith("_") for part in module.split("."))


def test_each_package_imports_only_what_it_requires(graph, package):
    allowed = _requirements(package) | {package.module} | set(sys.stdlib_module_names)
    kit = _requirements(package, "testing")
    wrong = []
    for module, found in _imports(graph, package.module):
        top = found.split(".")[0]
        if top not in allowed and not (top in kit and module.startswith("drivetrain.testing")):
            wrong.append(f"{module} imports {found}")
    assert wrong == []


def test_core_imports_no_plugin(graph, core):
    assert [pair for pair in _imports(graph, core.module) if pair[1].startswith("drivetrain_")] == []


def test_plugins_import_only_cores_public_modules_and_no_other_plugin(graph, packages):
    wrong = []
    for package in packages[1:]:
        for module, found in _imports(graph, package.module):
            foreign = found.startswith("drivetrain_") and found.split(".")[0] != package.module
            if foreign or (found.split(".")[0] == "drivetrain" and _is_private(found)):
                wrong.append(f"{module} imports {found}")
    assert wrong == []


def test_builtins_obey_the_plugins_rule(graph):
    wrong = [
        f"{module} imports {found}"
        for module, found in _imports(graph, "drivetrain._builtin")
        if found.startswith("drivetrain.") and not found.startswith("drivetrain._builtin") and _is_private(found)
    ]
    assert wrong == []


def test_nothing_imports_contrib(graph, packages):
    contrib = {p.module for p in packages if p.kind == "contrib"}
    for package in packages:
        if package.kind != "contrib":
            assert [pair for pair in _imports(graph, package.module) if pair[1].split(".")[0] in contrib] == []


def test_names_follow_the_one_rule(packages):
    for package in packages[1:]:
        folder = package.folder.name
        project = package.metadata["project"]
        assert project["name"] == f"drivetrain-{folder}"
        assert package.module == f"drivetrain_{folder.replace('-', '_')}"
        assert list(project["entry-points"]["drivetrain.plugins"]) == [folder]
