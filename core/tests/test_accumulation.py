"""Windows without loaders: the arithmetic, and what calls do inside and outside of them."""

import pytest
import torch

from drivetrain._engine.accumulation import Accumulator
from drivetrain._engine.optimizer import PreparedOptimizer
from drivetrain._engine.scheduler import PreparedScheduler
from drivetrain.errors import ConfigurationError
from drivetrain.interfaces import Backend, BackendContext, Precision, TorchDevice
from drivetrain.specs import BackendSpec, Capability, DeviceSpec, PrecisionSpec, ProcessInfo


class Batch:
    def __init__(self, rows, is_last=False):
        self.rows, self.rank_rows, self.is_last = rows, (rows,), is_last


class Plan:
    def __init__(self, size, global_rows):
        self.size, self.global_rows = size, global_rows


class Loader:
    """A loader of known batch sizes, or of unknown length."""

    def __init__(self, sizes, known=True):
        self.sizes, self.known, self.batch, self.position = sizes, known, None, -1

    def __iter__(self):
        for self.position, rows in enumerate(self.sizes):
            self.batch = Batch(rows, is_last=self.position == len(self.sizes) - 1)
            yield self.position
        self.batch = None

    def plan_window(self, k):
        rest = self.sizes[self.position : self.position + k]
        return Plan(len(rest), sum(rest)) if self.known else None


class Stack:
    active = None


def make_backend():
    device = TorchDevice(DeviceSpec(name="cpu", torch_type="cpu", communication_backend="gloo"))
    precision = Precision(PrecisionSpec(name="fp32"), device_type="cpu")
    context = BackendContext(
        process=ProcessInfo(), device=device, torch_device=torch.device("cpu"), precision=precision
    )
    spec = BackendSpec(name="single", capabilities=frozenset({Capability.ITEM_WEIGHTS}))
    return Backend(spec, context)


class Run:
    def __init__(self, loader=None, steps=1, **settings):
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 1, bias=False)
        self.stack = Stack()
        self.stack.active = loader
        self.accumulator = Accumulator(make_backend(), self.stack, num_steps=steps, **settings)
        self.stepped = 0
        self.optimizer = PreparedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.0),
            backend=self.accumulator.backend,
            accumulator=self.accumulator,
            on_step=self.count,
        )

    def count(self):
        self.stepped += 1

    @property
    def gradient(self):
        return self.model.weight.grad.clone()


def data(sizes):
    torch.manual_seed(3)
    return [torch.randn(n, 3) for n in sizes]


def big_batch_gradient(model, batches):
    rows = torch.cat(batches)
    (grad,) = torch.autograd.grad(model(rows).pow(2).mean(), model.weight)
    return grad


def train(run, loader, batches, **backward):
    """Gradients at each window's end, before the optimizer steps."""
    seen = []
    for i in loader:
        with run.accumulator.window((run.model,)):
            run.accumulator.backward(run.model(batches[i]).pow(2).mean(), **{k: v[i] for k, v in backward.items()})
            run.optimizer.step()
            if run.accumulator.sync_gradients:
                seen.append(run.gradient)
            run.optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("sizes", [[4, 4, 4, 4], [4, 4, 4, 4, 4], [4, 4, 4, 4, 3], [4, 4, 4, 4, 4, 1], [2]])
def test_a_window_has_the_gradient_of_its_rows_as_one_batch(sizes, known):
    loader, batches = Loader(sizes, known), data(sizes)
    run = Run(loader, steps=4)
    seen = train(run, loader, batches)
    windows = [batches[i : i + 4] for i in range(0, len(sizes), 4)]
    assert len(seen) == len(windows) == run.stepped
    for got, window in zip(seen, windows, strict=True):
        torch.testing.assert_close(got, big_batch_gradient(run.model, window))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("items", [[1, 3, 2, 5, 4], [0, 3, 0, 0, 7], [0, 0, 0, 0, 2]])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_item_weights_give_the_mean_over_all_items(items, reduction, as_tensor):
    sizes = [max(n, 1) for n in items]
    loader, batches = Loader(sizes), data(sizes)
    run = Run(loader, steps=4)
    seen = []
    for i in loader:
        with run.accumulator.window((run.model,)):
            each = run.model(batches[i]).pow(2) * (items[i] > 0)
            loss = each.sum() if reduction == "sum" else each.sum() / max(items[i], 1)
            weight = torch.tensor(items[i]) if as_tensor else items[i]
            run.accumulator.backward(loss, weight=weight, reduction=reduction)
            run.optimizer.step()
            if run.accumulator.sync_gradients:
                seen.append(run.gradient)
            run.optimizer.zero_grad()
    for got, start in zip(seen, (0, 4), strict=True):
        window = [batches[i] for i in range(start, min(start + 4, 5)) if items[i]]
        expected = big_batch_gradient(run.model, window) if window else torch.zeros(1, 3)
        torch.testing.assert_close(got, expected)


