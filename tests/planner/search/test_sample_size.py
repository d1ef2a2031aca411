"""Samples are long enough for a queue to grow, or there is no verdict."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from distserve_scenario import distserve_scenario

from vllm_disagg.errors import ConfigError
from vllm_disagg.planner.search import evaluation, optimizer, sample_size
from vllm_disagg.planner.search.evaluation import RateBisection
from vllm_disagg.planner.search.placement import Placement, ReplicaGroup
from vllm_disagg.planner.search.placement_score import PlacementScore
from vllm_disagg.planner.search.scenario import Scenario
from vllm_disagg.planner.simulation import workload
from vllm_disagg.planner.simulation.simulator import simulate
from vllm_disagg.planner.simulation.workload import Arrivals

ONE_EACH = Placement(ReplicaGroup(1, 1, 1), ReplicaGroup(1, 1, 1))


def quiet(_: str) -> optimizer.ProgressCallback:
    return lambda *_: None


def vllm_scenario(requests: int) -> Scenario:
    """Returns a scenario with vLLM's rules, whose samples have edges."""
    like_distserve = distserve_scenario("opt-13b", 0.4, 2, requests, 1)
    return msgspec.structs.replace(like_distserve, distserve=False)


def test_requests_at_the_edges_are_simulated_and_not_counted() -> None:
    scenario = vllm_scenario(100)
    sample = scenario.samples()[0]
    assert sample.counted == range(10, 90)
    deployment = scenario.deployment(ONE_EACH)
    whole = simulate(deployment, msgspec.structs.replace(sample, edge=0), 1.0)
    found = simulate(deployment, sample, 1.0)
    for name in ("ttft", "tpot", "latency", "transfer"):
        assert getattr(found, name) == getattr(whole, name)[10:90]


def test_misses_at_the_edges_stop_no_simulation() -> None:
    """Prompts that exceed every instance miss both objectives."""
    scenario = vllm_scenario(100)
    sample = scenario.samples()[0]
    prompts = list(sample.prompts)
    for r in (*range(10), *range(90, 100)):
        prompts[r] = 1_000_000
    late_edges = msgspec.structs.replace(sample, prompts=prompts)
    deployment = scenario.deployment(ONE_EACH)
    assert not simulate(deployment, late_edges, 0.01, scenario.objective).stopped
    assert not scenario.infeasible(ONE_EACH, late_edges)
    all_count = msgspec.structs.replace(late_edges, edge=0)
    assert simulate(deployment, all_count, 0.01, scenario.objective).stopped
    assert scenario.infeasible(ONE_EACH, all_count) == "ttft"


def with_attainment(attainment: float, requests: int = 1000) -> Scenario:
    scenario = vllm_scenario(requests)
    objective = msgspec.structs.replace(scenario.objective, attainment=attainment)
    return msgspec.structs.replace(scenario, objective=objective)


@pytest.mark.parametrize(
    ("attainment", "requests"), [(0.9, 63), (0.99, 625), (0.999, 6250), (0.9999, 62_500)]
)
def test_five_requests_that_count_may_miss(attainment: float, requests: int) -> None:
    scenario = with_attainment(attainment)
    assert sample_size.requests_showing(scenario) == requests
    # A low rate alone takes fewer.
    assert sample_size.lasting(scenario, 1.0).requests == max(1000, requests)
    assert sample_size.requests_at(scenario, 0.01, 0.1) == requests
    assert sample_size.requests_at(scenario, 1000.0, 0.1) == max(75_000, requests)
    all_count = msgspec.structs.replace(scenario, distserve=True)
    assert sample_size.requests_showing(all_count) == round(0.8 * requests)


