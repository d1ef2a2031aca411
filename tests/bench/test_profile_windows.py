"""benchmarks/self_profile.py without engines: scripted windows of a machine whose speed drifts."""

from __future__ import annotations

import importlib
import math
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from vllm_disagg.errors import ConfigError
from vllm_disagg.planner.commands import live
from vllm_disagg.planner.commands.metric_page import MetricSamples, MetricWindow
from vllm_disagg.planner.simulation.workload import WorkloadSample
from vllm_disagg.product_sums import (
    HANDOFF_QUANTITIES,
    STEP_QUANTITIES,
    ProductSums,
    step_product_names,
    steps_of_both_kinds,
)

MODEL = "llama-3.1-8b"
TRUE = (0.010, 0.004, 2e-4, 0.0, 5e-4, 1e-6)  # seconds of a step, as STEP_QUANTITIES
FIRST = 0.8  # seconds of the first window's steps, as a multiple of all others'
FRONT, PREFILL, DECODE = "http://front", "http://prefill", "http://decode"
SECONDS = 8.0


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The comparison, which imports its neighbours as a script does."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("comparison")


def engine_page(kind: str, count: int, factor: float, seed: int = 0) -> MetricSamples:
    """Returns counters of an engine that has computed so many steps of a kind."""
    chance = random.Random(seed)
    steps = ProductSums(STEP_QUANTITIES)
    for _ in range(count):
        if kind == "prefill":
            tokens = chance.randrange(20, 600)
            step = (1, 1, tokens, tokens**2, 0, 0)
        else:
            sequences = chance.randrange(1, 5)
            step = (1, 0, 0, 0, sequences, sequences * chance.randrange(100, 400))
        seconds = factor * sum(c * x for c, x in zip(TRUE, step, strict=True))
        steps.add((*step, seconds * chance.gauss(1, 0.02)))
    handoffs = ProductSums(HANDOFF_QUANTITIES)
    for _ in range(count):
        handoffs.add((1, 1000, 0.005))
    prompts, decodes = (steps.take(), {}) if kind == "prefill" else ({}, steps.take())
    sums = dict.fromkeys(step_product_names(), 0.0) | steps_of_both_kinds(decodes, prompts)
    page: MetricSamples = {}
    for name, found in (
        ("step", sums),
        ("handoff", handoffs.take()),
        ("arrival", {"arrivals*arrivals": count, "arrivals*seconds": 0.0}),
        ("landing", {"landings*landings": count, "landings*seconds": 0.0}),
    ):
        for product, value in found.items():
            page[f"vllm:disagg_{name}_sums_total", frozenset({("product", product)})] = value
    for name in ("queue", "prefill"):
        page[f"vllm:request_{name}_time_seconds_sum", frozenset()] = 0.02 * count
        page[f"vllm:request_{name}_time_seconds_count", frozenset()] = float(count)
    size = frozenset({("num_gpu_blocks", "5000"), ("block_size", "16")})
    return page | {("vllm:cache_config_info", size): 1.0}


def window(seconds: float, factor: float, seed: int = 0) -> dict[str, MetricWindow]:
    """Returns the window of a stack: the engines had some 20 prompts a second before it, too."""
    front = {("vllm_disagg_ttft_seconds_sum", frozenset[tuple[str, str]]()): 0.1}
    front["vllm_disagg_ttft_seconds_count", frozenset()] = 1.0
    pages = {FRONT: front}
    for url, kind, rate in ((PREFILL, "prefill", 20), (DECODE, "decode", 60)):
        pages[url] = engine_page(kind, round(rate * seconds), factor, seed)
    found = {}
    for url, page in pages.items():
        before = {key: 3.0 * value for key, value in page.items()}
        after = {key: 4.0 * value for key, value in page.items()}
        found[url] = MetricWindow(before, after, seconds)
    return found


