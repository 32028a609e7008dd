"""Neptune (offline) as a tracker of Drivetrain."""
