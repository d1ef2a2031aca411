"""Flags of the proxy that a plan tries on its best disaggregated placement."""

from __future__ import annotations

import msgspec
import pytest

from vllm_disagg.fleet.conventions import BYTES_PER_TOKEN
from vllm_disagg.planner.commands import documents, launch_commands, report
from vllm_disagg.planner.cost import hardware
from vllm_disagg.planner.cost.latency import LinearLatency
from vllm_disagg.planner.search import advice, evaluation, optimizer, proxy_flags, sample_size
from vllm_disagg.planner.search.performance_source import PerformanceSource
from vllm_disagg.planner.search.placement import Placement, ReplicaGroup
from vllm_disagg.planner.search.placement_score import FlagTrial, PlacementScore
from vllm_disagg.planner.search.sample_size import SearchResult
from vllm_disagg.planner.search.scenario import Scenario
from vllm_disagg.planner.simulation import workload
from vllm_disagg.planner.simulation.objective import Objective
from vllm_disagg.planner.simulation.workload import Arrivals
from vllm_disagg.workloads.traces import Trace, TraceRequest

ONE = ReplicaGroup(1, 1, 1)
PAIR = Placement(ONE, ONE)
STEPS = LinearLatency(1, (0.004, 1e-4, 1e-9), (0.005, 1e-7, 1e-4), (0.005, 1e-7, 1e-4), chunk=512)


def _scenario(lengths: str, ttft: float = 1.0, tpot: float = 0.1) -> Scenario:
    source = PerformanceSource(
        "profile", "points.json", fitted=STEPS, kv_tokens=400_000, budget=512
    )
    return Scenario(
        prefill=source,
        decode=source,
        workload=workload.load(lengths),
        arrivals=Arrivals("poisson"),
        objective=Objective(ttft, tpot),
        requests=150,
        seeds=3,
        gpus=2,
        link=hardware.link("none"),
    )


def _quiet(_: str) -> optimizer.ProgressCallback:
    return lambda done, total, best: None


