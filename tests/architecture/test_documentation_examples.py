"""Every example in a docstring runs."""

from __future__ import annotations

import doctest
import importlib


def test_examples_run(any_module):
    if any_module.endswith("__main__"):
        return
    results = doctest.testmod(
        importlib.import_module(any_module), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert results.failed == 0
