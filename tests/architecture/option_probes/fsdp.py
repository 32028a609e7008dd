"""Options of sharding, on two ranks."""

from __future__ import annotations

import contextlib

import torch

from drivetrain import Accelerator, FullyShardedDataParallelPlugin, init_empty_weights
from drivetrain.testing.communication import count_collectives

from . import effect


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x).tanh()


def blocks(number=3):
    torch.manual_seed(torch.distributed.get_rank())
    return torch.nn.Sequential(*(Block() for _ in range(number)))


@contextlib.contextmanager
def fsdp(model=None, **options):
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**options))
    try:
        yield accelerator, accelerator.prepare(blocks() if model is None else model)
    finally:
        accelerator.end_training()


def units(**options):
    with fsdp(**options) as (accelerator, _):
        return int(accelerator.backend.describe()["units"].split()[0])


def gathers(**options):
    """All-gathers of a forward and backward, once all is set up."""
    with fsdp(**options) as (accelerator, model):

        def run():
            accelerator.backward(model(torch.ones(2, 4)).mean())

        run()
        return count_collectives(run).get("all_gather", 0)


def order(**options):
    """Whether each gather waits for what is computed before: gathers (g) and matrix products (m) of forward and backward, in order."""
    with fsdp(**options) as (accelerator, model):
        accelerator.backward(model(torch.ones(2, 4)).mean())
        with torch.profiler.profile() as profile:
            accelerator.backward(model(torch.ones(2, 4)).mean())
        events = sorted(profile.events(), key=lambda e: e.time_range.start)
        signs = {"c10d::_allgather_base_": "g", "aten::addmm": "m", "aten::mm": "m"}
        return "".join(signs[e.name] for e in events if e.name in signs)


@effect("FullyShardedDataParallelPlugin.sharding_strategy", ("FULL_SHARD", [6, 6]), ("SHARD_GRAD_OP", [3, 3]), ranks=2)
def sharding_strategy(value, folder):
    return gathers(sharding_strategy=value)


@effect("FullyShardedDataParallelPlugin.reshard_after_forward", (None, [6, 6]), (False, [3, 3]), ranks=2)
def reshard_after_forward(value, folder):
    return gathers(reshard_after_forward=value)


@effect("FullyShardedDataParallelPlugin.auto_wrap_policy", ("auto", [4, 4]), ("NO_WRAP", [1, 1]), ranks=2)
def auto_wrap_policy(value, folder):
    return units(auto_wrap_policy=value)


@effect(
    "FullyShardedDataParallelPlugin.transformer_cls_names_to_wrap",
    (["Linear"], [4, 4]),
    (["Linear", "Block"], [7, 7]),
    ranks=2,
)
def transformer_cls_names_to_wrap(value, folder):
    return units(transformer_cls_names_to_wrap=value)


@effect("FullyShardedDataParallelPlugin.min_num_params", (20, [4, 4]), (60, [1, 1]), ranks=2)
def min_num_params(value, folder):
    return units(min_num_params=value)


@effect("FullyShardedDataParallelPlugin.ignored_modules", (None, [6, 6]), (["0", "1"], [2, 2]), ranks=2)
def ignored_modules(value, folder):
    """How many parameters are sharded."""
    model = blocks()
    model[:2].requires_grad_(False)
    with fsdp(model, ignored_modules=value) as (_, model):
        return sum(hasattr(p, "to_local") for p in model.parameters())


@effect(
    "FullyShardedDataParallelPlugin.mixed_precision_policy",
    (None, ["torch.float32"] * 2),
    ("bf16", ["torch.bfloat16"] * 2),
    ranks=2,
)
def mixed_precision_policy(value, folder):
    with fsdp(mixed_precision_policy=value) as (_, model):
        return str(model(torch.ones(2, 4)).dtype)


