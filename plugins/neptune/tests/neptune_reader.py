"""Reads the databases of operations that Neptune writes offline."""

import csv
import io
import pathlib
import sqlite3

import numpy as np
from neptune_api.proto.neptune_pb.ingest.v1.common_pb2 import UpdateRunSnapshot
from PIL import Image

from drivetrain.testing.tracker import StoredRun
from drivetrain.tracking.encoding import decode
from drivetrain.tracking.parts import join_text
from drivetrain_neptune.tracker import make_coder


def operations(database):
    """Updates in order, and the local file of each destination."""
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    rows = connection.execute("select operation from run_operations where operation_type = 0 order by sequence_id")
    updates = [UpdateRunSnapshot.FromString(row[0]) for row in rows]
    files = dict(connection.execute("select destination, source_path from file_upload_requests").fetchall())
    connection.close()
    return updates, files


def databases(directory):
    return sorted(directory.glob("neptune/*/run_operations.sqlite3"), key=lambda p: p.parent.name.rpartition("_")[2])


def _plain(value):
    kind = value.WhichOneof("value")
    return getattr(value, kind) if kind in ("float64", "int64", "bool", "string") else value


def read(directory):
    stored, coder = StoredRun(), make_coder()
    found = [operations(path) for path in databases(directory)]
    assigned = {k: _plain(v) for updates, _ in found for u in updates for k, v in u.assign.items()}
    texts = join_text({k: v for k, v in assigned.items() if isinstance(v, str)})
    coder.aliases.update(decode(texts.get("drivetrain/names", "{}")))
    for key, value in ({k: v for k, v in assigned.items() if not isinstance(v, str)} | texts).items():
        folder, _, name = coder.original(key).partition("/")
        if folder == "config":
            stored.config[name] = value
        elif folder == "summary":
            stored.summary[name] = value
        elif folder == "artifacts":
            files = next(files for _, files in found if value.file_ref.path in files)
            stored.artifacts[name] = pathlib.Path(files[value.file_ref.path]).read_bytes()
    for updates, files in found:
        for update in updates:
            for key, value in update.append.items():
                _add(stored, coder.original(key), update.step.whole, _plain(value), files)
    return stored


def _add(stored, name, step, value, files):
    if isinstance(value, float):
        stored.scalars.setdefault(name, []).append((step, value))
    elif isinstance(value, str):
        stored.scalars.setdefault(name, []).append((step, value))
        stored.texts.setdefault(name, []).append((step, value))
    elif value.WhichOneof("value") == "histogram":
        histogram = value.histogram
        stored.histograms[name] = histogram.bin_edges[0], histogram.bin_edges[-1], int(sum(histogram.counts.values))
    else:
        content = pathlib.Path(files[value.file_ref.path]).read_bytes()
        if value.file_ref.mime_type == "image/png":
            image = np.asarray(Image.open(io.BytesIO(content)))
            stored.images.setdefault(name, []).append((step, image))
            if image.shape[:2] == (100, 100):
                stored.figures.setdefault(name, []).append(step)
        elif value.file_ref.mime_type == "text/csv":
            columns, *rows = csv.reader(io.StringIO(content.decode("utf-8", "surrogatepass")))
            stored.tables[name] = columns, [[_cell(c) for c in row] for row in rows]


def _cell(text):
    try:
        return float(text) if text else None
    except ValueError:
        return text
