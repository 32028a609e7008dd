"""The class of prepared optimizers under Accelerate's name, for ``isinstance``."""

from drivetrain._engine.optimizer import PreparedOptimizer as AcceleratedOptimizer

__all__ = ["AcceleratedOptimizer"]
