"""Who offers which name, and which names are offered twice."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from drivetrain._plugins.known import find_known, known_plugins
from drivetrain._plugins.loader import BUILTIN, DISABLE
from drivetrain._plugins.record import PluginRecord, Status, canonical, kind_of
from drivetrain.specs import AnySpec

__all__ = ["ACCEPT", "EXPORT", "Names", "Offer", "export_target"]

#: The spaces of names besides the kinds of specs.
EXPORT, ACCEPT = "export", "accept"

_NOUNS = {EXPORT: "exported name", ACCEPT: "keyword of the Accelerator"}
_Key = tuple[str, str]


class Offer(NamedTuple):
    """One spec of one plugin.

    Args:
        kind: Kind of the spec.
        spec: The descriptor.
        owner: Index of the plugin's record.
    """

    kind: str
    spec: AnySpec
    owner: int


class Names(NamedTuple):
    """The table of all names.

    Args:
        records: The plugins, with their conflicts noted.
        offers: The first to offer a name, by (space, name); a space is a kind of spec, "export" or "accept".
        conflicts: What is wrong with a name that isn't one plugin's alone, by (space, name).
    """

    records: tuple[PluginRecord, ...]
    offers: Mapping[_Key, Offer]
    conflicts: Mapping[_Key, str]

    @classmethod
    def build(cls, records: Sequence[PluginRecord]) -> Names:
        """Enter all names and mark the plugins that share one.

        Example:
            >>> from drivetrain.specs import TrackerSpec
            >>> spec = TrackerSpec(name="toy")
            >>> one = PluginRecord(name="one", distribution="d-one", version="1", specs=(spec,))
            >>> two = PluginRecord(name="two", distribution="d-two", version="1", specs=(spec,))
            >>> Names.build([one, two]).conflicts["tracker", "toy"].partition(";")[0]
            "the tracker 'toy' is offered by plugin 'one' (d-one 1) and plugin 'two' (d-two 1)"
        """
        claims: dict[_Key, list[Offer]] = {}
        for owner, record in enumerate(records):
            for spec in record.specs:
                offer = Offer(kind_of(spec), spec, owner)
                for key in _keys(offer):
                    claims.setdefault(key, []).append(offer)
        conflicts = {key: text for key, offers in claims.items() if (text := _conflict(key, offers, records))}
        conflicts |= _shadowed(claims, conflicts, records)
        marked = list(records)
        for owner in sorted({offer.owner for key in conflicts for offer in claims[key]}):
            mine = {k: t for k, t in conflicts.items() if any(offer.owner == owner for offer in claims[k])}
            marked[owner] = _mark(records[owner], mine)
        return cls(tuple(marked), {key: offers[0] for key, offers in claims.items()}, conflicts)

    def problem(self, offer: Offer) -> str | None:
        """Why a spec can't be used, or None."""
        record = self.records[offer.owner]
        return record.problems.get((offer.kind, offer.spec.name)) if record.loaded else record.reason


def export_target(spec: AnySpec, name: str) -> str | None:
    """Where an exported name lives, as ``"package.module:Attribute"``; None if the spec doesn't export it.

    Example:
        >>> from drivetrain.specs import TrackerSpec
        >>> spec = TrackerSpec(name="toy", target="toy.tracker:Toy", options="toy.options:ToyOptions", exports=("ToyOptions",))
        >>> export_target(spec, "ToyOptions")
        'toy.options:ToyOptions'
    """
    for export in spec.exports:
        exported, _, target = export.partition("=")
        if exported == name:
            return target or f"{(spec.options or spec.target).partition(':')[0]}:{name}"
    return None


def _keys(offer: Offer) -> Iterator[_Key]:
    yield offer.kind, offer.spec.name
    for alias in dict.fromkeys(getattr(offer.spec, "aliases", ())):
        if alias != offer.spec.name:
            yield offer.kind, alias
    for keyword in dict.fromkeys(offer.spec.accepts):
        yield ACCEPT, keyword
    for name in dict.fromkeys(export.partition("=")[0] for export in offer.spec.exports):
        yield EXPORT, name


def _describe(key: _Key) -> str:
    return f"the {_NOUNS.get(key[0], key[0])} {key[1]!r}"


def _conflict(key: _Key, offers: Sequence[Offer], records: Sequence[PluginRecord]) -> str | None:
    owners = list(dict.fromkeys(offer.owner for offer in offers))
    record = records[owners[0]]
    if len(owners) > 1:
        labels = " and ".join(records[owner].label for owner in owners)
        return f"{_describe(key)} is offered by {labels}; uninstall one of them, or name it in {DISABLE}"
    if len({_meaning(key, offer) for offer in offers}) > 1:
        specs = " and ".join(f"{offer.kind} {offer.spec.name!r}" for offer in offers)
        return f"{_describe(key)} is offered twice by {record.label}: for {specs}"
    owner = find_known(*key) if record.name != BUILTIN else None
    if owner is not None and canonical(owner.distribution) != canonical(record.distribution):
        return f"{_describe(key)} belongs to {owner.distribution}, but {record.label} offers it; uninstall that one, or name it in {DISABLE}"
    return None


def _meaning(key: _Key, offer: Offer) -> str | None:
    """What a name stands for: specs of one plugin may share an options class, its keyword and its exports."""
    space, name = key
    if space == EXPORT:
        return export_target(offer.spec, name)
    return offer.spec.options if space == ACCEPT else offer.spec.name


def _shadowed(
    claims: Mapping[_Key, Sequence[Offer]], conflicts: Mapping[_Key, str], records: Sequence[PluginRecord]
) -> dict[_Key, str]:
    """Exports that core has itself: core's would win, and the plugin's never be seen."""
    ours = {canonical(known.distribution) for known in known_plugins().values()} | {"drivetrain"}
    foreign = {
        key: record.label
        for key, offers in claims.items()
        if key[0] == EXPORT
        and key not in conflicts
        and canonical((record := records[offers[0].owner]).distribution) not in ours
    }
    core: set[str] = set()
    for module in ("drivetrain", "drivetrain.utils") if foreign else ():
        core.update(getattr(importlib.import_module(module), "__all__", ()))
    return {
        key: f"{_describe(key)} belongs to drivetrain itself, but {label} offers it"
        for key, label in foreign.items()
        if key[1] in core
    }


def _mark(record: PluginRecord, conflicts: Mapping[_Key, str]) -> PluginRecord:
    """The record of a plugin that shares names, with what that means for each of its specs."""
    problems = dict(record.problems)
    for spec in record.specs:
        key = (kind_of(spec), spec.name)
        if key in conflicts:
            problems[key] = conflicts[key]
    if not record.loaded:
        return replace(record, problems=problems)
    reason = "; ".join(dict.fromkeys(conflicts.values()))
    return replace(record, problems=problems, status=Status.CONFLICT, reason=reason)
