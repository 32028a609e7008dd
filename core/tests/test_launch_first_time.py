"""A machine that is replaced waits for a machine 0 that doesn't know it yet."""

from __future__ import annotations

import threading
import time

import pytest

from drivetrain.launch._first_time import first_time
from drivetrain.parallel.process_group import find_free_port


class Machine0:
    """The store that machine 0 opens, and a successor of it under the same address."""

    def __init__(self):
        self.port = find_free_port()
        self.store = self._open()

    def _open(self):
        from torch.distributed import PrefixStore, TCPStore

        self._server = TCPStore("127.0.0.1", self.port, is_master=True, wait_for_workers=False)
        return PrefixStore("run", self._server)

    def replace(self):
        self.store = self._server = None
        self.store = self._open()

    def join(self):
        from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

        return StaticTCPRendezvous("127.0.0.1", self.port, rank=1, world_size=2, run_id="run", timeout=3)


@pytest.fixture
def machine0():
    return Machine0()


def test_the_first_time_nothing_is_waited_for(machine0):
    handler = first_time(machine0.join, machine=1, seconds=60)
    assert handler.get_backend() == "static"
    assert machine0.store.add("machine-1", 0) == 1


def test_a_replacement_waits_for_the_new_machine_0(machine0):
    machine0.store.add("machine-1", 1)
    found = []
    thread = threading.Thread(target=lambda: found.append(first_time(machine0.join, machine=1, seconds=60, pause=0.05)))
    thread.start()
    while machine0.store.add("machine-1", 0) < 3:  # it has looked, and gone away again
        time.sleep(0.01)
    assert found == []
    machine0.replace()
    thread.join(30)
    assert len(found) == 1
    assert machine0.store.add("machine-1", 0) == 1


def test_after_the_time_whatever_there_is_counts(machine0):
    machine0.store.add("machine-1", 1)
    assert first_time(machine0.join, machine=1, seconds=0.2, pause=0.05) is not None
