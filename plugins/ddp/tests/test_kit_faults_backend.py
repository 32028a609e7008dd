"""Each promise of BackendConformance is shown to be checked: a backend that breaks it fails the test of that promise, with a message that says so."""

import contextlib
import copy
import dataclasses
import math
import os
from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

from drivetrain.specs import Capability
from drivetrain.testing.backend import BackendConformance
from drivetrain_ddp.backend import DDPBackend
from drivetrain_ddp.plugin import DDP


class FaultyKit(BackendConformance):
    """ddp with another class in its place, and perhaps fewer capabilities."""

    world_sizes = (1, 2)
    precisions = ("fp32", "bf16", "fp16")

    def __init__(self, fault=DDPBackend, without=()):
        self.fault = fault
        self.spec = dataclasses.replace(DDP, capabilities=DDP.capabilities - frozenset(without))

    def make_accelerator(self, **kwargs):
        accelerator = super().make_accelerator(**kwargs)
        accelerator.backend.spec = self.spec
        accelerator.backend.__class__ = self.fault
        accelerator.gradient_state.ask_backend()
        return accelerator


# -- numbers ---------------------------------------------------------------------------------------------------------------


class NeverReduces(DDPBackend):
    def wrap_model(self, model, *, evaluation):
        return model


class SumsOverRanks(DDPBackend):
    def wrap_model(self, model, *, evaluation):
        wrapped = super().wrap_model(model, evaluation=evaluation)
        wrapped.register_comm_hook(
            None,
            lambda state, bucket: (
                dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])
            ),
        )
        return wrapped


class IgnoresItemWeights(DDPBackend):
    def normalize_gradients(self, parameters, factor):
        pass


class KeepsGradients(DDPBackend):
    def zero_grad(self, optimizer, set_to_none=True):
        pass


class StepsACopy(DDPBackend):
    def prepare_optimizer(self, optimizer):
        return copy.deepcopy(optimizer)


class EveryRankIsTheFirst(DDPBackend):
    @property
    def data_rank(self):
        return 0


CASE = {
    "world_size": 2,
    "precision": "fp32",
    "accumulation": 4,
    "max_norm": 0.5,
    "optimizer": "adamw",
    "weighted": False,
    "samples": 45,
    "scheduler": True,
    "sized": True,
}


@pytest.mark.parametrize(
    ("fault", "settings", "message"),
    [
        (NeverReduces, {}, "gradients|norms|losses"),
        (SumsOverRanks, {"max_norm": None}, "norms|losses"),
        (IgnoresItemWeights, {"weighted": True}, "norms|losses"),
        (KeepsGradients, {}, "losses"),
        (StepsACopy, {}, "losses"),
        (EveryRankIsTheFirst, {}, "losses"),
    ],
)
def test_training(workers, fault, settings, message):
    with pytest.raises(AssertionError, match=rf"rank 0 of 2: ({message})"):
        FaultyKit(fault).test_training_equals_plain_pytorch(workers, {**CASE, **settings})


def test_ranks_that_drift_apart(workers):
    class StepsFurtherOnRank1(DDPBackend):
        def optimizer_step(self, optimizer, closure=None):
            result = super().optimizer_step(optimizer, closure)
            if self.data_rank == 1:
                with torch.no_grad():
                    optimizer.param_groups[0]["params"][0].add_(1e-7)
            return result

    with pytest.raises(AssertionError, match="the weights of rank 1 aren't those of rank 0"):
        FaultyKit(StepsFurtherOnRank1).test_training_equals_plain_pytorch(workers, CASE)


# -- windows ---------------------------------------------------------------------------------------------------------------


class ReducesEveryMicroBatch(DDPBackend):
    def set_gradient_sync(self, model, enabled):
        pass


class SendsMoreThanItSays(DDPBackend):
    def optimizer_step(self, optimizer, closure=None):
        dist.all_reduce(torch.zeros(1))
        return super().optimizer_step(optimizer, closure)


