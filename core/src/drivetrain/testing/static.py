"""What can be said about a plugin without running it: subclass `PluginConformance` in a test file, and run pytest.

class TestToyPlugin(PluginConformance):
    plugin = "toy"
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from drivetrain._lazy import load_target
from drivetrain._plugins import Registry, get_registry
from drivetrain._plugins.check import check_plugin
from drivetrain._plugins.record import PluginRecord, Status, kind_of
from drivetrain.config.options import Options
from drivetrain.errors import ConfigurationError
from drivetrain.specs import API_VERSION, AnySpec, BackendSpec, ClusterSpec, ProcessInfo, Request

__all__ = ["PluginConformance"]

_IMPORTED = """
import importlib, json, sys
before = set(sys.modules)
importlib.import_module({module!r})
print(json.dumps(sorted(set(sys.modules) - before)))
"""


class PluginConformance:
    """What every plugin must keep to, whatever it offers; `drivetrain plugins check` is part of it.

    Attributes:
        plugin: The entry point's name.
        heavy: Top-level modules that the entry module must not import: torch, and those of the vendor's SDK.

    Example:
        >>> class TestBuiltin(PluginConformance):
        ...     plugin = "builtin"
        >>> TestBuiltin().record.label.split()[1]
        "'builtin'"
    """

    plugin: ClassVar[str]
    heavy: ClassVar[Sequence[str]] = ("torch", "numpy")

    @property
    def registry(self) -> Registry:
        """What is installed."""
        return get_registry()

    @property
    def record(self) -> PluginRecord:
        """The plugin as discovery found it."""
        return self.registry.plugin(self.plugin)

    @property
    def module(self) -> ModuleType:
        """The entry module."""
        return importlib.import_module(self.record.module)

    def test_it_is_found_and_loads(self) -> None:
        """Discovery gives it the status "ok", under its name."""
        record = self.record
        assert record.status is Status.OK, f"{record.label} has the status {str(record.status)!r}: {record.reason}"
        assert record.specs or self._hooks(), f"{record.label} offers nothing and implements no hook"

    def test_its_api_number(self) -> None:
        """``DRIVETRAIN_API`` is the present one, or the one before."""
        assert self.record.api in (API_VERSION, API_VERSION - 1), f"DRIVETRAIN_API is {self.record.api!r}"

    def test_its_entry_module_is_light(self) -> None:
        """It imports neither torch nor the vendor's SDK: every command and every training process imports it."""
        done = subprocess.run(
            [sys.executable, "-c", _IMPORTED.format(module=self.record.module)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        assert done.returncode == 0, f"{self.record.module} can't be imported by itself:\n{done.stderr}"
        imported = {name.partition(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}
        assert not imported & set(self.heavy), f"{self.record.module} imports {sorted(imported & set(self.heavy))}"

    def test_what_it_names_can_be_imported_and_fits(self) -> None:
        """``drivetrain plugins check``: targets derive from their interfaces, options from `drivetrain.config.Options`, exports exist."""
        problems = check_plugin(self.registry, self.record)
        assert not problems, "\n".join(problems)

    def test_every_spec_has_a_summary(self) -> None:
        """One line, without a period at its end, as listings print it (a command's may be a sentence)."""
        for spec in self.record.specs:
            who = f"{kind_of(spec)} {spec.name!r}"
            assert spec.summary.strip(), f"{who} has no summary"
            assert "\n" not in spec.summary and len(spec.summary) <= 100, f"{who}: the summary isn't one short line"

    def test_options_have_plain_types(self) -> None:
        """Each field can be given in a configuration file: its annotation is a type that the schema knows."""
        for spec, options in self._options():
            unknown = [name for name in options.hints() if not _is_plain(options, name)]
            assert not unknown, (
                f"{kind_of(spec)} {spec.name!r}: {options.__name__} has fields of other than plain types: {unknown}"
            )

    def test_options_are_documented(self) -> None:
        """The docstring names each field."""
        for spec, options in self._options():
            text = options.__doc__ or ""
            silent = [name for name in options.hints() if f"{name}:" not in text and f"{name}," not in text]
            assert not silent, (
                f"{kind_of(spec)} {spec.name!r}: the docstring of {options.__name__} says nothing about {silent}"
            )

    def _options(self) -> Iterator[tuple[AnySpec, type[Options]]]:
        for spec in self.record.specs:
            if spec.options:
                yield spec, load_target(spec.options)

    # -- hooks -----------------------------------------------------------------------------------------------------------------

    def _hooks(self) -> list[str]:
        return [
            name for name, value in vars(self.module).items() if getattr(value, "drivetrain_impl", None) is not None
        ]

    def test_hooks_answer_alike_each_time(self) -> None:
        """Ranks must get equal answers, so a hook depends on nothing but its arguments; it writes no environment variable."""
        before = dict(os.environ)
        for name in self._hooks():
            hook = getattr(self.module, name)
            if name.startswith("drivetrain_register_"):
                assert list(hook()) == list(hook()), f"{name} gave two answers"
        detect = getattr(self.module, "drivetrain_detect_backend", None)
        if detect is not None:
            for world_size in (1, 2):
                request = Request(process=ProcessInfo(world_size=world_size), device="cpu", environ={})
                answers = [list(detect(**_arguments(detect, request)) or ()) for _ in range(2)]
                assert answers[0] == answers[1], (
                    f"drivetrain_detect_backend gave two answers for {world_size} processes"
                )
                offered = [spec.name for spec in self.record.specs if isinstance(spec, BackendSpec)]
                for detection in answers[0]:
                    assert detection.name in offered, (
                        f"it speaks for the backend {detection.name!r}, which it doesn't offer"
                    )
                    assert detection.reason.strip(), f"the detection of {detection.name!r} gives no reason"
        assert dict(os.environ) == before, "a hook changed os.environ"

    def test_clusters_say_how_to_know_them(self) -> None:
        """A cluster has variables, a target, or is the plain process."""
        for spec in self.record.specs:
            if isinstance(spec, ClusterSpec) and not spec.target:
                assert bool(spec.rank) == bool(spec.world_size), (
                    f"cluster {spec.name!r} has a rank without a world size"
                )

    # -- sources ---------------------------------------------------------------------------------------------------------------

    def test_it_uses_public_modules_alone(self) -> None:
        """No module of the plugin's package imports one of Drivetrain's whose name begins with an underscore."""
        package = self.record.module.partition(".")[0]
        wrong = []
        for file in _sources(package):
            for module in _imported_modules(file):
                parts = module.split(".")
                private = parts[0] == "drivetrain" and any(p.startswith("_") for p in parts)
                if private and not self.record.module.startswith(".".join(parts[:2])):
                    wrong.append(f"{file.name} imports {module}")
        assert not wrong, f"private modules may change with any version: {wrong}"


def _arguments(hook: Any, request: Request) -> dict[str, Any]:
    return {"request": request} if "request" in hook.__code__.co_varnames[: hook.__code__.co_argcount] else {}


def _is_plain(options: type[Options], name: str) -> bool:
    """Whether the schema checks the field: it then refuses what nothing can be made of."""
    try:
        options.convert(name, object())
    except ConfigurationError:
        return True
    return False


def _sources(package: str) -> list[Path]:
    module = importlib.import_module(package)
    if package == "drivetrain":
        module = importlib.import_module("drivetrain._builtin")
    folders = [Path(p) for p in getattr(module, "__path__", ())]
    if not folders:
        return [Path(module.__file__)] if module.__file__ else []
    return sorted(file for folder in folders for file in folder.rglob("*.py"))


def _imported_modules(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
