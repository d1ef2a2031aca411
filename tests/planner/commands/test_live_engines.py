"""`plan --live` with the step times that engines measured of themselves: scripted pages."""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Mapping
from typing import Any

import pytest
from command_outcomes import json_answer

from vllm_disagg import cli
from vllm_disagg.errors import ConfigError
from vllm_disagg.planner.commands import (
    engine_profiles,
    flags,
    live,
    live_text,
    live_verdict,
    plan_inputs,
)
from vllm_disagg.planner.commands.engine_profiles import EngineWindow
from vllm_disagg.planner.commands.metric_page import MetricSamples, MetricWindow, parse
from vllm_disagg.planner.cost import hardware
from vllm_disagg.planner.search import performance_source
from vllm_disagg.planner.search.placement import Placement, ReplicaGroup
from vllm_disagg.planner.search.scenario import Scenario
from vllm_disagg.product_sums import (
    HANDOFF_QUANTITIES,
    STEP_QUANTITIES,
    ProductSums,
    step_product_names,
    steps_of_both_kinds,
)

PROXY = "http://proxy:1"
TRUE = (0.010, 0.004, 2e-4, 0.0, 5e-4, 1e-6)  # as STEP_QUANTITIES
PROMPT = 60
ANSWER = 60
ARRIVAL_WAIT = 0.001  # seconds that a request waits for the step that runs
LANDING_WAIT = 0.003  # the same of a prompt's KV
TPOT = 0.0115  # of a sequence alone, by TRUE
WORDS = ["plan", "--live", PROXY, "--workload", f"{PROMPT}:{ANSWER}", "--ttft", "1"]
WORDS += ["--tpot", "0.05", "--jobs", "1", "--seeds", "1", "--requests", "400"]


class StepSums:
    """Sums over steps, as an engine exports them."""

    def __init__(self) -> None:
        self._kinds = [ProductSums(STEP_QUANTITIES) for _ in range(2)]

    def add(self, step: tuple[float, ...]) -> None:
        self._kinds[int(step[1])].add(step)

    def take(self) -> dict[str, float]:
        decodes, prompts = (sums.take() for sums in self._kinds)
        return dict.fromkeys(step_product_names(), 0.0) | steps_of_both_kinds(decodes, prompts)


def steps(kind: str, count: int = 200, noise: float = 0.0, factor: float = 1.0) -> dict[str, float]:
    """Returns the sums over steps of an engine that only prefills or only decodes."""
    chance = random.Random(3)
    found = StepSums()
    for _ in range(count):
        if kind == "prefill":
            tokens = chance.randrange(20, 200)
            step = (1, 1, tokens, tokens**2, 0, 0)
        else:
            sequences = chance.randrange(1, 30)
            step = (1, 0, 0, 0, sequences, sequences * chance.randrange(50, 100))
        seconds = sum(c * x for c, x in zip(TRUE, step, strict=True))
        found.add((*step, factor * seconds * chance.lognormvariate(0, noise)))
    return found.take()


def handoffs() -> dict[str, float]:
    found = ProductSums(HANDOFF_QUANTITIES)
    for size in range(10):
        found.add((1, 1000 * size, 0.005))
    return found.take()


def engine_page(
    sums: Mapping[str, float], queue: float, first: float, requests: int = 100
) -> MetricSamples:
    lines = []
    for product, value in sums.items():
        lines.append(f'vllm:disagg_step_sums_total{{engine="0",product="{product}"}} {value!r}')
    for product, value in handoffs().items():
        lines.append(f'vllm:disagg_handoff_sums_total{{engine="0",product="{product}"}} {value!r}')
    for product, value in (("arrivals*arrivals", 50), ("arrivals*seconds", 50 * ARRIVAL_WAIT)):
        lines.append(f'vllm:disagg_arrival_sums_total{{engine="0",product="{product}"}} {value!r}')
    for product, value in (("landings*landings", 40), ("landings*seconds", 40 * LANDING_WAIT)):
        lines.append(f'vllm:disagg_landing_sums_total{{engine="0",product="{product}"}} {value!r}')
    for name, mean in (("queue", queue), ("prefill", first)):
        lines.append(f"vllm:request_{name}_time_seconds_sum {mean * requests}")
        lines.append(f"vllm:request_{name}_time_seconds_count {requests}")
    lines.append('vllm:cache_config_info{block_size="16",num_gpu_blocks="2000"} 1.0')
    return parse("\n".join([*lines, ""]).encode())


def window(after: MetricSamples, seconds: float = 10.0) -> MetricWindow:
    return MetricWindow(dict.fromkeys(after, 0.0), after, seconds)


