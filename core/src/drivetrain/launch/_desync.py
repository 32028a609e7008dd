"""Where ranks parted: the first collective that not all of them came to, and the report of it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from drivetrain._places import short
from drivetrain.launch._cause import likely_cause
from drivetrain.launch._evidence import Entry, Evidence

__all__ = ["Parting", "parting", "parting_text"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parting:
    """The first collective in which ranks differ.

    Args:
        found: What each rank did in its place; None for one that didn't come.
        before: The last that they did together, or None.
        ranks: The ranks of the group.
    """

    found: Mapping[int, Entry | None]
    before: Entry | None = None
    ranks: tuple[int, ...] = ()

    @property
    def first(self) -> Entry:
        """What was done there first."""
        return min((entry for entry in self.found.values() if entry is not None), key=lambda entry: entry.time)


def parting(evidence: Sequence[Evidence]) -> Parting | None:
    """Where ranks parted, or None if nothing shows that they have.

    The flight recorder's groups are compared where ranks have recordings, and what ranks noted themselves where one has none (it was killed,
    or has ended). Of several groups in which ranks differ, that in which one came first to what others never did.

    Example:
        >>> common = dict(group="0", operation="all_reduce", name="backward", places=())
        >>> one = Entry(number=1, time=10, **common)
        >>> ahead = Evidence(rank=0, recorded=(one, Entry(number=2, time=20, **common)))
        >>> parting([ahead, Evidence(rank=1, recorded=(one,))]).found[1] is None
        True
    """
    recorded = [e for e in evidence if e.recorded]
    found = _recorded_partings(recorded)
    if len(recorded) < len(evidence):
        found += _first_difference({e.rank: e.noted for e in evidence}, tuple(e.rank for e in evidence))
        if not found:
            found = _left_alone(evidence)
    return min(found, key=lambda p: p.first.time, default=None)


def _recorded_partings(evidence: Sequence[Evidence]) -> list[Parting]:
    found = []
    for group in {entry.group for e in evidence for entry in e.recorded}:
        ranks = next((e.groups[group] for e in evidence if group in e.groups), tuple(e.rank for e in evidence))
        tables = {e.rank: [entry for entry in e.recorded if entry.group == group] for e in evidence if e.rank in ranks}
        found += _first_difference(tables, ranks)
    return found


def _first_difference(tables: Mapping[int, Iterable[Entry]], ranks: tuple[int, ...]) -> list[Parting]:
    """The first number at which the ranks' entries differ, as a list of one or none.

    Where a rank leaves out a collective and its next one is alike, both go on, a step apart, until something doesn't fit: they parted where
    their steps began to differ.
    """
    numbered = {rank: {entry.number: entry for entry in entries} for rank, entries in tables.items()}
    if len(numbered) < 2:
        return []
    start = max((min(table, default=0) for table in numbered.values()), default=0)
    end = max((max(table, default=-1) for table in numbered.values()), default=-1)
    slipped: list[Parting] = []
    before = None
    for number in range(start, end + 1):
        found = {rank: table.get(number) for rank, table in numbered.items()}
        kinds = {None if entry is None else (entry.operation, entry.size) for entry in found.values()}
        if len(kinds) > 1:
            return slipped or [Parting(found=found, before=before, ranks=ranks)]
        if not slipped and len({entry.step for entry in found.values() if entry is not None} - {None}) > 1:
            slipped = [Parting(found=found, before=before, ranks=ranks)]
        before = next(iter(found.values()))
    return []


def _left_alone(evidence: Sequence[Evidence]) -> list[Parting]:
    """Ranks that wait for some of which nothing is known but their end."""
    waiting = {e.rank: e.last for e in evidence if e.last is not None and (e.last.waiting or e.consequence)}
    gone = [e.rank for e in evidence if e.ended and not e.consequence and e.rank not in waiting]
    if not waiting or not gone:
        return []
    found: dict[int, Entry | None] = {**waiting, **dict.fromkeys(gone)}
    return [Parting(found=found, ranks=tuple(e.rank for e in evidence))]


# -- the report ------------------------------------------------------------------------------------------------------------


def parting_text(evidence: Sequence[Evidence], *, world_size: int) -> str:
    """The report: where each rank stands, where they parted, and why that may be; "" if nothing shows that they have.

    Args:
        evidence: Of the ranks of this machine.
        world_size: Number of ranks of the job.
    """
    parted = parting(evidence)
    if parted is None:
        return ""
    places: dict[str, list[int]] = {}
    for e in evidence:
        places.setdefault(_standing(e, parted), []).append(e.rank)
    lines = [f"drivetrain: the ranks parted at {_moment(parted)}:"]
    for text, ranks in places.items():
        who = f"rank {ranks[0]} {text}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} {_plural(text)}"
        lines.append(f"  {who}")
    if parted.before is not None:
        lines.append(f"  the last that they did together: {_what(parted.before)}{_at_step(parted.before)}")
    lines.append(f"  likely cause: {likely_cause(parted.found, evidence)}")
    if len(evidence) < world_size:
        lines.append(
            f"  seen here: {len(evidence)} of {world_size} ranks; the launchers on other machines report theirs"
        )
    return "\n".join(lines)


def _moment(parted: Parting) -> str:
    first = min((e for e in parted.found.values() if e is not None), key=lambda e: (e.step or 0, e.time))
    collective = f"collective {first.number}"
    if first.description not in ("", "default_pg"):
        collective += f" of the group {first.description!r}"
    if len(parted.ranks) > 1 and first.group not in ("", "0"):
        collective += f" of ranks {', '.join(map(str, parted.ranks))}"
    if first.step is None:
        return collective
    return f"step {first.step}" if first.group in ("", "0") else f"step {first.step}, {collective}"


def _standing(e: Evidence, parted: Parting) -> str:
    """What one rank was doing when it was last heard of."""
    did, last = parted.found.get(e.rank), e.last
    if did is not None:
        detail = _detail(did, parted)
        if last is None or last.time <= did.time or (last.step == did.step and _what(last) == _what(did)):
            return f"waits at {_what(did)}{detail}"
        return f"did {_what(did)}{detail}{_at_step(did)}, and stands at {_what(last)}"
    history = (
        f"its last collective was {_what(last)}{_at_step(last)}" if last is not None else "it has done no collective"
    )
    if e.ended:
        return f"{e.ended}; {history}"
    if last is not None and last.waiting:
        return f"waits at {_what(last)}"
    return f"is at {short(e.where)}; {history}" if e.where else history


def _plural(text: str) -> str:
    """The same of several ranks."""
    words = {
        "waits": "wait",
        "is": "are",
        "has": "have",
        "its": "their",
        "was": "were",
        "stands": "stand",
        "it": "they",
    }
    return re.sub(r"^\w+|(?<=; )\w+|(?<=and )stands", lambda word: words.get(word[0], word[0]), text)


def _detail(did: Entry, parted: Parting) -> str:
    """What is in the collective, where its line doesn't tell the ranks apart."""
    same_line = [entry for entry in parted.found.values() if entry is not None and _what(entry) == _what(did)]
    if all((entry.operation, entry.size) == (did.operation, did.size) for entry in same_line):
        return ""
    return f" ({did.operation} of {did.size})" if did.size else f" ({did.operation})"


def _what(entry: Entry) -> str:
    if not entry.places:
        return entry.name
    file, line, _ = entry.places[0]
    micro = f", micro-batch {entry.micro_batch}" if entry.micro_batch else ""
    return f"{short(file)}:{line} {entry.name}{micro}"


def _at_step(entry: Entry) -> str:
    return "" if entry.step is None else f", at step {entry.step}"
