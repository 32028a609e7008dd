"""Every example in a docstring runs."""

from __future__ import annotations

import doctest
import importlib


def test_examples_run(any_module):
    if any_module.endswith("__main__"):
        return
    module = importlib.import_module(any_module)
    for name in getattr(module, "__all__", ()):
        getattr(module, name)  # lazy names come now, and not while the examples are being collected
    for value in list(vars(module).values()):
        hasattr(value, "__wrapped__")  # which collecting asks of submodules that are lazy themselves
    results = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0
