"""Options of precision, accumulation, compilation, profiling and of the process group."""

from __future__ import annotations

import datetime
import json

import torch
import torch.distributed as dist

from drivetrain import (
    Accelerator,
    AutocastKwargs,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    ProfileKwargs,
    TorchDynamoPlugin,
)

from . import effect
from .scene import alone, files, quiet, step, training

# -- precision -------------------------------------------------------------------------------------------------------------


def autocast(folder, **options):
    with training(mixed_precision="bf16", kwargs_handlers=[AutocastKwargs(**options)]) as (_, model, _):
        model(torch.ones(2, 4))
        return model.notes


@effect("AutocastKwargs.enabled", (True, "torch.bfloat16"), (False, "torch.float32"))
def enabled(value, folder):
    return autocast(folder, enabled=value)["dtype"]


@effect("AutocastKwargs.cache_enabled", (True, True), (False, False))
def cache_enabled(value, folder):
    return autocast(folder, cache_enabled=value)["cache"]


def scales(*overflows, **options):
    """The loss scale after micro-batches that overflow or don't."""
    with training(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(**options)]) as (a, model, optimizer):
        for overflow in overflows:
            step(a, model, optimizer, loss=lambda y, big=overflow: y.mean() * (float("inf") if big else 1.0))
        a.backend.end_window()
        return None if a.scaler is None else a.scaler.get_scale()


@effect("GradScalerKwargs.init_scale", (64.0, 64.0), (128.0, 128.0))
def init_scale(value, folder):
    return scales(False, init_scale=value)


@effect("GradScalerKwargs.growth_factor", (2.0, 128.0), (4.0, 256.0))
def growth_factor(value, folder):
    return scales(False, init_scale=64.0, growth_interval=1, growth_factor=value)


@effect("GradScalerKwargs.backoff_factor", (0.5, 32.0), (0.25, 16.0))
def backoff_factor(value, folder):
    return scales(True, init_scale=64.0, backoff_factor=value)


@effect("GradScalerKwargs.growth_interval", (1, 256.0), (2, 128.0))
def growth_interval(value, folder):
    return scales(False, False, init_scale=64.0, growth_interval=value)


@effect("GradScalerKwargs.enabled", (True, 64.0), (False, None))
def scaler_enabled(value, folder):
    return scales(False, init_scale=64.0, enabled=value)


# -- accumulation ----------------------------------------------------------------------------------------------------------


def accumulate(batches, epochs=1, **options):
    """Optimizer steps and scheduler steps over so many batches."""
    with training(gradient_accumulation_plugin=GradientAccumulationPlugin(**options)) as (a, model, optimizer):
        loader = a.prepare(torch.utils.data.DataLoader(range(batches)))
        scheduler = a.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda n: 1.0))
        for _ in range(epochs):
            for _ in loader:
                step(a, model, optimizer, scheduler=scheduler)
        return a.step, scheduler.scheduler.last_epoch


@effect("GradientAccumulationPlugin.num_steps", (2, 2), (4, 1))
def num_steps(value, folder):
    return accumulate(4, num_steps=value)[0]


@effect("GradientAccumulationPlugin.adjust_scheduler", (True, 2), (False, 4))
def adjust_scheduler(value, folder):
    return accumulate(4, num_steps=2, adjust_scheduler=value)[1]


@effect("GradientAccumulationPlugin.sync_with_dataloader", (True, 4), (False, 3))
def sync_with_dataloader(value, folder):
    return accumulate(3, epochs=2, num_steps=2, sync_with_dataloader=value)[0]


@effect("GradientAccumulationPlugin.sync_each_batch", (True, [True] * 2), (False, [False] * 2), ranks=2)
def sync_each_batch(value, folder):
    """Whether ranks have the same gradient inside a window."""
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=value)
    with training(gradient_accumulation_plugin=plugin) as (a, model, optimizer):
        step(a, model, optimizer, loss=lambda y: y.mean() * (1 + a.process_index))
        mine = a.gather(a.unwrap_model(model).used.weight.grad[:1])
        return bool(torch.equal(mine[0], mine[1]))


# -- the process group -----------------------------------------------------------------------------------------------------


def process_group(**options):
    with training(backend="ddp", kwargs_handlers=[InitProcessGroupKwargs(**options)]):
        group = dist.group.WORLD
        return dist.get_backend(), group._get_backend(torch.device("cpu")).options._timeout


@effect("InitProcessGroupKwargs.backend", ("gloo", "gloo"), ("nosuch", "ConfigurationError"))
def group_backend(value, folder):
    return process_group(backend=value)[0]


@effect("InitProcessGroupKwargs.timeout", (60, datetime.timedelta(seconds=60)), (90, datetime.timedelta(seconds=90)))
def timeout(value, folder):
    return process_group(timeout=value)[1]


@effect("InitProcessGroupKwargs.init_method", ("here", [["here"]] * 2), ("there", [["there"]] * 2), ranks=2)
def init_method(value, folder):
    with alone(folder), quiet():
        meeting = InitProcessGroupKwargs(init_method=f"file://{folder}/{value}")
        accelerator = Accelerator(cpu=True, kwargs_handlers=[meeting])
        accelerator.wait_for_everyone()
        seen = [f for f in files(folder) if f in ("here", "there")]
        accelerator.wait_for_everyone()
        accelerator.end_training()
        return seen


