"""The short words for what lies in the cluster: volumes, keys of secrets, taints."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from drivetrain.errors import ConfigurationError

__all__ = ["environment_key", "environment_source", "toleration", "volume"]

_VOLUMES: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "pvc": lambda text: {"persistentVolumeClaim": {"claimName": text}},
    "hostpath": lambda text: {"hostPath": {"path": text}},
    "emptydir": lambda text: {"emptyDir": {"sizeLimit": text} if text else {}},
    "secret": lambda text: {"secret": {"secretName": text}},
    "configmap": lambda text: {"configMap": {"name": text}},
}
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


def volume(text: str, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A volume of the pod and its mount.

    Args:
        text: "pvc:CLAIM:/path", with ":ro" perhaps; see `KubernetesOptions`.
        name: Name of the volume.

    Raises:
        ConfigurationError: For what isn't such a word.

    Example:
        >>> volume("pvc:data:/data:ro", "v0")[0]
        {'name': 'v0', 'persistentVolumeClaim': {'claimName': 'data'}}
        >>> volume("emptydir::/scratch", "v1")
        ({'name': 'v1', 'emptyDir': {}}, {'name': 'v1', 'mountPath': '/scratch'})
    """
    match = re.fullmatch(r"(?P<kind>[a-z]+):(?P<what>[^:]*):(?P<path>/[^:]*)(?P<ro>:ro)?", text.strip())
    if match is None or match["kind"] not in _VOLUMES or not (match["what"] or match["kind"] == "emptydir"):
        raise ConfigurationError(
            f"kubernetes.volumes: {text!r} can't be read. Write pvc:CLAIM:/path, hostpath:/on/node:/path, emptydir:SIZE:/path (the size may be "
            "empty), secret:NAME:/path or configmap:NAME:/path, and :ro at the end to forbid writing."
        )
    mount: dict[str, Any] = {"name": name, "mountPath": match["path"]}
    if match["ro"] or match["kind"] in ("secret", "configmap"):
        mount["readOnly"] = True
    return {"name": name, **_VOLUMES[match["kind"]](match["what"])}, mount


def environment_key(text: str) -> dict[str, Any]:
    """A variable whose value lies in the cluster.

    Raises:
        ConfigurationError: For what isn't such a word.

    Example:
        >>> environment_key("TOKEN=secret/hub/token")
        {'name': 'TOKEN', 'valueFrom': {'secretKeyRef': {'name': 'hub', 'key': 'token'}}}
    """
    match = re.fullmatch(r"([A-Za-z_][\w.-]*)=(secret|configmap)/([^/]+)/([^/]+)", text.strip())
    if match is None:
        # The text isn't repeated: whoever writes a value here by mistake doesn't want to see it in a log.
        raise ConfigurationError(
            f"kubernetes.environment_keys: what stands after {text.partition('=')[0]!r} can't be read. Write VARIABLE=secret/NAME/KEY or "
            "VARIABLE=configmap/NAME/KEY; values themselves stay in the cluster."
        )
    kind = "secretKeyRef" if match[2] == "secret" else "configMapKeyRef"
    return {"name": match[1], "valueFrom": {kind: {"name": match[3], "key": match[4]}}}


def environment_source(text: str) -> dict[str, Any]:
    """A secret or config map of which each key is a variable.

    Raises:
        ConfigurationError: For what isn't such a word.

    Example:
        >>> environment_source("secret/hub")
        {'secretRef': {'name': 'hub'}}
    """
    kind, _, name = text.strip().partition("/")
    if kind not in ("secret", "configmap") or not name or "/" in name:
        raise ConfigurationError(
            f"kubernetes.environment_from: {text!r} can't be read. Write secret/NAME or configmap/NAME."
        )
    return {"secretRef" if kind == "secret" else "configMapRef": {"name": name}}


def toleration(text: str) -> dict[str, Any]:
    """A taint that pods put up with, written as kubectl writes taints.

    Raises:
        ConfigurationError: For an effect that there isn't.

    Example:
        >>> toleration("gpu=yes:NoSchedule")
        {'key': 'gpu', 'operator': 'Equal', 'value': 'yes', 'effect': 'NoSchedule'}
        >>> toleration("gpu")
        {'key': 'gpu', 'operator': 'Exists'}
    """
    word, colon, effect = text.strip().partition(":")
    key, equals, value = word.partition("=")
    if not key or (colon and effect not in _EFFECTS):
        raise ConfigurationError(
            f"kubernetes.tolerations: {text!r} can't be read. Write KEY=VALUE:EFFECT, KEY:EFFECT or KEY, with an effect of {', '.join(_EFFECTS)}."
        )
    found: dict[str, Any] = {"key": key, "operator": "Equal" if equals else "Exists"}
    if equals:
        found["value"] = value
    return {**found, "effect": effect} if colon else found
