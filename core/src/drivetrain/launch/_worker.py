"""What each rank runs: a user's script or module as ``__main__``, as Python itself would run it.

Started as a file (``python -u _worker.py LAUNCHER_PID script|module TARGET ARGS...``) and made of the standard library alone, so that
nothing is imported before the user's code. It adds a few things to a plain start:

- an uncaught exception is written as JSON to ``TORCHELASTIC_ERROR_FILE`` (the format of torch's elastic agent, with finer time), and
  the launcher prints it: once, whole, and not mixed with other ranks' output;
- a rank whose exception is on record ends within seconds, even when threads or exit handlers would keep it alive;
- a rank ends with its launcher, even if that was killed with SIGKILL;
- SIGUSR2 makes it write down the Python stacks of its threads, also when it is stuck in native code (a script that handles that signal by
  itself keeps it);
- a rank of several writes down its collectives when its launcher asks, and when it fails (see `drivetrain.launch._flight`).
"""

# pathlib isn't imported before the user's code:
# ruff: noqa: PTH100, PTH104, PTH105, PTH109, PTH110, PTH112, PTH120, PTH123

from __future__ import annotations

import os
import sys
from types import CodeType, ModuleType, TracebackType

TYPE_CHECKING = False
if TYPE_CHECKING:  # the typing module itself isn't needed in a rank
    from traceback import FrameSummary
    from typing import Any

#: Seconds that a rank has from its uncaught exception to its end: exit handlers may still upload or flush something.
EXIT_SECONDS = 10.0

_PID = os.getpid()
_SIGKILL = 9
_PR_SET_PDEATHSIG = 1


def main() -> None:
    launcher, kind, target = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    _end_with(launcher)
    _answer()
    _listen()
    sys.argv[:] = sys.argv[3:]
    ours = sys.modules["__main__"]  # keeps this module's globals alive while another one bears its name
    try:
        code, module = _module(target) if kind == "module" else _script(target)
        sys.modules["__main__"] = module
        exec(code, module.__dict__)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            _record(stop)
        raise
    except KeyboardInterrupt as interrupt:
        if _record(interrupt):
            sys.excepthook = _say_nothing  # the launcher says where each rank was
        raise
    except BaseException as error:
        failure = error
    else:
        return
    finally:
        del ours
    _fail(failure)


def _fail(error: BaseException) -> None:
    """End with exit code 1; print the traceback only if the launcher will not."""
    import faulthandler

    error.__traceback__ = _users_part(error)
    sys.last_value = error  # as Python itself does; exit handlers may want to know
    recorded = _record(error)
    faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True)
    if not recorded:
        sys.excepthook(type(error), error, error.__traceback__)
    elif sys.excepthook is not sys.__excepthook__:
        said = _run_hook(error)
        if said:
            sys.stderr.write(said)
            _record(error, shown=True)
    raise SystemExit(1)


def _run_hook(error: BaseException) -> str:
    """Run the excepthook that some library or the user has set, for what it does besides printing.

    Returns:
        What it printed, unless that is Python's own traceback (with torch's label on each line, perhaps): the launcher shows that.
    """
    import io
    import re
    import traceback

    stderr, sys.stderr = sys.stderr, io.StringIO()
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException:  # as Python itself does: the hook's mistake mustn't hide the error
        sys.stderr.write(traceback.format_exc())
    finally:
        said, sys.stderr = sys.stderr.getvalue(), stderr
    plain = re.sub(r"^\[rank\d+\]: ", "", said, flags=re.MULTILINE).strip().splitlines()
    usual = "".join(traceback.format_exception(type(error), error, error.__traceback__)).strip().splitlines()
    return "" if plain and (plain[0], plain[-1]) == (usual[0].strip(), usual[-1]) else said


def _script(path: str) -> tuple[CodeType, ModuleType]:
    """The code of a file, or of a directory or zip archive with a ``__main__.py``."""
    from importlib.machinery import SourceFileLoader

    if os.path.isdir(path) or path.endswith((".zip", ".pyz")):
        from pkgutil import get_importer

        importer = get_importer(path)
        spec = importer.find_spec("__main__") if importer is not None else None
        if spec is None or spec.loader is None:
            raise ImportError(f"no __main__.py in {path!r}")
        _set_first_path(path)
        return _from_spec(spec)
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    absolute = os.path.abspath(path)
    with open(absolute, "rb") as file:
        code = compile(file.read(), absolute, "exec", dont_inherit=True)
    module = ModuleType("__main__")
    module.__dict__.update(
        __file__=absolute, __loader__=SourceFileLoader("__main__", absolute), __builtins__=__builtins__, __cached__=None
    )
    return code, module


