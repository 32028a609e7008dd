"""Whether a descriptor is well formed. Nothing is imported for it."""

from __future__ import annotations

import dataclasses
import re

from drivetrain._plugins.record import kind_of
from drivetrain.specs import AnySpec, BackendSpec, Capability, ClusterSpec

__all__ = ["nearest_clause", "spec_problem"]

_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_EXPORT = re.compile(rf"[^\W\d]\w*(={_TARGET.pattern})?")


def spec_problem(spec: AnySpec) -> str | None:
    """What is wrong with a descriptor, or None.

    Example:
        >>> from drivetrain.specs import TrackerSpec
        >>> spec_problem(TrackerSpec(name="toy", target="toy.tracker"))
        "tracker 'toy': target 'toy.tracker' isn't of the form 'package.module:Name'"
        >>> spec_problem(TrackerSpec(name="toy", target="toy.tracker:Toy")) is None
        True
    """
    problem = _types_problem(spec) or _text_problem(spec)
    return None if problem is None else f"{kind_of(spec)} {spec.name!r}: {problem}"


def _types_problem(spec: AnySpec) -> str | None:
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        annotation = str(field.type)
        if annotation.startswith(("tuple[", "frozenset[")):
            container = annotation.partition("[")[0]
            if not isinstance(value, tuple | frozenset) or any(not isinstance(item, str) for item in value):
                hint = f" (a comma is missing: ({value!r},))" if isinstance(value, str) else ""
                return f"{field.name} must be a {container} of strings, got {value!r}{hint}"
        elif annotation in ("str", "str | None") and not isinstance(value, str | None):
            return f"{field.name} must be a string, got {value!r}"
    if isinstance(spec, BackendSpec):
        known = [str(member) for member in Capability]
        for capability in sorted(spec.capabilities):
            if str(capability) not in known:
                return f"there is no capability {capability!r}.{nearest_clause(capability, known)}"
    return None


def _text_problem(spec: AnySpec) -> str | None:
    for label in (spec.name, *getattr(spec, "aliases", ())):
        if not _NAME.fullmatch(label):
            return f"the name {label!r} must be made of lower-case letters, digits and single hyphens"
    if not spec.target and not isinstance(spec, ClusterSpec):
        return "it names no target"
    named = {
        "target": spec.target,
        "options": spec.options,
        "report": spec.report,
        "machine": getattr(spec, "machine", ""),
        "adopts": getattr(spec, "adopts", ""),
    }
    for what, value in named.items():
        if value and not _TARGET.fullmatch(value):
            return f"{what} {value!r} isn't of the form 'package.module:Name'"
    if spec.accepts and not spec.options:
        return "it accepts keywords but names no options class"
    for keyword in spec.accepts:
        if not keyword.isidentifier():
            return f"{keyword!r} in accepts can't be a keyword"
    for export in spec.exports:
        if not _EXPORT.fullmatch(export):
            return f"{export!r} in exports is neither 'Name' nor 'Name=package.module:Attribute'"
    return None


def nearest_clause(name: str, known: object) -> str:
    """A clause with the closest of the known names, or nothing.

    Example:
        >>> nearest_clause("dpp", ["ddp", "single"])
        " Did you mean 'ddp'?"
    """
    import difflib

    match = difflib.get_close_matches(name, sorted(known), n=1)  # type: ignore[call-overload]
    return f" Did you mean {match[0]!r}?" if match else ""
