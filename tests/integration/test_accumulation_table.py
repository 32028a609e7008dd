"""The table of docs/training.md beside Accelerate's figures: what it says of us is measured here, again."""

import re
import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_our_column(workers):
    tool = runpy.run_path(str(DOCS / "tools" / "accumulation_table.py"))
    page = (DOCS / "training.md").read_text(encoding="utf-8")
    for case, settings in tool["CASES"].items():
        found = tool["error"](workers(2).run(tool["gradients"], "drivetrain", *settings), *settings)
        assert found < 1e-6, f"{case}: a window's gradient is {found:.1e} away from the big batch's"
        (said,) = re.findall(rf"^\| {re.escape(case)} \| ([^|]*) \|", page, re.MULTILINE)
        assert float(said) < 1e-6
