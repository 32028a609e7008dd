"""What a rehearsal found, as tables for people."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from drivetrain.rehearsal.report import Message, Report

__all__ = ["print_report", "size_text"]


def size_text(nbytes: int) -> str:
    """Bytes for people, in powers of ten as vendors count them.

    Example:
        >>> size_text(512), size_text(1_500_000), size_text(80 * 10**9)
        ('512 B', '1.50 MB', '80.00 GB')
    """
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000 or unit == "GB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    raise AssertionError


def print_report(report: Report, *, device_memory: int | None = None) -> None:
    """Print memory, messages, what was read and what was left out."""
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    facts = "".join(f", {name} {value}" for name, value in report.facts.items())
    console.print(
        f"[bold]rank {report.rank} of {report.world_size}[/bold]: {report.backend or 'no Accelerator'} in {report.precision or '-'}{escape(facts)}; "
        f"{report.steps} optimizer steps rehearsed in {report.seconds:.1f} s\n"
    )
    if report.sequence or report.peak:
        _print_memory(console, report, device_memory)
    if report.world_size > 1 and report.sequence:
        _print_messages(console, "before the first forward pass", report.setup)
        _print_messages(console, "in one step", report.per_step)
    _print_lines(console, "values read on the host, and assumed", report.reads)
    for note in report.notes:
        console.print(f"[dim]•[/dim] {escape(note)}")


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in ("bytes", "peak", "after", "count", "of") else "left")
    return table


def _print_memory(console: Console, report: Report, device_memory: int | None) -> None:
    table = _table("memory of this rank", "what", "peak", "after")
    for name in dict.fromkeys([*report.at_peak, *report.memory]):
        table.add_row(name, size_text(report.at_peak.get(name, 0)), size_text(report.memory.get(name, 0)))
    total = "all"
    if device_memory:
        total += f" ({report.peak / device_memory:.0%} of {size_text(device_memory)})"
    table.add_row(total, size_text(report.peak), size_text(sum(report.memory.values())), style="bold")
    console.print(table)
    console.print(f"[dim]before the first forward pass, with the whole model: {size_text(report.setup_peak)}[/dim]\n")


def _print_messages(console: Console, title: str, messages: Sequence[Message]) -> None:
    table = _table(f"messages {title}", "kind", "of", "count", "bytes", "where")
    for message in messages:
        where = escape(message.where)
        table.add_row(message.kind, str(message.group_size), str(message.count), size_text(message.nbytes), where)
    if not messages:
        table.add_row("none", "", "", "", "")
    console.print(table)
    console.print()


def _print_lines(console: Console, title: str, lines: Mapping[str, int]) -> None:
    if lines:
        table = _table(title, "line", "count")
        for where, count in lines.items():
            table.add_row(escape(where), str(count))
        console.print(table)
        console.print()