class ScriptedStack:
    """Computes as its true step times say; only in the first window it is faster."""

    def __init__(self, bench: ModuleType) -> None:
        self.addresses = bench.StackAddresses(True, FRONT, [PREFILL, DECODE])
        true = bench.profile_of(self.addresses, [window(60.0, 1.0)])
        self.true = bench.prediction_of(true, MODEL, is_disaggregated=True)
        self.loops: list[str] = []
        self.lengths: list[tuple[int, int]] = []  # of requests of the windows

    def closed(self, requests: Iterator[tuple[int, int]], seconds: float) -> Any:
        self.loops.append(f"closed {seconds:g}")
        self.lengths += islice(requests, round(10 * seconds))
        factor = FIRST if len(self.loops) <= 2 else 1.0
        return window(seconds, factor, len(self.loops))

    def open(self, sent: WorkloadSample, rate: float) -> tuple[list[tuple[float, float]], Any]:
        self.loops.append("open")
        return self.true.times(sent, rate), window(SECONDS, 1.0, len(self.loops))


def sample() -> WorkloadSample:
    chance = random.Random(1)
    prompts = [chance.randrange(20, 600) for _ in range(4000)]
    outputs = [chance.randrange(2, 30) for _ in prompts]
    return WorkloadSample(prompts, outputs, [chance.expovariate(1.0) for _ in prompts])


