"""The order in which one process reads what several would: at each step the rows of all of them, as one batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drivetrain.data.order import OrderSource, permuted
from drivetrain.data.plan import Layout, Order, make_plan
from drivetrain.data.ranks import Ranks
from drivetrain.data.shardings import GlobalShuffle
from drivetrain.errors import UnsupportedError
from drivetrain.interfaces.data_sharding import DataSharding

__all__ = ["JoinedOrder", "join_layout"]


class JoinedOrder(OrderSource):
    """Batches, each the rows that all ranks of another run get at one step, rank by rank.

    Args:
        order: The loader's own.
        layout: How that run cuts an epoch.
        sharding: Its strategy.

    Example:
        >>> from drivetrain.data.order import SequentialOrder
        >>> from drivetrain.data.shardings import Contiguous
        >>> layout = Layout(unit="samples", world=2, round_rows=4, even="split", strategy="contiguous")
        >>> JoinedOrder(SequentialOrder(lambda: 7), layout, Contiguous()).draw(seed=0, epoch=0, ranks=Ranks(0, 1))
        [[0, 1, 4, 5], [2, 3, 6]]
    """

    shuffles = True  # what the strategy shuffles is shuffled already

    def __init__(self, order: OrderSource, layout: Layout, sharding: DataSharding) -> None:
        self._order, self._layout, self._sharding = order, layout, sharding
        super().__init__(self._count)

    def _count(self) -> int:
        units: Order = range(self._order.length)
        if self._layout.unit == "batches":
            units = [[0] * self._layout.world for _ in units]
        return max(make_plan(units, self._layout, self._sharding).steps, default=0)

    def draw(self, seed: int, epoch: int, ranks: Ranks) -> Order:  # noqa: D102
        order = self._order.draw(seed, epoch, ranks)
        if isinstance(self._sharding, GlobalShuffle) and not self._order.shuffles:
            order = permuted(order, seed, epoch)
        plan = make_plan(order, self._layout, self._sharding)
        world = range(self._layout.world)
        return [
            [row for rank in world for row in _indices(plan, step, rank)] for step in range(max(plan.steps, default=0))
        ]


def _indices(plan: Any, step: int, rank: int) -> list[Any]:
    """Rows of a rank that count."""
    if step >= plan.steps[rank]:
        return []
    rows: list[Any] = plan.indices(step, rank)[: plan.round_at(step).rows[rank]]
    return rows


def join_layout(
    own: Layout, other: Mapping[str, Any], order: OrderSource | None, sharding: DataSharding
) -> tuple[Layout, OrderSource | None]:
    """How one process cuts an epoch to get what the ranks of another run get together.

    Args:
        own: How it would cut it by itself.
        other: The other run's layout, as a mapping.
        order: The loader's order; None for streams.
        sharding: The strategy.

    Returns:
        A layout and an order.

    Raises:
        UnsupportedError: For data sets that make their own batches, which can't be joined.

    Example:
        >>> own = Layout(unit="samples", world=1, round_rows=4, even="split")
        >>> other = Layout(unit="samples", world=2, round_rows=8, even="split").to_dict()
        >>> join_layout(own, other, None, None)[0].round_rows
        8
    """
    if own.unit == "items":
        raise UnsupportedError(
            "This loader has batch_size=None: the data set makes its batches, and those of several processes can't be joined to one. Give the loader a "
            "batch_size."
        )
    theirs = Layout(**other)
    if order is None or (own.unit == "samples" and theirs.strategy in ("interleaved", "random")):
        return own.with_round(theirs.round_rows), order
    return Layout(unit="batches", world=own.world, round_rows=0, even="split"), JoinedOrder(order, theirs, sharding)
