"""What the rules are about: the sources of core, plugins and contrib, found by glob."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Package:
    """One distribution of this repository.

    Args:
        folder: Its folder.
        kind: "core", "plugins" or "contrib".
    """

    folder: Path
    kind: str

    @property
    def metadata(self):
        return tomllib.loads((self.folder / "pyproject.toml").read_text())

    @property
    def module(self) -> str:
        return next(p.name for p in (self.folder / "src").iterdir() if (p / "__init__.py").exists())

    @property
    def files(self) -> list[Path]:
        return sorted((self.folder / "src").rglob("*.py"))

    def modules(self) -> list[str]:
        """Names of all its modules."""
        names = [p.relative_to(self.folder / "src").with_suffix("").parts for p in self.files]
        return sorted(".".join(n[:-1] if n[-1] == "__init__" else n) for n in names)


def _packages() -> list[Package]:
    found = [Package(ROOT / "core", "core")]
    for kind in ("plugins", "contrib"):
        found += [Package(p.parent, kind) for p in sorted(ROOT.glob(f"{kind}/*/pyproject.toml"))]
    return found


PACKAGES = _packages()


@pytest.fixture(scope="session")
def packages() -> list[Package]:
    """Core, plugins and contrib."""
    return PACKAGES


@pytest.fixture(scope="session")
def core() -> Package:
    """The core."""
    return PACKAGES[0]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test with an argument ``package`` runs for each; one with ``any_module`` for each module of all."""
    if "package" in metafunc.fixturenames:
        metafunc.parametrize("package", PACKAGES, ids=[p.module for p in PACKAGES])
    if "any_module" in metafunc.fixturenames:
        metafunc.parametrize("any_module", [m for p in PACKAGES for m in p.modules()])
