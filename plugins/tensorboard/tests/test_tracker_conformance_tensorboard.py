import io

import numpy as np
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from drivetrain.testing.tracker import StoredRun, TrackerConformance
from drivetrain_tensorboard.plugin import SPEC


def accumulate(directory):
    """All of the one run below a directory."""
    [run] = {path.parent for path in directory.rglob("events.out.tfevents.*")}
    everything = {"scalars": 0, "tensors": 0, "images": 0, "histograms": 0}
    return run, EventAccumulator(str(run), size_guidance=everything).Reload()


def hyperparameters(accumulator):
    metadata = accumulator.summary_metadata.get("_hparams_/session_start_info")
    if metadata is None:
        return {}
    values = plugin_data_pb2.HParamsPluginData.FromString(metadata.plugin_data.content).session_start_info.hparams
    return {k: getattr(v, v.WhichOneof("kind")) for k, v in values.items()}


def read_image(file):
    """The array of an image file."""
    return np.asarray(Image.open(file))


def read(directory):
    """The one run below a directory."""
    run, events = accumulate(directory)
    tags = events.Tags()
    scalars = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in tags["scalars"]}
    texts = {}
    for tag in tags["tensors"]:
        if tag.endswith("/text_summary"):
            name = tag.removesuffix("/text_summary")
            texts[name] = [
                (e.step, e.tensor_proto.string_val[0].decode("utf-8", "surrogatepass")) for e in events.Tensors(tag)
            ]
    images = {
        tag: [(e.step, np.asarray(Image.open(io.BytesIO(e.encoded_image_string)))) for e in events.Images(tag)]
        for tag in tags["images"]
    }
    histograms = {tag: events.Histograms(tag)[-1].histogram_value for tag in tags["histograms"]}
    artifacts = run / "artifacts"
    return StoredRun(
        scalars={**texts, **scalars},
        config=hyperparameters(events),
        images=images,
        figures={k: [step for step, image in v if image.shape[:2] == (100, 100)] for k, v in images.items()},
        texts=texts,
        histograms={k: (h.min, h.max, int(h.num)) for k, h in histograms.items()},
        artifacts={p.relative_to(artifacts).as_posix(): p.read_bytes() for p in artifacts.rglob("*") if p.is_file()},
        summary={k.removeprefix("summary/"): v[-1][1] for k, v in scalars.items() if k.startswith("summary/")},
    )


class TestTensorBoard(TrackerConformance):
    spec = SPEC
    tolerance = 1e-6

    def read_back(self, directory):
        return read(directory)
