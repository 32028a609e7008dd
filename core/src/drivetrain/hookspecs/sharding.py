"""Hooks of sharding of models and data."""

from __future__ import annotations

from collections.abc import Iterable

from drivetrain.hookspecs._markers import hookspec
from drivetrain.specs import DataShardingSpec, ShardingPlannerSpec

__all__ = ["drivetrain_register_data_shardings", "drivetrain_register_sharding_planners"]


@hookspec
def drivetrain_register_sharding_planners() -> Iterable[ShardingPlannerSpec]:
    """Offer planners that propose how to shard a model.

    Called:
        Once, at discovery, in every process, before torch is imported by core.
    Result:
        Descriptors; an empty iterable if there is nothing to offer here. Duplicated names are an error that names both distributions.
    Ranks:
        Every rank; must return the same on each.
    Since:
        API 1.

    Example:
        >>> from drivetrain.hookspecs import hookimpl
        >>> from drivetrain.specs import ShardingPlannerSpec
        >>> @hookimpl
        ... def drivetrain_register_sharding_planners():
        ...     return [ShardingPlannerSpec(name="toy", target="toy.planner:ToyPlanner", backend="toy")]
    """
    raise NotImplementedError


@hookspec
def drivetrain_register_data_shardings() -> Iterable[DataShardingSpec]:
    """Offer strategies that give each rank its samples.

    Called:
        Once, at discovery, in every process, before torch is imported by core.
    Result:
        Descriptors; an empty iterable if there is nothing to offer here. Duplicated names are an error that names both distributions.
    Ranks:
        Every rank; must return the same on each.
    Since:
        API 1.

    Example:
        >>> from drivetrain.hookspecs import hookimpl
        >>> from drivetrain.specs import DataShardingSpec
        >>> @hookimpl
        ... def drivetrain_register_data_shardings():
        ...     return [DataShardingSpec(name="toy", target="toy.sharding:ToySharding")]
    """
    raise NotImplementedError
