"""Checkpoints in object storage: an S3 server that runs here, and fsspec's memory file system."""

import contextlib
import json
import uuid
import warnings
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from drivetrain import Accelerator
from drivetrain.checkpoint import (
    CheckpointManager,
    Manifest,
    ProjectConfiguration,
    newest_checkpoint,
    read_weights,
    save,
    save_model,
    verify,
)
from drivetrain.checkpoint.location import RemotePath, locate
from drivetrain.cli.checkpoint import checkpoint as command
from drivetrain.errors import CheckpointError, ConfigurationError
from drivetrain.specs import ProcessInfo
from drivetrain.testing.sessions import PlainSession


@pytest.fixture(scope="module")
def server():
    moto = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    yield "http://{}:{}".format(*running.get_host_and_port())
    running.stop()


def use(endpoint):
    """Have this process find the server where s3:// is meant."""
    import fsspec

    fsspec.config.conf["s3"] = {"key": "testing", "secret": "testing", "endpoint_url": endpoint}


@pytest.fixture
def s3(server):
    import fsspec

    before = dict(fsspec.config.conf)
    use(server)
    bucket = f"s3://bucket-{uuid.uuid4().hex[:8]}"
    fsspec.filesystem("s3").mkdir(bucket)
    yield bucket
    fsspec.config.conf.clear()
    fsspec.config.conf.update(before)


@pytest.fixture(params=["s3", "memory"])
def place(request):
    if request.param == "s3":
        return request.getfixturevalue("s3")
    return f"memory://{uuid.uuid4().hex[:8]}"


def session(step=0):
    torch.manual_seed(0)
    model = torch.nn.Linear(400, 3)
    model.weight.data.fill_(step)
    result = PlainSession([model], [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)])
    result.step = step
    return result


def numbered(place, step, **settings):
    project = ProjectConfiguration(place, automatic_checkpoint_naming=True, **settings)
    return CheckpointManager(session(step), project=project)


def loads(path, step):
    reader = session(99)
    CheckpointManager(reader).load_state(path)
    return reader.step == step and torch.equal(reader.models[0].weight, torch.full((3, 400), float(step)))


def test_saved_listed_verified_loaded(place):
    path = CheckpointManager(session(3)).save_state(f"{place}/run/best", metadata={"loss": 1.0})
    assert str(path) == f"{place}/run/best"
    assert loads(f"{place}/run/best", 3)
    assert verify(path).ok
    assert verify(str(path)).foreign == ()
    assert set(path.sizes()) == {*Manifest.read(path).files, "manifest.json"}
    assert "model.safetensors" in path.sizes()  # where other tools look for it


def test_numbers_go_on_and_the_limit_holds(place):
    manager = numbered(f"{place}/run", 1, total_limit=2)
    for i in range(3):
        manager._session.step = i
        manager._session.models[0].weight.data.fill_(i)
        manager.save_state(blocking=i == 1)
    manager.wait()
    folder = locate(f"{place}/run/checkpoints")
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoint_1", "checkpoint_2"]
    assert newest_checkpoint(str(folder)).name == "checkpoint_2"
    reader = numbered(f"{place}/run", 77)
    assert str(reader.load_state()) == f"{place}/run/checkpoints/checkpoint_2"
    assert reader._session.step == 2
    assert reader.save_state().name == "checkpoint_3"


def test_replaced_in_one_step_and_nothing_is_left_over(place):
    url = f"{place}/latest"
    for step in (1, 2, 3):
        path = CheckpointManager(session(step)).save_state(url)
        assert loads(url, step)
        assert set(path.sizes()) == {*Manifest.read(path).files, "manifest.json"}


class DriverError(Exception):
    """As drivers have their own."""


