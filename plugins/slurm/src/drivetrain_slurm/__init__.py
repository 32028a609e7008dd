"""SLURM for Drivetrain: detection inside of jobs, and ``drivetrain launch --on slurm``."""
