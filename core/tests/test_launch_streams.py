"""Files of output, and cores of ranks."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drivetrain.errors import ConfigurationError
from drivetrain.launch._binding import as_ranges, core_shares, read_ranges, shares_of
from drivetrain.launch._streams import Destinations, parse_streams
from drivetrain.specs import LauncherSpec
from drivetrain.testing.launching import LaunchRunner

SCRIPT = "import os, sys\nprint('out', os.environ['RANK'])\nprint('err', os.environ['RANK'], file=sys.stderr)\n"


@pytest.fixture
def run(tmp_path, capfd):
    return LaunchRunner(tmp_path, capfd, LauncherSpec(name="local", target="drivetrain.launch.local:LocalLauncher"))


@pytest.mark.parametrize(
    ("options", "shown_out", "shown_err", "files"),
    [
        ({}, {"out 0"}, {"err 0"}, [{"out 0", "err 0"}, {"out 1", "err 1"}]),
        (
            {"tee": "3"},
            {"[rank 0] out 0", "[rank 1] out 1"},
            {"[rank 0] err 0", "[rank 1] err 1"},
            [{"out 0", "err 0"}, {"out 1", "err 1"}],
        ),
        ({"redirects": "3"}, set(), set(), [{"out 0", "err 0"}, {"out 1", "err 1"}]),
        (
            {"tee": "1:2", "redirects": "0:1"},
            {"[rank 1] out 1"},
            {"[rank 0] err 0", "[rank 1] err 1"},
            [{"out 0"}, {"err 1"}],
        ),
    ],
)
def test_what_is_written_and_what_is_shown(run, tmp_path, options, shown_out, shown_err, files):
    logs = tmp_path / "logs"
    result = run(SCRIPT, 2, log_directory=logs, options=options)
    assert result.code == 0
    assert set(result.out.splitlines()) == shown_out
    assert set(result.err.splitlines()) == shown_err
    assert [set((logs / f"rank-{r}.log").read_text().splitlines()) for r in (0, 1)] == files
    merged = {f"[rank {r}] {line}" for r in (0, 1) for line in files[r]}
    assert set((logs / "all.log").read_text().splitlines()) == merged


@given(st.dictionaries(st.integers(0, 99), st.integers(0, 3), min_size=1))
def test_words_for_streams_are_read_as_they_are_written(bits):
    text = ",".join(f"{rank}:{value}" for rank, value in bits.items())
    assert parse_streams(text, said_by="tee") == (0, bits)


@pytest.mark.parametrize("text", ["", "4", "x", "0:4", "0:1,0:2", "1,2", "0-1:3"])
def test_words_that_mean_nothing(text):
    with pytest.raises(ConfigurationError, match="by local rank"):
        Destinations(tee=text).check(4)


@given(st.sets(st.integers(0, 300)))
def test_ranges_of_processors(numbers):
    assert read_ranges(as_ranges(frozenset(numbers))) == numbers


@given(st.integers(1, 40), st.integers(1, 40))
def test_shares_are_whole_cores_disjoint_and_even(cores, ranks):
    units = [frozenset({i, i + cores}) for i in range(cores)]
    if ranks > cores:
        with pytest.raises(ConfigurationError, match="cores of their own"):
            core_shares(units, ranks)
        return
    shares = core_shares(units, ranks)
    assert sorted(cpu for share in shares for cpu in share) == list(range(2 * cores))
    assert max(map(len, shares)) - min(map(len, shares)) in (0, 2)
    assert all((cpu + cores) % (2 * cores) in share for share in shares for cpu in share)


@pytest.mark.parametrize("mode", ["cores", "numa"])
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system can't bind processes")
def test_ranks_run_on_their_cores_and_the_launcher_keeps_its_own(run, mode):
    ranks = min(2, len(os.sched_getaffinity(0)))
    before = os.sched_getaffinity(0)
    result = run("import os\nprint(sorted(os.sched_getaffinity(0)))\n", ranks, options={"cpu_binding": mode})
    assert os.sched_getaffinity(0) == before
    shares = shares_of(mode, ranks)
    if ranks == 2:
        assert [result.lines(r) for r in range(2)] == [[str(sorted(share))] for share in shares]
    if mode == "cores":
        assert sum(map(len, shares)) == len(before)
