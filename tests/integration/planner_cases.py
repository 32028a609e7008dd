"""Five families of models, configurations drawn by seed, and what a training of each really needs: peaks of the profiler's memory events on real ranks."""

import gc
import random
from dataclasses import asdict, dataclass

import torch
from torch.nn.functional import cross_entropy, gelu, one_hot, scaled_dot_product_attention

from drivetrain import (
    Accelerator,
    ActivationCheckpointing,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from drivetrain.config import GradientAccumulationPlugin

WIDTH, SEQUENCE, VOCABULARY = 128, 64, 2000


class Attention(torch.nn.Module):
    def __init__(self, linear=torch.nn.Linear):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))


class MLP(torch.nn.Module):
    def __init__(self, linear=torch.nn.Linear):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = linear(WIDTH, 4 * WIDTH), linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(gelu(self.up(self.norm(x))))


class Experts(torch.nn.Module):
    """Each token goes to the best of four experts, as long as there is room (shapes don't depend on values)."""

    def __init__(self, number=4):
        super().__init__()
        self.norm, self.router = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, number)
        self.up = torch.nn.Parameter(torch.randn(number, WIDTH, 4 * WIDTH) * 0.02)
        self.down = torch.nn.Parameter(torch.randn(number, 4 * WIDTH, WIDTH) * 0.02)

    def forward(self, x):
        tokens = self.norm(x).flatten(0, 1)
        number = self.up.shape[0]
        room = 2 * tokens.shape[0] // number
        gates = self.router(tokens).softmax(-1)
        chosen = one_hot(gates.argmax(-1), number)
        place = (chosen.cumsum(0) - 1) * chosen
        # Rows of each expert: the tokens that it got, in order; what found no room goes on unchanged.
        slots = one_hot(place.clamp(max=room - 1), room) * (chosen * (place < room)).unsqueeze(-1)
        sent = torch.einsum("tes,tw->esw", slots.to(tokens.dtype), tokens)
        done = torch.bmm(gelu(torch.bmm(sent, self.up.to(sent.dtype))), self.down.to(sent.dtype))
        back = torch.einsum("tes,esw->tw", slots.to(done.dtype) * gates.unsqueeze(-1).to(done.dtype), done)
        return x + back.view_as(x)


class LoRALinear(torch.nn.Module):
    """A frozen matrix and a trained one of low rank."""

    def __init__(self, inputs, outputs, rank=8):
        super().__init__()
        self.base = torch.nn.Linear(inputs, outputs).requires_grad_(False)
        self.a, self.b = torch.nn.Linear(inputs, rank, bias=False), torch.nn.Linear(rank, outputs, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Decoder(torch.nn.Module):
    def __init__(self, depth=6, mixer=MLP, linear=torch.nn.Linear, frozen=False):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        inner = (lambda: mixer(linear)) if mixer is MLP else mixer
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(Attention(linear), inner()) for _ in range(depth))
        self.norm, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        if frozen:
            for module in (self.embedding, self.norm, self.head):
                module.requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(torch.nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(channels),
            torch.nn.ReLU(),
            torch.nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            torch.nn.BatchNorm2d(channels),
        )

    def forward(self, x):
        return torch.relu(x + self.body(x))


class Network(torch.nn.Module):
    def __init__(self, channels=96, depth=5):
        super().__init__()
        self.stem = torch.nn.Conv2d(3, channels, 3, padding=1, stride=2)
        self.blocks = torch.nn.Sequential(*(Residual(channels) for _ in range(depth)))
        self.head = torch.nn.Linear(channels, 10)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Recommender(torch.nn.Module):
    """Two large tables and a small network."""

    def __init__(self, rows=12000, width=64):
        super().__init__()
        self.users, self.items = torch.nn.Embedding(rows, width), torch.nn.Embedding(2 * rows, width)
        layers = [torch.nn.Sequential(torch.nn.Linear(2 * width, 2 * width), torch.nn.ReLU()) for _ in range(3)]
        self.layers, self.head = torch.nn.Sequential(*layers), torch.nn.Linear(2 * width, 2)

    def forward(self, ids):
        users, items = self.users(ids[:, 0]), self.items(ids[:, 1:]).mean(1)
        return self.head(self.layers(torch.cat([users, items], -1)))


MODELS = {
    "transformer": Decoder,
    "conv": Network,
    "embedding": Recommender,
    "moe": lambda: Decoder(depth=4, mixer=Experts),
    "lora": lambda: Decoder(linear=LoRALinear, frozen=True),
}
OPTIMIZERS = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


@dataclass(frozen=True)
class Config:
    family: str
    strategy: str = "ddp"
    recompute: str = "none"
    micro_batch: int = 8
    accumulation: int = 1
    sync_each_batch: bool = False
    precision: str = "no"
    optimizer: str = "adamw"

    @property
    def ranks(self):
        """Processes that train it: two replicas of two shards where there are both."""
        return 4 if self.strategy == "HYBRID_SHARD" else 2

    @property
    def label(self):
        return "-".join(str(v) for v in asdict(self).values())


AXES = {
    "family": tuple(MODELS),
    "strategy": ("ddp", "ddp-view", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "offload"),
    "recompute": ("none", "all"),
    "micro_batch": (4, 16, 64),
    "accumulation": (1, 2),
    "sync_each_batch": (False, True),
    "precision": ("no", "bf16", "pure-bf16"),
    "optimizer": tuple(OPTIMIZERS),
}