def _module(name: str) -> tuple[CodeType, ModuleType]:
    """The code of an importable module, or of a package's ``__main__``."""
    from importlib.util import find_spec

    _set_first_path(os.getcwd())
    spec = find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = find_spec(f"{name}.__main__")
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {name!r} that can be run", name=name)
    return _from_spec(spec)


def _from_spec(spec: Any) -> tuple[CodeType, ModuleType]:
    code = spec.loader.get_code(spec.name)
    if code is None:
        raise ImportError(f"{spec.name} has no Python code")
    module = ModuleType("__main__")
    module.__dict__.update(
        __spec__=spec,
        __file__=spec.origin,
        __loader__=spec.loader,
        __package__=spec.parent,
        __builtins__=__builtins__,
        __cached__=None,
    )
    sys.argv[0] = spec.origin or sys.argv[0]
    return code, module


def _set_first_path(directory: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = directory


def _users_part(error: BaseException) -> TracebackType | None:
    """The traceback without the frames of this file and its neighbours that lead to the user's code."""
    traceback = error.__traceback__
    ours = os.path.dirname(__file__)
    while traceback is not None and os.path.dirname(traceback.tb_frame.f_code.co_filename) == ours:
        traceback = traceback.tb_next
    return traceback


def _record(error: BaseException, *, shown: bool = False) -> bool:
    """Write the error file; True if that worked. ``shown``: something else prints the traceback on this rank."""
    import json
    import time

    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.getpid() != _PID:  # a fork of the user's isn't the rank
        return False
    now = time.time()
    details = {"py_callstack": "", "timestamp": str(int(now)), "time": now, "shown": shown, "pid": os.getpid()}
    message = f"{type(error).__name__}: {error}".rstrip(": ")
    try:
        if isinstance(error, SystemExit):
            details["shown"] = True  # Python prints what there is to print
        else:
            import traceback

            part = _users_part(error)
            details["py_callstack"] = "".join(traceback.format_exception(type(error), error, part))
            if part is not None:
                last = _innermost(traceback.extract_tb(part))
                details["where"] = f"{last.filename}:{last.lineno} ({last.name})"
    except Exception as problem:  # a broken __str__, or no memory: say at least what it was
        details["py_callstack"] = (
            f"{type(error).__name__} (its traceback can't be formatted: {type(problem).__name__})\n"
        )
    try:
        # Renamed when whole: the launcher may look at any time.
        with open(f"{path}.part", "w", encoding="utf-8") as file:
            json.dump({"message": {"message": message, "extraInfo": details}}, file)
        os.replace(f"{path}.part", path)
    except OSError:
        return False
    if not shown and "torch.distributed" in sys.modules and os.path.exists(f"{path}.ask"):
        _write_flight(path)
    return True


def _innermost(frames: list[FrameSummary]) -> FrameSummary:
    """The innermost line of the user's own code, or of any if there is none."""
    from drivetrain._places import is_users

    return next((frame for frame in reversed(frames) if is_users(frame.filename)), frames[-1])


def _say_nothing(*_: object) -> None:
    """An excepthook that prints nothing."""


def _end_with(launcher: int) -> None:
    """Have the kernel kill this process when its launcher ends without having ended it."""
    import faulthandler

    faulthandler.enable()
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, _SIGKILL)
    if os.getppid() != launcher:  # it ended before that call
        os._exit(1)


def _answer() -> None:
    """Be ready to write down where this rank is; the file with the final name says so (see `drivetrain.launch._stacks`)."""
    import faulthandler
    import signal

    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    number = getattr(signal, "SIGUSR2", None)
    if not path or number is None:
        return
    try:
        signal.signal(number, signal.SIG_IGN)  # what is left of it when Python ends: being asked late kills nobody
        file = open(f"{path}.stacks.part", "w", encoding="utf-8")  # noqa: SIM115  # open as long as the process lives
        faulthandler.register(number, file=file, all_threads=True)
        os.rename(f"{path}.stacks.part", f"{path}.stacks")
    except OSError:
        return


def _listen() -> None:
    """Be ready to write down this rank's collectives: a thread waits for the launcher's word in a named pipe, which is there in jobs of several.

    Not a signal: Python runs handlers of signals on the main thread, and that one may be waiting in a collective.
    """
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or not os.path.exists(f"{path}.ask"):
        return
    import threading  # on the main thread: it takes the one that imports it first for that

    def listen() -> None:
        while True:
            try:
                pipe = os.open(f"{path}.ask", os.O_RDONLY)  # returns when the launcher asks
                os.read(pipe, 64)
                os.close(pipe)
            except OSError:
                return
            _write_flight(path)

    threading.Thread(target=listen, name="drivetrain-listen", daemon=True).start()


def _write_flight(path: str) -> None:
    """Leave this rank's collectives for the launcher; without them its report says less."""
    try:
        from drivetrain.launch import _flight

        _flight.write(f"{path}.flight")
    except Exception:
        return


if __name__ == "__main__":
    main()
