"""Kubernetes for Drivetrain: detection inside of pods, and ``drivetrain launch --on kubernetes``."""
