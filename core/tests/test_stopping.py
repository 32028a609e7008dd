"""All ranks stop after the same optimizer step, whoever asked and whenever the others hear of it."""

import os
import signal
import time

import torch

from drivetrain import Accelerator


def run_until_stopped(ask, uneven=False):
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    deadline = time.monotonic() + 30
    assert not accelerator.should_stop
    while not accelerator.should_stop:
        assert time.monotonic() < deadline
        if accelerator.step == 20:
            ask(accelerator)
        if uneven and accelerator.process_index == 0:
            time.sleep(0.002)
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        optimizer.zero_grad()
    answer = (accelerator.step, accelerator._stopper.reason)
    accelerator.end_training()
    return answer


def test_a_signal_on_one_rank_stops_all_at_one_step(workers):
    def ask(accelerator):
        if accelerator.process_index == accelerator.num_processes - 1:
            os.kill(os.getpid(), signal.SIGUSR1)

    for world in (2, 3):
        answers = workers(world).run(run_until_stopped, ask, uneven=True)
        assert len(set(answers)) == 1
        assert answers[0][0] > 20
        assert answers[0][1] == "SIGUSR1"


def test_requests_of_several_ranks_at_once_agree(ranks):
    steps = {step for step, _ in ranks.run(run_until_stopped, lambda a: a.request_stop(f"rank {a.process_index}"))}
    assert len(steps) == 1


def test_a_trigger_and_a_time_limit_stop_too(ranks):
    def limit(accelerator):
        if accelerator.is_main_process:
            accelerator.stop_after(0.1)

    def trigger(accelerator):
        if accelerator.is_main_process:
            accelerator.set_trigger()

    assert {reason for _, reason in ranks.run(run_until_stopped, limit)} == {"time limit"}
    assert {reason for _, reason in ranks.run(run_until_stopped, trigger)} == {"trigger"}


def test_alone_the_stop_comes_with_the_next_window():
    step, reason = run_until_stopped(lambda a: a.request_stop("enough"))
    assert (step, reason) == (21, "enough")


def test_signal_handlers_are_put_back_and_the_previous_ones_still_called():
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append("mine"))
    try:
        run_until_stopped(lambda a: os.kill(os.getpid(), signal.SIGUSR1))
        assert heard == ["mine"]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == ["mine", "mine"]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_without_asking_signals_are_left_alone():
    before = signal.getsignal(signal.SIGTERM)
    accelerator = Accelerator(cpu=True)
    assert signal.getsignal(signal.SIGTERM) is before
    accelerator.end_training()


def test_an_epoch_left_early_goes_on_later():
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    seen = []
    for epoch in accelerator.epochs(4):
        seen.append(epoch)
        for i in range(3):
            if epoch == 1 and i == 1:
                accelerator.request_stop("enough")
            accelerator.backward(model(torch.ones(1, 2)).sum())
            optimizer.step()
            if accelerator.should_stop:
                break
    assert seen == [0, 1]
    assert (accelerator.epoch, accelerator.step) == (1, 5)
    accelerator.end_training()


def noted(tmp_path, monkeypatch, ask, leaves=True):
    """What stands in the file that says that a run isn't done, or None."""
    note = tmp_path / "stopped"
    monkeypatch.setenv("DRIVETRAIN_STOPPED_FILE", str(note))
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = accelerator.prepare(torch.utils.data.DataLoader(torch.ones(6, 2), batch_size=2))
    for epoch in accelerator.epochs(2):
        for i, x in enumerate(loader):
            if (epoch, i) == ask[1:]:
                ask[0](accelerator)
            accelerator.backward(model(x).sum())
            optimizer.step()
            if leaves and accelerator.should_stop:
                break
    accelerator.end_training()
    return note.read_text() if note.exists() else None


def term(accelerator):
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_that_a_signal_ends_before_its_time_says_so(tmp_path, monkeypatch):
    assert noted(tmp_path, monkeypatch, (term, 0, 1)) == "SIGTERM\n"


def test_a_run_that_ends_in_time_in_spite_of_a_signal_does_not(tmp_path, monkeypatch):
    assert noted(tmp_path, monkeypatch, (term, 1, 2), leaves=False) is None


def test_a_run_that_ends_as_it_wants_does_not(tmp_path, monkeypatch):
    assert noted(tmp_path, monkeypatch, (lambda a: a.request_stop("enough"), 0, 1)) is None


def stop_and_look(folder):
    os.environ["DRIVETRAIN_STOPPED_FILE"] = f"{folder}/stopped"
    try:
        run_until_stopped(lambda a: a.is_main_process and os.kill(os.getpid(), signal.SIGUSR1))
    finally:
        del os.environ["DRIVETRAIN_STOPPED_FILE"]
    torch.distributed.barrier()
    return sorted(path.name for path in folder.iterdir())


def test_a_machines_first_rank_says_so_for_all(ranks, tmp_path):
    assert ranks.run(stop_and_look, tmp_path) == [["stopped"]] * 2
