"""What can be found wrong with a launch before anything is started."""

from __future__ import annotations

import difflib
import errno
import os
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from drivetrain.errors import ConfigurationError, LaunchError
from drivetrain.interfaces.launcher import LaunchRequest

__all__ = ["await_host", "check_command", "check_numbers", "check_request", "command_line", "local_world_size"]

_WORKER = Path(__file__).with_name("_worker.py")


def check_request(request: LaunchRequest) -> None:
    """Find what can't work.

    Raises:
        ConfigurationError: For what was written wrongly: numbers, names of files and modules.
        LaunchError: For what this machine doesn't allow: a port that is taken, a host that isn't known.
    """
    check_numbers(request)
    check_command(request.command, module=request.module, plain=request.plain)
    if request.log_directory is not None and request.log_directory.exists() and not request.log_directory.is_dir():
        raise ConfigurationError(f"The log directory {request.log_directory} is a file.")
    _check_endpoint(request)


def await_host(host: str | None, seconds: float) -> None:
    """Wait until a host's name is known, at most so long; whether it is, `check_request` says.

    Example:
        >>> await_host("127.0.0.1", 5.0)
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            time.sleep(min(1.0, seconds / 10))
        else:
            return


def command_line(request: LaunchRequest) -> list[str]:
    """The program that each rank runs.

    Example:
        >>> command_line(LaunchRequest(command=["./a.out", "-x"], plain=True))
        ['./a.out', '-x']
    """
    if request.plain:
        return list(request.command)
    kind = "module" if request.module else "script"
    return [sys.executable, "-u", str(_WORKER), str(os.getpid()), kind, *request.command]


def local_world_size(request: LaunchRequest) -> int:
    """Number of processes on this machine.

    Example:
        >>> local_world_size(LaunchRequest(command=["x"], num_processes=8, num_machines=2, main_process_ip="a"))
        4
    """
    return request.num_processes // request.num_machines


def check_numbers(request: LaunchRequest, *, remote: bool = False) -> None:
    """Find numbers that make no sense, alone or together.

    Args:
        request: What is to be started.
        remote: The launcher's machines find each other by themselves.

    Raises:
        ConfigurationError: Naming the number and what it may be.
    """
    if request.num_machines < 1:
        raise ConfigurationError(f"The number of machines is {request.num_machines}; it must be at least 1.")
    if request.num_processes < 1:
        raise ConfigurationError(
            f"The number of processes is {request.num_processes}; it counts all of them and must be at least 1."
        )
    if request.num_processes % request.num_machines:
        raise ConfigurationError(
            f"{request.num_processes} processes can't be spread evenly over {request.num_machines} machines: "
            f"the number of processes counts those of all machines."
        )
    if request.min_machines is not None and not 1 <= request.min_machines <= request.num_machines:
        raise ConfigurationError(
            f"At least {request.min_machines} and at most {request.num_machines} machines make no range: the minimum lies between 1 "
            f"and the maximum."
        )
    if not 0 <= request.machine_rank < request.num_machines:
        raise ConfigurationError(
            f"The machine rank is {request.machine_rank}, and with {request.num_machines} machine(s) it must lie "
            f"between 0 and {request.num_machines - 1}."
        )
    if request.max_restarts < 0:
        raise ConfigurationError(f"The number of restarts is {request.max_restarts}; it must be at least 0.")
    port = request.main_process_port
    if port is not None and not 0 <= port <= 65535:
        raise ConfigurationError(f"The main process port is {port}; ports lie between 0 and 65535.")
    if not remote and (request.num_machines > 1 or request.elastic) and (not request.main_process_ip or not port):
        raise ConfigurationError(
            f"{request.num_machines} machine(s) need to know where to meet: give the address of machine 0 and a free port "
            f"on it, the same on each machine (--main-process-ip, --main-process-port)."
        )


def check_command(
    command: Sequence[str], *, module: bool = False, plain: bool = False, elsewhere: bool = False
) -> None:
    """Find what can't be run.

    Args:
        command: Script, module or program, and its arguments.
        module: It is a module.
        plain: It is a program.
        elsewhere: It lies where this machine can't look.

    Raises:
        ConfigurationError: For a script, module or program that isn't there, with the nearest match.
    """
    if not command:
        raise ConfigurationError("There is nothing to run: give a script, a module (-m) or a program (--no-python).")
    if plain and module:
        raise ConfigurationError("A command is either a module (-m) or a program (--no-python), not both.")
    name = command[0]
    if elsewhere:
        return
    if plain:
        if shutil.which(name) is None:
            raise ConfigurationError(f"There is no program {name!r} on the PATH, or it isn't executable.")
    elif module:
        _check_module(name)
    else:
        _check_script(Path(name))


def _check_script(script: Path) -> None:
    if script.is_dir():
        if not (script / "__main__.py").is_file():
            raise ConfigurationError(f"{script} is a directory without a __main__.py, so it can't be run.")
        return
    if script.is_file():
        if not os.access(script, os.R_OK):
            raise ConfigurationError(f"The script {script} can't be read: its permissions forbid it.")
        return
    hint = ""
    if script.parent.is_dir():
        close = difflib.get_close_matches(script.name, [p.name for p in script.parent.glob("*.py")], n=1)
        if close:
            hint = f" Did you mean {script.parent / close[0]}?"
    elif shutil.which(str(script)) is not None:
        hint = f" To run the program {script}, add --no-python."
    if not hint and not script.suffix:
        hint = f" To run a module, use -m {script}; to run a program, add --no-python."
    raise ConfigurationError(f"There is no script {script} (looked in {Path.cwd()}).{hint}")


def _check_module(name: str) -> None:
    """Look for the module without importing its parents."""
    if name.endswith(".py") or "/" in name:
        module = name.removesuffix(".py").replace("/", ".")
        raise ConfigurationError(f"-m takes the name of a module: `-m {module}`, or the file alone without -m.")
    path: list[str] = [str(Path.cwd()), *sys.path]
    parts = name.split(".")
    for i in range(len(parts)):
        full = ".".join(parts[: i + 1])
        spec = PathFinder.find_spec(full, path)
        if spec is None:
            where = f"in {Path.cwd()} or the environment" if i == 0 else f"in the package {'.'.join(parts[:i])}"
            raise ConfigurationError(f"There is no module {full!r} {where}.")
        path = list(spec.submodule_search_locations or ())
        if not path and i + 1 < len(parts):
            raise ConfigurationError(f"{full!r} is a module and not a package, so there is no {name!r}.")
    if path and PathFinder.find_spec(f"{name}.__main__", path) is None:
        raise ConfigurationError(f"The package {name!r} has no __main__ module, so it can't be run with -m.")


def _check_endpoint(request: LaunchRequest) -> None:
    port = request.main_process_port or 0
    if request.num_machines > 1 or request.elastic:
        try:
            socket.getaddrinfo(request.main_process_ip, port)
        except OSError as error:
            raise LaunchError(
                f"The host {request.main_process_ip!r} of the main process isn't known here ({error.strerror}). Give an "
                f"address of machine 0 that this machine can reach (--main-process-ip)."
            ) from None
    if port and request.machine_rank == 0 and not request.elastic:  # elastic: the first that comes opens it
        try:
            socket.create_server(("", port)).close()
        except OSError as error:
            why = "is already in use" if error.errno == errno.EADDRINUSE else f"can't be used ({error.strerror})"
            free = "leave --main-process-port out for a free one" if request.num_machines == 1 else "give another one"
            raise LaunchError(f"Port {port} on this machine {why}: {free}, or end the program that holds it.") from None