@contextlib.contextmanager
def failing_at(monkeypatch, count, method):
    """The count-th change of the storage fails, and if ``method`` is "killed" all later ones, too."""
    left = [count]

    def wrap(name):
        real = getattr(RemotePath, name)

        def call(self, *args, **kwargs):
            left[0] -= 1
            if left[0] == 0 or (left[0] < 0 and method == "killed"):
                with self._asking():
                    raise DriverError("gone")
            return real(self, *args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("write_bytes", "upload", "remove"):
            patch.setattr(RemotePath, name, wrap(name))
        yield left


@pytest.mark.parametrize("kind", ["named", "numbered"])
@pytest.mark.parametrize("method", ["error", "killed"])
def test_whatever_fails_and_when_one_is_whole(monkeypatch, kind, method):
    place = f"memory://{uuid.uuid4().hex[:8]}"

    def manager(step):
        return CheckpointManager(session(step)) if kind == "named" else numbered(place, step, total_limit=1)

    target = f"{place}/c" if kind == "named" else None
    manager(1).save_state(target)
    steps = []
    for count in range(1, 40):
        saver = manager(2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            saver.load_state(target)  # it goes on with the run
            saver._session.step = 2
            with failing_at(monkeypatch, count, method) as left, contextlib.suppress(CheckpointError):
                saver.save_state(target)
            reader = manager(99)
            assert verify(reader.load_state(target)).damage == ()
            steps.append(reader._session.step)
            reader._session.step = 1
            path = reader.save_state(target)  # what was left doesn't stand in the way, and is removed
        prefix = path.path.removeprefix(locate(place).path).lstrip("/")
        assert set(locate(place).sizes()) == {f"{prefix}/{n}" for n in [*Manifest.read(path).files, "manifest.json"]}
        if left[0] > 0:
            break
    else:
        raise AssertionError("the save never ended")
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}


@pytest.mark.parametrize("name", ["model.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_a_damaged_object_is_named_and_the_checkpoint_before_is_loaded(place, name, damage):
    manager = numbered(place, 1)
    manager.save_state()
    manager._session.step = 2
    broken = manager.save_state()
    if damage == "missing":
        (broken / name).remove()
    else:
        data = bytearray((broken / name).read_bytes())
        data[len(data) // 2] ^= 1
        (broken / name).write_bytes(bytes(data if damage == "flipped" else data[:-1]))
    with pytest.raises(CheckpointError, match=name):
        numbered(place, 9).load_state(broken)
    reader = numbered(place, 9)
    with pytest.warns(UserWarning, match=rf"Skipping .*checkpoint_1.*{name}"):
        assert reader.load_state().name == "checkpoint_0"
    assert reader._session.step == 1


def test_a_place_with_other_objects_is_left_alone(place):
    (locate(place) / "data" / "mine.txt").write_bytes(b"mine")
    (locate(place) / "file").write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="holds other files and is no checkpoint"):
        CheckpointManager(session()).save_state(f"{place}/data")
    with pytest.raises(CheckpointError, match="is a file"):
        CheckpointManager(session()).save_state(f"{place}/file")
    with pytest.raises(CheckpointError, match=r"nothing is no whole checkpoint: it doesn't exist"):
        CheckpointManager(session()).load_state(f"{place}/nothing")
    assert locate(place).sizes() == {"data/mine.txt": 4, "file": 4}


def test_a_save_that_fails_at_its_start_removes_nothing_here(monkeypatch, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    with (
        failing_at(monkeypatch, 1, "killed"),
        pytest.raises(CheckpointError, match=r"can't hold a checkpoint \(memory:.*DriverError: gone"),
    ):
        CheckpointManager(session()).save_state(f"memory://{uuid.uuid4().hex[:8]}/c")
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_of_two_runs_each_gets_its_own_number(s3):
    """Both find the same highest number; the marker decides who has the next."""
    one, two = numbered(s3, 1), numbered(s3, 2)
    one.save_state()
    taken = []

    def hook(models, weights, output_dir):
        taken.append(two.save_state())  # while the first is writing

    one.register_save_state_pre_hook(hook)
    first = one.save_state()
    assert (first.name, taken[0].name) == ("checkpoint_1", "checkpoint_2")
    assert loads(first, 1)
    assert loads(taken[0], 2)


def test_markers_are_made_once(place):
    marker = locate(place) / "m" / ".saving"
    marker.write_bytes(b"1", new=True)
    with pytest.raises(FileExistsError):
        marker.write_bytes(b"2", new=True)
    assert marker.read_bytes() == b"1"


def on_ranks(endpoint, place):
    use(endpoint)
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, project_dir=f"{place}/job", resume="auto")
    model = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))

    def write(models, weights, output_dir):
        Path(output_dir, "same.txt").write_text(str(accelerator.process_index))
        Path(output_dir, f"own_{accelerator.process_index}.txt").write_text("x")

    read = []
    accelerator.register_save_state_pre_hook(write)
    accelerator.register_load_state_pre_hook(
        lambda models, input_dir: read.append({p.name: p.read_text() for p in Path(input_dir).glob("*.txt")})
    )
    accelerator.resume()
    start = accelerator.step
    losses = []
    while accelerator.step < start + 3:
        loss = model(torch.full((2, 4), float(accelerator.step + accelerator.process_index))).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        accelerator.checkpoint(every=3, keep=1)
    accelerator._finish_checkpoints()
    accelerator._stopper.close()
    return start, losses, read


def test_ranks_save_and_go_on_through_a_server(ranks, server, s3):
    first = ranks.run(on_ranks, server, f"{s3}/a")
    second = ranks.run(on_ranks, server, f"{s3}/a")
    assert [start for start, _, _ in first] == [0, 0]
    assert [start for start, _, _ in second] == [3, 3]
    for _, _, read in second:
        assert read == [{"same.txt": "0", "own_0.txt": "x", "own_1.txt": "x"}]
    assert [p.name for p in locate(f"{s3}/a/job/checkpoints").iterdir()] == ["checkpoint_1"]
    assert verify(f"{s3}/a/job/checkpoints/checkpoint_1").ok


def invisible():
    process = ProcessInfo(rank=torch.distributed.get_rank(), world_size=torch.distributed.get_world_size())
    manager = CheckpointManager(PlainSession([torch.nn.Linear(1, 1)], process=process), visibility_timeout=0.2)
    try:
        manager.save_state("memory://per-process/c")
    except CheckpointError as error:
        return str(error)
    finally:
        manager.close()


def test_storage_that_only_one_process_sees_is_refused_on_all(ranks):
    assert all("rank 1 doesn't see memory://per-process/c" in text for text in ranks.run(invisible))


def test_the_command_takes_urls(place, tmp_path):
    manager = numbered(f"{place}/run", 1)
    path = str(manager.save_state())
    manager._session.models[0].weight.data.fill_(2)
    other = str(manager.save_state())

    def run(*arguments):
        return CliRunner().invoke(command, list(map(str, arguments)))

    rows = json.loads(run("list", f"{place}/run", "--json").output)
    assert [row["path"] for row in rows] == [path, other]
    assert "is whole" in run("verify", path).output
    assert "model.safetensors" in run("inspect", path, "--tensors").output
    assert "values differ, by up to 1" in run("diff", path, other).output
    assert run("export", path, tmp_path / "weights").exit_code == 0
    assert (tmp_path / "weights" / "model.safetensors").is_file()
    (locate(path) / "model.safetensors").write_bytes(b"")
    assert run("verify", path).exit_code == 1


def test_a_model_alone(place):
    state = {"a": torch.arange(4.0), "b": torch.ones(2, 2)}
    files = save_model({**state, "tied": state["a"]}, f"{place}/model", max_shard_size=16)
    assert [f.name for f in files][-1] == "model.safetensors.index.json"
    found = read_weights(f"{place}/model")
    assert found.keys() == {"a", "b", "tied"}
    assert torch.equal(found["tied"], state["a"])
    (file,) = save_model(state, f"{place}/model")  # shards of before are gone
    assert set(locate(f"{place}/model").sizes()) == {"model.safetensors"}
    assert str(file) == f"{place}/model/model.safetensors"
    assert torch.equal(read_weights(str(file))["b"], state["b"])
    save(state, f"{place}/one.safetensors", safe_serialization=True)
    assert torch.equal(read_weights(f"{place}/one.safetensors")["a"], state["a"])
    with pytest.raises(CheckpointError, match=f"{place}/nothing"):
        read_weights(f"{place}/nothing")


def test_settings_that_make_no_sense_with_a_url_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="save_on_each_node=True is for directories"):
        ProjectConfiguration("s3://bucket/run", save_on_each_node=True)
    with pytest.raises(ConfigurationError, match="trackers write to a directory"):
        ProjectConfiguration(tmp_path, logging_dir="s3://bucket/logs")
    assert ProjectConfiguration("s3://bucket/run").logging_dir is None
    with pytest.raises(CheckpointError, match="was a URL before it was made a Path"):
        CheckpointManager(session()).save_state(Path("s3://bucket/run"))
    with pytest.raises(CheckpointError, match=r"can't be reached: .*"):
        CheckpointManager(session()).save_state("nosuch://bucket/run")


def test_trackers_of_a_project_at_a_url_write_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator(cpu=True, project_dir="memory://project")
    accelerator.init_trackers("demo")
    accelerator.log({"loss": 1.0}, step=1)
    accelerator.end_training()
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]
    with pytest.raises(ConfigurationError, match="director"):
        Accelerator(cpu=True, project_dir="memory://project", log_with="jsonl")
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]
