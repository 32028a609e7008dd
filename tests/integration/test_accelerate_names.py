"""The names that scripts and libraries import from Accelerate: each is there, or says what to install, or what to use instead.

Those of ``transformers``, ``trl``, ``peft`` and ``diffusers`` are what a scan of their imports found.
"""

from __future__ import annotations

import importlib.resources
import inspect
import json

import pytest

import drivetrain
import drivetrain.utils
from drivetrain import Accelerator
from drivetrain._foreign import MissingNameError
from drivetrain._plugins.registry import MissingExportError

#: Where names of the whole of Accelerate's top level and of what others import from it stand here.
HERE = {
    "": """
        Accelerator skip_first_batches debug_launcher notebook_launcher PartialState AutocastKwargs DataLoaderConfiguration
        DDPCommunicationHookType DistributedDataParallelKwargs DistributedType GradScalerKwargs InitProcessGroupKwargs ProfileKwargs
        ParallelismConfig find_executable_batch_size init_empty_weights init_on_device is_rich_available synchronize_rng_states
        __version__ """,
    "state": "AcceleratorState PartialState DistributedType",
    "utils": """
        AutocastKwargs DataLoaderConfiguration DDPCommunicationHookType DistributedDataParallelKwargs DistributedOperationException
        DistributedType DynamoBackend GradScalerKwargs GradientAccumulationPlugin InitProcessGroupKwargs KwargsHandler LoggerType
        PrecisionType ProfileKwargs ProjectConfiguration RNGType SAFE_WEIGHTS_NAME TensorInformation TorchDynamoPlugin WEIGHTS_NAME
        broadcast broadcast_object_list clear_environment compare_versions concatenate convert_file_size_to_int
        convert_outputs_to_fp32 convert_to_fp32 extract_model_from_parallel find_batch_size find_device find_executable_batch_size
        gather gather_object get_data_structure honor_type is_bf16_available is_compiled_module is_cuda_available
        is_deepspeed_available is_mlu_available is_npu_available is_peft_model is_port_in_use is_tensorboard_available
        is_torch_version is_wandb_available is_xpu_available listify merge_dicts pad_across_processes parse_flag_from_env
        patch_environment recursively_apply reduce release_memory save send_to_device set_seed slice_tensors str_to_bool
        synchronize_rng_state synchronize_rng_states tqdm wait_for_everyone """,
    "utils.dataclasses": "DataLoaderConfiguration DistributedType GradientAccumulationPlugin KwargsHandler ProjectConfiguration",
    "utils.constants": "MODEL_NAME SAFE_MODEL_NAME SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME WEIGHTS_INDEX_NAME WEIGHTS_NAME",
    "utils.imports": "is_bf16_available is_fp8_available is_xpu_available",
    "utils.memory": "clear_device_cache find_executable_batch_size release_memory should_reduce_batch_size",
    "utils.modeling": "convert_file_size_to_int",
    "utils.operations": "broadcast gather gather_object pad_across_processes recursively_apply reduce send_to_device",
    "utils.other": "extract_model_from_parallel is_port_in_use merge_dicts save wait_for_everyone",
    "utils.random": "set_seed synchronize_rng_state synchronize_rng_states",
    "utils.versions": "compare_versions is_torch_version",
    "data_loader": "DataLoaderShard prepare_data_loader skip_first_batches",
    "parallelism_config": "ParallelismConfig",
    "launchers": "debug_launcher notebook_launcher",
    "logging": "MultiProcessAdapter get_logger",
    "optimizer": "AcceleratedOptimizer",
    "scheduler": "AcceleratedScheduler",
    "tracking": "GeneralTracker",
}

#: Names that belong to plugins: there once the plugin is installed; until then the error names it.
OF_PLUGINS = {
    "": "DeepSpeedPlugin FullyShardedDataParallelPlugin",
    "utils": """
        AORecipeKwargs DeepSpeedPlugin DummyOptim DummyScheduler FullyShardedDataParallelPlugin
        MegatronLMPlugin load_fsdp_model load_fsdp_optimizer save_fsdp_model save_fsdp_optimizer """,
}

#: Names that come later, or whose purpose is served otherwise: the error says how.
EXPLAINED = {
    "": """
        cpu_offload cpu_offload_with_hook disk_offload dispatch_model infer_auto_device_map
        load_checkpoint_and_dispatch load_checkpoint_in_model prepare_pippy """,
    "state": "GradientState is_initialized",
    "utils": """
        BnbQuantizationConfig CustomDtype FP8RecipeKwargs TERecipeKwargs compute_module_sizes get_balanced_memory get_max_memory
        TorchContextParallelConfig TorchTensorParallelConfig TorchTensorParallelPlugin disable_fsdp_ram_efficient_loading
        enable_fsdp_ram_efficient_loading merge_fsdp_weights
        infer_auto_device_map load load_and_quantize_model load_offloaded_weights named_module_tensors offload_state_dict
        offload_weight purge_accelerate_environment save_offload_index set_module_tensor_to_device shard_checkpoint
        write_basic_config DeepSpeedEngineWrapper DeepSpeedOptimizerWrapper DeepSpeedSchedulerWrapper DeepSpeedSequenceParallelConfig
        HfDeepSpeedConfig get_active_deepspeed_plugin map_pytorch_optim_to_deepspeed """,
    "utils.modeling": "clean_device_map get_max_layer_size",
    "data_loader": "BatchSamplerShard DataLoaderDispatcher IterableDatasetShard SeedableRandomSampler SkipBatchSampler",
}

#: Modules of Accelerate of which nothing is here yet.
NO_MODULE = "hooks big_modeling commands local_sgd inference utils.deepspeed utils.fsdp_utils"


