"""The pluggy markers, in a module of their own so that the spec modules can import them."""

from __future__ import annotations

import pluggy

PROJECT = "drivetrain"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
