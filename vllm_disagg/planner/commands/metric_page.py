"""Reads Prometheus pages at both ends of a window of time."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ...errors import ConfigError

MetricSamples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(body: bytes, server: str = "") -> MetricSamples:
    """Parses Prometheus text into samples by name and labels. `server`: for an error's line."""
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

    try:
        families = list(text_string_to_metric_families(body.decode()))
    except (ValueError, UnicodeDecodeError) as error:
        raise ConfigError(f"{server}/metrics is not Prometheus' text: {error}") from None
    samples: MetricSamples = {}
    for family in families:
        for sample in family.samples:
            samples[sample.name, frozenset(sample.labels.items())] = sample.value
    return samples


class MetricWindow(msgspec.Struct, frozen=True):
    """Two reads of one page, and the seconds between them."""

    before: MetricSamples
    after: MetricSamples
    seconds: float

    def increase(self, name: str, **labels: str) -> float:
        """Returns the increase of a counter, summed over all series with these labels."""
        total = 0.0
        for key, value in self.after.items():
            series_name, series_labels = key
            if series_name == name and series_labels >= labels.items():
                total += value - self.before.get(key, 0.0)
        return total

    def increases(self, name: str, label: str) -> dict[str, float]:
        """Returns the increases of a counter by a label, summed over all others."""
        found: dict[str, float] = {}
        for labels, value in self._series(name):
            key = labels.get(label, "")
            found[key] = found.get(key, 0.0) + value
        return found

    def _series(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        """Yields the labels and the increase of each series of a counter."""
        for key, value in self.after.items():
            if key[0] == name:
                yield dict(key[1]), value - self.before.get(key, 0.0)

    def mean(self, histogram: str) -> float:
        """Returns the mean of what a histogram observed in the window; 0 without observations."""
        count = self.increase(f"{histogram}_count")
        return self.increase(f"{histogram}_sum") / count if count else 0.0

    def has(self, name: str) -> bool:
        """Returns whether the later page has a series of this name."""
        return any(series_name == name for series_name, _ in self.after)
