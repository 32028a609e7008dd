"""Profiling a block of the script."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from drivetrain.config.handlers import ProfileKwargs

__all__ = ["profile"]


@contextlib.contextmanager
def profile(options: ProfileKwargs, *, rank: int) -> Iterator[Any]:
    """Run the block under ``torch.profiler`` and write a Chrome trace, if a directory was given.

    Args:
        options: How to profile.
        rank: Rank of this process: part of the file's name.

    Yields:
        The profiler.

    Example:
        >>> import torch
        >>> with profile(ProfileKwargs(activities=["cpu"]), rank=0) as profiler:
        ...     _ = torch.ones(2, 2) @ torch.ones(2, 2)
        >>> any(event.key == "aten::matmul" for event in profiler.key_averages())
        True
    """
    with options.build() as profiler:
        yield profiler
    if options.output_trace_dir is not None:
        directory = Path(options.output_trace_dir)
        directory.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(directory / f"profile_{rank}.json"))
