"""The ten scripts of `accelerate_scripts`, run in the calling process under a library of the same names.

A script is changed in one way only: each occurrence of the word ``accelerate`` becomes the library's name. What a script
found is the JSON object that it prints in its last line.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "accelerate_scripts"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))


def source(name, library):
    """The text of script ``name`` for ``library``."""
    return (FOLDER / f"{name}.py").read_text().replace("accelerate", library)


def namespace(name, library):
    """The script's own functions and classes, without running its ``main``."""
    scope = {"__name__": f"corpus_{name}"}
    exec(compile(source(name, library), f"{name}.py", "exec"), scope)
    return scope


def result_of(output):
    """The JSON object in the last line of ``output`` that holds one; None if there is none."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else None


def run_source(text, name, arguments):
    """Run a script's text as ``__main__`` in this process; return what it printed to stdout.

    Self-contained, since it travels to other processes by value.
    """
    output, kept = io.StringIO(), sys.argv
    sys.argv = [f"{name}.py", *arguments]
    try:
        with contextlib.redirect_stdout(output):
            exec(compile(text, f"{name}.py", "exec"), {"__name__": "__main__", "__file__": f"{name}.py"})
    finally:
        sys.argv = kept
    return output.getvalue()
