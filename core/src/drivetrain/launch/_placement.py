"""Which machine of a job this is, where a cluster starts ``drivetrain launch`` on each of them and says so in variables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from drivetrain._lazy import load_target
from drivetrain.config.origins import Origin, Source
from drivetrain.launch.options import LaunchOptions
from drivetrain.specs import ClusterSpec

__all__ = ["Placement", "placement"]

_FIELDS = ("num_machines", "machine_rank", "main_process_ip", "main_process_port")


class Placement(NamedTuple):
    """What follows from a cluster's word.

    Args:
        options: The launch options, completed.
        per_machine: Processes on each machine, if the cluster says that and the user doesn't.
        reason: A sentence for the user; empty if nothing followed.
    """

    options: LaunchOptions
    per_machine: str | None
    reason: str = ""


def placement(
    clusters: Iterable[ClusterSpec],
    environ: Mapping[str, str],
    options: LaunchOptions,
    origins: Mapping[str, Origin],
    per_machine: str | None,
) -> Placement:
    """Complete launch options by what the cluster says; what the user says about machines stands, and then nothing is taken from the cluster.

    Args:
        clusters: Descriptors of clusters.
        environ: The environment variables.
        options: What the user says.
        origins: Where each of these values came from.
        per_machine: ``--nproc-per-node``, if given.

    Raises:
        EnvironmentDetectionError: If the cluster's variables contradict each other.

    Example:
        >>> placement([ClusterSpec(name="toy", rank=("TOY_RANK",))], {}, LaunchOptions(), {}, None).reason
        ''
    """
    untouched = Placement(options, per_machine)
    if any(origins[name].source is not Source.DEFAULT for name in (*_FIELDS, "min_machines") if name in origins):
        return untouched
    for spec in sorted(clusters, key=lambda spec: (-spec.priority, spec.name)):
        marked = not spec.marker or any(environ.get(name, "").strip() for name in spec.marker)
        said: Mapping[str, Any] | None = load_target(spec.machine)(environ) if spec.machine and marked else None
        if said is None:
            continue
        changes = {name: said[name] for name in _FIELDS if name in said}
        if options.num_processes is None and per_machine is None:
            per_machine = said.get("per_machine")
        place = f"machine {said.get('machine_rank', 0)} of {said.get('num_machines', 1)}"
        return Placement(options.replaced(**changes), per_machine, f"{place}: {spec.name} says so ({said['reason']}).")
    return untouched
