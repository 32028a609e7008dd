"""Numbers under every strategy and wrapping, and that shards are shards."""

import gc
import weakref

import pytest
import torch
from torch.distributed.tensor import DTensor

from drivetrain import Accelerator
from drivetrain.config import GradientAccumulationPlugin
from drivetrain.errors import ConfigurationError, UnsupportedError
from drivetrain.testing.communication import count_collectives
from drivetrain.testing.pairwise import pairwise
from drivetrain.testing.training import Case, make_data, make_model, reference, train, whole
from drivetrain_fsdp.options import FullyShardedDataParallelPlugin

AXES = {
    "strategy": ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"),
    "wrapping": (
        {"transformer_cls_names_to_wrap": ["Linear"]},
        {"auto_wrap_policy": "NO_WRAP"},
        {"min_num_params": 60},
        {"auto_wrap_policy": lambda module: isinstance(module, torch.nn.LayerNorm)},
    ),
    "prefetch": ({}, {"forward_prefetch": 2, "backward_prefetch": 2}, {"backward_prefetch": "NO_PREFETCH"}),
    "accumulation": (1, 4),
    "sync_each_batch": (False, True),
    "weighted": (False, True),
    "optimizer": ("adamw", "sgd", "adagrad"),
}
CASES = pairwise(AXES)


def settings(strategy="FULL_SHARD", accumulation=1, sync_each_batch=False, **fields):
    plugin = FullyShardedDataParallelPlugin(sharding_strategy=strategy, **fields)
    accumulate = GradientAccumulationPlugin(num_steps=accumulation, sync_each_batch=sync_each_batch)
    return {"cpu": True, "fsdp_plugin": plugin, "gradient_accumulation_plugin": accumulate}


def run(case, options):
    def make(gradient_accumulation_steps, **kwargs):
        return Accelerator(**{**options, **kwargs})

    return train(case, make)


@pytest.mark.parametrize("choice", CASES, ids=lambda c: f"{c['strategy']}-{c['optimizer']}-{c['accumulation']}x")
def test_training_equals_plain_pytorch(ranks, choice):
    choice = dict(choice)
    case = Case(accumulation=choice["accumulation"], weighted=choice.pop("weighted"), optimizer=choice.pop("optimizer"))
    options = settings(**choice.pop("wrapping"), **choice.pop("prefetch"), **choice)
    expected = reference(case, world_size=2)
    for result in ranks.run(run, case, options):
        assert result.largest_difference(expected) < 1e-5


def start(optimizer=None, model=None, **kwargs):
    accelerator = Accelerator(**settings(**{"transformer_cls_names_to_wrap": ["Linear"], **kwargs}))
    model = make_model() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02) if optimizer is None else optimizer(model)
    return accelerator, *accelerator.prepare(model, optimizer)


def rows(accelerator, number=8):
    batch = torch.utils.data.default_collate(make_data(number))
    backend = accelerator.backend
    return {n: v.chunk(backend.data_world_size)[backend.data_rank] for n, v in batch.items()}


def step(accelerator, model, optimizer, clear=True):
    batch = rows(accelerator)
    accelerator.backward(torch.nn.functional.cross_entropy(model(batch["x"]).float(), batch["y"]))
    optimizer.step()
    if clear:
        optimizer.zero_grad()


def plain_steps(model, optimizer, number):
    batch = torch.utils.data.default_collate(make_data(8))
    for _ in range(number):
        torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach() for n, p in model.named_parameters()}


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=1e-5, rtol=1e-5, msg=name)


