"""Reads what Comet writes offline: an archive of messages and files, or their folder while the experiment is open."""

import csv
import io
import json
import math
import zipfile

import numpy as np
from PIL import Image

from drivetrain.testing.tracker import StoredRun
from drivetrain.tracking.encoding import decode
from drivetrain.tracking.parts import join_text
from drivetrain_comet.tracker import make_coder


def sources(directory):
    """Names of files with a function that reads them, for each experiment, oldest first."""
    for path in sorted(directory.glob("*.zip"), key=lambda p: p.stat().st_mtime_ns):
        archive = zipfile.ZipFile(path)
        if "messages.json" in archive.namelist():  # not the place that an open experiment keeps for its archive
            yield archive.read
    for path in sorted(directory.glob(".comet-*")):
        if (path / "messages.json").exists():
            yield lambda name, path=path: (path / name).read_bytes()


def messages(read):
    return [json.loads(line) for line in read("messages.json").decode().splitlines()]


def read(directory):
    stored, coder = StoredRun(), make_coder()
    found = [(fetch, messages(fetch)) for fetch in sources(directory)]
    others = {}
    for _, lines in found:
        for line in lines:
            if line["type"] == "log_other":
                others[line["payload"]["key"]] = line["payload"]["value"]
    others = join_text(others)
    coder.aliases.update(decode(others.get("drivetrain.names", "{}")))
    stored.summary.update(
        {coder.original(k).removeprefix("summary/"): v for k, v in others.items() if k.startswith("summary/")}
    )
    for fetch, lines in found:
        parameters = {}
        for line in lines:
            _add(stored, coder, fetch, line["type"], line["payload"], parameters)
        texts = {k: v for k, v in parameters.items() if isinstance(v, str)}
        stored.config.update(
            {
                coder.original(k): v
                for k, v in (parameters | join_text(texts)).items()
                if k in join_text(texts) or k not in texts
            }
        )
    return stored, others


def _add(stored, coder, fetch, kind, payload, parameters):
    if kind == "metric_msg":
        metric = payload["metric"]
        series = stored.scalars.setdefault(coder.original(metric["metricName"]), [])
        series.append((metric["step"], metric["metricValue"]))
    elif kind == "parameter_msg" and payload["param"]["source"] == "manual":
        parameter = payload["param"]
        parameters[parameter["paramName"]] = parameter["paramValue"]
    elif kind == "file_upload":
        extra = payload["additional_params"]
        name = (
            json.loads(payload["metadata"])["name"]
            if isinstance(payload["metadata"], str)
            else (payload["metadata"] or {}).get("name")
        )
        _add_file(stored, coder, extra, name, payload["upload_type"], fetch(payload["file_path"]))


def _add_file(stored, coder, extra, name, kind, content):
    step = extra["step"]
    if kind == "visualization":
        image = np.asarray(Image.open(io.BytesIO(content)))
        stored.images.setdefault(name, []).append((step, image))
        if image.shape[:2] == (100, 100):
            stored.figures.setdefault(name, []).append(step)
    elif kind == "text-sample":
        stored.scalars.setdefault(name, []).append((step, content.decode()))
        stored.texts.setdefault(name, []).append((step, content.decode()))
    elif kind == "histogram3d":
        data = json.loads(content)
        bins = data["index_values"]
        low, high = (_bin(data, index) for index in (bins[0][0], bins[-1][0]))
        stored.histograms[coder.original(extra["fileName"])] = low, high, sum(count for _, count in bins)
    elif name is not None:
        stored.artifacts[name] = content
        if name.endswith(".csv"):
            columns, *rows = csv.reader(io.StringIO(content.decode("utf-8", "surrogatepass")))
            stored.tables[name.removesuffix(".csv")] = columns, [[_cell(c) for c in row] for row in rows]


def _bin(data, index):
    """The value nearest to zero of a bin: their widths grow by a constant factor on both sides of the one in the middle."""
    middle = math.ceil(math.log(data["stop"] / data["start"], data["step"])) + 1
    distance = abs(index - middle)
    return math.copysign(data["start"] * data["step"] ** (distance - 1), index - middle) if distance else 0.0


def _cell(text):
    try:
        return float(text) if text else None
    except ValueError:
        return text
