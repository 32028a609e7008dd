"""Wheels of all packages, and a clean environment that they are installed into."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / "core", *sorted(p.parent for p in ROOT.glob("plugins/*/pyproject.toml"))]
CONSTRAINTS = ROOT / "tests" / "constraints.txt"

#: Variables of this process that a user's shell wouldn't have.
OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "OMP_NUM_THREADS")


class Environment:
    """A clean environment, and a folder in which its programs are run."""

    def __init__(self, folder: Path, wheels: Path) -> None:
        self.folder = folder
        self._wheels = wheels
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)

    def pip_install(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            self.folder / "bin" / "python",
            "install",
            "-c",
            CONSTRAINTS,
        ]
        options = ["--quiet", "--disable-pip-version-check", "--no-compile", "--find-links", self._wheels]
        return subprocess.run(
            [*command, *options, *arguments], check=True, capture_output=True, text=True, env=self._variables()
        )

    def run(
        self, program: str, *arguments: object, cwd: Path, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        command = [self.folder / "bin" / program, *map(str, arguments)]
        return subprocess.run(
            command,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=self._variables(),
            stdin=subprocess.DEVNULL,
        )

    def _variables(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k not in OURS and not k.startswith("DRIVETRAIN_")}
        return {**kept, "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def build_wheel(package: Path, folder: Path) -> None:
    """Build one wheel."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, package]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="session")
def wheels(tmp_path_factory) -> Path:
    """A folder with a wheel of each package."""
    folder = tmp_path_factory.mktemp("wheels")
    for package in PACKAGES:
        build_wheel(package, folder)
    return folder


@pytest.fixture(scope="session")
def clean(wheels, tmp_path_factory) -> Environment:
    """One environment that grows from test to test, in their order: torch alone takes a minute to install."""
    return Environment(tmp_path_factory.mktemp("clean") / "env", wheels)


@pytest.fixture(scope="session")
def packages() -> list[Path]:
    """Folders of the distributions."""
    return PACKAGES


@pytest.fixture(scope="session")
def new_environment(wheels):
    """A function that makes a clean environment in a folder."""
    return lambda folder: Environment(folder, wheels)
