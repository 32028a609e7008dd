"""`drivetrain plan`: counts, configurations, traced models; tables and JSON."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from drivetrain.cli import main

COUNTS = ("--params", "1.3e9", "--layers", "24", "--hidden", "2048", "--seq", "1024", "--precision", "bf16")

MODEL = """
import torch

def parts():
    block = lambda: torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    return torch.nn.Sequential(*(block() for _ in range(3))), (torch.zeros(4, 64), torch.zeros(4, 64))

def alone():
    return parts()[0]

def with_loss():
    return *parts(), lambda model, batch: (model(batch[0]) - batch[1]).abs().mean()

def nothing():
    return 7
"""


@pytest.fixture
def models(tmp_path, monkeypatch):
    (tmp_path / "planned_models.py").write_text(MODEL)
    monkeypatch.syspath_prepend(tmp_path)
    return "planned_models"


def run(*arguments):
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def data(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.output)


def test_small_models_keep_all_they_can_and_large_ones_are_sharded():
    devices = ("--devices", "8", "--accelerator", "a100-80gb", "--batch", "64")
    small = data(*COUNTS, *devices)
    assert (small["best"]["recompute"], small["best"]["offloaded"], small["best"]["accumulation"]) == ("none", [], 1)
    assert all(c["fits"] for c in small["candidates"] if c["backend"] == "ddp")
    large = ("--params", "13e9", "--layers", "40", "--hidden", "5120", "--seq", "1024", "--precision", "bf16")
    sharded = data(*large, *devices)["best"]
    assert sharded["backend"] in ("fsdp", "deepspeed")
    assert not any(c["fits"] for c in data(*large, *devices)["candidates"] if c["backend"] == "ddp")
    assert sharded["micro_batch"] * sharded["accumulation"] * 8 == 64
    assert sharded["peak_bytes"] <= 72e9
    assert sharded["peak_bytes"] == sum(sharded["memory_bytes"].values())


def test_what_may_not_be_changed_isnt():
    devices = ("--devices", "4", "--device-memory", "16GB", "--batch", "16")
    found = data(*COUNTS, *devices, "--no-recompute", "--no-offload", "--micro-batch", "2", "--backend", "fsdp")
    assert {c["backend"] for c in found["candidates"]} == {"fsdp"}
    assert {c["micro_batch"] for c in found["candidates"]} == {2}
    assert {c["recompute"] for c in found["candidates"]} == {"none"}
    assert not any(c["offloaded"] for c in found["candidates"])
    assert found["budget"] == pytest.approx(14.4e9)


def test_nothing_fits():
    result = run(*COUNTS, "--device-memory", "8GB", "--accelerator", "t4", "--no-offload")
    assert result.exit_code == 1
    assert "nothing fits in 7.2 GB per device (8.0 GB less 10%)" in result.output


def test_the_table_says_what_why_and_how():
    result = run(*COUNTS, "--devices", 8, "--accelerator", "rtx-4090", "--batch", 64, "--backend", "fsdp")
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "1,300.0 M parameters" in text
    assert "by rules of thumb" in text
    assert "chosen" in text
    assert "the fastest that fits in 21.6 GB" in text
    assert 'backend = "fsdp"' in text
    assert 'sharding_strategy = "' in text
    assert "░ activations" in text


def test_a_model_is_traced(models):
    found = data(f"{models}:parts", "--batch", 32, "--accelerator", "t4", "--optimizer", "sgd")
    assert found["model"]["traced"]
    assert found["model"]["parameters"] == 3 * (2 * 64 * 256 + 64 + 256)
    assert found["model"]["optimizer_bytes"] == 0
    assert data("--model", f"{models}:with_loss", "--accelerator", "t4")["model"]["units"] == 3


def test_configurations_and_the_hidden_alias(tmp_path):
    facts = {"num_hidden_layers": 4, "hidden_size": 256, "vocab_size": 1000, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    arguments = [str(tmp_path / "config.json"), "--accelerator", "l4", "--json"]
    alias = CliRunner().invoke(main, ["estimate-memory", *arguments])
    assert json.loads(alias.output) == json.loads(run(*arguments).output)
    assert "estimate-memory" not in CliRunner().invoke(main, ["--help"]).output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "Say which model"),
        (("--params", "1e9"), "--layers and --hidden"),
        (("gpt2",), "Nothing is downloaded"),
        (("no.such.module:function",), "can't be loaded"),
        ((*COUNTS, "--accelerator", "abacus"), "No accelerator is called 'abacus'"),
        ((*COUNTS, "--devices", "8", "--batch", "12", "--accelerator", "t4"), "multiple of 8"),
        ((*COUNTS, "--batch", "12", "--micro-batch", "5", "--accelerator", "t4"), "isn't a multiple"),
        ((*COUNTS, "--device-memory", "lots"), "no number of bytes"),
        ((*COUNTS, "--accelerator", "t4", "--backend", "nothing"), "No planner proposes"),
    ],
)
def test_mistakes(arguments, text):
    result = run(*arguments)
    assert result.exit_code != 0
    assert text in result.output


def test_mistakes_of_models(models):
    for name, text in (("alone", "return (model, batch)"), ("nothing", "not int"), ("absent", "can't be loaded")):
        result = run(f"{models}:{name}", "--accelerator", "t4")
        assert result.exit_code == 1
        assert text in result.output
    assert "--layers is for rules of thumb" in run(f"{models}:parts", "--layers", 3, "--accelerator", "t4").output


def test_counts_need_no_torch():
    code = (
        "import sys; from drivetrain.cli import main\ntry: main()\nfinally: assert 'torch' not in sys.modules, 'torch'"
    )
    command = [sys.executable, "-c", code, "plan", *COUNTS, "--accelerator", "t4", "--json", "--backend", "single"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "AssertionError" not in result.stderr, result.stderr
    assert json.loads(result.stdout)["model"]["traced"] is False
