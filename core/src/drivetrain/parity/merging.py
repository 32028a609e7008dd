"""Puts together what the ranks of a run recorded, so that it can be held against the record of one process."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drivetrain.parity.record import Event, RankRecord

__all__ = ["Rows", "Run", "Whole", "distance", "merge_parts", "merge_rows", "relative"]


@dataclass(frozen=True, slots=True)
class Run:
    """The records of all ranks of a run.

    Args:
        records: By rank.

    Example:
        >>> Run((RankRecord(0, ({"event": "start", "data_rank": 0, "dtype": "float32"},)),)).dtype
        'float32'
    """

    records: tuple[RankRecord, ...]

    @property
    def first(self) -> RankRecord:
        """Rank 0's."""
        return self.records[0]

    @property
    def start(self) -> Event:
        """What rank 0 said when its Accelerator was made."""
        return self.first.first("start")

    @property
    def dtype(self) -> str:
        """What the run computes in."""
        return str(self.start.get("dtype", "float32"))

    @property
    def data(self) -> tuple[RankRecord, ...]:
        """One record for each part of the data, in order: ranks that share rows count once."""
        by_place: dict[int, RankRecord] = {}
        for record in self.records:
            by_place.setdefault(int(record.first("start").get("data_rank", record.rank)), record)
        return tuple(by_place[place] for place in sorted(by_place))

    @property
    def layouts(self) -> list[Mapping[str, Any]]:
        """How each prepared loader cuts its epochs, in order."""
        return [e["layout"] for e in self.first.of("loader")]

    def which(self, model: int) -> str:
        """Which of several models, as a remark; nothing where there is one.

        Example:
            >>> Run((RankRecord(0, ({"event": "model", "type": "A"}, {"event": "model", "type": "B"})),)).which(1)
            ' (model 1, B)'
        """
        models = list(self.first.of("model"))
        return f" (model {model}, {models[model]['type']})" if len(models) > 1 else ""

    @property
    def steps(self) -> int:
        """Optimizer steps that every rank has on record, whole."""
        return min(1 + max((int(e["step"]) for e in r.of("after")), default=-1) for r in self.records)

    @property
    def ended(self) -> bool:
        """Whether every rank came to its end."""
        return all(r.first("end") for r in self.records)

    def together(self, kind: str, step: int, *, all_ranks: bool = False) -> Iterator[tuple[Event, ...]]:
        """The i-th events of a kind in a step of all ranks (one for each part of the data), for i = 0, 1, ..."""
        records = self.records if all_ranks else self.data
        return zip(*(r.of(kind, step) for r in records), strict=False)


@dataclass(frozen=True, slots=True)
class Rows:
    """Sketches of the rows of one batch; see `drivetrain.parity.sketch.sketch_rows`.

    Args:
        squares: Squared norm of each row.
        sums: Signed sums of each row.
    """

    squares: tuple[float, ...]
    sums: tuple[tuple[float, ...], ...]

    @property
    def norm(self) -> float:
        """Norm of all rows."""
        return math.sqrt(sum(self.squares))

    def in_order(self, order: Sequence[int]) -> Rows:
        """The rows in another order."""
        return Rows(tuple(self.squares[i] for i in order), tuple(self.sums[i] for i in order))

    def distance(self, other: Rows) -> float:
        """Distance of the two batches over the larger norm; infinite if one isn't finite where the other is, or lengths differ.

        Example:
            >>> a, b = Rows((1.0,), ((1.0, 1.0),)), Rows((1.0,), ((1.0, 1.5),))
            >>> round(a.distance(b), 3)
            0.354
        """
        if len(self.squares) != len(other.squares):
            return math.inf
        sums = [s for row in self.sums for s in row]
        others = [s for row in other.sums for s in row]
        per_row = max(len(self.sums[0]) if self.sums else 1, 1)
        return relative(
            distance(sums, others) / math.sqrt(per_row), math.sqrt(sum(self.squares)), math.sqrt(sum(other.squares))
        )


def distance(a: Sequence[float], b: Sequence[float]) -> float:
    """Euclidean distance; values that aren't finite on both sides count as equal.

    Example:
        >>> distance([0.0, math.nan], [3.0, math.nan]), distance([math.nan], [1.0])
        (3.0, inf)
    """
    total = 0.0
    for x, y in zip(a, b, strict=True):
        if math.isfinite(x) and math.isfinite(y):
            total += (x - y) ** 2
        elif math.isfinite(x) or math.isfinite(y):
            return math.inf
    return math.sqrt(total)


