"""Profiles by tracing and by rules of thumb, layouts, the choice among plans."""

import copy
import json
from dataclasses import replace

import pytest
import torch

from drivetrain import Accelerator, ActivationCheckpointing
from drivetrain.errors import ConfigurationError, UnsupportedError
from drivetrain.interfaces import ShardingPlan, ShardingPlanner, TrainingRequest
from drivetrain.memory import (
    Hardware,
    Layout,
    default_loss,
    known_accelerators,
    known_hardware,
    make_plans,
    measure_machine,
    micro_batch_sizes,
    parse_bytes,
    predict,
    profile_model,
    profile_of_config,
    profile_of_counts,
)
from drivetrain.specs import ShardingPlannerSpec

EVERYTHING = frozenset({"parameters", "gradients", "optimizer"})


class Block(torch.nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.first, self.second = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.second(torch.nn.functional.gelu(self.first(x)))


def make_model(depth=4):
    return torch.nn.Sequential(*(Block() for _ in range(depth)), torch.nn.Linear(32, 3))


BATCH = torch.zeros(8, 32), torch.zeros(8, dtype=torch.long)


def hardware(devices=1, **fields):
    return Hardware(name="toy", memory=10**9, flops={"float32": 1e12}, devices=devices, **fields)


def plan(layout, profile, devices=1, micro_batch=8, accumulation=1, recompute="none", **fields):
    request = TrainingRequest(batch_size=micro_batch * accumulation * layout.devices)
    return predict(
        layout,
        profile,
        hardware(devices, **fields),
        request,
        micro_batch=micro_batch,
        backend="toy",
        recompute=recompute,
    )


# -- profiles ------------------------------------------------------------------------------------------------------------------


def test_a_trace_changes_nothing():
    model = make_model()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    profile_model(model, BATCH, optimizer=optimizer)
    assert torch.equal(torch.rand(1), expected)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_counts_are_those_of_the_model():
    model = make_model()
    profile = profile_model(model, BATCH)
    assert profile.parameter_count == sum(p.numel() for p in model.parameters())
    assert profile.units == ("", "0", "1", "2", "3")
    blocks = [sum(p.numel for p in profile.parameters if p.unit == u) for u in range(1, 5)]
    assert blocks == [sum(p.numel() for p in b.parameters()) for b in model[:4]]
    # Each matrix product: 2 operations per weight and sample in forward, 4 in backward, but for the first block's inputs.
    weights = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    first = model[0].first.weight.numel()
    assert profile.timelines["none"].flops == pytest.approx(6 * weights - 2 * first, rel=1e-6)


@pytest.mark.parametrize(
    ("make", "per_element"),
    [
        (torch.optim.AdamW, 8),
        (lambda p: torch.optim.SGD(p, lr=1), 0),
        (lambda p: torch.optim.SGD(p, lr=1, momentum=0.9), 4),
        (torch.optim.Adagrad, 4),
        (torch.optim.NAdam, 8),
        (lambda p: torch.optim.Adafactor(p), None),
    ],
)
def test_state_is_what_the_optimizer_makes(make, per_element):
    model = make_model()
    profile = profile_model(model, BATCH, optimizer=make)
    optimizer = make(model.parameters())
    default_loss(model, BATCH).backward()
    optimizer.step()
    real = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor))
    assert profile.optimizer.state == real
    if per_element is not None:
        assert real == pytest.approx(per_element * profile.parameter_count, rel=0.01)


def test_groups_frozen_and_tied_parameters():
    model = make_model()
    model[0].requires_grad_(False)
    model[1].first.weight = model[2].first.weight
    optimizer = torch.optim.SGD(
        [{"params": model[2].parameters(), "momentum": 0.9}, {"params": model[3].parameters()}], lr=1
    )
    profile = profile_model(model, BATCH, optimizer=optimizer)
    names = [p.name for p in profile.parameters]
    assert len(names) == len(set(names)) == len(list(model.parameters()))
    assert {p.unit for p in profile.parameters if not p.trainable} == {1}
    assert [p.unit for p in profile.parameters if p.name == "1.first.weight"] == [
        0
    ]  # two units share it: neither owns it
    assert profile.optimizer.state == 4 * sum(p.numel() for p in model[2].parameters())


def test_precisions_change_what_is_held():
    def held(name):
        precision = Accelerator(cpu=True, mixed_precision=name).backend.precision
        return profile_model(make_model(), BATCH, precision=precision)

    full, bf16, pure = held("no"), held("bf16"), held("pure-bf16")
    assert bf16.parameter_bytes == full.parameter_bytes == 2 * pure.parameter_bytes
    assert bf16.optimizer.state == full.optimizer.state
    assert pure.optimizer.state == pytest.approx(full.optimizer.state * 1.5, rel=0.01)  # and float32 weights
    copies = max(s.peak(8).copies for s in bf16.timelines["none"].stretches)
    assert copies >= sum(p.numel * 2 for p in bf16.parameters if len(p.shape) == 2)
    assert not any(s.peak(8).copies for s in full.timelines["none"].stretches)
    assert bf16.compute_itemsize == 2


