"""Accelerate's utility names, re-exported from where they live.

Also ``is_<name>_available()`` for any package or kind of device, and the options classes that plugins export.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from drivetrain._lazy import lazy_exports

if TYPE_CHECKING:
    from drivetrain.checkpoint import load_model_weights, save
    from drivetrain.checkpoint.project import ProjectConfiguration
    from drivetrain.config.handlers import (
        AutocastKwargs,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        InitProcessGroupKwargs,
        ProfileKwargs,
        TorchDynamoPlugin,
    )
    from drivetrain.data.config import DataLoaderConfiguration
    from drivetrain.data.random import set_seed, synchronize_rng_state, synchronize_rng_states
    from drivetrain.memory import (
        clear_device_cache,
        find_executable_batch_size,
        release_memory,
        should_reduce_batch_size,
    )
    from drivetrain.parallel.collectives import broadcast, gather, reduce
    from drivetrain.parallel.object_collectives import broadcast_object_list, gather_object
    from drivetrain.parallel.shape_collectives import copy_tensor_to_devices, gather_tensor_shape, pad_across_processes
    from drivetrain.parallel.structure import (
        TensorInformation,
        concatenate,
        convert_outputs_to_fp32,
        convert_to_fp32,
        find_batch_size,
        find_device,
        get_data_structure,
        honor_type,
        ignorant_find_batch_size,
        initialize_tensors,
        is_namedtuple,
        is_tensor_information,
        is_torch_tensor,
        listify,
        pad_input_tensors,
        recursively_apply,
        send_to_device,
        slice_tensors,
    )
    from drivetrain.state import DistributedType
    from drivetrain.utils.constants import (
        MODEL_NAME,
        SAFE_MODEL_NAME,
        SAFE_WEIGHTS_INDEX_NAME,
        SAFE_WEIGHTS_NAME,
        WEIGHTS_INDEX_NAME,
        WEIGHTS_NAME,
    )
    from drivetrain.utils.environment import (
        clear_environment,
        get_int_from_env,
        parse_choice_from_env,
        parse_flag_from_env,
        patch_environment,
        str_to_bool,
    )
    from drivetrain.utils.modeling import convert_file_size_to_int
    from drivetrain.utils.modules import extract_model_from_parallel, is_compiled_module, is_peft_model
    from drivetrain.utils.names import (
        DistributedOperationException,
        DynamoBackend,
        KwargsHandler,
        LoggerType,
        PrecisionType,
        RNGType,
    )
    from drivetrain.utils.other import is_port_in_use, merge_dicts, wait_for_everyone
    from drivetrain.utils.progress import tqdm
    from drivetrain.utils.versions import compare_versions, is_torch_version

__all__ = [
    "AutocastKwargs",
    "DataLoaderConfiguration",
    "DistributedOperationException",
    "DistributedType",
    "DynamoBackend",
    "GradScalerKwargs",
    "GradientAccumulationPlugin",
    "InitProcessGroupKwargs",
    "KwargsHandler",
    "LoggerType",
    "MODEL_NAME",
    "PrecisionType",
    "ProfileKwargs",
    "ProjectConfiguration",
    "RNGType",
    "SAFE_MODEL_NAME",
    "SAFE_WEIGHTS_INDEX_NAME",
    "SAFE_WEIGHTS_NAME",
    "TensorInformation",
    "TorchDynamoPlugin",
    "WEIGHTS_INDEX_NAME",
    "WEIGHTS_NAME",
    "broadcast",
    "broadcast_object_list",
    "clear_device_cache",
    "clear_environment",
    "compare_versions",
    "concatenate",
    "convert_file_size_to_int",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "extract_model_from_parallel",
    "find_batch_size",
    "find_device",
    "find_executable_batch_size",
    "gather",
    "gather_object",
    "gather_tensor_shape",
    "get_data_structure",
    "get_int_from_env",
    "honor_type",
    "ignorant_find_batch_size",
    "initialize_tensors",
    "is_compiled_module",
    "is_namedtuple",
    "is_peft_model",
    "is_port_in_use",
    "is_tensor_information",
    "is_torch_tensor",
    "is_torch_version",
    "listify",
    "load_model_weights",
    "merge_dicts",
    "pad_across_processes",
    "pad_input_tensors",
    "parse_choice_from_env",
    "parse_flag_from_env",
    "patch_environment",
    "recursively_apply",
    "reduce",
    "release_memory",
    "save",
    "send_to_device",
    "set_seed",
    "should_reduce_batch_size",
    "slice_tensors",
    "str_to_bool",
    "synchronize_rng_state",
    "synchronize_rng_states",
    "tqdm",
    "wait_for_everyone",
]


def _fallback(name: str) -> Any:
    if name.startswith("is_") and name.endswith("_available"):
        from drivetrain.utils.imports import availability

        return availability(name)
    from drivetrain._plugins import get_registry

    try:
        return get_registry().export(name)
    except AttributeError as error:
        from drivetrain._foreign import missing

        missing(__name__, name, error)


__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "drivetrain.checkpoint": ["load_model_weights", "save"],
        "drivetrain.checkpoint.project": ["ProjectConfiguration"],
        "drivetrain.config.handlers": [
            "AutocastKwargs",
            "GradScalerKwargs",
            "GradientAccumulationPlugin",
            "InitProcessGroupKwargs",
            "ProfileKwargs",
            "TorchDynamoPlugin",
        ],
        "drivetrain.data.config": ["DataLoaderConfiguration"],
        "drivetrain.data.random": ["set_seed", "synchronize_rng_state", "synchronize_rng_states"],
        "drivetrain.memory": [
            "clear_device_cache",
            "find_executable_batch_size",
            "release_memory",
            "should_reduce_batch_size",
        ],
        "drivetrain.parallel.collectives": ["broadcast", "gather", "reduce"],
        "drivetrain.parallel.object_collectives": ["broadcast_object_list", "gather_object"],
        "drivetrain.parallel.shape_collectives": [
            "copy_tensor_to_devices",
            "gather_tensor_shape",
            "pad_across_processes",
        ],
        "drivetrain.parallel.structure": [
            "TensorInformation",
            "concatenate",
            "convert_outputs_to_fp32",
            "convert_to_fp32",
            "find_batch_size",
            "find_device",
            "get_data_structure",
            "honor_type",
            "ignorant_find_batch_size",
            "initialize_tensors",
            "is_namedtuple",
            "is_tensor_information",
            "is_torch_tensor",
            "listify",
            "pad_input_tensors",
            "recursively_apply",
            "send_to_device",
            "slice_tensors",
        ],
        "drivetrain.state": ["DistributedType"],
        "drivetrain.utils.environment": [
            "clear_environment",
            "get_int_from_env",
            "parse_choice_from_env",
            "parse_flag_from_env",
            "patch_environment",
            "str_to_bool",
        ],
        "drivetrain.utils.modules": ["extract_model_from_parallel", "is_compiled_module", "is_peft_model"],
        "drivetrain.utils.constants": [
            "MODEL_NAME",
            "SAFE_MODEL_NAME",
            "SAFE_WEIGHTS_INDEX_NAME",
            "SAFE_WEIGHTS_NAME",
            "WEIGHTS_INDEX_NAME",
            "WEIGHTS_NAME",
        ],
        "drivetrain.utils.modeling": ["convert_file_size_to_int"],
        "drivetrain.utils.names": [
            "DistributedOperationException",
            "DynamoBackend",
            "KwargsHandler",
            "LoggerType",
            "PrecisionType",
            "RNGType",
        ],
        "drivetrain.utils.other": ["is_port_in_use", "merge_dicts", "wait_for_everyone"],
        "drivetrain.utils.progress": ["tqdm"],
        "drivetrain.utils.versions": ["compare_versions", "is_torch_version"],
    },
    fallback=_fallback,
)
