"""Which samples each rank gets at each step of an epoch: pure index arithmetic, equal on every rank.

An epoch has an *order* (all sample indices, or all batches of the user's own batch sampler) and is cut into *rounds*: the batches that all
ranks get at one step. `UniformPlan` serves torch's own batching with a built-in strategy: every question is answered in constant time, so
resuming anywhere costs nothing. `ListPlan` holds each rank's batches as lists and serves everything else.
"""

from __future__ import annotations

import bisect
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from drivetrain.data.batch import BatchInfo, Round, WindowPlan
from drivetrain.data.shardings import Contiguous, FunctionSharding, GlobalShuffle, Interleaved, even_parts
from drivetrain.errors import ConfigurationError
from drivetrain.interfaces.data_sharding import DataSharding

__all__ = [
    "Layout",
    "ListPlan",
    "Order",
    "Plan",
    "UniformPlan",
    "cut_round",
    "is_built_in",
    "make_plan",
    "remaining_order",
]

#: An epoch's samples or batches in order: a range, an int64 array, or a list of anything.
Order: TypeAlias = "range | np.ndarray[Any, np.dtype[np.int64]] | list[Any]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How an epoch is cut. Plain data: part of a loader's state.

    Args:
        unit: What the order holds: "samples", "batches" (of the user's batch sampler) or "items" (``batch_size=None``: each is a batch).
        world: Number of ranks that hold different data.
        round_rows: Samples (or items) of a full round; 0 for batches of any size.
        even: "split" (``even_batches=True``), "repeat" or "none" (False).
        drop_last: Whether an incomplete round is dropped.
        split: Whether a batch is divided over the ranks (``split_batches``).
        strategy: Name of the strategy.

    Example:
        >>> Layout(unit="samples", world=2, round_rows=8, even="split").shares
        (4, 4)
    """

    unit: Literal["samples", "batches", "items"]
    world: int
    round_rows: int
    even: Literal["split", "repeat", "none"]
    drop_last: bool = False
    split: bool = False
    strategy: str = "interleaved"

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each rank in a full round."""
        return even_parts(self.round_rows, self.world)

    def with_round(self, round_rows: int) -> Layout:
        """The same with another size of rounds."""
        return replace(self, round_rows=round_rows)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        return {name: getattr(self, name) for name in self.__slots__}


def cut_round(rest: int, layout: Layout) -> Round:
    """Divide the ``rest`` rows of a last, incomplete round.

    Example:
        >>> layout = Layout(unit="samples", world=3, round_rows=12, even="split")
        >>> cut_round(7, layout).rows, cut_round(2, layout).received
        ((3, 2, 2), (1, 1, 1))
        >>> cut_round(7, replace(layout, even="repeat")).new, cut_round(7, replace(layout, even="none")).rows
        ((4, 3, 0), (4, 3, 0))
    """
    shares = layout.shares
    if layout.even == "split":
        rows = even_parts(rest, layout.world)
        return Round(rows, rows, tuple(max(n, 1) for n in rows))
    starts = itertools.accumulate(shares, initial=0)
    rows = tuple(min(max(rest - start, 0), share) for start, share in zip(starts, shares, strict=False))
    return Round(rows, rows, rows) if layout.even == "none" else Round(shares, rows, shares)


class Plan:
    """All ranks' batches of one epoch.

    Args:
        layout: How it was cut.
        steps: Number of batches of each rank.
    """

    def __init__(self, layout: Layout, steps: tuple[int, ...]) -> None:
        self.layout = layout
        self.steps = steps
        self._ends = sorted(set(steps))

    def round_at(self, step: int) -> Round:
        """What the ranks get at a step."""
        raise NotImplementedError

    def indices(self, step: int, rank: int) -> Any:
        """What the data set is asked for: a list of indices, or one for ``batch_size=None``."""
        raise NotImplementedError

    def rows_between(self, start: int, stop: int) -> int:
        """Samples that count in these steps, over all ranks."""
        return sum(sum(self.round_at(step).rows) for step in range(start, min(stop, max(self.steps, default=0))))

    def remaining(self, taken: int) -> Order:
        """The part of the order that ranks have not got after ``taken`` steps each (fewer where a rank has fewer)."""
        raise NotImplementedError

    def info(self, step: int, rank: int) -> BatchInfo:
        """The description of one rank's batch."""
        rows = self.round_at(step)
        return BatchInfo(step, rows.rows[rank], rows.rows, step + 1 == self.steps[rank], rows)

    def window(self, step: int, size: int) -> WindowPlan:
        """The accumulation window that starts at ``step``: it ends where the data of any rank ends that still has some.

        So windows end on all ranks together, also where ranks have different numbers of batches: no rank reduces gradients while another
        one, in the middle of a longer window, does not.
        """
        size = min(size, self._ends[bisect.bisect_right(self._ends, step)] - step)
        return WindowPlan(size, self.rows_between(step, step + size))


class UniformPlan(Plan):
    """Rounds of equal size and perhaps a smaller last one, of an order known by position.

    Args:
        order: The epoch's samples or items.
        layout: With ``round_rows`` of at least ``world``.
        contiguous: Whether each rank gets one run of the order; else rounds are runs of it.

    Example:
        >>> layout = Layout(unit="samples", world=2, round_rows=4, even="split")
        >>> plan = UniformPlan(range(7), layout, contiguous=False)
        >>> [[plan.indices(step, rank) for rank in (0, 1)] for step in range(2)]
        [[[0, 1], [2, 3]], [[4, 5], [6]]]
        >>> plan.window(0, 2)
        WindowPlan(size=2, global_rows=7)
    """

    #: Samples that are listed ahead.
    STRETCH = 512

    def __init__(self, order: Order, layout: Layout, *, contiguous: bool) -> None:
        self.order = order
        self._full, rest = divmod(len(order), layout.round_rows)
        shares = layout.shares
        self._round = Round(shares, shares, shares)
        self._last = cut_round(rest, layout) if rest and not layout.drop_last else None
        received = (0,) * layout.world if self._last is None else self._last.received
        super().__init__(layout, tuple(self._full + (n > 0) for n in received))
        self._contiguous = contiguous
        self._size = layout.round_rows
        self._part_start = tuple(itertools.accumulate(shares, initial=0))
        new = (0,) * layout.world if self._last is None else self._last.new
        self._last_start = tuple(itertools.accumulate(new, initial=0))
        totals = [self._full * share + n for share, n in zip(shares, new, strict=True)]
        self._run_start = tuple(itertools.accumulate(totals, initial=0))
        # A stretch of the order as a list: cutting a list takes a fraction of the time that making one takes.
        self._stretch: list[Any] = []
        self._stretch_start = 0

    def round_at(self, step: int) -> Round:  # noqa: D102
        if step < self._full:
            return self._round
        assert self._last is not None
        return self._last

    def info(self, step: int, rank: int) -> BatchInfo:  # noqa: D102
        rows = self._round if step < self._full else self.round_at(step)
        return BatchInfo(step, rows.rows[rank], rows.rows, step + 1 == self.steps[rank], rows)

    def rows_between(self, start: int, stop: int) -> int:  # noqa: D102
        rows = max(0, min(stop, self._full) - start) * self._size
        return rows + sum(self._last.rows) if self._last is not None and start <= self._full < stop else rows

    def indices(self, step: int, rank: int) -> Any:  # noqa: D102
        if step < self._full:
            share = self._round.received[rank]
            start = (
                self._run_start[rank] + step * share if self._contiguous else step * self._size + self._part_start[rank]
            )
            rows = self._slice(start, start + share)
        else:
            rows = self._last_indices(rank)
        return rows[0] if self.layout.unit == "items" else rows

    def _last_indices(self, rank: int) -> list[Any]:
        assert self._last is not None
        start = self._full * self._size + self._last_start[rank]
        if self._contiguous:
            start = self._run_start[rank] + self._full * self._round.rows[rank]
        new, received = self._last.new[rank], self._last.received[rank]
        rows = self._slice(start, start + new)
        if received > new and self.layout.even == "split":
            return self._slice(max(start - 1, 0), max(start, 1))
        if received > new:  # from the start of the epoch, in the order in which the ranks lack rows
            missing = [r - n for r, n in zip(self._last.received, self._last.new, strict=True)]
            first = sum(missing[:rank])
            count = len(self.order)
            rows += [self._slice(p % count, p % count + 1)[0] for p in range(first, first + missing[rank])]
        return rows

    def _slice(self, start: int, stop: int) -> list[Any]:
        first, last = start - self._stretch_start, stop - self._stretch_start
        if first < 0 or last > len(self._stretch):
            # Ahead of a reader that goes on from where it was; nothing ahead for one that jumps between runs.
            ahead = self.STRETCH if 0 <= first <= len(self._stretch) + self._size else 0
            self._stretch, self._stretch_start = _listed(self.order[start : stop + ahead]), start
            first, last = 0, stop - start
        return self._stretch[first:last]

    def remaining(self, taken: int) -> Order:  # noqa: D102
        if taken > self._full:
            return self.order[len(self.order) :]
        if not self._contiguous:
            return self.order[taken * self._size :]
        ends = self._run_start[1:] if not self.layout.drop_last else self._dropping_ends()
        parts = [
            self.order[start + taken * share : end]
            for start, end, share in zip(self._run_start[:-1], ends, self._round.rows, strict=True)
        ]
        return _join(parts)

    def _dropping_ends(self) -> tuple[int, ...]:
        """Ends of the ranks' runs, where the last one's has the rows that are dropped."""
        return (*self._run_start[1:-1], len(self.order))


def _listed(order: Order) -> list[Any]:
    return order.tolist() if isinstance(order, np.ndarray) else list(order)


def _join(parts: Sequence[Order]) -> Order:
    if all(isinstance(part, list) for part in parts):
        return [row for part in parts for row in part]
    return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])


