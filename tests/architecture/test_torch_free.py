"""What must not import torch, in a fresh interpreter. And what `drivetrain --help` must not import."""

from __future__ import annotations

import json
import subprocess
import sys

CODE = """
import importlib, json, sys
guilty = []
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    for heavy in json.loads(sys.argv[2]):
        if heavy in sys.modules:
            guilty.append([name, heavy])
            for module in [m for m in sys.modules if m == heavy or m.startswith(heavy + ".")]:
                del sys.modules[module]
print(json.dumps(guilty))
"""


def _guilty(modules, heavy):
    command = [sys.executable, "-c", CODE, json.dumps(modules), json.dumps(heavy)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


def test_public_vocabulary_and_entry_modules_leave_torch_out(packages, core):
    light = (
        "errors",
        "specs",
        "hookspecs",
        "interfaces",
        "config",
        "cli",
        "_plugins",
        "_engine.resolve",
        "_builtin.plugin",
    )
    modules = [m for m in core.modules() if m.removeprefix("drivetrain.").startswith(light) and "__main__" not in m]
    modules = [m for m in modules if not m.startswith("drivetrain.interfaces.")]  # the interfaces' own modules may
    entries = [
        target for p in packages[1:] for target in p.metadata["project"]["entry-points"]["drivetrain.plugins"].values()
    ]
    assert _guilty(["drivetrain", *modules, *entries], ["torch"]) == []


def test_the_command_line_starts_without_rich():
    assert _guilty(["drivetrain.cli"], ["rich", "torch", "numpy", "asyncio"]) == []
