"""PartialState and DistributedType."""

import copy
import json
import os
import pickle

import pytest
import torch
import torch.distributed as dist

from drivetrain.errors import DistributedOperationError
from drivetrain.parallel import DistributedType, PartialState, find_free_port
from drivetrain.specs import ProcessInfo
from drivetrain.testing.workers import WorkerPool

CPU = torch.device("cpu")


def state(**kwargs):
    process = ProcessInfo(
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        local_rank=int(os.environ["LOCAL_RANK"]),
        local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
    )
    return PartialState(process=process, device=CPU, **kwargs)


def test_instances_are_equal_views_of_the_group(ranks):
    def run():
        a, b = state(), state(debug=True)
        assert a == b
        assert a is not b
        assert b.debug
        assert a.initialized
        return repr(a), a.distributed_type, a.backend, a.device

    for rank, (text, kind, backend, device) in enumerate(ranks.run(run)):
        assert text == (
            f"PartialState(distributed_type=MULTI_CPU, backend=gloo, num_processes=2, process_index={rank}, "
            f"local_process_index={rank}, device=cpu)"
        )
        assert (kind, backend, device) == (DistributedType.MULTI_CPU, "gloo", CPU)


def test_making_one_joins_the_group_and_any_view_ends_it():
    port = find_free_port()

    def run():
        dist.destroy_process_group()
        before = dict(os.environ)
        first = state(init_method=f"tcp://127.0.0.1:{port}", timeout=30)
        second = state()
        second.wait_for_everyone()
        with second.main_process_first():
            pass
        second.destroy_process_group()
        second.destroy_process_group()
        ended = (first.initialized, first.num_processes)
        with pytest.raises(DistributedOperationError, match="was ended"):
            first.wait_for_everyone()
        assert dict(os.environ) == before
        return ended

    with WorkerPool(2) as pool:  # of its own: ending a group that other tests' models have used can block torch
        assert pool.run(run) == [(False, 2)] * 2


def test_one_process(monkeypatch):
    monkeypatch.setenv("DRIVETRAIN_DEBUG", "1")
    one = PartialState(process=ProcessInfo(), device=CPU)
    assert (one.num_processes, one.process_index, one.backend, one.initialized) == (1, 0, None, True)
    assert one.distributed_type is DistributedType.NO
    assert one.debug
    assert not PartialState(process=ProcessInfo(), device=CPU, debug=False).debug
    one.set_device()
    one.destroy_process_group()
    assert one.default_device.type == (torch.accelerator.current_accelerator(check_available=True) or CPU).type


def test_unknown_arguments_are_refused():
    with pytest.raises(TypeError, match="use_sharding"):
        PartialState(process=ProcessInfo(), device=CPU, use_sharding=True)


# -- DistributedType -------------------------------------------------------------------------------------------------------


def test_members_are_strings_with_a_name():
    member = DistributedType.MULTI_GPU
    assert member == "MULTI_GPU"
    assert isinstance(member, DistributedType)
    assert (member.name, member.value, str(member), f"{member}") == ("MULTI_GPU",) * 4
    assert repr(member) == "<DistributedType.MULTI_GPU>"
    assert {member: 1}["MULTI_GPU"] == 1
    assert json.dumps({"type": member}) == '{"type": "MULTI_GPU"}'
    assert DistributedType("MULTI_GPU") is DistributedType["MULTI_GPU"] is member
    assert pickle.loads(pickle.dumps(member)) is copy.deepcopy(member) is member


def test_the_class_is_iterable():
    members = list(DistributedType)
    assert members[:3] == ["NO", "MULTI_CPU", "MULTI_GPU"]
    assert len(members) == len(DistributedType) == len(set(members))
    assert "MULTI_XPU" in DistributedType
    assert DistributedType.NO in DistributedType
    assert "MULTI" not in DistributedType
    assert {"NO", "MULTI_NPU"} <= set(dir(DistributedType))


def test_an_unknown_member_is_an_error_with_the_closest_name():
    with pytest.raises(AttributeError, match=r"no member 'MULTI_GPUS'. Did you mean 'MULTI_GPU'"):
        _ = DistributedType.MULTI_GPUS
    with pytest.raises(AttributeError, match=r"There are NO, MULTI_CPU"):
        _ = DistributedType.zzz
    with pytest.raises(ValueError, match="'TPU' is no DistributedType"):
        DistributedType("TPU")
    with pytest.raises(KeyError):
        DistributedType["TPU"]
    assert not hasattr(DistributedType, "__wrapped__")


@pytest.mark.parametrize(
    ("device", "world", "name"),
    [
        ("cpu", 1, "NO"),
        ("cuda", 1, "NO"),
        ("cpu", 2, "MULTI_CPU"),
        ("cuda", 2, "MULTI_GPU"),
        ("npu", 2, "MULTI_NPU"),
        ("toy", 2, "MULTI_TOY"),
    ],
)
def test_types_of_devices(device, world, name):
    member = DistributedType.of_device(device, world)
    assert member == name
    assert isinstance(member, DistributedType)
    assert pickle.loads(pickle.dumps(member)) == name


def test_backends_names_come_from_the_file_of_known_plugins(tmp_path, monkeypatch):
    from drivetrain.parallel.distributed_type import _names_of_backends

    folder = tmp_path / "toy_plugins"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    assert _names_of_backends("toy_plugins") == []
    table = {"a": {"distributed_types": ["TOY", "OTHER"]}, "b": {"distributed_types": ["TOY"]}, "c": {}}
    (folder / "known_plugins.json").write_text(json.dumps(table))
    assert _names_of_backends("toy_plugins") == ["TOY", "OTHER"]
