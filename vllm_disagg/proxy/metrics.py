"""What the proxy counts, for Prometheus.  Every label has few values: roles, routes, reasons and configured URLs."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .fleet import Fleet

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """One registry per proxy, so that several can live in one process."""

    def __init__(self, fleet: Fleet) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Instances(fleet))
        self._requests = Counter(
            "vllm_disagg_requests", "Requests by how they ended.", ["path", "mode", "outcome"], registry=self._registry
        )
        self._fallbacks = Counter(
            "vllm_disagg_fallbacks", "Requests that did not run as first planned.", ["reason"], registry=self._registry
        )
        self._request: dict[tuple[str, str, str], Counter] = {}
        self.ttft = self._histogram("ttft", "From the request to the first byte of its answer's body.")
        self.queue = self._histogram("queue", "Waiting for a prefill instance.")
        self.prefill_leg = self._histogram("prefill_leg", "A prefill leg, from its request to its answer.")

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(f"vllm_disagg_{name}_seconds", text, buckets=_SECONDS, registry=self._registry)

    def ended(self, path: str, mode: str, outcome: str) -> None:
        """A request is over."""
        key = (path, mode, outcome)
        if key not in self._request:
            self._request[key] = self._requests.labels(*key)
        self._request[key].inc()

    def fell_back(self, reason: str) -> None:
        self._fallbacks.labels(reason).inc()

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _Instances(Collector):
    """Gauges read from the fleet when they are asked for."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("vllm_disagg_instance_up", "Whether an instance answers.", labels=["url", "role"])
        busy = GaugeMetricFamily("vllm_disagg_in_flight", "Requests at an instance.", labels=["url", "role"])
        for instance in self._fleet.instances:
            labels = [instance.url, instance.role]
            up.add_metric(labels, float(instance.up))
            busy.add_metric(labels, float(instance.in_flight + instance.legs))
        yield up
        yield busy
