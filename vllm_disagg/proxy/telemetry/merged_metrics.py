"""Merges the metrics of several proxy workers into those of one proxy.

A worker's text is read line by line, as `Metrics.render` writes it: without timestamps, and with
each series' labels in one order. The parser of Prometheus's client takes about 20 times as long.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class _Family:
    """The series of one metric, with the lines in front of them."""

    help_line: str
    type_line: str
    combine: Callable[[float, float], float]  # makes one value of two workers' values
    values: dict[str, float] = field(default_factory=dict)  # by name and labels

    def lines(self) -> list[str]:
        """Returns the lines of this metric."""
        series = [f"{name} {value!r}" for name, value in self.values.items()]
        return [*filter(None, [self.help_line]), self.type_line, *series]


def merge(texts: list[str], gauges: bool = True) -> bytes:
    """Merges the metrics of several workers, in Prometheus's text format.

    Counters are added. Of gauges, which each worker measures of the same instance, the largest is
    taken, except `_ADDED_GAUGES` and `_LEAST_GAUGES`. Without `gauges` only counters are returned.
    """
    families: dict[str, _Family] = {}  # by the line with a metric's name and type
    for text in texts:
        _add(text, families)
    kept = [f for f in families.values() if gauges or not f.type_line.endswith(" gauge")]
    return "".join(f"{line}\n" for family in kept for line in family.lines()).encode()


def _add(text: str, families: dict[str, _Family]) -> None:
    """Adds one worker's values to those of the others."""
    help_line = ""
    values: dict[str, float] = {}
    combine: Callable[[float, float], float] = operator.add
    for line in text.split("\n"):  # `splitlines` would break labels, too
        if line.startswith("# HELP "):
            help_line = line
        elif line.startswith("# TYPE "):
            family = families.get(line)
            if not family:
                family = _Family(help_line, line, _combination(line))
                families[line] = family
            values, combine = family.values, family.combine
        elif line:
            name, _, number = line.rpartition(" ")
            value = float(number)
            known = values.get(name)
            values[name] = value if known is None else combine(known, value)


def _combination(type_line: str) -> Callable[[float, float], float]:
    name, _, kind = type_line.removeprefix("# TYPE ").partition(" ")
    if kind != "gauge" or name in _ADDED_GAUGES:
        return operator.add
    return min if name in _LEAST_GAUGES else max
