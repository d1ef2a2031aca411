"""Runs the pods of rendered manifests as processes of this machine, as a kubelet would.

A pod's command, arguments, environment, probes, preStop hook and volumes are those of the manifest.
Three things differ, and only these: an address of the loopback stands for the pod's, a folder for
each mounted volume (its path is replaced in commands), and the node's environment is added.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import yaml

VARIABLE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")
PROBE_SECONDS = 1.0
START_SECONDS = 600.0


class Cluster:
    """Pods by name, and an API server that lists them."""

    def __init__(self, manifests: str, folder: Path, secrets: dict[str, dict[str, str]]) -> None:
        self.objects = [o for o in yaml.safe_load_all(manifests) if o]
        self.folder = folder
        self.secrets = secrets
        self.host_paths: dict[str, str] = {}  # folders of this machine, by those of the manifests
        self.pods: list[Pod] = []
        self.namespace = self.objects[0]["metadata"]["namespace"]
        self._addresses = 0
        self._api = ApiServer(self)
        self.kubeconfig = folder / "kubeconfig"
        self.kubeconfig.write_text(kubeconfig(self._api.server_port))
        threading.Thread(target=self._api.serve_forever, daemon=True).start()

    def deployment(self, name: str) -> dict[str, Any]:
        """Returns a Deployment."""
        found = (o for o in self.objects if o["kind"] == "Deployment")
        return next(o for o in found if o["metadata"]["name"] == name)

    def start_pod(self, deployment: str, node: dict[str, str]) -> Pod:
        """Starts a pod of a Deployment, with the environment of its node."""
        self._addresses += 1
        template = self.deployment(deployment)["spec"]["template"]
        name = f"{deployment}-{self._addresses}"
        pod = Pod(self, name, f"127.0.1.{self._addresses}", template, node)
        self.pods.append(pod)
        return pod

    def close(self) -> None:
        """Kills all pods."""
        for pod in self.pods:
            pod.kill()
        self._api.shutdown()
        self._api.server_close()


class Pod:
    """One pod: its process, and its state as the API server lists it."""

    def __init__(
        self, cluster: Cluster, name: str, ip: str, template: dict[str, Any], node: dict[str, str]
    ) -> None:
        self.cluster = cluster
        self.name = name
        self.ip = ip
        self.labels: dict[str, str] = template["metadata"]["labels"]
        self.spec: dict[str, Any] = template["spec"]
        (self.container,) = self.spec["containers"]
        self.is_ready = False
        self.deleted_at = ""
        self._mounts = self._make_mounts()
        self._variables = self._read_variables()
        own = {name: self._in_folders(value) for name, value in self._variables.items()}
        self.env = {**own, **node, "KUBECONFIG": str(cluster.kubeconfig)}
        self.log = cluster.folder / f"{name}.log"
        command = self.container["command"] + self.container["args"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [self._in_folders(self._expand(word)) for word in command],
                env={**os.environ, **self.env},
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # not a session: launcher/processes.py has the reason
            )

    @property
    def url(self) -> str:
        """Returns the address of its HTTP server."""
        return f"http://{self.ip}:{self.container['ports'][0]['containerPort']}"

    def wait_ready(self) -> None:
        """Waits until its readiness probe succeeds; RuntimeError if it ends before."""
        until = time.monotonic() + START_SECONDS
        while not self.probe():
            if self.process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{self.name} is not ready: {self.tail()}")
            time.sleep(PROBE_SECONDS)
        self.is_ready = True

    def probe(self) -> bool:
        """Returns whether its readiness probe succeeds."""
        path = self.container["readinessProbe"]["httpGet"]["path"]
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def terminate(self) -> str:
        """Deletes the pod as Kubernetes does; returns the output of its preStop hook."""
        self.mark_deleted()
        output = self._run_hook()
        self.process.send_signal(signal.SIGTERM)
        self.wait_ended()
        return output

    def mark_deleted(self) -> None:
        """Has the API server list it as a pod that ends."""
        self.deleted_at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    def wait_ended(self) -> None:
        """Waits until its process has ended; TimeoutExpired after the grace period."""
        self.process.wait(self.spec["terminationGracePeriodSeconds"])
        self.kill()
        self.cluster.pods.remove(self)

    def _run_hook(self) -> str:
        hook = subprocess.run(  # its command is not expanded, but has the container's environment
            self.container["lifecycle"]["preStop"]["exec"]["command"],
            env={**os.environ, **self.env},
            capture_output=True,
            text=True,
            timeout=self.spec["terminationGracePeriodSeconds"],
            check=False,
        )
        output = f"{hook.stdout}{hook.stderr}".strip()
        if hook.returncode:
            raise RuntimeError(f"{self.name}: the preStop hook failed: {output}")
        return output

    def kill(self) -> None:
        """Kills what is left of its processes."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def tail(self) -> str:
        """Returns the end of its log."""
        return self.log.read_text(errors="replace")[-2000:]

    def _make_mounts(self) -> dict[str, str]:
        """Returns a folder for each mounted path; /dev/shm is the machine's own."""
        volumes = {volume["name"]: volume for volume in self.spec["volumes"]}
        mounts = {}
        for mount in self.container["volumeMounts"]:
            volume = volumes[mount["name"]]
            if "secret" in volume:
                mounts[mount["mountPath"]] = str(self._write_secret(volume["secret"]))
            elif "hostPath" in volume:
                mounts[mount["mountPath"]] = self.cluster.host_paths[volume["hostPath"]["path"]]
        return mounts

    def _write_secret(self, source: dict[str, Any]) -> Path:
        """Writes the files of a Secret with the mode that the volume names."""
        folder = self.cluster.folder / f"{self.name}-{source['secretName']}"
        folder.mkdir()
        data = self.cluster.secrets[source["secretName"]]
        items = source.get("items") or [{"key": key, "path": key} for key in data]
        for item in items:
            path = folder / item["path"]
            path.write_text(data[item["key"]])
            path.chmod(source["defaultMode"])
        return folder

    def _read_variables(self) -> dict[str, str]:
        """Returns the variables of the container, expanded in their order."""
        fields = {
            "status.podIP": self.ip,
            "metadata.namespace": self.cluster.namespace,
            "metadata.name": self.name,
        }
        found: dict[str, str] = {}
        self._variables = found
        for entry in self.container.get("env", []):
            source = entry.get("valueFrom", {})
            if "fieldRef" in source:
                value = fields[source["fieldRef"]["fieldPath"]]
            else:
                value = self._expand(entry["value"])
            found[entry["name"]] = value
        return found

    def _expand(self, word: str) -> str:
        """Returns a word with its variables, as Kubernetes expands them."""
        return VARIABLE.sub(lambda match: self._variables.get(match[1], match[0]), word)

    def _in_folders(self, word: str) -> str:
        """Returns a word with folders for mounted paths."""
        for path, folder in self._mounts.items():
            word = word.replace(f"{path}/", f"{folder}/")
        return word


