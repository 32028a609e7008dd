"""What ``init_kwargs`` says to a tracker: its own options, and keywords that go on to the system as they are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from drivetrain.config.options import Options, nearest
from drivetrain.errors import ConfigurationError
from drivetrain.interfaces.tracker import TrackerContext

__all__ = ["check_keywords", "split_options"]

T = TypeVar("T", bound=Options)


def split_options(cls: type[T], context: TrackerContext) -> tuple[T, dict[str, Any]]:
    """The tracker's options, ``init_kwargs`` over file and environment, and the other keywords of ``init_kwargs``.

    ``notes``, as one system calls it, is the option ``description`` of all that have it.

    Raises:
        ConfigurationError: For a value of a wrong type.

    Example:
        >>> from drivetrain._builtin.jsonl import JsonlOptions
        >>> split_options(JsonlOptions, TrackerContext(project_name="p", options={"run_name": "a", "entity": "me"}))
        (JsonlOptions(run_name='a'), {'entity': 'me'})
    """
    given = dict(context.options)
    if "notes" in given and "description" in cls.hints():
        given.setdefault("description", given.pop("notes"))
    own = {k: v for k, v in given.items() if k in cls.hints()}
    settings = context.settings.explicit() if context.settings is not None else {}
    options = cls.from_mapping({**settings, **own})
    options.validate()
    return options, {k: v for k, v in given.items() if k not in own}


def check_keywords(
    name: str, given: Iterable[str], function: Callable[..., Any], *, own: type[Options], taken: Iterable[str] = ()
) -> None:
    """Refuse keywords that the system's own function doesn't have, before anything runs.

    Args:
        name: The tracker.
        given: The keywords.
        function: What they go to.
        own: The tracker's options, for the message.
        taken: Keywords of the function that the tracker fills in itself.

    Raises:
        ConfigurationError: Naming the first one, with the nearest that there is.

    Example:
        >>> from drivetrain.tracking import TrackingOptions
        >>> check_keywords("toy", ["colour"], lambda color=None: None, own=TrackingOptions)
        Traceback (most recent call last):
        ...
        drivetrain.errors.ConfigurationError: The tracker 'toy' has no option 'colour'. Did you mean 'color'?
    """
    parameters = inspect.signature(function).parameters
    known: Mapping[str, Any] = {k: p for k, p in parameters.items() if k != "self" and k not in taken}
    for key in given:
        if key in taken:
            raise ConfigurationError(
                f"init_kwargs can't set {key!r} of the tracker {name!r}: Drivetrain gives it. See its options."
            )
        if key not in known or known[key].kind is inspect.Parameter.VAR_KEYWORD:
            raise ConfigurationError(
                f"The tracker {name!r} has no option {key!r}.{nearest(key, [*known, *own.hints()])}"
            )
