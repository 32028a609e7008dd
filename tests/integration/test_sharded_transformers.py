"""Models of transformers and adapters of peft, where they are installed: their own units and plans, frozen weights in another dtype, adapters alone."""

from contextlib import nullcontext

import pytest
import torch

from drivetrain import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig, init_empty_weights
from drivetrain.testing.training import whole

transformers = pytest.importorskip("transformers")

IDS = torch.randint(0, 64, (8, 12), generator=torch.Generator().manual_seed(1))


def make(tied=False):
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config)


def with_adapters(model):
    import peft

    torch.manual_seed(4)
    model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16().float()  # so that half precision loses nothing
    return model


def train(model, prepare, backward, rows):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    model, optimizer = prepare(model, optimizer)
    losses = []
    for _ in range(3):
        loss = model(input_ids=rows, labels=rows).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return model, losses


def plain(model):
    model, losses = train(model, lambda *objects: objects, lambda loss: loss.backward(), IDS)
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def accelerated(make_model, settings, dtype=None, empty=False):
    settings = dict(settings)
    if "fsdp" in settings:
        settings["fsdp_plugin"] = FullyShardedDataParallelPlugin(**settings.pop("fsdp"))
    if "mesh" in settings:
        settings["parallelism_config"] = ParallelismConfig(**settings.pop("mesh"))
    if "zero" in settings:
        from drivetrain import DeepSpeedPlugin

        settings["deepspeed_plugin"] = DeepSpeedPlugin(**settings.pop("zero"))
    accelerator = Accelerator(cpu=True, **settings)
    with init_empty_weights() if empty else nullcontext():
        model = make_model()
    torch.manual_seed(3)
    if dtype is not None:
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
    backend = accelerator.backend
    rows = IDS.chunk(backend.data_world_size)[backend.data_rank]
    model, losses = train(model, accelerator.prepare, accelerator.backward, rows)
    mean = accelerator.reduce(torch.tensor(losses), "mean").tolist()
    state = backend.model_state(model)
    weights = whole({n: state[n] for n, _ in accelerator.unwrap_model(model).named_parameters()})
    facts = backend.describe()
    accelerator.end_training()
    return mean, weights, facts


def check(results, expected, tolerance=1e-4):
    losses, weights = expected
    for ours, our_weights, _ in results:
        assert ours == pytest.approx(losses, abs=tolerance)
        assert our_weights.keys() == weights.keys()
        for name, weight in weights.items():
            torch.testing.assert_close(our_weights[name].float(), weight.float(), atol=tolerance * 10, rtol=0, msg=name)


@pytest.mark.parametrize("tied", [False, True])
def test_a_transformer_has_its_own_units(ranks, tied):
    results = ranks.run(accelerated, lambda: make(tied), {"fsdp": {}})
    check(results, plain(make(tied)))
    assert results[0][2]["units"].startswith("3 of")


def test_a_transformer_has_its_own_plan(ranks):
    results = ranks.run(accelerated, make, {"mesh": {"tp_size": 2}})
    check(results, plain(make()))
    assert "10 colwise" in results[0][2]["layers divided"] and "4 rowwise" in results[0][2]["layers divided"]


def test_a_transformer_made_without_weights_fills_them_as_it_would(ranks):
    results = ranks.run(accelerated, make, {"fsdp": {}}, empty=True)
    spread = {n: float(w.detach().std()) for n, w in make().named_parameters() if w.ndim > 1}
    for losses, weights, _ in results:
        assert losses == pytest.approx(results[0][0])
        for name, value in spread.items():  # three steps from the model's own 0.02; a Linear layer's would be 0.1
            assert float(weights[name].std()) == pytest.approx(value, rel=1.0), name


SETTINGS = {"ddp": {"backend": "ddp"}, "fsdp": {"fsdp": {}}, "replicas": {"fsdp": {"sharding_strategy": "NO_SHARD"}}}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "frozen bf16"])
@pytest.mark.parametrize("name", SETTINGS)
def test_adapters(ranks, name, dtype):
    pytest.importorskip("peft")
    results = ranks.run(accelerated, lambda: with_adapters(make()), SETTINGS[name], dtype)
    expected = plain(with_adapters(make()))
    if dtype is None:
        check(results, expected)
    else:  # matrix products are in bf16 then
        assert results[0][0] == pytest.approx(expected[0], abs=5e-2)
        assert {str(w.dtype) for w in results[0][1].values()} == {"torch.bfloat16", "torch.float32"}


@pytest.mark.full
@pytest.mark.parametrize("settings", [{"zero_stage": 2}, {"zero_stage": 3}], ids=str)
def test_adapters_under_zero(ranks, settings):
    pytest.importorskip("peft")
    pytest.importorskip("drivetrain_deepspeed")
    results = ranks.run(accelerated, lambda: with_adapters(make()), {"zero": settings})
    check(results, plain(with_adapters(make())))


def test_adapters_alone_are_saved(ranks, tmp_path):
    peft = pytest.importorskip("peft")

    def run(folder):
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin())
        model = accelerator.prepare(with_adapters(make()))
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            accelerator.unwrap_model(model).save_pretrained(folder, state_dict=state)
        accelerator.wait_for_everyone()
        accelerator.end_training()
        return len(state)

    assert ranks.run(run, str(tmp_path))[1] == 0
    expected = with_adapters(make())
    loaded = peft.PeftModel.from_pretrained(make(), tmp_path)
    theirs = {n: p for n, p in loaded.named_parameters() if "lora_" in n}
    assert theirs
    for name, parameter in expected.named_parameters():
        if "lora_" in name:
            assert torch.equal(theirs[name], parameter), name
