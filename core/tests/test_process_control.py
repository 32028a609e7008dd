"""What runs on which rank, and in which order."""

import asyncio
import contextlib
import io
import time

import pytest
import torch
import torch.distributed as dist

from drivetrain.errors import ConfigurationError, DistributedOperationError
from drivetrain.parallel import ProcessControl, Trigger, gather
from drivetrain.specs import ProcessInfo

CPU = torch.device("cpu")


def control(local_ranks=None):
    """Control of this rank; ``local_ranks`` by rank spreads the job over machines."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    local = rank if local_ranks is None else local_ranks[rank]
    return ProcessControl(
        ProcessInfo(rank=rank, world_size=world, local_rank=local, local_world_size=world), device=CPU
    )


def test_facts(workers):
    def run():
        c = control([0, 1, 0])
        return (
            c.num_processes,
            c.process_index,
            c.local_process_index,
            c.use_distributed,
            c.is_main_process,
            c.is_local_main_process,
            c.is_last_process,
        )

    assert workers(3).run(run) == [
        (3, 0, 0, True, True, True, False),
        (3, 1, 1, True, False, False, False),
        (3, 2, 0, True, False, True, True),
    ]
    alone = control()
    assert (alone.use_distributed, alone.is_main_process, alone.is_last_process) == (False, True, True)


def test_controls_of_one_process_are_equal():
    a, b = control(), control()
    assert a == b
    assert hash(a) == hash(b)
    assert a != ProcessControl(ProcessInfo(rank=1, world_size=2), device=CPU)
    assert a != "control"


# -- order -----------------------------------------------------------------------------------------------------------------


def test_main_process_goes_first(workers):
    def run():
        c = control()
        with c.main_process_first():
            if c.is_main_process:
                time.sleep(0.3)
            entered = time.monotonic()
            left = time.monotonic()
        c.wait_for_everyone()
        return entered, left

    times = workers(3).run(run)
    main_left = times[0][1]
    assert all(entered >= main_left for entered, _ in times[1:])


def test_the_main_process_of_each_machine_goes_first(workers):
    def run():
        c = control([0, 1, 0])
        with c.local_main_process_first():
            if c.is_local_main_process:
                time.sleep(0.2 * (1 + c.process_index))
            return time.monotonic()

    first, other, second = workers(3).run(run)
    assert other >= max(first, second)


@pytest.mark.parametrize("local", [False, True])
def test_if_the_main_process_raises_the_others_do_not_wait_for_ever(workers, local):
    def run():
        c = control([0, 1, 0])
        entered = False
        context = c.local_main_process_first() if local else c.main_process_first()
        try:
            with context:
                entered = True
                if c.process_index == 0:
                    raise FileNotFoundError("planted")
        except (FileNotFoundError, DistributedOperationError) as error:
            return type(error).__name__, str(error), entered
        return None

    main, other, last = workers(3).run(run)
    assert main == ("FileNotFoundError", "planted", True)
    for kind, message, entered in (other, last):
        assert kind == "DistributedOperationError"
        assert (
            "main_process_first was given up on every rank, because it failed on\n  rank 0: FileNotFoundError: planted"
            in message
        )
        assert entered is (local and (kind, message, entered) == last), (
            "only another machine's main process ran the block"
        )


def test_an_error_on_another_rank_is_its_own(ranks):
    def run():
        c = control()
        with contextlib.suppress(ValueError), c.main_process_first():
            if not c.is_main_process:
                raise ValueError("planted")
        c.wait_for_everyone()
        return True

    assert ranks.run(run) == [True, True]


def test_a_collective_inside_is_an_error_not_a_deadlock(ranks):
    def run():
        c = control()
        match = r"rank 0: gather\([\s\S]*rank 1: main_process_first\(\)"
        with pytest.raises(DistributedOperationError, match=match), c.main_process_first():
            gather(torch.ones(1))
        c.wait_for_everyone()
        return True

    assert ranks.run(run) == [True, True]


def test_waiting_without_a_group_is_an_error():
    c = ProcessControl(ProcessInfo(world_size=2), device=CPU)
    with pytest.raises(
        DistributedOperationError, match="wait_for_everyone: the process group of this job's 2 processes was ended"
    ):
        c.wait_for_everyone()
    with pytest.raises(DistributedOperationError, match="main_process_first"), c.main_process_first():
        pass


def test_one_process_never_waits():
    c = control()
    c.wait_for_everyone()
    with c.main_process_first(), c.local_main_process_first():
        pass


# -- who runs what ---------------------------------------------------------------------------------------------------------


def test_decorators_in_both_forms(workers):
    def run():
        c = control([0, 1, 0])
        functions = {
            "main": c.on_main_process(name),
            "main()": c.on_main_process()(name),
            "local": c.on_local_main_process(name),
            "local()": c.on_local_main_process()(name),
            "last": c.on_last_process(name),
            "last()": c.on_last_process()(name),
            "process": c.on_process(name, process_index=1),
            "process()": c.on_process(process_index=1)(name),
            "local process": c.on_local_process(name, local_process_index=1),
            "local process()": c.on_local_process(local_process_index=1)(name),
        }
        return {key for key, function in functions.items() if function("x", suffix="y") == "xy"}

    def name(first, *, suffix):
        """Join."""
        return first + suffix

    main, second, last = workers(3).run(run)
    assert main == {"main", "main()", "local", "local()"}
    assert second == {"process", "process()", "local process", "local process()"}
    assert last == {"local", "local()", "last", "last()"}


def test_decorated_functions_keep_their_name_and_work_as_methods():
    c = control()

    class Writer:
        text = "hello"

        @c.on_main_process
        def write(self, end):
            """Write it."""
            return self.text + end

        @c.on_process(process_index=7)
        def anywhere(self):
            return self.text

    assert Writer().write("!") == "hello!"
    assert (Writer.write.__name__, Writer.write.__doc__) == ("write", "Write it.")
    assert Writer().anywhere() == "hello", "one process runs everything"


def test_coroutine_functions_stay_coroutine_functions(ranks):
    def run():
        c = control()

        @c.on_main_process
        async def fetch():
            return "fetched"

        return asyncio.run(fetch())

    assert ranks.run(run) == ["fetched", None]


def test_decorators_say_what_is_missing():
    c = control()
    with pytest.raises(ConfigurationError, match="pass process_index="):
        c.on_process(print)
    with pytest.raises(ConfigurationError, match="pass local_process_index="):
        c.on_local_process()
    with pytest.raises(ConfigurationError, match="on_main_process decorates a function, and got 3"):
        c.on_main_process(3)


def test_print_shows_once_per_machine(workers):
    def run():
        c = control([0, 1, 0])
        out = io.StringIO()
        c.print("epoch", 3, sep=":", end="", file=out)
        return out.getvalue()

    assert workers(3).run(run) == ["epoch:3", "", "epoch:3"]


def test_split_as_context(workers):
    def run():
        c = control()
        with (
            c.split_between_processes(["a", "b", "c", "d"]) as part,
            c.split_between_processes([1, 2, 3, 4], apply_padding=True) as padded,
        ):
            return part, padded

    assert workers(3).run(run) == [(["a", "b"], [1, 2]), (["c"], [3, 3]), (["d"], [4, 4])]


def test_trigger(workers):
    def run():
        trigger = Trigger()
        seen = [trigger.check_trigger()]
        if dist.get_rank() == 2:
            trigger.set_trigger()
        return [*seen, trigger.check_trigger(), trigger.check_trigger()]

    assert workers(3).run(run) == [[False, True, False]] * 3
