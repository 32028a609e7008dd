"""From `prepare` on, objects run: no pluggy call is reachable from forward, backward, step, log, the loader or a clip."""

import torch
from torch.utils.data import DataLoader

from drivetrain import Accelerator
from drivetrain._plugins import get_registry


def test_a_training_step_makes_no_hook_call(request, tmp_path):
    calls = []
    undo = get_registry()._manager._pm.add_hookcall_monitoring(
        before=lambda name, *_: calls.append(name), after=lambda *_: None
    )
    request.addfinalizer(undo)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, log_with="jsonl", project_dir=tmp_path)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = DataLoader(torch.ones(12, 2), batch_size=2)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    accelerator.init_trackers("demo")
    assert "drivetrain_detect_backend" in calls  # so calls are counted
    calls.clear()
    for _ in accelerator.epochs(2):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(batch).mean()
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            accelerator.log({"loss": loss})
            accelerator.gather_for_metrics(loss.detach().expand(2))
    assert accelerator.step == 6
    assert calls == []
    accelerator.end_training()
