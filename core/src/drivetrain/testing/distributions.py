"""Throw-away plugin distributions: a folder that looks as if pip had installed them there, without pip."""

from __future__ import annotations

import importlib.metadata
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["entry_points_in", "write_plugin"]


def write_plugin(
    directory: Path,
    name: str,
    source: str,
    *,
    distribution: str | None = None,
    version: str = "1.0",
    requires: Iterable[str] = (),
    module: str | None = None,
    files: Mapping[str, str] | None = None,
) -> str:
    """Write a distribution with one plugin. Put ``directory`` on ``sys.path`` (or ``PYTHONPATH``) to have it installed.

    Args:
        directory: An existing folder; several distributions may share it.
        name: Name of the entry point.
        source: Source of the entry module; indentation is removed.
        distribution: Name of the distribution; default: ``<name>-plugin``.
        version: Its version.
        requires: Its requirements, as PEP 508 strings.
        module: Name of the entry module; default: made of the distribution's name, so that it is unique.
        files: Further files by path relative to ``directory``.

    Returns:
        The entry module's name.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_plugin(Path(folder), "toy", "DRIVETRAIN_API = 1")
        ...     [(point.name, point.dist.version) for point in entry_points_in(Path(folder))]
        'toy_plugin_entry'
        [('toy', '1.0')]
    """
    distribution = distribution or f"{name}-plugin"
    stem = distribution.replace("-", "_").lower()
    module = module or f"{stem}_entry"
    info = directory / f"{stem}-{version}.dist-info"
    info.mkdir(exist_ok=True)
    requirements = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{requirements}"
    (info / "METADATA").write_text(metadata, encoding="utf-8")
    points = info / "entry_points.txt"
    head = points.read_text(encoding="utf-8") if points.exists() else "[drivetrain.plugins]\n"
    points.write_text(f"{head}{name} = {module}\n", encoding="utf-8")
    for path, text in {f"{module.replace('.', '/')}.py": source, **(files or {})}.items():
        file = directory / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(text), encoding="utf-8")
    return module


def entry_points_in(*directories: Path) -> list[importlib.metadata.EntryPoint]:
    """The plugins' entry points of the distributions in some folders, with their distributions attached."""
    found = importlib.metadata.distributions(path=[str(directory) for directory in directories])
    return [
        point for distribution in found for point in distribution.entry_points if point.group == "drivetrain.plugins"
    ]
