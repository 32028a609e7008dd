"""The class of prepared schedulers under Accelerate's name, for ``isinstance``."""

from drivetrain._engine.scheduler import PreparedScheduler as AcceleratedScheduler

__all__ = ["AcceleratedScheduler"]