class SaysMoreThanItSends(DDPBackend):
    def expected_collectives(self):
        return {"micro_batch": {}, "window": {"all_reduce": 1, "all_gather": 1}}


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (ReducesEveryMicroBatch, r"sent {'all_reduce': 1} in micro-batch 0 of 4, and {} are declared"),
        (SendsMoreThanItSays, r"sent {'all_reduce': 2} at the window's end"),
        (SaysMoreThanItSends, r"sent {'all_reduce': 1} at the window's end"),
    ],
)
def test_collectives(workers, fault, message):
    with pytest.raises(AssertionError, match=message):
        FaultyKit(fault).test_collectives_sent_are_those_expected(workers, 2, 4, False)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (NeverReduces, "equal micro-batches"),
        (SumsOverRanks, "a shorter last window, uneven rows"),
        (IgnoresItemWeights, "items"),
        (KeepsGradients, "windows end with each epoch"),
        (EveryRankIsTheFirst, "batches cut into parts"),
    ],
)
def test_the_contract(workers, fault, name):
    with pytest.raises(AssertionError, match="rank 0, window|windows|have rows of window"):
        FaultyKit(fault).test_a_windows_gradient_is_the_big_batchs(workers, 2, name)


class ReadsTheNorm(DDPBackend):
    def clip_grad_norm_(self, parameters, max_norm, norm_type=2.0):
        norm = super().clip_grad_norm_(parameters, max_norm, norm_type)
        norm.item()
        return norm


def test_host_reads(workers):
    with pytest.raises(AssertionError, match=r"rank 0, fp32: \[0, 1\] host reads"):
        FaultyKit(ReadsTheNorm).test_the_host_waits_for_nothing_but_the_loss_scale(workers, 2)


class UnscaledItems(DDPBackend):
    """Losses of sums are divided after the reduction alone, so that fp16 overflows before."""

    def backward(self, loss, window, **kwargs):
        super().backward(loss * 1e6, window, **kwargs)

    def normalize_gradients(self, parameters, factor):
        super().normalize_gradients(parameters, factor / 1e6)


def test_many_items(workers):
    with pytest.raises(AssertionError, match="fp16: the step was skipped"):
        FaultyKit(UnscaledItems).test_a_million_items_stay_in_range(workers, 2)


def test_sync_each_batch(workers):
    with pytest.raises(AssertionError, match="rank 0 sent"):
        FaultyKit(SaysMoreThanItSends).test_sync_each_batch_reduces_at_each_micro_batch(workers, 2)


class ForgetsToSkip(DDPBackend):
    """A parameter that the optimizer's list lacks isn't looked at."""

    def optimizer_parameters(self, optimizer):
        return []


def test_values_that_are_not_finite(workers):
    with pytest.raises(AssertionError, match="the weights aren't finite|skip"):
        FaultyKit(ForgetsToSkip).test_values_that_are_not_finite(workers, 2, "skip", "gradient")


def test_no_sync(workers):
    with pytest.raises(AssertionError, match="inside no_sync"):
        FaultyKit(ReducesEveryMicroBatch).test_no_sync_keeps_gradients_local(workers, 2)


class LocalNorm(DDPBackend):
    """As of a shard: the norm of a rank's share of the parameters."""

    def clip_grad_norm_(self, parameters, max_norm, norm_type=2.0):
        parameters = list(parameters)
        super().clip_grad_norm_(parameters, max_norm, norm_type)
        return torch.nn.utils.get_total_norm([p.grad for p in parameters[self.data_rank :: 2]], norm_type)


class NormAfterClipping(DDPBackend):
    def clip_grad_norm_(self, parameters, max_norm, norm_type=2.0):
        parameters = list(parameters)
        super().clip_grad_norm_(parameters, max_norm, norm_type)
        return torch.nn.utils.get_total_norm([p.grad for p in parameters], norm_type)


class NormOfOneKind(DDPBackend):
    def clip_grad_norm_(self, parameters, max_norm, norm_type=2.0):
        return super().clip_grad_norm_(parameters, max_norm)


class NormAsNumber(DDPBackend):
    def clip_grad_norm_(self, parameters, max_norm, norm_type=2.0):
        return super().clip_grad_norm_(parameters, max_norm, norm_type).reshape(1)


