"""A plan as text, for ``accelerator.explain()`` and ``drivetrain explain``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, zip_longest

from drivetrain._engine.plan import PreparePlan, Row

__all__ = ["PARTS", "brief_rows", "plan_text"]

#: Title and column heads of each part; a part without columns is a list of sentences.
PARTS = {
    "chosen": ("Chosen", "what", "which", "why"),
    "settings": ("Settings", "setting", "value", "from"),
    "options": ("Options", "option", "value", "from"),
    "backend": ("Backend", "fact", "value", ""),
    "planning": ("Plans", "plan", "needs", ""),
    "precision": ("Precision", "modules", "computes in", ""),
    "rejected": ("Not chosen", "what", "why not"),
    "notes": ("Notes",),
}


def plan_text(plan: PreparePlan, *, width: int = 80, extra: Sequence[Row] = ()) -> str:
    """The plan as plain text: what was chosen and why, each setting and where it came from, what was not chosen and why not.

    Args:
        plan: The plan.
        width: Columns.
        extra: Further rows, of what was made of the plan.
    """
    lines: list[str] = []
    for part, group in groupby(brief_rows([*plan.rows(), *extra]), key=lambda row: row.part):
        rows = list(group)
        lines += ["", PARTS[part][0]] if lines else [PARTS[part][0]]
        if part == "notes":
            for row in rows:
                lines += textwrap.wrap(row.why, width, initial_indent="  - ", subsequent_indent="    ")
        else:
            lines += _columns(rows, width)
    return "\n".join(lines)


def brief_rows(rows: Iterable[Row]) -> Iterator[Row]:
    """The rows without options at their defaults, which are counted instead."""
    for part, group in groupby(rows, key=lambda row: row.part):
        if part != "options":
            yield from group
            continue
        for cls, fields in groupby(group, key=lambda row: row.name.partition(".")[0]):
            members = list(fields)
            said = [row for row in members if row.why != "default"]
            yield from said
            rest = len(members) - len(said)
            if rest:
                yield Row("options", cls, f"{rest} more" if said else "all", "default")


def _columns(rows: Sequence[Row], width: int) -> list[str]:
    """Name, value and reason side by side, each wrapped within its column."""
    name_width = min(max(len(row.name) for row in rows), width * 2 // 5)
    value_width = min(max(len(row.value) for row in rows), width * 7 // 20)
    gap = 2 if value_width else 0
    why_width = max(16, width - name_width - value_width - 4 - gap)
    lines = []
    for row in rows:
        name, value = textwrap.wrap(row.name, name_width), textwrap.wrap(row.value, max(1, value_width))
        why = textwrap.wrap(row.why, why_width, break_long_words=False, break_on_hyphens=False)
        below = max(map(len, why), default=0) > why_width  # a variable or a path is not broken, it gets a line
        for cells in zip_longest(name, value, () if below else why, fillvalue=""):
            left = f"  {cells[0]:<{name_width}}  {cells[1]:<{value_width}}"
            lines.append(f"{left}{' ' * gap}{cells[2]}".rstrip())
        if below:
            lines += textwrap.wrap(row.why, width, initial_indent="      ", subsequent_indent="      ")
    return lines
