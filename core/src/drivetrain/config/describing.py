"""What an options class says about its fields: its docstring is the help of flags, questions and tables."""

from __future__ import annotations

import inspect
import re

__all__ = ["described"]


def described(cls: type) -> dict[str, str]:
    """The descriptions of a class's docstring by argument; empty where Python has dropped docstrings (``-OO``).

    Example:
        >>> from drivetrain.config import CoreSettings
        >>> described(CoreSettings)["cpu"]
        'Use the CPU even where an accelerator is present.'
    """
    text = inspect.getdoc(cls) or ""
    block = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", text, re.DOTALL | re.MULTILINE)
    found = re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", block[1] if block else "", re.DOTALL | re.MULTILINE)
    return {name: re.sub(r"``", "`", " ".join(words.split())) for name, words in found}