class DoesNotClip(DDPBackend):
    def clip_grad_norm_(self, parameters, max_norm, norm_type=2.0):
        return super().clip_grad_norm_(parameters, math.inf, norm_type)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (LocalNorm, r"rank 0 returned the norm"),
        (NormAfterClipping, "returned the norm"),
        (NormOfOneKind, "returned the norm"),
        (NormAsNumber, "0-d tensor"),
        (DoesNotClip, "after clipping"),
    ],
)
def test_clipping(workers, fault, message):
    with pytest.raises(AssertionError, match=message):
        FaultyKit(fault).test_clipping_returns_the_true_global_norm(workers, 2, 1.0)


def test_enlarging_gradients(workers):
    class ScalesToTheNorm(DDPBackend):
        def clip_grad_norm_(self, parameters, max_norm, norm_type=2.0):
            parameters = list(parameters)
            norm = super().clip_grad_norm_(parameters, math.inf, norm_type)
            for p in parameters:
                p.grad.mul_(max_norm / norm)
            return norm

    with pytest.raises(AssertionError, match="after clipping"):
        FaultyKit(ScalesToTheNorm).test_gradients_below_the_norm_are_not_clipped(workers, 1)


def test_clipping_before_unscaling(workers):
    class ClipsScaledGradients(DDPBackend):
        def unscale_(self, optimizer):
            pass

    with pytest.raises(AssertionError, match="returned the norm"):
        FaultyKit(ClipsScaledGradients).test_clipping_sees_gradients_without_the_loss_scale(workers, 2)


def test_clipping_by_value(workers):
    class ClipsTooWide(DDPBackend):
        def clip_grad_value_(self, parameters, clip_value):
            super().clip_grad_value_(parameters, clip_value * 2)

    with pytest.raises(AssertionError, match="after clipping by value"):
        FaultyKit(ClipsTooWide).test_clipping_by_value(workers, 2)


class StepsOnOverflow(DDPBackend):
    def optimizer_step(self, optimizer, closure=None):
        result = super().optimizer_step(optimizer, closure)
        if self.step_was_skipped(optimizer):
            optimizer.step()
        return result


class SkipsOnOneRank(DDPBackend):
    def optimizer_step(self, optimizer, closure=None):
        result = super().optimizer_step(optimizer, closure)
        if self.step_was_skipped(optimizer) and self.data_rank == 0:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].add_(0.1)
        return result


class HidesSkips(DDPBackend):
    def step_was_skipped(self, optimizer):
        return False


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (StepsOnOverflow, "changed the weights"),
        (SkipsOnOneRank, "changed the weights"),
        (HidesSkips, "optimizer_step_was_skipped was"),
    ],
)
def test_overflow(workers, fault, message):
    with pytest.raises(AssertionError, match=message):
        FaultyKit(fault).test_an_overflow_on_one_rank_skips_the_step_on_all(workers, 2)


# -- objects ---------------------------------------------------------------------------------------------------------------


class UnwrapsNothing(DDPBackend):
    def unwrap(self, model):
        return model


class TearsDownOnce(DDPBackend):
    def teardown(self):
        if vars(self).setdefault("down", []):
            raise RuntimeError("torn down already")
        self.down.append(True)


class DescribesNumbers(DDPBackend):
    def describe(self):
        return {"buckets": 1}


class HidesTheMode(DDPBackend):
    def wrap_model(self, model, *, evaluation):
        wrapped = super().wrap_model(model, evaluation=evaluation)
        wrapped.eval = lambda: wrapped
        return wrapped


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (UnwrapsNothing, "didn't give the user's module"),
        (TearsDownOnce, "torn down already"),
        (DescribesNumbers, r"describe\(\) must map texts to texts"),
        (HidesTheMode, "don't reach the user's"),
        (StepsACopy, "doesn't hold the parameters"),
        (EveryRankIsTheFirst, "data_rank and data_world_size"),
    ],
)
def test_objects(workers, fault, message):
    with pytest.raises(AssertionError, match=message):
        FaultyKit(fault).test_prepared_objects(workers, 2)


def test_writing_the_environment(workers):
    class WritesTheEnvironment(FaultyKit):
        def make_accelerator(self, **kwargs):
            os.environ["PLANTED"] = str(len(os.environ))
            return super().make_accelerator(**kwargs)

    with pytest.raises(AssertionError, match=r"changed os\.environ: {'PLANTED'"):
        WritesTheEnvironment().test_prepared_objects(workers, 1)
    workers(1).run(lambda: os.environ.pop("PLANTED"))


