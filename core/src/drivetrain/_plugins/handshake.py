"""Ranks compare what they run with: the plugins that the plan uses must be the same everywhere.

Imports torch when it is called, not before.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from drivetrain.errors import RankMismatchError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["flatten", "verify_ranks"]

_SECRET = re.compile(r"key|token|secret|password|credential", re.IGNORECASE)
_ABSENT = "(absent)"


def verify_ranks(
    fingerprint: Mapping[str, object],
    *,
    everything: Mapping[str, object] | None = None,
    group: ProcessGroup | None = None,
) -> None:
    """Fail on every rank if ranks run with different plugins or settings. A collective: every rank of the group must call it.

    Costs one gather of a 64-byte object; the details travel only when they differ.

    Args:
        fingerprint: What must be equal: plugins that the plan uses, their versions and resolved options. Values may be nested
            mappings, sequences, dataclasses, enums and plain values; others are compared by their printed form.
        everything: What should be equal, such as all installed plugins: a difference is one warning on the group's first rank.
        group: The process group; None for all processes.

    Raises:
        RankMismatchError: On every rank, with the same text: what differs, on which ranks, and how.

    Example:
        >>> verify_ranks({"backend": "single"})  # without a process group there is nobody to differ from
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return
    mine = (flatten(fingerprint), flatten(everything or {}))
    digests = _gather(b"".join(_digest(part) for part in mine), group)
    used, rest = {digest[:32] for digest in digests}, {digest[32:] for digest in digests}
    if len(used) == len(rest) == 1:
        return
    answers: list[tuple[dict[str, str], dict[str, str]]] = _gather(mine, group)
    ranks = [dist.get_global_rank(group, i) if group is not None else i for i in range(len(answers))]
    if len(used) > 1:
        text = "\n".join(_differences([answer[0] for answer in answers], ranks))
        raise RankMismatchError(
            f"Ranks don't run with the same plugins and settings:\n{text}\n"
            "Install the same versions on every machine and give every rank the same arguments, variables and configuration file."
        )
    if dist.get_rank(group) == 0:
        text = "\n".join(_differences([answer[1] for answer in answers], ranks))
        warnings.warn(f"Ranks differ in plugins that this run doesn't use:\n{text}", stacklevel=2)


def flatten(value: object, prefix: str = "") -> dict[str, str]:
    """Leaves of a nested structure by dotted path, printed alike on every rank: no memory addresses, sets sorted.

    Example:
        >>> flatten({"ddp": {"version": "1.0", "sizes": [1, 2], "flags": {"b", "a"}}})
        {'ddp.flags': "{'a', 'b'}", 'ddp.sizes': '[1, 2]', 'ddp.version': "'1.0'"}
    """
    return dict(sorted(_leaves(value, prefix)))


def _leaves(value: object, path: str) -> Iterator[tuple[str, str]]:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping) and (value or not path):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, _printed(value)


def _printed(value: object) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, Mapping) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        leaves = flatten(value)
        return "{" + ", ".join(f"{key}: {text}" for key, text in leaves.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_printed(item) for item in value) + "]"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(_printed(item) for item in value)) + "}"
    name = getattr(value, "__qualname__", None)
    if name is not None:
        return f"{getattr(value, '__module__', '')}.{name}"
    try:
        text = repr(value)
    except Exception as error:  # a rank that raised here would leave the others waiting
        return f"{type(value).__qualname__} object whose repr raises {type(error).__name__}"
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _digest(leaves: Mapping[str, str]) -> bytes:
    return hashlib.sha256(repr(sorted(leaves.items())).encode("utf-8", "surrogatepass")).digest()


def _gather(value: Any, group: ProcessGroup | None) -> list[Any]:
    import torch.distributed as dist

    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, value, group=group)
    return gathered


def _differences(leaves: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> Iterator[str]:
    """One line for each path whose value isn't the same everywhere."""
    for path in sorted({path for part in leaves for path in part}):
        values: dict[str, list[int]] = {}
        for rank, part in zip(ranks, leaves, strict=True):
            values.setdefault(part.get(path, _ABSENT), []).append(rank)
        if len(values) == 1:
            continue
        if _SECRET.search(path):
            groups = "; ".join(_rank_list(where) for where in values.values())
            yield f"  {path}: differs between {groups} (the values may be secret and are not shown)"
        else:
            yield f"  {path}: " + "; ".join(f"{value} on {_rank_list(where)}" for value, where in values.items())


def _rank_list(ranks: Sequence[int]) -> str:
    """Ranks as ranges.

    Example:
        >>> _rank_list([0, 1, 2, 5])
        'ranks 0-2, 5'
    """
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"rank {text}" if len(ranks) == 1 else f"ranks {text}"