def test_weights_in_some_calls_of_a_window_only_are_refused():
    loader = Loader([2, 2])
    run = Run(loader, steps=2)
    with pytest.raises(ConfigurationError, match="every call"):
        for i in loader:
            with run.accumulator.window((run.model,)):
                run.accumulator.backward(run.model(torch.ones(2, 3)).mean(), weight=2 if i else None)


def test_zero_grad_first_keeps_the_window_as_zero_grad_last_does():
    sizes = [4, 4, 4, 4, 4]
    loader, batches = Loader(sizes), data(sizes)
    run = Run(loader, steps=2)
    seen = []
    for i in loader:
        with run.accumulator.window((run.model,)):
            run.optimizer.zero_grad()
            run.accumulator.backward(run.model(batches[i]).pow(2).mean())
            run.optimizer.step()
            if run.accumulator.sync_gradients:
                seen.append(run.gradient)
    for got, start in zip(seen, (0, 2, 4), strict=True):
        torch.testing.assert_close(got, big_batch_gradient(run.model, batches[start : start + 2]))


def test_zero_grad_instead_of_step_drops_the_window():
    loader, batches = Loader([4, 4, 4, 4]), data([4] * 4)
    run = Run(loader, steps=2)
    for i in loader:
        with run.accumulator.window((run.model,)):
            run.accumulator.backward(run.model(batches[i]).pow(2).mean())
            if i == 1:
                run.optimizer.zero_grad()
                continue
            run.optimizer.step()
            if i == 3:
                torch.testing.assert_close(run.gradient, big_batch_gradient(run.model, batches[2:]))
            run.optimizer.zero_grad()
    assert run.stepped == 1


def test_models_trained_alternately_have_windows_of_their_own():
    loader, batches = Loader([4] * 4), data([4] * 4)
    run = Run(loader, steps=2)
    other = torch.nn.Linear(3, 1, bias=False)
    ends = {"a": [], "b": []}
    for i in loader:
        with run.accumulator.window((run.model,)):
            run.accumulator.backward(run.model(batches[i]).pow(2).mean())
            ends["a"].append(run.accumulator.sync_gradients)
        with run.accumulator.window((other,)):
            run.accumulator.backward(other(batches[i]).pow(2).mean())
            ends["b"].append(run.accumulator.sync_gradients)
    assert ends == {"a": [False, True, False, True], "b": [False, True, False, True]}
    torch.testing.assert_close(other.weight.grad, 2 * big_batch_gradient(other, batches))


def test_a_loop_left_early_and_begun_again_still_normalises_by_what_it_saw():
    run = Run(None, steps=4)
    batches = data([4, 4, 4, 4])
    first, second = Loader([4, 4, 4, 4]), Loader([4, 4])
    run.stack.active = first
    for i in first:
        with run.accumulator.window((run.model,)):
            run.accumulator.backward(run.model(batches[i]).pow(2).mean())
        if i == 1:
            break
    run.stack.active = second
    for i in second:
        with run.accumulator.window((run.model,)):
            run.accumulator.backward(run.model(batches[2 + i]).pow(2).mean())
            run.optimizer.step()
    assert run.stepped == 1
    torch.testing.assert_close(run.gradient, big_batch_gradient(run.model, batches))


def test_without_sync_with_dataloader_windows_cross_the_end_of_data():
    run = Run(None, steps=2, sync_with_dataloader=False)
    batches = data([4, 4, 2])
    ends, seen = [], []
    for _ in range(2):
        loader = run.stack.active = Loader([4, 4, 2])
        for i in loader:
            with run.accumulator.window((run.model,)):
                run.accumulator.backward(run.model(batches[i]).pow(2).mean())
                run.optimizer.step()
                ends.append(run.accumulator.sync_gradients)
                if ends[-1]:
                    seen.append(run.gradient)
                run.optimizer.zero_grad()
    assert ends == [False, True] * 3
    for got, parts in zip(seen, ([0, 1], [2, 0], [1, 2]), strict=True):
        torch.testing.assert_close(got, big_batch_gradient(run.model, [batches[i] for i in parts]))


