"""What torch's flight recorder has of a rank's collectives, written down by the rank when its launcher asks or when it fails.

The recorder of torch notes each collective of each process group, whoever called it: the script, Drivetrain, DistributedDataParallel in native code.
Runs in the rank, on a thread of its own: the rank itself may be waiting in one of those collectives. Imports no torch; without it there is nothing to
write down.
"""

from __future__ import annotations

import json
import pickle
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drivetrain._marks import marks
from drivetrain._places import is_users

__all__ = ["flight_of", "name_in", "write"]

#: Names of functions that say nothing to a person: what they call is looked at instead.
_WRAPPERS = frozenset({"wrapper", "inner", "decorate_context", "call", "wrapped_func"})
_NEXT = frozenset({"__iter__", "__next__"})


def write(path: str) -> None:
    """Write the collectives of this process to a file, which is there when it is whole."""
    flight = flight_of(_recorded(), _groups(), threading.main_thread().ident)
    notes = marks()
    flight["step"] = None if notes is None or not notes.when else [notes.step, notes.when]
    part = Path(f"{path}.{threading.get_ident()}")  # a rank that fails may be asked at the same time
    part.write_text(json.dumps(flight), encoding="utf-8")
    part.replace(path)


def flight_of(trace: Mapping[str, Any], groups: Mapping[str, Sequence[int]], main: int | None) -> dict[str, Any]:
    """The recorder's trace as a launcher needs it: collectives that the main thread (or autograd for it) began, with the user's lines.

    Args:
        trace: What the recorder gave.
        groups: The ranks of each process group by its name.
        main: Identity of the main thread.

    Example:
        >>> frames = [{"name": "all_reduce", "filename": sys.modules["json"].__file__, "line": 9}, {"name": "f", "filename": "a.py", "line": 3}]
        >>> entry = {"process_group": ("0", "default_pg"), "collective_seq_id": 4, "profiling_name": "gloo:all_reduce", "frames": frames,
        ...     "time_created_ns": 5, "input_sizes": [[2]], "input_dtypes": ["Float"], "retired": False}
        >>> flight_of({"entries": [entry]}, {"0": [0, 1]}, None)["entries"][0]["name"]
        'all_reduce'
    """
    found = []
    for entry in trace.get("entries", ()):
        thread = str(entry.get("thread_id", ""))
        if (
            thread.isdecimal()
            and int(thread) != main
            and not str(entry.get("thread_name", "")).startswith("pt_autograd")
        ):
            continue  # a background thread's messages come when they come
        frames = [(f["filename"], int(f["line"]), f["name"]) for f in entry.get("frames", ())]
        own = [i for i, frame in enumerate(frames) if is_users(frame[0])]
        name, description = entry["process_group"]
        found.append(
            {
                "group": name,
                "description": description,
                "number": entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"],
                "p2p": bool(entry.get("is_p2p")),
                "operation": str(entry["profiling_name"]).rpartition(":")[2],
                "time": entry["time_created_ns"],
                "sizes": entry.get("input_sizes", []),
                "dtypes": entry.get("input_dtypes", []),
                "waiting": not entry.get("retired", True),
                "name": name_in([frame[2] for frame in frames[: own[0]]]) if own else "",
                "places": [frames[i] for i in own[:8]],
            }
        )
    return {"groups": {name: list(ranks) for name, ranks in groups.items()}, "entries": found}


def name_in(names: Sequence[str]) -> str:
    """What the user called, given the functions of libraries that run, innermost first.

    Example:
        >>> name_in(["all_reduce", "wrapper"]), name_in(["forward", "_call_impl", "_wrapped_call_impl"]), name_in(["ask", "__iter__"])
        ('all_reduce', 'forward', 'next batch')
    """
    for name in reversed(names):
        if name in _NEXT:
            return "next batch"
        if not name.startswith(("_", "<")) and name not in _WRAPPERS:
            return name
    return ""


def _recorded() -> dict[str, Any]:
    """What torch's recorder has; nothing if torch isn't loaded, or has none."""
    module = sys.modules.get("torch._C._distributed_c10d")
    for name in ("_dump_fr_trace", "_dump_nccl_trace"):
        dump = getattr(module, name, None)
        if dump is not None:
            trace: dict[str, Any] = pickle.loads(dump())  # this process's own
            return trace
    return {}


def _groups() -> dict[str, list[int]]:
    """The global ranks of each process group that this rank is in, by its name."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    if world is None:
        return {}
    return {world.pg_names[group]: sorted(ranks) for group, ranks in list(world.pg_group_ranks.items())}