def test_reading_too_late(workers):
    class ReadsLate(DDPBackend):
        def read_later(self, tensors):
            class Late(Future):
                def result(self, timeout=None):
                    return [float(t) for t in tensors]

            return Late()

    with pytest.raises(AssertionError, match="for values that were changed afterwards"):
        FaultyKit(ReadsLate).test_read_later_is_a_snapshot(workers, 1)


def test_metrics(workers):
    settings = {"even_batches": True, "sized": True}
    with pytest.raises(AssertionError, match="gathered"):
        FaultyKit(EveryRankIsTheFirst).test_metrics_cover_each_sample_once(workers, 2, settings)


class RefusesNothing(DDPBackend):
    def require(self, capability, what):
        pass


def test_undeclared_capabilities(workers, tmp_path):
    left_out = ["clip-value", "item-weights", "uneven-inputs", "no-sync", "multiple-models", "mid-window-state"]
    without = [Capability(name) for name in left_out]
    FaultyKit(DDPBackend, without).test_what_is_not_declared_is_refused(workers, 2, tmp_path / "good")
    with pytest.raises(AssertionError) as error:
        FaultyKit(RefusesNothing, without).test_what_is_not_declared_is_refused(workers, 2, tmp_path / "bad")
    # Saves inside a window are put off by core itself, whatever the backend does.
    assert all(repr(name) in str(error.value) for name in left_out if name != "mid-window-state")


def test_a_one_process_backend_on_two(workers):
    with pytest.raises(AssertionError, match="two processes weren't refused"):
        FaultyKit(without=[Capability.DISTRIBUTED]).test_one_process_backends_refuse_more(workers)


class ClearsEverything(DDPBackend):
    """State that Accelerators and models share without knowing."""

    everything = []

    def prepare_optimizer(self, optimizer):
        self.everything.append(optimizer)
        return super().prepare_optimizer(optimizer)

    def zero_grad(self, optimizer, set_to_none=True):
        for one in self.everything:
            one.zero_grad(set_to_none=set_to_none)


def test_accelerators_that_share_state(workers):
    with pytest.raises(AssertionError, match="Accelerator 2 of 2"):
        FaultyKit(ClearsEverything).test_accelerators_side_by_side(workers, 1)


def test_models_that_share_state(workers):
    with pytest.raises(AssertionError, match="model 2 of 2"):
        FaultyKit(ClearsEverything).test_two_models_and_two_optimizers(workers, 1, 4, True)


def test_an_evaluation_model_that_is_synchronised(workers):
    class WrapsForTraining(DDPBackend):
        def wrap_model(self, model, *, evaluation):
            return super().wrap_model(model, evaluation=False)

    with pytest.raises(AssertionError, match="only evaluated sent"):
        FaultyKit(WrapsForTraining).test_a_model_that_is_only_evaluated(workers, 2)


def test_uneven_inputs(workers):
    class DividesByThoseStillThere(DDPBackend):
        @contextlib.contextmanager
        def join(self, models):
            with Join(list(models), divide_by_initial_world_size=False):
                yield

    with pytest.raises(AssertionError, match="after uneven inputs"):
        FaultyKit(DividesByThoseStillThere).test_uneven_inputs(workers, 2, 1)


def test_compiling(workers):
    class DoesNotCompile(DDPBackend):
        def prepare_model(self, model, *, device_placement, evaluation):
            self.context = dataclasses.replace(self.context, compiler=None)
            return super().prepare_model(model, device_placement=device_placement, evaluation=evaluation)

    with pytest.raises(AssertionError, match="nothing was compiled"):
        FaultyKit(DoesNotCompile).test_compiled_models(workers, 1)


# -- state -----------------------------------------------------------------------------------------------------------------


class LosesAName(DDPBackend):
    def model_state(self, model):
        return dict(list(super().model_state(model).items())[1:])


class WrappersNames(DDPBackend):
    def model_state(self, model):
        return dict(model.state_dict())


class NumbersForNames(DDPBackend):
    def optimizer_state(self, optimizer, models):
        return optimizer.state_dict()


