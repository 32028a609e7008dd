"""From flags, environment, configuration file and what is installed to a launch request, and why. Imports torch only to count devices."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain._engine.availability import Availability
from drivetrain._engine.collecting import Sections
from drivetrain._engine.plan import Arguments, CatalogView, PreparePlan
from drivetrain._engine.resolve import resolve
from drivetrain.config import ConfigFile, read_config_file, resolve_options, variable
from drivetrain.config.precedence import check_section
from drivetrain.errors import ConfigurationError
from drivetrain.interfaces.launcher import LaunchRequest
from drivetrain.launch._checks import check_numbers
from drivetrain.launch._placement import placement
from drivetrain.launch.options import LaunchOptions
from drivetrain.specs import DeviceSpec, LauncherSpec, ProcessInfo

__all__ = ["Command", "Decision", "decide"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What is to be run, as given on the command line.

    Args:
        words: Script, module or program, and its arguments.
        module: It is a module.
        plain: It is a program.
        per_machine: ``--nproc-per-node``: a number, "auto", "cpu" or "gpu"; None if not given.
    """

    words: Sequence[str]
    module: bool = False
    plain: bool = False
    per_machine: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What will be started, and why.

    Args:
        launcher: Who starts it.
        request: What is started.
        reasons: Sentences for the user: what was detected and what follows from it.
        plan: What the ranks will choose, where that was found out.
    """

    launcher: LauncherSpec
    request: LaunchRequest
    reasons: tuple[str, ...] = ()
    plan: PreparePlan | None = field(default=None, compare=False)


def decide(
    command: Command,
    given: LaunchOptions,
    settings: Mapping[str, Any],
    launcher_options: Mapping[str, Any] | None = None,
    sections: Mapping[str, Mapping[str, str]] | None = None,
    *,
    registry: CatalogView,
    environ: Mapping[str, str],
    availability: Availability,
) -> Decision:
    """Decide how to launch.

    A number of processes that nobody gave is that of the accelerators found, or one on the CPU. For several processes the ranks' plan is made
    here first, so that a backend that is missing or doesn't fit is an error before anything is started.

    Args:
        command: What to run.
        given: Launch options given as flags.
        settings: Core settings given as flags (``cpu``, ``mixed_precision``, ...): they travel to the ranks as variables.
        launcher_options: The launcher's own settings that were given as flags.
        sections: Settings of other sections that were given as flags, as text: they travel to the ranks as variables.
        registry: What is installed.
        environ: The environment variables.
        availability: Which devices are there.

    Raises:
        DrivetrainError: What can't be done, and what to do instead.
    """
    file = _config_file(settings, environ)
    check_section("launch", LaunchOptions.hints(), file)
    resolved = resolve_options(LaunchOptions, section="launch", given=given, environ=environ, file=file)
    options = resolved.value
    launcher: LauncherSpec = registry.get("launcher", options.on)
    own, of_sections = _split_sections(sections or {}, launcher, registry)
    environ = {**environ, **of_sections}
    counter = _Counter(settings, registry, environ, availability)
    reasons = Sections(registry).check(file)
    if launcher.remote:
        _check_remote(command, options, launcher)
    else:
        clusters = registry.specs("cluster").values()
        options, per_machine, place = placement(clusters, environ, options, resolved.origins, command.per_machine)
        command = dataclasses.replace(command, per_machine=per_machine)
        reasons += [place] if place else []
    total = _total(command, options, counter, reasons, asked=str(resolved.origins["num_processes"]))
    check_numbers(_numbers(total, options), remote=launcher.remote)
    local = total // options.num_machines
    if launcher.remote:
        pass  # what there is on the other machines can't be seen from here
    elif total > 1:
        counter.plan(total, local)
    elif options.gpu_ids != "all":
        counter.device()
    plan = counter.latest
    for tracker in settings.get("log_with", ()):
        if tracker != "all":
            registry.get("tracker", tracker)
    if plan is None:
        _check_names(settings, registry)
    else:
        _warn_of_sharing(plan.device, availability, local, reasons)
    request = dataclasses.replace(
        _numbers(total, options),
        command=tuple(command.words),
        module=command.module,
        plain=command.plain,
        environment={**_environment(options, settings, plan, registry, environ), **of_sections},
        log_directory=None if options.log_dir is None else Path(options.log_dir),
        label_output=options.label,
        options=_launcher_options(launcher, {**(launcher_options or {}), **own}, registry, environ, file),
    )
    return Decision(launcher=launcher, request=request, reasons=tuple(reasons), plan=plan)


def _split_sections(
    sections: Mapping[str, Mapping[str, str]], launcher: LauncherSpec, registry: CatalogView
) -> tuple[Mapping[str, str], dict[str, str]]:
    """The launcher's own settings, and variables for the others."""
    launchers = {spec.name.replace("-", "_") for spec in registry.specs("launcher").values()}
    chosen = launcher.name.replace("-", "_")
    variables: dict[str, str] = {}
    for section, values in sections.items():
        if section in launchers:
            if section != chosen:
                flag = f"--{section}-{next(iter(values))}".replace("_", "-")
                raise ConfigurationError(
                    f"{flag} is a setting of the launcher {section!r}, and {launcher.name!r} starts this job. Add --on {section}, or "
                    "leave it out."
                )
        else:
            variables.update({variable(name, section): value for name, value in values.items()})
    return sections.get(chosen, {}), variables


