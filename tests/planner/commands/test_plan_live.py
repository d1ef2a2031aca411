"""Tests advice for a running deployment, with a scripted stand-in for the proxy."""

from __future__ import annotations

import argparse
import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any, ClassVar

import msgspec
import pytest

from vllm_disagg import cli
from vllm_disagg.errors import ConfigError
from vllm_disagg.planner.commands import flags, live, live_verdict, plan_inputs
from vllm_disagg.planner.commands.live import between
from vllm_disagg.planner.commands.live_text import text
from vllm_disagg.planner.commands.live_verdict import ObservedTraffic
from vllm_disagg.planner.commands.metric_page import parse
from vllm_disagg.planner.search.placement import Placement, ReplicaGroup
from vllm_disagg.planner.search.placement_score import PlacementScore
from vllm_disagg.planner.simulation.simulator import simulate

INSTANCES = [
    {"url": f"http://h:{n}", "role": role, "usable": True}
    for n, role in enumerate(["prefill"] * 3 + ["decode"])
]
WORDS = [
    "plan",
    "--coefficients",
    "distserve-a100",
    "--model",
    "opt-13b",
    "--ttft",
    "1",
    "--tpot",
    "0.1",
    "--jobs",
    "1",
]
WORDS += ["--requests", "1500", "--seeds", "1", "--window", "1", "--json"]


def _metrics(
    requests: int,
    prompt: float = 60,
    output: float = 60,
    ttft: float = 0.06,
    tpot: float = 0.05,
    whole: int = 0,
) -> bytes:
    return f"""# TYPE vllm_disagg_requests_total counter
vllm_disagg_requests_total{{path="/v1/chat",mode="disaggregated",outcome="ok"}} {requests - whole}
vllm_disagg_requests_total{{path="/v1/chat",mode="whole",outcome="ok"}} {whole}
vllm_disagg_requests_total{{path="/v1/completions",mode="whole",outcome="timeout"}} 7
vllm_disagg_requests_total{{path="/v1/models",mode="passthrough",outcome="ok"}} {3 * requests}
# TYPE vllm_disagg_tokens_total counter
vllm_disagg_tokens_total{{kind="prompt"}} {requests * prompt}
vllm_disagg_tokens_total{{kind="completion"}} {requests * output}
# TYPE vllm_disagg_ttft_seconds histogram
vllm_disagg_ttft_seconds_bucket{{le="+Inf"}} {requests}
vllm_disagg_ttft_seconds_count {requests}
vllm_disagg_ttft_seconds_sum {requests * ttft}
# TYPE vllm_disagg_tpot_seconds histogram
vllm_disagg_tpot_seconds_bucket{{le="+Inf"}} {requests}
vllm_disagg_tpot_seconds_count {requests}
vllm_disagg_tpot_seconds_sum {requests * tpot}
""".encode()


