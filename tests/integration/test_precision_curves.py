"""The trainings that docs/training.md shows, in short: each precision ends near full precision, over three seeds."""

import runpy
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "docs" / "tools" / "precision_curves.py"


@pytest.fixture(scope="module")
def tool():
    return runpy.run_path(str(TOOL))


def check(tool, runs, learned):
    for run in runs["no"]:
        assert run.held_out < learned, "the model didn't learn"
    for precision, apart in tool["differences"](runs).items():
        assert all(abs(d) <= tool["BOUNDS"][precision] for d in apart), (precision, apart)


def test_a_short_training_in_each_precision(tool, tmp_path):
    runs = tool["train_all"](24, range(3), batch_size=8)
    check(tool, runs, learned=3.6)  # uniform guessing among 128 characters is 4.85
    tool["draw"](runs, tmp_path / "curves.svg")
    assert (tmp_path / "curves.svg").read_text().startswith("<?xml")
    assert tool["table"](runs).count("\n") == 5


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_the_training_of_the_docs(tool):
    check(tool, tool["train_all"](600, range(3)), learned=2.4)
