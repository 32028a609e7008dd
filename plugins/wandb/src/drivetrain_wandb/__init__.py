"""Weights & Biases as a tracker of Drivetrain."""
