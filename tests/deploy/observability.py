"""Reads alert rules, dashboard and recorded scrapes of deploy/observability."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
OBSERVABILITY = ROOT / "deploy" / "observability"
RULES = OBSERVABILITY / "alerts.yml"
RULE_TESTS = OBSERVABILITY / "alerts_test.yml"
DASHBOARD = OBSERVABILITY / "grafana" / "dashboards" / "vllm-disagg.json"
RUNBOOK = ROOT / "docs" / "how-to" / "respond-to-alerts.md"
SCRAPES = Path(__file__).parent / "scrapes"  # pages as a proxy and an engine answered them
SCALERS = ROOT / "deploy" / "kubernetes" / "components" / "autoscaling"
METRIC = re.compile(r"\b(?:vllm_disagg_|vllm:|process_)[a-z_]+\b")


def alerts() -> dict[str, dict[str, Any]]:
    """Returns the rules by name."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def dashboard_expressions() -> Iterator[str]:
    """Yields the query of each panel."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]


def scaler_expressions() -> Iterator[str]:
    """Yields the query of each trigger by which P and D are scaled."""
    for path in SCALERS.glob("*.yaml"):
        for document in yaml.safe_load_all(path.read_text()):
            for trigger in document.get("spec", {}).get("triggers", []):
                yield trigger["metadata"]["query"]


def expressions() -> list[str]:
    """Returns all queries of this folder and of the scalers."""
    rules = [rule["expr"] for rule in alerts().values()]
    return [*rules, *dashboard_expressions(), *scaler_expressions()]


def recorded_names() -> set[str]:
    """Returns the names of all samples in the recorded scrapes."""
    names = set()
    for path in SCRAPES.glob("*.txt"):
        for family in text_string_to_metric_families(path.read_text()):
            names |= {sample.name for sample in family.samples}
    return names


def unknown_metrics() -> dict[str, str]:
    """Returns the metrics that a query names and no recorded scrape has, with the query."""
    known = recorded_names()
    return {
        name: expression
        for expression in expressions()
        for name in METRIC.findall(expression)
        if name not in known
    }
