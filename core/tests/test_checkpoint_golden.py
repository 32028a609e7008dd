"""Checkpoints written by earlier versions load for ever. Run this file to write those of the present format version."""

import shutil
import sys
import warnings
from collections import OrderedDict, deque
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from drivetrain.checkpoint import FORMAT_VERSION, CheckpointManager, load_model_weights, verify
from drivetrain.checkpoint.plain import dumps, encode
from drivetrain.specs import ProcessInfo
from drivetrain.testing.sessions import PlainSession

GOLDEN = Path(__file__).parent / "golden"
KINDS = ["single", "sharded"]


def custom_state():
    return {
        "numbers": [1, -(2**70), 0.1, float("inf"), -0.0, True, None, 2 + 3j],
        "containers": (OrderedDict(a=1), deque([1, 2], maxlen=3), {1, 2}, frozenset("ab"), {(1, "x"): b"\x00\xff"}),
        "torch": [torch.float8_e5m2, torch.device("cuda", 1), torch.Size([2, 3])],
        "array": np.arange(6, dtype=">f4").reshape(2, 3),
        "tensor": torch.arange(200, dtype=torch.int32).to(torch.float8_e4m3fn),
    }


class Holder:
    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def count(parameters, factor):
    with torch.no_grad():
        for i, p in enumerate(parameters):
            p.copy_((torch.arange(p.numel(), dtype=torch.float32).reshape(p.shape) + i) * factor)


def build(sharded=False, filled=True, custom=None):
    """A session whose every value is known."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 3, bias=False), torch.nn.BatchNorm1d(3))
    tied = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 2), "head": torch.nn.Linear(2, 4, bias=False)})
    tied["head"].weight = tied["embed"].weight
    count([*model.parameters(), *tied.parameters()], 0.5 if filled else 0.0)
    who = ProcessInfo()
    if sharded:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),)))
        who = ProcessInfo(rank=dist.get_rank(), world_size=dist.get_world_size())
    adam = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, betas=(0.0, 0.5))
    sgd = torch.optim.SGD(tied.parameters(), lr=0.0, momentum=0.9)
    if filled:
        for p in [*model.parameters(), *tied.parameters()]:
            p.grad = 2 * p.detach()
        adam.step()
        sgd.step()
    scheduler = torch.optim.lr_scheduler.LambdaLR(adam, lambda epoch: 1.0)
    return PlainSession(
        [model, tied], [(adam, [model]), (sgd, [tied])], [scheduler], custom_objects=[Holder(custom)], process=who
    )


def state(session):
    """Every tensor by name."""
    found = {}
    for i, model in enumerate(session.models):
        found.update({f"{i}.{n}": t for n, t in model.state_dict().items()})
    for i, (optimizer, models) in enumerate(session.optimizers):
        for name, values in session.backend.optimizer_state(optimizer, models)["state"].items():
            found.update({f"{i}.{name}.{k}": v for k, v in values.items()})
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in found.items()}


def written(value):
    encoded = encode(value, inline_limit=10**6)
    return dumps([encoded.tree, encoded.inline])


def write(directory, sharded):
    session = build(sharded, custom=custom_state())
    session.step, session.epoch = 7, 2
    manager = CheckpointManager(session)
    manager.save_state(directory, metadata={"loss": 0.25})
    manager.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("version", range(1, FORMAT_VERSION + 1))
def test_a_checkpoint_of_every_version_loads(kind, version):
    path = GOLDEN / f"v{version}-{kind}"
    assert verify(path).ok
    assert not verify(path).foreign
    expected = state(build())
    session = build(filled=False)
    CheckpointManager(session).load_state(path)
    found = state(session)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[n], t) for n, t in expected.items())
    assert (session.step, session.epoch) == (7, 2)
    assert written(session.custom_objects[0].state) == written(custom_state())
    model = build(filled=False).models[0]
    load_model_weights(model, path)
    assert torch.equal(model[0].weight, expected["0.0.weight"])


if __name__ == "__main__":
    from drivetrain.testing.workers import WorkerPool

    warnings.simplefilter("error")
    for kind in KINDS:
        directory = GOLDEN / f"v{FORMAT_VERSION}-{kind}"
        if directory.exists():
            sys.exit(f"{directory} exists: a golden checkpoint is never written again")
    GOLDEN.mkdir(exist_ok=True)
    write(GOLDEN / f"v{FORMAT_VERSION}-single", False)
    with WorkerPool(2) as pool:
        pool.run(write, GOLDEN / f"v{FORMAT_VERSION}-sharded", True)
    shutil.rmtree(GOLDEN / "__pycache__", ignore_errors=True)
