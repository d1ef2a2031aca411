"""Merges the metrics of several proxy workers into those of one proxy."""

from __future__ import annotations

import operator
from collections.abc import Callable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from .computed_metrics import ComputedMetrics
from .file_metrics import CERTIFICATE_END

# Gauges that are added over the proxy workers, and those whose least value counts; of the others
# the largest counts.
_ADDED_GAUGES = (
    "vllm_disagg_waiting",
    "process_resident_memory_bytes",
    "process_virtual_memory_bytes",
    "process_open_fds",
    "process_max_fds",
)
_LEAST_GAUGES = (CERTIFICATE_END,)


def merge(texts: list[str], gauges: bool = True) -> bytes:
    """Merges the metrics of several workers, in Prometheus's text format.

    Counters are added. Of gauges, which each worker measures of the same instance, the largest is
    taken, except `_ADDED_GAUGES` and `_LEAST_GAUGES`. Without `gauges` only counters are returned.
    """
    families: dict[str, Metric] = {}
    values: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            if family.type == "gauge" and not gauges:
                continue
            families.setdefault(family.name, family)
            combine = _combination(family)
            for sample in family.samples:
                key = (family.name, sample.name, tuple(sorted(sample.labels.items())))
                known = values.get(key)
                values[key] = sample.value if known is None else combine(known, sample.value)
    for family in families.values():
        family.samples = []
    for (family_name, name, labels), value in values.items():
        families[family_name].add_sample(name, dict(labels), value)
    registry = CollectorRegistry()
    registry.register(ComputedMetrics([families.values]))
    return generate_latest(registry)


def _combination(family: Metric) -> Callable[[float, float], float]:
    """Returns the function that makes one value of two workers' values."""
    if family.type != "gauge" or family.name in _ADDED_GAUGES:
        return operator.add
    return min if family.name in _LEAST_GAUGES else max
