"""Collects metrics that are computed at each scrape, for a registry of Prometheus's client."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import Collector


class ComputedMetrics(Collector):
    """Collects metrics that are computed at each scrape."""

    def __init__(self, views: Iterable[Callable[[], Iterable[Metric]]]) -> None:
        self._views = list(views)

    def collect(self) -> Iterable[Metric]:
        """Yields the metrics of all views."""
        for view in self._views:
            yield from view()
