"""ddp keeps what the Backend interface promises."""

from drivetrain.testing.backend import BackendConformance


class TestDDP(BackendConformance):
    backend = "ddp"
    world_sizes = (1, 2, 3)
    precisions = ("fp32", "bf16", "fp16")
