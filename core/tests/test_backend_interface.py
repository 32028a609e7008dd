"""What core asks of backends whose optimizers work on buffers of their own, and of vendors whose state is process-wide."""

import contextlib
import sys

import pytest
import torch

from drivetrain import Accelerator
from drivetrain._plugins.process import _process_registry
from drivetrain.errors import UnsupportedError
from drivetrain.testing.distributions import write_plugin
from drivetrain.testing.training import Case, make_data, make_model, reference, train

PLUGIN = """
from drivetrain.hookspecs import hookimpl
from drivetrain.specs import BackendSpec, Capability

DRIVETRAIN_API = 1

@hookimpl
def drivetrain_register_backends():
    return [
        BackendSpec(name="flat", target="toy_flat:FlatBackend", capabilities=frozenset({Capability.ITEM_WEIGHTS, Capability.MULTIPLE_MODELS})),
        BackendSpec(name="new", target="toy_flat:NewParametersBackend"),
        BackendSpec(name="alone", target="drivetrain.interfaces:Backend", options="toy_options:AloneOptions", exclusive=True),
    ]
"""

OPTIONS = """
from dataclasses import dataclass

from drivetrain.config import Options

@dataclass
class AloneOptions(Options):
    stage: int = 0
"""

BACKEND = """
import copy

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from drivetrain.interfaces import Backend


class Flat:
    '''Steps one flat copy of an optimizer's parameters, as sharding engines do; it isn't a torch optimizer.'''

    def __init__(self, inner):
        self.inner = inner
        (group,) = inner.param_groups
        self.parameters = group["params"]
        self.buffer = parameters_to_vector(self.parameters).detach()
        group["params"] = [self.buffer]

    param_groups = property(lambda self: self.inner.param_groups)

    def step(self):
        self.buffer.grad = parameters_to_vector([p.grad for p in self.parameters])
        self.inner.step()
        vector_to_parameters(self.buffer, self.parameters)

    def zero_grad(self, set_to_none=True):
        for parameter in self.parameters:
            parameter.grad = None


class FlatBackend(Backend):
    def prepare_optimizer(self, optimizer):
        return Flat(optimizer)

    def optimizer_parameters(self, optimizer):
        return optimizer.parameters

    def optimizer_step(self, optimizer, closure=None):
        return optimizer.step()

    def optimizer_state(self, optimizer, models):
        names = self.parameter_names(models)
        parameters = [names[id(p)] for p in optimizer.parameters]
        state = {key: value for key, value in optimizer.inner.state[optimizer.buffer].items()}
        return {"state": {parameters[0]: state}, "param_groups": [{"params": parameters}]}

    def load_optimizer_state(self, optimizer, models, state):
        optimizer.buffer.copy_(parameters_to_vector(optimizer.parameters).detach())
        (values,) = state["state"].values()
        optimizer.inner.state[optimizer.buffer] = values


class NewParametersBackend(Backend):
    '''Models get new parameters, as they do where they are sharded, or on a device that shares no memory.'''

    def wrap_model(self, model, *, evaluation):
        new = {p: copy.deepcopy(p) for p in model.parameters()}
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, new[parameter])
        return model
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    write_plugin(folder, "flats", PLUGIN, files={"toy_flat.py": BACKEND, "toy_options.py": OPTIONS})
    return folder


@pytest.fixture(autouse=True)
def installed(site, monkeypatch):
    monkeypatch.syspath_prepend(str(site))
    _process_registry.cache_clear()
    yield
    for name in ("toy_flat", "toy_options"):
        sys.modules.pop(name, None)
    _process_registry.cache_clear()


@pytest.mark.parametrize("weighted", [False, True])
def test_gradients_of_an_optimizer_with_buffers_of_its_own_are_corrected_before_clipping(weighted):
    case = Case(accumulation=4, weighted=weighted, accelerator={"backend": "flat", "cpu": True})
    assert train(case).largest_difference(reference(case, world_size=1)) < 2e-6


@pytest.mark.parametrize("order", ["together", "model first", "optimizer first"])
def test_optimizers_go_on_with_parameters_that_take_the_place_of_theirs(order):
    def make():
        torch.manual_seed(0)
        model = make_model()
        model[3].weight = model[3].weight  # registered anew: the order of parameters isn't that of construction
        model.append(torch.nn.Linear(3, 3))
        model[6].weight = torch.nn.Parameter(torch.eye(3))
        model.append(torch.nn.Linear(3, 3))
        model[7].weight = model[6].weight  # tied
        decayed = [p for p in model.parameters() if p.ndim > 1]
        rest = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
        return model, torch.optim.AdamW(groups, lr=0.02)

    def one_step(model, optimizer):
        batch = torch.utils.data.default_collate(make_data(8))
        torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
        optimizer.zero_grad()

    plain, plain_optimizer = make()
    model, optimizer = make()
    for pair in ((plain, plain_optimizer), (model, optimizer)):
        one_step(*pair)
    accelerator = Accelerator(backend="new", cpu=True)
    if order == "together":
        model, optimizer = accelerator.prepare(model, optimizer)
    elif order == "model first":
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(optimizer)
    else:
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(model)
    for pair in ((plain, plain_optimizer), (model, optimizer)):
        one_step(*pair)
        one_step(*pair)
    assert model[7].weight is model[6].weight
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def make_job():
    accelerator = Accelerator(backend="flat", cpu=True)
    model = make_model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.02))
    return accelerator, model, optimizer


def step(accelerator, model, optimizer):
    batch = torch.utils.data.default_collate(make_data(8))
    accelerator.backward(torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"]))
    optimizer.step()
    optimizer.zero_grad()


def test_its_state_is_saved_with_the_model_that_it_updates(tmp_path):
    accelerator, model, optimizer = make_job()
    step(accelerator, model, optimizer)
    path = accelerator.save_state(tmp_path / "checkpoint")
    step(accelerator, model, optimizer)
    again, model_2, optimizer_2 = make_job()
    again.load_state(path)
    step(again, model_2, optimizer_2)
    for ours, theirs in zip(model_2.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_scheduler_follows_the_optimizer_that_took_the_place_of_its_own():
    accelerator = Accelerator(backend="flat", cpu=True)
    models = [torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, step_size=1) for o in optimizers]
    prepared = accelerator.prepare(*models, *optimizers, *schedulers)
    for optimizer, scheduler in zip(prepared[2:4], prepared[4:], strict=True):
        assert scheduler.optimizers == [optimizer]


def test_a_vendors_process_wide_state_is_free_after_end_training():
    from toy_options import AloneOptions

    first = Accelerator(backend=AloneOptions(stage=1), cpu=True)
    same = Accelerator(backend=AloneOptions(stage=1), cpu=True)
    with contextlib.ExitStack() as stack:
        stack.callback(same.end_training)
        with pytest.raises(UnsupportedError, match="call end_training"):
            Accelerator(backend=AloneOptions(stage=2), cpu=True)
    with pytest.raises(UnsupportedError, match="call end_training"):  # the first one still uses it
        Accelerator(backend=AloneOptions(stage=2), cpu=True)
    first.end_training()
    other = Accelerator(backend=AloneOptions(stage=2), cpu=True)
    other.end_training()
    assert first is not other
