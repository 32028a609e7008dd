"""The configuration of an engine: complete, without contradictions, and taken by DeepSpeed itself."""

from __future__ import annotations

import copy
import json
import tempfile

import pytest
from deepspeed.runtime.config import DeepSpeedConfig
from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.errors import ConfigurationError, DrivetrainError, UnsupportedError
from drivetrain_deepspeed.checking import check_document
from drivetrain_deepspeed.config import Facts, micro_batch_of, resolve
from drivetrain_deepspeed.dummies import DummyOptim, DummyScheduler
from drivetrain_deepspeed.options import DeepSpeedPlugin

ONE = Facts(world_size=1, micro_batch_size=4, parameter_count=1000)
#: A placeholder for the optimizer, and none.
DUMMY = {"client_optimizer": False, "config_optimizer": True}


def facts(**changes):
    return Facts(**{**{name: getattr(ONE, name) for name in Facts.__slots__}, **changes})


def resolved(document=None, options=None, **changes):
    return resolve(DeepSpeedPlugin(hf_ds_config=document, **(options or {})), facts(**changes))


def autos(values):
    """Paths at which "auto" stands."""
    if isinstance(values, dict):
        return [(k, *path) for k, v in values.items() for path in autos(v)]
    return [()] if values == "auto" else []


def taken(config):
    """What DeepSpeed reads in it; JSON holds it, too."""
    assert autos(config) == []
    assert json.loads(json.dumps(config)) == config
    check_document(config, "made")
    return DeepSpeedConfig(copy.deepcopy(config))


# -- every "auto" ------------------------------------------------------------------------------------------------------------

EVERY_AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": "auto", "initial_scale_power": "auto", "hysteresis": "auto"},
    "torch_autocast": {"enabled": "auto", "dtype": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
    "zero_optimization": {
        "stage": "auto",
        "overlap_comm": "auto",
        "contiguous_gradients": "auto",
        "reduce_bucket_size": "auto",
        "allgather_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": "auto",
        "stage3_gather_16bit_weights_on_model_save": "auto",
        "sub_group_size": "auto",
        "offload_optimizer": {"device": "auto", "pin_memory": "auto", "nvme_path": "auto"},
        "offload_param": {"device": "auto", "nvme_path": "auto"},
    },
    "zero_allow_untested_optimizer": "auto",
    "zero_force_ds_cpu_optimizer": "auto",
    "steps_per_print": "auto",
    "wall_clock_breakdown": "auto",
    "aio": {"block_size": "auto"},
}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_every_auto_is_decided(stage, precision):
    """Each by a source of its own, and all of them seen by DeepSpeed."""
    config = resolved(
        EVERY_AUTO,
        {"zero_stage": stage},
        precision=precision,
        accumulation_steps=3,
        max_grad_norm=0.5,
        hidden_size=20,
        **{**DUMMY, **DummyOptim([], lr=0.1, weight_decay=0.2, betas=(0.8, 0.9), eps=1e-6).facts()},
        **DummyScheduler(None, total_num_steps=50, warmup_num_steps=5).facts(),
    )
    seen = taken(config)
    assert (seen.train_batch_size, seen.train_micro_batch_size_per_gpu, seen.gradient_accumulation_steps) == (12, 4, 3)
    assert (seen.gradient_clipping, seen.zero_optimization_stage) == (0.5, stage)
    assert (seen.bfloat16_config.enabled, seen.float16_config.enabled) == (precision == "bf16", False)
    assert seen.optimizer_params == {
        "lr": 0.1,
        "betas": [0.8, 0.9],
        "eps": 1e-6,
        "weight_decay": 0.2,
        "torch_adam": True,
    }
    assert seen.scheduler_params == {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.1,
        "warmup_num_steps": 5,
        "total_num_steps": 50,
    }
    assert seen.zero_config.reduce_bucket_size == 400
    assert seen.zero_config.prefetch_bucket_size == (360 if stage == 3 else 50_000_000)
    assert seen.zero_config.param_persistence_threshold == (200 if stage == 3 else 100_000)