def test_recomputing_holds_less_and_computes_more():
    profile = profile_model(
        make_model(),
        BATCH,
        recompute={"none": None, "half": ActivationCheckpointing(every=2), "all": ActivationCheckpointing()},
    )
    most = {name: max(s.peak(1024).activations(1024) for s in t.stretches) for name, t in profile.timelines.items()}
    flops = {name: t.flops for name, t in profile.timelines.items()}
    assert most["all"] < most["half"] < most["none"]
    assert flops["all"] > flops["half"] > flops["none"]
    assert profile.timelines["half"].recompute == {"every": 2}


class Meets(torch.nn.Module):
    """Each sample is compared with each other one."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x):
        y = self.layer(x)
        return (y @ y.T).softmax(-1) @ y


@pytest.mark.parametrize(
    "model", [Meets(), torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())], ids=["meets", "apart"]
)
def test_work_of_larger_batches_follows_from_a_small_one(model):
    def work(rows, asked):
        batch = torch.zeros(rows, 8)
        profile = profile_model(model, batch, loss=lambda m, x: m(x).sum(), recompute={"none": None})
        return profile.timelines["none"].work(asked)

    flops, moved = work(16, 64)
    assert flops == pytest.approx(work(64, 64)[0], rel=1e-9)
    assert moved == pytest.approx(work(64, 64)[1], rel=0.03)  # a batch of any size needs a little


@pytest.mark.parametrize("optimizer", [torch.optim.Adagrad, torch.optim.AdamW])
def test_state_has_the_dtype_of_when_it_is_made(optimizer):
    """Adagrad makes it at once, before the model is converted to bf16; with float32 copies of the weights beside it."""
    precision = Accelerator(cpu=True, mixed_precision="pure-bf16", backend="single").backend.precision
    given = profile_model(
        torch.nn.Linear(8, 8), torch.zeros(2, 8), optimizer=optimizer, loss=lambda m, x: m(x).sum(), precision=precision
    )
    model = torch.nn.Linear(8, 8)
    made = profile_model(
        model,
        torch.zeros(2, 8),
        optimizer=optimizer(model.parameters()),
        loss=lambda m, x: m(x).sum(),
        precision=precision,
    )
    assert given.optimizer.state == made.optimizer.state


def test_a_step_on_one_parameter_has_no_temporaries_of_another():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), torch.nn.Linear(16, 8, bias=False))
    loss = lambda m, x: m(x).sum()  # noqa: E731
    found = profile_model(model, torch.zeros(2, 16), optimizer=torch.optim.Adagrad, loss=loss).optimizer
    assert (found.temporaries, found.temporaries_alone) == ((16 + 8) * 16 * 4, 16 * 16 * 4)


def test_the_meta_device_and_mappings():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.seen = make_model(), torch.nn.BatchNorm1d(3)

        def forward(self, inputs, labels):
            return {"loss": torch.nn.functional.cross_entropy(self.seen(self.body(inputs)), labels)}

    with torch.device("meta"):
        model = Model()
    profile = profile_model(model, {"inputs": BATCH[0], "labels": BATCH[1]})
    assert profile.buffers == 2 * 3 * 4 + 8
    assert profile.inputs == 32 * 4 + 8


def test_shapes_that_depend_on_values_are_refused():
    class Picks(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(32, 3)

        def forward(self, x):
            return self.layer(x[x.sum(1) > 0])

    with pytest.raises(UnsupportedError, match="can't be traced without values"):
        profile_model(Picks(), BATCH[0])


def test_a_model_without_loss_is_refused():
    with pytest.raises(UnsupportedError, match="say loss="):
        profile_model(torch.nn.Linear(2, 2).requires_grad_(False), torch.zeros(2, 2))


def test_rules_of_thumb():
    profile = profile_of_counts(
        parameters=1.3e9, layers=24, hidden=2048, sequence=2048, vocabulary=50000, precision="bf16"
    )
    assert profile.parameter_count == pytest.approx(1.3e9, rel=0.01)
    assert profile.optimizer.state == 8 * profile.parameter_count
    # Kaplan et al.: 6 operations per parameter and token; attention and the embedding's lookups differ by some.
    assert profile.timelines["none"].flops == pytest.approx(6 * 1.3e9 * 2048, rel=0.2)
    with pytest.raises(ConfigurationError, match="fewer than"):
        profile_of_counts(parameters=1e6, layers=2, hidden=4096)
    with pytest.raises(ConfigurationError, match="Trace the model itself"):
        profile_of_counts(parameters=1e9, layers=2, hidden=64, optimizer="muon")


def test_rules_of_thumb_are_near_a_trace():
    """A decoder of the shape that rules of thumb assume, traced."""
    width, length, vocabulary, depth = 256, 128, 1000, 6

    def layer():
        return torch.nn.TransformerEncoderLayer(width, 2, 4 * width, 0.0, "gelu", batch_first=True)

    model = torch.nn.Sequential(
        torch.nn.Embedding(vocabulary, width),
        *(layer() for _ in range(depth)),
        torch.nn.Linear(width, vocabulary, bias=False),
    )
    tokens = torch.zeros(4, length, dtype=torch.long)
    traced = profile_model(model, (tokens, tokens), recompute={"none": None})
    counted = profile_of_counts(
        parameters=traced.parameter_count, layers=depth, hidden=width, sequence=length, vocabulary=vocabulary, heads=2
    )
    assert counted.timelines["none"].flops == pytest.approx(traced.timelines["none"].flops, rel=0.1)
    ours, theirs = (plan(Layout(), p, micro_batch=16).peak_bytes for p in (counted, traced))
    assert ours == pytest.approx(theirs, rel=0.25)


def test_configurations(tmp_path):
    facts = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "vocab_size": 128256,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "max_position_embeddings": 8192,
    }
    (tmp_path / "config.json").write_text(json.dumps(facts))
    assert profile_of_config(tmp_path).parameter_count == pytest.approx(8.03e9, rel=0.001)  # Llama 3 8B
    assert profile_of_config(tmp_path, sequence=16).inputs == 16 * 16
    (tmp_path / "config.json").write_text('{"model_type": "resnet"}')
    with pytest.raises(ConfigurationError, match="num_hidden_layers"):
        profile_of_config(tmp_path)
    with pytest.raises(ConfigurationError, match="can't be read"):
        profile_of_config(tmp_path / "absent.json")


# -- layouts -------------------------------------------------------------------------------------------------------------------


def test_state_is_divided():
    profile = profile_model(make_model(), BATCH)
    whole, cut = plan(Layout(replicas=4), profile, 4), plan(Layout(shards=4, divides=EVERYTHING), profile, 4)
    assert whole.memory_bytes["parameters"] == profile.parameter_bytes
    assert cut.memory_bytes["parameters"] == pytest.approx(profile.parameter_bytes / 4, rel=0.02)
    assert cut.memory_bytes["optimizer"] == pytest.approx(profile.optimizer.state / 4, rel=0.02)
    assert cut.peak_bytes < whole.peak_bytes
    # The first gathers in forward and in backward; an all-reduce sends as much as a gather and a reduction.
    assert whole.communication_bytes == pytest.approx(2 * profile.parameter_bytes * 3 / 4, rel=0.02)
    assert cut.communication_bytes == pytest.approx(3 * profile.parameter_bytes * 3 / 4, rel=0.05)
    kept = plan(Layout(shards=4, divides=EVERYTHING, keeps_gathered=True), profile, 4)
    assert kept.communication_bytes < cut.communication_bytes
    assert kept.peak_bytes > cut.peak_bytes


def test_padding_counts():
    profile = profile_model(torch.nn.Linear(5, 3), torch.zeros(2, 5))
    cut = plan(Layout(shards=2, divides=EVERYTHING), profile, 2)
    assert cut.memory_bytes["parameters"] == 4 * (2 * 5 + 2)


def test_accumulating_keeps_whole_gradients_unless_they_are_reduced():
    profile = profile_model(make_model(depth=8), BATCH)
    layout = Layout(shards=4, divides=EVERYTHING)
    once = plan(layout, profile, 4, accumulation=1)
    kept = plan(layout, profile, 4, accumulation=4)
    reduced = plan(replace(layout, sync_each_batch=True), profile, 4, accumulation=4)
    assert kept.peak_bytes > reduced.peak_bytes >= once.peak_bytes
    assert kept.communication_bytes < reduced.communication_bytes
    assert reduced.sync_each_batch
    assert not kept.sync_each_batch


def test_what_is_offloaded_is_in_the_other_memory():
    profile = profile_of_counts(parameters=1e9, layers=16, hidden=2048, sequence=512)
    layout = Layout(shards=2, divides=EVERYTHING, offload=("parameters", "gradients", "optimizer"))
    away, here = (plan(o, profile, 2, memory_bandwidth=1e12) for o in (layout, replace(layout, offload=())))
    assert away.memory_bytes["parameters"] == away.memory_bytes["optimizer"] == 0
    assert away.host_bytes >= here.memory_bytes["parameters"] + here.memory_bytes["optimizer"]
    assert away.step_seconds > here.step_seconds


def test_larger_micro_batches_need_more_and_take_less_time():
    profile = profile_of_counts(parameters=1e9, layers=16, hidden=2048, sequence=512, precision="bf16")
    devices, request = known_hardware("h100-sxm"), TrainingRequest(batch_size=64)
    plans = [predict(Layout(), profile, devices, request, micro_batch=m, backend="toy") for m in (1, 4, 16)]
    assert sorted(plans, key=lambda p: p.peak_bytes) == plans
    assert sorted(plans, key=lambda p: p.step_seconds, reverse=True) == plans


# -- the choice ----------------------------------------------------------------------------------------------------------------


class Offers(ShardingPlanner):
    def __init__(self, *plans):
        super().__init__(ShardingPlannerSpec(name="offers", backend="toy"))
        self.plans = plans

    def propose(self, profile, hardware, request):
        return self.plans


def offer(need, seconds, **fields):
    return ShardingPlan(backend="toy", memory_bytes={"parameters": need}, step_seconds=seconds, **fields)


@pytest.mark.parametrize(
    ("plans", "best"),
    [
        ([offer(50, 2.0, strategy="slow"), offer(60, 1.0, strategy="fast")], "fast"),
        ([offer(50, 2.0, strategy="slow"), offer(95, 1.0, strategy="without headroom")], "slow"),
        ([offer(50, 1.0, strategy="plain"), offer(50, 0.99, strategy="away", offloaded=("optimizer",))], "plain"),
        ([offer(50, 1.0, strategy="quiet"), offer(50, 0.99, strategy="loud", communication_bytes=1)], "quiet"),
        ([offer(50, 1.0, strategy="here"), offer(10, 0.5, strategy="host", host_bytes=10**6)], "here"),
        ([offer(500, 1.0, strategy="large")], None),
    ],
)
def test_the_fastest_that_fits(plans, best):
    devices = replace(hardware(), memory=100, host_memory=1000)
    report = make_plans(
        profile_of_counts(parameters=1e8, layers=2, hidden=512),
        devices,
        TrainingRequest(batch_size=1),
        planners=[Offers(*plans)],
    )
    assert (report.best.strategy if report.best else None) == best
    assert report.shown()[0] is (report.best or plans[0])
    assert ("nothing fits" in report.reason) == (best is None)
    json.dumps(report.to_dict())


def test_a_backend_without_planner_is_refused():
    profile = profile_of_counts(parameters=1e8, layers=2, hidden=512)
    with pytest.raises(ConfigurationError, match="'nothing'"):
        make_plans(profile, hardware(), TrainingRequest(batch_size=1), backend="nothing")


def test_sizes_of_micro_batches():
    assert micro_batch_sizes(64, 8) == (1, 2, 4, 8)
    with pytest.raises(ConfigurationError, match="multiple of 8"):
        micro_batch_sizes(12, 8)


# -- hardware ------------------------------------------------------------------------------------------------------------------


def test_the_data_file_is_complete():
    fields = {"memory", "flops", "memory_bandwidth", "link_bandwidth", "network_bandwidth", "source", "matches"}
    assert {"a100-80gb", "h100-sxm", "h200", "b200", "v100-16gb", "l4", "rtx-4090", "mi300x", "tpu-v5e"} <= set(
        known_accelerators()
    )
    for name, facts in known_accelerators().items():
        assert fields <= set(facts), name
        made = known_hardware(name, devices=16)
        assert made.memory > 10**10
        assert made.link_bandwidth <= made.memory_bandwidth
        assert set(made.flops) <= {"float32", "bfloat16", "float16"}
    with pytest.raises(ConfigurationError, match="h100-sxm"):
        known_hardware("abacus")


def test_bytes_for_people():
    assert parse_bytes("4e9") == 4 * 10**9
    for wrong in ("much", "8 boxes", ""):
        with pytest.raises(ConfigurationError, match="no number of bytes"):
            parse_bytes(wrong)


def test_this_machine_is_measured():
    found = measure_machine(torch.device("cpu"), devices=2)
    assert found.flops["float32"] > 1e8
    assert found.memory_bandwidth > 1e7
    assert found.memory * 2 <= torch.iinfo(torch.int64).max
    assert found.devices_per_machine == 2


def test_links_are_measured_alike_on_all_ranks(ranks):
    def run():
        accelerator = Accelerator(cpu=True, backend="ddp")
        found = measure_machine(accelerator.device, devices=2)
        accelerator.end_training()
        return found.link_bandwidth, found.latency

    first, second = ranks.run(run)
    assert first == second
    assert first[0] > 1e5
