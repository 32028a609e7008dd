"""Where ranks are: the Python stacks that they write down when the launcher asks them with a signal."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from drivetrain._places import is_users

__all__ = ["SIGNAL", "ask", "stacks_file", "stacks_text", "where_in"]

#: SIGUSR1 asks for a checkpoint (preemption), SIGQUIT ends programs: this one is free. None on Windows.
SIGNAL: int | None = getattr(signal, "SIGUSR2", None)

_POLL = 0.01
_SETTLED = 0.03


def stacks_file(error_file: Path) -> Path:
    """The file in which a rank writes its stacks down, beside that of its exception. It is there once the rank can be asked."""
    return error_file.with_name(f"{error_file.name}.stacks")


def ask(ranks: Mapping[int, tuple[int, Path]], *, seconds: float = 1.0) -> dict[int, str]:
    """Have ranks write down their stacks. They go on as if nothing had been; one that is stuck in native code answers too.

    Args:
        ranks: Process id and file by rank.
        seconds: How long to wait for them.

    Returns:
        The stacks by rank; those that can't be asked (a plain program, one that is just starting) or don't answer are missing.
    """
    before: dict[int, int] = {}
    for rank, (pid, file) in ranks.items():
        if SIGNAL is None or (size := _size(file)) is None:
            continue
        before[rank] = size
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, SIGNAL)
    found: dict[int, str] = {}
    deadline = time.monotonic() + seconds
    sizes: dict[int, tuple[int, float]] = {}
    while len(found) < len(before) and time.monotonic() < deadline:
        time.sleep(_POLL)
        now = time.monotonic()
        for rank, start in before.items():
            size = _size(ranks[rank][1])
            if rank in found or size is None or size == start:
                continue
            if sizes.get(rank, (0, 0.0))[0] != size:
                sizes[rank] = (size, now)  # still writing, perhaps
            elif now - sizes[rank][1] >= _SETTLED:
                text = ranks[rank][1].read_bytes()[start:].decode("utf-8", "replace")
                found[rank] = _without_listener(text).strip("\n")
    return found


def _size(file: Path) -> int | None:
    """None if it isn't there: not yet, or the job is over."""
    try:
        return file.stat().st_size
    except OSError:
        return None


def where_in(stacks: str) -> str:
    r"""The innermost line of the user's own code in the main thread, "train.py:88 (main)"; of any code if there is none of the user's.

    Example:
        >>> where_in('Current thread 0x1 (most recent call first):\n  File "/home/me/train.py", line 9 in main')
        '/home/me/train.py:9 (main)'
    """
    threads = re.split(r"^(?=(?:Current thread|Thread) 0x)", stacks, flags=re.MULTILINE)
    main = threads[-1] if len(threads) > 1 else stacks  # Python lists the oldest thread last
    frames = re.findall(r'^\s+File "(.*)", line (\d+) in (.*)$', main, re.MULTILINE)
    frames = [f for f in frames if not f[0].startswith("<frozen") and f[0] not in _STARTERS]
    own = [f for f in frames if is_users(f[0])]
    if not frames:
        return ""
    file, line, function = (own or frames)[0]
    return f"{file}:{line} ({function})"


def _without_listener(stacks: str) -> str:
    """Without the thread that waits for the launcher's questions."""
    threads = re.split(r"^(?=(?:Current thread|Thread) 0x)", stacks, flags=re.MULTILINE)
    return "".join(
        t for t in threads if not re.search(rf'^  File "{re.escape(_WORKER)}", line \d+ in listen$', t, re.MULTILINE)
    )


def stacks_text(stacks: Mapping[int, str], silent: Mapping[int, str], *, why: str) -> str:
    r"""The stacks for a person: ranks that stand at the same place share one.

    Args:
        stacks: By rank.
        silent: Why others have none, by rank.
        why: What they are shown for: "SIGUSR2".

    Example:
        >>> stack = "Thread 0x2 (most recent call first):\n  File 'a.py', line 1 in f"
        >>> print(stacks_text({0: stack, 1: stack.replace("0x2", "0x3")}, {2: "it doesn't answer"}, why="SIGUSR2"))
        drivetrain: where the ranks are (SIGUSR2)
        ranks 0, 1:
          Thread (most recent call first):
            File 'a.py', line 1 in f
        rank 2: no stack, it doesn't answer
    """
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(stacks.items()):
        groups.setdefault(re.sub(r" 0x[0-9a-f]+", "", text), []).append(rank)
    lines = [f"drivetrain: where the ranks are ({why})"]
    for text, ranks in groups.items():
        lines.append(f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}:")
        lines += [f"  {line}" for line in text.splitlines()]
    lines += [f"rank {rank}: no stack, {reason}" for rank, reason in sorted(silent.items())]
    return "\n".join(lines)


_WORKER = str(Path(__file__).with_name("_worker.py"))
#: What starts a rank: nobody's line, also while the rank is still in it.
_STARTERS = frozenset({_WORKER, str(Path(__file__).with_name("_function_rank.py"))})
