"""Capacity bounds against simulations, and pruned searches against searches of everything."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest

from vllm_disagg.planner.cost import hardware, model
from vllm_disagg.planner.cost.latency import LinearLatency
from vllm_disagg.planner.cost.step_tables import step_tables
from vllm_disagg.planner.search import demand, enumeration, evaluation, optimizer
from vllm_disagg.planner.search.bounds import CapacityBounds, RequestWork
from vllm_disagg.planner.search.demand import DemandScore
from vllm_disagg.planner.search.performance_source import PerformanceSource
from vllm_disagg.planner.search.placement import Criterion, Placement
from vllm_disagg.planner.search.placement_score import PlacementScore, of_budget
from vllm_disagg.planner.search.scenario import Scenario
from vllm_disagg.planner.simulation import workload
from vllm_disagg.planner.simulation.objective import Objective, SimulationResult
from vllm_disagg.planner.simulation.simulator import simulate
from vllm_disagg.planner.simulation.workload import Arrivals
from vllm_disagg.workloads.traces import Trace, TraceRequest

SEEDS = range(10)


def _quiet(done: int, total: int, best: PlacementScore | None) -> None:
    assert done <= total


def small_scenario(seed: int) -> Scenario:
    """Returns a random cluster of up to 4 instances under random traffic."""
    random = Random(seed)
    constant = random.choice([0.0, 0.004, 0.02])
    prefill = (constant, random.uniform(2e-5, 2e-4), random.choice([0.0, 1e-9, 1e-8]))
    decode = (random.uniform(0.002, 0.02), random.uniform(0, 4e-7), random.uniform(0, 3e-4))
    source = PerformanceSource(
        "profile",
        "random",
        fitted=LinearLatency(1, prefill, decode, decode, chunk=512),
        kv_tokens=random.choice([3000, 20_000, 400_000]),
        budget=random.choice([128, 512, 2048]),
    )
    lengths = random.choice(["200:20", "900:60", "60:200", "humaneval-like", "sharegpt-like"])
    return Scenario(
        prefill=source,
        decode=source,
        workload=workload.load(lengths),
        arrivals=Arrivals(*random.choice([("poisson", 1.0), ("gamma", 3.0)])),
        objective=Objective(
            random.choice([0.2, 1.0]), random.choice([0.02, 0.05]), 0.9, random.random() < 0.6
        ),
        requests=random.choice([50, 100]),
        seeds=random.choice([1, 2]),
        gpus=random.choice([3, 4]),
        link=hardware.link("none"),
        distserve=random.random() < 0.3,
    )


def tabulated_scenario(seed: int) -> Scenario:
    """Returns a random cluster whose step times are noisy tables."""
    scenario = small_scenario(seed)
    random = Random(seed)
    tokens = (1, 4, 16, 64, 256, 1024)
    noise = [[random.uniform(0.6, 1.5) for _ in tokens] for _ in range(3)]
    constant = random.choice([0.002, 0.02])
    tables = step_tables(
        tokens,
        [a * (constant + 1e-4 * size) for a, size in zip(noise[0], tokens, strict=True)],
        [a * 1e-3 for a in noise[1]],
        [a * (1e-3 + 1e-5 * size) for a, size in zip(noise[2], tokens, strict=True)],
        random.choice([0.0, 1e-8]),
        random.uniform(0, 4e-7),
    )
    source = msgspec.structs.replace(
        scenario.prefill, kind="aiconfigurator", fitted=None, tables=((1, tables),)
    )
    return msgspec.structs.replace(scenario, prefill=source, decode=source)


def assert_no_goodput_is_above_its_bound(scenario: Scenario) -> None:
    samples = scenario.samples()
    bounds = CapacityBounds(scenario, samples)
    for placement in (*enumeration.disaggregated(scenario), *enumeration.colocated(scenario)):
        score = evaluation.evaluate(scenario, placement, samples, -1.0)
        assert score
        assert score.total <= bounds.rate(placement) * (1 + 1e-9), placement


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("made", [small_scenario, tabulated_scenario])
def test_no_goodput_is_above_its_bound(seed: int, made: Callable[[int], Scenario]) -> None:
    assert_no_goodput_is_above_its_bound(made(seed))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("flags", [(0, True), (4 * 210, False), (4 * 210, True)])
def test_no_goodput_is_above_its_bound_with_whole_prompts_at_d(
    seed: int, flags: tuple[int, bool]
) -> None:
    scenario = msgspec.structs.replace(
        small_scenario(seed), distserve=False, min_prompt_bytes=flags[0], spill=flags[1]
    )
    samples = scenario.samples()
    bounds = CapacityBounds(scenario, samples)
    for placement in enumeration.disaggregated(scenario):
        score = evaluation.evaluate(scenario, placement, samples, -1.0)
        assert score
        assert score.total <= bounds.rate(placement) * (1 + 1e-9), placement


def _conversations(random: Random) -> workload.Workload:
    """Builds a trace of texts that grow from turn to turn, in blocks of 16 tokens."""
    rows = []
    tokens = [random.randint(100, 600) for _ in range(12)]
    for n in range(100):
        text = random.randrange(len(tokens))
        answer = random.randint(2, 120)
        ids = range(1000 * text, 1000 * text + 1000)
        whole = tokens[text] // 16
        kept = (tokens[text] + answer - 1) // 16
        row = TraceRequest(
            float(n), tokens[text], answer, (*ids[:whole], 10**6 + n), (*ids[whole:kept],)
        )
        rows.append(row)
        tokens[text] = min(2000, tokens[text] + answer + random.randint(1, 100))
    return workload.Workload("turns", trace=Trace(tuple(rows), 16))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("spill", [None, True])
def test_no_goodput_is_above_its_bound_with_turns_of_conversations(
    seed: int, spill: bool | None
) -> None:
    """P computes only what neither it nor D has of a prompt, and D what it has not itself."""
    scenario = msgspec.structs.replace(
        small_scenario(seed),
        distserve=False,
        workload=_conversations(Random(seed)),
        requests=100,
        spill=spill,
    )
    assert_no_goodput_is_above_its_bound(scenario)


def test_blocks_of_answers_may_be_cached() -> None:
    """Of the second prompt only the last block is new, and of the first all."""
    rows = (
        TraceRequest(0.0, 32, 33, (1, 2), (3, 4)),
        TraceRequest(1.0, 80, 5, (1, 2, 3, 4, 5)),
    )
    traffic = workload.Workload("turns", trace=Trace(rows, 16))
    scenario = msgspec.structs.replace(small_scenario(0), workload=traffic)
    sample = traffic.sample(2, 0, Arrivals("poisson"))
    assert RequestWork(scenario, sample)._cached == [31, 64]


def _by_trying_all(scenario: Scenario, rate: float) -> list[Placement | None]:
    """Returns the first placement of each kind that holds a rate, in the order of the search."""
    samples = scenario.samples()
    found: list[Placement | None] = []
    for places in (
        enumeration.disaggregated(scenario),
        list(demand._all_numbers(enumeration.colocated(scenario))),
    ):
        ordered = sorted(places, key=lambda place: demand._order(scenario, place))
        holding = (p for p in ordered if demand.trial(scenario, p, samples, rate))
        found.append(next(holding, None))
    return found


def _units(scenario: Scenario, placement: Placement | None) -> float | None:
    return scenario.criterion.units(placement) if placement else None


def _check_the_cheapest(scenario: Scenario, rate: float) -> None:
    """Compares what a search finds for a rate with what trying all finds."""
    found = demand._cheapest(scenario, rate, lambda kind, place: None)
    for score, best in zip(
        (found.split, found.together), _by_trying_all(scenario, rate), strict=True
    ):
        units = _units(scenario, score.placement if score else None)
        assert units == _units(scenario, best), (rate, score and score.placement, best)
        if units and found.least_units:
            assert found.least_units <= units


@pytest.mark.parametrize("seed", SEEDS)
def test_the_cheapest_placement_for_a_rate_is_that_of_trying_all(seed: int) -> None:
    scenario = small_scenario(seed)
    sample = scenario.samples()[0]
    rate = 0.6 * max(
        evaluation.estimate(scenario, place, sample) * place.gpus
        for place in enumeration.disaggregated(scenario)
    )
    _check_the_cheapest(scenario, rate)


def _roofline_scenario(gpus: int, requests: int, ttft: float = 1.5) -> Scenario:
    source = PerformanceSource("roofline", "h100", model.load("opt-13b"), hardware.gpu("h100"))
    return Scenario(
        prefill=source,
        decode=source,
        workload=workload.load("2000:20"),
        arrivals=Arrivals("poisson"),
        objective=Objective(ttft, 0.05),
        requests=requests,
        seeds=1,
        gpus=gpus,
        link=hardware.link("ib-400"),
    )


def test_a_shortlist_has_the_best_of_all_placements(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = _roofline_scenario(5, 150)
    placements = enumeration.disaggregated(scenario)
    criteria = (scenario.criterion.units, of_budget)
    kinds = [optimizer.Candidates(dict.fromkeys(placements, 0.0), _quiet)]
    brute = optimizer.search_kinds(scenario, kinds, 0, 1, criteria)[0]
    monkeypatch.setattr(optimizer, "MAX_SIMULATED_PLACEMENTS", 0)
    monkeypatch.setattr(optimizer, "SHORTLIST_PLACEMENTS", 10)
    short = optimizer.search_kinds(scenario, kinds, 1, 1, criteria)[0]
    for units, found, best in zip(criteria, short, brute, strict=True):
        assert len(best) > 20
        # Both values from one sample: a shortlist's finalists are simulated longer.
        values = {score.placement: score.value(units) for score in best}
        shortest = values[found[0].placement]
        assert shortest >= (1 - 2 * scenario.tolerance) * best[0].value(units)


def test_a_guess_below_the_floor_takes_one_simulation(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = _roofline_scenario(4, 150)
    samples = scenario.samples()
    place = enumeration.disaggregated(scenario)[0]
    plain = evaluation.evaluate(scenario, place, samples, 0.0, 1.0)
    assert plain
    rates = []

    def count(*args: Any, **kwargs: Any) -> SimulationResult:
        rates.append(args[2])
        return simulate(*args, **kwargs)

    monkeypatch.setattr(evaluation, "simulate", count)
    above = 1.1 * plain.goodput
    assert evaluation.evaluate(scenario, place, samples, above, 0.7 * plain.goodput) is None
    assert rates == [pytest.approx(above * place.gpus)]
    # The floor changes nothing in what is kept.
    assert evaluation.evaluate(scenario, place, samples, 0.9 * plain.goodput, 1.0) == plain


@pytest.mark.parametrize(("ttft", "tpot"), [(0.075, 0.05), (1.5, 0.006)])
def test_only_what_can_meet_the_objective_is_searched(ttft: float, tpot: float) -> None:
    scenario = _roofline_scenario(8, 60, ttft)
    objective = msgspec.structs.replace(scenario.objective, tpot=tpot)
    scenario = msgspec.structs.replace(scenario, objective=objective)
    samples = scenario.samples()
    everything = enumeration.disaggregated(scenario)
    kind = optimizer.Candidates(dict.fromkeys(everything, 0.0), _quiet)
    bounds = CapacityBounds(scenario, samples)
    found = optimizer.KindSearch(scenario, kind, bounds, 1, (of_budget,)).ordered
    able = [place for place in everything if not scenario.infeasible(place, samples[0])]
    assert 0 < len(able) < len(everything)
    assert sorted(found) == sorted(able)


def test_a_shortlist_leaves_prompts_time_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a tight TTFT some shapes miss it alone, and other prefill instances need idle time."""
    scenario = _roofline_scenario(8, 60, ttft=0.075)
    criteria = (scenario.criterion.units, of_budget)
    kinds = [optimizer.Candidates(dict.fromkeys(enumeration.disaggregated(scenario), 0.0), _quiet)]
    everything = optimizer.search_kinds(scenario, kinds, 1, 1, criteria)[0]
    monkeypatch.setattr(optimizer, "MAX_SIMULATED_PLACEMENTS", 0)
    monkeypatch.setattr(optimizer, "SHORTLIST_PLACEMENTS", 6)
    short = optimizer.search_kinds(scenario, kinds, 1, 1, criteria)[0]
    for units, found, best in zip(criteria, short, everything, strict=True):
        # A shortlist has other first probes: in so few requests rates differ by some percent.
        assert found and found[0].value(units) >= 0.95 * best[0].value(units)


