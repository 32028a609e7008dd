"""The cluster's API server, as far as a job needs it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from drivetrain.errors import LaunchError

__all__ = ["Cluster", "JobState", "connect"]

T = TypeVar("T")
Object = Mapping[str, Any]

#: Seconds to connect, and to wait for an answer.
_TIMEOUT = (5, 30)
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
#: Where objects of each kind are made: group, version, plural.
_PLACES = {
    "Job": ("batch", "v1", "jobs"),
    "TrainJob": ("trainer.kubeflow.org", "v1alpha1", "trainjobs"),
    "Service": ("", "v1", "services"),
    "ConfigMap": ("", "v1", "configmaps"),
}
#: Status codes after which the same question may be answered.
_PASSING = frozenset({0, 408, 429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class JobState:
    """How a job stands.

    Args:
        over: It has ended.
        succeeded: It has ended well.
        reason: Why it failed, in the cluster's words.
        gone: Nobody knows it any more.
        suspended: It isn't meant to run yet.
    """

    over: bool = False
    succeeded: bool = False
    reason: str = ""
    gone: bool = False
    suspended: bool = False


class Cluster:
    """One namespace of a cluster.

    Args:
        client: The official client's ``ApiClient``.
        namespace: The namespace.
        server: Address of the API server, for messages.
    """

    def __init__(self, client: Any, namespace: str, server: str) -> None:
        self._client = client
        self.namespace = namespace
        self.server = server

    def create(self, made: Object) -> Object:
        """Make an object; what the server has of it.

        Raises:
            LaunchError: In the server's words, if it refuses.
        """
        kind, name = made["kind"], made["metadata"]["name"]
        answer = self._ask(f"{kind} {name} can't be made", "POST", self._path(made), body=made)
        return dict(answer)

    def delete(self, made: Object) -> None:
        """Remove a job with all that belongs to it; nothing if it isn't there.

        Raises:
            LaunchError: In the server's words, if it refuses.
        """
        name = made["metadata"]["name"]
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background"}
        self._ask(f"{name} can't be removed", "DELETE", f"{self._path(made)}/{name}", body=options, missing={})

    def state(self, made: Object) -> JobState:
        """How the job stands.

        Raises:
            LaunchError: In the server's words, if it doesn't say.
            ConnectionError: If it may say so later.
        """
        name = made["metadata"]["name"]
        found = self._ask(f"{name} can't be looked at", "GET", f"{self._path(made)}/{name}", missing=None)
        if found is None:
            return JobState(over=True, gone=True)
        return _state(found)

    def pods(self, made: Object) -> Sequence[Object]:
        """The job's pods, those that are over as well.

        Raises:
            LaunchError, ConnectionError: As `state`.
        """
        name = made["metadata"]["name"]
        label = "batch.kubernetes.io/job-name" if made["kind"] == "Job" else "jobset.sigs.k8s.io/jobset-name"
        path = f"/api/v1/namespaces/{self.namespace}/pods"
        found = self._ask(
            f"the pods of {name} can't be looked at", "GET", path, query=[("labelSelector", f"{label}={name}")]
        )
        items: list[Object] = found.get("items") or []
        return items

    def log(self, pod: str, container: str, *, seconds: int | None) -> Iterator[bytes]:
        """A container's output as it comes, each line after the time at which it was written, until the container ends.

        Args:
            pod: Name of the pod.
            container: Name of the container.
            seconds: Only what is younger; None for all.

        Raises:
            LaunchError, ConnectionError: As `state`.
        """
        query = [("container", container), ("follow", "true"), ("timestamps", "true")]
        query += [("sinceSeconds", str(seconds))] if seconds is not None else []
        path = f"/api/v1/namespaces/{self.namespace}/pods/{pod}/log"
        response = self._call("the output can't be read", lambda: self._request("GET", path, query, None, (5, None)))
        rest = b""
        try:
            for part in response.stream(amt=None, decode_content=False):
                *lines, rest = (rest + part).split(b"\n")
                yield from lines
        except Exception as error:  # whatever urllib3 makes of a connection that ends
            raise ConnectionError(str(error)) from None
        finally:
            response.close()
        if rest:
            yield rest

    def _path(self, made: Object) -> str:
        group, _, version = made["apiVersion"].rpartition("/")
        _, _, plural = _PLACES.get(made["kind"], ("", "", f"{made['kind'].lower()}s"))
        root = f"/apis/{group}/{version}" if group else f"/api/{version}"
        return f"{root}/namespaces/{self.namespace}/{plural}"

    def _ask(
        self,
        problem: str,
        method: str,
        path: str,
        *,
        query: Sequence[tuple[str, str]] = (),
        body: Object | None = None,
        **missing: Any,
    ) -> Any:
        """An answer as an object; ``missing`` instead where there is no such thing."""
        response = self._call(problem, lambda: self._request(method, path, list(query), body, _TIMEOUT), **missing)
        if "missing" in missing and response is missing["missing"]:
            return response
        return json.loads(response.data)

    def _request(self, method: str, path: str, query: Any, body: Any, timeout: Any) -> Any:
        return self._client.call_api(
            path,
            method,
            query_params=query,
            header_params={"Accept": "application/json", "Content-Type": "application/json"},
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _return_http_data_only=True,
            _request_timeout=timeout,
        )

    def _call(self, problem: str, call: Callable[[], T], **missing: Any) -> Any:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            return call()
        except ApiException as error:
            if error.status == 404 and "missing" in missing:
                return missing["missing"]
            text = f"{problem}: {_words(error)}"
            if error.status in _PASSING:
                raise ConnectionError(text) from None
            raise LaunchError(f"Kubernetes at {self.server}: {text}") from None
        except (HTTPError, OSError) as error:
            raise ConnectionError(f"{problem}: {self.server} doesn't answer ({error})") from None


def connect(context: str | None, namespace: str | None) -> Cluster:
    """The cluster of a kubeconfig's context or, inside of a cluster, of this pod's account.

    Args:
        context: Name of the context; None for the current one.
        namespace: Namespace; None for the context's.

    Raises:
        LaunchError: If there is neither.
    """
    from kubernetes import client, config

    configuration = client.Configuration()
    file = (
        os.environ.get("KUBECONFIG", "").strip() or None
    )  # the client itself looks when it is imported, and not again
    own = None
    try:
        config.load_kube_config(file, context=context, client_configuration=configuration)
        contexts, active = config.list_kube_config_contexts(file)
        chosen = next((c for c in contexts if c["name"] == context), active)
        own = chosen["context"].get("namespace")
    except config.ConfigException as problem:
        try:
            if context is not None:
                raise problem
            config.load_incluster_config(client_configuration=configuration)
            own = _OWN_NAMESPACE.read_text(encoding="utf-8").strip() if _OWN_NAMESPACE.is_file() else None
        except config.ConfigException:
            raise LaunchError(
                f"There is no way to a cluster: {problem} Set KUBECONFIG to a file of yours (kubectl config get-contexts lists what is in it), or "
                "print the job with --dry-run and give it to kubectl."
            ) from None
    configuration.retries = False  # we ask again ourselves
    return Cluster(client.ApiClient(configuration), namespace or own or "default", configuration.host)


def _words(error: Any) -> str:
    """What the server says; its answer's other parts aren't for people."""
    try:
        return str(json.loads(error.body)["message"])
    except (TypeError, ValueError, KeyError):
        return f"{error.status} {error.reason}"


def _state(found: Object) -> JobState:
    conditions = (found.get("status") or {}).get("conditions") or []
    held = {c["type"]: c for c in conditions if c.get("status") == "True"}
    if "Complete" in held:
        return JobState(over=True, succeeded=True)
    if "Failed" in held:
        failed = held["Failed"]
        return JobState(over=True, reason=": ".join(filter(None, (failed.get("reason"), failed.get("message")))))
    return JobState(suspended=bool(found["spec"].get("suspend")))
