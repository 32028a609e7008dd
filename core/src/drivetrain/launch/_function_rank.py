"""The script of a rank that runs a function: see `drivetrain.launch.notebook`. Its argument is the folder with the call."""

from __future__ import annotations

import linecache
import os
import pickle
import sys
from pathlib import Path


def main(folder: Path) -> None:
    """Run the call and leave its value."""
    around = pickle.loads((folder / "around.pkl").read_bytes())
    sys.path[:] = around["path"]
    linecache.cache.update(around["cells"])
    import cloudpickle

    function, args = cloudpickle.loads((folder / "call.pkl").read_bytes())
    value = function(*args)
    try:
        data = cloudpickle.dumps(value)
    except Exception as error:
        kind = type(value).__name__
        raise TypeError(f"the function returned a {kind}, which can't be sent back: {error}") from error
    (folder / f"value-{os.environ['LOCAL_RANK']}.pkl").write_bytes(data)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
