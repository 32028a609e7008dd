"""Fixtures for all tests of the repository."""

pytest_plugins = ["drivetrain.testing.pytest_plugin"]
