"""Compares merged metrics with what the parser of Prometheus's client reads of their parts."""

import time
from collections import Counter

from prometheus_client.parser import text_string_to_metric_families

from vllm_disagg.proxy.requests.failover import FALLBACK_REASONS, RUNGS
from vllm_disagg.proxy.routing.fleet import Fleet, Instance
from vllm_disagg.proxy.telemetry.merged_metrics import merge
from vllm_disagg.proxy.telemetry.metrics import Metrics

ODD = ['a "quoted" \\ label', "two\nlines", "a\u2028b\x85c", " 1.0", "# TYPE x counter"]


def page(requests: int, *reasons: str) -> str:
    """Returns the metrics of a worker after some requests with each pair of a small fleet."""
    prefills = [Instance(f"http://p{i}", "prefill") for i in range(8)]
    decodes = [Instance(f"http://d{i}", "decode") for i in range(8)]
    metrics = Metrics(Fleet(prefills + decodes), None, FALLBACK_REASONS, RUNGS)
    for reason in reasons:
        metrics.fell_back(reason)
    for prefill in prefills:
        for decode in decodes:
            for _ in range(requests):
                meter = metrics.meter()
                meter.paired(prefill.url, decode.url)
                metrics.ended("/v1/completions", "disaggregated", "ok", meter, 7)
    return metrics.render().decode()


def values(text: str) -> dict[tuple[str, str, tuple[tuple[str, str], ...]], float]:
    """Returns the values of a page by type, name and labels."""
    return {
        (family.type, sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_sums_are_those_of_the_values_that_prometheus_reads() -> None:
    texts = [page(1, *ODD), page(2, "no_pair", *ODD[:2]), page(3, ODD[0])]
    merged = values(merge(texts).decode())
    sums: Counter[tuple[str, str, tuple[tuple[str, str], ...]]] = Counter()
    for text in texts:
        sums.update(values(text))
    counters = {key: value for key, value in sums.items() if key[0] != "gauge"}
    assert {key: value for key, value in merged.items() if key[0] != "gauge"} == counters
    assert set(merged) == set(sums)
    assert merged["gauge", "vllm_disagg_in_flight", (("role", "decode"), ("url", "http://d1"))] == 0
    named = {dict(key[2]).get("reason") for key in merged}
    assert named.issuperset(ODD)


def test_merged_metrics_have_their_help_and_can_be_merged_again() -> None:
    texts = [page(1), page(2)]
    merged = merge(texts).decode()
    heads = [line for line in texts[0].splitlines() if line.startswith("#")]
    assert [line for line in merged.splitlines() if line.startswith("#")] == heads
    assert merge([merged]).decode() == merged == merge([merged, ""]).decode()


def test_counters_alone() -> None:
    counters = merge([page(1)], gauges=False).decode()
    assert "vllm_disagg_requests_total{" in counters and "vllm_disagg_ttft_seconds_sum" in counters
    assert " gauge\n" not in counters and "vllm_disagg_in_flight" not in counters


def test_merging_takes_less_time_than_prometheus_parser() -> None:
    """That parser, for each client that asked, stopped a worker's streams for 0.3 s."""
    texts = [page(1)] * 4

    def cpu_seconds(work: object) -> float:
        began = time.process_time()
        assert callable(work) and work()
        return time.process_time() - began

    merging = min(cpu_seconds(lambda: merge(texts)) for _ in range(5))
    parsing = min(cpu_seconds(lambda: [values(text) for text in texts]) for _ in range(3))
    assert merging < parsing / 3