def test_a_search_for_a_high_attainment_has_samples_that_show_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Searches are scripted: each finds a rate at which a short sample lasts long enough."""
    searched: list[int] = []

    def search(scenario: Scenario, *_: object) -> sample_size.SearchResult:
        searched.append(scenario.requests)
        return sample_size.SearchResult(scenario, [PlacementScore(ONE_EACH, [0.25])], [])

    monkeypatch.setattr(sample_size, "search_fixed", search)
    monkeypatch.setattr(sample_size, "_search", search)
    for attainment, sizes in ((0.998, [3125]), (0.9995, [5000, 15_625])):
        searched.clear()
        scenario = msgspec.structs.replace(with_attainment(attainment), seeds=1, gpus=2)
        assert not sample_size.search_sized(scenario, 1, 1, quiet).missing
        assert searched == sizes
    scenario = with_attainment(0.998)
    short = search(scenario)
    assert short.missing == 3125
    assert sample_size.shortage(scenario, short.missing, "these rates") == (
        "1000 requests are too few for an attainment of 0.998, which 5 of them may miss;"
        " 3125 are needed: give more --requests"
    )


def test_an_attainment_that_no_sample_shows_is_refused() -> None:
    sample_size.check_attainment(with_attainment(0.9999))
    with pytest.raises(ConfigError) as refused:
        sample_size.check_attainment(with_attainment(0.99999))
    assert str(refused.value) == (
        "--attainment: 0.99999 takes samples of 625000 requests: give a lower one, or --requests"
        " 625000"
    )


def test_distserve_counts_all_requests() -> None:
    assert distserve_scenario("opt-13b", 0.2, 2, 100, 1).samples()[0].edge == 0


@pytest.mark.parametrize("rules", ["vllm", "distserve"])
def test_a_sized_search_ends_with_samples_long_enough(
    monkeypatch: pytest.MonkeyPatch, rules: str
) -> None:
    monkeypatch.setattr(sample_size, "MIN_REQUESTS", 20)
    monkeypatch.setattr(sample_size, "_first_rate", lambda scenario: 0.5)  # a guess of 30 requests
    monkeypatch.setattr(sample_size, "MAX_NARROWING_RATIO", 0)
    scenario = vllm_scenario(20)
    if rules == "distserve":
        scenario = distserve_scenario("opt-13b", 0.4, 2, 20, 2)
    found = sample_size.search_sized(scenario, 3, 1, quiet)
    assert found.missing == 0 and found.scenario.seeds == scenario.seeds
    best = found.split[0]
    sample = found.scenario.samples()[0]
    rate = best.goodput * best.placement.gpus
    arrivals = sample.arrivals(rate)
    counted = sample.counted
    seconds = arrivals[counted[-1]] - arrivals[counted[0]]
    # Of one drawn sample, whose gaps have no mean of exactly 1.
    assert seconds > 0.8 * sample_size.MIN_SECONDS
    latency = simulate(found.scenario.deployment(best.placement), sample, rate).latency
    assert seconds > 0.8 * sample_size.MIN_LATENCIES * sum(latency) / len(latency)
    assert len(best.rates) == scenario.seeds


def test_a_sized_search_finds_what_a_search_of_all_finds() -> None:
    scenario = vllm_scenario(20)
    sized = sample_size.search_sized(scenario, 1, 1, quiet)
    fixed = sample_size.search_fixed(sized.scenario, 1, 1, quiet)
    for one, other in zip(sized.best, fixed.best, strict=True):
        assert one.placement == other.placement
        assert one.goodput == pytest.approx(other.goodput, rel=0.02)  # two bisections of 1 %


def test_wide_intervals_take_more_requests() -> None:
    scenario = vllm_scenario(100)
    wide = PlacementScore(ONE_EACH, [1.0, 1.1])
    found = sample_size.SearchResult(scenario, [wide], [])
    # Of two seeds, half an interval is 12.71 / sqrt(2) deviations: 0.605 of the mean.
    assert sample_size._narrowing(found) == pytest.approx(100 * 6.05**2, rel=0.01)
    wanted = sample_size.MARGIN_RATIO * sample_size.MAX_NARROWING_RATIO * found.needed
    assert sample_size._wanted(found) == int(wanted)
    narrow = PlacementScore(ONE_EACH, [1.0, 1.001])
    assert sample_size._narrowing(sample_size.SearchResult(scenario, [narrow], [])) == 0


def test_a_trace_has_no_more_requests_than_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    rows = "".join(f"{n},600,5\n" for n in range(60))
    path.write_text("arrival_s,input_tokens,output_tokens\n" + rows)
    scenario = msgspec.structs.replace(
        vllm_scenario(20), workload=workload.load(str(path)), arrivals=Arrivals("poisson")
    )
    found = sample_size.search_sized(scenario, 1, 1, quiet)
    assert found.scenario.requests == 60 < found.missing


def test_a_burst_that_overloads_nothing_ends_its_own_search_only() -> None:
    """Ten requests at once still meet a loose objective, at whatever rate."""
    scenario = distserve_scenario("opt-13b", 100.0, 2, 10, 1)
    loose = msgspec.structs.replace(
        scenario, objective=msgspec.structs.replace(scenario.objective, tpot=10.0)
    )
    found = sample_size.search_fixed(loose, 3, 1, quiet)
    assert found.best and found.missing > 10


def test_a_bisection_near_a_known_rate_takes_few_probes() -> None:
    probes = 0
    bisection = RateBisection(10.0, 0.01, evaluation.NEAR_STEP_RATIO)
    while not bisection.converged:
        rate = bisection.probe()
        probes += 1
        bisection.record(rate, rate < 9.7)
    assert bisection.low <= 9.7 <= bisection.high and probes <= 6


def test_a_budget_of_many_requests_is_planned_in_equal_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scenario = msgspec.structs.replace(distserve_scenario("opt-13b", 0.2, 8, 100, 1))
    assert sample_size.parts_of(scenario, 10.0) == 1
    monkeypatch.setattr(sample_size, "MAX_REQUESTS", 500)
    assert sample_size.parts_of(scenario, 10.0) == 2
    # A part has room for both kinds of instances.
    assert sample_size.parts_of(scenario, 1e9) == 4
    found = sample_size.search_sized(scenario, 1, 1, quiet)
    assert found.parts == 4 and found.scenario.gpus == 2