def proxy_window(
    ttft: float, tpot: float = TPOT, queue: float = 0.0, rate: int = 4
) -> MetricWindow:
    requests = 10 * rate
    text = f"""vllm_disagg_requests_total{{mode="disaggregated",outcome="ok"}} {requests}
vllm_disagg_tokens_total{{kind="prompt"}} {requests * PROMPT}
vllm_disagg_tokens_total{{kind="completion"}} {requests * ANSWER}
"""
    for name, mean in (("ttft", ttft), ("tpot", tpot), ("queue", queue)):
        text += f"vllm_disagg_{name}_seconds_sum {requests * mean}\n"
        text += f"vllm_disagg_{name}_seconds_count {requests}\n"
    return window(parse(text.encode()))


def fleet(
    monkeypatch: pytest.MonkeyPatch, proxy: MetricWindow, pages: Mapping[str, list[MetricSamples]]
) -> None:
    """Scripts a proxy and its engines: the pages of each role."""
    rows = []
    windows = {PROXY: proxy}
    for role, found in pages.items():
        for number, page in enumerate(found):
            url = f"http://{role}:{number}"
            rows.append({"url": url, "role": role, "usable": True})
            windows[url] = window(page)
    monkeypatch.setattr(live, "_page", lambda url, path: json.dumps(rows).encode())
    monkeypatch.setattr(live, "measure", lambda url, engines, seconds: windows)


def prefill_page(**change: float) -> MetricSamples:
    return engine_page(steps("prefill", **change), 0.001, 0.026)  # type: ignore[arg-type]


def decode_page(**change: float) -> MetricSamples:
    return engine_page(steps("decode", **change), 0.002, 0.0106)  # type: ignore[arg-type]


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    return json_answer(capsys, *WORDS, *words)