def relative(off: float, *norms: float) -> float:
    """A distance over the largest of some norms; 0 where all are 0."""
    largest = max((n for n in norms if math.isfinite(n)), default=0.0)
    if largest == 0.0:
        return 0.0 if off == 0.0 else math.inf
    return off / largest


def merge_rows(events: Sequence[Event], sketches: Sequence[Mapping[str, Any] | None]) -> Rows | None:
    """The counted rows of all ranks' batches one after the other.

    Args:
        events: The forward of each, with "counted" (rows that count; None for all).
        sketches: A sketch of each.

    Returns:
        None where they can't be put together: unknown rows, or rows of different shapes (padding).
    """
    shapes = {tuple(s["shape"]) if s is not None else None for s in sketches}
    if len(shapes) != 1 or None in shapes:
        return None
    squares: list[float] = []
    sums: list[tuple[float, ...]] = []
    for event, sketch in zip(events, sketches, strict=True):
        assert sketch is not None
        stop = event.get("counted")
        squares += sketch["squares"][:stop]
        sums += [tuple(s) for s in sketch["sums"][:stop]]
    return Rows(tuple(squares), tuple(sums))


@dataclass(frozen=True, slots=True)
class Whole:
    """The sketch of a whole tensor, from the parts that ranks hold.

    Args:
        square: Squared norm.
        sums: The count sketch.
        spread: Largest relative distance of what several ranks hold of the same part.
        norms: Norm of what each rank holds, by rank; None for one that holds nothing.
        elements: How many it has.
        decades: How many elements there are of each power of ten, where that was counted.
    """

    square: float
    sums: tuple[float, ...]
    spread: float
    norms: tuple[float | None, ...]
    elements: int = 0
    decades: Mapping[int, int] = field(default_factory=dict)

    @property
    def norm(self) -> float:
        """Norm."""
        return math.sqrt(self.square)

    def normalized_rounding(self, part: float) -> float:
        """How far an optimizer that makes steps of one size (Adam) may go apart, in steps of size 1, if gradients are off by a part of their mean size.

        An element smaller than that is rounding alone, and its step may have either sign.

        Example:
            >>> Whole(4.0, (), 0.0, (2.0,), 4, {0: 4}).normalized_rounding(0.01)
            0.02
        """
        if not self.elements:
            return 0.0
        off = part * math.sqrt(self.square / self.elements)
        return math.sqrt(math.fsum(n * min(2.0, off / 10.0**e) ** 2 for e, n in self.decades.items()))

    def away(self, other: Whole, floor: float = 0.0) -> float:
        """Distance over the larger norm, or over ``floor`` if that is larger."""
        return relative(distance(self.sums, other.sums), self.norm, other.norm, floor)


def merge_parts(sketches: Sequence[Mapping[str, Any] | None]) -> Whole | None:
    """A whole tensor's sketch from each rank's (None: it has none).

    Example:
        >>> part = {"at": [0], "size": [1], "square": 4.0, "sums": [2.0]}
        >>> merge_parts([{"parts": [part]}, {"parts": [{**part, "at": [1]}]}]).square
        8.0
        >>> merge_parts([{"parts": [part]}, {"parts": [{**part, "sums": [1.0], "square": 1.0}]}]).spread
        0.5
    """
    regions: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    norms: list[float | None] = []
    for sketch in sketches:
        parts = [] if sketch is None else sketch["parts"]
        norms.append(None if sketch is None else math.sqrt(sum(p["square"] for p in parts)))
        for part in parts:
            regions.setdefault((*part["at"], *part["size"]), []).append(part)
    if all(n is None for n in norms):
        return None
    firsts = [held[0] for held in regions.values()]
    spread = max((_spread(held) for held in regions.values()), default=0.0)
    length = len(firsts[0]["sums"]) if firsts else 0
    sums = tuple(math.fsum(p["sums"][i] for p in firsts) for i in range(length))
    decades: Counter[int] = Counter()
    for part in firsts:
        decades.update({int(exponent): count for exponent, count in part.get("decades", {}).items()})
    elements = sum(math.prod(p["size"]) for p in firsts)
    return Whole(math.fsum(p["square"] for p in firsts), sums, spread, tuple(norms), elements, decades)


def _spread(held: Sequence[Mapping[str, Any]]) -> float:
    first = held[0]
    return max(
        (
            relative(distance(first["sums"], p["sums"]), math.sqrt(first["square"]), math.sqrt(p["square"]))
            for p in held[1:]
        ),
        default=0.0,
    )