def _tuned(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> SearchResult:
    """Returns the result of the pair, as if its samples were long enough."""
    monkeypatch.setattr(sample_size, "requests_needed", lambda scenario, score: 0)
    plain = evaluation.evaluate(scenario, PAIR, scenario.samples(), -1.0)
    assert plain
    return proxy_flags.tuned(SearchResult(scenario, [plain], []), 1, _quiet, may_grow=True)


def test_prompts_that_wait_for_p_are_spilled_to_an_idle_d(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of 20 tokens leave D idle; prompts of one length leave no limit of bytes to try."""
    result = _tuned(_scenario("900:20"), monkeypatch)
    assert [trial.placement.proxy_flags for trial in result.flag_trials] == [["--spill"]]
    best, plain = result.split
    assert best.placement == msgspec.structs.replace(PAIR, spill=True)
    assert plain.placement == PAIR and result.large[0] == best
    assert best.goodput > 1.2 * plain.goodput
    found = advice.advise(result)
    document = documents.as_json(found, "m")
    assert document["best"]["spill"] and not document["runner_up"]["spill"]
    assert document["proxy_flags"]["tried"][0]["taken"]
    assert document["commands"][-1].count("--spill") == 1
    assert not any(" up " in line for line in document["commands"]), "its proxy has defaults"
    document |= {"parts": 1}
    text = report.text(found, document, [])
    assert "decode 1 x TP1, --spill" in text and "times the goodput without: taken" in text


def test_short_prompts_go_to_d_where_that_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    result = _tuned(_scenario("sharegpt-like", 0.5, 0.05), monkeypatch)
    best = result.split[0].placement
    assert best.min_prompt_bytes > 0 and not best.spill, "equal with --spill: the fewest flags"
    tried = [trial.placement for trial in result.flag_trials]
    assert {place.spill for place in tried if not place.min_prompt_bytes} == {True}
    prompts = result.scenario.samples()[0].prompts
    for place in tried:
        if place.min_prompt_bytes:
            short = sum(BYTES_PER_TOKEN * prompt < place.min_prompt_bytes for prompt in prompts)
            assert 0.2 < short / len(prompts) < 0.8
    remark = launch_commands.remarks(result.scenario, best)[-2]
    assert f"fewer than {best.min_prompt_bytes // BYTES_PER_TOKEN} tokens" in remark


def test_no_flag_is_taken_that_gains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """D is the bottleneck: its steps of many long answers have no time for prompts."""
    result = _tuned(_scenario("60:200", tpot=0.008), monkeypatch)
    assert result.flag_trials and [score.placement for score in result.split] == [PAIR]
    document = documents.as_json(advice.advise(result), "m")
    assert {trial["gain"] for trial in document["proxy_flags"]["tried"]} == {None}
    lines = report._proxy_flags(advice.advise(result), document)
    assert lines and all(
        line.endswith(": no more than the goodput without: not taken") for line in lines
    )


def _trial(placement: Placement, *rates: float) -> FlagTrial:
    plain = PlacementScore(PAIR, [1.0, 1.0, 1.0], 0.01)
    return FlagTrial(placement, plain, PlacementScore(placement, list(rates), 0.01))


def test_the_highest_certain_gain_is_taken() -> None:
    spill = msgspec.structs.replace(PAIR, spill=True)
    both = msgspec.structs.replace(spill, min_prompt_bytes=400)
    scattered = _trial(both, 0.8, 1.0, 3.0)
    certain = _trial(spill, 1.2, 1.21, 1.19)
    equal = _trial(both, 1.205, 1.205, 1.205)
    assert proxy_flags.best_gain([scattered, certain], 0.01) is certain
    assert proxy_flags.best_gain([equal, certain], 0.01) is certain
    assert proxy_flags.best_gain([equal, certain], 0.001) is equal
    assert proxy_flags.best_gain([scattered, _trial(spill, 1.005, 1.006, 1.007)], 0.01) is None


def test_flags_are_not_tried_where_they_cannot_be_judged() -> None:
    scenario = _scenario("900:20")
    for change, reason in (
        ({"distserve": True}, "DistServe's rules have no such proxy: give --rules vllm"),
        ({"seeds": 1}, "with one sample a gain has no interval: give --seeds 2 or more"),
        ({"requests": 20_001, "seeds": 1}, "more than 20000 requests: give --spill, with which"),
    ):
        other = msgspec.structs.replace(scenario, **change)
        assert reason in proxy_flags.reason_not_to_try(SearchResult(other, [], []))


def test_a_document_names_the_flags_that_were_not_tried_and_what_has_them_tried() -> None:
    rows = tuple(TraceRequest(float(n), 600, 20) for n in range(450))
    scenario = msgspec.structs.replace(
        _scenario("900:20"), seeds=1, workload=workload.Workload("t", trace=Trace(rows))
    )
    result = SearchResult(scenario, [PlacementScore(PAIR, [1.0])], [])
    for arrivals, end in (
        ("poisson", "give --seeds 2 or more"),
        ("trace", "give --seeds 2 or more, and a trace long enough for them"),
    ):
        other = msgspec.structs.replace(scenario, arrivals=workload.Arrivals(arrivals))
        found = advice._flags_not_tried(msgspec.structs.replace(result, scenario=other))
        assert found == (
            "--min-prompt-bytes and --spill were not tried: with one sample a gain has no"
            f" interval: {end}"
        )


def test_only_spill_is_tried_on_a_trace_with_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(TraceRequest(float(n), 600 + n, 20, (n, n + 10**6)) for n in range(450))
    scenario = msgspec.structs.replace(
        _scenario("900:20"), workload=workload.Workload("t", trace=Trace(rows))
    )
    result = _tuned(scenario, monkeypatch)
    assert [trial.placement.proxy_flags for trial in result.flag_trials] == [["--spill"]]
    found = advice.advise(result)
    document = documents.as_json(found, "m")
    not_tried = document["proxy_flags"]["not_tried"]
    assert not_tried.startswith("--min-prompt-bytes was not tried: the trace has hash_ids")
    assert not_tried.endswith("give --workload without them")
    text = report.text(found, document | {"parts": 1}, [])
    assert "proxy --spill: " in text
    assert "--min-prompt-bytes was not tried: the trace has hash_ids" in text


@pytest.mark.parametrize("holds", [True, False])
def test_a_gain_is_judged_again_with_samples_long_enough(
    monkeypatch: pytest.MonkeyPatch, holds: bool
) -> None:
    """The higher rate needs more requests than the plain one."""
    scenario = _scenario("900:20")
    plain = PlacementScore(PAIR, [5.4, 5.4, 5.4])
    spill = msgspec.structs.replace(PAIR, spill=True)
    monkeypatch.setattr(
        sample_size,
        "requests_needed",
        lambda scenario, score: 300 if score.placement.spill else 150,
    )
    trial = FlagTrial(spill, plain, PlacementScore(spill, [7.2, 7.2, 7.2]))
    monkeypatch.setattr(proxy_flags, "_tried", lambda *_: [trial])
    if not holds:
        monkeypatch.setattr(
            sample_size,
            "_search",
            lambda sized, kinds, keep, jobs: SearchResult(
                sized, [PlacementScore(p, [1.0, 1.0, 1.1]) for p in kinds[0].rates], []
            ),
        )
    result = proxy_flags.tuned(SearchResult(scenario, [plain], []), 1, _quiet, may_grow=True)
    assert result.scenario.requests == 375 and result.split[0].placement.spill == holds
    assert len(result.flag_trials) == 1 and result.flag_trials[0] is not trial
    fixed = proxy_flags.tuned(SearchResult(scenario, [plain], []), 1, _quiet, may_grow=False)
    assert fixed.scenario.requests == 150 and fixed.missing == 300