def test_all_windows_judge_and_only_the_first_one_chooses_the_rates(
    bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = ScriptedStack(bench)
    requests = sample()
    found = bench.compare(stack, "scripted", requests, MODEL, SECONDS)
    runs = found["rates"] + found["further_runs"]
    later = f"closed {SECONDS / 4:g}"
    assert stack.loops == ["closed 3", f"closed {SECONDS:g}", *["open", later] * len(runs)]
    half = len(requests) // 2
    windows = list(zip(requests.prompts[half:], requests.outputs[half:], strict=True))
    assert stack.lengths == (windows * 2)[: len(stack.lengths)]

    # The first window has the weight of four others.
    joint = (FIRST * 4 + len(runs)) / (4 + len(runs))
    drift = found["drift"]
    assert len(drift) == 1 + len(runs)
    for kind in ("prompts", "decodes"):
        assert drift[0][kind] == pytest.approx(FIRST / joint, rel=0.01)
        assert [each[kind] for each in drift[1:]] == pytest.approx(
            [1 / joint] * len(runs), rel=0.02
        )
    ratios = [(each["prompt_steps_ratio"], each["decode_steps_ratio"]) for each in runs]
    assert ratios == [pytest.approx((1 / joint, 1 / joint), rel=0.02)] * len(runs)

    goodput = found["goodput"]
    profile = bench.profile_of(stack.addresses, [window(SECONDS, FIRST, seed=2)])
    first = bench.prediction_of(profile, MODEL, is_disaggregated=True)
    chosen = first.goodput(bench.part(requests, 0, 200))
    assert [each["rate"] / chosen for each in found["rates"]] == pytest.approx([0.7, 0.95, 1.25])
    assert goodput["first_window"]["error"] > 0.1
    assert abs(goodput["error"]) < 0.5 * goodput["first_window"]["error"]
    assert goodput["interval"][0] <= goodput["measured"] <= goodput["interval"][1]
    for each in runs:
        before = each["first_window"]
        assert abs(each["error"]) < abs(before["error"])
        assert before["prompt_steps_ratio"] == pytest.approx(1 / FIRST, rel=0.02)

    least, most = (end(each["prompts"] for each in drift) for end in (min, max))
    assert f"each window took {least:.2f} to {most:.2f} times (prompts)" in capsys.readouterr().out


def test_a_goodput_that_later_runs_move_below_all_rates_is_sought_there(bench: ModuleType) -> None:
    """As in a dry run: 95 % attained at the lowest rate, and 73 % when it was sent again."""
    stack = ScriptedStack(bench)
    slower = bench.profile_of(stack.addresses, [window(60.0, 1.3)])
    after = 7  # runs

    class SlowsDown(ScriptedStack):
        def open(self, sent: WorkloadSample, rate: float) -> Any:
            if self.loops.count("open") == after:
                self.true = bench.prediction_of(slower, MODEL, is_disaggregated=True)
            return super().open(sent, rate)

    found = bench.compare(SlowsDown(bench), "scripted", sample(), MODEL, SECONDS)
    assert math.isfinite(found["goodput"]["measured"])


def test_another_goodput_is_predicted_also_beyond_the_rates_that_were_sent(
    bench: ModuleType,
) -> None:
    """Predictions of the runs alone all attain the objective, so they would show no goodput."""
    slow = ScriptedStack(bench)
    comparison = bench.Comparison(slow, sample(), MODEL, SECONDS)
    rows = [{"rate": rate, "requests": 30, "met_predicted": 30} for rate in (0.5, 1.0)]
    found = comparison._simulated(slow.true, rows)
    known = slow.true.goodput(bench.part(sample(), 0, 200))
    assert bench.goodput_of(found) == pytest.approx(known, rel=0.25)
    assert [count.rate for count in found][:2] == [0.5, 1.0]


def test_windows_add_up(bench: ModuleType) -> None:
    """Each with its own beginning; a series may be new in one of them."""
    windows = importlib.import_module("profile_windows")
    name = ("sums", frozenset[tuple[str, str]]())
    new = ("new", frozenset({("kind", "a")}))
    joined = windows.joined(
        [
            MetricWindow({name: 5.0}, {name: 7.0}, 2.0),
            MetricWindow({name: 90.0}, {name: 91.0, new: 4.0}, 1.0),
        ]
    )
    assert joined.seconds == 3.0
    assert joined.increase("sums") == 3.0
    assert joined.increase("new", kind="a") == 4.0
    at = bench.StackAddresses(True, FRONT, [PREFILL, DECODE])
    parts = [window(1.0, 1.0, seed) for seed in range(3)]
    assert windows.profile_of(at, parts).decode.steps.decode_steps == 180


def test_windows_of_few_steps_are_fitted_together(bench: ModuleType) -> None:
    windows = importlib.import_module("profile_windows")
    at = bench.StackAddresses(True, FRONT, [PREFILL, DECODE])
    parts = [window(1.0, 1.0, seed) for seed in range(3)]
    with pytest.raises(ConfigError, match="20 steps of prompts"):
        windows.profile_of(at, parts[:1])
    profile = windows.profile_of(at, parts)
    found = [windows.multiples(profile, windows.steps_of(at, each)) for each in parts]
    said = windows.drift_words(found)
    assert said.endswith("as long as in all 3")
    # An engine without a step of the kind is no slow one, and no fast one.
    empty = windows.multiples(profile, windows.StepKinds({}, {}))
    assert all(map(math.isnan, empty.values()))
    assert windows.drift_words([*found, empty]) == said.replace("all 3", "all 4")
    assert "nan to nan times (prompts)" in windows.drift_words([empty])


def test_each_window_begins_where_the_last_one_ended(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks = importlib.import_module("measured_stack")
    name = ("sums", frozenset[tuple[str, str]]())
    done: list[str] = []

    def read_pages(front: str, engines: list[str]) -> dict[str, tuple[float, MetricSamples]]:
        done.append("read")
        count = float(len(done))
        return {url: (10 * count, {name: count}) for url in (front, *engines)}

    monkeypatch.setattr(live, "read_pages", read_pages)
    monkeypatch.setattr(stacks, "closed_loop", lambda *_: done.append("closed"))
    monkeypatch.setattr(stacks, "open_loop", lambda *_: done.append("open") or [(0.1, 0.0)])
    monkeypatch.setattr(stacks, "send", lambda *_: done.append("export"))
    monkeypatch.setattr(stacks.time, "sleep", lambda seconds: None)
    stack = stacks.MeasuredStack(bench.StackAddresses(True, FRONT, [PREFILL, DECODE]))
    first = stack.closed(iter([]), 1.0)
    times, second = stack.open(sample(), 1.0)
    ended = ["export", "export", "read"]
    assert done == ["read", "closed", *ended, "open", *ended]
    assert times == [(0.1, 0.0)]
    assert list(first) == [FRONT, PREFILL, DECODE]
    for url, window in second.items():
        assert window.before == first[url].after
        assert window.seconds == 40.0
