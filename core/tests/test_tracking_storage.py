"""How values are encoded, images drawn, tables read, and runs read back."""

import json
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from PIL import Image

from drivetrain._builtin.jsonl import JSONL_SPEC
from drivetrain.errors import TrackerError
from drivetrain.tracking import TrackerHub, TrackingOptions, read_run
from drivetrain.tracking.encoding import decode, encode, path_inside, repair, safe_name
from drivetrain.tracking.media import describe_histogram, normalize_images, normalize_table, snapshot_figure
from drivetrain.tracking.png import encode_png
from drivetrain.tracking.values import Snapshot

VALUES = st.floats() | st.integers() | st.booleans() | st.text() | st.sampled_from(["@float:nan", "@text:", "@float:x"])


def same(a, b):
    return a == b or (a != a and b != b)


@given(st.dictionaries(st.text(), VALUES))
def test_lines_keep_every_value_under_every_name(row):
    line = encode(row)
    assert b"\n" not in line
    back = decode(line)
    assert list(back) == list(row) and all(type(back[k]) is type(v) and same(back[k], v) for k, v in row.items())


def test_lone_surrogates_and_huge_integers_are_kept():
    row = {"\udc80name": "\ud800", "n": 10**30}
    assert decode(encode(row)) == row


@given(st.lists(st.text(), min_size=2, max_size=2, unique=True))
def test_file_names_are_safe_and_different(names):
    safe = [safe_name(name) for name in names]
    assert safe[0] != safe[1]
    for name in safe:
        assert 0 < len(name) <= 120 and name.isascii() and "/" not in name and "\0" not in name and name[0] != "."


@settings(max_examples=50)
@given(st.text(alphabet="./a\\\0:", max_size=12))
def test_a_path_for_any_name_is_inside(name):
    from pathlib import Path

    path = Path(os.path.normpath(path_inside(Path("/root/run"), name)))
    assert path == Path("/root/run") or path.is_relative_to("/root/run")


@given(st.lists(st.text(max_size=5), max_size=5), st.binary(max_size=30))
def test_a_torn_line_is_cut_off(tmp_path_factory, texts, torn):
    torn = torn.replace(b"\n", b"")
    path = tmp_path_factory.getbasetemp() / "torn.jsonl"
    whole = b"".join(encode({"t": t}) + b"\n" for t in texts)
    path.write_bytes(whole + torn)
    assert repair(path) == len(torn) and path.read_bytes() == whole


RGB = np.arange(6 * 5 * 3, dtype=np.uint8).reshape(6, 5, 3)


@pytest.mark.parametrize(
    ("given_image", "expected"),
    [
        (RGB, [RGB]),
        (torch.from_numpy(RGB).permute(2, 0, 1), [RGB]),
        (RGB.astype(np.float32) / 255, [RGB]),
        (torch.from_numpy(RGB).permute(2, 0, 1).to(torch.bfloat16).div(255).clamp(0, 0), [RGB * 0]),
        (RGB.astype(np.int64), [RGB]),
        (RGB[..., 0], [np.repeat(RGB[..., :1], 3, axis=-1)]),
        (RGB[..., :1] > 40, [np.repeat(np.where(RGB[..., :1] > 40, 255, 0), 3, axis=-1)]),
        (np.stack([RGB, RGB]), [RGB, RGB]),
        (torch.from_numpy(np.stack([RGB, RGB])).permute(0, 3, 1, 2).requires_grad_(False), [RGB, RGB]),
        ([RGB, Image.fromarray(RGB)], [RGB, RGB]),
        (Image.fromarray(RGB[..., 0]), [np.repeat(RGB[..., :1], 3, axis=-1)]),
        (np.array([[np.nan, 2.0], [-1.0, 1.0]]), [np.repeat(np.array([[[0], [255]], [[0], [255]]]), 3, axis=-1)]),
        (np.zeros((6, 5, 4), np.uint8), [np.zeros((6, 5, 4))]),
    ],
)
def test_images_of_every_form_become_uint8_arrays(given_image, expected):
    images = normalize_images(given_image)
    assert len(images) == len(expected)
    for image, right in zip(images, expected, strict=True):
        assert image.dtype == np.uint8 and np.array_equal(image, right)
        assert not np.shares_memory(image, RGB)


def test_the_order_of_an_images_dimensions_can_be_said():
    square = np.zeros((3, 9, 3), np.uint8)
    assert normalize_images(square)[0].shape == (3, 9, 3)
    assert normalize_images(square, dataformats="CHW")[0].shape == (9, 3, 3)
    assert normalize_images(torch.from_numpy(square))[0].shape == (9, 3, 3)
    for wrong, formats in ((np.zeros((5, 6, 7)), None), (square, "NHWC"), (square, "XYZ"), (np.zeros(3), None)):
        with pytest.raises(TrackerError, match="isn't an image"):
            normalize_images(wrong, dataformats=formats)


@pytest.mark.parametrize("channels", [3, 4])
def test_png_files_are_read_by_another_library(tmp_path, channels):
    image = np.random.default_rng(0).integers(0, 256, (7, 11, channels)).astype(np.uint8)
    (tmp_path / "a.png").write_bytes(encode_png(image))
    assert np.array_equal(np.asarray(Image.open(tmp_path / "a.png")), image)


