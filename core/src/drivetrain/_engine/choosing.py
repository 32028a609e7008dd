"""Which device, precision, backend, trackers: each from what was asked for and what is there. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NoReturn, TypeVar

import msgspec

from drivetrain._engine.availability import Availability
from drivetrain._engine.collecting import GivenOptions
from drivetrain._engine.plan import CatalogView, Choice, Rejection
from drivetrain.config.origins import DEFAULT, Origin, Source
from drivetrain.config.settings import CoreSettings
from drivetrain.errors import ConfigurationError, PluginNotFoundError, UnsupportedError
from drivetrain.specs import (
    AnySpec,
    BackendSpec,
    Capability,
    CheckpointFormatSpec,
    Detection,
    DeviceSpec,
    PrecisionSpec,
    ProcessInfo,
    Request,
    Score,
    TrackerSpec,
)

__all__ = ["Chooser"]

S = TypeVar("S", bound=AnySpec)


class Chooser(msgspec.Struct):
    """Chooses one part of the plan after the other, and writes down why.

    Args:
        registry: What is installed.
        availability: Which devices are there.
        settings: Core's settings.
        origins: Where each of them came from.
        given: Options objects of the user.
        process: Who this process is.
    """

    registry: CatalogView
    availability: Availability
    settings: CoreSettings
    origins: Mapping[str, Origin]
    given: GivenOptions
    process: ProcessInfo
    choices: list[Choice] = msgspec.field(default_factory=list)
    rejections: list[Rejection] = msgspec.field(default_factory=list)
    alternatives: tuple[str, ...] = ()

    # -- device ------------------------------------------------------------------------------------------------------------

    def device(self, wanted_backend: BackendSpec | None) -> DeviceSpec:
        """The device that was asked for, or the best one that is there.

        Raises:
            UnsupportedError: If it isn't there, or can't serve several processes.
            ConfigurationError: If settings contradict each other, or two devices are equally good.
            PluginNotFoundError: If nothing knows the name.
        """
        name, origin = self._wanted_device()
        if name != "auto":
            spec = self.availability.known().get(name) or self.availability.everything().get(name)
            if spec is None:
                spec = self.registry.get("device", name)
            problem = self._device_problem(spec)
            if problem:
                raise UnsupportedError(
                    f"The device {name!r} ({origin}) can't be used: {problem}. {self._usable_devices()}"
                )
            return self._take("device", spec, "asked for", origin)
        fitting = []
        for spec in self.availability.everything().values():
            problem = self._device_problem(spec)
            if not problem and wanted_backend is not None and not _covers(wanted_backend.devices, spec.name):
                problem = f"the backend {wanted_backend.name} doesn't run on it"
            if problem:
                self._reject("device", spec.name, problem)
            else:
                fitting.append(spec)
        if not fitting:
            wish = f" on which the backend {wanted_backend.name!r} runs" if wanted_backend is not None else ""
            raise UnsupportedError(f"There is no device{wish}. {self._usable_devices()}")
        best = [spec for spec in fitting if spec.priority == fitting[0].priority]
        if len(best) > 1:
            names = " and ".join(spec.name for spec in best)
            raise ConfigurationError(
                f"The devices {names} are both there, with the same priority. Choose one: Accelerator(device={best[0].name!r}) or "
                f"DRIVETRAIN_DEVICE={best[0].name}."
            )
        for spec in fitting[1:]:
            self._reject("device", spec.name, f"{best[0].name} is there and has the higher priority")
        return self._take("device", best[0], self.availability.status(best[0].name).reason, DEFAULT)

    def _wanted_device(self) -> tuple[str, Origin]:
        """``cpu=True`` is short for ``device="cpu"``; of the two the stronger source counts."""
        device, cpu = self.settings.device, self.settings.cpu
        device_origin, cpu_origin = self.origins["device"], self.origins["cpu"]
        if not cpu:
            return device, device_origin
        if device in ("auto", "cpu") or cpu_origin.source > device_origin.source:
            return "cpu", cpu_origin
        if device_origin.source > cpu_origin.source:
            return device, device_origin
        raise ConfigurationError(
            f"cpu=True ({cpu_origin}) and device={device!r} ({device_origin}) contradict each other. Give one of them."
        )

    def _device_problem(self, spec: DeviceSpec) -> str:
        status = self.availability.status(spec.name)
        if not status.available:
            return status.reason
        if self.process.is_distributed and not spec.communication_backend:
            return f"it serves one process alone, and there are {self.process.world_size}"
        return ""

    def _usable_devices(self) -> str:
        there = [name for name in self.availability.everything() if self.availability.status(name).available]
        return f"Devices here: {', '.join(there) or 'none'}."

    # -- precision ---------------------------------------------------------------------------------------------------------

    def precision(self, device: DeviceSpec) -> PrecisionSpec:
        """The precision that was asked for; full precision if none was.

        Raises:
            PluginNotFoundError: If nothing knows the name.
            UnsupportedError: If the device lacks a dtype that it needs.
        """
        name, origin = self.settings.mixed_precision, self.origins["mixed_precision"]
        spec: PrecisionSpec = self.registry.get("precision", name)
        missing = [dtype for dtype in spec.dtypes if dtype not in device.dtypes]
        if missing:
            fitting = [s.name for s in self.registry.specs("precision").values() if set(s.dtypes) <= set(device.dtypes)]
            raise UnsupportedError(
                f"mixed_precision={name!r} ({origin}) needs {', '.join(missing)}, which the device {device.name!r} doesn't have. "
                f"Possible on it: {', '.join(fitting) or 'none'}."
            )
        reason = "asked for" if origin != DEFAULT else "nothing else was asked for"
        return self._take("precision", spec, reason, origin)

    # -- backend -----------------------------------------------------------------------------------------------------------

    def wanted_backend(self) -> BackendSpec | None:
        """The backend that was asked for by name or by an options object; None if it is to be found.

        Raises:
            PluginNotFoundError: If nothing of that name is installed; with the install command for a first-party one.
        """
        name = self.given.backend or self.settings.backend
        if name == "auto":
            return None
        spec: BackendSpec = self.registry.get("backend", name)
        return spec

    def backend(
        self, wanted: BackendSpec | None, device: DeviceSpec, precision: PrecisionSpec, request: Request
    ) -> BackendSpec:
        """The backend that was asked for, or the one whose detection has the highest score.

        Raises:
            UnsupportedError: If the one asked for doesn't fit.
            ConfigurationError: If two are equally good.
            PluginNotFoundError: If there are several processes and nothing installed serves them; with the install command.
        """
        specs: Mapping[str, BackendSpec] = self.registry.specs("backend")
        misfits = {spec.name: self._misfit(spec, device, precision) for spec in specs.values()}
        if wanted is not None:
            problem = misfits.get(wanted.name) or self._misfit(wanted, device, precision)
            if problem:
                fitting = ", ".join(name for name, misfit in misfits.items() if not misfit)
                raise UnsupportedError(
                    f"The backend {wanted.name!r} was asked for, but {problem}. Fitting here: {fitting or 'none'}."
                )
            origin = Origin(Source.EXPLICIT) if self.given.backend else self.origins["backend"]
            for name in sorted(set(specs) - {wanted.name}):
                self._reject("backend", name, f"{wanted.name} was asked for")
            return self._take("backend", wanted, "asked for", origin)
        detections = self._detections(request, specs)
        fitting_ones = []
        for name in sorted(specs):
            detection = detections.get(name)
            if detection is None:
                self._reject("backend", name, misfits[name] or "it says that it doesn't apply here")
            elif misfits[name] and detection.score >= Score.REQUESTED:
                raise UnsupportedError(f"The backend {name!r} was asked for ({detection.reason}), but {misfits[name]}.")
            elif misfits[name]:
                self._reject("backend", name, misfits[name])
            else:
                fitting_ones.append(detection)
        winner = self._best(fitting_ones)
        asked = winner.score >= Score.REQUESTED or any(g.kind == "backend" for g in self.given.by_slot.values())
        if not asked and self.process.is_distributed:
            self.alternatives = tuple(
                d.name
                for d in fitting_ones
                if d.name != winner.name and Capability.OWNS_SCHEDULE not in specs[d.name].capabilities
            )
        return self._take("backend", specs[winner.name], winner.reason, DEFAULT)

    def _detections(self, request: Request, specs: Iterable[str]) -> dict[str, Detection]:
        """The best detection of each backend that can be used; who writes a backend's own keyword asks for it."""
        answers = [d for d in self.registry.detect_backends(request) if d.name in specs]
        # Its own keyword says more than settings that several backends understand, by which one may have found itself.
        answers += [Detection(g.name, Score.REQUESTED + 1, f"{g.said_by}= was given") for g in self.given.requested()]
        best: dict[str, Detection] = {}
        for answer in sorted(answers, key=lambda d: (-d.score, d.reason)):
            best.setdefault(answer.name, answer)
        return best

    def _best(self, fitting: list[Detection]) -> Detection:
        if not fitting:
            self._raise_no_backend()
        ordered = sorted(fitting, key=lambda d: (-d.score, d.name))
        best = [d for d in ordered if d.score == ordered[0].score]
        if len(best) > 1:
            names = " and ".join(f"{d.name} ({d.reason})" for d in best)
            first = best[0].name
            raise ConfigurationError(
                f"The backends {names} fit equally well. Choose one: Accelerator(backend={first!r}), DRIVETRAIN_BACKEND={first}, or "
                f'backend = "{first}" in the configuration file.'
            )
        for detection in ordered[1:]:
            self._reject(
                "backend", detection.name, f"{best[0].name} fits better ({detection.reason}, score {detection.score})"
            )
        return best[0]

    def _raise_no_backend(self) -> NoReturn:
        rejected = "; ".join(f"{r.name}: {r.reason}" for r in self.rejections if r.kind == "backend")
        if not self.process.is_distributed:
            raise UnsupportedError(f"No backend fits here ({rejected or 'none is installed'}).")
        commands = self.registry.installable("backend")
        install = f"Install one: {commands[0]}" if commands else "Install a plugin with a backend for several processes"
        raise PluginNotFoundError(
            f"There are {self.process.world_size} processes ({self.process.reason}), but no installed backend serves more than one here "
            f"({rejected or 'none is installed'}). {install}; or start one process."
        )

    def _misfit(self, spec: BackendSpec, device: DeviceSpec, precision: PrecisionSpec) -> str:
        """Why a backend can't be used with what was chosen so far; empty if it can."""
        if self.process.is_distributed and Capability.DISTRIBUTED not in spec.capabilities:
            return f"it runs one process, and there are {self.process.world_size}"
        if not _covers(spec.devices, device.name):
            return f"it doesn't run on {device.name}, only on {', '.join(spec.devices) or 'nothing'}"
        if not _covers(spec.precisions, precision.name):
            return f"it doesn't work in {precision.name}, only in {', '.join(spec.precisions) or 'nothing'}"
        if self.settings.dynamo_backend != "no" and Capability.COMPILE not in spec.capabilities:
            return f"it can't compile models (dynamo_backend={self.settings.dynamo_backend!r})"
        return ""

    # -- trackers and formats ----------------------------------------------------------------------------------------------

    def trackers(self) -> tuple[TrackerSpec, ...]:
        """The trackers named in ``log_with``, each once; all that are installed and possible for "all".

        Raises:
            PluginNotFoundError: If nothing of that name is installed; with the install command for a first-party one.
            ConfigurationError: If one needs a directory and there is none.
        """
        has_directory = self.settings.logging_dir is not None or self.settings.project_dir is not None
        origin = self.origins["log_with"]
        found: dict[str, TrackerSpec] = {}
        for name in self.settings.log_with:
            if name == "all":
                for spec in self.registry.specs("tracker").values():
                    if spec.needs_directory and not has_directory:
                        self._reject(
                            "tracker", spec.name, "it needs a directory, and neither project_dir nor logging_dir is set"
                        )
                    else:
                        found.setdefault(spec.name, spec)
                continue
            spec = self.registry.get("tracker", name.replace("_", "-"))
            if spec.needs_directory and not has_directory:
                raise ConfigurationError(
                    f"The tracker {name!r} ({origin}) writes files: pass project_dir= or logging_dir= to the Accelerator, or set "
                    "DRIVETRAIN_PROJECT_DIR."
                )
            found.setdefault(spec.name, spec)
        for spec in found.values():
            self._take("tracker", spec, "asked for", origin)
        return tuple(found.values())

    def checkpoint_format(self) -> CheckpointFormatSpec:
        """The checkpoint format that was asked for, or the default.

        Raises:
            PluginNotFoundError: If nothing of that name is installed.
        """
        origin = self.origins["checkpoint_format"]
        spec: CheckpointFormatSpec = self.registry.get("checkpoint-format", self.settings.checkpoint_format)
        return self._take("checkpoint-format", spec, "the default" if origin == DEFAULT else "asked for", origin)

    # -- writing down ------------------------------------------------------------------------------------------------------

    def _take(self, kind: str, spec: S, reason: str, origin: Origin) -> S:
        plugin = version = ""
        if spec.name in self.registry.specs(kind):
            provider = self.registry.provider(kind, spec.name)
            plugin, version = provider.name, provider.version
        self.choices.append(Choice(kind, spec.name, reason, origin, plugin, version))
        return spec

    def _reject(self, kind: str, name: str, reason: str) -> None:
        self.rejections.append(Rejection(kind, name, reason))


def _covers(names: Iterable[str], name: str) -> bool:
    return any(n in ("*", name) for n in names)