@pytest.mark.parametrize(("strategy", "share"), [("FULL_SHARD", 2), ("SHARD_GRAD_OP", 2), ("NO_SHARD", 1)])
def test_each_rank_holds_its_share(ranks, strategy, share):
    def measure():
        accelerator, model, optimizer = start(strategy=strategy)
        step(accelerator, model, optimizer, clear=False)
        parameters = list(model.parameters())
        tensors = [*parameters, *(p.grad for p in parameters)]
        tensors += [t for s in optimizer.state.values() for t in s.values() if t.ndim]
        assert all(isinstance(t, DTensor) for t in tensors)
        memory = [t.to_local().untyped_storage() for t in tensors]  # a unit's gradients have one in common
        held = sum({m.data_ptr(): m.nbytes() for m in memory}.values())
        accelerator.end_training()
        return held

    # Parameters and gradients are padded to equally many rows; the two moments are not. All are float32.
    padded = sum(-(-p.shape[0] // share) * p[0].numel() for p in make_model().parameters())
    for rank, held in enumerate(ranks.run(measure)):
        own = sum(p.chunk(share)[rank % share].numel() for p in make_model().parameters())
        assert held == 4 * (2 * padded + 2 * own)


def test_an_optimizer_that_stepped_before_goes_on(ranks):
    def run():
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        plain_steps(model, optimizer, 2)
        accelerator = Accelerator(**settings(transformer_cls_names_to_wrap=["Linear"]))
        optimizer = accelerator.prepare(optimizer)  # before its model
        model = accelerator.prepare(model)
        step(accelerator, model, optimizer)
        weights = whole(accelerator.backend.model_state(model))
        accelerator.end_training()
        return weights

    model = make_model()
    expected = plain_steps(model, torch.optim.AdamW(model.parameters(), lr=0.02), 3)
    for weights in ranks.run(run):
        same(weights, expected)


def test_an_optimizer_made_of_the_shards(ranks):
    def run():
        accelerator = Accelerator(**settings(transformer_cls_names_to_wrap=["Linear"]))
        model = accelerator.prepare(make_model())
        optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        for _ in range(3):
            step(accelerator, model, optimizer)
        weights = whole(accelerator.backend.model_state(model))
        accelerator.end_training()
        return weights

    model = make_model()
    expected = plain_steps(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 3)
    for weights in ranks.run(run):
        same(weights, expected)


class Tied(torch.nn.Module):
    """Blocks, the last of which uses the weight of the first; a frozen one between them."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(4)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(4))
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 3)
        self.layers[3].weight = self.layers[0].weight
        self.layers[1].requires_grad_(False)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def test_tied_and_frozen_parameters(ranks):
    def run():
        accelerator, model, optimizer = start(lambda m: torch.optim.AdamW(m.parameters(), lr=0.02), model=Tied())
        for _ in range(3):
            step(accelerator, model, optimizer)
        assert model.layers[0].weight is model.layers[3].weight
        weights = whole(dict(model.named_parameters()))
        accelerator.end_training()
        return weights

    model = Tied()
    expected = plain_steps(model, torch.optim.AdamW(model.parameters(), lr=0.02), 3)
    assert torch.equal(model.layers[1].weight, Tied().layers[1].weight)
    for weights in ranks.run(run):
        same(weights, expected)


def test_evaluation_between_steps(ranks):
    def run():
        accelerator, model, optimizer = start()
        for _ in range(3):
            step(accelerator, model, optimizer)
            model.eval()
            with torch.no_grad():
                model(rows(accelerator)["x"])
            model.train()
        weights = whole(accelerator.backend.model_state(model))
        accelerator.end_training()
        return weights

    model = make_model()
    expected = plain_steps(model, torch.optim.AdamW(model.parameters(), lr=0.02), 3)
    for weights in ranks.run(run):
        same(weights, expected)


def test_ranks_start_with_rank_0s_weights(ranks):
    def run(sync):
        accelerator = Accelerator(**settings(sync_module_states=sync))
        torch.manual_seed(accelerator.process_index)
        weights = whole(dict(accelerator.prepare(torch.nn.Linear(4, 4, bias=False)).named_parameters()))["weight"]
        accelerator.end_training()
        return weights

    made = []
    for rank in range(2):
        torch.manual_seed(rank)
        made.append(torch.nn.Linear(4, 4, bias=False).weight.detach())
    for weight in ranks.run(run, True):
        assert torch.equal(weight, made[0])
    for weight in ranks.run(run, False):
        assert torch.equal(weight, torch.cat([made[0][:2], made[1][2:]]))


def test_models_that_are_freed_are_gone(ranks):
    def run():
        accelerator, model, optimizer = start()
        step(accelerator, model, optimizer)
        there = weakref.ref(model)
        model, optimizer = accelerator.free_memory(model, optimizer)
        gc.collect()
        accelerator.end_training()
        return there() is None

    assert all(ranks.run(run))


@pytest.mark.parametrize("write", [False, True])
def test_full_parameters(ranks, write):
    def run():
        accelerator, model, _ = start()
        before = whole(accelerator.backend.model_state(model))
        with accelerator.backend.full_parameters(model, write=write) as full:
            inside = {n: p.detach().clone() for n, p in full.named_parameters()}
            assert not any(isinstance(p, DTensor) for p in full.parameters())
            with torch.no_grad():
                for p in full.parameters():
                    p += 1
        after = whole(accelerator.backend.model_state(model))
        accelerator.end_training()
        return before, inside, after

    for before, inside, after in ranks.run(run):
        same(inside, before)
        same(after, {n: v + 1 for n, v in before.items()} if write else before)


@pytest.mark.parametrize(("steps", "sync_each_batch"), [(4, False), (4, True)])
def test_reductions_inside_a_window_are_the_users_choice(ranks, steps, sync_each_batch):
    def run():
        accelerator, model, optimizer = start(accumulation=steps, sync_each_batch=sync_each_batch)

        def micro_batch():
            with accelerator.accumulate(model):
                step(accelerator, model, optimizer)

        for _ in range(steps):
            micro_batch()
        counts = [count_collectives(micro_batch).get("reduce_scatter", 0) for _ in range(steps)]
        accelerator.end_training()
        return counts

    for counts in ranks.run(run):
        assert counts == ([4] * 4 if sync_each_batch else [0, 0, 0, 4])


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_window_that_is_dropped_leaves_nothing_behind(ranks, precision):
    def run(drop):
        accelerator = Accelerator(
            **settings(accumulation=3, transformer_cls_names_to_wrap=["Linear"]), mixed_precision=precision
        )
        model = make_model()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        batch = rows(accelerator)
        if drop:
            for _ in range(2):
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch["x"]).float().pow(2).mean() * 100)
            accelerator.backend.zero_grad(optimizer.optimizer)  # as when a loss was no number
            accelerator.gradient_state.forget()
        for _ in range(3):
            with accelerator.accumulate(model):
                step(accelerator, model, optimizer)
        weights = whole(accelerator.backend.model_state(model))
        accelerator.end_training()
        return weights

    for ours, theirs in zip(ranks.run(run, True), ranks.run(run, False), strict=True):
        same(ours, theirs)


@pytest.mark.parametrize("sync_each_batch", [False, True])
@pytest.mark.parametrize("loader", ["single", "ddp", "fsdp"])
def test_a_window_goes_on_elsewhere(workers, tmp_path, loader, sync_each_batch):
    """Saved after two of four micro-batches on two ranks, finished under another backend."""

    def finish(options, directory, begin):
        accelerator = Accelerator(**options)
        model = make_model()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if not begin:
            accelerator.load_state(directory)
        for _ in range(2):
            with accelerator.accumulate(model):
                step(accelerator, model, optimizer)
        if begin:
            accelerator.save_state(directory)
        weights = whole(accelerator.backend.model_state(model))
        accelerator.end_training()
        return weights

    directory = str(tmp_path / "window")
    sharded = settings(accumulation=4, sync_each_batch=sync_each_batch, transformer_cls_names_to_wrap=["Linear"])
    workers(2).run(finish, sharded, directory, True)
    others = {"cpu": True, "backend": loader, "gradient_accumulation_steps": 4}
    world = 1 if loader == "single" else 2
    model = make_model()
    expected = plain_steps(model, torch.optim.SGD(model.parameters(), lr=0.1), 1)
    for weights in workers(world).run(finish, sharded if loader == "fsdp" else others, directory, False):
        same(weights, expected)


@pytest.mark.parametrize("sync_each_batch", [False, True])
def test_a_load_inside_an_open_window_drops_its_gradients(ranks, tmp_path, sync_each_batch):
    def run(directory, disturb):
        options = settings(accumulation=3, sync_each_batch=sync_each_batch, transformer_cls_names_to_wrap=["Linear"])
        accelerator = Accelerator(**options, mixed_precision="bf16")
        model = make_model()
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        batch = rows(accelerator)

        def window():
            for _ in range(3):
                with accelerator.accumulate(model):
                    step(accelerator, model, optimizer)

        window()
        accelerator.save_state(directory)
        if disturb:
            window()
            for _ in range(2):
                with accelerator.accumulate(model):
                    accelerator.backward(model(batch["x"]).float().pow(2).mean() * 100, weight=7)
            accelerator.load_state(directory)
        window()
        weights = whole(accelerator.backend.model_state(model))
        accelerator.end_training()
        return weights

    disturbed = ranks.run(run, str(tmp_path / "a"), True)
    for ours, theirs in zip(disturbed, ranks.run(run, str(tmp_path / "b"), False), strict=True):
        same(ours, theirs)


# -- precision -------------------------------------------------------------------------------------------------------------


def test_the_precision_policy_is_followed(ranks):
    def run(policy, precision):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        seen = []
        model[0].register_forward_hook(lambda m, args, out: seen.append((m.weight.dtype, args[0].dtype)))
        accelerator = Accelerator(**settings(mixed_precision_policy=policy), mixed_precision=precision)
        model = accelerator.prepare(model)
        with torch.profiler.profile(record_shapes=True) as profile:
            out = model(torch.ones(2, 4))
            accelerator.backward(out.float().sum())
        reduced = [e.input_shapes for e in profile.events() if e.name == "c10d::_reduce_scatter_base_"]
        accelerator.end_training()
        return *seen[0], out.dtype, next(model.parameters()).grad.dtype, len(reduced)

    low, full = torch.bfloat16, torch.float32
    for found in ranks.run(run, None, "no"):
        assert found == (full, full, full, full, 1)
    for found in ranks.run(run, None, "bf16"):
        assert found == (low, full, full, full, 1)
    for found in ranks.run(run, "bf16", "no"):
        assert found == (low, low, low, full, 1)
    for found in ranks.run(run, {"param_dtype": "bfloat16", "output_dtype": "float32"}, "no"):
        assert found == (low, low, full, full, 1)


# -- what is refused -------------------------------------------------------------------------------------------------------


class Scalar(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.inner = torch.nn.Linear(2, 2)


def mixed():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].bfloat16()
    return model


def test_what_cannot_be_sharded_is_refused_on_every_rank(ranks):
    def run():
        answers = []
        for model in (Scalar(), mixed()):
            accelerator = Accelerator(**settings())
            with pytest.raises(UnsupportedError) as error:
                accelerator.prepare(model)
            answers.append(str(error.value))
            accelerator.end_training()
        accelerator, first, _ = start()
        other = torch.nn.Sequential(torch.nn.Linear(6, 6))
        other[0].weight = first[0].weight
        for model in (other, torch.nn.Sequential(first[0], torch.nn.Linear(16, 2))):
            with pytest.raises(UnsupportedError) as error:
                accelerator.prepare(model)
            answers.append(str(error.value))
        accelerator.end_training()
        return answers

    for scalar, dtypes, parameter, module in ranks.run(run):
        assert "shape (1,)" in scalar
        assert "bfloat16 and float32" in dtypes
        assert "another prepared model" in parameter
        assert "sharded already" in module


@pytest.mark.parametrize(
    "fields",
    [
        {"auto_wrap_policy": "SIZE_BASED_WRAP"},
        {"auto_wrap_policy": "blocks"},
        {"auto_wrap_policy": "NO_WRAP", "min_num_params": 4},
        {"transformer_cls_names_to_wrap": ["Block"], "min_num_params": 4},
        {"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": True},
        {"backward_prefetch": "BACKWARD_POST"},
        {"mixed_precision_policy": "int8"},
        {"mixed_precision_policy": {"params": "bf16"}},
        {"sharding_strategy": "ZERO"},
    ],
)
def test_contradictions_are_errors(fields):
    with pytest.raises(ConfigurationError):
        FullyShardedDataParallelPlugin(**fields)


def test_a_class_that_is_not_there_is_an_error(ranks):
    def run():
        accelerator = Accelerator(**settings(transformer_cls_names_to_wrap=["Block"]))
        with pytest.raises(ConfigurationError, match="LayerNorm, Linear, Sequential"):
            accelerator.prepare(make_model())
        accelerator.end_training()

    ranks.run(run)