def test_a_figure_is_copied_free_of_pyplot():
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots()
    axes.plot([1, 2, 3])
    before = pyplot.get_fignums()
    copied = snapshot_figure(figure)
    axes.plot([3, 2, 1])
    assert pyplot.get_fignums() == before and figure.canvas.manager is not None
    assert len(copied.axes[0].lines) == 1 and len(axes.lines) == 2
    assert snapshot_figure(pyplot).axes
    pyplot.close(figure)


def test_tables_of_every_form():
    class Frame:
        columns = ("a", "b")

        def itertuples(self, index):
            return [(1, np.float32(0.5)), (2, None)]

    snapshot = Snapshot()
    assert normalize_table(None, None, Frame(), snapshot) == (["a", "b"], [[1, 0.5], [2, None]])
    assert normalize_table(["x"], [(torch.tensor(3),)], None, snapshot) == (["x"], [[3]])
    assert normalize_table(None, [[1, 2]], None, snapshot) == (["0", "1"], [[1, 2]])
    with pytest.raises(TrackerError, match="Row 1 of the table has 1 cells, but there are 2 columns"):
        normalize_table(["a", "b"], [[1, 2], [3]], None, snapshot)
    with pytest.raises(TrackerError, match="not by both"):
        normalize_table(["a"], None, Frame(), snapshot)


def test_an_empty_or_infinite_histogram_has_statistics():
    for values in (np.array([]), np.array([math.inf])):
        stats = describe_histogram(values)
        assert math.isnan(stats["mean"]) and stats["count"] == values.size


@pytest.fixture
def hub(tmp_path):
    hub = TrackerHub.from_plan([JSONL_SPEC], logging_dir=tmp_path, options=TrackingOptions(interval=0.005))
    yield hub
    hub.finish()


def test_the_files_of_a_run_are_plain(hub, tmp_path):
    hub.start("my project", {"a": {"b": math.inf}}, {"jsonl": {"run_name": "first"}})
    hub.log({"loss": 0.5, "nan": math.nan, "text": "@float:nan"}, step=3)
    hub.log_table("t", ["x"], [[1]], step=4)
    hub.log_figure("f", Figure(figsize=(1, 1)), 5)
    hub.log_histogram("h", torch.arange(10), 6)
    hub.finish()
    run = tmp_path / "my%20project" / "first"
    [line] = (run / "metrics.jsonl").read_text().splitlines()
    data = json.loads(line)
    assert data["values"] == {"loss": 0.5, "nan": "@float:nan", "text": "@text:@float:nan"} and data["step"] == 3
    assert json.loads((run / "config.json").read_text()) == {"a/b": "@float:inf"}
    assert json.loads((run / "run.json").read_text())["status"] == "finished"
    assert json.loads((run / "tables" / "t-4.json").read_text()) == {"columns": ["x"], "rows": [[1]]}
    assert Image.open(run / "figures" / "f-5.png").size == (100, 100)
    read = read_run(tmp_path)
    assert read.config == {"a/b": math.inf} and math.isnan(read.series("nan")[0][1])
    assert read.series("text") == [(3, "@float:nan")] and read.project == "my project"
    [histogram] = read.find("histogram", "h")
    assert sum(histogram.data["counts"]) == 10 and histogram.data["mean"] == 4.5
    with pytest.raises(TrackerError, match="Did you mean 'loss'"):
        read.series("los")


def test_reading_a_directory_with_several_runs_lists_them(hub, tmp_path):
    for _ in range(2):
        hub.start("p")
        hub.finish()
    with pytest.raises(TrackerError, match="There are 2 runs in"):
        read_run(tmp_path)


def test_artifacts_are_copied_with_their_paths_and_never_overwritten(hub, tmp_path):
    source = tmp_path / "source"
    (source / "sub").mkdir(parents=True)
    (source / "a.txt").write_text("a")
    (source / "sub" / "b.txt").write_text("b")
    hub.start("p")
    hub.log_artifacts(source, "code")
    hub.flush()
    (source / "a.txt").write_text("new")
    hub.log_artifact(source / "a.txt", "code/a.txt")
    hub.finish()
    run = read_run(tmp_path / "p")
    assert [(m.name, m.files[0].read_text()) for m in run.find("artifact")] == [
        ("code/a.txt", "a"),
        ("code/sub/b.txt", "b"),
        ("code/a.txt", "new"),
    ]


def test_an_artifact_that_is_gone_is_kept_as_a_note(tmp_path, caplog):
    waits = TrackingOptions(interval=60.0)  # nothing is delivered before the end
    hub = TrackerHub.from_plan([JSONL_SPEC], logging_dir=tmp_path, options=waits)
    source = tmp_path / "a.txt"
    source.write_text("a")
    hub.start("p")
    hub.log_artifact(source)
    source.unlink()
    assert hub.finish()
    [note] = read_run(tmp_path / "p").find("text", "a.txt")
    assert note.data.startswith("<artifact that could not be kept: FileNotFoundError")
    assert "must stay where they are until flush()" in caplog.text


def test_a_resumed_run_goes_on_after_a_torn_line(hub, tmp_path):
    hub.start("p")
    hub.log({"x": 1}, step=1)
    ids = hub.run_ids()
    directory = hub.get("jsonl", unwrap=True)
    hub.finish()
    with (directory / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 2, "ti')
    hub.start("p", {"more": 1}, run_ids=ids)
    hub.log({"x": 3}, step=3)
    hub.finish()
    assert read_run(directory).series("x") == [(1, 1), (3, 3)] and read_run(directory).config == {"more": 1}
