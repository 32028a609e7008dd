"""Plans of ZeRO's stages: their configurations are DeepSpeed's, and what they predict follows from what is divided."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from deepspeed.runtime.config import DeepSpeedConfig

from drivetrain.cli import main
from drivetrain.interfaces import TrainingRequest
from drivetrain.memory import Hardware, known_hardware, make_plans, profile_of_counts
from drivetrain_deepspeed.checking import check_document
from drivetrain_deepspeed.config import Facts, resolve
from drivetrain_deepspeed.options import DeepSpeedPlugin
from drivetrain_deepspeed.sizes import Sizes
from drivetrain_deepspeed.zero_memory import ZeroMemory

COUNTS = {"parameters": 9e8, "layers": 16, "hidden": 2048, "sequence": 512}
#: Before it are the command's own words.
MODEL = ["--params", "9e8", "--layers", "16", "--hidden", "2048", "--seq", "512"]


def plans(precision="bf16", **changes):
    profile = profile_of_counts(**COUNTS, precision=precision)
    request = TrainingRequest(batch_size=32, micro_batches=(1, 2), recompute=("none", "all"), **changes)
    return make_plans(profile, known_hardware("a100-80gb", devices=8), request, backend="deepspeed").plans


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_each_plan_has_a_configuration_that_deepspeed_takes(precision):
    found = plans(precision)
    special = {"ZeRO 1, large buckets", "ZeRO 2, large buckets", "ZeRO 3, parameters kept"}
    assert {p.strategy for p in found} == {"ZeRO 0", "ZeRO 1", "ZeRO 2", "ZeRO 3"} | special
    assert {p.offloaded for p in found} == {(), ("optimizer", "gradients"), ("parameters", "optimizer", "gradients")}
    seen = {json.dumps(p.options): p for p in found}
    for plan in seen.values():
        document = plan.options["hf_ds_config"]
        check_document(document, "plan")
        alone = {**document, "train_batch_size": document["train_batch_size"] // 8}  # this process is alone
        config = DeepSpeedConfig(json.loads(json.dumps(alone)))
        assert config.zero_optimization_stage == int(plan.strategy[5])
        assert config.bfloat16_config.enabled is (precision == "bf16")
        assert document["train_batch_size"] == 32 == plan.micro_batch * plan.accumulation * 8
        assert (config.zero_config.offload_optimizer is not None) is ("optimizer" in plan.offloaded)


def test_the_backend_takes_what_was_planned():
    for plan in plans("bf16", offload=False):
        options = DeepSpeedPlugin(**plan.options)
        facts = Facts(
            world_size=8, micro_batch_size=plan.micro_batch, accumulation_steps=plan.accumulation, precision="bf16"
        )
        config = resolve(options, facts)
        assert config["zero_optimization"].items() >= plan.options["hf_ds_config"]["zero_optimization"].items()
        assert options.settings()["gradient_accumulation_steps"][0] == plan.accumulation


def test_precisions_that_deepspeed_does_not_have_have_no_plans():
    assert plans("pure-bf16") == ()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_what_is_divided_by_hand(stage, devices):
    """Adam in bf16: 2 bytes of weights, 4 of fp32 copies, 8 of state."""
    profile = profile_of_counts(**COUNTS, precision="bf16")
    hardware = Hardware(name="toy", memory=10**12, devices=devices, devices_per_machine=8)
    memory = ZeroMemory(profile, hardware, stage=stage, offload=(), sizes=Sizes(bucket=1000, persistent=0))
    _, held = memory.peak(profile.timelines["none"], samples=1, accumulation=1)
    count = profile.parameter_count
    assert held["parameters"] == pytest.approx(2 * count / (devices if stage == 3 else 1))
    assert held["optimizer"] == pytest.approx(12 * count / devices)
    assert held["communication"] == 2000


def test_offload_moves_state_to_the_host():
    by_place = {
        p.offloaded: p for p in plans() if p.strategy == "ZeRO 3" and p.recompute == "none" and p.micro_batch == 1
    }
    here, optimizer, everything = (by_place[k] for k in sorted(by_place, key=len))
    assert (here.host_bytes, optimizer.memory_bytes["optimizer"], everything.memory_bytes["parameters"]) == (0, 0, 0)
    assert everything.host_bytes > optimizer.host_bytes > here.memory_bytes["optimizer"] * 0.99
    assert here.peak_bytes > optimizer.peak_bytes > everything.peak_bytes


def test_the_command_writes_a_file_for_deepspeed_and_one_for_drivetrain(tmp_path):
    command = [
        "plan",
        *MODEL,
        "--devices",
        "8",
        "--accelerator",
        "a100-80gb",
        "--precision",
        "bf16",
        "--batch",
        "32",
        "--backend",
        "deepspeed",
    ]
    for name in ("ds.json", "drivetrain.toml", "ds2.json"):
        result = CliRunner().invoke(main, [*command, "--output", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "ds.json").read_text())
    check_document(written, "ds.json")
    assert written["train_batch_size"] == 32
    from drivetrain.config import read_config_file

    file = read_config_file(tmp_path / "drivetrain.toml")
    assert file.core["backend"] == "deepspeed"
    assert file.section("deepspeed")["hf_ds_config"] == written


def test_backends_without_a_file_of_their_own_say_so(tmp_path):
    result = CliRunner().invoke(
        main, ["plan", *MODEL, "--batch", "1", "--device-memory", "80GB", "--output", str(tmp_path / "x.json")]
    )
    assert result.exit_code != 0
    assert "'single' has no file of its own. Give a name that ends in .toml" in result.output
