"""Memory: what a model needs and how it may be divided; a batch size that fits; computing activations again; freeing what isn't needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._lazy import lazy_exports

if TYPE_CHECKING:
    from drivetrain.memory.activations import ActivationCheckpointing, checkpoint_activations
    from drivetrain.memory.batch_size import find_executable_batch_size, should_reduce_batch_size
    from drivetrain.memory.blocks import repeated_blocks
    from drivetrain.memory.counts import profile_of_config, profile_of_counts
    from drivetrain.memory.hardware import Hardware, known_accelerators, known_hardware, match_accelerator, parse_bytes
    from drivetrain.memory.layout import Layout, predict
    from drivetrain.memory.loss import default_loss
    from drivetrain.memory.machine import measure_machine, present_hardware
    from drivetrain.memory.options import PlanningOptions
    from drivetrain.memory.planning import PlanReport, make_plans, micro_batch_sizes
    from drivetrain.memory.preparing import plan_of_request
    from drivetrain.memory.profile import ModelProfile, Moment, OptimizerProfile, ParameterProfile, Stretch, Timeline
    from drivetrain.memory.profiler import profile_model
    from drivetrain.memory.release import clear_device_cache, release_memory
    from drivetrain.memory.timing import Traffic, step_seconds

_HOMES = {
    "activations": ["ActivationCheckpointing", "checkpoint_activations"],
    "batch_size": ["find_executable_batch_size", "should_reduce_batch_size"],
    "blocks": ["repeated_blocks"],
    "counts": ["profile_of_config", "profile_of_counts"],
    "hardware": ["Hardware", "known_accelerators", "known_hardware", "match_accelerator", "parse_bytes"],
    "layout": ["Layout", "predict"],
    "loss": ["default_loss"],
    "machine": ["measure_machine", "present_hardware"],
    "options": ["PlanningOptions"],
    "planning": ["PlanReport", "make_plans", "micro_batch_sizes"],
    "preparing": ["plan_of_request"],
    "profile": ["ModelProfile", "Moment", "OptimizerProfile", "ParameterProfile", "Stretch", "Timeline"],
    "profiler": ["profile_model"],
    "release": ["clear_device_cache", "release_memory"],
    "timing": ["Traffic", "step_seconds"],
}

__all__ = [
    "ActivationCheckpointing",
    "Hardware",
    "Layout",
    "ModelProfile",
    "Moment",
    "OptimizerProfile",
    "ParameterProfile",
    "PlanReport",
    "PlanningOptions",
    "Stretch",
    "Timeline",
    "Traffic",
    "checkpoint_activations",
    "clear_device_cache",
    "default_loss",
    "find_executable_batch_size",
    "known_accelerators",
    "known_hardware",
    "make_plans",
    "match_accelerator",
    "measure_machine",
    "micro_batch_sizes",
    "parse_bytes",
    "plan_of_request",
    "predict",
    "present_hardware",
    "profile_model",
    "profile_of_config",
    "profile_of_counts",
    "release_memory",
    "repeated_blocks",
    "should_reduce_batch_size",
    "step_seconds",
]

__getattr__, __dir__ = lazy_exports(__name__, _HOMES)
