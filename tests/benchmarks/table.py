"""The one table that the benchmarks print."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from .stats import Interval


@dataclass(frozen=True, slots=True)
class Row:
    """One measured thing.

    ``unit`` is "x" for ratios. ``target`` is the largest allowed value; None for figures that are only reported.
    """

    section: str
    what: str
    interval: Interval
    unit: str = "x"
    target: float | None = None

    @property
    def holds(self) -> bool | None:
        """Whether the whole interval lies inside the target; None without a target."""
        return None if self.target is None else self.interval.high <= self.target

    def to_dict(self) -> dict[str, object]:
        """The row as plain data."""
        return {**asdict(self), "holds": self.holds}


def render(rows: list[Row]) -> str:
    """The table as text, one line per row."""
    cells = [("", "estimate", "95 % interval", "target", "")]
    lines: list[tuple[str, ...] | str] = list(cells)
    section = None
    for row in rows:
        if row.section != section:
            section = row.section
            lines.append(section)
        i = row.interval
        target = "" if row.target is None else f"<= {_number(row.target)} {row.unit}"
        verdict = {None: "", True: "holds", False: "MISSED"}[row.holds]
        span = f"{_number(i.low)} to {_number(i.high)}"
        cells.append((f"  {row.what}", f"{_number(i.value)} {row.unit}", span, target, verdict))
        lines.append(cells[-1])
    widths = [max(len(cell[column]) for cell in cells) for column in range(5)]
    return "\n".join(line if isinstance(line, str) else _line(line, widths) for line in lines)


def _line(cells: tuple[str, ...], widths: list[int]) -> str:
    first, *others = (
        cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(cells, widths, strict=True))
    )
    return "   ".join([first, *others]).rstrip()


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.3f}"
