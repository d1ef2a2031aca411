"""Metrics of the proxy's own files: those that are ignored, lost lines, the certificate's end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

# Files that are read or opened again while the proxy serves.
WATCHED_FILES = ("fleet", "access_log", "certificate", "upstream_ca", "keys")
COUNTED_LOGS = ("access", "standard_error")
CERTIFICATE_END = "vllm_disagg_certificate_end_timestamp_seconds"


class FileMetrics:
    """Holds what `/metrics` tells of one proxy worker's files."""

    def __init__(self) -> None:
        """Begins with files that are all in use, empty logs and no certificate."""
        self._ignored = dict.fromkeys(WATCHED_FILES, False)
        # Return how many lines of a log were lost since the start.
        self.lost_lines: dict[str, Callable[[], int]] = {name: lambda: 0 for name in COUNTED_LOGS}
        # Seconds since the epoch; None: no certificate is served, or its date cannot be read.
        self.certificate_end: float | None = None

    def on_read(self, file: str, is_ignored: bool) -> None:
        """Notes whether the last content of one of WATCHED_FILES is ignored: the old one counts."""
        self._ignored[file] = is_ignored

    def collect(self) -> Iterator[Metric]:
        """Yields the metrics."""
        ignored = GaugeMetricFamily(
            "vllm_disagg_file_ignored",
            "Whether a file cannot be used as it was when last read: its old content counts.",
            labels=["file"],
        )
        for file, is_ignored in self._ignored.items():
            ignored.add_metric([file], float(is_ignored))
        yield ignored
        lost = CounterMetricFamily(
            "vllm_disagg_lost_log_lines",
            "Lines that a log could not take: a full disk, or a reader that stands still.",
            labels=["log"],
        )
        for name, count in self.lost_lines.items():
            lost.add_metric([name], count())
        yield lost
        end = GaugeMetricFamily(
            CERTIFICATE_END, "Time since the epoch at which the served certificate expires."
        )
        if self.certificate_end is not None:
            end.add_metric([], self.certificate_end)
        yield end
