"""Imports the backend, and with it DeepSpeed, which sets variables when it is imported: the environment stays what it was."""

from __future__ import annotations

import os

_before = dict(os.environ)

from drivetrain_deepspeed.backend import DeepSpeedBackend  # noqa: E402

for _name in set(os.environ) - set(_before):
    del os.environ[_name]
os.environ.update(_before)

__all__ = ["DeepSpeedBackend"]
