"""Which optimizer belongs to which model: DeepSpeed makes an engine of the two together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from drivetrain.errors import NotPreparedError, UnsupportedError

__all__ = ["match", "parameters_of"]


def parameters_of(optimizer: Any) -> list[Any]:
    """The parameters of a torch optimizer or of a placeholder, in the order of its groups.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> len(parameters_of(torch.optim.SGD(layer.parameters(), lr=0.1)))
        2
    """
    groups = getattr(optimizer, "param_groups", None)
    return list(_flat(optimizer.params if groups is None else groups))


def _flat(given: Any) -> Iterator[Any]:
    for item in given:
        yield from item["params"] if isinstance(item, dict) else [item]


def match(models: Sequence[torch.nn.Module], optimizers: Sequence[Any]) -> dict[int, int]:
    """The number of each optimizer's model.

    Args:
        models: Models of one ``prepare``.
        optimizers: Its optimizers and placeholders.

    Raises:
        NotPreparedError: If an optimizer comes without its model.
        UnsupportedError: If one updates several models, or a model has several.

    Example:
        >>> a, b = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> match([a, b], [torch.optim.SGD(b.parameters(), lr=0.1)])
        {0: 1}
    """
    owners: dict[int, set[int]] = {}
    for i, model in enumerate(models):
        for parameter in model.parameters():
            owners.setdefault(id(parameter), set()).add(i)
    found: dict[int, int] = {}
    for j, optimizer in enumerate(optimizers):
        name = type(optimizer).__name__
        parameters = parameters_of(optimizer)
        if not parameters:
            raise UnsupportedError(f"{name} has no parameters. Leave it out, or give it the model's.")
        holders: set[int] = set()
        for parameter in parameters:
            if id(parameter) not in owners:
                raise NotPreparedError(
                    f"DeepSpeed makes one engine of a model and its optimizer, and {name} has parameters of a model that isn't in this prepare(): "
                    "give both to one call, accelerator.prepare(model, optimizer, ...)."
                )
            holders |= owners[id(parameter)]
        if len(holders) > 1:
            raise UnsupportedError(
                f"{name} updates parameters of {len(holders)} models, and DeepSpeed makes one engine of a model and its optimizer. Give each model "
                "an optimizer of its own, or put the models into one torch.nn.Module."
            )
        found[j] = holders.pop()
    twice = sorted({type(models[i]).__name__ for i in found.values() if list(found.values()).count(i) > 1})
    if twice:
        raise UnsupportedError(
            f"{twice[0]} has several optimizers, and DeepSpeed makes one engine of a model and its optimizer. Use one optimizer with several "
            "parameter groups."
        )
    return found