def _check_remote(command: Command, options: LaunchOptions, launcher: LauncherSpec) -> None:
    """What can only be found out on the machine itself must be said."""
    if options.num_processes is None and command.per_machine in (None, "auto", "gpu", "cpu"):
        raise ConfigurationError(
            f"What the machines of {launcher.name!r} have can't be seen from here: give the number of processes (--num-processes, over "
            "all machines, or --nproc-per-node)."
        )
    if options.gpu_ids != "all":
        raise ConfigurationError(f"gpu_ids={options.gpu_ids!r}: {launcher.name!r} assigns devices. Leave it out.")


def _numbers(total: int, options: LaunchOptions) -> LaunchRequest:
    """The part of the request that is numbers."""
    return LaunchRequest(
        command=(),
        num_processes=total,
        num_machines=options.num_machines,
        min_machines=options.min_machines,
        machine_rank=options.machine_rank,
        main_process_ip=options.main_process_ip,
        main_process_port=options.main_process_port,
        max_restarts=options.max_restarts,
    )


class _Counter:
    """Makes plans and keeps the latest one."""

    def __init__(
        self,
        settings: Mapping[str, Any],
        registry: CatalogView,
        environ: Mapping[str, str],
        availability: Availability,
    ) -> None:
        self._settings = {**settings, "log_with": ()}  # trackers may need what only the script says
        self._registry = registry
        self._environ = environ
        self._availability = availability
        self.latest: PreparePlan | None = None

    def plan(self, total: int, local: int) -> PreparePlan:
        """What rank 0 of ``total`` will choose."""
        reason = f"{total} were asked for"
        process = ProcessInfo(world_size=total, local_world_size=local, cluster="launch", reason=reason)
        return self._resolve(self._settings, process)

    def device(self) -> tuple[DeviceSpec, int]:
        """What a process would compute on, and how many of them this machine has."""
        device = self._resolve({k: v for k, v in self._settings.items() if k != "backend"}, ProcessInfo()).device
        return device, self._availability.status(device.name).count

    def _resolve(self, settings: Mapping[str, Any], process: ProcessInfo) -> PreparePlan:
        # A backend in the environment or the file may need several processes; only the real number of them can tell.
        environ = self._environ if process.is_distributed else {**self._environ, variable("backend"): "auto"}
        arguments = Arguments(settings=settings, process=process)
        self.latest = resolve(arguments, registry=self._registry, environ=environ, availability=self._availability)
        return self.latest


def _total(command: Command, options: LaunchOptions, counter: _Counter, reasons: list[str], *, asked: str) -> int:
    """The number of processes in all."""
    machines = options.num_machines
    per_machine = command.per_machine
    if options.num_processes is not None:
        if per_machine is not None:
            raise ConfigurationError(
                f"The number of processes is given twice, in all ({asked}) and per machine (--nproc-per-node). Give one of them."
            )
        return options.num_processes
    if per_machine is not None and per_machine not in ("auto", "gpu", "cpu"):
        return _number(per_machine) * machines
    if per_machine == "cpu":
        from drivetrain.launch._environment import available_cores

        return available_cores() * machines
    device, count = counter.device()
    if device.torch_type == "cpu":
        if per_machine == "gpu":
            raise ConfigurationError("--nproc-per-node gpu: no accelerator was found on this machine.")
        why = "it was asked for" if counter.latest and counter.latest.settings.cpu else "no accelerator was found"
        each = " on each machine" if machines > 1 else ""
        reasons.append(f"one process{each}, on the CPU: {why}. For more: --num-processes N.")
        return machines
    chosen = options.gpu_ids != "all"
    if chosen:
        count = len(options.gpu_ids.split(","))
    where = " on each machine" if machines > 1 else ""
    found = "chosen" if chosen else "found"
    reasons.append(
        f"{_count(count, 'process', 'processes')}{where}, one for each {device.name} device {found}. "
        "For another number: --num-processes N."
    )
    return count * machines