def test_outside_of_accumulate_the_user_cuts_windows_by_hand():
    run = Run(None, steps=2)
    batches = data([4, 4])
    for batch in batches:
        run.accumulator.backward(run.model(batch).pow(2).mean())
    run.optimizer.step()
    torch.testing.assert_close(run.gradient, big_batch_gradient(run.model, batches))
    assert run.stepped == 1


def test_outside_of_accumulate_item_weights_count_until_the_step():
    run = Run(None, steps=2)
    batches = data([1, 5])
    for _ in range(2):
        run.optimizer.zero_grad()
        for batch in batches:
            run.accumulator.backward(run.model(batch).pow(2).mean(), weight=len(batch))
        run.optimizer.step()
        torch.testing.assert_close(run.gradient, big_batch_gradient(run.model, batches))


def test_a_bare_backward_does_not_inherit_the_verdict_of_an_unfinished_window():
    loader = Loader([4, 4])
    run = Run(loader, steps=2)
    for _ in loader:
        with run.accumulator.window((run.model,)):
            run.accumulator.backward(run.model(torch.ones(4, 3)).mean())
        break
    assert not run.accumulator.sync_gradients
    run.accumulator.backward(run.model(torch.ones(4, 3)).mean())
    assert run.accumulator.sync_gradients


def test_scheduler_steps_with_windows_and_a_metric_scheduler_after_epochs():
    loader = Loader([4] * 5)
    run = Run(loader, steps=2)
    for group in run.optimizer.param_groups:
        group["lr"] = 1.0
    inner = torch.optim.lr_scheduler.StepLR(run.optimizer.optimizer, 1, gamma=0.5)
    scheduler = PreparedScheduler(inner, [run.optimizer], accumulator=run.accumulator)
    plateau = PreparedScheduler(
        torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer.optimizer, patience=0, factor=0.1),
        [run.optimizer],
        accumulator=run.accumulator,
    )
    for _ in loader:
        with run.accumulator.window((run.model,)):
            run.accumulator.backward(run.model(torch.ones(4, 3)).mean())
            run.optimizer.step()
            scheduler.step()
    assert run.stepped == 3
    assert scheduler.get_last_lr() == [0.125]
    run.accumulator.sync_gradients = False
    plateau.step(1.0)
    plateau.step(2.0)
    assert run.optimizer.param_groups[0]["lr"] == pytest.approx(0.0125)


def test_accelerate_names_of_the_gradient_state():
    loader = Loader([4, 3])
    state = Run(loader, steps=2).accumulator
    assert state.plugin_kwargs == {
        "num_steps": 2,
        "adjust_scheduler": True,
        "sync_with_dataloader": True,
        "sync_each_batch": False,
    }
    assert [state.end_of_dataloader for _ in loader] == [False, True]
    state._set_sync_gradients(False)
    assert not state.sync_gradients


# -- items ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0, 0.0, torch.tensor(0)])
@pytest.mark.parametrize("steps", [1, 2])
def test_a_loss_over_no_items_must_be_finite(weight, steps):
    """What `sum / items` gives: times a weight of zero it would still make every gradient NaN."""
    run = Run(Loader([2, 2]), steps=steps)
    with pytest.raises(ConfigurationError, match=r"over no items is nan.*sum / max\(items, 1\)"):
        for _ in run.stack.active:
            with run.accumulator.window((run.model,)):
                loss = (run.model(torch.ones(2, 3)) * 0).sum() / torch.tensor(0)
                run.accumulator.backward(loss, weight=weight)


