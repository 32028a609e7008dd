"""Reads what wandb writes offline: a log of protobuf records, in blocks as LevelDB's."""

import json

from wandb.proto import wandb_internal_pb2 as pb

_BLOCK = 32768


def records(path):
    """The records of a ``run-ID.wandb`` file; a torn last one ends them."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, part = 7, b""
    while position + 7 <= len(data):
        left = _BLOCK - position % _BLOCK
        if left < 7:
            position += left
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        if kind == 0:
            return
        chunk = data[position + 7 : position + 7 + length]
        if len(chunk) < length:
            return
        position += 7 + length
        part += chunk
        if kind in (1, 4):
            record = pb.Record()
            record.ParseFromString(part)
            part = b""
            yield record


def _values(items):
    """By name; what has a nested name becomes a mapping."""
    found = {}
    for item in items:
        *outer, last = item.nested_key or [item.key]
        place = found
        for name in outer:
            place = place.setdefault(name, {})
        place[last] = json.loads(item.value_json)
    return found


def read(path):
    """History rows, configuration, summary, artifacts and exit code."""
    found = {"history": [], "config": {}, "summary": {}, "artifacts": [], "exit": None, "run": None}
    for record in records(path):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            found["history"].append(_values(record.history.item))
        elif kind == "config":
            found["config"].update(_values(record.config.update))
        elif kind == "run":
            found["run"] = record.run
            found["config"].update(_values(record.run.config.update))
        elif kind == "summary":
            found["summary"].update(_values(record.summary.update))
        elif kind == "artifact":
            found["artifacts"].append(record.artifact)
        elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
            found["artifacts"].append(record.request.log_artifact.artifact)
        elif kind == "exit":
            found["exit"] = record.exit.exit_code
    return found
