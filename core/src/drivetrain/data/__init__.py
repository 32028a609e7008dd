"""Data loaders: sharded over ranks, moved to the device, resumable. Importing this package does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._lazy import lazy_exports

if TYPE_CHECKING:
    from drivetrain.data.batch import BatchInfo, Round, WindowPlan
    from drivetrain.data.config import DataLoaderConfiguration
    from drivetrain.data.loader import PreparedDataLoader, skip_first_batches
    from drivetrain.data.metrics import gather_for_metrics, gather_rows
    from drivetrain.data.prepare import prepare_data_loader
    from drivetrain.data.random import (
        fork_rng,
        rng_state,
        set_rng_state,
        set_seed,
        synchronize_rng_state,
        synchronize_rng_states,
    )
    from drivetrain.data.shardings import Contiguous, GlobalShuffle, Interleaved
    from drivetrain.data.stack import LoaderStack

__all__ = [
    "BatchInfo",
    "Contiguous",
    "DataLoaderConfiguration",
    "GlobalShuffle",
    "Interleaved",
    "LoaderStack",
    "PreparedDataLoader",
    "Round",
    "WindowPlan",
    "fork_rng",
    "gather_for_metrics",
    "gather_rows",
    "prepare_data_loader",
    "rng_state",
    "set_rng_state",
    "set_seed",
    "skip_first_batches",
    "synchronize_rng_state",
    "synchronize_rng_states",
]

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "batch": ["BatchInfo", "Round", "WindowPlan"],
        "config": ["DataLoaderConfiguration"],
        "loader": ["PreparedDataLoader", "skip_first_batches"],
        "metrics": ["gather_for_metrics", "gather_rows"],
        "prepare": ["prepare_data_loader"],
        "random": [
            "fork_rng",
            "rng_state",
            "set_rng_state",
            "set_seed",
            "synchronize_rng_state",
            "synchronize_rng_states",
        ],
        "shardings": ["Contiguous", "GlobalShuffle", "Interleaved"],
        "stack": ["LoaderStack"],
    },
)
