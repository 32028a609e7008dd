import numpy as np
from PIL import Image

from drivetrain._builtin.jsonl import JSONL_SPEC
from drivetrain.testing.tracker import StoredRun, TrackerConformance
from drivetrain.tracking import read_run


class TestJsonl(TrackerConformance):
    spec = JSONL_SPEC

    def read_back(self, directory):
        run = read_run(directory)
        images = {}
        for media in run.find("images"):
            images.setdefault(media.name, []).extend((media.step, np.asarray(Image.open(f))) for f in media.files)
        return StoredRun(
            scalars={name: run.series(name) for name in run.names},
            config=run.config,
            images=images,
            figures={m.name: [m.step] for m in run.find("figure") if Image.open(m.files[0]).size == (100, 100)},
            texts={m.name: [(m.step, m.data)] for m in run.find("text")},
            tables={m.name: (m.data["columns"], m.data["rows"]) for m in run.find("table")},
            histograms={m.name: (m.data["min"], m.data["max"], m.data["count"]) for m in run.find("histogram")},
            artifacts={m.name: m.files[0].read_bytes() for m in run.find("artifact")},
            summary=run.summary,
        )
