"""Reads values from a page in Prometheus's text format."""

from __future__ import annotations

import math

from prometheus_client.parser import text_string_to_metric_families


class MetricsPage:
    """The samples of one page."""

    def __init__(self, text: bytes) -> None:
        """Raises ValueError for another format."""
        self._values: list[tuple[str, dict[str, str], float]] = []
        try:
            families = list(text_string_to_metric_families(text.decode()))
        except IndexError:  # the parser's answer to a label without an end
            raise ValueError("a line is cut") from None
        for family in families:
            for sample in family.samples:
                if not math.isfinite(sample.value):  # a quantile without observations
                    continue
                self._values.append((sample.name, sample.labels, sample.value))

    def has(self, name: str, **labels: str) -> bool:
        """Returns whether a series of this name with these labels exists."""
        return bool(self._having(name, labels))

    def total(self, name: str, **labels: str) -> float:
        """Returns the sum of all series of a name with these labels; 0 without one."""
        return sum(self._having(name, labels), 0.0)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Returns the sums of a name's series by the value of a label, without zeros."""
        found: dict[str, float] = {}
        for series, labels, value in self._values:
            if series == name and value:
                found[labels.get(label, "")] = found.get(labels.get(label, ""), 0.0) + value
        return found

    def _having(self, name: str, labels: dict[str, str]) -> list[float]:
        """Returns the values of all series of a name with these labels."""
        return [
            value
            for series, its_labels, value in self._values
            if series == name and its_labels.items() >= labels.items()
        ]