class Proxy(BaseHTTPRequestHandler):
    """Server of scripted answers; each request of the metrics gets the next one."""

    instances: ClassVar[list[dict[str, object]]] = []
    metrics: ClassVar[list[bytes]] = []

    key: ClassVar[str] = ""  # needed for the instances

    def do_GET(self) -> None:
        if (
            self.path == "/disagg/instances"
            and self.key
            and self.headers["authorization"] != f"Bearer {self.key}"
        ):
            self.send_error(401)
            return
        body = (
            json.dumps(self.instances).encode()
            if self.path == "/disagg/instances"
            else self.metrics.pop(0)
        )
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def proxy() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Proxy)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_admin_key_shows_the_instances(
    proxy: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Proxy.instances = INSTANCES
    Proxy.metrics = [_metrics(100), _metrics(120)]
    monkeypatch.setattr(Proxy, "key", "root")
    monkeypatch.setenv("OPENAI_API_KEY", "user")
    assert cli.main([*WORDS, "--live", proxy]) == 2
    assert (
        "needs a key: put it into the environment as OPENAI_API_KEY or DISAGG_ADMIN_KEY"
        in capsys.readouterr().err
    )
    monkeypatch.setenv("DISAGG_ADMIN_KEY", "root")
    assert cli.main([*WORDS, "--live", proxy]) == 0


def test_three_prefill_and_one_decode_are_wrong_for_long_answers(
    proxy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Proxy.instances = INSTANCES
    Proxy.metrics = [_metrics(100), _metrics(120)]
    assert cli.main([*WORDS, "--live", proxy]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["traffic"]["prompt"] == pytest.approx(60) and found["traffic"]["requests"] == 20
    assert not found["right"] and found["gain"] > 1.3
    assert found["best"]["decode"] > 1 and found["present"] | {"goodput": 0, "ci": 0} == {
        "prefill": 3,
        "decode": 1,
        "goodput": 0,
        "ci": 0,
    }
    assert found["best"]["goodput"] == pytest.approx(found["gain"] * found["present"]["goodput"])
    assert found["one_more"]["decode"]["gain"] > 1.3 and found["one_more"]["prefill"]["gain"] < 1.1
    assert (found["one_more"]["decode"]["prefill"], found["one_more"]["decode"]["decode"]) == (3, 2)


def test_traffic_that_decode_instances_compute_whole_cannot_tell(
    proxy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Proxy.instances = INSTANCES
    Proxy.metrics = [_metrics(100, whole=50), _metrics(200, whole=75)]
    assert cli.main([*WORDS, "--live", proxy]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "cannot tell" and found["traffic"]["aggregated"] == 0.25
    assert "computed 25% of the requests whole" in found["why"] and "--spill" in found["why"]


def test_gaps_between_tokens_limit_the_splits(
    proxy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Proxy.instances = INSTANCES
    words = [*WORDS, "--requests", "200"]
    goodputs = []
    for more in ([], ["--itl", "0.06"]):
        Proxy.metrics = [_metrics(100), _metrics(120)]
        assert cli.main([*words, *more, "--live", proxy]) == 0
        found = json.loads(capsys.readouterr().out)
        goodputs.append(found["best"]["goodput"])
    assert 0 < goodputs[1] < 0.9 * goodputs[0] and found["setting"]["itl"] == 0.06
    Proxy.metrics = [_metrics(100), _metrics(120)]
    assert cli.main([*words, "--itl", "0.001", "--live", proxy]) == 2
    refusal = "no split meets --ttft 1, --tpot 0.1 and --itl 0.001 at any rate; the means are"
    assert refusal in capsys.readouterr().err


def test_a_refit_finds_how_much_slower_the_deployment_is() -> None:
    """Refits to a deployment with 1.5 times the model's prefill time and twice its decode time."""
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    words = [
        "--coefficients",
        "distserve-a100",
        "--model",
        "opt-13b",
        "--workload",
        "300:100",
        "--requests",
        "300",
    ]
    scenario = plan_inputs.read(parser.parse_args(words), 4, "").scenario
    present = Placement(ReplicaGroup(1, 1, 2), ReplicaGroup(1, 1, 2))
    slow = msgspec.structs.replace(
        scenario,
        prefill=msgspec.structs.replace(scenario.prefill, scale=1.5),
        decode=msgspec.structs.replace(scenario.decode, scale=2.0),
    )
    outcome = simulate(slow.deployment(present), slow.samples()[0], 4.0)
    means = sum(outcome.ttft) / 300, sum(outcome.tpot) / 300
    found = live.refit(scenario, present, ObservedTraffic(60.0, 240, 4.0, 300.0, 100.0, *means))
    assert found.prefill.scale == pytest.approx(1.5, rel=0.02)
    assert found.decode.scale == pytest.approx(2.0, rel=0.02)


def test_counters_that_are_missing_are_named() -> None:
    old = b'# TYPE vllm_disagg_requests_total counter\nvllm_disagg_requests_total{outcome="ok"} 5\n'
    with pytest.raises(ConfigError, match="no vllm_disagg_tokens_total"):
        between(parse(old), parse(old), 10)


def test_little_traffic_a_restart_and_answers_without_usage_are_said() -> None:
    with pytest.raises(ConfigError, match="3 requests of generation succeeded in 10 s"):
        between(parse(_metrics(100)), parse(_metrics(103)), 10)
    with pytest.raises(ConfigError, match="include_usage"):
        between(parse(_metrics(100, 0, 0)), parse(_metrics(200, 0, 0)), 10)
    with pytest.raises(ConfigError, match="succeeded"):
        between(parse(_metrics(100)), parse(_metrics(30)), 10)


def test_what_a_window_held() -> None:
    found = between(parse(_metrics(0)), parse(_metrics(50)), 25.0)
    expected = ObservedTraffic(25.0, 50, 2.0, 60.0, 60.0, 0.06, 0.05)
    assert msgspec.structs.astuple(found) == pytest.approx(msgspec.structs.astuple(expected))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (INSTANCES[:3], "3 prefill and 0 decode instances"),
        ([{**row, "usable": False} for row in INSTANCES], "0 prefill and 0 decode"),
        ([{**row, "leaving": True} for row in INSTANCES], "0 prefill and 0 decode"),
        ([{"a": 1}], "not the answer of a vllm-disagg proxy"),
        (["x"], "not the answer of a vllm-disagg proxy"),
    ],
)
def test_a_fleet_without_a_ratio_is_said(rows: list[object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        live.instances(json.dumps(rows).encode())


def test_an_answer_that_is_too_deep_is_no_proxys() -> None:
    with pytest.raises(ConfigError, match="not the answer of a vllm-disagg proxy: give its URL"):
        live.instances(b"[" * 100_000)


def test_data_parallel_ranks_are_refused_before_their_pages_are_read(
    proxy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """URL@RANK would be read as a user's name at a host called RANK."""
    ranks = [{**row, "url": f"{row['url']}@0"} for row in INSTANCES]
    Proxy.instances = ranks
    assert cli.main(["plan", "--workload", "500:20", "--live", proxy]) == 2
    said = capsys.readouterr().err
    assert "@0 is a data parallel rank" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "url", ["ftp://h", "nonsense", "http://127.0.0.1:1", "http://127.0.0.1:notaport"]
)
def test_a_proxy_that_is_not_there_is_one_line(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*WORDS, "--live", url]) == 2
    err = capsys.readouterr().err
    assert err.startswith("vllm-disagg plan: ") and url in err and err.count("\n") == 1


def test_the_gain_has_what_the_bisections_and_other_step_times_leave_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal rates of two seeds are within the precision of a bisection, with each step times."""
    of = [Placement(ReplicaGroup(1, 1, n), ReplicaGroup(1, 1, 4 - n)) for n in (1, 2)]
    now, other, slow = (
        PlacementScore(place, [rate, rate], 0.02)
        for place, rate in zip((*of, of[1]), (1.0, 1.09, 0.5), strict=True)
    )
    found = live_verdict.gain_interval(now, [now, other], (), 1)
    assert found == pytest.approx((1.09 * 0.98, 1.09 / 0.98))
    assert live_verdict.verdict_of(found)[0] == "cannot tell"
    scenarios: list[Any] = [None]
    for scores, ends in (
        ([now, slow], (0.5 * 0.98, 1.09 / 0.98)),
        ([now], (0.0, 1.09 / 0.98)),
        ([other], (1.09 * 0.98, math.inf)),
        ([], (1.09 * 0.98, 1.09 / 0.98)),
    ):
        monkeypatch.setattr(live_verdict.optimizer, "search", lambda *_, found=scores: found)
        assert live_verdict.gain_interval(now, [now, other], scenarios, 1) == pytest.approx(ends)
    assert "1.07 to any number of times" in live_verdict.verdict_of((1.07, math.inf))[1]


def test_one_sample_of_a_running_deployment_is_said(
    proxy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Proxy.instances = INSTANCES
    Proxy.metrics = [_metrics(100), _metrics(120)]
    assert cli.main([*WORDS, "--requests", "200", "--live", proxy]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["present"]["ci"] is None and found["gain_ci"][0] < found["gain"]
    said = text(found)
    assert "requests/s (one sample)" in said and "note: one sample: how far chance" in said


def test_a_fleet_that_holds_many_times_its_rate_is_judged_by_longer_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the goodputs found, a sample that lasts long at the present rate is a burst."""
    monkeypatch.setattr(live_verdict.sample_size, "MIN_SECONDS", 3.0)
    monkeypatch.setattr(live_verdict.sample_size, "MIN_LATENCIES", 2.0)
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    words = ["--coefficients", "distserve-a100", "--model", "opt-13b", "--workload", "60:8"]
    scenario = plan_inputs.read(parser.parse_args([*words, "--requests", "50"]), 3, "").scenario
    scenario = msgspec.structs.replace(scenario, seeds=2)
    present = Placement(ReplicaGroup(1, 1, 1), ReplicaGroup(1, 1, 2))
    traffic = ObservedTraffic(60.0, 60, 1.0, 60.0, 8.0, 0.1, 0.02)
    short = live_verdict.judge(scenario, present, traffic, 1, may_grow=False)
    assert [said.partition(";")[0] for said in short["remarks"]] == [
        "50 requests are a burst at these goodputs, in which no queue has time to grow"
    ]
    long = live_verdict.judge(scenario, present, traffic, 1, [scenario])
    assert long["setting"]["requests"] > 60 and long["remarks"] == []
    assert long["present"]["goodput"] < short["present"]["goodput"]
    assert {2, 1} == {split["prefill"] for split in long["alternatives"]}