def draw(seed, number):
    """Configurations, each family equally often."""
    chance = random.Random(seed)
    found = []
    while len(found) < number:
        choice = {name: chance.choice(values) for name, values in AXES.items()}
        choice["family"] = AXES["family"][len(found) % len(MODELS)]
        if choice["family"] == "embedding":
            choice["micro_batch"] *= 16
        if choice["family"] == "moe":
            choice["micro_batch"] = min(choice["micro_batch"], 16)  # slots grow with the square of the tokens
        if choice["accumulation"] == 1 or choice["strategy"].startswith("ddp"):
            choice["sync_each_batch"] = False
        if (
            choice["family"] == "conv"
            and choice["precision"] == "pure-bf16"
            and not choice["strategy"].startswith("ddp")
        ):
            choice["precision"] = "bf16"  # the planner of fsdp offers nothing for units that train two dtypes
        config = Config(**choice)
        if config not in found:
            found.append(config)
    return found


def batch_of(family, rows):
    """A micro-batch."""
    generator = torch.Generator().manual_seed(rows)
    if family == "conv":
        return torch.rand(rows, 3, 32, 32, generator=generator), torch.randint(10, (rows,), generator=generator)
    if family == "embedding":
        ids = torch.randint(12000, (rows, 9), generator=generator)
        return ids, torch.randint(2, (rows,), generator=generator)
    tokens = torch.randint(VOCABULARY, (rows, SEQUENCE), generator=generator)
    return tokens, tokens.roll(-1, 1)


def loss_of(model, batch):
    out = model(batch[0])
    return cross_entropy(out.flatten(0, -2).float(), batch[1].flatten())


def accelerator_for(config):
    """An Accelerator that trains so."""
    handlers = [ActivationCheckpointing()] if config.recompute == "all" else []
    chosen = {"backend": "ddp"}
    if config.strategy == "ddp-view":
        handlers.append(DistributedDataParallelKwargs(gradient_as_bucket_view=True))
    elif config.strategy == "HYBRID_SHARD":
        handlers.append(ParallelismConfig(dp_replicate_size=2, dp_shard_size=2))
        chosen = {"backend": "fsdp"}
    elif config.strategy != "ddp":
        offload = config.strategy == "offload"
        strategy = "FULL_SHARD" if offload else config.strategy
        chosen = {"fsdp_plugin": FullyShardedDataParallelPlugin(sharding_strategy=strategy, cpu_offload=offload)}
    return Accelerator(
        cpu=True,
        mixed_precision=config.precision,
        kwargs_handlers=handlers,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=config.accumulation, sync_each_batch=config.sync_each_batch
        ),
        **chosen,
    )


def train(config, steps=5):
    """Train a few steps; each is marked for the profiler."""
    accelerator = accelerator_for(config)
    torch.manual_seed(0)
    model = MODELS[config.family]()
    optimizer = OPTIMIZERS[config.optimizer](p for p in model.parameters() if p.requires_grad)
    model, optimizer = accelerator.prepare(model, optimizer)
    batch = batch_of(config.family, config.micro_batch)
    for i in range(steps):
        with torch.profiler.record_function(f"training step {i}"):
            for _ in range(config.accumulation):
                with accelerator.accumulate(model):
                    accelerator.backward(loss_of(model, batch))
                    optimizer.step()
                    optimizer.zero_grad()
    accelerator.end_training()


def measure(config):
    """Most bytes of tensors at once in a step: the running sum of what the profiler saw allocated and freed since before the model was made.

    The first step, which makes optimizer state, doesn't count, and of the others the smallest: when gloo's threads let go of their buffers differs.
    """
    gc.collect()
    with torch.profiler.profile(profile_memory=True) as recording:
        train(config)
    events = recording.profiler.kineto_results.events()
    begins = sorted(e.start_ns() for e in events if e.name().startswith("training step "))
    peaks = [0] * len(begins)
    now, step = 0, -1
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        while step + 1 < len(begins) and event.start_ns() >= begins[step + 1]:
            step += 1
        now += event.nbytes()
        if step >= 0:
            peaks[step] = max(peaks[step], now)
    gc.collect()
    return min(peaks[1:])


def predicted(config):
    """The plan for a configuration, and the profile that it was made of."""
    from drivetrain.memory import profile_model

    torch.manual_seed(0)
    model = MODELS[config.family]()
    recompute = ActivationCheckpointing() if config.recompute == "all" else None
    profile = profile_model(
        model,
        batch_of(config.family, config.micro_batch),
        optimizer=OPTIMIZERS[config.optimizer],
        loss=loss_of,
        precision=Accelerator(cpu=True, mixed_precision=config.precision, backend="single").backend.precision,
        recompute={config.recompute: recompute},
    )
    return plan_of(config, profile), profile


def plan_of(config, profile):
    """The plan for a configuration on CPU ranks."""
    from drivetrain.interfaces import TrainingRequest
    from drivetrain.memory import Hardware, make_plans

    hardware = Hardware(name="cpu", memory=10**12, device="cpu", devices=config.ranks, devices_per_machine=2)
    request = TrainingRequest(
        batch_size=config.ranks * config.micro_batch * config.accumulation,
        micro_batches=(config.micro_batch,),
        recompute=(config.recompute,),
        headroom=0,
    )
    wanted = {"ddp": ("ddp", ""), "ddp-view": ("ddp", "gradients in buckets"), "offload": ("fsdp", "FULL_SHARD")}
    backend, strategy = wanted.get(config.strategy, ("fsdp", config.strategy))
    plans = make_plans(profile, hardware, request, backend=backend).plans
    [plan] = [p for p in plans if p.strategy == strategy and p.sync_each_batch == config.sync_each_batch]
    return plan