@effect(
    "FullyShardedDataParallelPlugin.cpu_offload",
    (False, ["OffloadPolicy"] * 2),
    (True, ["CPUOffloadPolicy"] * 2),
    ranks=2,
)
def cpu_offload(value, folder):
    """What the first unit was told: on a CPU there is no other memory in which to see it."""
    with fsdp(cpu_offload=value) as (_, model):
        return type(model[0]._get_fsdp_state()._fsdp_param_groups[0].offload_policy).__name__


@effect(
    "FullyShardedDataParallelPlugin.backward_prefetch",
    ("BACKWARD_PRE", [True] * 2),
    ("NO_PREFETCH", [False] * 2),
    ranks=2,
)
def backward_prefetch(value, folder):
    """Whether two units are gathered before the first matrix product of backward."""
    return "gg" in order(backward_prefetch=value)[6:]


@effect("FullyShardedDataParallelPlugin.forward_prefetch", (0, [False] * 2), (1, [True] * 2), ranks=2)
def forward_prefetch(value, folder):
    return order(forward_prefetch=value, backward_prefetch="NO_PREFETCH").startswith("gg")


@effect("FullyShardedDataParallelPlugin.sync_module_states", (True, [True] * 2), (False, [False] * 2), ranks=2)
def sync_module_states(value, folder):
    """Whether all shards are rank 0's."""
    torch.manual_seed(0)
    expected = Block().inner.weight
    with fsdp(sync_module_states=value) as (_, model):
        return bool(torch.equal(model[0].inner.weight.full_tensor(), expected))


@effect("FullyShardedDataParallelPlugin.param_init_fn", (1.0, [1.0] * 2), (2.0, [2.0] * 2), ranks=2)
def param_init_fn(value, folder):
    with init_empty_weights():
        model = blocks()
    with fsdp(model, param_init_fn=lambda m: torch.nn.init.constant_(m.weight, value)) as (_, model):
        return float(model[0].inner.weight.full_tensor()[0, 0])


@effect(
    "FullyShardedDataParallelPlugin.cpu_ram_efficient_loading",
    (True, ["made"] * 2),
    (False, ["UnsupportedError"] * 2),
    ranks=2,
)
def cpu_ram_efficient_loading(value, folder):
    with init_empty_weights() if torch.distributed.get_rank() else contextlib.nullcontext():
        model = blocks()
    with fsdp(model, cpu_ram_efficient_loading=value):
        return "made"


@effect("FullyShardedDataParallelPlugin.activation_checkpointing", (False, [3, 3]), (True, [6, 6]), ranks=2)
def activation_checkpointing(value, folder):
    """How often blocks compute in a forward and backward."""
    with fsdp(activation_checkpointing=value) as (accelerator, model):
        with torch.profiler.profile() as profile:
            accelerator.backward(model(torch.ones(2, 4)).mean())
        return sum(e.name == "aten::tanh" for e in profile.events())


def made(**options):
    FullyShardedDataParallelPlugin(**options)
    return "made"


@effect(
    "FullyShardedDataParallelPlugin.state_dict_type",
    ("FULL_STATE_DICT", "made"),
    ("LOCAL_STATE_DICT", "UnsupportedError"),
)
def state_dict_type(value, folder):
    return made(state_dict_type=value)


@effect("FullyShardedDataParallelPlugin.fsdp_version", (2, "made"), (1, "UnsupportedError"))
def fsdp_version(value, folder):
    return made(fsdp_version=value)


@effect("FullyShardedDataParallelPlugin.limit_all_gathers", (True, "made"), (False, "UnsupportedError"))
def limit_all_gathers(value, folder):
    return made(limit_all_gathers=value)


@effect("FullyShardedDataParallelPlugin.use_orig_params", (True, "made"), (False, "UnsupportedError"))
def use_orig_params(value, folder):
    return made(use_orig_params=value)


@effect("Accelerator.fsdp_plugin", ("FULL_SHARD", [1, 1]), ("NO_SHARD", [2, 2]), ranks=2)
def fsdp_plugin(value, folder):
    """Rows of a two-row weight that a rank holds."""
    with fsdp(torch.nn.Linear(2, 2), sharding_strategy=value) as (_, model):
        return len(model.weight.to_local())