class ListPlan(Plan):
    """Each rank's batches, as lists.

    Args:
        order: The epoch's samples or batches; what `remaining` takes from.
        layout: How it was cut.
        batches: By rank and step.
        rounds: By step.

    Example:
        >>> layout = Layout(unit="batches", world=2, round_rows=0, even="split")
        >>> plan = make_plan([[0, 1, 2], [3], [4, 5]], layout, Interleaved())
        >>> [plan.indices(step, 0) for step in range(plan.steps[0])], plan.round_at(1).rows
        ([[0, 1, 2], [4]], (1, 1))
    """

    def __init__(self, order: Order, layout: Layout, batches: list[list[list[Any]]], rounds: list[Round]) -> None:
        super().__init__(layout, tuple(len(b) for b in batches))
        self.order = order
        self._batches = batches
        self._rounds = rounds

    def round_at(self, step: int) -> Round:  # noqa: D102
        return self._rounds[step]

    def indices(self, step: int, rank: int) -> Any:  # noqa: D102
        rows = self._batches[rank][step]
        return rows[0] if self.layout.unit == "items" else rows

    def remaining(self, taken: int) -> Order:  # noqa: D102
        gone: Counter[Any] = Counter()
        for rank, batches in enumerate(self._batches):
            for step, rows in enumerate(batches[:taken]):
                gone.update(rows[: self._rounds[step].new[rank]])

        def is_left(row: Any) -> bool:
            if gone[row] > 0:
                gone[row] -= 1
                return False
            return True

        if self.layout.unit != "batches":
            return [row for row in _listed(self.order) if is_left(row)]
        left = [[row for row in batch if is_left(row)] for batch in _listed(self.order)]
        return [batch for batch in left if batch]


