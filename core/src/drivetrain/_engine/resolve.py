"""From what was asked for and what is there to a plan. Pure: reads no variable but those it is given, changes nothing, imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from drivetrain._engine.availability import Availability
from drivetrain._engine.choosing import Chooser
from drivetrain._engine.collecting import GivenOptions, OptionResolver, Sections, collect_options
from drivetrain._engine.detect import ProcessSurvey, survey_process
from drivetrain._engine.plan import Arguments, CatalogView, Choice, PreparePlan, Rejection, class_name
from drivetrain._engine.variables import foreign_variables, unknown_variables
from drivetrain.checkpoint.location import is_remote
from drivetrain.config.files import ConfigFile, read_config_file
from drivetrain.config.options import Options
from drivetrain.config.origins import DEFAULT, Origin, Source
from drivetrain.config.precedence import Resolved, resolve_core
from drivetrain.config.settings import CoreSettings, variable
from drivetrain.errors import ConfigurationError, UnsupportedError
from drivetrain.specs import BackendSpec, Capability, DeviceSpec, ProcessInfo, Request

__all__ = ["resolve"]


def resolve(
    arguments: Arguments, *, registry: CatalogView, environ: Mapping[str, str], availability: Availability
) -> PreparePlan:
    """Decide everything before an object is made.

    Each setting and each field of each options object comes from the strongest source that says something: explicit argument, environment,
    configuration file, default. The order in which plugins register decides nothing.

    Args:
        arguments: What the user gave.
        registry: What is installed.
        environ: The environment variables.
        availability: Which devices are there.

    Returns:
        The plan; equal on all ranks but for who this process is.

    Raises:
        DrivetrainError: What can't be done, and what to do instead.
        TypeError: For a keyword argument that nothing knows.

    Example:
        >>> from drivetrain._builtin import plugin
        >>> from drivetrain.testing.catalog import MemoryRegistry, devices
        >>> registry = MemoryRegistry([plugin])
        >>> plan = resolve(
        ...     Arguments.collect(mixed_precision="bf16"), registry=registry, environ={"DRIVETRAIN_CPU": "1"},
        ...     availability=devices(registry, cuda=1))
        >>> plan.device.name, plan.precision.name, str(plan.origins["cpu"])
        ('cpu', 'bf16', 'DRIVETRAIN_CPU')
    """
    file = _config_file(arguments, environ)
    given = collect_options(arguments, registry)
    core = resolve_core(given.settings, environ=environ, file=file)
    options = OptionResolver(given, environ, file)
    core = _link_backend(core, options, given, registry)
    options.core()
    core = _link(core, options, "gradient_accumulation_steps", "GradientAccumulationPlugin", "num_steps")
    core = _link(core, options, "dynamo_backend", "TorchDynamoPlugin", "backend")
    core = _link_directories(core, options)
    survey = _survey(arguments, registry, environ, options)
    chooser = Chooser(registry, availability, core.value, core.origins, given, survey.process)
    chooser.choices.append(_process_choice(survey.process))
    chooser.rejections.extend(Rejection("cluster", name, reason) for name, reason in survey.rejected)

    wanted = chooser.wanted_backend()
    device = chooser.device(wanted)
    precision = chooser.precision(device)
    request = Request(
        process=survey.process,
        device=device.name,
        device_count=availability.status(device.name).count,
        backend="auto" if wanted is None else wanted.name,
        option_types=given.type_names() | frozenset(options.options),
        environ=environ,
    )
    backend = chooser.backend(wanted, device, precision, request)
    _check_mesh(backend, options)
    trackers = chooser.trackers()
    checkpoint_format = chooser.checkpoint_format()
    options.spec("device", device, registry)
    options.spec("backend", backend, registry)
    options.spec("precision", precision, registry)
    options.spec("checkpoint-format", checkpoint_format, registry)
    for tracker in trackers:
        options.spec("tracker", tracker, registry)
    notes = [
        *survey.notes,
        *_device_notes(survey.process, device, request.device_count),
        *_unused(given, options, backend),
        *options.notes(),
        *_unread(file, environ, Sections(registry)),
    ]
    return PreparePlan(
        process=survey.process,
        device=device,
        backend=backend,
        precision=precision,
        trackers=trackers,
        tracker_objects=given.trackers,
        checkpoint_format=checkpoint_format,
        settings=core.value,
        options=options.options,
        named_options=options.named,
        origins={**core.origins, **options.origins},
        choices=tuple(chooser.choices),
        rejections=tuple(chooser.rejections),
        notes=tuple(notes),
        alternatives=chooser.alternatives,
    )


def _config_file(arguments: Arguments, environ: Mapping[str, str]) -> ConfigFile:
    path = arguments.settings.get("config_file")
    if path is not None:
        return read_config_file(path)
    name = variable("config_file")
    if environ.get(name, "").strip():
        return read_config_file(environ[name].strip(), said_by=name)
    return ConfigFile()


def _survey(
    arguments: Arguments, registry: CatalogView, environ: Mapping[str, str], options: OptionResolver
) -> ProcessSurvey:
    if arguments.process is not None:
        return ProcessSurvey(arguments.process)
    handler = options.options.get("InitProcessGroupKwargs")
    init_method = None if handler is None else handler.init_method
    return survey_process(registry.specs("cluster").values(), environ, init_method=init_method)


def _link(
    core: Resolved[CoreSettings], options: OptionResolver, setting: str, slot: str, field: str
) -> Resolved[CoreSettings]:
    """A setting that is also a field of an options class: the stronger source counts, and both show it.

    Raises:
        ConfigurationError: If equally strong sources say different things.
    """
    plugin = options.options.get(slot)
    if plugin is None:
        return core
    value, origin = getattr(core.value, setting), core.origins[setting]
    other, other_origin = getattr(plugin, field), options.origins[f"{slot}.{field}"]
    if other is None or origin.source > other_origin.source:
        options.options[slot] = plugin.replaced(**{field: value})
        options.origins[f"{slot}.{field}"] = origin
        return core
    if origin.source == other_origin.source and other != value:
        raise ConfigurationError(
            f"{setting}={value!r} ({origin}) and {slot}.{field}={other!r} ({other_origin}) contradict each other. Give one of them."
        )
    return Resolved(core.value.replaced(**{setting: other}), {**core.origins, setting: other_origin})


def _link_backend(
    core: Resolved[CoreSettings], options: OptionResolver, given: GivenOptions, registry: CatalogView
) -> Resolved[CoreSettings]:
    """Settings that the options of the backend that is asked for say, too.

    Raises:
        ConfigurationError: If another source says something else.
    """
    name = given.backend or core.value.backend
    if name == "auto":
        requested = given.requested()
        name = requested[0].name if len(requested) == 1 else name
    spec = registry.specs("backend").get(name)
    if spec is None or spec.options is None:
        return core
    options.spec("backend", spec, registry)
    slot = class_name(spec.options)
    every = options.named.get(slot, {"": options.options[slot]}).values()
    for setting, (value, place) in (
        pair for said in every if isinstance(said, Options) for pair in said.settings().items()
    ):
        present, origin = getattr(core.value, setting), core.origins[setting]
        if origin == DEFAULT:
            core = Resolved(
                core.value.replaced(**{setting: value}),
                {**core.origins, setting: Origin(Source.EXPLICIT, place)},
            )
        elif present != value:
            raise ConfigurationError(
                f"{setting}={present!r} ({origin}) and {place}={value!r} contradict each other. Give one of them."
            )
    return core


def _link_directories(core: Resolved[CoreSettings], options: OptionResolver) -> Resolved[CoreSettings]:
    """``project_dir`` and ``logging_dir`` are also fields of `ProjectConfiguration`, which checkpoints and scripts ask.

    Raises:
        ConfigurationError: If equally strong sources say different things.
    """
    slot = "ProjectConfiguration"
    if slot not in options.options:
        if core.value.project_dir is None and core.value.logging_dir is None:
            return core
        options.add_core("project")
    core = _link(core, options, "project_dir", slot, "project_dir")
    if options.origins[f"{slot}.logging_dir"] != DEFAULT:
        return _link(core, options, "logging_dir", slot, "logging_dir")
    project = options.options[slot]
    logging_dir = core.value.logging_dir or (None if is_remote(project.project_dir) else project.project_dir)
    if project.logging_dir != logging_dir:
        options.options[slot] = project.replaced(logging_dir=logging_dir)
    options.origins[f"{slot}.logging_dir"] = core.origins["logging_dir"]
    return Resolved(core.value.replaced(logging_dir=logging_dir), core.origins)


def _process_choice(process: ProcessInfo) -> Choice:
    name = f"rank {process.rank} of {process.world_size}" if process.is_distributed else "one process"
    return Choice("process", name, f"{process.cluster}: {process.reason}")


def _device_notes(process: ProcessInfo, device: DeviceSpec, count: int) -> list[str]:
    # One visible device is the usual case of a launcher that gives each process its own.
    if device.torch_type == "cpu" or count <= 1 or process.local_world_size <= count:
        return []
    return [
        f"{process.local_world_size} processes on this machine share {count} {device.name} devices; start {count} at most."
    ]


def _check_mesh(backend: BackendSpec, options: OptionResolver) -> None:
    """Refuse a mesh where processes form none."""
    mesh = options.options.get("ParallelismConfig")
    if mesh is not None and Capability.DEVICE_MESH not in backend.capabilities:
        raise UnsupportedError(
            f"ParallelismConfig was given, and the backend {backend.name!r} forms no mesh of processes. `drivetrain plugins --kind backend` "
            "lists backends with their capabilities: 'device-mesh' is what it takes."
        )
    asked = getattr(mesh, "sp_backend", None)
    if asked is not None and asked != backend.name:
        raise ConfigurationError(
            f"ParallelismConfig(sp_backend={asked!r}) names who divides sequences, and the backend is {backend.name!r}, which does that itself. "
            f"Leave sp_backend out, or use Accelerator(backend={asked!r})."
        )


def _unused(given: GivenOptions, options: OptionResolver, backend: BackendSpec) -> list[str]:
    """What was given for something that the plan doesn't use."""
    notes = [
        f"{g.slot} was given for the {g.kind} {g.name!r}, which isn't used here, so it has no effect."
        for g in given.by_slot.values()
        if g.kind and g.slot not in options.options
    ]
    if Capability.OWNS_PRECISION in backend.capabilities and "AutocastKwargs" in given.by_slot:
        notes.append(f"The backend {backend.name!r} owns precision, so AutocastKwargs has no effect on it.")
    return notes


def _unread(file: ConfigFile, environ: Mapping[str, str], sections: Sections) -> list[str]:
    """What the file and the environment say to nobody; unknown keys of known sections are an error."""
    return [*sections.check(file), *foreign_variables(environ, sections), *unknown_variables(environ, sections)]
