"""Who is this process among all of the job: a pure function of the environment and the clusters' descriptors."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from drivetrain._lazy import load_target
from drivetrain.errors import EnvironmentDetectionError
from drivetrain.specs import ClusterSpec, ProcessInfo

__all__ = ["ProcessSurvey", "detect_process", "survey_process"]

_FIELDS = ("rank", "world_size", "local_rank", "local_world_size", "node_rank")
_START = "Start the script with `drivetrain launch` (or torchrun), which sets all of them"
#: Derived rendezvous ports lie below the ephemeral ranges of the common systems.
_FIRST_PORT, _PORTS = 20000, 10000
_DEFAULT_PORT = 29500


class ProcessSurvey(NamedTuple):
    """What the environment says about this process.

    Args:
        process: The answer.
        rejected: Names of cluster specs that said something else, with the reason why they don't count.
        notes: What was assumed because the environment doesn't say it.
    """

    process: ProcessInfo
    rejected: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


class _Claim(NamedTuple):
    """One cluster spec's reading of the environment: by field, the variable and its value."""

    spec: ClusterSpec
    values: Mapping[str, tuple[str, int]]
    computed: ProcessInfo | None = None

    @property
    def whole(self) -> bool:
        return self.computed is not None or all(field in self.values for field in self.spec.required)

    def __str__(self) -> str:
        return ", ".join(f"{variable}={value}" for variable, value in self.values.values())


def detect_process(clusters: Iterable[ClusterSpec], environ: Mapping[str, str]) -> ProcessInfo:
    """Find out rank and world size from the environment.

    Args:
        clusters: Descriptors of clusters; their order doesn't matter.
        environ: The environment variables.

    Raises:
        EnvironmentDetectionError: If the environment says half of what is needed or contradicts itself; names the variables and values.

    Example:
        >>> toy = ClusterSpec(name="toy", rank=("TOY_RANK",), world_size=("TOY_SIZE",), job_id=("TOY_JOB",))
        >>> process = detect_process([toy], {"TOY_RANK": "1", "TOY_SIZE": "2", "TOY_JOB": "a"})
        >>> process.rank, process.world_size, process.rendezvous
        (1, 2, 'tcp://127.0.0.1:25907')
    """
    return survey_process(clusters, environ).process


def survey_process(
    clusters: Iterable[ClusterSpec], environ: Mapping[str, str], *, init_method: str | None = None
) -> ProcessSurvey:
    """Like `detect_process`, with what was rejected or assumed.

    Args:
        clusters: Descriptors of clusters; their order doesn't matter.
        environ: The environment variables.
        init_method: Where processes meet, if the user says so; then no variables are needed for it.

    Raises:
        EnvironmentDetectionError: See `detect_process`.
    """
    ordered = sorted(clusters, key=lambda spec: (-spec.priority, spec.name))
    claims = [claim for spec in ordered if (claim := _read(spec, environ)) is not None]
    whole = [claim for claim in claims if claim.whole]
    chosen = whole[0] if whole else None
    rejected: list[tuple[str, str]] = []
    notes: list[str] = []
    for other in claims:
        if other is chosen:
            continue
        verdict = _judge(other, chosen)
        if verdict:
            rejected.append((other.spec.name, verdict))
    if chosen is None:
        return ProcessSurvey(ProcessInfo(), tuple(rejected))
    helpers = [c for c in claims if c is not chosen and _agree(c, chosen, ("rank", "world_size"))]
    process = _complete(chosen, helpers, notes)
    _validate(process, chosen)
    rendezvous = init_method or _rendezvous(chosen, process, environ, notes)
    return ProcessSurvey(replace(process, rendezvous=rendezvous), tuple(rejected), tuple(notes))


def _read(spec: ClusterSpec, environ: Mapping[str, str]) -> _Claim | None:
    """What one spec reads, or None if it doesn't apply."""
    marker = spec.marker or spec.rank
    if not any(environ.get(name, "").strip() for name in marker) and (marker or not spec.target):
        return None
    if spec.target:
        return _compute(spec, environ)
    values = {}
    for field in _FIELDS:
        for variable in getattr(spec, field):
            text = environ.get(variable, "").strip()
            if text:
                values[field] = (variable, _integer(variable, text))
                break
    return _Claim(spec, values) if values else None


