"""Backends that core has none of yet: one that owns the schedule, and one whose processes hold parts of the same rows.

Both are toys over plain torch, in a distribution of their own, and train through the unmodified Accelerator.
"""

import contextlib
import sys

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from drivetrain import Accelerator
from drivetrain._plugins.process import _process_registry
from drivetrain.errors import UnsupportedError
from drivetrain.testing.distributions import write_plugin
from drivetrain.testing.training import Case, Result, make_data, make_model, reference

PLUGIN = """
from drivetrain.hookspecs import hookimpl
from drivetrain.specs import BackendSpec, Capability

DRIVETRAIN_API = 1
COMMON = {Capability.DISTRIBUTED, Capability.ITEM_WEIGHTS}

@hookimpl
def drivetrain_register_backends():
    return [
        BackendSpec(name="schedule", target="toy_backends:ScheduleBackend", capabilities=frozenset({*COMMON, Capability.OWNS_SCHEDULE})),
        BackendSpec(name="parts", target="toy_backends:PartsBackend", capabilities=frozenset(COMMON)),
    ]
"""

BACKENDS = """
import torch
import torch.distributed as dist

from drivetrain.interfaces import Backend


def average(tensors):
    if dist.is_initialized():
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor.div_(dist.get_world_size())


class Ran(torch.autograd.Function):
    '''The mean loss of a schedule that has run. What arrives in backward multiplies its gradients, which then are averaged.'''

    @staticmethod
    def forward(ctx, anchor, loss, parameters, gradients):
        ctx.parameters, ctx.gradients = parameters, gradients
        return loss.clone()

    @staticmethod
    def backward(ctx, factor):
        torch._foreach_mul_(ctx.gradients, factor)
        average(ctx.gradients)
        for parameter, gradient in zip(ctx.parameters, ctx.gradients):
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        return None, None, None, None


class Scheduled(torch.nn.Module):
    '''Runs forward and backward of all micro-batches; the module returns the sum of its loss and the number of items.'''

    def __init__(self, module, micro_batches):
        super().__init__()
        self.module, self.micro_batches, self.calls = module, micro_batches, []

    def forward(self, *inputs):
        parts = min(self.micro_batches, len(inputs[0]))
        chunks = list(zip(*(x.tensor_split(parts) for x in inputs)))
        self.calls.append(len(chunks))
        if not torch.is_grad_enabled():
            return torch.cat([self.module(*chunk) for chunk in chunks])
        parameters = list(self.module.parameters())
        loss, count, gradients = torch.zeros(()), torch.zeros(()), [torch.zeros_like(p) for p in parameters]
        for chunk in chunks:
            part, items = self.module(*chunk)
            torch._foreach_add_(gradients, torch.autograd.grad(part, parameters))
            loss, count = loss + part.detach(), count + items
        torch._foreach_div_(gradients, count.clamp(min=1))
        return Ran.apply(torch.zeros((), requires_grad=True), loss / count.clamp(min=1), parameters, gradients)


class ScheduleBackend(Backend):
    def wrap_model(self, model, *, evaluation):
        return Scheduled(model, self.micro_batches_per_call)

    def unwrap(self, model):
        return model.module if isinstance(model, Scheduled) else model


class PartsBackend(Backend):
    '''All processes hold the same rows, each a part of each row: no process has data that another one hasn't.'''

    def setup(self):
        super().setup()
        self._alone = [dist.new_group([rank]) for rank in range(self.context.process.world_size)][self.context.process.rank]

    data_rank, data_world_size = 0, 1

    @property
    def data_group(self):
        return self._alone

    gradient_group = None

    @property
    def gradient_world_size(self):
        return self.context.process.world_size

    def prepare_model(self, model, **settings):
        self.model = super().prepare_model(model, **settings)
        return self.model

    def backward(self, loss, window, **kwargs):
        super().backward(loss, window, **kwargs)
        if window.last:
            average([p.grad for p in self.model.parameters()])
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    write_plugin(folder, "toys", PLUGIN, files={"toy_backends.py": BACKENDS})
    return str(folder)


@contextlib.contextmanager
def installed(site):
    """In this process, for now."""
    sys.path.insert(0, site)
    _process_registry.cache_clear()
    try:
        yield
    finally:
        sys.path.remove(site)
        sys.modules.pop("toy_backends", None)
        _process_registry.cache_clear()


class WithLoss(torch.nn.Module):
    """A model that computes its own loss, as a schedule needs it; without targets, logits."""

    def __init__(self, weighted=False):
        super().__init__()
        self.net, self.weighted = make_model(), weighted

    def forward(self, x, y=None, n=None):
        logits = self.net(x)
        if y is None:
            return logits
        each = cross_entropy(logits, y, reduction="none")
        return ((each * n).sum(), n.sum()) if self.weighted else (each.sum(), torch.tensor(len(each)))


def train_by_schedule(site, case):
    with installed(site):
        accelerator = Accelerator(backend="schedule", cpu=True, gradient_accumulation_steps=case.accumulation)
        model = WithLoss(case.weighted)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-2)
        model, optimizer, scheduler, loader = accelerator.prepare(
            model,
            optimizer,
            torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
            DataLoader(make_data(case.samples), batch_size=case.batch_size),
        )
        result = Result()
        for _ in range(case.epochs):
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(batch["x"], batch["y"], batch["n"])
                    items = batch["n"].sum() if case.weighted else torch.tensor(loader.batch.rows)
                    accelerator.backward(loss, weight=items) if case.weighted else accelerator.backward(loss)
                    assert accelerator.sync_gradients
                    result.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), case.max_norm)))
                    if not result.losses:
                        named = accelerator.unwrap_model(model).net.named_parameters()
                        result.gradients = {n: p.grad.clone() for n, p in named}
                    result.rates.append(optimizer.param_groups[0]["lr"])
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                total, count = accelerator.reduce(torch.stack([loss.detach() * items, items.float()])).tolist()
                result.losses.append(total / max(count, 1))
        result.steps = accelerator.step
        result.weights = {k.removeprefix("net."): v for k, v in accelerator.get_state_dict(model).items()}
        accelerator.end_training()
        return result, model.calls, len(loader), accelerator.gradient_accumulation_steps


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_schedule_gives_the_numbers_of_the_big_batch(ranks, site, accumulation, weighted):
    case = Case(accumulation=accumulation, weighted=weighted)
    expected = reference(case, world_size=2)
    for result, calls, length, _ in ranks.run(train_by_schedule, site, case):
        assert result.steps == expected.steps
        assert result.largest_difference(expected) < 2e-6
        assert len(calls) == case.epochs * length == expected.steps
        assert calls[0] == accumulation


def test_the_loop_sees_windows_on_one_process(site):
    case = Case(accumulation=4)
    result, calls, length, steps = train_by_schedule(site, case)
    assert (length, steps) == (3, 1)  # 45 rows in windows of 16
    assert calls == [4] * 6
    assert result.largest_difference(reference(case, world_size=1)) < 2e-6


def test_evaluation_gathers_each_row_once(site):
    with installed(site):
        accelerator = Accelerator(backend="schedule", cpu=True, gradient_accumulation_steps=4)
        model, loader = accelerator.prepare(WithLoss(), DataLoader(make_data(45), batch_size=4))
        model.eval()
        with torch.no_grad():
            logits = torch.cat([accelerator.gather_for_metrics(model(batch["x"])) for batch in loader])
        torch.testing.assert_close(logits, make_model()(torch.stack([row["x"] for row in make_data(45)])))
        accelerator.end_training()


def test_a_loss_that_is_not_used_leaves_no_gradient(site):
    with installed(site):
        accelerator = Accelerator(backend="schedule", cpu=True)
        model = accelerator.prepare(WithLoss())
        batch = torch.utils.data.default_collate(make_data(4))
        model(batch["x"], batch["y"], batch["n"])
        loss = model(batch["x"], batch["y"], batch["n"])
        accelerator.backward(loss * 3)
        plain = make_model()
        (cross_entropy(plain(batch["x"]), batch["y"]) * 3).backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad)
        accelerator.end_training()


def test_windows_are_fixed_when_loaders_hand_them_out(site):
    with installed(site):
        accelerator = Accelerator(backend="schedule", cpu=True, gradient_accumulation_steps=4)
        accelerator.gradient_accumulation_steps = 1
        with pytest.raises(UnsupportedError, match="4 micro-batches per call"):
            accelerator.gradient_accumulation_steps = 4
        for loader in (
            DataLoader(range(8), batch_size=None),
            DataLoader(range(8), batch_sampler=type("Own", (BatchSampler,), {})(SequentialSampler(range(8)), 2, False)),
        ):
            with pytest.raises(UnsupportedError, match="can be joined"):
                accelerator.prepare(loader)
        accelerator.end_training()


# -- parts of the same rows ------------------------------------------------------------------------------------------------


def train_on_parts(site, samples):
    """Each process has one half of each row's features as its "sequence part": items are features."""
    with installed(site):
        accelerator = Accelerator(backend="parts", cpu=True, gradient_accumulation_steps=2)
        rank = accelerator.process_index
        torch.manual_seed(rank)  # as scripts do that seed by rank
        x = torch.stack([row["x"] for row in make_data(samples)])
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(x, batch_size=4, shuffle=True))
        seen, gradients = [], []
        for batch in loader:
            seen.append(batch.clone())
            part = batch[:, :2] if rank == 0 else batch[:, 2:]
            with accelerator.accumulate(model):
                loss = model(part.reshape(-1, 1)).pow(2).mean()
                accelerator.backward(loss, weight=part.numel())
                accelerator.clip_grad_norm_(model.parameters(), float("inf"))
                if accelerator.sync_gradients:
                    gradients.append(model.weight.grad.clone())
                optimizer.step()
                optimizer.zero_grad()
        accelerator.end_training()
        return seen, gradients, model.weight.detach().clone()


def test_processes_of_one_replica_read_the_same_rows_and_count_all_items(ranks, site):
    (seen, gradients, weight), (seen_1, gradients_1, weight_1) = ranks.run(train_on_parts, site, 20)
    assert len(seen) == 5  # nothing is divided between the two
    for a, b in zip(seen, seen_1, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(torch.cat(gradients), torch.cat(gradients_1)) and torch.equal(weight, weight_1)
    plain = torch.ones(1, 1, requires_grad=True)
    for start, gradient in zip(range(0, 5, 2), gradients, strict=True):
        rows = torch.cat(seen[start : start + 2]).reshape(-1, 1)
        (expected,) = torch.autograd.grad((rows @ plain).pow(2).mean(), plain)
        torch.testing.assert_close(gradient, expected)
        with torch.no_grad():
            plain -= 0.1 * expected
    torch.testing.assert_close(weight, plain.detach())
