"""The strategy that a model needs, for who says ``sharding_strategy="auto"``."""

from __future__ import annotations

from drivetrain.errors import ConfigurationError
from drivetrain.interfaces import BackendContext, PrepareRequest
from drivetrain.logging import get_logger
from drivetrain.memory import plan_of_request
from drivetrain_fsdp.options import FullyShardedDataParallelPlugin

__all__ = ["choose_strategy"]


def choose_strategy(
    request: PrepareRequest, context: BackendContext, options: FullyShardedDataParallelPlugin
) -> FullyShardedDataParallelPlugin:
    """The same settings with the fastest strategy that fits; FULL_SHARD where none does or nothing can be planned. Collective.

    Args:
        request: What is being prepared.
        context: What the backend was made with.
        options: Settings whose strategy is "auto".

    Raises:
        ConfigurationError: If a mesh is given, which says the same thing.

    Example:
        >>> choose_strategy.__name__
        'choose_strategy'
    """
    if context.handlers.get("ParallelismConfig") is not None:
        raise ConfigurationError(
            "sharding_strategy='auto' chooses shards and replicas, and ParallelismConfig says them. Name a strategy, or leave ParallelismConfig out."
        )
    report = plan_of_request(request, context, backends=["fsdp"])
    log = get_logger("drivetrain")
    if report is None or report.best is None:
        reason = "several models are prepared at once" if report is None else report.reason
        log.warning("Planned: FULL_SHARD, since %s.", reason)
        return options.replaced(sharding_strategy="FULL_SHARD")
    log.info("Planned: %s, %s.", report.best.label, report.reason)
    return options.replaced(**report.best.options)