class ApiServer(ThreadingHTTPServer):
    """Lists pods by labels, as the API server of Kubernetes."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(("127.0.0.1", 0), _PodList)
        self.cluster = cluster


class _PodList(BaseHTTPRequestHandler):
    server: ApiServer

    def do_GET(self) -> None:
        """Answers a list of pods; the role of the proxy permits no other request."""
        parts = urlsplit(self.path)
        cluster = self.server.cluster
        if parts.path != f"/api/v1/namespaces/{cluster.namespace}/pods":
            self.send_error(403)
            return
        selector = parse_qs(parts.query)["labelSelector"][0]
        wanted = dict(label.split("=", 1) for label in selector.split(","))
        found = [pod for pod in list(cluster.pods) if wanted.items() <= pod.labels.items()]
        listed = {"kind": "PodList", "apiVersion": "v1", "metadata": {}}
        body = json.dumps({**listed, "items": [pod_object(pod) for pod in found]}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


def pod_object(pod: Pod) -> dict[str, Any]:
    """Returns what the API server states of a pod."""
    metadata: dict[str, Any] = {"name": pod.name, "labels": pod.labels}
    if pod.deleted_at:
        metadata["deletionTimestamp"] = pod.deleted_at
    ready = {"type": "Ready", "status": "True" if pod.is_ready else "False"}
    return {"metadata": metadata, "status": {"podIP": pod.ip, "conditions": [ready]}}


def kubeconfig(port: int) -> str:
    """Returns a configuration that leads to the API server of these tests."""
    named = {"name": "test"}
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{**named, "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{**named, "user": {}}],
            "contexts": [{**named, "context": {"cluster": "test", "user": "test"}}],
        }
    )


class Answer(NamedTuple):
    """An answer of a server."""

    status: int
    body: bytes


def ask(url: str, path: str, body: object = None, key: str = "", timeout: float = 120.0) -> Answer:
    """Sends a request and returns its answer; raises OSError or HTTPException without one."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=timeout)
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    try:
        data = None if body is None else json.dumps(body)
        connection.request("POST" if data else "GET", path, data, headers)
        answer = connection.getresponse()
        return Answer(answer.status, answer.read())
    finally:
        connection.close()
