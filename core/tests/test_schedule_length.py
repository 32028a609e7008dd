"""Schedules made for Accelerate's stepping: found, told once, and stepped so on request."""

import functools
import runpy
import warnings

import pytest
import torch

from drivetrain import Accelerator
from drivetrain._engine.schedule_length import known_total

lr_scheduler = torch.optim.lr_scheduler


def make_optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)


def warmup(step, *, num_warmup_steps, num_training_steps):
    return min(1.0, step / num_warmup_steps, (num_training_steps - step) / num_training_steps)


def by_closure(num_training_steps):
    return lambda step: 1 - step / num_training_steps


@pytest.mark.parametrize(
    ("make", "total"),
    [
        (lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=7), 7),
        (lambda o: lr_scheduler.OneCycleLR(o, 0.1, epochs=2, steps_per_epoch=4), 8),
        (lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=9), 9),
        (lambda o: lr_scheduler.LinearLR(o, total_iters=3), 3),
        (lambda o: lr_scheduler.PolynomialLR(o, total_iters=4), 4),
        (
            lambda o: lr_scheduler.LambdaLR(o, functools.partial(warmup, num_warmup_steps=2, num_training_steps=12)),
            12,
        ),
        (lambda o: lr_scheduler.LambdaLR(o, by_closure(5)), 5),
        (
            lambda o: lr_scheduler.SequentialLR(
                o, [lr_scheduler.ConstantLR(o), lr_scheduler.CosineAnnealingLR(o, T_max=9)], [4]
            ),
            13,
        ),
        (lambda o: lr_scheduler.LambdaLR(o, lambda step: 1.0), None),
        (lambda o: lr_scheduler.StepLR(o, 3), None),
        (lr_scheduler.ReduceLROnPlateau, None),
    ],
)
def test_known_totals(make, total):
    known = known_total(make(make_optimizer()))
    assert (None if known is None else known[1]) == total


SCRIPT = """
import torch
from drivetrain import Accelerator

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, step_scheduler_per_process=per_process)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(torch.ones(24, 1), batch_size=3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=length)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, schedule)
for _ in accelerator.epochs(4) if counted else range(4):
    for x in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
accelerator.end_training()
"""
LINE = 1 + SCRIPT.splitlines().index(next(line for line in SCRIPT.splitlines() if line.startswith("schedule =")))


def train(path, length, counted, per_process):
    """On a rank: 24 rows in batches of 3, two ranks, two micro-batches a step, which is 2 steps an epoch; what was told, and the schedule."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        names = runpy.run_path(path, {"length": length, "counted": counted, "per_process": per_process})
    told = [str(w.message) for w in caught if "CosineAnnealingLR" in str(w.message)]
    return told, names["scheduler"].scheduler.last_epoch, names["optimizer"].param_groups[0]["lr"]


@pytest.fixture
def run(workers, tmp_path):
    def run(length, counted=True, per_process=False):
        path = tmp_path / "script.py"
        path.write_text(SCRIPT)
        return workers(2).run(train, str(path), length, counted, per_process)

    return run


@pytest.mark.parametrize("counted", [True, False])
def test_a_schedule_for_accelerate_is_told_once_with_its_line(run, counted):
    """8 steps in 4 epochs, and a script for Accelerate says 16."""
    (told, steps, _), (elsewhere, _, _) = run(16, counted)
    assert steps == 8 and elsewhere == [] and len(told) == 1, told
    assert "T_max=16, 2 times the 8 optimizer steps" in told[0], told
    assert f"Give it T_max=8 in script.py:{LINE}, or" in told[0], told


@pytest.mark.parametrize("length", [8, 9, 100])
def test_a_right_or_unrelated_length_is_not(run, length):
    for counted in (True, False):
        assert all(told == [] for told, _, _ in run(length, counted))


def test_accelerates_stepping_on_request(run):
    for told, steps, rate in run(16, per_process=True):
        assert told == [] and steps == 16
        assert rate == pytest.approx(0.0, abs=1e-9)


def beyond():
    """On a rank: a one-cycle schedule that Accelerate's stepping would step beyond its end; one by a metric steps once."""
    accelerator = Accelerator(cpu=True, step_scheduler_per_process=True)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cycle = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=2)
    model, optimizer, cycle, plateau = accelerator.prepare(model, optimizer, cycle, plateau)
    for _ in range(4):
        accelerator.backward(model(torch.ones(1, 1)).mean())
        optimizer.step()
        cycle.step()
    for _ in range(2):
        plateau.step(1.0)
    accelerator.end_training()
    return cycle.scheduler.last_epoch, plateau.scheduler.num_bad_epochs


def test_accelerates_stepping_stops_at_the_end(workers):
    assert workers(2).run(beyond) == [(5, 1)] * 2
