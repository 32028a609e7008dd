"""``drivetrain env``: what a bug report needs, secrets left out."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Any

import click

from drivetrain.config.secrets import masked, without_secrets
from drivetrain.config.settings import PREFIX, variable
from drivetrain.errors import ConfigurationError

if TYPE_CHECKING:
    from drivetrain._engine.availability import Availability
    from drivetrain._plugins.registry import Registry
    from drivetrain.specs import AnySpec

__all__ = ["as_text", "describe_environment", "env"]

#: Variables of others that change how a job runs, by prefix.
_PREFIXES = (
    PREFIX,
    "ACCELERATE_",
    "CUDA_",
    "GLOO_",
    "HIP_",
    "KMP_",
    "MKL_",
    "NCCL_",
    "OMP_",
    "PYTORCH_",
    "ROCR_",
    "TORCH",
    "UCX_",
    "XLA_",
)
_NAMES = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "PYTHONPATH",
    "PYTHONHASHSEED",
    "VIRTUAL_ENV",
    "CONDA_DEFAULT_ENV",
    "LD_PRELOAD",
)
_PACKAGES = ("torch", "numpy", "pluggy", "click", "rich", "msgspec", "safetensors", "psutil")


@click.command()
@click.option("--config-file", default=None, help="Configuration file; default: that of DRIVETRAIN_CONFIG_FILE.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def env(config_file: str | None, as_json: bool) -> None:
    """Print what a bug report needs: versions, devices, variables, configuration. Secrets are left out."""
    from drivetrain._engine.availability import detect_devices
    from drivetrain._plugins import get_registry

    registry = get_registry()
    availability = detect_devices(registry.specs("device").values())
    facts = describe_environment(
        environ=os.environ,
        plugins=registry.records,
        clusters=registry.specs("cluster").values(),
        availability=availability,
        config_file=config_file,
        reports=_reports(registry),
    )
    click.echo(json.dumps(facts, indent=2) if as_json else as_text(facts))


def describe_environment(
    *,
    environ: Mapping[str, str],
    plugins: Iterable[Any],
    clusters: Iterable[Any],
    availability: Availability,
    config_file: str | None = None,
    reports: Mapping[str, Callable[[], Mapping[str, str]]] | None = None,
) -> dict[str, dict[str, str]]:
    """Facts by section and name. Never fails: what can't be found out is said.

    Args:
        environ: The environment variables.
        plugins: Records of plugins.
        clusters: Descriptors of clusters, for their variables.
        availability: Which devices are there; asked through torch.
        config_file: Path of a configuration file; None for that of the environment.
        reports: What specs report, by section.
    """
    return {
        "system": _system(),
        "packages": {name: _version(name) for name in _PACKAGES} | _torch_build(),
        "plugins": {record.name: _plugin(record) for record in plugins},
        "devices": _devices(availability),
        "variables": _variables(environ, clusters, availability),
        "configuration file": _configuration(config_file, environ),
        **{section: _facts_of(report) for section, report in (reports or {}).items()},
    }


def _reports(registry: Registry) -> dict[str, Callable[[], Mapping[str, str]]]:
    """The functions that usable specs of plugins name, imported when they are called."""
    from drivetrain._plugins.record import kind_of

    found: dict[str, Callable[[], Mapping[str, str]]] = {}
    for record in registry.records:
        for spec in record.specs if record.loaded else ():
            kind = kind_of(spec)
            if spec.report and (kind, spec.name) not in record.problems:
                found[f"{kind} {spec.name}"] = partial(_call, registry, kind, spec)
    return found


def _call(registry: Registry, kind: str, spec: AnySpec) -> Mapping[str, str]:
    facts: Mapping[str, str] = registry.load(kind, spec.name, spec.report)()
    return facts


def _facts_of(report: Callable[[], Mapping[str, str]]) -> dict[str, str]:
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what a library prints is no fact
            return {str(name): without_secrets(str(name), str(value)) for name, value in report().items()}
    except Exception as error:  # a broken installation is what the report is about
        return {"error": f"{type(error).__name__}: {error}"}


def _system() -> dict[str, str]:
    import psutil

    memory = psutil.virtual_memory()
    physical = psutil.cpu_count(logical=False)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "drivetrain": _version("drivetrain"),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "executable": sys.executable,
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": f"{physical or 'unknown'} physical, {os.cpu_count()} logical, {usable} usable by this process",
        "memory": f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available",
    }


def _processor() -> str:
    """Linux doesn't tell the model's name through the platform module."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:  # noqa: PTH123
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _torch_build() -> dict[str, str]:
    try:
        import torch
    except (ImportError, OSError) as error:  # a broken installation is what the report is about
        return {"torch import": f"failed: {error}"}
    return {
        "torch CUDA": torch.version.cuda or "none",
        "torch ROCm": torch.version.hip or "none",
        "torch.distributed": ", ".join(sorted(_communication())) or "none",
    }


def _communication() -> list[str]:
    import torch.distributed as dist

    if not dist.is_available():
        return []
    return [name for name in ("gloo", "nccl", "mpi", "ucc", "xccl") if getattr(dist, f"is_{name}_available", bool)()]


def _plugin(record: Any) -> str:
    reason = f": {record.reason}" if record.reason else ""
    return f"{record.distribution} {record.version}, {record.status}{reason}"


def _devices(availability: Availability) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, spec in availability.everything().items():
        status = availability.status(name)
        names = _device_names(spec.torch_type, status.count) if status.available else []
        found[name] = ", ".join(names) or status.reason
    return found


def _device_names(torch_type: str, count: int) -> list[str]:
    if torch_type == "cpu":
        return []
    import torch

    get_name = getattr(torch.get_device_module(torch_type), "get_device_name", None)
    return [] if get_name is None else [f"{i}: {get_name(i)}" for i in range(count)]


def _variables(environ: Mapping[str, str], clusters: Iterable[Any], availability: Availability) -> dict[str, str]:
    names = set(_NAMES)
    for spec in clusters:
        for field in ("marker", "rank", "world_size", "local_rank", "local_world_size", "node_rank", "job_id"):
            names.update(getattr(spec, field))
    names.update(s.visible_devices for s in availability.everything().values() if s.visible_devices)
    relevant = sorted(name for name in environ if name in names or name.startswith(_PREFIXES))
    return {name: without_secrets(name, environ[name]) for name in relevant}


def _configuration(path: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    from drivetrain.config.files import read_config_file

    path = path or environ.get(variable("config_file"), "").strip() or None
    if path is None:
        return {"path": "none"}
    try:
        file = read_config_file(path)
    except ConfigurationError as error:
        return {"path": path, "error": str(error)}
    shown = {"path": path}
    for section, values in {"": file.core, **file.sections}.items():
        for key, value in values.items():
            name = f"{section}.{key}" if section else key
            shown[name] = without_secrets(name, json.dumps(masked(value), default=str))
    return shown


def as_text(facts: Mapping[str, Mapping[str, str]]) -> str:
    """What `describe_environment` found, for people."""
    lines: list[str] = []
    for section, values in facts.items():
        lines += ["", section] if lines else [section]
        for name, value in values.items():
            lines += textwrap.wrap(
                f"{name}: {value}", 80, initial_indent="  ", subsequent_indent="      ", break_long_words=False
            )
        if not values:
            lines.append("  none")
    return "\n".join(lines)
