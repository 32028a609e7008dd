"""Plans for people: a table, bars, and what to write to train so."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

from drivetrain.memory.planning import format_bytes, format_seconds

if TYPE_CHECKING:
    from rich.console import Console

    from drivetrain.interfaces import ShardingPlan
    from drivetrain.memory import PlanReport

__all__ = ["render", "settings_of"]

#: Character and colour of each category's part of a bar.
_BARS = {
    "parameters": ("█", "blue"),
    "gradients": ("▓", "cyan"),
    "optimizer": ("▒", "magenta"),
    "activations": ("░", "green"),
    "gathered": ("▞", "yellow"),
    "communication": ("╍", "red"),
    "buffers": ("·", "white"),
}
_SHOWN = 12


def render(report: PlanReport, console: Console) -> None:
    """Print a report."""
    profile, hardware = report.profile, report.hardware
    how = "traced on fake tensors" if profile.traced else "by rules of thumb"
    console.print(
        f"[bold]{profile.name}[/bold]: {profile.parameter_count / 1e6:,.1f} M parameters ({format_bytes(profile.parameter_bytes)}), "
        f"{profile.optimizer.name} ({format_bytes(profile.optimizer.state)}), {profile.precision}, {how}"
    )
    console.print(
        f"{hardware.devices} x {hardware.name}: {format_bytes(hardware.memory)} each, {hardware.machines} machine(s); "
        f"{report.request.batch_size} samples per step\n"
    )
    plans = report.shown()
    if plans:
        _table(report, plans[:_SHOWN], console)
        if len(plans) > _SHOWN:
            console.print(f"and {len(plans) - _SHOWN} more (--json shows all)", style="dim")
        console.print()
        _bars(report, plans[:_SHOWN], console)
    _winner(report, console)


def _table(report: PlanReport, plans: list[ShardingPlan], console: Console) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left", title_style="bold")
    for column in ("#", "plan", "batch", "needs", "step", "sends", ""):
        table.add_column(column, justify="right" if column in ("#", "needs", "step", "sends") else "left")
    for i, plan in enumerate(plans, 1):
        fits = report.fits(plan)
        verdict = "chosen" if plan is report.best else "fits" if fits else "too large"
        table.add_row(
            str(i),
            plan.label,
            f"{plan.micro_batch} x {plan.accumulation}",
            format_bytes(plan.peak_bytes),
            format_seconds(plan.step_seconds),
            format_bytes(plan.communication_bytes),
            verdict,
            style="bold green" if plan is report.best else None if fits else "dim",
        )
    console.print(table)


def _bars(report: PlanReport, plans: list[ShardingPlan], console: Console) -> None:
    from rich.text import Text

    width = console.width - 16
    most = max([report.hardware.memory, *(min(p.peak_bytes, 2 * report.hardware.memory) for p in plans)])
    limit = round(report.budget / most * width)
    for i, plan in enumerate(plans, 1):
        cells: list[tuple[str, str]] = []
        done = 0
        for name, size in plan.memory_bytes.items():
            done += size
            until = min(round(done / most * width), width)
            cells += [_BARS.get(name, ("?", "white"))] * (until - len(cells))
        cells += [(" ", "white")] * (limit + 1 - len(cells))
        cells[limit] = ("|", "bold")
        bar = Text(f"{i:>3} ")
        for sign, style in cells:
            bar.append(sign, style=style)
        bar.append(f" {format_bytes(plan.peak_bytes)}")
        console.print(bar, no_wrap=True, overflow="crop")
    present = [n for n in _BARS if any(p.memory_bytes.get(n) for p in plans)]
    legend = Text("    ")
    for name in present:
        legend.append(f"{_BARS[name][0]} {name}  ", style=_BARS[name][1])
    legend.append(f"| {format_bytes(report.budget)}, what may be used")
    console.print(legend, soft_wrap=True)
    console.print()


def _winner(report: PlanReport, console: Console) -> None:
    best = report.best
    if best is None:
        console.print(f"[bold red]No plan[/bold red]: {report.reason}.", soft_wrap=True)
        return
    console.print(
        f"[bold green]{best.label}[/bold green], {report.reason}. Fullest in the {best.peak_at}.", soft_wrap=True
    )
    if best.host_bytes:
        console.print(f"It needs {format_bytes(best.host_bytes)} of the CPU's memory per device.")
    for note in best.notes:
        console.print(note)
    console.print(f"\nIn the configuration file, with micro-batches of {best.micro_batch} samples per device:\n")
    console.print(textwrap.indent(settings_of(report, best), "  "), markup=False, soft_wrap=True)


def settings_of(report: PlanReport, plan: ShardingPlan) -> str:
    """What a configuration file says to train so."""
    lines = [f'backend = "{plan.backend}"', f'mixed_precision = "{report.profile.precision}"']
    if plan.accumulation > 1:
        lines.append(f"gradient_accumulation_steps = {plan.accumulation}")
    if plan.sync_each_batch:
        lines += ["", "[gradient_accumulation]", "sync_each_batch = true"]
    if plan.recompute != "none":
        settings = report.profile.timelines[plan.recompute].recompute or {}
        lines += ["", "[activation_checkpointing]", *(_toml(k, v) for k, v in ({"every": 1} | dict(settings)).items())]
    if plan.options:
        lines += ["", f"[{plan.backend}]", *(_toml(k, v) for k, v in plan.options.items())]
    return "\n".join(lines)


def _toml(name: str, value: object) -> str:
    return f"{name} = {_value(value)}"


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(_toml(k, v) for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return json.dumps(value) if isinstance(value, str | bool) else str(value)
