"""Variables that look like settings and have no effect: each is named, so that nothing is silently ignored."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping

from drivetrain._engine.collecting import Sections
from drivetrain.config.settings import PREFIX, CoreSettings, variable

__all__ = ["foreign_variables", "unknown_variables"]

#: Variables with our prefix that other parts of Drivetrain read.
_OTHERS = frozenset({"PLUGINS", "DISABLE_PLUGINS", "LOG_LEVEL", "STOPPED_FILE"})
_OTHER_PREFIXES = ("TEST_",)

#: Accelerate's variables, without their prefix, and ours.
_COUNTERPARTS = {
    "MIXED_PRECISION": "mixed_precision",
    "GRADIENT_ACCUMULATION_STEPS": "gradient_accumulation_steps",
    "USE_CPU": "cpu",
    "TORCH_DEVICE": "device",
    "DEBUG_MODE": "debug",
    "DYNAMO_BACKEND": "dynamo_backend",
    "DYNAMO_MODE": "dynamo_mode",
    "DYNAMO_USE_FULLGRAPH": "dynamo_fullgraph",
    "DYNAMO_USE_DYNAMIC": "dynamo_dynamic",
    "DYNAMO_USE_REGIONAL_COMPILATION": "dynamo_use_regional_compilation",
}
_FOREIGN_PREFIX = "ACCELERATE_"


def foreign_variables(environ: Mapping[str, str], sections: Sections | None = None) -> Iterator[str]:
    """One sentence about variables of Accelerate that are set, with ours; nothing if there are none.

    Args:
        environ: The environment.
        sections: What prefixes stand for, to find the fields of plugins' options.

    Example:
        >>> list(foreign_variables({"ACCELERATE_USE_CPU": "true"}))
        ['These variables of Accelerate have no effect: ACCELERATE_USE_CPU (use DRIVETRAIN_CPU).']
    """
    named = []
    for name in sorted(environ):
        if not name.startswith(_FOREIGN_PREFIX):
            continue
        rest = name.removeprefix(_FOREIGN_PREFIX)
        if rest in _COUNTERPARTS:
            named.append(f"{name} (use {variable(_COUNTERPARTS[rest])})")
        elif rest.startswith("USE_"):
            named.append(f"{name} (use {variable('backend')})")
        else:
            ours = _same_field(rest, sections)
            named.append(f"{name} (use {ours})" if ours else name)
    if named:
        yield f"These variables of Accelerate have no effect: {', '.join(named)}."


def _same_field(rest: str, sections: Sections | None) -> str:
    """Our variable of the field of a plugin's options that a name without its prefix says, or begins; empty if there is none."""
    for section in sections.names() if sections is not None else ():
        prefix = f"{section.upper()}_"
        if rest.startswith(prefix):
            field = rest.removeprefix(prefix).lower()
            known = sections.fields(section) if sections is not None else set()
            begun = [name for name in known if name == field or name.startswith(f"{field}_")]
            return variable(min(begun, key=len), section) if begun else ""
    return ""


def unknown_variables(environ: Mapping[str, str], sections: Sections) -> Iterator[str]:
    """A sentence for each variable with our prefix that nothing reads.

    Args:
        environ: The environment.
        sections: What prefixes stand for.
    """
    core = {field.upper() for field in CoreSettings.hints()}
    for name in sorted(environ):
        rest = name.removeprefix(PREFIX)
        if rest == name or rest in core or rest in _OTHERS:
            continue
        known = set(core)
        for section in sections.names():
            if name.startswith(variable("", section)):
                known |= {variable(field, section).removeprefix(PREFIX) for field in sections.fields(section)}
        if rest not in known:
            match = difflib.get_close_matches(rest, sorted(known), n=1)
            yield f"{name} is set, but nothing reads it.{f' Did you mean {PREFIX}{match[0]}?' if match else ''}"