def is_built_in(sharding: DataSharding) -> bool:
    """Whether a strategy is one of core's, which look at places alone."""
    return type(sharding) in (Interleaved, GlobalShuffle, Contiguous)


_NOTHING_TO_DEAL = (
    "split_batches=True divides each batch over the ranks, so the strategy {0!r} has no batches to give away. "
    "Use strategy='auto', or split_batches=False."
)


def make_plan(order: Order, layout: Layout, sharding: DataSharding) -> Plan:
    """Cut an epoch.

    Args:
        order: Samples, batches or items, as the layout says.
        layout: How.
        sharding: The strategy that ``layout.strategy`` names.

    Example:
        >>> layout = Layout(unit="samples", world=2, round_rows=4, even="none", strategy="contiguous")
        >>> plan = make_plan(range(6), layout, Contiguous())
        >>> plan.indices(0, 0), plan.indices(0, 1), plan.steps
        ([0, 1], [4, 5], (2, 1))
    """
    built_in = is_built_in(sharding)
    if layout.unit != "batches" and built_in:
        return UniformPlan(order, layout, contiguous=type(sharding) is Contiguous)
    if layout.unit == "batches" and layout.split:
        if type(sharding) not in (Interleaved, GlobalShuffle):
            raise ConfigurationError(_NOTHING_TO_DEAL.format(sharding.spec.name))
        batches = _split_batches(order, layout)
    elif layout.unit == "batches" and built_in:
        batches = _deal_batches(order, layout, contiguous=type(sharding) is Contiguous)
    else:
        batches = _custom(order, layout, sharding)
    return _level(order, layout, batches)


def _split_batches(order: Order, layout: Layout) -> list[list[list[Any]]]:
    """Divide each batch of the user's sampler over the ranks."""
    ranks: list[list[list[Any]]] = [[] for _ in range(layout.world)]
    for batch in _listed(order):
        for rank, part in enumerate(_parts(list(batch), layout.world)):
            ranks[rank].append(part)
    return ranks


