"""A job that is waited for: its output, what keeps its pods from starting, and how it ends."""

from __future__ import annotations

import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drivetrain.errors import LaunchError
from drivetrain_kubernetes.api import Cluster, JobState
from drivetrain_kubernetes.command import STOPPED

__all__ = ["Watch"]

#: Seconds between two looks at a job.
_POLL = 2.0
#: Seconds in which a server that doesn't answer may come back.
_PATIENCE = 300.0
#: Seconds for the rest of the output after the job's end.
_REST = 10.0
_INDEX = "batch.kubernetes.io/job-completion-index"
_CONTAINERS = ("train", "node")
#: Reasons for which a container waits, and won't start by itself.
_STUCK = re.compile(r"Err|BackOff|Invalid|Cannot|NotFound")


@dataclass(frozen=True, slots=True)
class _End:
    """How a pod's container ended."""

    created: str
    finished: str
    machine: int
    code: int
    reason: str


class Watch:
    """A job that is waited for.

    Args:
        cluster: Where it runs.
        job: The job as it was made.
        machines: Number of its pods.
        label: Say from which machine a line comes that has no rank.
        grace: Seconds that pods have to end.
        poll: Seconds between two looks.
    """

    def __init__(
        self, cluster: Cluster, job: Mapping[str, Any], *, machines: int, label: bool, grace: float, poll: float = _POLL
    ) -> None:
        self._cluster = cluster
        self._job = job
        self._label = label and machines > 1
        self._grace = grace
        self._poll = poll
        self._signum = 0
        self._hurry = False
        self._wake = threading.Event()
        self._followers: dict[tuple[str, int], _Follower] = {}
        self._ends: dict[int, _End] = {}
        self._said: set[str] = set()

    def run(self) -> int:
        """Wait for the job's end, or end it on a signal; the exit code to pass on.

        Raises:
            LaunchError: If the server refuses to tell.
        """
        before = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            state = self._wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            for follower in self._followers.values():
                follower.close()
        return 128 + self._signum if self._signum else self._code(state)

    def _on_signal(self, number: int, _: Any) -> None:
        self._hurry = self._signum != 0
        self._signum = self._signum or number
        self._wake.set()

    def _wait(self) -> JobState:
        silent: float | None = None
        deleted: float | None = None
        while True:
            try:
                if self._signum and deleted is None:
                    self._say_once(f"removing job {self._name} (again to leave at once)")
                    self._cluster.delete(self._job)
                    deleted = time.monotonic()
                state = self._cluster.state(self._job)
                pods = self._cluster.pods(self._job)
                silent = None
            except ConnectionError as error:
                silent = silent or time.monotonic()
                self._say_once(f"{error}. Asking again; the job itself goes on.")
                if self._hurry or time.monotonic() - silent > _PATIENCE:
                    raise LaunchError(f"{error}. Job {self._name} wasn't touched: it may still run.") from None
                state, pods = JobState(), []
            else:
                self._look_at(pods)
                if state.suspended:
                    self._say_once(
                        f"job {self._name} is suspended: it waits for its queue, or for somebody to resume it."
                    )
            if deleted is not None:
                if self._hurry or (state.gone and not pods) or time.monotonic() - deleted > self._grace + _REST:
                    break
            elif state.over:
                break
            self._wake.wait(self._poll)
            self._wake.clear()
        self._show_rest()
        return state

    @property
    def _name(self) -> str:
        return str(self._job["metadata"]["name"])

    def _look_at(self, pods: Sequence[Mapping[str, Any]]) -> None:
        for pod in sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", ""))):
            meta, status = pod["metadata"], pod.get("status") or {}
            machine = int({**(meta.get("labels") or {}), **(meta.get("annotations") or {})}.get(_INDEX, 0))
            containers = [c for c in status.get("containerStatuses") or [] if c["name"] in _CONTAINERS]
            for container in containers:
                state = container.get("state") or {}
                if "running" in state or "terminated" in state:
                    follower = self._follow(meta, container, machine)
                    follower.ended = "terminated" in state
                if "terminated" in state:
                    self._note_end(meta, machine, state["terminated"])
                waiting = state.get("waiting") or {}
                if _STUCK.search(waiting.get("reason") or ""):
                    self._say_once(f"machine {machine} waits: {waiting['reason']}: {waiting.get('message', '')}")
            for condition in status.get("conditions") or []:
                if condition.get("reason") == "Unschedulable" and status.get("phase") == "Pending":
                    self._say_once(f"machine {machine} has no node yet: {condition.get('message', '')}")
                if condition["type"] == "DisruptionTarget" and condition.get("status") == "True":
                    why = condition.get("message") or condition.get("reason", "")
                    self._say_once(f"machine {machine} must go ({meta['name']}): {why}")

    def _follow(self, meta: Mapping[str, Any], container: Mapping[str, Any], machine: int) -> _Follower:
        key = (meta["uid"], int(container.get("restartCount", 0)))  # a container may start again in its pod
        if key not in self._followers:
            for (uid, _), before in self._followers.items():
                before.ended = before.ended or uid == meta["uid"]
            prefix = f"[machine {machine}] ".encode() if self._label else b""
            self._followers[key] = _Follower(self._cluster, meta["name"], container["name"], prefix)
            self._followers[key].start()
        return self._followers[key]

    def _note_end(self, meta: Mapping[str, Any], machine: int, ended: Mapping[str, Any]) -> None:
        end = _End(
            created=str(meta.get("creationTimestamp", "")),
            finished=str(ended.get("finishedAt", "")),
            machine=machine,
            code=int(ended.get("exitCode", 0)),
            reason=str(ended.get("reason", "")),
        )
        before = self._ends.get(machine)
        if before is None or before.created <= end.created:  # of a pod and its successors, the last one counts
            self._ends[machine] = end

    def _show_rest(self) -> None:
        end = time.monotonic() + (0.0 if self._hurry else _REST)
        for follower in self._followers.values():
            follower.join(max(0.0, end - time.monotonic()))

    def _code(self, state: JobState) -> int:
        if state.succeeded:
            return 0
        if state.gone:
            say(f"job {self._name} is gone: somebody has removed it.")
            return 1
        failed = [e for e in self._ends.values() if e.code not in (0, STOPPED)]
        first = min(failed, key=lambda e: (e.finished, e.machine), default=None)
        if first is not None:
            reason = f" ({first.reason})" if first.reason not in ("", "Error") else ""
            say(f"machine {first.machine} failed first, with exit code {first.code}{reason}.")
        code = first.code if first is not None else 1
        say(f"job {self._name} failed with exit code {code}: {state.reason or 'without a reason'}")
        return code

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            say(text)