def test_the_same_document_with_offload():
    options = {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu"}
    seen = taken(resolved(EVERY_AUTO, options, **DUMMY, config_scheduler=True, total_num_steps=9))
    assert (seen.zero_config.offload_optimizer.device, seen.zero_config.offload_param.device) == ("cpu", "cpu")
    assert seen.zero_force_ds_cpu_optimizer is False  # torch's AdamW, on the CPU


def test_an_auto_that_nothing_can_know_is_refused():
    with pytest.raises(
        ConfigurationError,
        match=r'hf_ds_config: zero_optimization.leaf_module.classes="auto" isn\'t known from anywhere',
    ):
        resolved({"zero_optimization": {"stage": 3, "leaf_module": {"classes": "auto"}}})
    assert resolved({"data_types": {"keep_in_fp32_modules": "auto"}})["data_types"] == {"keep_in_fp32_modules": "auto"}


def test_sizes_of_buckets_never_exceed_the_model():
    zero = resolved(None, {"zero_stage": 3})["zero_optimization"]
    assert zero == {
        "stage": 3,
        "reduce_bucket_size": 1000,
        "stage3_prefetch_bucket_size": 1000,
        "stage3_param_persistence_threshold": 10,
    }


# -- generated ---------------------------------------------------------------------------------------------------------------


@given(
    stage=st.sampled_from([0, 1, 2, 3]),
    offload=st.sampled_from(["none", "cpu"]),
    param=st.sampled_from(["none", "cpu"]),
    steps=st.integers(1, 64),
    micro=st.integers(1, 512),
    norm=st.none() | st.floats(0, 100),
    precision=st.sampled_from(["no", "bf16"]),
    autocast=st.booleans(),
    hidden=st.none() | st.integers(1, 4096),
    count=st.integers(0, 10**11),
    dummies=st.booleans(),
    total=st.none() | st.integers(10, 10**6),
    warmup=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_whatever_is_generated_is_taken_by_deepspeed(
    stage, offload, param, steps, micro, norm, precision, autocast, hidden, count, dummies, total, warmup
):
    options = {"zero_stage": stage, "offload_optimizer_device": offload, "offload_param_device": param}
    given_facts = {
        "accumulation_steps": steps,
        "micro_batch_size": micro,
        "max_grad_norm": norm,
        "precision": precision,
        "hidden_size": hidden,
        "parameter_count": count,
    }
    if dummies:
        given_facts |= {**DUMMY, "config_scheduler": True, "total_num_steps": total, "warmup_num_steps": warmup}
    try:
        config = resolved(None, {**options, "torch_autocast": autocast}, **given_facts)
    except DrivetrainError:
        assert (offload != "none" and stage == 0) or (param != "none" and stage < 3) or (autocast and precision == "no")
        return
    seen = taken(config)
    assert seen.train_batch_size == micro * steps
    assert seen.gradient_clipping == (norm or 0)
    assert seen.zero_optimization_stage == stage
    assert seen.torch_autocast_enabled is autocast
    assert seen.bfloat16_config.enabled is (precision == "bf16" and not autocast)
    if dummies:
        assert (seen.optimizer_name, seen.optimizer_params["torch_adam"]) == ("adamw", True)
        assert seen.scheduler_name == ("WarmupLR" if total is None else "WarmupDecayLR")


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "train_batch_size": st.integers(1, 64) | st.just("auto"),
            "train_micro_batch_size_per_gpu": st.integers(1, 8) | st.just("auto"),
            "gradient_accumulation_steps": st.integers(1, 4) | st.just("auto"),
        },
    ),
    st.none() | st.integers(1, 8),
    st.integers(1, 4),
    st.integers(1, 4),
)
@settings(max_examples=300, deadline=None)
def test_rows_per_step_have_one_value_or_are_refused(document, loader, steps, world):
    said = {name: value for name, value in document.items() if value != "auto"}
    micro = said.get("train_micro_batch_size_per_gpu", loader)
    total = said.get("train_batch_size")
    if micro is None and total is not None and total % (steps * world) == 0:
        micro = total // (steps * world)
    right = (
        micro is not None
        and said.get("gradient_accumulation_steps", steps) == steps
        and loader in (None, micro)
        and total in (None, micro * steps * world)
    )
    try:
        config = resolved(document, world_size=world, accumulation_steps=steps, micro_batch_size=loader)
    except ConfigurationError:
        assert not right
        return
    assert right
    assert (config["train_batch_size"], config["train_micro_batch_size_per_gpu"]) == (micro * steps * world, micro)


