"""Settings that can be said in two places, that are told, and that scripts ask an Accelerator for."""

import warnings

import pytest
import torch

from drivetrain import Accelerator, DataLoaderConfiguration, ProfileKwargs, ProjectConfiguration
from drivetrain.errors import ConfigurationError, DistributedOperationError
from drivetrain.specs import LauncherSpec
from drivetrain.testing.launching import LaunchRunner


def test_split_batches_is_part_of_the_loaders_configuration():
    accelerator = Accelerator(cpu=True, split_batches=True)
    assert accelerator.split_batches
    assert accelerator.plan.option(DataLoaderConfiguration).split_batches
    kept = DataLoaderConfiguration(data_seed=3)
    both = Accelerator(cpu=True, split_batches=True, dataloader_config=kept)
    assert (both.split_batches, both.dataloader_config.data_seed, kept.split_batches) == (True, 3, False)
    with pytest.raises(ConfigurationError, match="split_batches=True and dataloader_config's split_batches=False"):
        Accelerator(cpu=True, split_batches=True, dataloader_config=DataLoaderConfiguration(split_batches=False))
    with pytest.raises(ConfigurationError, match="takes a DataLoaderConfiguration"):
        Accelerator(cpu=True, split_batches=True, dataloader_config="even")


def test_a_configuration_given_to_two_accelerators_is_not_shared():
    config = DataLoaderConfiguration()
    first, second = (Accelerator(cpu=True, dataloader_config=config) for _ in range(2))
    first.even_batches = False
    assert (second.even_batches, config.even_batches) == (True, True)


def test_switching_off_what_is_always_on_is_told_once():
    config = DataLoaderConfiguration(use_seedable_sampler=False, use_stateful_dataloader=False)
    with pytest.warns(
        UserWarning, match=r"use_seedable_sampler=False\) changes nothing: [\s\S]*use_stateful_dataloader"
    ):
        accelerator = Accelerator(cpu=True, dataloader_config=config)
    assert accelerator.use_seedable_sampler
    assert accelerator.use_stateful_dataloader
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))


def test_the_project_directory_reaches_checkpoints_and_scripts(tmp_path):
    project = ProjectConfiguration(automatic_checkpoint_naming=True)
    accelerator = Accelerator(cpu=True, project_dir=tmp_path, project_config=project, log_with="jsonl")
    accelerator.prepare(torch.nn.Linear(1, 1))
    assert accelerator.project_dir == accelerator.logging_dir == str(tmp_path)
    assert accelerator.log_with == ["jsonl"]
    assert accelerator.save_state() == str(tmp_path / "checkpoints" / "checkpoint_0")
    accelerator.end_training()


def test_what_scripts_ask_for():
    config = DataLoaderConfiguration(dispatch_batches=False, non_blocking=True)
    accelerator = Accelerator(cpu=True, dataloader_config=config, rng_types=["torch"], mixed_precision="bf16")
    assert (accelerator.dispatch_batches, accelerator.non_blocking, accelerator.rng_types) == (False, True, ["torch"])
    assert (accelerator.native_amp, accelerator.multi_device, accelerator.should_save_model) == (True, False, True)


def test_profiling_nothing_is_refused():
    accelerator = Accelerator(cpu=True, kwargs_handlers=[ProfileKwargs(activities=["mtia"])])
    with pytest.raises(ConfigurationError, match=r"can't be recorded here\. Possible: cpu"), accelerator.profile():
        pass


def test_in_debug_mode_different_numbers_of_rows_are_an_error(ranks):
    def run():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the ranks' group is there already
            accelerator = Accelerator(cpu=True, debug=True)
        try:
            accelerator.gather(torch.ones(1 + accelerator.process_index))
        except DistributedOperationError as error:
            return str(error)

    assert all("rows" in text for text in ranks.run(run))


def test_a_process_group_that_is_there_keeps_what_it_was_made_with(ranks):
    def run():
        from drivetrain import InitProcessGroupKwargs

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            Accelerator(cpu=True, debug=True, kwargs_handlers=[InitProcessGroupKwargs(init_method="file:///nowhere")])
        return [str(w.message) for w in caught]

    for told in ranks.run(run):
        assert any("init_method='file:///nowhere' changes nothing" in text for text in told)
        assert any("made before without debug" in text for text in told)


def test_settings_for_several_machines_are_told_where_there_is_one(tmp_path, capfd):
    run = LaunchRunner(tmp_path, capfd, LauncherSpec(name="local", target="drivetrain.launch.local:LocalLauncher"))
    result = run("print('ran')", options={"rdzv_backend": "c10d", "local_addr": "here"})
    assert (result.code, result.out) == (0, "ran\n")
    assert result.err == (
        "drivetrain: rdzv_backend, local_addr changed nothing: there is one machine, whose ranks meet at 127.0.0.1.\n"
    )
    with pytest.raises(ConfigurationError, match="rdzv_backend='nosuch'"):
        run("", 2, num_machines=2, main_process_ip="127.0.0.1", main_process_port=1, options={"rdzv_backend": "nosuch"})