def _parts(rows: list[Any], world: int) -> list[list[Any]]:
    sizes = even_parts(len(rows), world)
    ends = itertools.accumulate(sizes)
    return [rows[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def _deal_batches(order: Order, layout: Layout, *, contiguous: bool) -> list[list[list[Any]]]:
    """Deal whole batches; with ``even="split"``, the rows of those left over are divided."""
    world = layout.world
    batches = [list(batch) for batch in _listed(order)]
    full, rest = divmod(len(batches), world)
    ranks = [
        batches[r * full : (r + 1) * full] if contiguous else batches[r : full * world : world] for r in range(world)
    ]
    left = batches[full * world :]
    if not rest or layout.drop_last:
        return ranks
    if layout.even == "split":
        extra = _parts([row for batch in left for row in batch], world)
    else:
        extra = left + [[]] * (world - rest)
    for rank, part in enumerate(extra):
        ranks[rank].append(part)
    return ranks


def _custom(order: Order, layout: Layout, sharding: DataSharding) -> list[list[list[Any]]]:
    rows = _listed(order)
    ranks = range(layout.world)
    if layout.unit == "batches":
        return [[list(b) for b in sharding.shard(iter(rows), rank, layout.world)] for rank in ranks]
    if isinstance(sharding, FunctionSharding):
        mine = [list(sharding.select(rows, rank, layout.world)) for rank in ranks]
        return [list(_batched(mine[r], layout.shares[r], layout.drop_last)) for r in ranks]
    if layout.split:
        raise ConfigurationError(_NOTHING_TO_DEAL.format(sharding.spec.name))
    batches = list(_batched(rows, layout.shares[0], layout.drop_last))
    return [[list(b) for b in sharding.shard(iter(batches), rank, layout.world)] for rank in ranks]


def _batched(rows: list[Any], size: int, drop_last: bool) -> list[list[Any]]:
    batches = [rows[i : i + size] for i in range(0, len(rows), size)]
    return batches[:-1] if drop_last and batches and len(batches[-1]) < size else batches


def _level(order: Order, layout: Layout, batches: list[list[list[Any]]]) -> ListPlan:
    """Make the ranks' numbers of batches equal, as ``even`` and ``drop_last`` say; an empty list stands for no row."""
    longest = max(map(len, batches))
    if layout.drop_last and layout.even != "none":
        longest = min(map(len, batches))
    some_row = next((row for rank in batches for batch in rank for row in batch), None)
    filled: list[list[list[Any]]] = []
    new: list[list[int]] = []
    for mine in batches:
        own = mine[:longest]
        counts = [len(batch) for batch in own]
        if layout.even == "none":
            own = [batch for batch in own if batch]
            counts = [len(batch) for batch in own]
        else:
            counts += [0] * (longest - len(own))
            own = _fill(own, counts, longest, layout, batches, some_row)
        filled.append(own)
        new.append(counts + [0] * (longest - len(counts)))
    rounds = []
    for step in range(longest):
        fresh = tuple(counts[step] for counts in new)
        received = tuple(len(own[step]) if step < len(own) else 0 for own in filled)
        rounds.append(Round(received if layout.even == "repeat" else fresh, fresh, received))
    return ListPlan(order, layout, filled, rounds)


def _fill(
    own: list[list[Any]], counts: list[int], longest: int, layout: Layout, batches: list[list[list[Any]]], some_row: Any
) -> list[list[Any]]:
    """One rank's batches, with repeated rows where it has none: one row, or (``"repeat"``) a batch from the epoch's start."""
    first = [b for b in (own or batches[0]) if b]
    result = []
    for step in range(longest):
        if counts[step]:
            result.append(own[step])
        elif layout.even == "repeat" and first:
            result.append(first[step % len(first)])
        else:
            result.append([some_row])
    return result


def remaining_order(order: Order, segments: Sequence[dict[str, Any]], sharding: DataSharding) -> Order:
    """What is left of an epoch after parts of it were read at one world size after another.

    Args:
        order: The whole epoch's.
        segments: `Layout` fields of each part, with "taken": the steps that every rank made in it.
        sharding: The strategy, for parts whose own isn't built in.

    Raises:
        ConfigurationError: If a part was read with a strategy that isn't there now.

    Example:
        >>> first = {**Layout(unit="samples", world=2, round_rows=4, even="split").to_dict(), "taken": 1}
        >>> second = {**first, "world": 3, "round_rows": 6}
        >>> list(remaining_order(range(12), [first, second], Interleaved()))
        [10, 11]
    """
    built_in: dict[str, DataSharding] = {s.spec.name: s for s in (Interleaved(), Contiguous(), GlobalShuffle())}
    for segment in segments:
        layout = Layout(**{k: v for k, v in segment.items() if k != "taken"})
        used = built_in.get(layout.strategy)
        if used is None:
            used = sharding
            if sharding.spec.name != layout.strategy:
                raise ConfigurationError(
                    f"Part of this epoch was read with the data sharding {layout.strategy!r}, and now it is {sharding.spec.name!r}: what is "
                    "left can't be known. Resume with the same strategy, or from the start of an epoch (`set_epoch`)."
                )
        order = make_plan(order, layout, used).remaining(segment["taken"])
    return order
