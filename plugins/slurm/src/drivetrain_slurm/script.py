"""The batch script of a job."""

from __future__ import annotations

import shlex
import string
import sys
from pathlib import Path

from drivetrain.config.settings import STOPPED_FILE
from drivetrain.errors import ConfigurationError
from drivetrain.interfaces import LaunchRequest
from drivetrain_slurm.options import SlurmOptions

__all__ = ["batch_script", "output_pattern"]

#: Fields that are sbatch's words as they stand.
_PLAIN = (
    "partition",
    "account",
    "qos",
    "time",
    "cpus_per_task",
    "gpus_per_task",
    "gpus_per_node",
    "mem",
    "constraint",
    "array",
)

_TEMPLATE = """#!/bin/bash
${directives}

${environment}

${body}
"""

#: srun in the background, so that the shell can hear signals; `wait` returns at each of them.
#: The folder for the run's note that it isn't done lies where the job was submitted: all nodes see that.
_BODY = """told=0
notes=${SLURM_SUBMIT_DIR:-$PWD}/.drivetrain-$SLURM_JOB_ID
rm -rf "$notes"; mkdir "$notes"; trap 'rm -rf "$notes"' EXIT
export @stopped@=$notes/stopped
forward() { kill -s "$1" "$step" 2>/dev/null; }
trap 'told=1; forward USR1' USR1
trap 'forward TERM' TERM
for attempt in $(seq 0 @restarts@); do
    [ "$attempt" -eq 0 ] || echo "drivetrain: starting all ranks again ($attempt of @restarts@ restarts)"
    export TORCHELASTIC_RESTART_COUNT=$attempt TORCHELASTIC_MAX_RESTARTS=@restarts@
    @srun@ &
    step=$!
    wait "$step"; code=$?
    while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done
    [ "$code" -eq 0 ] || [ "$told" -eq 1 ] && break
done
@requeue@exit "$code"
"""

#: A script that was told, and came to its end all the same, is done.
_REQUEUE = """if [ "$told" -eq 1 ] && { [ "$code" -ne 0 ] || [ -e "$@stopped@" ]; }; then
    echo "drivetrain: the script was told to save, and isn't done; queueing job $SLURM_JOB_ID again"
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
"""


def batch_script(request: LaunchRequest, options: SlurmOptions) -> str:
    """The whole script.

    Raises:
        ConfigurationError: For a template that can't be read or lacks a place.

    Example:
        >>> text = batch_script(LaunchRequest(command=["train.py"], num_processes=4, num_machines=2), SlurmOptions(time="30"))
        >>> [line for line in text.splitlines() if "node" in line or "time" in line]
        ['#SBATCH --nodes=2', '#SBATCH --ntasks-per-node=2', '#SBATCH --time=30']
    """
    template = _TEMPLATE
    if options.template is not None:
        template = _read(Path(options.template))
    exports = [f"export {name}={shlex.quote(value)}" for name, value in request.environment.items()]
    body = _BODY.replace("@restarts@", str(request.max_restarts)).replace("@srun@", _srun(request, options))
    return string.Template(template).safe_substitute(
        directives="\n".join(f"#SBATCH {line}" for line in _directives(request, options)),
        environment="\n".join(exports),
        body=body.replace("@requeue@", _REQUEUE if options.requeue else "").replace("@stopped@", STOPPED_FILE),
    )


def output_pattern(request: LaunchRequest, options: SlurmOptions) -> str:
    """Where the job's output goes, with SLURM's patterns."""
    folder = request.log_directory or Path()
    return options.output or str(folder / ("slurm-%A_%a.out" if options.array else "slurm-%j.out"))


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"The template {path} (slurm.template) can't be read: {error.strerror}.") from None
    missing = [f"${{{name}}}" for name in ("directives", "environment", "body") if f"${{{name}}}" not in text]
    if missing:
        raise ConfigurationError(f"The template {path} has no place for {', '.join(missing)}.")
    return text


def _directives(request: LaunchRequest, options: SlurmOptions) -> list[str]:
    name = options.job_name or Path(request.command[0]).stem
    lines = [
        f"--job-name={name}",
        f"--nodes={request.num_machines}",
        f"--ntasks-per-node={request.num_processes // request.num_machines}",
    ]
    values = [(field, getattr(options, field)) for field in _PLAIN]
    lines += [f"--{field.replace('_', '-')}={value}" for field, value in values if value is not None]
    # The batch shell alone is told: it hands the signal on, and knows afterwards that it came.
    lines += [f"--signal=B:USR1@{options.grace}", "--requeue" if options.requeue else "--no-requeue"]
    lines += ["--open-mode=append", f"--output={output_pattern(request, options)}", *options.directives]
    return lines


def _srun(request: LaunchRequest, options: SlurmOptions) -> str:
    words = ["srun", "--kill-on-bad-exit=1", f"--ntasks={request.num_processes}"]
    if options.cpus_per_task is not None:
        words.append(f"--cpus-per-task={options.cpus_per_task}")  # srun doesn't take it from sbatch
    if request.log_directory is not None:
        words.append(f"--output={request.log_directory.absolute()}/rank-%t.log")
    elif request.label_output and request.num_processes > 1:
        words.append("--label")
    if options.container_image is not None:
        words.append(f"--container-image={options.container_image}")
    mounts = [options.container_mounts] if options.container_mounts is not None else []
    if options.container_image is not None and options.requeue:
        mounts.append("@notes@")
    if mounts:
        words.append(f"--container-mounts={','.join(mounts)}")
    python = "python3" if options.container_image is not None else sys.executable
    command = (
        request.command if request.plain else [python, "-u", *(["-m"] if request.module else []), *request.command]
    )
    return shlex.join([*words, *command]).replace("@notes@", '"$notes":"$notes"', 1)