class _Follower:
    """Shows one container's output on a thread, also across connections that break."""

    def __init__(self, cluster: Cluster, pod: str, container: str, prefix: bytes) -> None:
        self._read: Callable[..., Any] = cluster.log
        self._pod = pod
        self._container = container
        self._prefix = prefix
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._last = b""
        self._seen = 0.0
        #: The container runs no more: once its output has been read to the end, there is no other.
        self.ended = False

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"log-{self._pod}", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> None:
        if self._thread is not None:
            self._thread.join(seconds)

    def close(self) -> None:
        self._closing.set()

    def _run(self) -> None:
        while not self._closing.is_set():
            ended = self.ended
            seconds = int(time.monotonic() - self._seen) + 5 if self._seen else None
            try:
                for line in self._read(self._pod, self._container, seconds=seconds):
                    self._show(line)
                if ended or self.ended:
                    return
            except (ConnectionError, LaunchError):
                if ended:  # the pod is gone, and its output with it
                    return
            self._closing.wait(1.0)

    def _show(self, line: bytes) -> None:
        moment, _, text = line.partition(b" ")
        if moment <= self._last:
            return  # seen before the connection broke
        self._last, self._seen = moment, time.monotonic()
        label = b"" if text.startswith(b"[rank ") else self._prefix
        data = (label + text + b"\n").decode("utf-8", "replace")
        sys.stdout.write(data)
        sys.stdout.flush()


def say(text: str) -> None:
    """A message of the launcher's own."""
    sys.stderr.write(f"drivetrain: {text}\n")
    sys.stderr.flush()
