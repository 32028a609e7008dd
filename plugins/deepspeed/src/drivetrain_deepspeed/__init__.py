"""Drivetrain backend for DeepSpeed."""
