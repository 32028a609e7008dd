"""What the scripts of the corpus must find, computed by plain PyTorch in one process.

The rule: n processes with batches of b rows are one process with batches of n * b rows. Each function gets the script's own
functions (``ns``: its models and data), the number of processes, and what the script printed where a choice was its own.
"""

from importlib.util import find_spec

import torch
from torch import nn
from torch.utils.data import DataLoader


def nlp_classification(ns, n, found):
    loader = DataLoader(ns["make_dataset"](200, 1), batch_size=16 * n, collate_fn=ns["collate"])
    evaluation = ns["collate"](ns["make_dataset"](61, 2))
    torch.manual_seed(42)
    model = ns["BagClassifier"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # The script takes the length of the loader before `prepare`, and the scheduler steps once per optimizer step.
    scheduler = ns["get_linear_schedule_with_warmup"](optimizer, 5, -(-200 // 16) * 3)
    steps = 0
    for _ in range(3):
        for batch in loader:
            model(**batch).loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            steps += 1
    output = model(**evaluation)
    return {
        "eval_loss": output.loss.item(),
        "accuracy": (output.logits.argmax(-1) == evaluation["labels"]).float().mean().item(),
        "seen": 61,
        "steps": steps,
        "lr": scheduler.get_last_lr()[0],
    }


def image_classification_resume(ns, n, found):
    steps = 3 * (1437 // (32 * n))
    return {"seen": 360, "steps": steps, "first": 1}


def gradient_accumulation(ns, n, found):
    torch.manual_seed(0)
    inputs, targets = ns["make_dataset"](150).tensors
    model = ns["build_model"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
    norms = []
    for _ in range(3):
        window = 4 * 8 * n
        for x, y in zip(inputs.split(window), targets.split(window), strict=True):
            nn.functional.mse_loss(model(x), y).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), ns["MAX_GRAD_NORM"]).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets).item()
    return {"loss": loss, "updates": len(norms), "norms": norms, "lr": scheduler.get_last_lr()[0]}


def experiment_tracking(ns, n, found):
    torch.manual_seed(0)
    model = ns["build_model"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    history = []
    for _ in range(4):
        losses = []
        for x, y in DataLoader(ns["make_dataset"](), batch_size=12 * n):
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        history.append(sum(losses) / len(losses))
    return {"history": history}


def multi_process_metrics(ns, n, found):
    torch.manual_seed(1)
    model = ns["build_model"]()
    sizes = {}
    for size in (103, 64, 33, 5, 1):
        data = ns["Samples"](size)
        sizes[str(size)] = {
            "accuracy": (model(data.inputs).argmax(-1) == data.labels).float().mean().item(),
            "indices": list(range(size)),
            "names": size,
            "name_count": size,
        }
    return {"sizes": sizes, "ranks": list(range(n)), "total": float(n)}


def early_stopping(ns, n, found):
    torch.manual_seed(4)
    loader = DataLoader(ns["make_dataset"](128, 21), batch_size=16 * n)
    inputs, targets = ns["make_dataset"](64, 22).tensors
    model = ns["build_model"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    best, count = float("inf"), 0
    for epoch in range(60):  # noqa: B007 (read after the loop)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        eval_loss = nn.functional.mse_loss(model(inputs), targets).item()
        best, count = (eval_loss, 0) if eval_loss < best - 0.002 else (best, count + 1)
        if count == 3:
            break
    return {"stopped": [epoch] * n, "eval_loss": eval_loss, "trigger_after": False}


def distributed_inference(ns, n, found):
    prompts = [f"draw {thing}" for thing in ("a cat", "a boat", "rain", "two dogs", "Rome", "a lamp", "snow")]
    classes = ns["build_model"]()(torch.stack([ns["encode"](p) for p in prompts])).argmax(-1).tolist()
    assert len(set(classes)) > 1
    parts = [{"ids": [0, 1, 2, 3, 4], "texts": list("abcde")}]
    if n == 2:
        parts = [{"ids": [0, 1, 2], "texts": list("abc")}, {"ids": [3, 4], "texts": list("de")}]
    return {
        "results": [{"prompt": p, "class": c} for p, c in zip(prompts, classes, strict=True)],
        "padded": [-(-7 // n)] * n,
        "tensor": list(range(10)),
        "dicts": parts,
    }


def gan(ns, n, found):
    torch.manual_seed(123)
    generator, discriminator = ns["build_models"]()
    adam_g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    adam_d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    bce = nn.BCEWithLogitsLoss()
    for _ in range(4):
        for real, latent in DataLoader(ns["make_dataset"](256), batch_size=16 * n):
            ones = torch.ones(len(real), 1)
            discriminator.zero_grad()
            fake = generator(latent)
            loss_d = bce(discriminator(real), ones) + bce(discriminator(fake.detach()), torch.zeros_like(ones))
            loss_d.backward()
            adam_d.step()
            generator.zero_grad()
            loss_g = bce(discriminator(fake), ones)
            loss_g.backward()
            adam_g.step()
    return {
        "loss_d": loss_d.item(),
        "loss_g": loss_g.item(),
        "sample": generator(torch.ones(1, 4)).flatten().tolist(),
    }


def mixed_precision_options(ns, n, found):
    torch.manual_seed(2)
    precision = found["mixed_precision"]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": torch.float32}[precision]
    model = ns["Network"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100, enabled=precision == "fp16")
    for _ in range(4):
        for x, y in DataLoader(ns["make_dataset"](), batch_size=32):
            with torch.autocast("cpu", dtype, enabled=precision != "no"):
                logits = model(x)
            loss = nn.functional.cross_entropy(logits.float(), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return {
        "loss": loss.item(),
        "skipped": 0,
        "output_dtype": "torch.float32",
        "same": True,
        "dtypes": ["torch.float32"],
        "mixed_precision": precision,
        "batch_rows": 32 // n,
        "checkpoints": ["checkpoint_2", "checkpoint_3"],
    }


def trainer_class(ns, n, found):
    torch.manual_seed(5)
    inputs, targets = ns["make_dataset"]().tensors
    model = ns["build_model"]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batch_size, updates = found["batch_size"], 0
    assert 4 <= batch_size * n <= 16
    for _ in range(4):
        window = 2 * batch_size * n
        for x, y in zip(inputs.split(window), targets.split(window), strict=True):
            nn.functional.mse_loss(model(x), y).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
    calls = {1: [["main", "local main", "last", "process 0"]], 2: [["main", "local main", "process 0"], ["last"]]}
    return {
        "loss": nn.functional.mse_loss(model(inputs), targets).item(),
        "updates": updates,
        "restored": True,
        "collectives": {
            "gathered_shape": [n * (1 + n), 3],
            "pads": 3 * (n - 1),
            "same_as_utils": True,
            "shared": [0, "from rank 0"],
            "sum": [float(n - 1)] * 2,
            "objects": [f"rank {r}" for r in range(n)],
        },
        "calls": calls[n],
        "unwrapped": True,
        "distributed": n > 1,
        "use_distributed": n > 1,
        "available": [True, find_spec("tensorboard") is not None, find_spec("wandb") is not None],
        "device": "cpu",
        "main": [True, True, 0],
        "state": n,
    }


def expected(name, ns, n, found):
    """What script ``name`` must have found with ``n`` processes."""
    return globals()[name](ns, n, found)
