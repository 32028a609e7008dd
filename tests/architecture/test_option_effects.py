"""Every option has an effect that can be seen, or it is refused; and its value comes from where it was written."""

from __future__ import annotations

import pytest

from .option_probes import PROBES, core_settings, handlers, keywords, look  # noqa: F401


@pytest.mark.parametrize("option", [o for o in PROBES if PROBES[o].ranks == 1])
def test_effect(option, tmp_path):
    probe = PROBES[option]
    assert look(probe, tmp_path) == [case.seen for case in probe.cases]
