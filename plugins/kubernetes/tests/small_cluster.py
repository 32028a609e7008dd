"""A cluster of one process: an HTTP server that speaks the part of Kubernetes' API that launching needs, and runs pods as processes.

Objects are checked against the published schemas before they are taken. What a real cluster does and this one doesn't: images, nodes, networks (the
name of pod 0 is replaced by this machine's address), the finer rules of admission, back-off times.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
from kubeflow_trainer_api.models import TrainerV1alpha1TrainJob

VERSION = "1.35"
TOKEN = "a-token-that-nobody-may-see"
INDEX = "batch.kubernetes.io/job-completion-index"


class Refused(Exception):
    """The API server's answer, with a status code."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


def check(made):
    """What an API server refuses by its schema."""
    if made["kind"] == "TrainJob":
        # The model is lenient about names that it doesn't know: they get lost.
        if TrainerV1alpha1TrainJob.from_dict(made).to_dict() != made:
            raise Refused(422, "unknown fields in TrainJob")
        return
    if made["kind"] == "PodGroup":
        return  # no published schema in a package
    try:
        kubernetes_validate.validate(made, VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        raise Refused(422, f"{made['kind']} is invalid: {error.message}") from None
    if made["kind"] == "Job":
        _check_job(made["spec"])


def _check_job(spec):
    """Rules of admission that schemas don't have."""
    pod = spec["template"]["spec"]
    if spec.get("podFailurePolicy") and pod["restartPolicy"] != "Never":
        raise Refused(422, "podFailurePolicy needs restartPolicy Never")
    mounted = [m["name"] for c in pod["containers"] for m in c.get("volumeMounts", [])]
    if sorted(mounted) != sorted(v["name"] for v in pod.get("volumes", [])):
        raise Refused(422, "volumes and mounts don't belong together")


def now():
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class Pod:
    """One pod, a process."""

    def __init__(self, job, index, container, labels):
        self.name = f"{job}-{index}-{uuid.uuid4().hex[:5]}"
        self.index = index
        self.container = container
        self.labels = {**labels, INDEX: str(index)}
        self.created = now()
        self.uid = uuid.uuid4().hex
        self.lines = []
        self.changed = threading.Condition()
        self.conditions = []
        self.process = None
        self.finished = None
        self.waiting = None

    def start(self, command, environ, folder):
        if self.container["image"].startswith("missing"):
            self.waiting = {"reason": "ErrImagePull", "message": f"there is no {self.container['image']}"}
            return
        self.process = subprocess.Popen(
            command, env=environ, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        for line in self.process.stdout:
            with self.changed:
                self.lines.append(f"{now()} ".encode() + line)
                self.changed.notify_all()
        self.process.wait()
        with self.changed:
            self.finished = now()
            self.changed.notify_all()

    @property
    def code(self):
        """Exit code as a container's."""
        code = self.process.returncode
        return 128 - code if code < 0 else code

    def terminate(self, grace=30):
        if self.process is not None and self.finished is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.terminate()
            threading.Timer(grace, self._kill).start()
        elif self.process is None:
            self.finished = now()

    def _kill(self):
        if self.finished is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def seen(self):
        if self.waiting is not None:
            state, phase = {"waiting": self.waiting}, "Pending"
        elif self.finished is None:
            state, phase = {"running": {"startedAt": self.created}}, "Running"
        else:
            state = {
                "terminated": {
                    "exitCode": self.code,
                    "finishedAt": self.finished,
                    "reason": "Error" if self.code else "Completed",
                }
            }
            phase = "Failed" if self.code else "Succeeded"
        status = {"phase": phase, "conditions": self.conditions}
        status["containerStatuses"] = [{"name": self.container["name"], "state": state}]
        meta = {"name": self.name, "uid": self.uid, "labels": self.labels, "creationTimestamp": self.created}
        return {"metadata": meta, "status": status}


class SmallCluster:
    """The server and its controllers.

    Args:
        folder: Where pods run.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self.objects = {}
        self.pods = []
        self.secrets = {}
        self.requests = []
        self.failing = 0
        self.cut = 0
        self.queue = False
        self.stopped = False
        self._lock = threading.RLock()
        cluster = self

        class Handler(_Handler):
            owner = cluster

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        threading.Thread(target=self._control, daemon=True).start()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "small",
            "clusters": [{"name": "small", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {"token": TOKEN}}],
            "contexts": [{"name": "small", "context": {"cluster": "small", "user": "me", "namespace": "lab"}}],
        }
        self.kubeconfig = self.folder / "kubeconfig"
        self.kubeconfig.write_text(json.dumps(config))

    @property
    def url(self):
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self):
        self.stopped = True
        for pod in self.pods:
            if pod.process is not None and pod.finished is None:
                pod._kill()
        self._server.shutdown()
        self._server.server_close()

    def preempt(self, index):
        """What a scheduler does that needs the place of a pod."""
        (pod,) = [p for p in self.pods if p.index == index and p.finished is None]
        pod.conditions.append(
            {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "preempted"}
        )
        pod.terminate()

    def release(self):
        """What a queue does once there is room."""
        with self._lock:
            for made in self.objects.values():
                made["spec"].pop("suspend", None)

    # -- what the handler calls --------------------------------------------------------------------------------------------

    def create(self, namespace, made):
        check(made)
        key = (made["kind"], namespace, made["metadata"]["name"])
        with self._lock:
            if key in self.objects:
                raise Refused(409, f"{made['kind'].lower()}s {key[2]!r} already exists")
            meta = {**made["metadata"], "uid": uuid.uuid4().hex, "namespace": namespace}
            self.objects[key] = {**made, "metadata": meta, "status": {}}
            if self.queue and "kueue.x-k8s.io/queue-name" in meta["labels"]:
                self.objects[key]["spec"] = {**made["spec"], "suspend": True}
            return self.objects[key]

    def delete(self, kind, namespace, name):
        with self._lock:
            found = self.objects.pop((kind, namespace, name), None)
            if found is None:
                raise Refused(404, f"{kind} {name} not found")
            uid = found["metadata"]["uid"]
            for key, other in list(self.objects.items()):  # the garbage collector
                if uid in [o["uid"] for o in other["metadata"].get("ownerReferences", [])]:
                    del self.objects[key]
            for pod in self._of(name):
                pod.terminate()
        return {"kind": "Status", "status": "Success"}

    def listed(self, selector):
        """Pods; those of a job that is gone vanish when they end."""
        name, _, value = selector.partition("=")
        with self._lock:
            names = {key[2] for key in self.objects}
            kept = [p for p in self.pods if p.finished is None or p.labels["job"] in names]
            return [p.seen() for p in kept if p.labels.get(name) == value]

    # -- controllers -------------------------------------------------------------------------------------------------------

    def _of(self, job):
        return [p for p in self.pods if p.labels["job"] == job]

    def _control(self):
        while not self.stopped:
            with self._lock:
                for (kind, _, name), made in list(self.objects.items()):
                    if kind in ("Job", "TrainJob") and not made["status"] and not made["spec"].get("suspend"):
                        self._reconcile(kind, name, made)
            time.sleep(0.05)

    def _reconcile(self, kind, name, made):
        number = made["spec"]["completions"] if kind == "Job" else made["spec"]["trainer"]["numNodes"]
        failures, done = 0, 0
        for index in range(number):
            pods = [p for p in self._of(name) if p.index == index]
            ended = [p for p in pods if p.finished is not None]
            if any(p.code == 0 for p in ended):
                done += 1
                continue
            for pod in ended:
                action = self._action(made, pod)
                failures += action == "Count"
                if action == "FailJob":
                    failures = sys.maxsize
            if len(ended) == len(pods) and failures <= made["spec"].get("backoffLimit", 0):
                self._start(kind, name, made, index)
        if failures > made["spec"].get("backoffLimit", 0):
            made["status"] = _over("Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit")
            for pod in self._of(name):
                pod.terminate()
        elif done == number:
            made["status"] = _over("Complete", "", "")

    def _action(self, made, pod):
        for rule in made["spec"].get("podFailurePolicy", {}).get("rules", []):
            codes = rule.get("onExitCodes", {}).get("values", [])
            types = [c["type"] for c in rule.get("onPodConditions", [])]
            if pod.code in codes or any(c["type"] in types for c in pod.conditions):
                return rule["action"]
        return "Count"

    def _start(self, kind, name, made, index):
        if kind == "Job":
            container = made["spec"]["template"]["spec"]["containers"][0]
            labels = {"batch.kubernetes.io/job-name": name, "job": name}
            extra, host = {}, f"{name}-0.{name}"
        else:
            container = {"name": "node", "image": "runtime's", **made["spec"]["trainer"]}
            labels = {"jobset.sigs.k8s.io/jobset-name": name, "job": name}
            host = f"{name}-node-0-0.{name}"
            per_node = str(container["numProcPerNode"])
            extra = {
                "PET_NNODES": str(container["numNodes"]),
                "PET_NPROC_PER_NODE": per_node,
                "PET_NODE_RANK": str(index),
            }
            extra |= {"PET_MASTER_ADDR": host, "PET_MASTER_PORT": "29500"}
        pod = Pod(name, index, container, labels)
        own = {e["name"]: e["value"] if "value" in e else self._value(e["valueFrom"]) for e in container.get("env", [])}
        own |= {**extra, "JOB_COMPLETION_INDEX": str(index)}
        config = self.objects.get(("ConfigMap", made["metadata"]["namespace"], f"{name}-config"))
        if config is not None and "DRIVETRAIN_CONFIG_FILE" in own:
            ((file, text),) = config["data"].items()
            (self.folder / f"mounted-{file}").write_text(text)
            own["DRIVETRAIN_CONFIG_FILE"] = str(self.folder / f"mounted-{file}")
        words = [_expanded(word, own).replace(host, "127.0.0.1") for word in container["command"]]
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        base = {"PATH": path, "OMP_NUM_THREADS": "1", "HOSTNAME": f"{name}-{index}", "HOME": str(self.folder)}
        pod.start(words, {**base, **own, **_inherited()}, self.folder)
        self.pods.append(pod)

    def _value(self, source):
        ref = source["secretKeyRef"]
        return self.secrets[ref["name"]][ref["key"]]


def _inherited():
    return {
        name: os.environ[name] for name in ("MARK", "LD_LIBRARY_PATH", "COVERAGE_PROCESS_START") if name in os.environ
    }


def _over(kind, reason, message):
    return {"conditions": [{"type": kind, "status": "True", "reason": reason, "message": message}]}


def _expanded(word, environ):
    """References to variables, as the kubelet replaces them."""
    return re.sub(
        r"\$\$|\$\(([A-Za-z_][\w.-]*)\)",
        lambda m: "$" if m[0] == "$$" else environ.get(m[1], m[0]),
        word,
    )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: SmallCluster
    KINDS = {
        "jobs": "Job",
        "trainjobs": "TrainJob",
        "services": "Service",
        "configmaps": "ConfigMap",
        "podgroups": "PodGroup",
    }

    def log_message(self, *_):
        pass

    def _handle(self):
        address = urlsplit(self.path)
        parts = address.path.strip("/").split("/")
        query = {name: values[0] for name, values in parse_qs(address.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        self.owner.requests.append((self.command, address.path))
        at = parts.index("namespaces")
        namespace, plural, *rest = parts[at + 1 :]
        try:
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                raise Refused(401, "Unauthorized")
            if self.owner.failing and self.command == "GET":
                self.owner.failing -= 1
                raise Refused(503, "the server is busy")
            if plural == "pods" and rest[1:] == ["log"]:
                self._log(rest[0], query)
                return
            self._answer(200, self._result(namespace, plural, rest, query, body))
        except Refused as error:
            status = {"kind": "Status", "status": "Failure", "message": str(error), "code": error.code}
            self._answer(error.code, status)

    do_GET = do_POST = do_DELETE = _handle

    def _result(self, namespace, plural, rest, query, body):
        if plural == "pods":
            return {"kind": "PodList", "items": self.owner.listed(query["labelSelector"])}
        kind = self.KINDS[plural]
        if self.command == "POST":
            return self.owner.create(namespace, body)
        if self.command == "DELETE":
            return self.owner.delete(kind, namespace, rest[0])
        found = self.owner.objects.get((kind, namespace, rest[0]))
        if found is None:
            raise Refused(404, f"{plural} {rest[0]!r} not found")
        return found

    def _answer(self, code, data):
        text = json.dumps(data).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _log(self, name, query):
        pod = next((p for p in self.owner.pods if p.name == name), None)
        if pod is None:
            raise Refused(404, f"pods {name!r} not found")
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        shown = 0
        with contextlib.suppress(OSError):
            while True:
                with pod.changed:
                    pod.changed.wait_for(lambda: len(pod.lines) > shown or pod.finished is not None, timeout=1)
                    lines, ended = pod.lines[shown:], pod.finished is not None
                    shown = len(pod.lines)
                if lines:
                    data = b"".join(lines)
                    self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                    self.wfile.flush()
                if self.owner.cut and shown >= self.owner.cut:  # a connection that breaks in the middle
                    self.owner.cut = 0
                    self.close_connection = True
                    return
                if ended and not lines:
                    self.wfile.write(b"0\r\n\r\n")
                    return
