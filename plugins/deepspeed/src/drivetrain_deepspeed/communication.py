"""How DeepSpeed finds the device and the processes: those that are there, and none of its own."""

from __future__ import annotations

import os
import warnings
from typing import Any

import deepspeed
import torch
from deepspeed import comm
from deepspeed.accelerator import get_accelerator, set_accelerator
from deepspeed.runtime import torch_autocast
from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import groups
from torch.nn import functional

from drivetrain.errors import EnvironmentDetectionError
from drivetrain.specs import ProcessInfo

__all__ = ["LocalRank", "choose_accelerator", "forget_modules", "join", "leave"]

#: Is compiled whenever communication is set up (minutes), and used by inference alone.
_UNUSED_OP = "deepspeed_shm_comm"


def choose_accelerator(device: torch.device) -> None:
    """Make DeepSpeed compute where the Accelerator does.

    Raises:
        EnvironmentDetectionError: If DeepSpeed has found another device.

    Example:
        >>> choose_accelerator(torch.device("cpu"))
        >>> get_accelerator().device_name()
        'cpu'
    """
    found = get_accelerator().device_name()
    if found.partition(":")[0] == device.type:
        return
    if device.type == "cpu":
        from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

        set_accelerator(CPU_Accelerator())
        return
    raise EnvironmentDetectionError(
        f"The Accelerator computes on {device.type!r}, and DeepSpeed {deepspeed.__version__} has found {found!r}. Start the script with "
        f"DS_ACCELERATOR={device.type} if DeepSpeed supports that device, or choose another backend."
    )


def join() -> None:
    """Let DeepSpeed use torch's process group, which is there already: with its backend, its timeout, and nothing compiled."""
    compatible: dict[str, Any] = deepspeed.ops.__compatible_ops__
    before = compatible.get(_UNUSED_OP)
    compatible[_UNUSED_OP] = False
    try:
        comm.init_distributed(dist_backend=torch.distributed.get_backend(), auto_mpi_discovery=False, verbose=False)
    finally:
        if before is None:
            del compatible[_UNUSED_OP]
        else:
            compatible[_UNUSED_OP] = before
    # DeepSpeed calls torch's older names of collectives, which torch tells at each call.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(deepspeed|torch\.distributed)\.")


def leave() -> None:
    """Forget the process group, which is about to be destroyed, and that an engine computed under autocast."""
    torch_autocast.TORCH_AUTOCAST_INITIALIZED, torch_autocast.TORCH_AUTOCAST_DTYPE = False, None
    for group in _groups_of_deepspeed():
        torch.distributed.destroy_process_group(group)
    groups._release_process_group_references()
    comm.comm.cdb = None


def forget_modules() -> None:
    """Empty what DeepSpeed keeps of models after their engines are destroyed: with them engines, weights and process groups would stay.

    Stage 3 has a list of modules that are in their forward, at whose bottom each engine's model stays, and a cache of what is released when. It also puts a
    function of its own into the place of torch's ``linear``, for all models of the process: these would go on with it, and give gradients in another order.
    """
    replaced = getattr(InsertPostInitMethodToModuleSubClasses, "linear_bk", None)
    if replaced is not None and functional.linear is zero3_linear_wrap:
        functional.linear = replaced
    parameter_offload.FWD_MODULE_STACK.clear()
    for function in vars(PartitionedParameterCoordinator).values():
        for cell in getattr(function, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()


def _groups_of_deepspeed() -> list[torch.distributed.ProcessGroup]:
    """Those that DeepSpeed made for itself: each has threads and connections, which a process group that lives on would keep."""
    held = [groups._WORLD_GROUP, groups._ZERO_PARAM_INTRA_PARALLEL_GROUP, *groups._ALL_TO_ALL_GROUP.values()]
    held += [*groups._EXPERT_PARALLEL_GROUP.values(), *groups._EXPERT_DATA_PARALLEL_GROUP.values()]
    others = (None, torch.distributed.group.WORLD, torch.distributed.GroupMember.NON_GROUP_MEMBER)
    return list({id(g): g for g in held if g not in others}.values())


class LocalRank:
    """The variable that DeepSpeed takes a process's device from, whenever it wants to; set while there are engines, where no launcher did.

    Args:
        process: Who this process is.
        device: Where it computes.
    """

    def __init__(self, process: ProcessInfo, device: torch.device) -> None:
        self._wanted = str(process.local_rank if device.index is None else device.index)
        self._is_set = False
        self._device = device

    def put(self) -> None:
        """Set it, if it isn't.

        Raises:
            EnvironmentDetectionError: If it says another device.
        """
        found = os.environ.get("LOCAL_RANK")
        if found is None:
            os.environ["LOCAL_RANK"] = self._wanted
            self._is_set = True
        elif found != self._wanted and self._device.index is not None:
            raise EnvironmentDetectionError(
                f"DeepSpeed computes on the device that LOCAL_RANK says, and LOCAL_RANK={found}, while this process has {self._device}. Let each "
                "process see all devices of the machine, or set LOCAL_RANK to the number of its own."
            )

    def remove(self) -> None:
        """Leave the environment as it was."""
        if self._is_set:
            os.environ.pop("LOCAL_RANK", None)
            self._is_set = False