class OnAChip(torch.Tensor):
    """A weight on an accelerator, as far as one can tell."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = property(lambda self: torch.device("cuda"))


@pytest.mark.parametrize("empty", [0, 1, 2])
def test_weights_on_an_accelerator_are_told_a_window_later(empty):
    """Nothing waits for them, and none is forgotten, whichever micro-batch it was of."""
    run = Run(Loader([2] * 6), steps=3)

    def train(stop):
        for i in run.stack.active:
            with run.accumulator.window((run.model,)):
                items = torch.tensor(0.0 if i == empty else 2.0)
                loss = run.model(torch.ones(2, 3)).sum() / items * (items > 0)
                run.accumulator.backward(loss, weight=items.as_subclass(OnAChip))
            if i == stop:
                break

    train(stop=2)
    run.stack.active = Loader([2] * 6)
    empty = -1
    with pytest.raises(ConfigurationError, match="over no items is not finite"):
        train(stop=2)


def test_a_cross_entropy_over_ignored_targets_is_told():
    run = Run(Loader([2]), steps=1)
    with pytest.raises(ConfigurationError, match="weight=0"):
        for _ in run.stack.active:
            with run.accumulator.window((run.model,)):
                logits = run.model(torch.ones(2, 3)).expand(2, 4)
                loss = torch.nn.functional.cross_entropy(logits, torch.full((2,), -100))
                run.accumulator.backward(loss, weight=0)


# -- micro-batches made by hand ------------------------------------------------------------------------------------------


def cut(run, loader, batches, parts, *, declared=True):
    """Gradients at the windows' ends of a loop that cuts each batch."""
    seen = []
    for i in loader:
        for part in batches[i].tensor_split(parts):
            window = (
                run.accumulator.declared_window((run.model,), parts)
                if declared
                else run.accumulator.window((run.model,))
            )
            with window:
                run.accumulator.backward(run.model(part).pow(2).mean())
                run.optimizer.step()
                if run.accumulator.sync_gradients:
                    seen.append(run.gradient)
                run.optimizer.zero_grad()
    return seen


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("known", [True, False])
def test_declared_parts_end_the_window_where_they_say(steps, known):
    """The last batch too, in which every part is at the end of the data."""
    loader, batches = Loader([4, 4, 4], known), data([4, 4, 4])
    run = Run(loader, steps=steps)
    seen = cut(run, loader, batches, 2)
    assert len(seen) == run.stepped == 3
    for got, batch in zip(seen, batches, strict=True):
        torch.testing.assert_close(got, big_batch_gradient(run.model, [batch]))


def test_undeclared_parts_are_told_where_the_datas_end_cuts_a_window():
    loader, batches = Loader([4, 4, 4]), data([4, 4, 4])
    run = Run(loader, steps=2)
    with pytest.warns(UserWarning, match=r"micro_batches=n") as caught:
        cut(run, loader, batches, 2, declared=False)
    assert len(caught) == 1


def test_several_windows_on_one_batch_are_nobodys_mistake(recwarn):
    """A critic that is trained twice on each batch."""
    loader, batches = Loader([4, 4, 4]), data([4, 4, 4])
    run = Run(loader, steps=1)
    assert len(cut(run, loader, batches, 2, declared=False)) == 6
    assert not recwarn.list


def test_a_declaration_holds_for_the_whole_window():
    run = Run(Loader([4, 4]), steps=2)
    with run.accumulator.declared_window((run.model,), 3):
        pass
    with pytest.raises(ConfigurationError, match="began micro_batches=3, and 1 of 3"):
        run.accumulator.declared_window((run.model,), 2)
    for count in (0, -1, 1.5, True):
        with pytest.raises(ConfigurationError, match="1 or more"):
            run.accumulator.declared_window((run.model,), count)


def test_a_window_of_batches_cannot_become_one_of_parts():
    loader = Loader([4, 4])
    run = Run(loader, steps=2)
    for _ in loader:
        with run.accumulator.window((run.model,)):
            pass
        break
    with pytest.raises(ConfigurationError, match="began without micro_batches, and 1 of 2"):
        run.accumulator.declared_window((run.model,), 2)


def test_after_parts_windows_are_of_batches_again():
    batches = data([4] * 4)
    loader = Loader([4] * 4)
    run = Run(loader, steps=2)
    cut(run, loader, batches, 2)
    run.stack.active = again = Loader([4] * 4)
    seen = train(run, again, batches)
    for got, start in zip(seen, (0, 2), strict=True):
        torch.testing.assert_close(got, big_batch_gradient(run.model, batches[start : start + 2]))


def test_an_open_window_of_parts_is_one_again_after_a_resume():
    run = Run(None, steps=1)
    with run.accumulator.declared_window((run.model,), 2):
        pass
    saved = run.accumulator.counters([run.model])
    other = Run(None, steps=1)
    other.accumulator.load_counters([other.model], saved)
    with other.accumulator.declared_window((other.model,), 2) as window:
        assert (window.index, window.last) == (1, True)
