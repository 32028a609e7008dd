"""MLflow as a tracker of Drivetrain."""
