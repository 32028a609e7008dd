"""Process group, process control, and collectives on nested structures."""

from __future__ import annotations
