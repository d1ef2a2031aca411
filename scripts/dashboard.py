"""Writes Grafana's dashboard, deploy/observability/grafana/dashboards/vllm-disagg.json.

    python scripts/dashboard.py            write it
    python scripts/dashboard.py --check    exit status 1 if the file differs

A dashboard's JSON is hundreds of lines of layout around one query for each panel. `ROWS` has the
queries.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DASHBOARD = ROOT / "deploy/observability/grafana/dashboards/vllm-disagg.json"
GRID_COLUMNS = 24  # Grafana's
PANEL_HEIGHTS = {"stat": 4, "timeseries": 8}
# Grafana's own variable: a window that fits the resolution and the scrape interval.
WINDOW = "$__rate_interval"
SOURCE = {"type": "prometheus", "uid": "${source}"}

PanelType = Literal["stat", "timeseries"]


class Query(NamedTuple):
    """A PromQL expression and the name of its series in the legend."""

    expression: str
    legend: str


class Panel(NamedTuple):
    """A panel: its title, Grafana's name of its unit, its queries."""

    title: str
    unit: str
    queries: list[Query]
    kind: PanelType = "timeseries"
    columns: int = 8


def rate(metric: str, by: str = "") -> str:
    """Returns the sum of a counter's rates, by labels if given."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}[{WINDOW}]))"


def quantiles(histogram: str) -> list[Query]:
    """Returns the median, p90 and p99 of a histogram."""
    return [
        Query(f"histogram_quantile({share}, {rate(f'{histogram}_bucket', 'le')})", name)
        for share, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))
    ]


# As in alerts.yml: polls of /v1/models, /tokenize and the like would hide a failure.
GENERATING = (
    'path=~"/v1/(completions|chat/completions(/batch)?|responses|messages)'
    '|/inference/v1/generate|/cohere/v2/chat"'
)
FAILED = f'vllm_disagg_requests_total{{outcome=~"upstream_error|timeout",{GENERATING}}}'
ASKED = f'vllm_disagg_requests_total{{outcome!="client_error",{GENERATING}}}'
OVERVIEW = [
    Panel("Requests", "reqps", [Query(rate("vllm_disagg_requests_total"), "")], "stat", 4),
    Panel("Failed", "percentunit", [Query(f"{rate(FAILED)} / {rate(ASKED)}", "")], "stat", 4),
    Panel("Goodput", "reqps", [Query(rate("vllm_disagg_goodput_total"), "")], "stat", 4),
    Panel("Pairs that can work", "none", [Query("min(vllm_disagg_pairs)", "")], "stat", 4),
    Panel(
        "Instances up",
        "none",
        [
            Query(
                "sum by (role) (max by (url, role)"
                " (vllm_disagg_instance_up * (1 - vllm_disagg_instance_leaving)))",
                "{{role}}",
            )
        ],
        "stat",
        4,
    ),
    Panel(
        "Prefill backlog", "s", [Query("max(vllm_disagg_prefill_backlog_seconds)", "")], "stat", 4
    ),
]
LATENCY = [
    Panel("Time to first token", "s", quantiles("vllm_disagg_ttft_seconds")),
    Panel("Time per output token", "s", quantiles("vllm_disagg_tpot_seconds")),
    Panel("End to end", "s", quantiles("vllm_disagg_e2e_seconds")),
    *(
        Panel(f"Phase: {title}", "s", quantiles(f"vllm_disagg_{name}_seconds"), columns=6)
        for title, name in (
            ("queue", "queue"),
            ("prefill leg", "prefill_leg"),
            ("hand-off", "handoff"),
            ("first decode step", "first_decode_step"),
        )
    ),
]
TRAFFIC = [
    Panel(
        "Requests by mode and outcome",
        "reqps",
        [Query(rate("vllm_disagg_requests_total", "mode, outcome"), "{{mode}}, {{outcome}}")],
    ),
    Panel("Tokens", "none", [Query(rate("vllm_disagg_tokens_total", "kind"), "{{kind}}")]),
    Panel(
        "Missed objectives",
        "reqps",
        [Query(rate("vllm_disagg_missed_total", "objective"), "{{objective}}")],
    ),
    Panel("Failovers", "reqps", [Query(rate("vllm_disagg_failovers_total", "rung"), "{{rung}}")]),
    Panel(
        "Fallbacks", "reqps", [Query(rate("vllm_disagg_fallbacks_total", "reason"), "{{reason}}")]
    ),
    Panel(
        "Waiting in the proxy",
        "none",
        [Query("sum by (place) (vllm_disagg_waiting)", "{{place}}")],
    ),
]
INSTANCES = [
    Panel(
        "In flight",
        "none",
        [Query("sum by (role, url) (vllm_disagg_in_flight)", "{{role}} {{url}}")],
    ),
    Panel(
        "KV cache",
        "percentunit",
        [Query("max by (role, url) (vllm_disagg_kv_cache_usage)", "{{role}} {{url}}")],
    ),
    Panel(
        "Waiting in engines",
        "none",
        [Query("max by (role, url) (vllm_disagg_engine_waiting)", "{{role}} {{url}}")],
    ),
    Panel(
        "Not usable",
        "none",
        [
            Query("max by (url) (1 - vllm_disagg_instance_up)", "down {{url}}"),
            Query("max by (url) (vllm_disagg_breaker_open)", "breaker open {{url}}"),
            Query("max by (url) (vllm_disagg_instance_leaving)", "leaving {{url}}"),
        ],
        columns=12,
    ),
    Panel(
        "Requests by pair",
        "reqps",
        [
            Query(
                rate("vllm_disagg_pair_requests_total", "prefill, decode"), "{{prefill}} {{decode}}"
            )
        ],
        columns=12,
    ),
]
RECEIVED = rate("vllm:disagg_received_bytes_total")
TRANSFERS = [
    Panel(
        "KV received, as on the wire",
        "Bps",
        [Query(rate("vllm:disagg_received_wire_bytes_total", "transport"), "{{transport}}")],
    ),
    Panel(
        "Share of the KV received",
        "percentunit",
        [
            Query(f"{rate('vllm:disagg_overlapped_bytes_total')} / {RECEIVED}", "while P computes"),
            Query(f"{rate('vllm:disagg_reused_bytes_total')} / {RECEIVED}", "read back from D"),
        ],
    ),
    Panel("Time of a load, with P's prefill", "s", quantiles("vllm:disagg_load_seconds")),
    Panel(
        "Failed loads",
        "reqps",
        [Query(rate("vllm:disagg_failed_loads_total", "reason"), "{{reason}}")],
    ),
    Panel(
        "Prefills",
        "reqps",
        [
            Query(rate("vllm:disagg_delivered_prefills_total"), "delivered"),
            Query(rate("vllm:disagg_unclaimed_prefills_total"), "not fetched"),
        ],
    ),
    Panel(
        "Faults of network and peers",
        "none",
        [
            Query(rate("vllm:disagg_damaged_pieces_total"), "damaged pieces"),
            Query(rate("vllm:disagg_bad_messages_total"), "bad messages"),
        ],
    ),
]
# Engines have these series too, and so have proxies of others, such as those of Kubernetes.
OF_PROXIES = "and on (instance, job) vllm_disagg_build_info"
PROXY = [
    Panel(
        "CPU",
        "none",
        [
            Query(
                f"rate(process_cpu_seconds_total[{WINDOW}]) {OF_PROXIES}",
                "{{instance}} cores",
            )
        ],
    ),
    Panel(
        "Memory",
        "bytes",
        [Query(f"process_resident_memory_bytes {OF_PROXIES}", "{{instance}}")],
    ),
    Panel(
        "Open files",
        "percentunit",
        [Query(f"process_open_fds / process_max_fds {OF_PROXIES}", "{{instance}}")],
    ),
    Panel(
        "Versions",
        "none",
        [Query("count by (version) (vllm_disagg_build_info)", "{{version}}")],
        "stat",
    ),
]
ROWS = {
    "Overview": OVERVIEW,
    "Latency at the client's edge": LATENCY,
    "Traffic": TRAFFIC,
    "Instances": INSTANCES,
    "KV transfers": TRANSFERS,
    "Proxies": PROXY,
}


def dashboard() -> dict[str, Any]:
    """Returns the dashboard as Grafana stores it."""
    return {
        "uid": "vllm-disagg",
        "title": "vllm-disagg",
        "tags": ["vllm"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "source",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                }
            ]
        },
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    """Yields rows and panels, each with its place; a line is as high as its highest panel."""
    top = 0
    number = 0
    for title, panels in ROWS.items():
        number += 1
        place = {"x": 0, "y": top, "w": GRID_COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": title, "gridPos": place, "panels": []}
        top += 1
        left = 0
        line_height = 0
        for panel in panels:
            if left + panel.columns > GRID_COLUMNS:
                top += line_height
                left = 0
                line_height = 0
            height = PANEL_HEIGHTS[panel.kind]
            number += 1
            place = {"x": left, "y": top, "w": panel.columns, "h": height}
            yield _panel(panel, number, place)
            left += panel.columns
            line_height = max(line_height, height)
        top += line_height


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    """Returns one panel."""
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": SOURCE,
            "expr": query.expression,
            "legendFormat": query.legend,
        }
        for index, query in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit}, "overrides": []},
        "targets": targets,
    }


def main() -> int:
    """Writes the dashboard, or compares it with `ROWS`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail if it differs")
    text = json.dumps(dashboard(), indent=1) + "\n"
    if not parser.parse_args().check:
        DASHBOARD.write_text(text)
        return 0
    if DASHBOARD.exists() and DASHBOARD.read_text() == text:
        return 0
    print(f"{DASHBOARD.relative_to(ROOT)} differs: run python scripts/dashboard.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
