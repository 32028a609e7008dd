"""Settings of MPI's launcher, seen in the command line that `--dry-run` prints. That it starts ranks is tested with a real one."""

from __future__ import annotations

from drivetrain.interfaces import LaunchRequest
from drivetrain.launch.mpi import MPILauncher
from drivetrain.specs import LauncherSpec

from . import effect

OPEN_MPI = '#!/bin/sh\necho "mpirun (Open MPI) 5.0"\n'


def words(folder, **options):
    program = folder / "mpirun"
    program.write_text(OPEN_MPI)
    program.chmod(0o755)
    request = LaunchRequest(command=["train.py"], num_processes=2, options={"program": str(program), **options})
    return MPILauncher(LauncherSpec(name="mpi")).describe(request).split()


def after(word, found):
    return found[found.index(word) + 1]


@effect("MPIOptions.program", ("first", "first"), ("second", "second"))
def program(value, folder):
    (folder / value).write_text(OPEN_MPI)
    (folder / value).chmod(0o755)
    return words(folder, program=str(folder / value))[0].rpartition("/")[2]


@effect("MPIOptions.hostfile", ("a", "a"), ("b", "b"))
def hostfile(value, folder):
    (folder / value).write_text("node1\n")
    return after("--hostfile", words(folder, hostfile=str(folder / value))).rpartition("/")[2]


@effect("MPIOptions.hosts", (("a",), "a:1"), (("a", "b"), "a:1,b:1"))
def hosts(value, folder):
    return after("--host", words(folder, hosts=value))


@effect("MPIOptions.arguments", (("--verbose",), True), ((), False))
def arguments(value, folder):
    return "--verbose" in words(folder, arguments=value)