@given(
    said=st.sampled_from([True, False, "auto", None]),
    name=st.sampled_from(["bf16", "fp16"]),
    precision=st.sampled_from(["no", "bf16"]),
)
@settings(max_examples=40, deadline=None)
def test_precision_has_one_value_or_is_refused(said, name, precision):
    document = {} if said is None else {name: {"enabled": said}}
    right = said in ("auto", None) or said is (precision == name)
    try:
        config = resolved(document, precision=precision)
    except ConfigurationError as error:
        assert not right
        assert "contradict each other" in str(error)
        return
    assert right
    assert config.get("bf16", {"enabled": False})["enabled"] is (precision == "bf16")


def test_micro_batch_of_loaders():
    assert DeepSpeedPlugin().is_train_batch_min is True
    assert (micro_batch_of([8, 2]), micro_batch_of([8, 2], smallest=False), micro_batch_of([])) == (2, 8, None)


# -- refused -----------------------------------------------------------------------------------------------------------------

#: Document, options, facts; what the error says.
REFUSED = {
    "unknown key": (
        ({"zero_optimisation": {}},),
        "no setting 'zero_optimisation', and would ignore it. Did you mean 'zero_optimization'",
    ),
    "unknown key in a section": (
        ({"zero_optimization": {"reduce_bucket_sise": 1}},),
        "'reduce_bucket_sise' in zero_optimization. Did you mean 'reduce_bucket_size'",
    ),
    "unknown key two sections deep": (
        ({"zero_optimization": {"offload_param": {"devise": "cpu"}}},),
        "'devise' in zero_optimization.offload_param. Did you mean 'device'",
    ),
    "unknown key of a plain section": (
        ({"aio": {"blok_size": 1}},),
        "'blok_size' in aio, and would ignore it. Did you mean 'block_size'",
    ),
    "wrong type": (({"zero_optimization": {"overlap_comm": "perhaps"}},), "zero_optimization.overlap_comm='perhaps'"),
    "wrong type of a plain setting": (({"wall_clock_breakdown": 3},), "wall_clock_breakdown=3: expected true or false"),
    "text for a number": (({"prescale_gradients": "yes"},), "prescale_gradients='yes': expected true or false"),
    "wrong batch": (({"train_batch_size": 1.5},), "train_batch_size=1.5: expected a whole number above 0"),
    "a switch for a section": (({"bf16": True},), r"bf16 is a section, for example {\"enabled\": true}, not True"),
    "removed": (({"amp": {"enabled": True}},), "Apex AMP integration has been removed"),
    "old spelling": (
        ({"zero_optimization": {"cpu_offload": True}},),
        "cpu_offload is an old spelling of offload_optimizer",
    ),
    "two names": (
        ({"zero_optimization": {"stage": 3, "prefetch_bucket_size": 1, "stage3_prefetch_bucket_size": 1}},),
        "which are one setting",
    ),
    "stage 3 alone": (
        ({"zero_optimization": {"stage": 2, "stage3_max_live_parameters": 5}},),
        "stage3_max_live_parameters=5 has an effect at stage 3 alone, and the stage is 2",
    ),
    "nothing says the batch": (
        ({"train_batch_size": "auto"}, {}, {"micro_batch_size": None}),
        "give prepare\\(\\) the training data loader",
    ),
    "loader and document": (
        ({"train_micro_batch_size_per_gpu": 9},),
        "hf_ds_config: train_micro_batch_size_per_gpu=9 and the batch size 4 of the data loader",
    ),
    "batch identity": (
        ({"train_batch_size": 9},),
        "train_batch_size=9 contradicts train_micro_batch_size_per_gpu=4 x gradient_accumulation_steps=1 x 1 processes = 4",
    ),
    "rest": (
        ({"train_batch_size": 9}, {}, {"micro_batch_size": None, "world_size": 2}),
        "can't be divided into 2 processes of 1 micro-batches",
    ),
    "steps": (
        ({"gradient_accumulation_steps": 2},),
        "hf_ds_config: gradient_accumulation_steps=2 and the Accelerator's gradient_accumulation_steps=1",
    ),
    "norms": (
        (None, {"gradient_clipping": 1.0}, {"max_grad_norm": 0.5}),
        "DeepSpeedPlugin.gradient_clipping=1.0 and the norm 0.5",
    ),
    "disk below stage 3": (
        (
            None,
            {"zero_stage": 2, "offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": tempfile.gettempdir()},
        ),
        "at stage 2: DeepSpeed keeps optimizer state on a disk at stage 3 alone",
    ),
    "rounded on disk": (
        (None, {"zero_stage": 3, "offload_param_device": "nvme", "offload_param_nvme_path": "/"}),
        "rounds the parameters",
    ),
    "autocast to nothing": ((None, {"torch_autocast": True}), "torch_autocast needs mixed_precision"),
    "autocast and conversion": (
        ({"bf16": {"enabled": True}}, {"torch_autocast": True}, {"precision": "bf16"}),
        "bf16.enabled=True and torch_autocast for bf16",
    ),
    "autocast in another dtype": (
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, {}, {"precision": "bf16"}),
        "torch_autocast.dtype='float16' and mixed_precision='bf16'",
    ),
    "fp16 on the CPU": ((None, {}, {"precision": "fp16"}), "DeepSpeed doesn't train in it on this cpu device"),
    "two optimizers": (
        ({"optimizer": {"type": "AdamW"}},),
        "prepare\\(\\) was given an optimizer, too. Give prepare\\(\\) a DummyOptim",
    ),
    "two schedulers": (
        ({"scheduler": {"type": "WarmupLR"}}, {}, {"client_scheduler": True}),
        "Give prepare\\(\\) a DummyScheduler",
    ),
    "optimizer without a type": (({"optimizer": {}}, {}, DUMMY), "needs a type"),
    "no such optimizer": (
        ({"optimizer": {"type": "AdamV"}}, {}, DUMMY),
        "'AdamV' is neither DeepSpeed's nor torch's. Did you mean 'Adam'",
    ),
    "no such parameter": (
        ({"optimizer": {"type": "SGD", "params": {"momentun": 1}}}, {}, DUMMY),
        "SGD has no parameter 'momentun'. Did you mean 'momentum'",
    ),
    "parameter of the other Adam": (
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, {}, DUMMY),
        'DeepSpeed\'s own Adam is used with "torch_adam": false',
    ),
    "two rates": (
        ({"optimizer": {"type": "AdamW", "params": {"lr": 0.3}}}, {}, {**DUMMY, "learning_rate": 0.1}),
        "DummyOptim's lr=0.1 and hf_ds_config: optimizer.params.lr=0.3",
    ),
    "a norm in the optimizer": (
        ({"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1}}}, {}, DUMMY),
        "write it as gradient_clipping",
    ),
    "CPU Adam without offload": (
        ({"optimizer": {"type": "DeepSpeedCPUAdam"}}, {}, DUMMY),
        "computes on the CPU, and optimizer state is not offloaded. Use FusedAdam",
    ),
    "no total": (
        ({"scheduler": {"type": "WarmupCosineLR"}}, {}, {"config_scheduler": True}),
        "total_num_steps isn't known: give prepare\\(\\) DummyScheduler",
    ),
    "no such scheduler": (
        ({"scheduler": {"type": "WarmUpLR"}},),
        "'WarmUpLR' is no scheduler of DeepSpeed. Did you mean 'WarmupLR'",
    ),
    "torch's scheduler": (
        ({"scheduler": {"type": "StepLR", "params": {"step_size": 1}}, "zero_optimization": {"stage": 1}},),
        "can't follow the engine's own optimizer",
    ),
    "no effect of the total": (
        ({"scheduler": {"type": "WarmupLR"}}, {}, {"config_scheduler": True, "total_num_steps": 5}),
        "total_num_steps=5 has no effect",
    ),
    "two totals": (
        (
            {"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 6}}},
            {},
            {"config_scheduler": True, "total_num_steps": 5},
        ),
        "DummyScheduler's total_num_steps=5 and hf_ds_config: scheduler.params.total_num_steps=6",
    ),
    "no warm-up from below": (
        (
            {
                "scheduler": {
                    "type": "WarmupLR",
                    "params": {"warmup_num_steps": 0, "warmup_min_lr": 0.0, "warmup_max_lr": 0.1},
                }
            },
        ),
        "warm up for at least two steps",
    ),
    "loaders": (({"dataloader_drop_last": True},), "say drop_last=True there"),
    "tuning": (({"autotuning": {"enabled": True}},), "drivetrain plan --backend deepspeed"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_what_to_do(case):
    (document, options, changes), message = (*REFUSED[case][0], None, None)[:3], REFUSED[case][1]
    with pytest.raises((ConfigurationError, UnsupportedError), match=message):
        resolved(document, options or {}, **(changes or {}))


# -- optimizers and schedulers -------------------------------------------------------------------------------------------------


def test_adam_compiles_nothing_unless_it_is_asked_to():
    offload = {"zero_stage": 2, "offload_optimizer_device": "cpu"}
    cases = [
        (None, {}, {"torch_adam": True}, False),
        (
            {"type": "Adam", "params": {"adam_w_mode": False, "amsgrad": True}},
            {},
            {"torch_adam": True, "adam_w_mode": False, "amsgrad": True},
            False,
        ),
        ({"type": "FusedAdam"}, {}, {"torch_adam": False}, True),
        (
            {"type": "AdamW", "params": {"torch_adam": False, "bias_correction": False}},
            {},
            {"torch_adam": False, "bias_correction": False},
            True,
        ),
        ({"type": "AdamW"}, offload, {"torch_adam": True}, False),
        ({"type": "DeepSpeedCPUAdam"}, offload, {"torch_adam": False}, True),
    ]
    for section, options, params, forced in cases:
        config = resolved(
            {} if section is None else {"optimizer": section, "zero_optimization": {"stage": "auto"}}, options, **DUMMY
        )
        assert params.items() <= config["optimizer"]["params"].items()
        assert config["optimizer"]["type"] in ("AdamW", "Adam")
        assert config["zero_force_ds_cpu_optimizer"] is forced
        taken(config)


def test_optimizers_of_the_script_stay_what_they_are():
    config = resolved(None, {"zero_stage": 2, "offload_optimizer_device": "cpu"})
    assert "optimizer" not in config
    assert (config["zero_force_ds_cpu_optimizer"], config["zero_allow_untested_optimizer"]) == (False, True)


def test_a_model_without_optimizer_needs_no_stage_that_shards_one():
    none = {"client_optimizer": False}
    config = resolved({**EVERY_AUTO}, {"zero_stage": 2, "offload_optimizer_device": "cpu"}, **none)
    assert config["zero_optimization"]["stage"] == 0
    assert not {"optimizer", "scheduler"} & set(config)
    assert "offload_optimizer" not in config["zero_optimization"]
    assert resolved(None, {"zero_stage": 3}, **none)["zero_optimization"]["stage"] == 3


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"])
@pytest.mark.parametrize("warmup", [0, 4])
def test_rates_of_schedules(kind, warmup):
    """What DeepSpeed's class makes of the section: without a warm-up the first step has the full rate."""
    import torch
    from deepspeed.runtime import lr_schedules

    changes = {**DUMMY, "config_scheduler": True, "learning_rate": 0.1, "warmup_num_steps": warmup}
    if kind != "WarmupLR":
        changes["total_num_steps"] = 20
    start = "warmup_min_ratio" if kind == "WarmupCosineLR" else "warmup_min_lr"
    params = {start: "auto", "warmup_num_steps": "auto", "warmup_type": "linear"}
    if kind == "WarmupDecayLR":  # its default would be 0.001, whatever the optimizer's rate is
        params["warmup_max_lr"] = "auto"
    config = resolved({"scheduler": {"type": kind, "params": params}}, **changes)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=config["optimizer"]["params"]["lr"])
    scheduler = getattr(lr_schedules, kind)(optimizer, **config["scheduler"]["params"])
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"])
        scheduler.step()
    assert max(rates) == pytest.approx(0.1, rel=0.02)  # a cosine has begun to fall
    assert (rates[1] == pytest.approx(0.1, rel=0.02)) is (warmup == 0)


def test_a_schedule_of_the_document_is_driven_without_a_placeholder():
    config = resolved({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5, "warmup_max_lr": 0.1}}})
    assert config["scheduler"]["params"] == {"warmup_num_steps": 5, "warmup_max_lr": 0.1}
    taken(config)
