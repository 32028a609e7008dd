"""The notebook of the examples, executed in a real kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

NOTEBOOK = Path(__file__).parents[2] / "docs" / "examples" / "notebook" / "train.ipynb"


def test_the_notebook_trains_and_its_weights_come_back(tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    nbclient.NotebookClient(
        notebook, timeout=200, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    *_, launched, _, applied = notebook.cells
    printed = "".join(o["text"] for o in launched["outputs"] if o["output_type"] == "stream")
    lines = [line for line in printed.splitlines() if line.startswith("[rank 0] epoch")]
    assert len(lines) == 4 and lines[-1].endswith("% right")
    accuracy = float(launched["outputs"][-1]["data"]["text/plain"])
    assert accuracy > 0.85
    assert float(applied["outputs"][-1]["data"]["text/plain"]) > 0.85
