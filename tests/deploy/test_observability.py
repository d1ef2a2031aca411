"""Alert rules, dashboard and runbook name the same things as the code.

`make operator-proof` checks them with Prometheus's own tool.
"""

import re

import pytest
import yaml

from observability import (
    ROOT,
    RULE_TESTS,
    RUNBOOK,
    SCRAPES,
    alerts,
    dashboard_expressions,
    expressions,
    recorded_names,
    scaler_expressions,
    unknown_metrics,
)
from vllm_disagg.proxy.http.routes import GENERATING, ROUTES
from vllm_disagg.proxy.routing.fleet import Fleet
from vllm_disagg.proxy.telemetry.metrics import Metrics


def test_every_expression_names_metrics_of_a_recorded_scrape() -> None:
    assert len(list(dashboard_expressions())) > 30
    assert len(list(scaler_expressions())) >= 3
    assert all(re.search(r"vllm|process_", expression) for expression in expressions())
    assert unknown_metrics() == {}


def test_the_recorded_scrape_has_all_families_of_the_proxy() -> None:
    """An older scrape would prove nothing: `replace_pods.py --record` writes a new one."""
    page = Metrics(Fleet()).render().decode()
    families = re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE)
    recorded = (SCRAPES / "proxy.txt").read_text()
    assert [name for name in families if f"# TYPE {name} " not in recorded] == []
    assert "vllm:disagg_failed_loads_total" in recorded_names()


@pytest.mark.parametrize("name", alerts())
def test_each_alert_has_a_runbook_heading_and_both_cases(name: str) -> None:
    rule = alerts()[name]
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert rule["annotations"]["runbook"] == f"docs/how-to/{RUNBOOK.name}#{name.lower()}"
    assert f"\n## {name}\n" in RUNBOOK.read_text()
    fired = {}
    for case in yaml.safe_load(RULE_TESTS.read_text())["tests"]:
        for expected in case["alert_rule_test"]:
            fired.setdefault(expected["alertname"], set()).add(bool(expected["exp_alerts"]))
    assert fired[name] == {True, False}


def test_a_proxy_is_known_by_its_own_series() -> None:
    """Kubernetes has jobs named kube-proxy, whose processes have open files and memory too."""
    process = [text for text in expressions() if "process_" in text]
    assert len(process) > 3
    assert all("on (instance, job) vllm_disagg_build_info" in text for text in process)


def test_the_proxies_of_another_namespace_hide_no_loss() -> None:
    assert alerts()["DisaggProxyAbsent"]["expr"] == "absent(vllm_disagg_build_info)"
    path = ROOT / "deploy" / "kubernetes" / "components" / "monitoring" / "prometheus-rule.yaml"
    (group,) = yaml.safe_load(path.read_text())["spec"]["groups"]
    (expression,) = [r["expr"] for r in group["rules"] if r["alert"] == "DisaggProxyAbsent"]
    assert expression == 'absent(vllm_disagg_build_info{namespace="vllm-disagg"})'


def test_no_runbook_heading_without_an_alert() -> None:
    headings = re.findall(r"^## (\w+)$", RUNBOOK.read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(alerts())


def test_failures_are_judged_by_generation_alone() -> None:
    """Polls of /v1/models beside ten times fewer completions would hide the failures of these."""
    patterns = [p for text in expressions() for p in re.findall(r'path=~"([^"]*)"', text)]
    assert len(patterns) == 4, "an alert and the dashboard's panel"
    for pattern in patterns:
        assert {path for path in ROUTES if re.fullmatch(pattern, path)} == GENERATING
    (others,) = [p for text in expressions() for p in re.findall(r'path!~"([^"]*)"', text)]
    left_out = {path for path in ROUTES if re.fullmatch(others, path)}
    assert left_out == GENERATING | {"/v1/realtime"}, "whose sessions end by limits of time"
