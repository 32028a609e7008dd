"""Launching from Python, where Accelerate has it."""

from drivetrain.launch import debug_launcher, notebook_launcher

__all__ = ["debug_launcher", "notebook_launcher"]
