"""A guess at why ranks parted, from what each did and from the source of the lines where they stand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from drivetrain._places import short
from drivetrain.launch._evidence import Entry, Evidence
from drivetrain.launch._source import Around, around

__all__ = ["likely_cause"]

_Place = tuple[str, int, str]


def likely_cause(found: Mapping[int, Entry | None], evidence: Sequence[Evidence]) -> str:
    """A clause that says what to look for.

    Args:
        found: What each rank did where they parted; None for one that didn't come.
        evidence: What is known of each rank.
    """
    came = {rank: entry for rank, entry in found.items() if entry is not None}
    away = [e for e in evidence if e.rank in found and found[e.rank] is None]
    gone = [e for e in away if e.ended and not e.consequence]
    failed = [e for e in gone if e.failed]
    if failed and not failed[0].aborted:
        return f"rank {failed[0].rank} failed by itself, and the others waited for it."
    if not away and len({entry.places[:1] for entry in came.values()}) == 1:
        return _slipped(came) or _unequal(came)
    stands = {rank: entry.places for rank, entry in came.items()}
    stands.update({e.rank: e.stands for e in away})
    branches = _branches(stands, came, {e.rank: _done(e) for e in evidence})
    return (
        _branch([b for b in branches if b.about_rank and b.part.kind != "exit"])
        or _aborted(failed, came)
        or _loop(stands, came, gone)
        or _late(away)
        or _branch(branches)
        or _unknown(gone)
    )


def _aborted(failed: Sequence[Evidence], came: Mapping[int, Entry]) -> str:
    """Native code ended a rank, which leaves nothing but its notes."""
    if not failed:
        return ""
    rank, waiting = next(iter(came.items()))
    of = f" (of {waiting.size} on rank {rank})" if waiting.size else ""
    return (
        f"native code ended rank {failed[0].rank}, as gloo does with a process that is sent more bytes than it expects: look whether shapes and "
        f"dtypes are equal on all ranks in {waiting.name}{of}. Its stack at that moment stands in its output."
    )


def _slipped(came: Mapping[int, Entry]) -> str:
    """All are at the same line, at different steps."""
    steps = {rank: entry.step for rank, entry in came.items() if entry.step is not None}
    if len(set(steps.values())) < 2:
        return ""
    ahead = max(steps, key=lambda rank: steps[rank])
    entry = came[ahead]
    text = f"rank {ahead} left out a collective that the others did at step {min(steps.values())}, and was ahead of them from then on"
    conditions = [
        part for file, line, _ in entry.places[:1] for part in around(file, line) if part.kind in ("if", "else", "exit")
    ]
    if not conditions:
        return f"{text}."
    return f"{text}; {entry.name} stands {'after' if conditions[-1].kind == 'exit' else 'under'} {conditions[-1]}."


def _unequal(came: Mapping[int, Entry]) -> str:
    """All are at the same line."""
    entries = list(came.values())
    if any(entry.name in ("backward", "forward") for entry in entries):
        return (
            "the ranks' models exchange different tensors there: a parameter or a layer is used, or frozen, on some ranks only, "
            "because of a condition in the model or in the loss."
        )
    if len({entry.size for entry in entries}) > 1:
        return "the tensors differ in shape or dtype between ranks; they must be equal (`pad_across_processes` makes sizes equal)."
    return "the line does something else on each rank: look for a condition in what it calls."


class _Branch(NamedTuple):
    """A condition around one rank's line that isn't around another's."""

    part: Around
    place: str
    about_rank: bool


def _done(e: Evidence) -> frozenset[_Place]:
    """The lines at which a rank has done collectives."""
    return frozenset(entry.places[0] for entry in (*e.recorded, *e.noted) if entry.places)


def _branches(
    stands: Mapping[int, tuple[_Place, ...]], came: Mapping[int, Entry], done: Mapping[int, frozenset[_Place]]
) -> list[_Branch]:
    """Those around the lines of ranks that came, the ones that ask for the rank first, then the innermost first."""
    found: list[_Branch] = []
    for rank in came:
        for other, places in stands.items():
            if other != rank:
                known = bool(stands[rank]) and stands[rank][0] in done[other]
                found += _only_around(stands[rank], places, known=known)
    return sorted(found, key=lambda branch: not branch.about_rank)


def _only_around(mine: Sequence[_Place], others: Sequence[_Place], *, known: bool) -> Iterator[_Branch]:
    """``known``: the other rank has been there before, so that it isn't the rank that decides."""
    theirs = {(file, part) for file, line, _ in others for part in around(file, line)}
    for file, line, _ in mine:
        for part in reversed(around(file, line)):
            about_rank = part.about_rank and not known
            if part.kind != "loop" and (part.kind != "exit" or about_rank) and (file, part) not in theirs:
                yield _Branch(part, f"{short(file)}:{line}", about_rank)


def _branch(branches: Sequence[_Branch]) -> str:
    if not branches:
        return ""
    part, place, about_rank = branches[0]
    verb = "stands after" if part.kind == "exit" else "stands under"
    only = "which depends on the rank" if about_rank else "which isn't the same on all ranks"
    return f"{place} {verb} {part}, {only}."


def _loop(stands: Mapping[int, tuple[_Place, ...]], came: Mapping[int, Entry], gone: Sequence[Evidence]) -> str:
    """A loop that one rank is in and another has left."""
    for rank in came:
        for file, line, _ in stands[rank]:
            for part in reversed(around(file, line)):
                if part.kind != "loop":
                    continue
                left = [
                    other
                    for other, places in stands.items()
                    if other != rank and any(f == file and at > part.end for f, at, _ in places)
                ] or [e.rank for e in gone]
                if left:
                    return (
                        f"rank {left[0]} has left {part}, and rank {rank} hasn't: it has fewer batches, a `break` or an error of its own, or left "
                        f"out a {came[rank].name} before. For batches, `join_uneven_inputs` or an even number (the default of prepared loaders) is "
                        "the remedy."
                    )
    return ""


def _late(away: Sequence[Evidence]) -> str:
    late = [e for e in away if e.where and not e.ended and not (e.last is not None and e.last.waiting)]
    return (
        f"rank {late[0].rank} was still busy at {short(late[0].where)}, longer than the others could wait."
        if late
        else ""
    )


def _unknown(gone: Sequence[Evidence]) -> str:
    if gone:
        return f"rank {gone[0].rank} had no more to do: it leaves a loop or the script earlier than the others."
    return "a branch that only some ranks take, a loop that ends earlier on some, or an early exit."
