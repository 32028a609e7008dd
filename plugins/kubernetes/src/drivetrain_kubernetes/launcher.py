"""Submitting a job, showing its output, and ending it with the launcher."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from drivetrain.errors import LaunchError
from drivetrain.interfaces import Launcher, LaunchRequest
from drivetrain_kubernetes.checks import checked
from drivetrain_kubernetes.manifests import job_name, manifests

__all__ = ["KubernetesLauncher"]


class KubernetesLauncher(Launcher):
    """Runs a command as a job of Kubernetes: a pod for each machine, and `drivetrain launch` in it for its processes.

    Args:
        spec: The descriptor.
    """

    def launch(self, request: LaunchRequest) -> int:
        """Submit the job; wait for its end, unless that isn't wanted.

        Returns:
            The exit code of the pod that failed first, else 0; 128 + n after signal n; 0 after submitting, without waiting.

        Raises:
            ConfigurationError: For what can't be asked for.
            LaunchError: If there is no cluster, or it refuses the job, in its own words.
        """
        options = checked(request)
        *others, job = manifests(request, options, job_name(request, options))
        from drivetrain_kubernetes.api import connect
        from drivetrain_kubernetes.watching import Watch, say

        cluster = connect(options.context, options.namespace)
        try:
            made = cluster.create(job)
            self._create_others(cluster, made, job, others)
        except ConnectionError as error:
            raise LaunchError(f"{error}. Is this the right cluster (kubectl cluster-info)?") from None
        name = job["metadata"]["name"]
        say(f"submitted {job['kind']} {name} in namespace {cluster.namespace}")
        if not options.wait:
            return 0
        watch = Watch(
            cluster, job, machines=request.num_machines, label=request.label_output, grace=float(options.grace)
        )
        return watch.run()

    def describe(self, request: LaunchRequest) -> str:
        """The objects as YAML, for ``kubectl apply --filename -``."""
        import yaml

        options = checked(request)
        text: str = yaml.safe_dump_all(
            manifests(request, options, job_name(request, options)), sort_keys=False, width=120
        )
        return text.rstrip("\n")

    def _create_others(
        self, cluster: Any, made: Mapping[str, Any], job: Mapping[str, Any], others: list[dict[str, Any]]
    ) -> None:
        """What the job needs goes with it: the job is made first, and owns the rest. Its pods wait for that."""
        owner = {
            "apiVersion": job["apiVersion"],
            "kind": job["kind"],
            "name": job["metadata"]["name"],
            "uid": made["metadata"]["uid"],
        }
        try:
            for other in others:
                cluster.create({**other, "metadata": {**other["metadata"], "ownerReferences": [owner]}})
        except BaseException:  # Ctrl-C too: nothing is left behind
            with contextlib.suppress(LaunchError, ConnectionError):
                cluster.delete(job)
            raise
