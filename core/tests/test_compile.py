"""torch.compile in place: what is compiled, how often, and that names stay."""

import copy
import pickle

import pytest
import torch

from drivetrain import Accelerator, TorchDynamoPlugin
from drivetrain._engine.compile import Compiler, uncompile
from drivetrain.memory.blocks import repeated_blocks

GRAPHS = []


def counting(graph, inputs):
    GRAPHS.append(len(graph.graph.nodes))
    return graph.forward


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    if "counting" not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(counting)
    GRAPHS.clear()


class Own(torch.nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.linear = torch.nn.Linear(4, width)

    def forward(self, x):
        return self.linear(x) + 1


class Deep(torch.nn.Module):
    def __init__(self, make, count=12):
        super().__init__()
        self.layers = torch.nn.ModuleList([make() for _ in range(count)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def encoder_layer():
    return torch.nn.TransformerEncoderLayer(4, 2, batch_first=True)


MODELS = {
    "own": Own,
    "torch's own": lambda: torch.nn.Linear(4, 4),
    "made of torch's": lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()),
    "mixed": lambda: torch.nn.Sequential(Own(), Own()),
    "encoder": lambda: torch.nn.TransformerEncoder(encoder_layer(), 2, enable_nested_tensor=False),
}


def count(model):
    """Graphs of three forwards and backwards."""
    GRAPHS.clear()
    for _ in range(3):
        model(torch.ones(2, 3, 4)).sum().backward()
    return list(GRAPHS)


@pytest.mark.parametrize("name", MODELS)
def test_as_many_graphs_as_torch_compile_makes(name):
    model = MODELS[name]()
    expected = count(torch.compile(copy.deepcopy(model), backend="counting"))
    assert len(expected) == 1
    torch._dynamo.reset()
    names = list(model.state_dict())
    prepared = Accelerator(cpu=True, dynamo_backend="counting").prepare(model)
    assert count(prepared) == expected
    assert list(prepared.state_dict()) == names
    assert pickle.loads(pickle.dumps(prepared))._compiled_call_impl is None
    assert count(uncompile(prepared)) == []


@pytest.mark.parametrize("make", [Own, encoder_layer, lambda: torch.nn.Sequential(torch.nn.Linear(4, 4))])
def test_blocks_of_one_class_are_compiled_once_whatever_the_depth(make):
    model = Deep(make)
    assert len(repeated_blocks(model)) == 12
    plugin = TorchDynamoPlugin(backend="counting", use_regional_compilation=True)
    found = count(Accelerator(cpu=True, dynamo_plugin=plugin).prepare(model))
    # The first block's input needs no gradient, the others' does.
    assert len(found) == 2


def test_many_models_do_not_use_up_each_others_compilations():
    models = [torch.nn.Linear(4, width) for width in range(1, 13)]
    compiler = Compiler({"backend": "counting"}, regional=False)
    for model in models:
        compiler(model)
    for model in models:
        model(torch.ones(2, 4))
    assert len(GRAPHS) == len(models)
