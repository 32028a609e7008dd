"""Hooks of backend, device and cluster detection."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.hookspecs._markers import hookspec
from drivetrain.specs import BackendSpec, ClusterSpec, Detection, DeviceSpec, Request

__all__ = [
    "drivetrain_detect_backend",
    "drivetrain_register_backends",
    "drivetrain_register_clusters",
    "drivetrain_register_devices",
]


@hookspec
def drivetrain_register_backends() -> Iterable[BackendSpec]:
    """Offer backends.

    Called:
        Once, at discovery, in every process, before torch is imported by core.
    Result:
        Descriptors; an empty iterable if there is nothing to offer here. Duplicated names are an error that names both distributions.
    Ranks:
        Every rank; must return the same on each.
    Since:
        API 1.

    Example:
        >>> from drivetrain.hookspecs import hookimpl
        >>> from drivetrain.specs import BackendSpec
        >>> @hookimpl
        ... def drivetrain_register_backends():
        ...     return [BackendSpec(name="toy", target="toy.backend:ToyBackend")]
    """
    raise NotImplementedError


@hookspec
def drivetrain_register_devices() -> Iterable[DeviceSpec]:
    """Offer kinds of devices.

    Called:
        Once, at discovery, in every process, before torch is imported by core.
    Result:
        Descriptors; an empty iterable if there is nothing to offer here. Duplicated names are an error that names both distributions.
    Ranks:
        Every rank; must return the same on each.
    Since:
        API 1.

    Example:
        >>> from drivetrain.hookspecs import hookimpl
        >>> from drivetrain.specs import DeviceSpec
        >>> @hookimpl
        ... def drivetrain_register_devices():
        ...     return [DeviceSpec(name="toy", torch_type="cpu", communication_backend="gloo")]
    """
    raise NotImplementedError


@hookspec
def drivetrain_register_clusters() -> Iterable[ClusterSpec]:
    """Offer ways to learn rank and world size.

    Called:
        Once, at discovery, in every process, before torch is imported by core.
    Result:
        Descriptors; an empty iterable if there is nothing to offer here. Duplicated names are an error that names both distributions.
    Ranks:
        Every rank; must return the same on each.
    Since:
        API 1.

    Example:
        >>> from drivetrain.hookspecs import hookimpl
        >>> from drivetrain.specs import ClusterSpec
        >>> @hookimpl
        ... def drivetrain_register_clusters():
        ...     return [ClusterSpec(name="toy", rank=("TOY_RANK",), world_size=("TOY_SIZE",))]
    """
    raise NotImplementedError


@hookspec
def drivetrain_detect_backend(request: Request) -> Iterable[Detection] | None:
    """Say which of this plugin's backends apply to what was found, and how strongly.

    Called:
        When an Accelerator is constructed with ``backend="auto"``, by ``drivetrain explain`` and by ``drivetrain launch``.
    Result:
        Detections, or None when nothing applies. The highest score wins; order of registration decides nothing.
    Ranks:
        Every rank; must depend only on the request, so that each answers alike.
    Since:
        API 1.

    Example:
        >>> from drivetrain.hookspecs import hookimpl
        >>> from drivetrain.specs import Detection, Score
        >>> @hookimpl
        ... def drivetrain_detect_backend(request):
        ...     if not request.process.is_distributed:
        ...         return None
        ...     return [Detection("toy", Score.POSSIBLE, f"{request.process.world_size} processes")]
    """
    raise NotImplementedError
