"""8-bit training: what is converted, what it says about hardware, and that windows, clipping and checkpoints are as in any precision."""

import copy
import dataclasses
import warnings

import pytest
import torch
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.float8.float8_linear import Float8Linear

from drivetrain import Accelerator, AORecipeKwargs, PrecisionKwargs
from drivetrain._plugins import get_registry
from drivetrain.errors import ConfigurationError
from drivetrain.testing.precision import PrecisionConformance
from drivetrain.testing.static import PluginConformance
from drivetrain.testing.training import Case, reference, train
from drivetrain_torchao import precision as precision_module
from drivetrain_torchao.layers import convert_model_to_fp8_ao, filter_first_and_last_linear_layers, has_ao_layers
from drivetrain_torchao.plugin import FP8


class TestFloat8(PrecisionConformance):
    spec = FP8
    options = {"AORecipeKwargs": AORecipeKwargs(emulate=True, min_features=16, skip_first_and_last=False)}
    autocast = torch.bfloat16
    # A window of four micro-batches has four scales, the one batch has one: 8-bit rounding is all that may differ.
    tolerance = 0.15

    def convert_by_hand(self, model):
        config = Float8LinearConfig(emulate=True, pad_inner_dim=True)
        return convert_to_float8_training(model, module_filter_fn=lambda m, name: name == "3", config=config)

    def test_one_batch_per_window_is_exact(self):
        case = Case(optimizer="sgd")
        expected = reference(case, 1, autocast=self.autocast, convert=self.convert_by_hand)
        assert train(case, self.make_accelerator).largest_difference(expected) < 1e-3


class TestPlugin(PluginConformance):
    plugin = "torchao"


class Net(torch.nn.Module):
    """Sizes of all kinds."""

    def __init__(self, width=64):
        super().__init__()
        self.first = torch.nn.Linear(8, width)
        self.narrow = torch.nn.Linear(width, 32)
        self.odd = torch.nn.Linear(32, width + 2)
        self.back = torch.nn.Linear(width + 2, width)
        self.wide = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(3))
        self.norm = torch.nn.LayerNorm(width)
        self.attention = torch.nn.MultiheadAttention(width, 2, batch_first=True)
        self.last = torch.nn.Linear(width, 4)

    def forward(self, x):
        x = self.back(self.odd(self.narrow(self.first(x))))
        for layer in self.wide:
            x = x + layer(x).tanh()
        x = self.norm(x)
        return self.last(x + self.attention(x[None], x[None], x[None])[0][0])


def make(**options):
    torch.manual_seed(0)
    handlers = [AORecipeKwargs(**{"emulate": True, **options})]
    return Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=handlers)


def converted(model):
    return [name for name, module in model.named_modules() if isinstance(module, Float8Linear)]


# -- what is converted -----------------------------------------------------------------------------------------------------


def test_first_last_small_and_unfit_layers_stay_in_high_precision():
    accelerator = make()
    model = accelerator.prepare(Net())
    assert converted(model) == ["wide.0", "wide.1", "wide.2"]
    text = " ".join(accelerator.explain().split())
    for said in (
        "first not float8: the first linear layer",
        "last not float8: the last linear layer",
        "narrow not float8: its smaller side is 32, below 64",
        "wide.1 float8_e4m3fn forward, float8_e5m2 gradients, tensorwise scales, emulated",
    ):
        assert said in text, text


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"skip_first_and_last": False, "min_features": 1}, ["wide.0", "wide.1", "wide.2", "narrow"]),
        ({"skip_modules": ["wide.1"]}, ["wide.0", "wide.2"]),
        ({"skip_modules": ["ModuleList"]}, []),
        ({"min_features": 65}, []),
        ({"module_filter_func": lambda module, name: name == "wide.2"}, ["wide.2"]),
        ({"module_filter_func": filter_first_and_last_linear_layers}, ["narrow", "wide.0", "wide.1", "wide.2"]),
    ],
)
def test_filters_choose_layers(options, names):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert sorted(converted(make(**options).prepare(Net()))) == sorted(names)


def test_what_is_kept_in_float32_is_not_converted_either():
    handlers = [AORecipeKwargs(emulate=True), PrecisionKwargs(keep_in_fp32=["wide.0", "LayerNorm"])]
    accelerator = Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=handlers)
    model = accelerator.prepare(Net())
    seen = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda m, inputs, out, name=name: seen.update({name: getattr(out, "dtype", None)}))
    model(torch.ones(4, 8))
    assert converted(model) == ["wide.1", "wide.2"]
    assert (seen["wide.0"], seen["norm"], seen["wide.1"]) == (torch.float32, torch.float32, torch.bfloat16)


def test_converted_layers_really_compute_in_8_bits_and_the_others_dont():
    """A layer whose weights have more digits than 8 bits hold gives what torchao's own layer gives, and not what bf16 gives."""
    model = make().prepare(Net())
    x = torch.randn(16, 64)
    plain = torch.nn.Linear(64, 64)
    plain.load_state_dict(model.wide[0].state_dict())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, bf16 = model.wide[0](x), plain(x)
    theirs = Float8Linear.from_float(copy.deepcopy(plain), config=Float8LinearConfig(emulate=True))(x.bfloat16())
    assert torch.equal(ours, theirs)
    error, exact = (ours.float() - plain(x)).norm(), plain(x).norm()
    assert 0.005 < error / exact < 0.1 and (bf16.float() - plain(x)).norm() / exact < 0.005


