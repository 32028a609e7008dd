"""Runs go on after a restart: their ids live in checkpoints."""

import torch

from drivetrain import Accelerator
from drivetrain.tracking import read_run


def _train(directory, until, resume):
    """Steps up to `until`, with a checkpoint at step 5; as a script that is started again would."""
    accelerator = Accelerator(cpu=True, log_with="jsonl", project_dir=directory)
    model, optimizer = torch.nn.Linear(1, 1), None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    if resume:
        accelerator.load_state(f"{directory}/saved")
    accelerator.init_trackers("p", {"lr": 0.1})
    while accelerator.step < until:
        accelerator.backward(model(torch.ones(2, 1)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log(
            {"loss": accelerator.step / 10, "rank": accelerator.process_index}, step=accelerator.step, reduce="sum"
        )
        if accelerator.step == 5 and not resume:
            accelerator.save_state(f"{directory}/saved")
    accelerator.end_training()


def test_a_run_goes_on_from_its_checkpoint(ranks, tmp_path):
    ranks.run(_train, str(tmp_path), 8, False)
    assert [s for s, _ in read_run(tmp_path / "p").series("loss")] == list(range(1, 9))
    ranks.run(_train, str(tmp_path), 10, True)
    run = read_run(tmp_path / "p")  # one run
    assert run.series("loss") == [(s, 2 * (s / 10)) for s in range(1, 11)]
    assert run.series("rank") == [(s, 1) for s in range(1, 11)] and run.status == "finished"
