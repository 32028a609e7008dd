import logging
import subprocess
import sys

import pytest
import torch.distributed as dist

from drivetrain._rank import current_local_rank, current_rank
from drivetrain.errors import ConfigurationError
from drivetrain.logging import get_logger
from drivetrain.utils import tqdm


@pytest.fixture(autouse=True)
def no_rank(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "DRIVETRAIN_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)


def test_it_works_before_there_is_anything_and_needs_no_torch():
    code = (
        "import logging, sys; logging.basicConfig(); root = logging.getLogger().level\n"
        "from drivetrain.logging import get_logger; from drivetrain.utils import tqdm\n"
        "log = get_logger('x', 'DEBUG'); log.info('hello'); log.warning('all', main_process_only=False, in_order=True)\n"
        "assert list(tqdm(range(2), disable=True)) == [0, 1]\n"
        "assert 'torch' not in sys.modules and logging.getLogger().level == root\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "INFO:x:hello\nWARNING:x:all\n"


def test_only_the_main_process_logs_unless_asked(monkeypatch, caplog):
    log = get_logger("t.main", "INFO")
    monkeypatch.setenv("RANK", "1")
    log.info("main only")
    log.info("everyone", main_process_only=False)
    monkeypatch.setenv("RANK", "0")
    log.info("main %d", 7)
    assert [r.getMessage() for r in caplog.records] == ["everyone", "main 7"]
    assert {r.filename for r in caplog.records} == {"test_process_logging.py"}


def test_a_warning_is_given_once_per_text(caplog):
    log = get_logger("t.once")
    for value in (1, 1, 2):
        log.warning_once("value %d", value)
    assert [r.getMessage() for r in caplog.records] == ["value 1", "value 2"]
    assert {r.filename for r in caplog.records} == {"test_process_logging.py"}


def test_levels_come_from_the_argument_else_the_environment(monkeypatch):
    monkeypatch.setenv("DRIVETRAIN_LOG_LEVEL", "error")
    root = logging.getLogger().level
    assert get_logger("t.level").logger.level == logging.ERROR
    assert get_logger("t.level", log_level="debug").logger.level == logging.DEBUG
    assert get_logger("t.level", log_level=15).logger.level == 15
    assert logging.getLogger().level == root
    with pytest.raises(ConfigurationError, match="log_level='loud' is no log level"):
        get_logger("t.level", log_level="loud")
    monkeypatch.setenv("DRIVETRAIN_LOG_LEVEL", "loud")
    with pytest.raises(ConfigurationError, match="DRIVETRAIN_LOG_LEVEL='loud'"):
        get_logger("t.level")


def test_exceptions_and_extra_fields_pass_through(caplog):
    log = get_logger("t.extra")
    try:
        raise ValueError("planted")
    except ValueError:
        log.exception("failed", extra={"job": 3})
    [record] = caplog.records
    assert record.exc_info is not None and record.job == 3


def _log_in_order(path):
    import os
    import time

    os.environ.pop("RANK", None)
    log = get_logger("t.order", "INFO")
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log.logger.addHandler(handler)
    rank = dist.get_rank()
    try:
        for i in range(5):
            time.sleep(0.02 * (1 - rank))  # rank 1 comes first
            log.info("%d from %d", i, rank, main_process_only=False, in_order=True)
        log.info("once")
        log.logger.setLevel("INFO" if rank else "ERROR")  # a rank that shows nothing still takes part
        log.info("last from %d", rank, main_process_only=False, in_order=True)
    finally:
        log.logger.removeHandler(handler)
        handler.close()
        os.environ["RANK"] = str(rank)
    return current_rank(), current_local_rank()


def test_two_ranks_log_in_order(ranks, tmp_path):
    assert ranks.run(_log_in_order, str(tmp_path / "log")) == [(0, 0), (1, 1)]
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == [f"{i} from {r}" for i in range(5) for r in range(2)] + ["once", "last from 1"]


@pytest.mark.parametrize(("local_rank", "shown"), [("0", True), ("1", False)])
def test_a_progress_bar_shows_on_the_local_main_process(monkeypatch, capsys, local_rank, shown):
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert list(tqdm(range(3), desc="steps")) == [0, 1, 2]
    assert ("steps" in capsys.readouterr().err) is shown
    with tqdm(total=2, desc="everywhere", main_process_only=False) as bar:
        bar.update(2)
    assert "everywhere" in capsys.readouterr().err
    assert tqdm(range(3), disable=True).disable


def test_a_progress_bar_can_be_called_by_its_module_and_refuses_the_old_order():
    import drivetrain.utils

    assert list(drivetrain.utils.tqdm([1], disable=True)) == [1]
    with pytest.raises(TypeError, match="iterable first"):
        tqdm(True, range(3))


def test_logging_costs_nothing_when_disabled_and_little_when_not(monkeypatch):
    import timeit

    log = get_logger("t.cost", "ERROR")
    assert min(timeit.repeat(lambda: log.info("x"), number=1000, repeat=5)) / 1000 < 5e-6
    monkeypatch.setenv("RANK", "1")
    assert min(timeit.repeat(lambda: log.error("x"), number=1000, repeat=5)) / 1000 < 20e-6
