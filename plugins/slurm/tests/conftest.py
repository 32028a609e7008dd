"""A real SLURM with two nodes, on this machine."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

CONF = """\
ClusterName=dt
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=2
SchedulerParameters=sched_interval=3,batch_sched_delay=1
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldLogFile={folder}/slurmctld.log
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 State=UNKNOWN
PartitionName=debug Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def _programs():
    """None if SLURM is here or could be installed, else why not."""
    if os.geteuid() != 0:
        return "SLURM's daemons need root"
    if shutil.which("slurmctld") and shutil.which("munged"):
        return None
    if shutil.which("apt-get") is None:
        return "SLURM isn't installed, and there is no apt-get to install it with"
    quiet = {
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.DEVNULL,
        "env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
    }
    subprocess.run(["apt-get", "update"], check=False, timeout=120, **quiet)
    subprocess.run(["apt-get", "install", "-y", "slurm-wlm", "munge"], check=False, timeout=200, **quiet)
    return None if shutil.which("slurmctld") else "SLURM isn't installed, and apt-get couldn't install it"


def _free_ports(number):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Starts the daemons; programs find them through SLURM_CONF."""
    reason = _programs()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir()
    conf = folder / "slurm.conf"
    conf.write_text(CONF.format(host=socket.gethostname(), folder=folder, ports=_free_ports(3)))
    os.environ["SLURM_CONF"] = str(conf)
    munge = None
    try:
        munge = _start_munge()
        for command in (["slurmctld"], ["slurmd", "-N", "n1"], ["slurmd", "-N", "n2"]):
            subprocess.run(command, check=True, timeout=30)
        if not _soon(lambda: _output("sinfo", "-h", "-o", "%T %D") == "idle 2", 40):
            logs = "\n".join(f.read_text()[-2000:] for f in folder.glob("*.log"))
            pytest.skip(f"the nodes of SLURM didn't come up here: {logs}")
        yield folder
    finally:
        subprocess.run(["scancel", "--me"], check=False, capture_output=True, timeout=30)
        for file in folder.glob("*.pid"):
            _end(file)
        if munge is not None:
            _end(munge)
        os.environ.pop("SLURM_CONF", None)


def _start_munge():
    """The pid file of a daemon of our own; None if one runs already."""
    if (
        Path("/run/munge/munge.socket.2").exists()
        and subprocess.run(["munge", "-n"], capture_output=True, check=False).returncode == 0
    ):
        return None
    Path("/run/munge").mkdir(exist_ok=True)
    shutil.chown("/run/munge", "munge", "munge")
    subprocess.run(["runuser", "-u", "munge", "--", "/usr/sbin/munged"], check=True, timeout=30)
    return Path("/run/munge/munged.pid")


def _end(file):
    try:
        os.kill(int(file.read_text()), signal.SIGTERM)
    except (OSError, ValueError):
        return


def _output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout.strip()


def _soon(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.3)
    return True


@pytest.fixture
def soon():
    """``soon(condition, seconds)``: whether it becomes true in time."""
    return _soon