def test_three_prefill_and_one_decode_are_wrong_by_the_engines_own_times(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = {"prefill": [prefill_page()] * 3, "decode": [decode_page()]}
    fleet(monkeypatch, proxy_window(0.06), pages)
    found = answer(capsys)
    assert found["verdict"] == "change" and found["gain_ci"][0] > 1.1
    assert found["best"]["decode"] > 1 and not found["overloaded"]
    base, _, _, _, sequence, context = found["engines"]["decode"]["coefficients"]
    assert [base, sequence, context] == pytest.approx([TRUE[0], *TRUE[4:]], rel=1e-3)
    parts = ARRIVAL_WAIT + 0.001 + 0.026 + 0.005 + LANDING_WAIT + 0.0106
    assert found["engines"]["path"] == pytest.approx(0.06 - parts, abs=1e-5)
    assert found["simulated"]["ttft"] == pytest.approx(0.06, rel=0.25)
    assert found["setting"]["latency"]["prefill"] == "the engines' own steps"


@pytest.mark.parametrize("is_disaggregated", [True, False])
def test_the_path_is_what_requests_lack_wherever_they_went(is_disaggregated: bool) -> None:
    """Most of them went to one engine, and none to a third."""

    def engines(kind: str) -> list[EngineWindow]:
        pages = [
            engine_page(steps(kind), queue, first, requests)
            for requests, queue, first in ((90, 0.001, 0.030), (10, 0.101, 0.130), (0, 0.0, 0.0))
        ]
        return [engine_profiles.read("http://e", window(page)) for page in pages]

    path = 0.007
    until_first = ARRIVAL_WAIT + 0.9 * 0.031 + 0.1 * 0.231
    if is_disaggregated:
        parts = until_first + 0.005 + LANDING_WAIT + 0.9 * 0.030 + 0.1 * 0.130
        proxy = proxy_window(parts + path)
        found = engine_profiles.disaggregated(proxy, engines("prefill"), engines("decode"))
    else:
        both = [*engines("prefill"), engine_profiles.read("http://d", window(idle_decode_page()))]
        found = engine_profiles.colocated(proxy_window(until_first + path), both)
    assert found.path == pytest.approx(path)


def idle_decode_page() -> MetricSamples:
    """Returns the page of an engine that only decodes, without a first token in the window."""
    return engine_page(steps("decode"), 0.0, 0.0, 0)


def test_a_queue_at_the_proxy_is_no_slow_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = {"prefill": [prefill_page()], "decode": [decode_page()]}
    fleet(monkeypatch, proxy_window(40.0, queue=39.9, rate=30), pages)
    found = answer(capsys)
    assert found["overloaded"] and found["verdict"] == "keep"
    assert found["engines"]["prefill"]["seconds"] == pytest.approx(0.036, rel=0.1)
    assert cli.main(WORDS) == 0
    assert "overloaded: 39.9 s of TTFT are the proxy's queue" in capsys.readouterr().out
    refit = ["--coefficients", "distserve-a100", "--model", "opt-13b"]
    found = answer(capsys, *refit)
    assert found["verdict"] == "cannot tell" and "is overloaded" in found["why"]


def test_a_slow_engine_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = {
        "prefill": [prefill_page()] * 3 + [prefill_page(factor=1.8)],
        "decode": [decode_page()] * 2,
    }
    fleet(monkeypatch, proxy_window(0.06), pages)
    found = answer(capsys)
    assert found["engines"]["prefill"]["slow"] == {"http://prefill:3": pytest.approx(1.5)}
    assert found["engines"]["decode"]["slow"] == {}


def test_steps_that_determine_nothing_cannot_tell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = {"prefill": [prefill_page(count=31, noise=2.5)], "decode": [decode_page()]}
    fleet(monkeypatch, proxy_window(0.06), pages)
    found = answer(capsys)
    assert found["verdict"] == "cannot tell" and "a --window" in found["why"]
    assert cli.main(WORDS) == 0
    assert "cannot tell: the steps of the prefill engines" in capsys.readouterr().out


def test_steps_and_tokens_without_time_cannot_tell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A clock that stands, and streams that arrive in one piece."""
    pages = {"prefill": [prefill_page(factor=0.0)], "decode": [decode_page()]}
    fleet(monkeypatch, proxy_window(0.06), pages)
    assert "are too alike to fit their times" in answer(capsys)["why"]
    fleet(monkeypatch, proxy_window(0.06, tpot=0.0), {**pages, "prefill": [prefill_page()]})
    assert "--workload with a trace" in answer(capsys)["why"]


def test_a_simulation_that_differs_from_the_deployment_cannot_tell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pages = {"prefill": [prefill_page()], "decode": [decode_page()]}
    fleet(monkeypatch, proxy_window(0.06, tpot=0.03), pages)
    found = answer(capsys)
    assert found["verdict"] == "cannot tell" and "--workload with a trace" in found["why"]


def alike(kind: str) -> MetricSamples:
    """Returns the page of an engine whose steps have one prompt of 60 tokens, or one sequence."""
    chance = random.Random(5)
    found = StepSums()
    for _ in range(2000):
        step = (1, 1, 60, 3600, 0, 0) if kind == "prefill" else (1, 0, 0, 0, 1, 60)
        true = sum(c * x for c, x in zip(TRUE, step, strict=True))
        found.add((*step, true * chance.gauss(1, 0.02)))
    times = (0.001, 0.026) if kind == "prefill" else (0.002, 0.0106)
    return engine_page(found.take(), *times)


def test_larger_steps_than_any_of_the_window_cannot_tell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All steps of one size show no growth: fitted as a constant, with a tiny error."""
    pages = {"prefill": [alike("prefill")], "decode": [decode_page()]}
    fleet(monkeypatch, proxy_window(0.06), pages)
    found = answer(capsys)
    assert found["engines"]["prefill"]["error"] < 0.01
    assert found["verdict"] == "cannot tell" and "prefill steps of " in found["why"]
    pages = {"prefill": [prefill_page()], "decode": [alike("decode")]}
    fleet(monkeypatch, proxy_window(0.06), pages)
    found = answer(capsys)
    assert found["engines"]["decode"]["error"] < 0.01
    assert found["verdict"] == "cannot tell" and " sequences, and those" in found["why"]


def test_limits_of_a_step_are_assumed_in_words_and_decide_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engines do not export them, and their defaults differ by GPU."""
    pages = {"prefill": [prefill_page()] * 3, "decode": [decode_page()]}
    fleet(monkeypatch, proxy_window(0.06), pages)
    assert cli.main(WORDS) == 0
    assumed = "assumed of each engine: --max-num-batched-tokens 2048 and --max-num-seqs 128"
    assert assumed in capsys.readouterr().out
    given = answer(capsys, "--max-num-batched-tokens", "4096", "--max-num-seqs", "16")
    assert given["assumed"] == {} and given["verdict"] != "cannot tell"
    monkeypatch.setattr(performance_source, "CPU_DEFAULTS", hardware.EngineDefaults(2048, 16))
    found = answer(capsys)
    assert found["verdict"] == "cannot tell" and "default of --max-num-seqs" in found["why"]


def _scenario(*words: str) -> Scenario:
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    return plan_inputs.read(parser.parse_args(words), 2, "--gpus", live.UNMEASURED).scenario


@pytest.mark.parametrize("path", [0.001, 0.02])
def test_a_measured_path_has_the_notice_of_a_handoff(path: float) -> None:
    """No constant is added to it, also where it is shorter than that."""
    engines = [
        engine_profiles.read(role, window(page()))
        for role, page in (("p", prefill_page), ("d", decode_page))
    ]
    parts = ARRIVAL_WAIT + 0.001 + 0.026 + 0.005 + LANDING_WAIT + 0.0106
    found = engine_profiles.disaggregated(proxy_window(parts + path), engines[:1], engines[1:])
    assert found.path == pytest.approx(path)
    measured = engine_profiles.scenario_of(_scenario("--link", "none"), found, 1)
    one = ReplicaGroup(1, 1, 1)
    deployment = measured.deployment(Placement(one, one))
    assert deployment.path.of(PROMPT) + deployment.handoff.notice == pytest.approx(path, abs=1e-9)


def test_colocated_requests_wait_for_running_steps_before_vllms_queue() -> None:
    sums = steps("prefill")
    for name, value in steps("decode").items():
        sums[name] = sums.get(name, 0.0) + value
    engine = engine_profiles.read("c", window(engine_page(sums, 0.001, 0.026)))
    parts = ARRIVAL_WAIT + 0.001 + 0.026
    assert engine_profiles.colocated(proxy_window(parts + 0.01), [engine]).path == pytest.approx(
        0.01
    )


def test_fp8_kv_is_half_as_many_bytes_in_a_live_plan() -> None:
    sizes = []
    for dtype in ("auto", "fp8"):
        loaded = _scenario("--model", "llama-3.1-8b", "--kv-cache-dtype", dtype).prefill.model
        assert loaded
        sizes.append(loaded.kv_bytes(1000))
    assert sizes[0] == 2 * sizes[1]


def test_a_gain_on_both_sides_of_the_limit_cannot_tell() -> None:
    assert live_verdict.verdict_of((0.9, 1.05)) == ("keep", "")
    assert live_verdict.verdict_of((1.2, 1.5)) == ("change", "")
    assert live_verdict.verdict_of(None) == ("change", "")
    verdict, why = live_verdict.verdict_of((0.9, 1.5))
    assert verdict == "cannot tell" and "0.90 to 1.50" in why


def test_waiting_that_is_not_most_of_ttft_is_no_overload() -> None:
    assert not live_text.doubt(0.4, 1.0)
    assert "overloaded" in live_text.doubt(0.6, 1.0)


def refused(page: MetricSamples, before: MetricSamples | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        engine_profiles.read("http://e", MetricWindow(before or {}, page, 10.0))
    return str(error.value)


def test_engines_without_a_profile_are_one_line_each() -> None:
    page = decode_page()
    without = {key: value for key, value in page.items() if "step_sums" not in key[0]}
    assert "exports no step profile" in refused(without)
    for name in ("arrival_sums", "landing_sums"):
        older = {key: value for key, value in page.items() if name not in key[0]}
        assert "no DisaggConnector of this release" in refused(older)
    restarted = {key: value + 1 for key, value in page.items()}
    assert "was restarted during the window" in refused(page, restarted)
    for product in ("steps*seconds", "steps*steps"):
        key = ("vllm:disagg_step_sums_total", frozenset({("engine", "0"), ("product", product)}))
        assert "are no finite numbers" in refused(page | {key: math.nan})
    unqueued = {key: value for key, value in page.items() if "queue_time" not in key[0]}
    assert "has no vllm:request_queue_time_seconds" in refused(unqueued)
    info = {key: value for key, value in page.items() if "cache_config" not in key[0]}
    assert "0 times: its KV is not known" in refused(info)
    bad = info | {("vllm:cache_config_info", frozenset({("block_size", "None")})): 1.0}
    assert "lacks num_gpu_blocks or block_size" in refused(bad)


def engine(sums: dict[str, float]) -> EngineWindow:
    return EngineWindow("http://e", 10.0, sums, {}, {}, {}, 0.0, 0.0, 0.0, 1000)


def test_too_few_steps_of_a_kind_are_one_line() -> None:
    with pytest.raises(ConfigError, match=r"12 steps of prompts .* at the prefill engines"):
        engine_profiles.of_role("prefill", [engine(steps("prefill", 12))])
    with pytest.raises(ConfigError, match=r"0 steps of answers .* at the colocated engines"):
        engine_profiles.of_role("colocated", [engine(steps("prefill"))])
    with pytest.raises(ConfigError, match=r"0 steps of answers .* at the decode engines"):
        engine_profiles.of_role("decode", [engine(steps("prefill"))])
