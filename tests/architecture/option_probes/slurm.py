"""Settings of jobs of SLURM, seen in the batch script that `--dry-run` prints. That SLURM does what it says is tested on a real one."""

from __future__ import annotations

from drivetrain.errors import ConfigurationError
from drivetrain.interfaces import LaunchRequest
from drivetrain_slurm.launcher import SlurmLauncher
from drivetrain_slurm.plugin import drivetrain_register_launchers

from . import effect


def script(**options):
    """The batch script for two ranks on one machine."""
    (spec,) = drivetrain_register_launchers()
    request = LaunchRequest(command=["train.py"], num_processes=2, options=options)
    return SlurmLauncher(spec).describe(request).splitlines()


def directive(name, **options):
    """The value that sbatch gets for a word; True for one without."""
    words = [line.removeprefix("#SBATCH --") for line in script(**options) if line.startswith("#SBATCH --")]
    found = [word.partition("=")[2] or True for word in words if word.partition("=")[0] == name]
    return found[0] if found else None


def srun(name, **options):
    (line,) = [line for line in script(**options) if line.strip().startswith("srun")]
    found = [word.partition("=")[2] for word in line.split() if word.startswith(f"--{name}=")]
    return found[0] if found else None


for _field, _one, _other in (
    ("partition", "gpu", "cpu"),
    ("account", "me", "you"),
    ("qos", "high", "low"),
    ("time", "30", "2:00:00"),
    ("job_name", "a", "b"),
    ("gpus_per_task", 1, 2),
    ("gpus_per_node", "4", "a100:8"),
    ("mem", "1G", "2G"),
    ("constraint", "ib", "fast"),
    ("output", "a.out", "b.out"),
):
    effect(f"SlurmOptions.{_field}", (_one, str(_one)), (_other, str(_other)))(
        lambda value, folder, field=_field: directive(field.replace("_", "-"), **{field: value})
    )


@effect("SlurmOptions.cpus_per_task", (3, ("3", "3")), (4, ("4", "4")))
def cpus_per_task(value, folder):
    return directive("cpus-per-task", cpus_per_task=value), srun("cpus-per-task", cpus_per_task=value)


@effect("SlurmOptions.array", ("0-3", "0-3"), ("1,5", "1,5"))
def array(value, folder):
    return directive("array", array=value, wait=False)


@effect("SlurmOptions.directives", (("--exclusive",), True), ((), None))
def directives(value, folder):
    return directive("exclusive", directives=value)


@effect("SlurmOptions.container_image", ("a.sqsh", "a.sqsh"), ("b.sqsh", "b.sqsh"))
def container_image(value, folder):
    return srun("container-image", container_image=value)


@effect("SlurmOptions.container_mounts", ("/a:/a", "/a:/a"), ("/b:/b", "/b:/b"))
def container_mounts(value, folder):
    return srun("container-mounts", container_mounts=value)


@effect("SlurmOptions.wait", (False, "fine"), (True, "can't be shown as one"))
def wait(value, folder):
    try:
        script(wait=value, array="0-1")
    except ConfigurationError as error:
        return "can't be shown as one" if "can't be shown as one" in str(error) else str(error)
    return "fine"


@effect("SlurmOptions.requeue", (True, (True, True)), (False, (None, False)))
def requeue(value, folder):
    text = script(requeue=value)
    return directive("requeue", requeue=value), any("scontrol requeue" in line for line in text)


@effect("SlurmOptions.grace", (60, "B:USR1@60"), (90, "B:USR1@90"))
def grace(value, folder):
    return directive("signal", grace=value)


@effect("SlurmOptions.template", ("mine", "# mine"), ("other", "# other"))
def template(value, folder):
    (folder / "template").write_text(f"#!/bin/sh\n# {value}\n${{directives}}\n${{environment}}\n${{body}}\n")
    return script(template=str(folder / "template"))[1]
