"""Each promise of PrecisionConformance is shown to be checked: a precision that breaks it fails the test of that promise."""

import contextlib
import math

import pytest
import torch

from drivetrain._builtin.precision import BFloat16, Float16, FullPrecision
from drivetrain._plugins import get_registry
from drivetrain.testing.precision import PrecisionConformance


class Kit(PrecisionConformance):
    def __init__(self, fault):
        self.fault = fault
        name = "fp16" if issubclass(fault, Float16) else "bf16" if issubclass(fault, BFloat16) else "fp32"
        self.spec = get_registry().get("precision", name)

    def make_precision(self):
        return self.fault(self.spec, device_type="cpu", options={})


class LosesNames(BFloat16):
    def convert_module(self, model):
        return torch.nn.Sequential(model)


class Freezes(BFloat16):
    def convert_module(self, model):
        return model.requires_grad_(False)


class WrapsInAnother(BFloat16):
    def wrap_forward(self, model):
        return torch.nn.Sequential(super().wrap_forward(model))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (LosesNames, "names were lost"),
        (Freezes, "does not require grad|got no gradient"),
        (WrapsInAnother, "the same model"),
    ],
)
def test_names(fault, message):
    with pytest.raises((AssertionError, RuntimeError), match=message):
        Kit(fault).test_names_and_parameters_stay()


class SaysBFloat16(FullPrecision):
    compute_dtype = torch.bfloat16


class AutocastOfNothing(BFloat16):
    def autocast(self, **overrides):
        return contextlib.nullcontext()


class IgnoresOverrides(BFloat16):
    def autocast(self, **overrides):
        return super().autocast()


class NeverLeavesAutocast(BFloat16):
    def autocast(self, **overrides):
        context = super().autocast()
        context.__enter__()
        return contextlib.nullcontext()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (SaysBFloat16, "the forward used"),
        (AutocastOfNothing, "computed in torch.float32"),
        (IgnoresOverrides, "enabled=False"),
    ],
)
def test_dtypes(fault, message):
    with pytest.raises(AssertionError, match=message):
        Kit(fault).test_the_forward_computes_in_the_declared_dtype()


class NeverUnwraps(BFloat16):
    def unwrap_forward(self, model):
        return model


class UnwrapsOneOfTwo(BFloat16):
    def wrap_forward(self, model):
        model.layers = [*getattr(model, "layers", ()), len(vars(model))]
        return model

    def unwrap_forward(self, model):
        model.layers.pop()
        return model


class UnwrapsACopy(BFloat16):
    def unwrap_forward(self, model):
        import copy

        return copy.deepcopy(super().unwrap_forward(model))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (NeverUnwraps, "left something behind"),
        (UnwrapsOneOfTwo, "left something behind"),
        (UnwrapsACopy, "must return the same model"),
    ],
)
def test_unwrapping(fault, message):
    with pytest.raises(AssertionError, match=message):
        Kit(fault).test_wrapping_is_undone()


class WrapsByClosure(BFloat16):
    """The classic: a bound method of the original in the copy's place."""

    def wrap_forward(self, model):
        original = model.forward

        def forward(*args):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return original(*args).float()

        model.forward = forward
        return model


def test_copies():
    with pytest.raises(AssertionError, match="uses the original's weights"):
        Kit(WrapsByClosure).test_a_copy_computes_with_its_own_weights()


def test_graphs():
    class Breaks(BFloat16):
        def wrap_forward(self, model):
            model = super().wrap_forward(model)
            model.register_forward_hook(lambda module, inputs, output: (torch._dynamo.graph_break(), output)[1])
            return model

    with pytest.raises(AssertionError, match="the graph breaks"):
        Kit(Breaks).test_it_compiles_to_one_graph()


def test_descriptions():
    class SaysADtype(FullPrecision):
        def describe(self, model):
            return {"*": torch.float32}

    with pytest.raises(AssertionError, match=r"describe\(\) gave"):
        Kit(SaysADtype).test_it_describes_itself()


class UnscalesEachTime(Float16):
    def unscale_(self, optimizer):
        self.scaler._per_optimizer_states.pop(id(optimizer), None)
        self._unscaled.discard(id(optimizer))
        super().unscale_(optimizer)


