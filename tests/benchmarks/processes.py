"""Whole processes, run in turn: import and construction, the command line, a launch up to the first step."""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from . import stats
from .table import Row

TIMEOUT = 180.0  # seconds
FIRST_STEP = Path(__file__).parent / "first_step.py"


@dataclass(frozen=True, slots=True)
class Usage:
    """What one process, with the children it waited for, took: seconds of CPU and of wall time."""

    cpu: float
    wall: float


def run(command: list[str], environment: Mapping[str, str] | None = None) -> Usage:
    """Run ``command`` to its end.

    Raises:
        RuntimeError: If it fails or takes longer than `TIMEOUT`; the message holds what it printed.
    """
    with tempfile.TemporaryFile() as output:
        started = time.perf_counter()
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**_environment(), **(environment or {})},
            start_new_session=True,
        )
        watchdog = threading.Timer(TIMEOUT, os.killpg, (process.pid, signal.SIGKILL))
        watchdog.start()
        _, status, used = os.wait4(process.pid, 0)
        watchdog.cancel()
        wall = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)  # so that Popen doesn't wait once more
        if process.returncode:
            output.seek(0)
            printed = output.read().decode(errors="replace")[-4000:]
            raise RuntimeError(f"{command} ended with {process.returncode} after {wall:.0f} s:\n{printed}")
    return Usage(used.ru_utime + used.ru_stime, wall)


def _environment() -> dict[str, str]:
    """This process's variables, but modules may be compiled once and for all, as where they were installed."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def interleave(runs: Mapping[str, Callable[[], Usage]], repeats: int) -> dict[str, list[Usage]]:
    """Call each of ``runs`` ``repeats`` times in shuffled rounds, after one round that only warms the file cache."""
    found: dict[str, list[Usage]] = {name: [] for name in runs}
    shuffle = random.Random(0)
    for index in range(repeats + 1):
        for name in shuffle.sample(list(runs), len(runs)):
            usage = runs[name]()
            if index:
                found[name].append(usage)
    return found


def available(modules: Mapping[str, str]) -> list[str]:
    """The keys whose module can be imported here."""
    return [name for name, module in modules.items() if importlib.util.find_spec(module) is not None]


def construction(repeats: int) -> list[Row]:
    """``import`` and construction of each peer after ``import torch``, both timed in the same process.

    So what slows down a process slows down both parts, and a few percent can be told from noise.
    """
    section = "import and construction, against import torch"
    code = {
        "drivetrain": "from drivetrain import Accelerator; Accelerator(cpu=True)",
        "accelerate": "from accelerate import Accelerator; Accelerator(cpu=True)",
        "lightning_fabric": "from lightning_fabric import Fabric; Fabric(accelerator='cpu', devices=1)",
    }
    names = available({name: name for name in code})
    parts: dict[str, list[tuple[Usage, Usage]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        interleave({name: _import_parts(code[name], Path(folder) / "out", parts[name]) for name in names}, repeats)
    rows = []
    for name in names:
        torch, both = zip(*parts[name][1:], strict=True)  # the first round warmed the file cache
        if not rows:
            rows.append(Row(section, "import torch, CPU time", stats.median([u.cpu * 1000 for u in torch]), "ms"))
        target = 1.05 if name == "drivetrain" else None
        cpu = stats.ratio([u.cpu for u in both], [u.cpu for u in torch])
        wall = stats.ratio([u.wall for u in both], [u.wall for u in torch])
        rows.append(Row(section, f"{name}, CPU time", cpu, target=target))
        rows.append(Row(section, f"{name}, wall time", wall))
    return rows


def command_line(repeats: int) -> list[Row]:
    """The command line's CPU time against that of importing what any such program must."""
    rows = []
    for distributions in (0, 200):
        with fake_distributions(distributions) as environment:
            runs = {
                "click and entry points": _python(
                    'import click, importlib.metadata as m; m.entry_points(group="x")', environment=environment
                )
            }
            if available({"drivetrain": "drivetrain"}):
                entry = "import sys; from drivetrain.cli import main; sys.argv[0] = 'drivetrain'; sys.exit(main())"
                runs["drivetrain --help"] = _python(entry, "--help", environment=environment)
                runs["drivetrain plugins"] = _python(entry, "plugins", environment=environment)
            if available({"accelerate": "accelerate"}):
                entry = "from accelerate.commands.accelerate_cli import main; main()"
                runs["accelerate --help"] = _python(entry, "--help", environment=environment)
            found = interleave(runs, repeats)
        title = "command line" + (f", {distributions} more distributions installed" if distributions else "")
        targets = {"drivetrain --help": 2.0, "drivetrain plugins": 3.0}
        rows += _against(title, found, "click and entry points", targets)
    return rows


def notes(repeats: int) -> list[Row]:
    """What a collective and a step pay for the notes that a launcher reads when ranks part: CPU time, from below two frames of a library."""
    from drivetrain import _marks

    with tempfile.TemporaryFile() as file:
        file.truncate(_marks.SIZE)
        kept = _marks.Marks(mmap.mmap(file.fileno(), _marks.SIZE))
    space: dict[str, Callable[[], None]] = {"mark": kept.mark}  # type: ignore[dict-item]
    code = "def outer():\n    inner()\ndef inner():\n    mark('backward', 0)\n"
    exec(compile(code, _marks.__file__, "exec"), space)
    series = {"a collective": space["outer"], "a step": lambda: kept.stepped(1)}
    section, calls = "notes for the launcher, in jobs of several processes", 5000
    rows = []
    for name, call in series.items():
        times = []
        for _ in range(3 * repeats):
            started = time.process_time()
            for _ in range(calls):
                call()
            times.append((time.process_time() - started) / calls * 1e6)
        rows.append(Row(section, f"{name}, CPU time", stats.median(times), "us", target=2.0))
    return rows


