"""Replaces the pods of two P and two D one by one under load; the last line is JSON.

    python tests/deploy/replace_pods.py MANIFESTS [--requests N] [--record] [--sigterm]

MANIFESTS is the output of `kubectl kustomize deploy/kubernetes/overlays/cpu`. Pods run as
`pods.py` describes; a request is lost if its answer is not that of one engine alone. `--record`
writes the metrics of the proxy and of a D into scrapes/. With `--sigterm` no preStop hook runs:
one P and one D at a time get SIGTERM while they have requests, as when both Deployments roll out.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics

import yaml

from pods import Cluster, Pod, ask
from vllm_disagg.drain import count_requests

ROOT = Path(__file__).parents[2]
SCRAPES = Path(__file__).parent / "scrapes"
MODEL = ROOT / ".cache" / "models"
CLIENTS = 6
PAUSE_SECONDS = 0.4  # of a client, behind each answer
ANSWER_TOKENS = 24
# Of a machine with few cores: each engine may use one, and no engine asks a hub for its model.
NODES = [
    {
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/engine/steady'}",
    }
    for core in sorted(os.sched_getaffinity(0))
]
PROMPTS = [text[:900] for text in list(topics.values())[:40] if len(text) >= 900]


class Load:
    """Clients that ask one after another until they are stopped, and count what they get."""

    def __init__(
        self, url: str, keys: list[str], expected: dict[str, str], clients: int = CLIENTS
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []
        self._url = url
        self._keys = keys
        self._expected = expected
        self._prompts = list(expected)
        self._clients = clients
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._ask, args=(n,)) for n in range(clients)]
        for thread in self._threads:
            thread.start()

    @property
    def requests(self) -> int:
        """Returns the number of answered requests."""
        return sum(self.outcomes.values())

    def stop(self) -> None:
        """Waits for the last answers."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, number: int) -> None:
        turn = number
        key = self._keys[number % len(self._keys)]
        while not self._stop.is_set():
            prompt = self._prompts[turn % len(self._prompts)]
            turn += self._clients + 1
            outcome = self._outcome(prompt, key)
            with self._lock:
                self.outcomes[outcome] += 1
            self._stop.wait(PAUSE_SECONDS)

    def _outcome(self, prompt: str, key: str) -> str:
        """Returns "exact", "wrong", "clean" for an explicit error, or "lost"."""
        try:
            answer = ask(self._url, "/v1/completions", body_of(prompt), key)
        except (OSError, http.client.HTTPException) as error:
            self.problems.append(repr(error))
            return "lost"
        if answer.status != 200:
            self.problems.append(f"{answer.status} {answer.body[:300]!r}")
            return "clean"
        return "exact" if text_in(answer.body) == self._expected[prompt] else "wrong"


def body_of(prompt: str) -> dict[str, object]:
    """Returns the body of a request whose answer does not depend on chance."""
    limits = {"max_tokens": ANSWER_TOKENS, "ignore_eos": True, "temperature": 0}
    return {"model": "tiny", "prompt": prompt, **limits}


def text_in(body: bytes) -> str:
    """Returns the text of an answer."""
    return str(json.loads(body)["choices"][0]["text"])


@contextmanager
def cluster_of(manifests: str) -> Iterator[Cluster]:
    """Makes a cluster without pods, with keys and the tiny model."""
    with tempfile.TemporaryDirectory(prefix="vllm-disagg-pods-") as folder:
        # Two keys, as while they change: clients send the one or the other.
        clients = [secrets.token_hex(8) for _ in range(2)]
        keys = {
            "fleet.key": secrets.token_hex(32),
            "api.key": "\n".join(clients),
            "engine-keys.yaml": yaml.safe_dump({"api-key": clients}),
            "admin.key": secrets.token_hex(8),
        }
        cluster = Cluster(manifests, Path(folder), {"vllm-disagg-keys": keys})
        models = Path(folder) / "models"
        models.mkdir()
        (models / "tiny").symlink_to(MODEL / "dense")
        cluster.host_paths["/var/lib/vllm-disagg/models"] = str(models)
        try:
            yield cluster
        finally:
            cluster.close()


def start_engines(cluster: Cluster) -> list[Pod]:
    """Starts the pods of P and D, each Deployment's number."""
    pods = []
    for deployment in ("prefill", "decode"):
        for _ in range(cluster.deployment(deployment)["spec"]["replicas"]):
            pods.append(cluster.start_pod(deployment, NODES[len(pods) % len(NODES)]))
    for pod in pods:
        pod.wait_ready()
    return pods