class LoadsNothing(DDPBackend):
    def load_model_state(self, model, state, *, strict=True):
        super().load_model_state(model, dict(self.model_state(model)), strict=strict)
        missing = [n for n in self.model_state(model) if n not in state]
        return missing, [n for n in state if n not in self.model_state(model)]


class NeverStrict(DDPBackend):
    def load_model_state(self, model, state, *, strict=True):
        missing, unexpected = super().load_model_state(model, state, strict=False)
        return ([], []) if strict else (missing, unexpected)


class HidesWhatIsMissing(DDPBackend):
    def load_model_state(self, model, state, *, strict=True):
        super().load_model_state(model, state, strict=strict)
        return [], []


class LoadsNoMomenta(DDPBackend):
    def load_optimizer_state(self, optimizer, models, state):
        super().load_optimizer_state(optimizer, models, {**state, "state": {}})


class TakesOtherGroups(DDPBackend):
    def load_optimizer_state(self, optimizer, models, state):
        own = self.optimizer_state(optimizer, models)["param_groups"]
        groups = [{**g, "params": o["params"]} for g, o in zip(state["param_groups"], own, strict=True)]
        super().load_optimizer_state(optimizer, models, {**state, "param_groups": groups})


class Unties(DDPBackend):
    def prepare_model(self, model, *, device_placement, evaluation):
        back = getattr(model, "head", {"back": None})["back"]
        if back is not None:
            back.weight = torch.nn.Parameter(back.weight.detach().clone())
        return super().prepare_model(model, device_placement=device_placement, evaluation=evaluation)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (LosesAName, "model_state has the names"),
        (WrappersNames, "model_state has the names"),
        (NumbersForNames, "optimizer_state has"),
        (Unties, "aren't tied any more"),
    ],
)
def test_names(workers, fault, message):
    with pytest.raises(AssertionError, match=message):
        FaultyKit(fault).test_state_has_the_names_of_the_users_model(workers, 2)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (LoadsNothing, "loading didn't restore"),
        (NeverStrict, "a missing name must be an error"),
        (HidesWhatIsMissing, "must return missing and unexpected names"),
        (LoadsNoMomenta, "after loading and a third step"),
        (TakesOtherGroups, "weren't refused with UnsupportedError"),
    ],
)
def test_loading(workers, fault, message):
    with pytest.raises(AssertionError, match=message):
        FaultyKit(fault).test_loading_state(workers, 2)


class RoundsWeights(DDPBackend):
    def model_state(self, model):
        return {n: t.bfloat16().to(t.dtype) for n, t in super().model_state(model).items()}


@pytest.mark.parametrize(("fault", "message"), [(RoundsWeights, "losses after loading"), (LoadsNoMomenta, "optimizer")])
def test_resuming(workers, tmp_path, fault, message):
    with pytest.raises(AssertionError, match=message):
        FaultyKit(fault).test_a_resumed_run_is_bit_identical(workers, 2, "fp32", 1, tmp_path)


def test_state_that_depends_on_the_world_size(workers, tmp_path):
    class SumsMomenta(DDPBackend):
        def optimizer_state(self, optimizer, models):
            return self._times(super().optimizer_state(optimizer, models), self.data_world_size)

        def load_optimizer_state(self, optimizer, models, state):
            super().load_optimizer_state(optimizer, models, self._times(state, 1 / self.data_world_size))

        def _times(self, state, factor):
            states = {
                n: {k: v * factor if k == "exp_avg" else v for k, v in s.items()} for n, s in state["state"].items()
            }
            return {**state, "state": states}

    FaultyKit(SumsMomenta).test_a_resumed_run_is_bit_identical(workers, 2, "fp32", 1, tmp_path / "same")
    with pytest.raises(AssertionError, match="2 ranks saved, rank 0 of 1"):
        FaultyKit(SumsMomenta).test_a_checkpoint_is_read_at_another_world_size(workers, 2, tmp_path)


def test_a_window_that_is_lost(workers, tmp_path):
    class ClearsGradientsOnSaving(DDPBackend):
        def model_state(self, model):
            model.zero_grad()
            return super().model_state(model)

    with pytest.raises(AssertionError, match="in the middle of a window"):
        FaultyKit(ClearsGradientsOnSaving).test_a_window_goes_on_where_it_was_saved(workers, 2, tmp_path)
