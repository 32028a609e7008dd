"""Where a project keeps its checkpoints."""

from __future__ import annotations

import torch.distributed as dist

from drivetrain import Accelerator, ProjectConfiguration

from . import effect
from .scene import alone, files, meeting_at, quiet, training, variables


def saved(folder, times=1, **options):
    """Names of checkpoints after so many saves."""
    options = {"project_dir": folder, "automatic_checkpoint_naming": True, **options}
    with training(project_config=ProjectConfiguration(**options)) as (accelerator, *_):
        for _ in range(times):
            accelerator.save_state()
    return sorted({str(p.parent.relative_to(folder)) for p in folder.rglob("manifest.json")})


@effect(
    "ProjectConfiguration.project_dir", ("a", ["a/checkpoints/checkpoint_0"]), ("b", ["b/checkpoints/checkpoint_0"])
)
def project_dir(value, folder):
    return saved(folder, project_dir=folder / value)


@effect("ProjectConfiguration.logging_dir", ("a", {"a"}), ("b", {"b"}))
def logging_dir(value, folder):
    project = ProjectConfiguration(project_dir=folder, logging_dir=folder / value)
    with training(log_with="jsonl", project_config=project) as (accelerator, *_):
        accelerator.init_trackers("probe")
    return {f.split("/")[0] for f in files(folder)}


@effect(
    "ProjectConfiguration.automatic_checkpoint_naming",
    (True, ["checkpoints/checkpoint_0"]),
    (False, "CheckpointError"),
)
def automatic_checkpoint_naming(value, folder):
    return saved(folder, automatic_checkpoint_naming=value)


@effect(
    "ProjectConfiguration.total_limit",
    (1, ["checkpoints/checkpoint_2"]),
    (2, ["checkpoints/checkpoint_1", "checkpoints/checkpoint_2"]),
)
def total_limit(value, folder):
    return saved(folder, times=3, total_limit=value)


@effect("ProjectConfiguration.iteration", (0, ["checkpoints/checkpoint_0"]), (5, ["checkpoints/checkpoint_5"]))
def iteration(value, folder):
    return saved(folder, iteration=value)


@effect("ProjectConfiguration.save_on_each_node", (True, [True, True]), (False, [True, False]), ranks=2)
def save_on_each_node(value, folder):
    """Two machines of one process each, with a directory of their own."""
    rank = str(dist.get_rank())
    with alone(folder), variables(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=rank), quiet():
        own = folder / f"machine{rank}" if value else folder / "shared"
        project = ProjectConfiguration(save_on_each_node=value)
        accelerator = Accelerator(cpu=True, project_config=project, kwargs_handlers=[meeting_at(folder)])
        accelerator.save_state(own)
        accelerator.end_training()
        return f"rank_0000{rank}.json" in files(own) and (value or rank == "0")
