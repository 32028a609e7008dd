"""Accelerate's place for the mesh that processes form."""

from drivetrain.parallel.config import ParallelismConfig

__all__ = ["ParallelismConfig"]
