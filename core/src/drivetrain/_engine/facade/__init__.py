"""The parts of the Accelerator that only pass on, one file per concern. `drivetrain.accelerator` puts them together."""
