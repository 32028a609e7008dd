"""Conformance of precisions: subclass `PrecisionConformance` in a test file, say which precision, and run pytest.

class TestToyPrecision(PrecisionConformance):
    spec = TOY
"""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch

from drivetrain._lazy import load_target
from drivetrain.interfaces.precision import Precision
from drivetrain.specs import PrecisionSpec
from drivetrain.testing.pytest_plugin import Workers
from drivetrain.testing.training import Case, Result, make_model, reference, train

__all__ = ["PrecisionConformance"]


def train_in(kit: PrecisionConformance, case: Case) -> Result:
    """On a rank: train in the precision."""
    return train(case, kit.make_accelerator)


class PrecisionConformance:
    """What every precision must do: the promises of `drivetrain.interfaces.Precision`.

    Attributes:
        spec: The precision's descriptor.
        device: Name of a device that it runs on, as the Accelerator takes it.
        device_type: The torch type of that device.
        options: Options objects by class name, as an Accelerator would pass them (``GradScalerKwargs``, those of ``spec.options``).
        world_sizes: Numbers of ranks that train in it.
        autocast: Dtype of ``torch.autocast`` in which plain PyTorch computes what a training is compared with; None for full precision.
        tolerance: Largest difference to plain PyTorch, relative for values above 1.
        closures: Whether an optimizer may step with a closure, where the loss isn't scaled.
        graphs: Whether ``torch.compile`` must see a prepared model as one graph.

    Example:
        >>> class TestPlain(PrecisionConformance):
        ...     spec = PrecisionSpec(name="fp32", target="drivetrain.interfaces:Precision")
        >>> TestPlain().make_precision().compute_dtype
        torch.float32
    """

    spec: PrecisionSpec
    device: ClassVar[str] = "cpu"
    device_type: ClassVar[str] = "cpu"
    options: ClassVar[Mapping[str, Any]] = {}
    world_sizes: ClassVar[Sequence[int]] = (1,)
    autocast: ClassVar[torch.dtype | None] = None
    tolerance: ClassVar[float] = 2e-6
    graphs: ClassVar[bool] = True
    closures: ClassVar[bool] = True

    def make_precision(self) -> Precision:
        """A new instance."""
        precision: Precision = load_target(self.spec.target)(
            self.spec, device_type=self.device_type, options=self.options
        )
        return precision

    def make_accelerator(self, **kwargs: Any) -> Any:
        """An Accelerator in the precision, made on a rank."""
        from drivetrain import Accelerator

        handlers = list(self.options.values())
        return Accelerator(device=self.device, mixed_precision=self.spec.name, kwargs_handlers=handlers, **kwargs)

    def convert_by_hand(self, model: torch.nn.Module) -> torch.nn.Module:
        """What the precision does to a model's layers, in plain PyTorch; nothing unless a subclass says so."""
        return model

    def _model(self, precision: Precision) -> torch.nn.Module:
        """Converted, placed and wrapped, in a backend's order."""
        model = precision.convert_module(make_model()).to(self.device_type)
        wrapped = precision.wrap_forward(model)
        assert wrapped is model, "wrap_forward must return the same model"
        return model

    def _x(self, rows: int = 3) -> torch.Tensor:
        return torch.linspace(-2, 2, rows * 6, device=self.device_type).view(rows, 6)

    # -- modules ---------------------------------------------------------------------------------------------------------------

    def test_names_and_parameters_stay(self) -> None:
        """Converting and wrapping change no name of the model's state; parameters train, with gradients of their own dtype."""
        plain = make_model()
        model = self._model(self.make_precision())
        names = set(model.state_dict())
        assert set(plain.state_dict()) <= names, f"names were lost: {sorted(set(plain.state_dict()) - names)}"
        model(self._x()).float().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.dtype is parameter.dtype, f"{name} got no gradient"

    def test_the_forward_computes_in_the_declared_dtype(self) -> None:
        """``compute_dtype`` is that of a linear layer's result inside the model, and of a product in ``autocast()``."""
        precision = self.make_precision()
        model = self._model(precision)
        seen = []
        linear = next(m for m in model.modules() if isinstance(m, torch.nn.Linear))
        linear.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
        model(self._x())
        assert seen == [precision.compute_dtype], f"compute_dtype is {precision.compute_dtype}, the forward used {seen}"
        with precision.autocast():
            product = self._x() @ self._x().T
        assert product.dtype is precision.compute_dtype, f"autocast() computed in {product.dtype}"
        with precision.autocast(enabled=False):
            assert (self._x() @ self._x().T).dtype is torch.float32, "autocast(enabled=False) must compute in float32"
        assert (self._x() @ self._x().T).dtype is torch.float32, "autocast() went on after its block"

    def test_wrapping_is_undone(self) -> None:
        """``unwrap_forward`` gives the same model back, plain and picklable; wrapping twice is undone at once."""
        precision = self.make_precision()
        model = precision.convert_module(make_model()).to(self.device_type)
        before = {name: id(value) for name, value in vars(model).items()}
        x = self._x().to(next(model.parameters()).dtype)  # without the wrapper, inputs have to fit
        expected = model(x)
        precision.wrap_forward(precision.wrap_forward(model))
        assert precision.unwrap_forward(model) is model, "unwrap_forward must return the same model"
        assert {name: id(value) for name, value in vars(model).items()} == before, (
            "unwrap_forward left something behind"
        )
        assert torch.equal(model(x), expected)
        assert torch.equal(pickle.loads(pickle.dumps(model))(x), expected)

    def test_a_copy_computes_with_its_own_weights(self) -> None:
        """``copy.deepcopy`` of a wrapped model (an average of weights): its forward must not be the original's."""
        model = self._model(self.make_precision())
        copied = copy.deepcopy(model)
        expected = model(self._x())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert torch.equal(copied(self._x()), expected), "a copied model's forward uses the original's weights"
        assert not torch.equal(model(self._x()), expected)

    def test_it_compiles_to_one_graph(self) -> None:
        """``torch.compile`` of a wrapped model, without a graph break."""
        if not self.graphs:
            return
        model = self._model(self.make_precision())
        expected = model(self._x())
        torch._dynamo.reset()
        try:
            compiled = torch.compile(lambda x: model(x), backend="eager", fullgraph=True)
            result = compiled(self._x())
        except torch._dynamo.exc.TorchDynamoException as error:
            raise AssertionError(f"the graph breaks: {error}") from error
        finally:
            torch._dynamo.reset()
        torch.testing.assert_close(result, expected)

    def test_it_describes_itself(self) -> None:
        """``describe``: texts by module pattern."""
        precision = self.make_precision()
        texts = precision.describe(self._model(precision))
        assert texts and all(isinstance(t, str) for item in texts.items() for t in item), f"describe() gave {texts}"

    # -- scaling ---------------------------------------------------------------------------------------------------------------

    def _parameter(
        self, gradient: float, precision: Precision, *, lr: float = 0.5
    ) -> tuple[Any, torch.optim.Optimizer]:
        """A parameter of ones with a scaled gradient, and its optimizer."""
        parameter = torch.nn.Parameter(torch.ones(2, device=self.device_type))
        optimizer = torch.optim.SGD([parameter], lr=lr)
        precision.scale((parameter * gradient).sum()).backward()
        return parameter, optimizer

    def test_scaling_is_undone_once(self) -> None:
        """``unscale_`` gives the loss's own gradients, however often it is called in a window; ``scales`` tells the truth."""
        precision = self.make_precision()
        loss = torch.ones((), device=self.device_type)
        if not precision.scales:
            assert precision.scale(loss) is loss, "scales is False, so scale() must return the loss itself"
        else:
            assert float(precision.scale(loss)) > 1.0, "scales is True, and the scale is 1 or less"
        for _ in range(2):
            parameter, optimizer = self._parameter(3.0, precision)
            precision.unscale_(optimizer)
            precision.unscale_(optimizer)
            assert parameter.grad.tolist() == [3.0, 3.0], f"gradients of 3 are {parameter.grad.tolist()} after unscale_"
            precision.step(optimizer)
            assert parameter.tolist() == [-0.5, -0.5], "step() must use the unscaled gradients, once"
            assert not precision.was_skipped(optimizer)
            precision.update()

    def test_a_step_unscales_by_itself(self) -> None:
        """Without ``unscale_`` before it."""
        precision = self.make_precision()
        parameter, optimizer = self._parameter(3.0, precision)
        precision.step(optimizer)
        assert parameter.tolist() == [-0.5, -0.5]

    def test_what_a_step_returns(self) -> None:
        """A closure's result, where optimizers can step with one."""
        precision = self.make_precision()
        if precision.scales or not self.closures:
            return
        parameter = torch.nn.Parameter(torch.ones(2, device=self.device_type))
        optimizer = torch.optim.SGD([parameter], lr=1.0)

        def closure() -> float:
            parameter.grad = torch.ones_like(parameter)
            return 4.0

        assert precision.step(optimizer, closure) == 4.0 and parameter.tolist() == [0.0, 0.0]

    @pytest.mark.parametrize("bad", [math.inf, math.nan])
    def test_an_overflow_skips_the_step(self, bad: float) -> None:
        """Where the loss is scaled: parameters stay, it is said, the scale shrinks at the window's end; the next window is as any other."""
        precision = self.make_precision()
        if not precision.scales:
            parameter, optimizer = self._parameter(bad, precision)
            precision.step(optimizer)
            assert not precision.was_skipped(optimizer) and not precision.found_overflow([optimizer])
            return
        scale = float(precision.scale(torch.ones((), device=self.device_type)))
        parameter, optimizer = self._parameter(bad, precision)
        precision.unscale_(optimizer)
        precision.step(optimizer)
        assert parameter.tolist() == [1.0, 1.0], f"a gradient of {bad} was used"
        assert precision.was_skipped(optimizer) and precision.found_overflow([optimizer]), "the skip wasn't reported"
        precision.update()
        smaller = float(precision.scale(torch.ones((), device=self.device_type)))
        assert smaller < scale, f"the scale is {smaller} after an overflow, and was {scale}"
        optimizer.zero_grad()
        precision.scale((parameter * 3.0).sum()).backward()
        precision.step(optimizer)
        assert parameter.tolist() == [-0.5, -0.5] and not precision.was_skipped(optimizer)

    def test_a_windows_optimizers_share_a_scale(self) -> None:
        """An overflow in the first one's gradients neither skips the second one's step nor changes its scale."""
        precision = self.make_precision()
        if not precision.scales:
            return
        _, first = self._parameter(math.inf, precision)
        good, second = self._parameter(3.0, precision)
        precision.step(first)
        precision.step(second)
        assert precision.was_skipped(first) and not precision.was_skipped(second)
        assert precision.found_overflow([second, first]) and not precision.found_overflow([second])
        assert good.tolist() == [-0.5, -0.5], "the scale changed between two optimizers of one window"

    # -- state -----------------------------------------------------------------------------------------------------------------

    def test_state_is_plain_and_restored(self) -> None:
        """As JSON holds it; a new instance that loads it goes on with the same scale. Instances share nothing."""
        precision, other = self.make_precision(), self.make_precision()
        one = torch.ones((), device=self.device_type)
        untouched = float(other.scale(one))
        if precision.scales:
            _, optimizer = self._parameter(math.inf, precision)
            precision.step(optimizer)
            precision.update()
        assert float(other.scale(one)) == untouched, "two instances share a scale"
        state = precision.state_dict()
        assert json.loads(json.dumps(state)) == state, f"state_dict() must be plain data, not {state}"
        other.load_state_dict(state)
        assert float(other.scale(one)) == float(precision.scale(one)), "load_state_dict() didn't restore the scale"

    # -- numbers ---------------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("accumulation", [1, 4])
    def test_training_equals_plain_pytorch(self, workers: Workers, accumulation: int) -> None:
        """Losses, norms and weights, compared with plain PyTorch in ``autocast``."""
        case = Case(accumulation=accumulation, optimizer="sgd")  # AdamW's direction is noise where gradients are
        for world_size in self.world_sizes:
            expected = reference(case, world_size, autocast=self.autocast, convert=self.convert_by_hand)
            for rank, result in enumerate(workers(world_size).run(train_in, self, case)):
                difference = result.largest_difference(expected)
                assert difference <= self.tolerance, (
                    f"rank {rank} of {world_size}: the training differs from plain PyTorch by {difference:.3g}, "
                    f"and {self.tolerance:g} is allowed"
                )
