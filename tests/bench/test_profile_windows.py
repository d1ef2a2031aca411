"""benchmarks/self_profile.py without engines: scripted windows of a machine whose speed drifts."""

from __future__ import annotations

import importlib
import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from vllm_disagg.errors import ConfigError, DisaggError
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
        self.bench = bench
        self.addresses = bench.StackAddresses(True, FRONT, [PREFILL, DECODE])
        true = bench.profile_of(self.addresses, [window(60.0, 1.0)])
        self.true = bench.prediction_of(true, MODEL, is_disaggregated=True)
        self.loops: list[str] = []
        self.clients: list[list[int]] = []  # of each closed loop
        self.lengths: list[tuple[int, int]] = []  # of requests of the windows

    def closed(
        self, requests: Iterator[tuple[int, int]], seconds: float, clients: Sequence[int]
    ) -> tuple[int, Any]:
        self.loops.append(f"closed {seconds:g}")
        self.clients.append(list(clients))
        self.lengths += islice(requests, round(10 * seconds))
        factor = FIRST if len(self.loops) <= 2 else 1.0
        return 2, window(seconds, factor, len(self.loops))

    def open(self, sent: WorkloadSample, rate: float) -> tuple[Any, Any]:
        self.loops.append("open")
        opened = self.bench.OpenRun(self.true.times(sent, rate), 0.025)
        return opened, window(SECONDS, 1.0, len(self.loops))


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
    # Two requests of each window fail; the warm-up is in no profile.
    assert found["failed_in_windows"] == 2 * (1 + len(runs))
    assert all(each["lateness"] == 0.025 for each in runs)
    printed = capsys.readouterr().out
    assert f"each window took {least:.2f} to {most:.2f} times (prompts)" in printed
    assert f"; {2 * (1 + len(runs))} of their requests failed\n" in printed
    assert printed.count("sent up to 25 ms late, 0 failed\n") == 2 * len(runs)
    lower, higher = goodput["between"]
    assert lower <= goodput["measured"] <= higher
    assert f" between runs at {lower:.2f} and {higher:.2f};" in printed


def served(count: int, share: float) -> list[tuple[float, float]]:
    """Returns times of requests, of which a share meet the objective."""
    met = round(share * count)
    return [(0.1, 0.01)] * met + [(5.0, 0.01)] * (count - met)


class ScriptedPrediction:
    """Predicts that all requests meet the objective at up to 10 requests/s, and half above."""

    def __init__(self, profile: Any, folder: str, *, is_disaggregated: bool) -> None:
        self.profile = profile

    def goodput(self, requests: WorkloadSample) -> float:
        return 10.0

    def decoding(self, requests: WorkloadSample, rate: float) -> float:
        return 4.0

    def times(self, sent: WorkloadSample, rate: float) -> list[tuple[float, float]]:
        return served(len(sent), 1.0 if rate <= 10.0 else 0.5)


@pytest.mark.parametrize(
    ("most", "clients"),
    [
        (6.0, [[1, 2, 4]]),
        (24.0, [[1, 2, 4], [2, 4, 8], [4, 8, 16]]),
        (99.0, [[1, 2, 4], [2, 4, 8], [4, 8, 16], [8, 16, 32]]),
    ],
)
def test_windows_have_about_as_many_clients_as_requests_decode_at_the_goodput(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, most: float, clients: list[list[int]]
) -> None:
    monkeypatch.setattr(bench, "prediction_of", ScriptedPrediction)
    monkeypatch.setattr(ScriptedPrediction, "decoding", lambda self, requests, rate: most)
    stack = ScriptedStack(bench)
    found = bench.compare(stack, "scripted", sample(), MODEL, SECONDS)
    # The warm-up comes first. A window of too few clients is in no profile.
    assert stack.clients[: 1 + len(clients)] == [[1, 2, 4], *clients]
    assert all(later == clients[-1] for later in stack.clients[1 + len(clients) :])
    assert found["clients"] == clients[-1]
    assert len(found["drift"]) == len(stack.clients) - len(clients)


def test_as_many_requests_decode_as_come_while_one_does(bench: ModuleType) -> None:
    true = ScriptedStack(bench).true
    lone = WorkloadSample([100] * 50, [11] * 50, [0.0] + [1.0] * 49)
    ((_, tpot), *_) = true.times(lone, 0.1)
    assert true.decoding(lone, 0.1) == pytest.approx(0.1 * 10 * tpot, rel=0.01)


class ScriptedRuns(ScriptedStack):
    """Attains a share by the rate, and by whether a rate has been sent a second time yet."""

    def __init__(self, bench: ModuleType, share: Callable[[float, bool], float]) -> None:
        super().__init__(bench)
        self.share = share
        self.rates: list[float] = []
        self.has_repeated = False

    def open(self, sent: WorkloadSample, rate: float) -> tuple[Any, Any]:
        _, found = super().open(sent, rate)
        self.has_repeated |= rate in self.rates
        self.rates.append(rate)
        times = served(len(sent), self.share(rate, self.has_repeated))
        return self.bench.OpenRun(times, 0.0), found


