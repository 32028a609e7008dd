"""The questions of ``drivetrain config``: as few as can be, with what was found here as proposals."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from drivetrain.cli._settings import Assignments, Key

__all__ = ["Question", "ask", "questions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question.

    Args:
        key: The setting that it is about.
        text: The question.
        default: What is proposed.
        choices: What may be chosen, with a line that explains each; empty for a number or text.
        number: The answer is a whole number, of at least this.
    """

    key: Key
    text: str
    default: Any
    choices: Mapping[str, str] | None = None
    number: int | None = None


def ask(given: Assignments, *, propose_only: bool) -> Assignments:
    """Complete the given answers.

    Args:
        given: Answers from the command line: they aren't asked for.
        propose_only: Take proposals instead of asking.

    Raises:
        KeyboardInterrupt: If the user gives up.
    """
    values = dict(given.values)
    for question in questions(values):
        if question.key in values:
            continue
        values[question.key] = question.default if propose_only else _answer(question)
    unsaid = {("", "backend"): "auto", ("", "mixed_precision"): "no", ("launch", "num_machines"): 1}
    kept = {k: v for k, v in values.items() if k in given.values or unsaid.get(k) != v}
    return Assignments(kept)


def questions(values: Mapping[Key, Any]) -> Iterator[Question]:
    """The questions in their order; each looks at the answers up to then.

    Args:
        values: The answers, completed by whoever asks.
    """
    from drivetrain._engine.availability import detect_devices
    from drivetrain._plugins import get_registry
    from drivetrain.launch._environment import available_cores

    registry = get_registry()
    availability = detect_devices(registry.specs("device").values())
    found = [(s, availability.status(s.name).count) for s in registry.specs("device").values() if s.torch_type != "cpu"]
    found = [(s, n) for s, n in found if n]
    spec, count = max(found, key=lambda pair: pair[0].priority, default=(None, 0))
    yield Question(key=("launch", "num_machines"), text="How many machines?", default=1, number=1)
    machines = values[("launch", "num_machines")]
    if machines > 1:
        yield Question(
            key=("launch", "main_process_ip"),
            text="Name or address of the first machine (the rank of each is given at launch, --machine-rank)?",
            default=socket.gethostname(),
        )
        yield Question(
            key=("launch", "main_process_port"), text="A free port on the first machine?", default=29500, number=1
        )
    here = f"{count} {spec.name} device(s)" if spec is not None else f"no accelerator and {available_cores()} cores"
    where = f" in all, over {machines} machines" if machines > 1 else ""
    yield Question(
        key=("launch", "num_processes"),
        text=f"How many processes{where}? (Found here: {here}.)",
        default=max(count, 1) * machines,
        number=1,
    )
    if values[("launch", "num_processes")] > 1:
        yield from _backends(registry)
    names = {p.aliases[0] if p.aliases else p.name: p.summary for p in registry.specs("precision").values()}
    yield Question(key=("", "mixed_precision"), text="Which precision?", default="no", choices=names)


def _backends(registry: Any) -> Iterator[Question]:
    """Asked only where there is a choice."""
    from drivetrain.specs import Capability

    able = {b.name: b.summary for b in registry.specs("backend").values() if Capability.DISTRIBUTED in b.capabilities}
    if len(able) > 1:
        choices = {"auto": "what fits best", **able}
        yield Question(key=("", "backend"), text="Which backend?", default="auto", choices=choices)


def _answer(question: Question) -> Any:
    import questionary

    prompt: Callable[[], Any]
    if question.choices:
        rows = [questionary.Choice(f"{name:<10} {text}", value=name) for name, text in question.choices.items()]
        prompt = questionary.select(question.text, choices=rows, default=question.default).unsafe_ask
    else:
        prompt = questionary.text(
            question.text, default=str(question.default), validate=_validator(question)
        ).unsafe_ask
    value = prompt()
    return value if question.number is None else int(value)


def _validator(question: Question) -> Callable[[str], bool | str]:
    low = question.number

    def validate(text: str) -> bool | str:
        if low is None:
            return bool(text.strip()) or "Please say something."
        return (text.strip().isdigit() and int(text) >= low) or f"A whole number of at least {low}."

    return validate
