import os

import pytest
import torch
import torch.distributed as dist

from drivetrain.testing.workers import RemoteError


def _total():
    value = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(value)
    return value.item()


def test_functions_run_on_every_rank_with_a_process_group(workers):
    assert workers(2).run(_total) == [3.0, 3.0]
    assert workers(3).run(lambda x: x + dist.get_rank(), 10) == [10, 11, 12]


def test_processes_are_reused(ranks):
    assert ranks.run(os.getpid) == ranks.run(os.getpid)


def test_an_error_on_one_rank_is_reported_and_the_waiting_rank_does_not_hang(ranks):
    def fail():
        if dist.get_rank() == 1:
            raise ValueError("planted")
        dist.barrier()

    with pytest.raises(RemoteError, match=r"\[rank 1\][\s\S]*planted"):
        ranks.run(fail)
    assert ranks.run(_total) == [3.0, 3.0]


def test_a_dead_rank_is_reported_with_its_exit_code(ranks):
    def die():
        os._exit(7)

    with pytest.raises(RemoteError, match="exit code 7"):
        ranks.run(die)