def table(names):
    return [(module, name) for module, listed in names.items() for name in listed.split()]


def take(module, name):
    """What ``from drivetrain.module import name`` gives."""
    full = f"drivetrain.{module}" if module else "drivetrain"
    scope = {}
    exec(f"from {full} import {name}", scope)
    return scope[name]


@pytest.mark.parametrize(("module", "name"), table(HERE))
def test_name_is_here(module, name):
    assert take(module, name) is not None


@pytest.mark.parametrize(("module", "name"), table(OF_PLUGINS))
def test_name_of_a_plugin_is_here_or_says_which_plugin(module, name):
    try:
        assert take(module, name) is not None
    except MissingExportError as error:
        assert "drivetrain-" in str(error)


@pytest.mark.parametrize(("module", "name"), table(EXPLAINED))
def test_name_that_is_not_here_says_what_to_do(module, name):
    with pytest.raises(MissingNameError, match=rf"has no '{name}'\. \S.*\."):
        take(module, name)


@pytest.mark.parametrize("module", NO_MODULE.split())
def test_a_missing_module_is_an_import_error(module):
    with pytest.raises(ImportError, match=module.split(".")[-1]):
        importlib.import_module(f"drivetrain.{module}")


def test_a_name_that_nobody_has_is_an_attribute_error():
    for module in (drivetrain, drivetrain.utils):
        with pytest.raises(AttributeError, match="no_such_name"):
            module.no_such_name
        assert not hasattr(module, "no_such_name")


def test_nothing_is_called_missing_that_is_here():
    text = importlib.resources.files("drivetrain").joinpath("foreign_names.json").read_text()
    missing = {name for names in json.loads(text).values() for name in names}
    assert missing.isdisjoint({*drivetrain.__all__, *drivetrain.utils.__all__})


def test_classes_under_accelerates_names_are_those_of_prepared_objects():
    import torch

    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    loader = torch.utils.data.DataLoader(range(4))
    prepared = Accelerator(cpu=True).prepare(optimizer, scheduler, loader)
    names = [
        ("optimizer", "AcceleratedOptimizer"),
        ("scheduler", "AcceleratedScheduler"),
        ("data_loader", "DataLoaderShard"),
    ]
    for thing, (module, name) in zip(prepared, names, strict=True):
        assert isinstance(thing, take(module, name))


def test_prepare_data_loader_takes_accelerates_arguments():
    import torch

    prepare = take("data_loader", "prepare_data_loader")
    plain = torch.utils.data.DataLoader(range(8), batch_size=4)
    second = prepare(plain, None, 2, 1, split_batches=True, data_seed=0, use_seedable_sampler=True)
    assert [b.tolist() for b in second] == [[2, 3], [6, 7]]


#: Methods and properties of the Accelerator that libraries use, and their positional parameters where scripts pass some.
USED = {
    "accumulate": "models",
    "autocast": "autocast_handler",
    "backward": "loss",
    "check_trigger": "",
    "clear": "objects",
    "clip_grad_norm_": "parameters max_norm norm_type",
    "clip_grad_value_": "parameters clip_value",
    "end_training": "",
    "free_memory": "objects",
    "gather": "tensor",
    "gather_for_metrics": "input_data use_gather_object",
    "get_state_dict": "model unwrap",
    "get_tracker": "name unwrap",
    "init_trackers": "project_name config init_kwargs",
    "join_uneven_inputs": "joinables even_batches",
    "load_state": "input_dir",
    "log": "values step log_kwargs",
    "main_process_first": "",
    "no_sync": "model",
    "on_local_process": "function local_process_index",
    "on_process": "function process_index",
    "pad_across_processes": "tensor dim pad_index pad_first",
    "prepare": "args",
    "prepare_data_loader": "data_loader device_placement slice_fn_for_dispatch",
    "prepare_model": "model device_placement evaluation_mode",
    "prepare_optimizer": "optimizer device_placement",
    "prepare_scheduler": "scheduler",
    "print": "args",
    "profile": "profile_handler",
    "reduce": "tensor reduction scale",
    "register_for_checkpointing": "objects",
    "register_load_state_pre_hook": "hook",
    "register_save_state_pre_hook": "hook",
    "save": "obj f safe_serialization",
    "save_model": "model save_directory max_shard_size safe_serialization",
    "save_state": "output_dir safe_serialization",
    "set_trigger": "",
    "skip_first_batches": "dataloader num_batches",
    "split_between_processes": "inputs apply_padding",
    "unscale_gradients": "optimizer",
    "unwrap_model": "model keep_fp32_wrapper keep_torch_compile",
    "wait_for_everyone": "",
}


@pytest.mark.parametrize("name", USED)
def test_method_takes_the_same_arguments_in_the_same_order(name):
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    parameters = list(inspect.signature(getattr(Accelerator, name)).parameters.values())[1:]
    assert [p.name for p in parameters if p.kind in kinds] == USED[name].split()


PROPERTIES = """
    dataloader_config device distributed_type even_batches gradient_accumulation_steps gradient_state is_last_process is_local_main_process
    is_main_process local_process_index log_with logging_dir mixed_precision multi_device native_amp num_processes
    optimizer_step_was_skipped process_index project_configuration project_dir save_iteration scaler split_batches state step
    step_scheduler_with_optimizer sync_gradients trackers use_distributed device_placement dispatch_batches non_blocking rng_types
    use_seedable_sampler use_stateful_dataloader should_save_model
"""


@pytest.mark.parametrize("name", PROPERTIES.split())
def test_property_is_there(name):
    assert hasattr(Accelerator(cpu=True), name)
