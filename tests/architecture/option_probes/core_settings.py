"""Core's settings, each given as a keyword of the Accelerator."""

from __future__ import annotations

import torch
import torch.distributed as dist

from drivetrain import Accelerator
from drivetrain.errors import DistributedOperationError

from . import effect
from .scene import alone, files, meeting_at, quiet, step, third_party, training


@effect("CoreSettings.backend", ("single", "SingleBackend"), ("ddp", "DDPBackend"))
def backend(value, folder):
    with training(backend=value) as (accelerator, *_):
        return type(accelerator.backend).__name__


@effect("CoreSettings.device", ("cpu", "cpu"), ("chip", "meta"))
def device(value, folder):
    with third_party(folder):
        return Accelerator(device=value).prepare(torch.nn.Linear(1, 1)).weight.device.type


@effect("CoreSettings.cpu", (True, "cpu"), (False, "meta"))
def cpu(value, folder):
    with third_party(folder):
        return Accelerator(cpu=value).prepare(torch.nn.Linear(1, 1)).weight.device.type


@effect("CoreSettings.device_placement", (True, "meta"), (False, "cpu"))
def device_placement(value, folder):
    with third_party(folder):
        accelerator = Accelerator(device_placement=value)
        model, loader = accelerator.prepare(torch.nn.Linear(1, 1), torch.utils.data.DataLoader([1.0]))
        placed = {model.weight.device.type, next(iter(loader)).device.type}
        (kind,) = placed
        return kind


@effect("CoreSettings.checkpoint_format", ("safetensors", ".safetensors"), ("other", ".other"))
def checkpoint_format(value, folder):
    with third_party(folder):
        accelerator = Accelerator(cpu=True, checkpoint_format=value)
        accelerator.prepare(torch.nn.Linear(1, 1))
        accelerator.save_state(folder / "saved")
        accelerator.end_training()
    (name,) = [f for f in files(folder / "saved") if "model" in f]
    return name.removeprefix("model")


@effect("CoreSettings.resume", ("auto", 1), (None, 0))
def resume(value, folder):
    with training(project_dir=folder) as (accelerator, model, optimizer):
        step(accelerator, model, optimizer)
        accelerator.checkpoint()
        accelerator.wait_for_checkpoint()
    with training(project_dir=folder, resume=value) as (accelerator, *_):
        next(accelerator.epochs(1))
        return accelerator.step


@effect("CoreSettings.mixed_precision", ("no", "torch.float32"), ("bf16", "torch.bfloat16"))
def mixed_precision(value, folder):
    with training(mixed_precision=value) as (_, model, _):
        model(torch.ones(2, 4))
        return model.notes["dtype"]


@effect("CoreSettings.gradient_accumulation_steps", (1, 4), (2, 2))
def gradient_accumulation_steps(value, folder):
    with training(gradient_accumulation_steps=value) as (accelerator, model, optimizer):
        for _ in range(4):
            step(accelerator, model, optimizer)
        return accelerator.step


@effect("CoreSettings.log_with", ("jsonl", "metrics.jsonl"), ("tensorboard", "events"))
def log_with(value, folder):
    with training(log_with=value, project_dir=folder) as (accelerator, *_):
        accelerator.init_trackers("probe")
        accelerator.log({"loss": 1.0})
    names = " ".join(files(folder))
    return next(kind for kind in ("metrics.jsonl", "events") if kind in names)


@effect("CoreSettings.project_dir", ("a", {"a"}), ("b", {"b"}))
def project_dir(value, folder):
    with training(log_with="jsonl", project_dir=folder / value) as (accelerator, *_):
        accelerator.init_trackers("probe")
        accelerator.save_state(f"{accelerator.project_dir}/saved")
    return {f.split("/")[0] for f in files(folder)}


@effect("CoreSettings.logging_dir", ("a", {"a"}), ("b", {"b"}))
def logging_dir(value, folder):
    with training(log_with="jsonl", project_dir=folder, logging_dir=folder / value) as (accelerator, *_):
        accelerator.init_trackers("probe")
    return {f.split("/")[0] for f in files(folder)}


@effect("CoreSettings.dynamo_backend", ("no", False), ("eager", True))
def dynamo_backend(value, folder):
    with training(dynamo_backend=value) as (_, model, _):
        return model._compiled_call_impl is not None


@effect("CoreSettings.step_scheduler_with_optimizer", (True, 2), (False, 4))
def step_scheduler_with_optimizer(value, folder):
    with training(gradient_accumulation_steps=2, step_scheduler_with_optimizer=value) as (
        accelerator,
        model,
        optimizer,
    ):
        scheduler = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda n: 1.0))
        for _ in range(4):
            step(accelerator, model, optimizer, scheduler=scheduler)
        return scheduler.scheduler.last_epoch


@effect("CoreSettings.rng_types", (["torch"], [True] * 2), (["generator"], [False] * 2), ranks=2)
def rng_types(value, folder):
    accelerator = Accelerator(cpu=True, rng_types=value)
    loader = accelerator.prepare(torch.utils.data.DataLoader(range(4)))
    torch.manual_seed(dist.get_rank())
    for _ in loader:
        pass
    mine = accelerator.gather(torch.rand(1))
    return bool(mine[0] == mine[1])


@effect(
    "CoreSettings.debug", (True, [("refused", "compared")] * 2), (False, [("gathered", "not compared")] * 2), ranks=2
)
def debug(value, folder):
    """Ranks gather different numbers of rows, and send different collectives: torch says so, instead of mixing up bytes."""
    with alone(folder), quiet():
        accelerator = Accelerator(cpu=True, debug=value, kwargs_handlers=[meeting_at(folder)])
        rows = torch.ones(2 + accelerator.process_index)
        try:
            gathered = "gathered" if len(accelerator.gather(rows)) == 5 else "mixed up"
        except DistributedOperationError:
            gathered = "refused"
        try:
            if value:
                dist.all_reduce(rows)
            compared = "not compared" if dist.get_debug_level() == dist.DebugLevel.OFF else "compared too late"
        except RuntimeError as error:
            compared = "compared" if "mismatch" in str(error) else str(error)
        accelerator.end_training()
        return gathered, compared


@effect("CoreSettings.config_file", ("a.toml", "bf16"), ("b.toml", "fp16"))
def config_file(value, folder):
    (folder / "a.toml").write_text('mixed_precision = "bf16"')
    (folder / "b.toml").write_text('mixed_precision = "fp16"')
    with training(config_file=folder / value) as (accelerator, *_):
        return accelerator.mixed_precision