def _compute(spec: ClusterSpec, environ: Mapping[str, str]) -> _Claim | None:
    function: Callable[[Mapping[str, str]], ProcessInfo | None] = load_target(spec.target)
    process = function(environ)
    if process is None:
        return None
    if process.cluster == "single":
        process = replace(process, cluster=spec.name)
    return _Claim(spec, {field: (field, getattr(process, field)) for field in _FIELDS}, process)


def _integer(variable: str, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise EnvironmentDetectionError(
            f"{variable}={text!r} must be an integer, 0 or more. {_START}, or unset {variable}."
        )
    return value


def _judge(other: _Claim, chosen: _Claim | None) -> str:
    """Why a claim that wasn't chosen doesn't count; empty if it merely says the same.

    Raises:
        EnvironmentDetectionError: If it can't be explained away: half-set, or a contradiction of equals.
    """
    if chosen is not None and _agree(other, chosen, _FIELDS):
        return ""
    if chosen is None:
        if _means_one_process(other):
            return f"{other} is what a plain process has too"
        raise EnvironmentDetectionError(_half_set(other))
    if other.spec.priority < chosen.spec.priority:
        return f"{other} contradicts {chosen}, and {chosen.spec.name} stands above {other.spec.name}"
    if not other.whole:
        raise EnvironmentDetectionError(f"{_half_set(other)} ({chosen} of {chosen.spec.name} says something else.)")
    raise EnvironmentDetectionError(
        f"{other} ({other.spec.name}) contradicts {chosen} ({chosen.spec.name}), and both have the priority "
        f"{chosen.spec.priority}. Unset the variables of one of them."
    )


def _agree(one: _Claim, two: _Claim, fields: Iterable[str]) -> bool:
    return all(one.values[f][1] == two.values[f][1] for f in fields if f in one.values and f in two.values)


def _means_one_process(claim: _Claim) -> bool:
    """Half of the variables, but of one process: the world size says so, or they speak of this machine alone."""
    value = {field: value for field, (_, value) in claim.values.items()}
    if "world_size" not in value and "rank" in value:
        return False
    return (
        value.get("world_size", 1) == 1
        and value.get("local_world_size", 1) == 1
        and not (value.get("rank") or value.get("local_rank") or value.get("node_rank"))
    )


def _half_set(claim: _Claim) -> str:
    missing = [f for f in claim.spec.required if f not in claim.values]
    names = [_names(claim, field) for field in missing]
    single = ", ".join(variable for variable, _ in claim.values.values())
    return (
        f"{claim} is set, but {_lacking(names)}, so the process can't tell who it is among the others. {_START}, "
        f"or set {' and '.join(names)}; to train in one process, unset {single}."
    )


def _complete(chosen: _Claim, helpers: list[_Claim], notes: list[str]) -> ProcessInfo:
    """Fill what the chosen claim doesn't say from claims that agree with it, then by assumption."""
    if chosen.computed is not None:
        return chosen.computed
    value = {field: value for field, (_, value) in chosen.values.items()}
    for helper in helpers:
        for field, (_, number) in helper.values.items():
            value.setdefault(field, number)
    rank, world_size = value.get("rank", 0), value.get("world_size", 1)
    name = chosen.spec.name
    if "local_rank" not in value:
        if value.get("local_world_size", world_size) < world_size or value.get("node_rank"):
            raise EnvironmentDetectionError(
                f"{chosen} says that there are several machines, but not which process of its machine this is: set "
                f"{_names(chosen, 'local_rank')}. {_START}."
            )
        value["local_rank"] = rank
        if world_size > 1:
            notes.append(
                f"{name}: {_names(chosen, 'local_rank')} isn't set, so all processes are taken to be on one machine."
            )
    if "local_world_size" not in value:
        value["local_world_size"] = _processes_per_machine(rank, world_size, value["local_rank"])
        if value["local_world_size"] != world_size:
            notes.append(
                f"{name}: {_names(chosen, 'local_world_size')} isn't set; {value['local_world_size']} processes per machine were inferred."
            )
    value.setdefault("node_rank", max(0, rank - value["local_rank"]) // max(1, value["local_world_size"]))
    return ProcessInfo(
        rank=rank,
        world_size=world_size,
        local_rank=value["local_rank"],
        local_world_size=value["local_world_size"],
        node_rank=value["node_rank"],
        cluster=name,
        reason=str(chosen),
    )


def _lacking(names: list[str]) -> str:
    return f"{' and '.join(names)} {'isn' if len(names) == 1 else 'aren'}'t set"


def _names(claim: _Claim, field: str) -> str:
    return "/".join(getattr(claim.spec, field)) or field


def _processes_per_machine(rank: int, world_size: int, local_rank: int) -> int:
    """The largest number that fits: it divides the world and this machine's first rank, and exceeds the local rank."""
    first = rank - local_rank
    fitting = [n for n in range(local_rank + 1, world_size + 1) if world_size % n == 0 and first % n == 0]
    return fitting[-1] if fitting else local_rank + 1


def _validate(process: ProcessInfo, claim: _Claim) -> None:
    checks = (
        (process.world_size >= 1, f"a world of {process.world_size} processes is empty"),
        (process.rank < process.world_size, f"ranks go from 0 to {process.world_size - 1}"),
        (process.local_world_size >= 1, "a machine has at least one process"),
        (
            process.local_world_size <= process.world_size,
            f"{process.local_world_size} processes on this machine are more than {process.world_size} in all",
        ),
        (process.local_rank < process.local_world_size, f"local ranks go from 0 to {process.local_world_size - 1}"),
        (min(process.rank, process.local_rank, process.node_rank) >= 0, "ranks can't be negative"),
    )
    for fine, problem in checks:
        if not fine:
            raise EnvironmentDetectionError(f"{claim} ({claim.spec.name}) can't be: {problem}. {_START}.")


def _rendezvous(claim: _Claim, process: ProcessInfo, environ: Mapping[str, str], notes: list[str]) -> str:
    """Where processes meet: MASTER_ADDR and MASTER_PORT, or on one machine a port that follows from the job's id."""
    if process.rendezvous != "env://" or not process.is_distributed:
        return process.rendezvous
    address, port = environ.get("MASTER_ADDR", "").strip(), environ.get("MASTER_PORT", "").strip()
    if port and not 0 < _integer("MASTER_PORT", port) < 65536:
        raise EnvironmentDetectionError(f"MASTER_PORT={port!r} must be a port, 1 to 65535.")
    if address and port:
        return "env://"
    missing = [name for name, text in (("MASTER_ADDR", address), ("MASTER_PORT", port)) if not text]
    if not claim.spec.job_id:
        raise EnvironmentDetectionError(
            f"{claim}: the processes can't meet, since {_lacking(missing)}. {_START}, or set MASTER_ADDR to the host of rank 0 and "
            "MASTER_PORT to a free port there, alike in every process."
        )
    if process.local_world_size < process.world_size and not address:
        raise EnvironmentDetectionError(
            f"{claim}: there are several machines, and the processes can't meet, since MASTER_ADDR isn't set. Set it to the host of "
            "rank 0 in every process (Open MPI: `mpirun -x MASTER_ADDR=host ...`, MPICH and Intel MPI: `-genv MASTER_ADDR host`)."
        )
    address = f"[{address}]" if ":" in address else address or "127.0.0.1"
    return f"tcp://{address}:{port or _derived_port(claim.spec, environ, notes)}"


def _derived_port(spec: ClusterSpec, environ: Mapping[str, str], notes: list[str]) -> int:
    job = next((text for name in spec.job_id if (text := environ.get(name, "").strip())), "")
    if job:
        return _FIRST_PORT + zlib.crc32(job.encode()) % _PORTS
    notes.append(
        f"{spec.name}: no variable tells jobs apart, so processes meet at port {_DEFAULT_PORT}; set MASTER_PORT for a second job "
        "on this machine."
    )
    return _DEFAULT_PORT