@pytest.mark.parametrize(
    ("ttft", "tpot", "rates"),
    [
        (1.5, 0.05, (10.0, 25.0)),
        (0.075, 0.05, (12.0,)),  # those with the most capacity miss it
        (1.5, 0.008, (8.0, 16.0)),  # decode instances hold little of what the bound admits
    ],
)
def test_a_column_is_closed_by_its_dearest(
    ttft: float, tpot: float, rates: tuple[float, ...]
) -> None:
    scenario = _roofline_scenario(6, 150, ttft)
    objective = msgspec.structs.replace(scenario.objective, tpot=tpot)
    scenario = msgspec.structs.replace(scenario, objective=objective)
    for rate in rates:
        _check_the_cheapest(scenario, rate)


def test_the_cheapest_by_price_with_flags_and_two_types() -> None:
    """P costs more than D, and D computes prompts whole."""
    scenario = _roofline_scenario(5, 100)
    slow = PerformanceSource("roofline", "a100", model.load("opt-13b"), hardware.gpu("a100"))
    scenario = msgspec.structs.replace(
        scenario, decode=slow, spill=True, criterion=Criterion("$/h", 2.5, 1.0)
    )
    for rate in (6.0, 12.0):
        _check_the_cheapest(scenario, rate)


def _cheapest_of_13b(
    gpus: int, rate: float, ttft: float, monkeypatch: pytest.MonkeyPatch
) -> tuple[DemandScore | None, list[Placement], int]:
    """Returns the cheapest split, the placements tried, and the number of simulations."""
    source = PerformanceSource("roofline", "a100", model.load("opt-13b"), hardware.gpu("a100"))
    scenario = msgspec.structs.replace(
        _roofline_scenario(gpus, 300),
        prefill=source,
        decode=source,
        workload=workload.load("sharegpt-like"),
        objective=Objective(ttft, 0.015),
    )
    simulated = []

    def count(*args: Any, **kwargs: Any) -> SimulationResult:
        simulated.append(args[0])
        return simulate(*args, **kwargs)

    monkeypatch.setattr(demand, "simulate", count)
    tried = list[Placement]()
    found = demand._cheapest(scenario, rate, lambda kind, place: tried.append(place))
    assert not any(scenario.infeasible(place, scenario.samples()[0]) for place in tried)
    assert len(tried) <= len(simulated)
    return found.split, tried, len(simulated)


@pytest.mark.parametrize(("gpus", "rate", "least"), [(12, 37.0, 11), (16, 25.0, 10)])
def test_a_rate_takes_few_simulations(
    gpus: int, rate: float, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One side that misses alone is not simulated with each other side."""
    split, _, simulations = _cheapest_of_13b(gpus, rate, 2.0, monkeypatch)
    assert split and split.placement.gpus == least
    assert simulations <= 80


def test_what_is_too_slow_when_idle_is_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most prompts take longer than this TTFT at most placements."""
    split, tried, simulations = _cheapest_of_13b(12, 10.0, 0.05, monkeypatch)
    assert split is None and tried
    assert simulations <= 20
