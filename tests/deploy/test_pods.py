"""Pods as processes: variables, volumes and the list of the API server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from pods import Cluster, ask
from replace_pods import SCRAPES, disaggregated

PROGRAM = """
import os, sys
print(*sys.argv[1:], os.environ["URL"], oct(os.stat(sys.argv[1]).st_mode & 0o777), flush=True)
open(sys.argv[1]).read()
sys.stdin.read()
"""
MANIFEST = {
    "apiVersion": "apps/v1",
    "kind": "Deployment",
    "metadata": {"name": "d", "namespace": "n"},
    "spec": {
        "template": {
            "metadata": {"labels": {"app": "x", "role": "d"}},
            "spec": {
                "terminationGracePeriodSeconds": 60,
                "volumes": [{"name": "k", "secret": {"secretName": "s", "defaultMode": 0o400}}],
                "containers": [
                    {
                        "command": ["python3", "-c", PROGRAM],
                        "args": ["/keys/a.key", "$(URL)", "$(NONE)"],
                        "env": [
                            {
                                "name": "POD_IP",
                                "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}},
                            },
                            {"name": "URL", "value": "http://$(POD_IP):80"},
                        ],
                        "ports": [{"containerPort": 80}],
                        "volumeMounts": [{"name": "k", "mountPath": "/keys"}],
                        "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", "echo $URL"]}}},
                    }
                ],
            },
        }
    },
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(yaml.safe_dump(MANIFEST), tmp_path, {"s": {"a.key": "secret"}})
    yield made
    made.close()


def test_a_pod_runs_its_command_and_its_hook(cluster: Cluster) -> None:
    pod = cluster.start_pod("d", {})
    pod.process.wait(60)
    path, url, unknown, own, mode = pod.log.read_text().split()
    assert Path(path).name == "a.key" and Path(path).read_text() == "secret"
    assert (url, own, unknown, mode) == (pod.url, pod.url, "$(NONE)", "0o400")
    assert pod.terminate() == pod.url
    assert cluster.pods == []


def test_the_api_server_lists_pods_by_their_labels(cluster: Cluster) -> None:
    pod = cluster.start_pod("d", {})
    pod.is_ready = True
    config = json.loads(cluster.kubeconfig.read_text())
    server = config["clusters"][0]["cluster"]["server"]

    def listed(selector: str) -> list[object]:
        path = f"/api/v1/namespaces/n/pods?labelSelector={selector}"
        return list(json.loads(ask(server, path).body)["items"])

    (found,) = listed("app%3Dx,role%3Dd")
    assert found == {
        "metadata": {"name": pod.name, "labels": pod.labels},
        "status": {"podIP": pod.ip, "conditions": [{"type": "Ready", "status": "True"}]},
    }
    assert listed("app%3Dy") == []
    assert ask(server, "/api/v1/namespaces/other/pods").status == 403
    pod.deleted_at = "2026-01-01T00:00:00Z"
    assert "deletionTimestamp" in listed("app%3Dx")[0]["metadata"]  # type: ignore[index]


def test_split_requests_are_counted_without_the_times_of_their_series() -> None:
    page = (SCRAPES / "proxy.txt").read_text()
    assert "vllm_disagg_requests_created{" in page
    assert 0 < disaggregated(page) < 1e6
