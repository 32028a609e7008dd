"""How data loaders are sharded, moved and resumed. Importing this module does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from drivetrain.config.options import Options
from drivetrain.errors import ConfigurationError

__all__ = ["DataLoaderConfiguration"]

#: Accelerate's switches for what loaders here always do.
_ALWAYS = {
    "use_seedable_sampler": "the order of samples always follows from seed and epoch.",
    "use_stateful_dataloader": "loaders always have state_dict() and load_state_dict().",
}


@dataclass
class DataLoaderConfiguration(Options):
    """How loaders are sharded over processes, moved to the device and resumed.

    Args:
        split_batches: Whether a loader's batch is the *global* batch, of which each rank gets an equal part (parts differ by one row where
            it can't be divided). Default: each rank gets batches of the loader's size.
        dispatch_batches: Whether rank 0 alone reads, and sends each rank its part. None: for iterable data sets only, since nothing else
            makes sure that ranks see the same stream.
        even_batches: Whether all ranks get the same number of batches. True splits the rows of the last global batch evenly; a rank
            left without any gets one repeated row that has no weight and that ``gather_for_metrics`` drops. ``"repeat"`` fills the last global batch up
            with rows from the start of the epoch, so that all batches have one size (compiled graphs): those rows count twice in training.
            False leaves ranks with different numbers of batches.
        use_seedable_sampler: Accelerate's switch for an order that follows from seed and epoch. Orders always do here.
        data_seed: Seed of order and augmentation. None: that of the loader's own generator, else rank 0's ``torch.initial_seed()``.
        non_blocking: Whether moving to the device doesn't wait for the copy (needs ``pin_memory=True`` to have an effect).
        use_stateful_dataloader: Accelerate's switch for ``state_dict`` and ``load_state_dict``. Loaders always have them here.
        strategy: Which rank gets which samples: "interleaved" (batch i goes to rank i % n), "contiguous", "random" (a global shuffle by seed and
            epoch, then interleaved), "auto" ("random" for loaders with ``shuffle=True``, else "interleaved"), the name of a plugin's strategy,
            ``"module:name"``, a function ``(indices, rank, world_size) -> indices``, or a `DataSharding`.
        prefetch: Batches that travel ahead of the training loop, 0 or 1: from rank 0 when dispatching (where one of less than 64 KB always travels
            with its announcement), and to the device with ``non_blocking``.
        seed_batches: Whether Python, NumPy and torch are seeded from (seed, epoch, global batch) before each batch is read, in workers and here
            (the training loop's generators are put back), so that augmentation repeats on resume. "auto" looks after a generator in this
            process once a batch was seen to use it, and after all (0.1 ms per batch) in torch's deterministic mode; True always does.
        keep_global_batch: Whether a state saved at another world size keeps its global batch instead of the size per rank.

    Example:
        >>> DataLoaderConfiguration(split_batches=True).explicit()
        {'split_batches': True}
        >>> DataLoaderConfiguration(even_batches="evenly").validate()
        Traceback (most recent call last):
        ...
        drivetrain.errors.ConfigurationError: DataLoaderConfiguration.even_batches is 'evenly'; use True, False or 'repeat'.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool | Literal["repeat"] = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    strategy: Any = "auto"
    prefetch: int = 1
    seed_batches: bool | Literal["auto"] = "auto"
    keep_global_batch: bool = False

    def notes(self) -> list[str]:
        """What is switched off and always on."""
        given = self.explicit()
        return [
            f"DataLoaderConfiguration({name}=False) changes nothing: {what} Leave it out."
            for name, what in _ALWAYS.items()
            if given.get(name) is False
        ]

    def validate(self) -> None:
        """Check types and values.

        Raises:
            ConfigurationError: Naming the field.
        """
        if self.even_batches not in (True, False, "repeat"):
            raise ConfigurationError(
                f"DataLoaderConfiguration.even_batches is {self.even_batches!r}; use True, False or 'repeat'."
            )
        if not isinstance(self.strategy, str) and not callable(self.strategy) and not hasattr(self.strategy, "shard"):
            raise ConfigurationError(
                f"DataLoaderConfiguration.strategy is a {type(self.strategy).__name__}; use a name, a function or a DataSharding."
            )
        if self.prefetch not in (0, 1):
            raise ConfigurationError(f"DataLoaderConfiguration.prefetch is {self.prefetch!r}; use 0 or 1.")
        super().validate()
