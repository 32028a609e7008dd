"""Comet as a tracker of Drivetrain."""
