"""Logging from many processes: one line, not one per process.

Works before there is an Accelerator (the rank comes from the process group, else from the environment), and leaves the root logger alone.
"""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any

from drivetrain._rank import current_rank, initialized_distributed
from drivetrain.errors import ConfigurationError

__all__ = ["MultiProcessAdapter", "get_logger"]


class MultiProcessAdapter(logging.LoggerAdapter):  # type: ignore[type-arg]  # generic from Python 3.11 on
    """A logger whose methods take ``main_process_only`` (default True) and ``in_order`` (default False).

    - ``main_process_only=True``: logged by global rank 0 alone;
    - ``main_process_only=False``: logged by every process;
    - ``main_process_only=False, in_order=True``: logged by every process, one after the other. Every process must make this call.

    Example:
        >>> adapter = MultiProcessAdapter(logging.getLogger("doc.logging"))
        >>> adapter.warning_once("shown once")
        >>> adapter.warning_once("shown once")
    """

    def __init__(self, logger: logging.Logger, extra: dict[str, Any] | None = None) -> None:
        super().__init__(logger, extra if extra is not None else {})
        self._warned: set[str] = set()

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log, as ``logging.Logger.log``.

        Args:
            level: Level of the message.
            msg: Message, with ``%`` placeholders for ``args``.
            *args: Values for the placeholders.
            **kwargs: ``main_process_only``, ``in_order``, and those of ``logging.Logger.log``.
        """
        main_process_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        enabled = self.isEnabledFor(level)
        if not enabled and not in_order:
            return
        rank = current_rank()
        distributed = initialized_distributed() if in_order and not main_process_only else None
        turns = range(distributed.get_world_size()) if distributed is not None else (rank,)
        for turn in turns:
            if enabled and turn == rank and (rank == 0 or not main_process_only):
                # The caller's file and line, not these.
                kwargs.setdefault("stacklevel", 2)
                message, keywords = self.process(msg, kwargs)
                self.logger.log(level, message, *args, **keywords)
            if distributed is not None:
                distributed.barrier()

    def warning_once(self, msg: object, *args: Any, **kwargs: Any) -> None:
        """Like ``warning``, but only the first time that this logger is given this text."""
        try:
            text = str(msg) % args if args else str(msg)
        except (TypeError, ValueError):
            text = str(msg)  # the logging module reports the misfit
        if text not in self._warned:
            self._warned.add(text)
            kwargs.setdefault("stacklevel", 3)
            self.log(logging.WARNING, msg, *args, **kwargs)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Add the adapter's ``extra`` to the call's own."""
        if self.extra:
            kwargs["extra"] = {**self.extra, **(kwargs.get("extra") or {})}
        return msg, kwargs


def get_logger(name: str, log_level: str | int | None = None) -> MultiProcessAdapter:
    """A logger for this module that logs on the main process only, unless told otherwise.

    Args:
        name: Usually ``__name__``.
        log_level: Level of this logger ("INFO", 20). Default: the variable DRIVETRAIN_LOG_LEVEL, else what is configured.

    Raises:
        ConfigurationError: For an unknown level.

    Example:
        >>> logger = get_logger("doc.logging", log_level="INFO")
        >>> logger.isEnabledFor(logging.INFO), logger.isEnabledFor(logging.DEBUG)
        (True, False)
        >>> logger.debug("every process", main_process_only=False)
    """
    logger = logging.getLogger(name)
    level: str | int | None = log_level if log_level is not None else os.environ.get("DRIVETRAIN_LOG_LEVEL")
    if level:
        try:
            logger.setLevel(level.upper() if isinstance(level, str) else level)
        except (ValueError, TypeError):
            source = "log_level" if log_level is not None else "DRIVETRAIN_LOG_LEVEL"
            names = "DEBUG, INFO, WARNING, ERROR, CRITICAL"
            raise ConfigurationError(f"{source}={level!r} is no log level. Levels: {names}, or a number.") from None
    return MultiProcessAdapter(logger)