# -- compilation -----------------------------------------------------------------------------------------------------------

COMPILED = []


def collecting(graph, inputs, **options):
    """A compiler backend that notes what it is given."""
    COMPILED.append((options, any(isinstance(i, torch.SymInt) for i in inputs)))
    return graph.forward


def compiled(model=None, sizes=(2,), **options):
    """What a compiler backend of our own is given."""
    torch._dynamo.reset()
    if "collecting" not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(collecting)
    COMPILED.clear()
    accelerator = Accelerator(cpu=True, dynamo_plugin=TorchDynamoPlugin(**{"backend": "collecting", **options}))
    model = accelerator.prepare(torch.nn.Linear(4, 4) if model is None else model)
    with torch.no_grad():
        for size in sizes:
            model(torch.ones(size, 4))
    return list(COMPILED)


class Breaks(torch.nn.Module):
    def forward(self, x):
        torch._dynamo.graph_break()
        return x + 1


@effect("TorchDynamoPlugin.backend", ("collecting", 1), ("eager", 0))
def dynamo_backend(value, folder):
    return len(compiled(backend=value))


@effect("TorchDynamoPlugin.mode", (None, None), ("max-autotune", "max-autotune"))
def mode(value, folder):
    ((options, _),) = compiled(mode=value)
    return options.get("mode")


@effect("TorchDynamoPlugin.fullgraph", (True, "refused"), (False, "broken"))
def fullgraph(value, folder):
    try:
        compiled(Breaks(), fullgraph=value)
    except torch._dynamo.exc.Unsupported:
        return "refused"
    return "broken"


@effect("TorchDynamoPlugin.dynamic", (True, 1), (False, 3))
def dynamic(value, folder):
    return len(compiled(sizes=(2, 3, 5), dynamic=value))


@effect("TorchDynamoPlugin.options", ({"a": 1}, {"a": 1}), ({"a": 2}, {"a": 2}))
def dynamo_options(value, folder):
    ((options, _),) = compiled(options=value)
    return options["options"]


@effect("TorchDynamoPlugin.disable", (False, 1), (True, 0))
def disable(value, folder):
    return len(compiled(disable=value))


@effect("TorchDynamoPlugin.use_regional_compilation", (False, [True, 0]), (True, [False, 2]))
def use_regional_compilation(value, folder):
    blocks = [torch.nn.Sequential(torch.nn.Linear(4, 4)) for _ in range(2)]
    model = torch.nn.Sequential(*blocks)
    compiled(model, use_regional_compilation=value)
    return [model._compiled_call_impl is not None, sum(b._compiled_call_impl is not None for b in blocks)]


# -- profiling -------------------------------------------------------------------------------------------------------------


def profiled(work=None, **options):
    """The events of one matrix product."""
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(**{"activities": ["cpu"], **options})])
    with quiet(), accelerator.profile() as profiler:
        (work or (lambda: torch.ones(8, 8) @ torch.ones(8, 8)))()
        profiler.step()
    return profiler


def product(profiler):
    return next(e for e in profiler.events() if e.name == "aten::mm")


@effect("ProfileKwargs.activities", (["cpu"], True), (["mtia"], "ConfigurationError"))
def activities(value, folder):
    return any(e.name == "aten::mm" for e in profiled(activities=value).events() or [])


@effect("ProfileKwargs.schedule_option", ({"active": 1, "repeat": 1}, True), ({"skip_first": 1, "active": 1}, False))
def schedule_option(value, folder):
    recorded = []
    profiled(schedule_option=value, on_trace_ready=lambda p: recorded.extend(e.name for e in p.events()))
    return "aten::mm" in recorded


@effect("ProfileKwargs.on_trace_ready", (None, 0), ("append", 1))
def on_trace_ready(value, folder):
    traced = []
    profiled(on_trace_ready=traced.append if value else None)
    return len(traced)


@effect("ProfileKwargs.record_shapes", (True, [[8, 8], [8, 8]]), (False, []))
def record_shapes(value, folder):
    return product(profiled(record_shapes=value)).input_shapes


@effect("ProfileKwargs.profile_memory", (True, True), (False, False))
def profile_memory(value, folder):
    return any(e.cpu_memory_usage for e in profiled(profile_memory=value).key_averages())


@effect("ProfileKwargs.with_stack", (True, True), (False, False))
def with_stack(value, folder):
    profiled(with_stack=value).export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return any(e.get("cat") == "python_function" for e in events)


@effect("ProfileKwargs.with_flops", (True, 2 * 8**3), (False, 0))
def with_flops(value, folder):
    return sum(e.flops or 0 for e in profiled(with_flops=value).key_averages())


@effect("ProfileKwargs.with_modules", (True, True), (False, False))
def with_modules(value, folder):
    with quiet():
        model = torch.jit.script(torch.nn.Linear(8, 8))
    profiled(lambda: model(torch.ones(2, 8)), with_modules=value).export_chrome_trace(str(folder / "trace.json"))
    return "Module Hierarchy" in (folder / "trace.json").read_text()


@effect("ProfileKwargs.output_trace_dir", ("a", ["a/profile_0.json"]), ("b", ["b/profile_0.json"]))
def output_trace_dir(value, folder):
    profiled(output_trace_dir=str(folder / value))
    return files(folder)
