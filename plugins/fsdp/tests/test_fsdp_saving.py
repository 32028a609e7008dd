"""Accelerate's functions for one model or one optimizer."""

import pytest
import torch

from drivetrain import Accelerator
from drivetrain.errors import ConfigurationError, UnsupportedError
from drivetrain.testing.training import make_model, whole
from drivetrain.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer
from drivetrain_fsdp.options import FullyShardedDataParallelPlugin


def test_a_model_and_its_optimizer_go_on_at_another_number_of_processes(workers, tmp_path):
    def run(directory, save):
        plugin = FullyShardedDataParallelPlugin(transformer_cls_names_to_wrap=["Linear"])
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        torch.manual_seed(0 if save else 1)
        model = make_model()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        x = torch.linspace(-1, 1, 5 * next(iter(model.parameters())).shape[-1]).view(5, -1)

        def step():
            accelerator.backward(model(x).pow(2).mean())
            optimizer.step()
            optimizer.zero_grad()

        if save:
            step()
            save_fsdp_model(plugin, accelerator, model, directory)
            save_fsdp_optimizer(None, accelerator, optimizer, model, directory)
        else:
            load_fsdp_model(plugin, accelerator, model, directory)
            load_fsdp_optimizer(None, accelerator, optimizer, model, directory)
        step()
        weights = whole(accelerator.backend.model_state(model))
        with pytest.raises(ConfigurationError, match="isn't the Accelerator's"):
            save_fsdp_model(FullyShardedDataParallelPlugin(sharding_strategy="NO_SHARD"), accelerator, model, directory)
        with pytest.raises(UnsupportedError, match="adapter_only"):
            load_fsdp_model(None, accelerator, model, directory, adapter_only=True)
        accelerator.end_training()
        return weights

    expected = workers(2).run(run, str(tmp_path), True)[0]
    for weights in workers(1).run(run, str(tmp_path), False):
        assert weights.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-5, atol=1e-6)
