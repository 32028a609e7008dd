"""A progress bar that shows on one process of each machine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from drivetrain._rank import current_local_rank

__all__ = ["tqdm"]


def tqdm(iterable: Iterable[Any] | None = None, *args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """A ``tqdm.auto.tqdm`` bar, disabled on all but the local main process. Works in terminals and notebooks.

    Args:
        iterable: What to iterate over.
        *args: Further arguments of tqdm.
        main_process_only: Show the bar on local rank 0 alone; False: on every process.
        **kwargs: Further arguments of tqdm; ``disable=True`` disables it everywhere.

    Returns:
        The bar.

    Example:
        >>> list(tqdm([1, 2, 3], disable=True))
        [1, 2, 3]
    """
    from tqdm.auto import tqdm as auto_tqdm

    if isinstance(iterable, bool):
        raise TypeError(
            "tqdm() takes the iterable first. Pass main_process_only as a keyword: tqdm(iterable, main_process_only=...)."
        )
    if main_process_only and current_local_rank() != 0:
        kwargs["disable"] = True
    return auto_tqdm(iterable, *args, **kwargs)
