"""TensorBoard as a tracker of Drivetrain."""