def _number(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ConfigurationError(f"--nproc-per-node {text}: give a number of at least 1, or auto, gpu or cpu.")
    return value


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _check_names(settings: Mapping[str, Any], registry: CatalogView) -> None:
    """Without a plan, names are looked up at least: a typo is found before anything is started."""
    for kind, setting in (("precision", "mixed_precision"), ("backend", "backend"), ("device", "device")):
        name = settings.get(setting, "auto")
        if name != "auto":
            registry.get(kind, name.lower())


def _warn_of_sharing(device: DeviceSpec, availability: Availability, local: int, reasons: list[str]) -> None:
    if device.torch_type != "cpu":
        count = availability.status(device.name).count
        if local > count:
            reasons.append(
                f"{local} processes share {_count(count, 'device', 'devices')} ({device.name}) on this machine."
            )


def _environment(
    options: LaunchOptions,
    settings: Mapping[str, Any],
    plan: PreparePlan | None,
    registry: CatalogView,
    environ: Mapping[str, str],
) -> dict[str, str]:
    """Variables for the ranks: flags as variables, what the backend needs, threads, devices."""
    variables: dict[str, str] = {}
    if settings.get("debug") if plan is None else plan.settings.debug:
        variables.update({variable("debug"): "true", **{k: v for k, v in _DEBUG.items() if k not in environ}})
    backend = plan.backend if plan is not None else None
    if backend is None and settings.get("backend", "auto") != "auto":
        backend = registry.get("backend", settings["backend"])
    if backend is not None:  # the user's own variables win
        variables.update({k: v for k, v in backend.launch_environment.items() if k not in environ})
    for name, value in settings.items():
        variables[variable(name)] = os.path.abspath(value) if name == "config_file" else _text(value)  # noqa: PTH100
    if options.num_cpu_threads_per_process is not None:
        variables["OMP_NUM_THREADS"] = str(options.num_cpu_threads_per_process)
    if options.gpu_ids != "all":
        device = None if plan is None else plan.device
        if device is None or device.visible_devices is None:
            where = "" if device is None else f" on {device.name}"
            raise ConfigurationError(f"gpu_ids={options.gpu_ids!r}: there is nothing to choose from{where}.")
        variables[device.visible_devices] = options.gpu_ids
    return variables


#: What libraries say and keep for a hang: the collectives' history, their warnings, native stacks.
_DEBUG = {
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "NCCL_DEBUG": "WARN",
    "GLOO_LOG_LEVEL": "WARN",
}


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _config_file(settings: Mapping[str, Any], environ: Mapping[str, str]) -> ConfigFile:
    path = settings.get("config_file")
    if path is not None:
        return read_config_file(path, said_by="--config-file")
    name = variable("config_file")
    path = environ.get(name, "").strip()
    return read_config_file(path, said_by=name) if path else ConfigFile()


def _launcher_options(
    launcher: LauncherSpec,
    given: Mapping[str, Any],
    registry: CatalogView,
    environ: Mapping[str, str],
    file: ConfigFile,
) -> dict[str, Any]:
    """The launcher's own settings: from flags, the environment and the file."""
    if launcher.options is None:
        if given:
            raise ConfigurationError(
                f"The launcher {launcher.name!r} has no settings, so {', '.join(given)} mean nothing to it."
            )
        return {}
    cls = registry.load("launcher", launcher.name, launcher.options)
    typed = {k: cls.convert(k, v, strict=not isinstance(v, str)) for k, v in given.items()}
    resolved = resolve_options(cls, section=launcher.name, given=cls(**typed), environ=environ, file=file)
    return dict(resolved.value.explicit())
