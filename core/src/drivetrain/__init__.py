"""Drivetrain connects a PyTorch training script to whatever drives it. See https://drivetrain.readthedocs.io"""

__version__ = "0.1.0"