def test_a_model_without_a_fitting_layer_is_told():
    with pytest.warns(UserWarning, match=r"converts no layer of Linear.*the last linear layer"):
        make().prepare(torch.nn.Linear(64, 64))


def test_accelerates_function_converts_by_hand():
    model = convert_model_to_fp8_ao(Net(), Float8LinearConfig(emulate=True))
    assert has_ao_layers(model) and not has_ao_layers(Net())
    assert "first" not in converted(model) and "last" not in converted(model)


# -- hardware --------------------------------------------------------------------------------------------------------------


def test_without_8_bit_hardware_it_is_emulated_with_a_warning_or_refused():
    with pytest.warns(UserWarning, match="a CPU has no 8-bit matrix products, so it is emulated"):
        assert make(emulate=None).backend.precision.config.emulate
    with pytest.raises(ConfigurationError, match=r"a CPU has no .*use mixed_precision='bf16'"):
        make(emulate=False)


def test_hardware_that_has_it_is_used(monkeypatch):
    monkeypatch.setattr(precision_module, "obstacle", lambda device_type, rowwise: None)
    assert not make(emulate=None).backend.precision.config.emulate


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_fsdp_float8_all_gather": True, "recipe": "rowwise"}, "recipe='tensorwise'"),
        ({"config": Float8LinearConfig(), "recipe": "rowwise"}, "leave out"),
        ({"module_filter_func": bool, "min_features": 3}, "leave out min_features"),
        ({"recipe": "blockwise"}, "recipe"),
    ],
)
def test_contradictions_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        AORecipeKwargs(**options)


@pytest.mark.parametrize(
    ("config", "message"), [({}, "config"), (object(), "takes torchao's Float8LinearConfig, not <object")]
)
def test_a_foreign_config_is_refused(config, message):
    with pytest.raises(ConfigurationError, match=message):
        Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs(config=config)])


# -- training --------------------------------------------------------------------------------------------------------------


def windows(accelerator, rows, micro_batches):
    """Gradient, norm and optimizer of one window of so many micro-batches."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    norm = None
    for part in rows.chunk(micro_batches):
        with accelerator.accumulate(model):
            accelerator.backward(model(part).pow(2).mean())
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
    return model, optimizer, norm


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_windows_and_clipping(recipe):
    """Scales are found per call, so a window's gradient is that of the one batch to 8-bit accuracy; all state is float32."""
    rows = torch.randn(32, 64, generator=torch.Generator().manual_seed(2))
    whole, _, norm = windows(make(recipe=recipe), rows, 1)
    accelerator = make(recipe=recipe)
    accelerator.gradient_accumulation_steps = 4
    model, optimizer, parts_norm = windows(accelerator, rows, 4)
    assert len(converted(model)) == 2
    assert float(parts_norm) == pytest.approx(float(norm), rel=0.03)
    total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    assert float(total) == pytest.approx(0.01, rel=1e-3)
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.nn.functional.cosine_similarity(ours.grad.flatten(), theirs.grad.flatten(), dim=0) > 0.995
        assert ours.grad.dtype is ours.dtype is torch.float32
    assert {v.dtype for s in optimizer.state.values() for v in s.values()} == {torch.float32}


def test_a_checkpoint_has_the_plain_names_and_goes_on_bit_for_bit(tmp_path):
    def train(accelerator, model, optimizer, count):
        for _ in range(count):
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(accelerator.step))
            accelerator.backward(model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()

    def start():
        accelerator = make()
        model = Net()
        return accelerator, *accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    first = start()
    train(*first, 3)
    first[0].save_state(tmp_path / "state")
    train(*first, 3)
    second = start()
    second[0].load_state(tmp_path / "state")
    train(*second, 3)
    for a, b in zip(first[1].parameters(), second[1].parameters(), strict=True):
        assert torch.equal(a, b)
    assert set(first[1].state_dict()) == set(Net().state_dict())
    other = Accelerator(cpu=True)
    plain = other.prepare(Net())
    optimizer = other.prepare(torch.optim.AdamW(plain.parameters()))
    other.load_state(tmp_path / "state")  # in any other precision, too
    assert optimizer.state


def on_ranks():
    """Two micro-batches on two ranks; the weights."""
    accelerator = Accelerator(
        cpu=True, mixed_precision="fp8", gradient_accumulation_steps=2, kwargs_handlers=[AORecipeKwargs(emulate=True)]
    )
    torch.manual_seed(0)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for i in range(4):
        with accelerator.accumulate(model):
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(10 * i + accelerator.process_index))
            accelerator.backward(model(x).pow(2).mean(), weight=torch.tensor(8))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    result = [p.detach() for p in model.parameters()]
    accelerator.end_training()
    return result


def test_on_two_ranks(workers):
    first, second = workers(2).run(on_ranks)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(first, second, strict=True))


def test_it_is_a_precision_of_the_registry():
    assert get_registry().get("precision", "fp8") is FP8
    assert dataclasses.replace(FP8).dtypes == ("float32", "bfloat16")
