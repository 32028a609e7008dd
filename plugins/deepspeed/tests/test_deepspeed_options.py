"""Every way in, and one value per setting: what can be said without DeepSpeed."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

from drivetrain.errors import ConfigurationError, UnsupportedError
from drivetrain_deepspeed.document import read_document
from drivetrain_deepspeed.dummies import DummyOptim, DummyScheduler
from drivetrain_deepspeed.options import DeepSpeedPlugin

STAGE_3 = {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "gradient_clipping": 0.5}


def as_file(folder, text):
    path = folder / "ds.json"
    path.write_text(text)
    return path


WAYS = {
    "dict": lambda folder: STAGE_3,
    "path": lambda folder: as_file(folder, json.dumps(STAGE_3)),
    "path as text": lambda folder: str(as_file(folder, json.dumps(STAGE_3))),
    "comments": lambda folder: as_file(folder, "# ours\n" + json.dumps(STAGE_3)[:-1] + ",\n// and\n}"),
    "json": lambda folder: json.dumps(STAGE_3),
    "base64": lambda folder: base64.urlsafe_b64encode(json.dumps(STAGE_3).encode()).decode(),
    "object": lambda folder: SimpleNamespace(config=STAGE_3),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_in_says_the_same(way, tmp_path):
    options = DeepSpeedPlugin(hf_ds_config=WAYS[way](tmp_path))
    assert options.deepspeed_config == STAGE_3
    assert (options.zero_stage, options.offload_param_device, options.gradient_clipping) == (3, "cpu", 0.5)


def test_the_document_is_a_copy():
    options = DeepSpeedPlugin(hf_ds_config=STAGE_3)
    options.deepspeed_config["zero_optimization"]["stage"] = 1
    assert STAGE_3["zero_optimization"]["stage"] == 3


def test_typed_options_without_a_document():
    options = DeepSpeedPlugin(None, 4, 1.0, 3, transformer_moe_cls_names="Experts, Router", offload_param_device=None)
    assert options.explicit()["transformer_moe_cls_names"] == ["Experts", "Router"]
    assert options.offload_param_device == "none"
    assert options.settings() == {"gradient_accumulation_steps": (4, "DeepSpeedPlugin.gradient_accumulation_steps")}


def test_what_a_document_leaves_open_is_taken_from_the_options():
    document = {"zero_optimization": {"stage": "auto"}, "gradient_clipping": "auto"}
    assert DeepSpeedPlugin(hf_ds_config=document, zero_stage=1, gradient_clipping=2).value_of("zero_stage") == 1
    assert DeepSpeedPlugin(hf_ds_config=document).value_of("zero_stage") == 2  # the options' default
    assert (
        DeepSpeedPlugin(hf_ds_config={"gradient_clipping": 1.0}).zero_stage == 0
    )  # DeepSpeed's: a document without the section


#: Field, value of the field, document that says something else, name of that place.
CONTRADICTIONS = [
    ("zero_stage", 2, {"zero_optimization": {"stage": 3}}, "zero_optimization.stage=3"),
    ("gradient_accumulation_steps", 2, {"gradient_accumulation_steps": 4}, "gradient_accumulation_steps=4"),
    ("gradient_clipping", 1.0, {"gradient_clipping": 0.5}, "gradient_clipping=0.5"),
    ("train_micro_batch_size_per_gpu", 2, {"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu=4"),
    (
        "offload_optimizer_device",
        "none",
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        "zero_optimization.offload_optimizer.device='cpu'",
    ),
    (
        "offload_param_device",
        "none",
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        "zero_optimization.offload_param.device='cpu'",
    ),
    (
        "offload_optimizer_nvme_path",
        "/a",
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/b"}}},
        "zero_optimization.offload_optimizer.nvme_path='/b'",
    ),
    (
        "offload_param_nvme_path",
        "/a",
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/b"}}},
        "zero_optimization.offload_param.nvme_path='/b'",
    ),
    (
        "zero3_save_16bit_model",
        False,
        {"zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}},
        "zero_optimization.stage3_gather_16bit_weights_on_model_save=True",
    ),
    (
        "transformer_moe_cls_names",
        ["A"],
        {"zero_optimization": {"stage": 3, "leaf_module": {"classes": ["B"]}}},
        "zero_optimization.leaf_module.classes=['B']",
    ),
    ("torch_autocast", False, {"torch_autocast": {"enabled": True}}, "torch_autocast.enabled=True"),
]


@pytest.mark.parametrize(("field", "value", "document", "place"), CONTRADICTIONS, ids=[c[0] for c in CONTRADICTIONS])
def test_two_values_of_one_setting_name_both_places(field, value, document, place, tmp_path):
    path = str(as_file(tmp_path, json.dumps(document)))
    with pytest.raises(ConfigurationError) as caught:
        DeepSpeedPlugin(hf_ds_config=path, **{field: value})
    assert f"DeepSpeedPlugin.{field}={value!r} and {path}: {place} contradict each other" in str(caught.value)
    said = getattr(DeepSpeedPlugin(hf_ds_config=path), field)
    assert (
        DeepSpeedPlugin(hf_ds_config=path, **{field: said}).value_of(field) == said
    )  # twice the same is no contradiction


def test_values_that_were_changed_later_count():
    options = DeepSpeedPlugin(hf_ds_config=STAGE_3)
    options.deepspeed_config["gradient_clipping"] = 2.0  # as scripts do
    assert options.value_of("gradient_clipping") == 2.0
    options.gradient_clipping = 1.0
    with pytest.raises(ConfigurationError, match=r"gradient_clipping=1\.0 and hf_ds_config: gradient_clipping=2\.0"):
        options.value_of("gradient_clipping")


REFUSED = {
    "no such file": ({"hf_ds_config": "nowhere.json"}, "'nowhere.json': there is no such file"),
    "not JSON": ({"hf_ds_config": '{"a": [}'}, "hf_ds_config is not JSON"),
    "not an object": ({"hf_ds_config": [1]}, "hf_ds_config"),
    "a key twice": ({"hf_ds_config": '{"bf16": {}, "bf16": {}}'}, "'bf16' stands there twice"),
    "a section twice": ({"hf_ds_config": {"bf16": {}, "bfloat16": {}}}, "both 'bf16' and 'bfloat16'"),
    "type in the document": (
        {"hf_ds_config": {"zero_optimization": {"stage": 7}}},
        r"hf_ds_config: DeepSpeedPlugin: .* `\$.zero_stage`",
    ),
    "type": ({"zero_stage": "three"}, "zero_stage"),
    "no folder": ({"offload_optimizer_device": "nvme"}, "say in which folder, with offload_optimizer_nvme_path"),
    "folder without a disk": ({"offload_optimizer_nvme_path": "/a"}, "offload_optimizer_nvme_path='/a' has no effect"),
    "param below 3": ({"offload_param_device": "cpu"}, "offload_param_device='cpu' needs zero_stage=3"),
    "init below 3": ({"zero3_init_flag": True}, "zero3_init_flag=True needs zero_stage=3"),
    "save below 3": ({"zero3_save_16bit_model": True, "zero_stage": 1}, "needs zero_stage=3, where .* here it is 1"),
    "offload at 0": ({"zero_stage": 0, "offload_optimizer_device": "cpu"}, "needs zero_stage 1, 2 or 3"),
    "no steps": ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps=0 must be 1 or more"),
    "negative norm": ({"gradient_clipping": -1}, "gradient_clipping=-1 must be 0 or more"),
    "msamp": ({"enable_msamp": True}, "MS-AMP"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_what_to_do(case):
    given, message = REFUSED[case]
    with pytest.raises((ConfigurationError, UnsupportedError), match=message):
        DeepSpeedPlugin(**given)


def test_reading_imports_neither_torch_nor_deepspeed():
    code = (
        "import sys; from drivetrain_deepspeed.options import DeepSpeedPlugin; import drivetrain_deepspeed.dummies\n"
        "DeepSpeedPlugin(hf_ds_config={'zero_optimization': {'stage': 3}})\n"
        "assert not {'torch', 'deepspeed'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_documents_of_other_types_are_refused():
    with pytest.raises(ConfigurationError, match="takes a path, a dict, JSON or JSON in base64, not a int"):
        read_document(3)


# -- placeholders ----------------------------------------------------------------------------------------------------------


def test_placeholders_are_exported():
    from drivetrain.utils import DeepSpeedPlugin as Plugin
    from drivetrain.utils import DummyOptim as Optim
    from drivetrain.utils import DummyScheduler as Scheduler

    assert (Plugin, Optim, Scheduler) == (DeepSpeedPlugin, DummyOptim, DummyScheduler)


def test_placeholders_say_what_they_were_given():
    optim = DummyOptim([], lr=0.1, betas=(0.9, 0.95))
    assert optim.facts() == {"config_optimizer": True, "learning_rate": 0.1, "betas": (0.9, 0.95)}
    assert DummyOptim([]).lr == 0.001
    assert DummyScheduler(optim).facts() == {"config_scheduler": True, "warmup_num_steps": 0}
    assert DummyScheduler(optim, lr_scheduler_callable=print).facts() == {"client_scheduler": True}


@pytest.mark.parametrize("make", [lambda: DummyOptim([], momentum=0.9), lambda: DummyScheduler(None, warmup_steps=1)])
def test_placeholders_refuse_what_they_would_ignore(make):
    with pytest.raises(ConfigurationError, match="Write it into the DeepSpeed configuration"):
        make()


# -- settings of the Accelerator ---------------------------------------------------------------------------------------------


def planned(monkeypatch, environ=(), **arguments):
    for name, value in dict(environ).items():
        monkeypatch.setenv(name, value)
    from drivetrain._engine.plan import Arguments
    from drivetrain._engine.resolve import resolve
    from drivetrain._plugins import get_registry
    from drivetrain.testing.catalog import devices

    registry = get_registry()
    return resolve(
        Arguments.collect(cpu=True, **arguments),
        registry=registry,
        environ=dict(environ),
        availability=devices(registry),
    )


DOCUMENT = {"gradient_accumulation_steps": 4, "bf16": {"enabled": True}}


@pytest.mark.parametrize(
    "document", [DOCUMENT, {**DOCUMENT, "bf16": {}, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}]
)
@pytest.mark.parametrize("backend", [{}, {"backend": "deepspeed"}])
def test_the_accelerator_takes_what_only_the_document_says(monkeypatch, backend, document):
    plan = planned(monkeypatch, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=document), **backend)
    assert (plan.settings.gradient_accumulation_steps, plan.precision.name) == (4, "bf16")
    assert str(plan.origins["gradient_accumulation_steps"]) == "hf_ds_config: gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        (
            {"gradient_accumulation_steps": 2},
            {},
            r"gradient_accumulation_steps=2 \(argument\) and hf_ds_config: gradient_accumulation_steps=4",
        ),
        (
            {},
            {"DRIVETRAIN_GRADIENT_ACCUMULATION_STEPS": "2"},
            r"=2 \(DRIVETRAIN_GRADIENT_ACCUMULATION_STEPS\) and hf_ds_config",
        ),
        ({"mixed_precision": "fp16"}, {}, r"mixed_precision='fp16' \(argument\) and hf_ds_config: bf16.enabled='bf16'"),
    ],
)
def test_a_contradiction_with_the_accelerator_names_both_places(monkeypatch, arguments, environ, message):
    with pytest.raises(ConfigurationError, match=message):
        planned(monkeypatch, environ, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=DOCUMENT), **arguments)


def test_a_contradiction_with_a_variable_names_it(monkeypatch):
    with pytest.raises(
        ConfigurationError, match=r"zero_optimization.stage=3 .* \(zero_stage: DRIVETRAIN_DEEPSPEED_ZERO_STAGE\)"
    ):
        planned(
            monkeypatch,
            {"DRIVETRAIN_DEEPSPEED_ZERO_STAGE": "1"},
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=STAGE_3),
        )


def test_variables_configure_an_accelerator_without_arguments(monkeypatch, tmp_path):
    path = as_file(tmp_path, json.dumps({**DOCUMENT, "zero_optimization": {"stage": 1}}))
    environ = {"DRIVETRAIN_BACKEND": "deepspeed", "DRIVETRAIN_DEEPSPEED_HF_DS_CONFIG": str(path)}
    plan = planned(monkeypatch, environ)
    assert plan.options["DeepSpeedPlugin"].zero_stage == 1
    assert plan.settings.gradient_accumulation_steps == 4


def test_variables_of_accelerate_are_told_with_their_counterparts(monkeypatch):
    plan = planned(monkeypatch, {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true"})
    (note,) = [n for n in plan.notes if "ACCELERATE" in n]
    assert "ACCELERATE_DEEPSPEED_ZERO_STAGE (use DRIVETRAIN_DEEPSPEED_ZERO_STAGE)" in note
    assert "ACCELERATE_DEEPSPEED_ZERO3_INIT (use DRIVETRAIN_DEEPSPEED_ZERO3_INIT_FLAG)" in note
