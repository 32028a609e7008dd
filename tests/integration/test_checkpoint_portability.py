"""A checkpoint of any backend at any world size is read by any other: weights, optimizer, and the next step are those of plain PyTorch."""

import importlib.util

import pytest
import torch

from drivetrain import Accelerator, FullyShardedDataParallelPlugin
from drivetrain.testing.training import make_data, make_model, whole

#: World size and settings.
LAYOUTS = {
    "single": (1, {"backend": "single"}),
    "ddp-2": (2, {"backend": "ddp"}),
    "ddp-3": (3, {"backend": "ddp"}),
    "fsdp-1": (1, {"fsdp": {}}),
    "fsdp-2": (2, {"fsdp": {"transformer_cls_names_to_wrap": ["Linear"]}}),
    "fsdp-3": (3, {"fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}}),
    "replicas-2": (2, {"fsdp": {"sharding_strategy": "NO_SHARD"}}),
    "cpu-offload-2": (2, {"fsdp": {"cpu_offload": True, "min_num_params": 60}}),
}
#: ZeRO stages; they are read by, and read, a choice of the others. With ``full``, all of them.
STAGES = {
    "zero-1-3": (3, {"deepspeed": {"zero_stage": 1}}),
    "zero-2-2": (2, {"deepspeed": {"zero_stage": 2, "offload_optimizer_device": "cpu"}}),
    "zero-3-2": (2, {"deepspeed": {"zero_stage": 3}}),
    "zero-3-1": (1, {"deepspeed": {"zero_stage": 3, "offload_optimizer_device": "cpu"}}),
    "zero-0-2": (2, {"deepspeed": {"zero_stage": 0}}),
}
if importlib.util.find_spec("drivetrain_deepspeed") is None:
    STAGES = {}
CHOSEN = ("single", "ddp-3", "fsdp-2", "zero-1-3", "zero-2-2", "zero-3-2")


class Tied(torch.nn.Module):
    """With tied weights, a frozen part, and a statistic."""

    def __init__(self):
        super().__init__()
        self.body = make_model()
        self.first = torch.nn.Linear(3, 3, bias=False)
        self.second = torch.nn.Linear(3, 3)
        with torch.no_grad():
            self.first.weight.copy_(torch.linspace(-1, 1, 9).view(3, 3))
            self.second.bias.zero_()
        self.second.weight = self.first.weight
        self.body[0].requires_grad_(False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        return self.second(self.first(self.body(x)).tanh())


def make():
    model = Tied()
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": trained[:2]}, {"params": trained[2:], "lr": 0.01}]
    return model, torch.optim.AdamW(groups, lr=0.05, amsgrad=True)


def rows():
    batch = torch.utils.data.default_collate(make_data(12))
    return batch["x"], batch["y"]


def start(settings):
    settings = dict(settings)
    fsdp = settings.pop("fsdp", None)
    if fsdp is not None:
        settings["fsdp_plugin"] = FullyShardedDataParallelPlugin(**fsdp)
    stages = settings.pop("deepspeed", None)
    if stages is not None:
        from drivetrain import DeepSpeedPlugin

        settings["deepspeed_plugin"] = DeepSpeedPlugin(**stages)
    accelerator = Accelerator(cpu=True, **settings)
    return accelerator, *accelerator.prepare(*make())


def step(accelerator, model, optimizer):
    backend = accelerator.backend
    x, y = (t.chunk(backend.data_world_size)[backend.data_rank] for t in rows())
    accelerator.backward(torch.nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()


def state(accelerator, model, optimizer):
    found = accelerator.backend.optimizer_state(optimizer.optimizer, [model])["state"]
    moments = {f"{n}/{k}": v for n, values in found.items() for k, v in values.items()}
    return {**whole(accelerator.backend.model_state(model)), **whole(moments)}


def save(settings, directory):
    accelerator, model, optimizer = start(settings)
    for _ in range(2):
        step(accelerator, model, optimizer)
    accelerator.save_state(directory)
    accelerator.save_model(model, f"{directory}-weights")
    accelerator.end_training()


def load(settings, directory):
    accelerator, model, optimizer = start(settings)
    step(accelerator, model, optimizer)  # is overwritten
    accelerator.load_state(directory)
    loaded = state(accelerator, model, optimizer)
    step(accelerator, model, optimizer)
    after = state(accelerator, model, optimizer)
    accelerator.end_training()
    return loaded, after


def plain(steps):
    model, optimizer = make()
    x, y = rows()
    for _ in range(steps):
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    names = {id(p): n for n, p in model.named_parameters()}
    moments = {f"{names[id(p)]}/{k}": v for p, values in optimizer.state.items() for k, v in values.items()}
    return {**whole(model.state_dict()), **whole(moments)}


def same(ours, theirs, who):
    assert ours.keys() == theirs.keys(), who
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, atol=1e-5, rtol=1e-5, msg=lambda m, name=name: f"{who}: {name}: {m}"
        )


@pytest.mark.parametrize("saver", LAYOUTS)
def test_every_other_layout_reads_it(workers, tmp_path, saver):
    check(workers, str(tmp_path / "checkpoint"), saver, LAYOUTS)


@pytest.mark.parametrize(
    "saver",
    [
        pytest.param(name, marks=() if name in CHOSEN else pytest.mark.full)
        for name in (*(LAYOUTS if STAGES else ()), *STAGES)
    ],
)
def test_zero_stages_read_and_are_read(workers, tmp_path, saver):
    loaders = CHOSEN if saver in STAGES else [name for name in CHOSEN if name in STAGES]
    check(workers, str(tmp_path / "checkpoint"), saver, {name: {**LAYOUTS, **STAGES}[name] for name in loaders})


@pytest.mark.full
@pytest.mark.parametrize("saver", STAGES)
def test_all_read_zero_stages(workers, tmp_path, saver):
    check(workers, str(tmp_path / "checkpoint"), saver, {**LAYOUTS, **STAGES})


def check(workers, directory, saver, loaders):
    world, settings = {**LAYOUTS, **STAGES}[saver]
    workers(world).run(save, settings, directory)
    saved, next_one = plain(2), plain(3)
    for loader, (size, options) in loaders.items():
        for rank, (loaded, after) in enumerate(workers(size).run(load, options, directory)):
            who = f"{saver} saved, rank {rank} of {loader} loaded"
            same(loaded, saved, who)
            same(after, next_one, who)
    from drivetrain.checkpoint import read_weights

    weights = read_weights(f"{directory}-weights")
    same(weights, {n: v for n, v in saved.items() if "/" not in n}, f"weights that {saver} saved")