def test_a_goodput_that_later_runs_move_is_sought_and_narrowed_again(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a dry run: 95 % attained at the lowest rate, and 73 % when it was sent again."""
    monkeypatch.setattr(bench, "prediction_of", ScriptedPrediction)

    def share(rate: float, has_repeated: bool) -> float:
        if has_repeated:  # the machine has become slower
            return 1.0 if rate <= 6 else 0.0
        return 1.0 if rate <= 8 else 0.5

    stack = ScriptedRuns(bench, share)
    found = bench.compare(stack, "scripted", sample(), MODEL, SECONDS)
    first = [7, 9.5, 12.5, 8.155, 7.555, 10.897]
    moved = [7.555, 7, 5, 5.916, 6.435]
    assert stack.rates == pytest.approx([*first, *moved, 5.916, 6.435], rel=1e-3)
    assert found["goodput"]["between"] == pytest.approx((5.916, 6.435), rel=1e-3)
    assert [each["requests"] for each in found["further_runs"][-2:]] == [100, 100]


def test_a_goodput_far_below_the_predicted_one_is_not_found(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "prediction_of", ScriptedPrediction)
    stack = ScriptedRuns(bench, lambda rate, has_repeated: 0.0)
    goodput = bench.compare(stack, "scripted", sample(), MODEL, SECONDS)["goodput"]
    lower = [5, 3.571, 2.551, 1.822, 1.301]  # the next is less than an eighth of 10
    assert stack.rates == pytest.approx([7, 9.5, 12.5, *lower], rel=1e-3)
    assert goodput["between"] is None
    assert math.isnan(goodput["measured"])
    assert capsys.readouterr().out.endswith(" by the first window alone; not found in the runs\n")


def test_a_workload_whose_engine_starts_again_keeps_its_runs_until_then(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "prediction_of", ScriptedPrediction)

    class StartsAgain(ScriptedStack):
        def open(self, sent: WorkloadSample, rate: float) -> tuple[Any, Any]:
            opened, found = super().open(sent, rate)
            if self.loops.count("open") == 3:
                page = found[DECODE]
                found[DECODE] = MetricWindow(page.after, page.before, page.seconds)
            return opened, found

    found = bench.compare(StartsAgain(bench), "scripted", sample(), MODEL, SECONDS)
    assert "was restarted" in found["reason"]
    assert [each["rate"] for each in found["rates"]] == [7.0, 9.5]
    assert found["further_runs"] == []
    assert "goodput" not in found
    assert f"scripted has failed: {found['reason']}\n" in capsys.readouterr().out


def test_failed_requests_count_in_the_median(bench: ModuleType) -> None:
    predictions = importlib.import_module("predictions")
    good = [(0.1, 0.0), (0.2, 0.0), (0.3, 0.0)]
    failed = (-1.0, -1.0)
    assert predictions.median(good) == 0.2
    assert predictions.median([*good, failed, failed]) == 0.3
    assert math.isnan(predictions.median([*good, failed, failed, failed]))
    assert math.isnan(predictions.median([*good, *[failed] * 4]))


def result(
    predicted: float, first: float, interval: tuple[float, float], ttft: float
) -> dict[str, Any]:
    """Returns a workload with a measured goodput of 4 requests/s, and one rate."""
    return {
        "goodput": {
            "predicted": predicted,
            "error": predicted / 4 - 1,
            "interval": interval,
            "first_window": {"predicted": first, "error": first / 4 - 1},
        },
        "rates": [{"error": ttft, "first_window": {"error": 0.5}, "failed": 1}],
        "further_runs": [{"failed": 2}],
        "failed_in_windows": 3,
    }


def test_the_summary_has_the_errors_by_the_first_window_alone_too(bench: ModuleType) -> None:
    self_profile = importlib.import_module("self_profile")
    found = self_profile.summary(
        [
            result(4.4, 6.0, (3.0, 5.0), 0.1),
            result(6.0, 4.2, (3.0, 7.0), -0.2),
            result(4.2, 4.2, (0.0, math.inf), math.nan),  # no interval holds it
            result(math.nan, math.nan, (3.0, math.inf), 0.3),
            {"reason": "engines ended", "rates": [{"failed": 9}], "further_runs": []},
        ]
    )
    first = found.pop("first_window")
    assert found == {
        "goodput_error_worst": 0.5,
        "goodput_not_found": 1,
        "goodput_within_target": 2,
        "goodput_within_interval": 2,
        "goodput_intervals": 2,
        "ttft_error_worst": 0.3,
        "ttft_not_found": 1,
        "ttft_within_target": 2,
        "workloads": 5,
        "workloads_failed": 1,
        "rates": 4,
        "failed": 21,
        "failed_in_windows": 12,
    }
    assert first == {
        "goodput_error_worst": 0.5,
        "goodput_not_found": 1,
        "goodput_within_target": 2,
        "goodput_within_interval": 1,
        "ttft_error_worst": 0.5,
        "ttft_not_found": 0,
        "ttft_within_target": 0,
    }


def test_each_workload_is_saved_when_it_ends_and_failures_are_recorded(
    bench: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    self_profile = importlib.import_module("self_profile")
    file = tmp_path / "rows.json"
    saved: list[int] = []  # rows, when each workload begins

    def rows() -> Any:
        # NaN and Infinity are no JSON.
        return json.loads(file.read_text(), parse_constant=pytest.fail)

    def start_measured(stack: Any, model: str, logs: Path) -> None:
        if stack.name == "disaggregated":
            (logs / "prefill.log").write_text("OSError: no such model")
            raise self_profile.StartFailed("disaggregated: a process ended at start")

    def compare(stack: Any, name: str, *_: object) -> dict[str, Any]:
        saved.append(len(rows()))
        if "long" in name:
            return {"reason": "restarted", "rates": [], "further_runs": []}
        return result(4.0, math.nan, (3.0, math.inf), 0.1)

    monkeypatch.setattr(self_profile, "start_measured", start_measured)
    monkeypatch.setattr(self_profile, "compare", compare)
    monkeypatch.setattr(self_profile.Stack, "stop", lambda self: None)
    monkeypatch.setattr(self_profile, "signal", SimpleNamespace(signal=lambda *_: None, SIGTERM=15))
    words = ["self_profile", MODEL, "--workloads", "long prompts", "chat", "--save", str(file)]
    monkeypatch.setattr(sys, "argv", words)
    assert self_profile.main() == 1
    assert saved == [2, 3]
    assert [row.get("reason") for row in rows()] == [
        *["disaggregated: a process ended at start"] * 2,
        "restarted",
        None,
    ]
    goodput = rows()[3]["goodput"]
    assert goodput["interval"] == [3.0, None]
    assert goodput["first_window"] == {"predicted": None, "error": None}
    printed = capsys.readouterr().out
    assert "prefill.log:\nOSError: no such model\n" in printed
    assert json.loads(printed.splitlines()[-1])["workloads_failed"] == 3
    monkeypatch.setattr(sys, "argv", [*words, "--only", "colocated"])
    monkeypatch.setattr(self_profile, "compare", lambda *_: result(4.0, 4.0, (3.0, 5.0), 0.1))
    assert self_profile.main() == 0


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
    assert all(count.sent >= bench.GOODPUT_REQUESTS for count in found[2:])


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
    opened = bench.OpenRun([(0.1, 0.0)], 0.02)
    monkeypatch.setattr(stacks, "closed_loop", lambda *_: done.append("closed") or 3)
    monkeypatch.setattr(stacks, "open_loop", lambda *_: done.append("open") or opened)
    monkeypatch.setattr(stacks, "send", lambda *_: done.append("export") or (0.1, 0.0))
    clock = SimpleNamespace(sleep=lambda seconds: done.append(f"sleep {seconds}"))
    monkeypatch.setattr(stacks, "time", clock)
    stack = stacks.MeasuredStack(bench.StackAddresses(True, FRONT, [PREFILL, DECODE]))
    failed, first = stack.closed(iter([]), 1.0, (1,))
    found, second = stack.open(sample(), 1.0)
    ended = ["sleep 1.2", "export", "export", "read"]  # engines export after a second
    assert done == ["read", "closed", *ended, "open", *ended]
    assert (failed, found) == (3, opened)
    assert list(first) == [FRONT, PREFILL, DECODE]
    for url, window in second.items():
        assert window.before == first[url].after
        assert window.seconds == 50.0


def test_a_window_whose_export_failed_is_none(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacks = importlib.import_module("measured_stack")
    answers = iter([(0.1, 0.0), (-1.0, -1.0)])
    monkeypatch.setattr(live, "read_pages", lambda front, engines: {})
    monkeypatch.setattr(stacks, "closed_loop", lambda *_: 0)
    monkeypatch.setattr(stacks, "send", lambda *_: next(answers))
    monkeypatch.setattr(stacks, "time", SimpleNamespace(sleep=lambda seconds: None))
    stack = stacks.MeasuredStack(bench.StackAddresses(True, FRONT, [PREFILL, DECODE]))
    with pytest.raises(DisaggError, match="its sums are incomplete"):
        stack.closed(iter([]), 1.0, (1,))
