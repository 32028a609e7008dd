"""Process group, process control, and collectives on nested structures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain._lazy import lazy_exports

if TYPE_CHECKING:
    from drivetrain.parallel.collectives import broadcast, gather, reduce
    from drivetrain.parallel.distributed_type import DistributedType
    from drivetrain.parallel.object_collectives import all_gather_object, broadcast_object_list, gather_object
    from drivetrain.parallel.process import ProcessControl, Trigger
    from drivetrain.parallel.process_group import (
        ControlGroup,
        ProcessGroupHandle,
        barrier,
        find_free_port,
        init_process_group,
    )
    from drivetrain.parallel.process_state import PartialState
    from drivetrain.parallel.shape_collectives import (
        copy_tensor_to_devices,
        gather_tensor_shape,
        pad_across_processes,
    )
    from drivetrain.parallel.splitting import split_between_processes, split_bounds
    from drivetrain.parallel.structure import (
        TensorInformation,
        concatenate,
        convert_outputs_to_fp32,
        convert_to_fp32,
        find_batch_size,
        find_device,
        get_data_structure,
        get_shape,
        honor_type,
        ignorant_find_batch_size,
        initialize_tensors,
        is_namedtuple,
        is_tensor_information,
        is_torch_tensor,
        iterate_tensors,
        listify,
        map_tensors,
        pad_input_tensors,
        recursively_apply,
        send_to_device,
        slice_tensors,
    )

_HOMES = {
    "collectives": ["broadcast", "gather", "reduce"],
    "distributed_type": ["DistributedType"],
    "object_collectives": ["all_gather_object", "broadcast_object_list", "gather_object"],
    "process": ["ProcessControl", "Trigger"],
    "process_group": ["ControlGroup", "ProcessGroupHandle", "barrier", "find_free_port", "init_process_group"],
    "process_state": ["PartialState"],
    "shape_collectives": ["copy_tensor_to_devices", "gather_tensor_shape", "pad_across_processes"],
    "splitting": ["split_between_processes", "split_bounds"],
    "structure": [
        "TensorInformation",
        "concatenate",
        "convert_outputs_to_fp32",
        "convert_to_fp32",
        "find_batch_size",
        "find_device",
        "get_data_structure",
        "get_shape",
        "honor_type",
        "ignorant_find_batch_size",
        "initialize_tensors",
        "is_namedtuple",
        "is_tensor_information",
        "is_torch_tensor",
        "iterate_tensors",
        "listify",
        "map_tensors",
        "pad_input_tensors",
        "recursively_apply",
        "send_to_device",
        "slice_tensors",
    ],
}

__all__ = [
    "ControlGroup",
    "DistributedType",
    "PartialState",
    "ProcessControl",
    "ProcessGroupHandle",
    "TensorInformation",
    "Trigger",
    "all_gather_object",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "convert_outputs_to_fp32",
    "convert_to_fp32",
    "copy_tensor_to_devices",
    "find_batch_size",
    "find_device",
    "find_free_port",
    "gather",
    "gather_object",
    "gather_tensor_shape",
    "get_data_structure",
    "get_shape",
    "honor_type",
    "ignorant_find_batch_size",
    "init_process_group",
    "initialize_tensors",
    "is_namedtuple",
    "is_tensor_information",
    "is_torch_tensor",
    "iterate_tensors",
    "listify",
    "map_tensors",
    "pad_across_processes",
    "pad_input_tensors",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "slice_tensors",
    "split_between_processes",
    "split_bounds",
]

__getattr__, __dir__ = lazy_exports(__name__, _HOMES)
