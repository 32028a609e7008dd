"""A backend, a device and a tracker that Drivetrain knows nothing of."""