def launch(repeats: int) -> list[Row]:
    """From the command to the end of the first step on two processes, wall time, against torchrun."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    drivetrain = [sys.executable, "-c", "import sys; from drivetrain.cli import main; sys.exit(main())", "launch"]
    fabric = [sys.executable, "-m", "lightning_fabric.cli"]
    commands = {
        "torchrun, hand-written script": (torchrun, "hand", "torch"),
        "drivetrain launch, hand-written script": (
            [*drivetrain, "--cpu", "--num_processes", "2"],
            "hand",
            "drivetrain",
        ),
        "drivetrain launch, its own script": (
            [*drivetrain, "--cpu", "--num_processes", "2"],
            "drivetrain",
            "drivetrain",
        ),
        # Its own launcher starts a single process on CPUs unless MPI is there.
        "torchrun, accelerate's script": (torchrun, "accelerate", "accelerate"),
        "fabric run, its own script": (
            [*fabric, "--accelerator", "cpu", "--devices", "2", "--strategy", "ddp"],
            "fabric",
            "lightning_fabric",
        ),
    }
    names = available({name: module for name, (_, _, module) in commands.items()})
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: _to_first_step(commands[name][0], commands[name][1], Path(folder)) for name in names}
        found = interleave(runs, repeats)
    base = "torchrun, hand-written script"
    targets = {name: 1.10 for name in names if name.startswith("drivetrain")}
    section = "two processes, from the command to the first step"
    rows = [Row(section, f"{base}, wall time", stats.median([u.wall for u in found[base]]), "s")]
    for name in names:
        if name != base:
            interval = stats.ratio([u.wall for u in found[name]], [u.wall for u in found[base]])
            rows.append(Row(section, f"{name}, wall time", interval, target=targets.get(name)))
    return rows


@contextmanager
def fake_distributions(number: int) -> Iterator[dict[str, str]]:
    """An environment in which ``number`` more distributions are installed, as far as their metadata goes."""
    with tempfile.TemporaryDirectory() as folder:
        for index in range(number):
            info = Path(folder) / f"fake_package_{index}-1.{index}.0.dist-info"
            info.mkdir()
            lines = [f"Metadata-Version: 2.1\nName: fake-package-{index}\nVersion: 1.{index}.0\n"]
            lines += [f"Requires-Dist: fake-package-{i}\n" for i in range(5)]
            (info / "METADATA").write_text("".join(lines))
            (info / "RECORD").write_text("".join(f"fake/{i}.py,sha256=abc,{i}\n" for i in range(50)))
            if index % 2:
                (info / "entry_points.txt").write_text(
                    f"[console_scripts]\nfake{index} = fake:main\n\n[fake.group]\na = fake:b\n"
                )
        paths = [folder] if number else []
        yield {"PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])}


def _python(code: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Callable[[], Usage]:
    return lambda: run([sys.executable, "-c", code, *arguments], environment)


def _import_parts(code: str, out: Path, into: list[tuple[Usage, Usage]]) -> Callable[[], Usage]:
    """Run ``code`` after ``import torch``; append what torch took and what both took together."""
    now = "(time.process_time(), time.perf_counter())"
    program = f"import time; a = {now}\nimport torch\nb = {now}\n{code}\nc = {now}\n"
    program += "import json, sys; json.dump([a, b, c], open(sys.argv[1], 'w'))"

    def measure() -> Usage:
        usage = run([sys.executable, "-c", program, str(out)])
        start, torch, both = json.loads(out.read_text())
        into.append((Usage(torch[0] - start[0], torch[1] - start[1]), Usage(both[0] - start[0], both[1] - start[1])))
        return usage

    return measure


def _to_first_step(launcher: list[str], peer: str, folder: Path) -> Callable[[], Usage]:
    def measure() -> Usage:
        mark = folder / "first_step"
        mark.unlink(missing_ok=True)
        started = time.time()
        usage = run([*launcher, str(FIRST_STEP), peer, str(mark)], {"OMP_NUM_THREADS": "1"})
        return Usage(usage.cpu, float(mark.read_text()) - started)

    return measure


def _against(section: str, found: dict[str, list[Usage]], base: str, targets: Mapping[str, float]) -> list[Row]:
    rows = [Row(section, f"{base}, CPU time", stats.median([u.cpu * 1000 for u in found[base]]), "ms")]
    for name, usages in found.items():
        if name == base:
            continue
        cpu = stats.ratio([u.cpu for u in usages], [u.cpu for u in found[base]])
        wall = stats.ratio([u.wall for u in usages], [u.wall for u in found[base]])
        rows.append(Row(section, f"{name}, CPU time", cpu, target=targets.get(name)))
        rows.append(Row(section, f"{name}, wall time", wall))
    return rows