class NeverUnscales(Float16):
    def unscale_(self, optimizer):
        pass

    def step(self, optimizer, closure=None):
        return optimizer.step()


class HidesScaling(Float16):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.scales = False


class ClaimsScaling(FullPrecision):
    scales = True


class ReportsSkips(FullPrecision):
    def was_skipped(self, optimizer):
        return True


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (UnscalesEachTime, "after unscale_"),
        (NeverUnscales, "after unscale_"),
        (HidesScaling, "must return the loss itself"),
        (ClaimsScaling, "the scale is 1 or less"),
        (ReportsSkips, "was_skipped"),
    ],
)
def test_scaling(fault, message):
    with pytest.raises(AssertionError, match=message):
        Kit(fault).test_scaling_is_undone_once()


def test_steps_that_unscale():
    with pytest.raises(AssertionError):
        Kit(NeverUnscales).test_a_step_unscales_by_itself()


def test_closures():
    class DropsTheResult(FullPrecision):
        def step(self, optimizer, closure=None):
            super().step(optimizer, closure)

    with pytest.raises(AssertionError):
        Kit(DropsTheResult).test_what_a_step_returns()


class StepsAnyway(Float16):
    def step(self, optimizer, closure=None):
        self.unscale_(optimizer)
        self._stepped[id(optimizer)] = True
        return optimizer.step()


class ChecksForInfinityAlone(Float16):
    def step(self, optimizer, closure=None):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        if any(bool(g.isnan().any()) for g in grads):
            return optimizer.step()
        return super().step(optimizer, closure)


class SkipsSilently(Float16):
    def was_skipped(self, optimizer):
        return False


class KeepsItsScale(Float16):
    def update(self):
        if self._unscaled:
            self.scaler.update(self.scaler.get_scale())
            self._unscaled.clear()


class RemembersTheSkip(Float16):
    def was_skipped(self, optimizer):
        self.ever = getattr(self, "ever", False) or super().was_skipped(optimizer)
        return self.ever


class SkipsInFullPrecision(FullPrecision):
    def found_overflow(self, optimizers):
        return True


@pytest.mark.parametrize(
    ("fault", "bad", "message"),
    [
        (StepsAnyway, math.inf, "a gradient of inf was used"),
        (ChecksForInfinityAlone, math.nan, "a gradient of nan was used"),
        (SkipsSilently, math.inf, "the skip wasn't reported"),
        (KeepsItsScale, math.inf, "after an overflow, and was"),
        (RemembersTheSkip, math.inf, "was_skipped"),
        (SkipsInFullPrecision, math.inf, "found_overflow"),
    ],
)
def test_overflow(fault, bad, message):
    with pytest.raises(AssertionError, match=message):
        Kit(fault).test_an_overflow_skips_the_step(bad)


class UpdatesAtEachStep(Float16):
    def step(self, optimizer, closure=None):
        result = super().step(optimizer, closure)
        self.update()
        return result


class SkipsAll(Float16):
    def was_skipped(self, optimizer):
        return any(self._stepped.values())


@pytest.mark.parametrize(("fault", "message"), [(UpdatesAtEachStep, "the scale changed"), (SkipsAll, "was_skipped")])
def test_several_optimizers(fault, message):
    with pytest.raises(AssertionError, match=message):
        Kit(fault).test_a_windows_optimizers_share_a_scale()


class OneScaler(Float16):
    common = None

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        type(self).common = self.scaler = type(self).common or self.scaler


class TensorState(Float16):
    def state_dict(self):
        return {k: torch.tensor(v) for k, v in super().state_dict().items()}


class ForgetsItsScale(Float16):
    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (OneScaler, "two instances share"),
        (TensorState, "plain data|not JSON serializable"),
        (ForgetsItsScale, "didn't restore the scale"),
    ],
)
def test_state(fault, message):
    with pytest.raises((AssertionError, TypeError), match=message):
        Kit(fault).test_state_is_plain_and_restored()


def test_numbers(workers):
    class WrongReference(Kit):
        autocast = torch.bfloat16

    with pytest.raises(AssertionError, match="differs from plain PyTorch"):
        WrongReference(FullPrecision).test_training_equals_plain_pytorch(workers, 1)
