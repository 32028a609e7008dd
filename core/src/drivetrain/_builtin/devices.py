"""Devices that core knows: a table. Whatever else torch reports as its accelerator is found by the probe."""

from __future__ import annotations

from drivetrain.specs import DeviceSpec

__all__ = ["DEVICES"]

#: Name, summary, communication backend, module to import first, variable that limits what a process sees; best first.
_ACCELERATORS = (
    ("cuda", "NVIDIA GPUs, and AMD GPUs through ROCm", "nccl", None, "CUDA_VISIBLE_DEVICES"),
    ("xpu", "Intel GPUs", "xccl", None, "ZE_AFFINITY_MASK"),
    ("hpu", "Intel Gaudi", "hccl", "habana_frameworks.torch", "HABANA_VISIBLE_MODULES"),
    ("npu", "Huawei Ascend", "hccl", "torch_npu", "ASCEND_RT_VISIBLE_DEVICES"),
    ("mlu", "Cambricon MLU", "cncl", "torch_mlu", "MLU_VISIBLE_DEVICES"),
    ("musa", "Moore Threads GPUs", "mccl", "torch_musa", "MUSA_VISIBLE_DEVICES"),
    ("sdaa", "Tecorigin SDAA", "tccl", "torch_sdaa", "SDAA_VISIBLE_DEVICES"),
    ("mps", "Apple GPUs, one process", "", None, None),
)

#: The CPU and the accelerators. Priorities differ, so that two of them on one machine are no tie; a plugin's default is the first's.
DEVICES = (
    *(
        DeviceSpec(
            name=name,
            summary=summary,
            torch_type=name,
            communication_backend=communication,
            module=module,
            visible_devices=variable,
            priority=100 - 2 * place,
        )
        for place, (name, summary, communication, module, variable) in enumerate(_ACCELERATORS)
    ),
    DeviceSpec(name="cpu", summary="the CPU", torch_type="cpu", communication_backend="gloo", priority=0),
)
