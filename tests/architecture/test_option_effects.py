"""Every option has an effect that can be seen, or it is refused; and its value comes from where it was written."""

from __future__ import annotations

import pytest

from .option_probes import (
    PROBES,
    core_settings,
    data_loader,
    ddp,
    handlers,
    keywords,
    look,
    look_at_all,
    projects,
    trackers,
)  # noqa: F401


@pytest.mark.parametrize("option", [o for o in PROBES if PROBES[o].ranks == 1])
def test_effect(option, tmp_path):
    probe = PROBES[option]
    assert look(probe, tmp_path) == [case.seen for case in probe.cases]


@pytest.fixture(scope="module")
def seen_on_ranks(workers, tmp_path_factory):
    import cloudpickle
    import sys

    package = sys.modules[look_at_all.__module__]
    probes = [p for p in PROBES.values() if p.ranks == 2]
    folder = tmp_path_factory.mktemp("options")
    return workers(2).run(look_at_all, probes, folder)


@pytest.mark.parametrize("option", [o for o in PROBES if PROBES[o].ranks == 2])
def test_effect_on_ranks(option, seen_on_ranks):
    by_rank = [seen[option] for seen in seen_on_ranks]
    assert [list(s) for s in zip(*by_rank, strict=True)] == [case.seen for case in PROBES[option].cases]
