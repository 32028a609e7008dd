"""Ranks that are forked from this process: they need not import torch anew, and may die."""

from __future__ import annotations

import os
import signal
import socket
import time
import traceback

import torch


def start(world, function, *arguments):
    """Call ``function(*arguments)`` in as many new processes as ranks, each with a launcher's variables; give their process ids."""
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # imports torch's compiler, here and once
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [_fork(rank, world, port, function, arguments) for rank in range(world)]


def _fork(rank, world, port, function, arguments):
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        if world > 1:
            launched = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
            os.environ.update({name: str(value) for name, value in launched.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        function(*arguments)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def end(children, timeout=100.0):
    """Wait for them; give their exit codes, or minus the signal that ended them."""
    deadline = time.monotonic() + timeout
    codes = dict.fromkeys(children)
    while None in codes.values():
        for pid in [pid for pid, code in codes.items() if code is None]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for pid in [pid for pid, code in codes.items() if code is None]:
                os.kill(pid, signal.SIGKILL)
            raise TimeoutError(f"ranks {[rank for rank, pid in enumerate(children) if codes[pid] is None]} hang")
        time.sleep(0.005)
    return list(codes.values())
