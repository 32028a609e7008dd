"""Searching a batch size: alone and on ranks, with the global batch kept."""

import logging

import pytest
import torch

from drivetrain import Accelerator, find_executable_batch_size
from drivetrain.errors import ConfigurationError, DrivetrainError


def fits(limit):
    """A function for which so many rows fit."""
    sizes = []

    def function(batch_size, *args, **kwargs):
        sizes.append(batch_size)
        if batch_size > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return (batch_size, *args, *kwargs.values())

    function.sizes = sizes
    return function


def test_halves_until_it_fits():
    function = fits(20)
    assert find_executable_batch_size(function, 128)("a", b="b") == (16, "a", "b")
    assert function.sizes == [128, 64, 32, 16]


def test_a_size_of_ones_own():
    sizes = iter([100, 90, 7])
    function = fits(10)
    assert find_executable_batch_size(function, 128, lambda: next(sizes))()[0] == 7
    assert function.sizes == [128, 100, 90, 7]
    with pytest.raises(ConfigurationError, match="must get smaller"):
        find_executable_batch_size(fits(1), 8, lambda: 8)()


def test_the_floor():
    function = fits(3)
    with pytest.raises(DrivetrainError, match="from 16 down to 4 fits"):
        find_executable_batch_size(function, 16, minimum_batch_size=4)()
    assert function.sizes == [16, 8, 4]


def test_other_errors_pass():
    @find_executable_batch_size(starting_batch_size=4)
    def broken(batch_size):
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        broken()


def test_the_batch_size_is_not_to_be_given():
    with pytest.raises(TypeError, match=r"call it without, as train\(model\)"):

        @find_executable_batch_size
        def train(batch_size, model):
            pass

        train(8, "model")


@pytest.mark.parametrize(
    ("first", "steps", "limit", "found"),
    [(64, 1, 20, (16, 4)), (96, 2, 5, (3, 64)), (100, 1, 30, (25, 4)), (12, 3, 12, (12, 3)), (7, 1, 3, (1, 7))],
)
def test_the_global_batch_is_kept(first, steps, limit, found):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=steps)
    function = fits(limit)
    seen = []

    def train(batch_size):
        seen.append(batch_size * accelerator.gradient_accumulation_steps)
        return function(batch_size)[0]

    size = find_executable_batch_size(train, first, accelerator=accelerator)()
    assert (size, accelerator.gradient_accumulation_steps) == found
    assert set(seen) == {first * steps}


def test_a_size_that_cannot_keep_the_global_batch_is_refused():
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigurationError, match="doesn't divide the 16 rows"):
        find_executable_batch_size(fits(1), 16, lambda: 5, accelerator=accelerator)()


def test_each_try_is_told(caplog):
    accelerator = Accelerator(cpu=True)
    with caplog.at_level(logging.WARNING):
        find_executable_batch_size(fits(4), 8, accelerator=accelerator)()
    assert [r.message for r in caplog.records] == [
        "Batch size 8 with gradient_accumulation_steps=1 did not fit in memory (CUDA out of memory. Tried to allocate 2 GiB).",
        "Batch size 4 with gradient_accumulation_steps=2 fits.",
    ]


def test_prepared_objects_are_forgotten_between_tries():
    accelerator = Accelerator(cpu=True)
    alive = []

    def train(batch_size):
        assert accelerator._models == []
        alive.append(accelerator.prepare(torch.nn.Linear(1, 1)))
        if batch_size > 2:
            raise torch.OutOfMemoryError("out of memory")

    find_executable_batch_size(train, 8, accelerator=accelerator)()
    assert len(alive) == 3


def test_alone_a_late_failure_is_the_next_try():
    accelerator = Accelerator(cpu=True)
    sizes = []

    def train(batch_size):
        sizes.append(batch_size)
        model = accelerator.prepare(torch.nn.Linear(1, 1))
        for window in range(6):
            accelerator.backward(model(torch.ones(batch_size, 1)).sum())
            if window == 5 and batch_size > 2:
                raise torch.OutOfMemoryError("out of memory")
        return batch_size

    assert find_executable_batch_size(train, 8, accelerator=accelerator)() == 2
    assert sizes == [8, 4, 2]


def test_no_window_is_refused():
    with pytest.raises(ConfigurationError, match="at least one window, or None for all"):
        find_executable_batch_size(fits(1), 8, agree_windows=0)


# -- on ranks --------------------------------------------------------------------------------------------------------------


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fail):
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.fail:
            raise torch.OutOfMemoryError("CUDA out of memory in backward")
        return gradient, None


def make():
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    rows = torch.randn(64, 4, generator=generator)
    return model, rows


def search(where, bad_rank, limit, weighted=False, late=False, agree_windows=2):
    """On a rank: train over 64 rows; only ``bad_rank`` runs out, where ``where`` says."""
    accelerator = Accelerator(cpu=True)
    tries = []

    def train(batch_size):
        tries.append((batch_size, accelerator.gradient_accumulation_steps))
        bad = accelerator.process_index == bad_rank and batch_size > limit
        if bad and where == "before":
            raise torch.OutOfMemoryError("CUDA out of memory")
        model, rows = make()
        loader = torch.utils.data.DataLoader(rows, batch_size=batch_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        windows = 0
        for x in loader:
            with accelerator.accumulate(model):
                now = bad and windows >= (3 if late else 1)
                if now and where == "forward":
                    raise torch.OutOfMemoryError("CUDA out of memory")
                y = FailsInBackward.apply(model(x), now and where == "backward")
                accelerator.backward(y.pow(2).mean(), **({"weight": len(x)} if weighted else {}))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                windows += accelerator.sync_gradients
        return [p.detach() for p in accelerator.unwrap_model(model).parameters()]

    weights = find_executable_batch_size(train, 8, accelerator=accelerator, agree_windows=agree_windows)()
    assert accelerator.gradient_state.probe is None
    accelerator.end_training()
    return tries, weights


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("where", ["before", "forward", "backward"])
def test_one_ranks_failure_shrinks_all_and_the_numbers_stay(workers, where, weighted):
    results = workers(2).run(search, where, 1, 2, weighted)
    undisturbed = workers(2).run(search, "nowhere", 1, 2, weighted)
    for tries, weights in results:
        assert tries == [(8, 1), (4, 2), (2, 4)]
        for ours, theirs, first in zip(weights, undisturbed[0][1], results[0][1], strict=True):
            assert torch.equal(ours, first)
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_one_ranks_failure_late_in_a_try_shrinks_all_where_they_agree_throughout(workers, where):
    results = workers(2).run(search, where, 1, 4, late=True, agree_windows=None)
    undisturbed = workers(2).run(search, "nowhere", 1, 4)
    for tries, weights in results:
        assert tries == [(8, 1), (4, 2)]
        for ours, theirs in zip(weights, undisturbed[0][1], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def late():
    try:
        search("forward", 0, 4, late=True)
    except DrivetrainError as error:
        return str(error)


@pytest.mark.full
def test_running_out_later_is_an_error(workers):
    """The failing rank says why; the others are ended by the launcher (here: by the pool)."""
    from drivetrain.testing.workers import RemoteError, WorkerPool

    def only_rank_0():
        import os

        message = late() if os.environ["RANK"] == "0" else None
        if os.environ["RANK"] == "0":
            raise RuntimeError(message)
        late()

    with WorkerPool(2, timeout=30) as pool, pytest.raises((RemoteError, TimeoutError)) as caught:
        pool.run(only_rank_0)
    assert "Memory ran out after the first 2 windows had fit" in str(caught.value)