def wait_for_pairs(proxy: Pod, count: int) -> None:
    """Waits until so many pairs can work."""
    until = time.monotonic() + 60
    while f"\nvllm_disagg_pairs {float(count)}\n" not in ask(proxy.url, "/metrics").body.decode():
        if time.monotonic() > until:
            raise RuntimeError(f"no {count} pairs: {proxy.tail()}")
        time.sleep(0.5)


def replace_all(cluster: Cluster, engines: list[Pod], proxy: Pod, pairs: int) -> int:
    """Replaces each engine as a Deployment without surge does; returns their number."""
    for number, old in enumerate(engines):
        began = time.monotonic()
        drained = old.terminate()
        print(f"{old.name}: {drained}; ended after {time.monotonic() - began:.0f} s", flush=True)
        new = cluster.start_pod(
            old.labels["app.kubernetes.io/component"], NODES[number % len(NODES)]
        )
        new.wait_ready()
        wait_for_pairs(proxy, pairs)
        print(f"{new.name} replaces it, after {time.monotonic() - began:.0f} s", flush=True)
    return len(engines)


def replace_by_sigterm(cluster: Cluster, engines: list[Pod], proxy: Pod, pairs: int) -> int:
    """Replaces one P and one D at a time without their hooks; returns the number of all."""
    middle = len(engines) // 2
    for both in zip(engines[:middle], engines[middle:], strict=True):
        began = time.monotonic()
        for old in both:
            requests = count_requests(old.url)
            print(f"{old.name} gets SIGTERM with {requests:g} requests", flush=True)
            old.mark_deleted()
            old.process.send_signal(signal.SIGTERM)
        for old in both:
            old.wait_ended()
            print(f"{old.name} ended after {time.monotonic() - began:.0f} s", flush=True)
        for node, old in zip(NODES, both, strict=False):
            role = old.labels["app.kubernetes.io/component"]
            cluster.start_pod(role, node)
        for new in cluster.pods[-len(both) :]:
            new.wait_ready()
        wait_for_pairs(proxy, pairs)
        print(f"both replaced after {time.monotonic() - began:.0f} s", flush=True)
    return len(engines)


def replace(
    manifests: str, least: int, *, is_recorded: bool, by_sigterm: bool
) -> dict[str, object]:
    """Runs the whole; returns the counts."""
    began = time.monotonic()
    with cluster_of(manifests) as cluster:
        keys = cluster.secrets["vllm-disagg-keys"]["api.key"].splitlines()
        engines = start_engines(cluster)
        proxy = cluster.start_pod("proxy", NODES[0])
        proxy.wait_ready()
        pairs = len(engines) ** 2 // 4
        wait_for_pairs(proxy, pairs)
        # One engine alone, without a proxy: its answers are the right ones.
        expected = {
            prompt: text_in(ask(engines[-1].url, "/v1/completions", body_of(prompt), keys[0]).body)
            for prompt in PROMPTS
        }
        load = Load(proxy.url, keys, expected)
        try:
            replace_engines = replace_by_sigterm if by_sigterm else replace_all
            replaced = replace_engines(cluster, engines, proxy, pairs)
            while load.requests < least:
                time.sleep(1)
        finally:
            load.stop()
        page = ask(proxy.url, "/metrics").body.decode()
        if is_recorded:
            record(page, next(pod for pod in cluster.pods if pod.name.startswith("decode")))
        print(*load.problems[:5], sep="\n")
        proxy.terminate()
    return {
        "requests": load.requests,
        "exact": load.outcomes["exact"],
        # A client that is told so has lost its answer too.
        "lost": load.outcomes["lost"] + load.outcomes["clean"],
        "wrong": load.outcomes["wrong"],
        "disaggregated": disaggregated(page),
        "replaced": replaced,
        "seconds": round(time.monotonic() - began),
    }


def disaggregated(page: str) -> int:
    """Returns how many requests were split between P and D."""
    start = 'vllm_disagg_requests_total{mode="disaggregated",outcome="ok"'
    lines = [line for line in page.splitlines() if line.startswith(start)]
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))


def record(proxy_page: str, decode: Pod) -> None:
    """Writes the metrics of a proxy and of an engine, as Prometheus reads them."""
    (SCRAPES / "proxy.txt").write_text(proxy_page)
    (SCRAPES / "engine.txt").write_text(ask(decode.url, "/metrics").body.decode())


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("manifests", type=Path)
    parser.add_argument("--requests", type=int, default=1000, help="at least so many")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--sigterm", action="store_true", help="without preStop hooks, by pairs")
    args = parser.parse_args()
    found = replace(
        args.manifests.read_text(),
        args.requests,
        is_recorded=args.record,
        by_sigterm=args.sigterm,
    )
    print(json.dumps(found))
    sys.exit(bool(found["lost"] or found["wrong"] or not found["disaggregated"]))


if __name__ == "__main__":
    main()
