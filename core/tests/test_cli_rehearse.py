"""The command line of rehearsals, without one; tests/integration has those."""

import pytest
from click.testing import CliRunner

from drivetrain.cli._rehearsal_tables import print_report
from drivetrain.cli.rehearse import _Bytes, _verdict, rehearse
from drivetrain.rehearsal import Failure, Message, Report


def call(*words):
    return CliRunner().invoke(rehearse, words)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("80GB", 80 * 10**9), ("24 GiB", 24 * 2**30), ("512mb", 512 * 10**6), ("1.5k", 1500), ("100", 100)],
)
def test_sizes(text, nbytes):
    assert _Bytes().convert(text, None, None) == nbytes


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--world", "4"], "Give a script"),
        (["train.py"], "--world"),
        (["--world", "4", "--device-memory", "much", "train.py"], "give a size like 80GB"),
        (["--world", "0", "train.py"], "--world"),
    ],
)
def test_mistakes_are_told(words, said):
    result = call(*words)
    assert result.exit_code == 2
    assert said in result.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--world", "4", "--rank", "4", __file__], "ranks go from 0 to 3"),
        (["--world", "4", "--num-machines", "3", __file__], "can't be divided"),
        (["--world", "2", "no_such_script.py"], "no_such_script.py"),
        (["--world", "2", "--backend", "no-such-backend", __file__], "no-such-backend"),
    ],
)
def test_contradictions_are_told_before_anything_starts(words, said):
    assert said in str(call(*words).exception)


def test_a_report_becomes_tables(capsys):
    message = Message(kind="all_reduce", group_size=4, count=2, nbytes=3_000_000, where="train.py:7")
    report = Report(
        rank=1,
        world_size=4,
        backend="toy",
        steps=2,
        peak=20_000_000,
        at_peak={"parameters": 12_000_000, "activations": 8_000_000},
        memory={"parameters": 12_000_000},
        per_step=(message,),
        sequence=(("all_reduce", 1_500_000, 4, 1),) * 2,
        reads={"train.py:9": 3},
        notes=("nothing is compiled",),
        failure=Failure(type="ValueError", message="by hand", where="train.py:9"),
    )
    print_report(report, device_memory=40_000_000)
    text = capsys.readouterr().out
    for part in (
        "rank 1 of 4",
        "12.00 MB",
        "50% of 40.00 MB",
        "all_reduce",
        "3.00 MB",
        "train.py:7",
        "train.py:9",
        "nothing is compiled",
    ):
        assert part in text
    failures = _verdict(report, 10_000_000)
    assert failures[0].startswith("the script failed at train.py:9")
    assert "0.02 GB at its peak" in failures[1]
    assert _verdict(Report(rank=0, world_size=1), 1) == []
