"""Step times against measured runs of vLLM: the reached errors are kept."""

from __future__ import annotations

from statistics import mean

import msgspec
import pytest

from benchmarks import planner_accuracy as accuracy
from vllm_disagg.planner.cost.latency import FITTED, FITTED_GPUS, FITTED_PATH
from vllm_disagg.planner.search.scenario import PerformanceSource

EVERY = 13  # of the runs that are simulated here; `make planner-accuracy` simulates all


@pytest.fixture(scope="module")
def runs() -> dict[accuracy.MeasuredRun, accuracy.RunTimes]:
    return accuracy.load()


def test_all_runs_are_read(runs: dict[accuracy.MeasuredRun, accuracy.RunTimes]) -> None:
    assert len(runs) == 529
    assert {accuracy.GPUS[run.system] for run in runs} == set(FITTED_GPUS)
    assert all(0 < times.tpot < 1 and 0 < times.ttft < 120 for times in runs.values())


def test_the_coefficients_are_those_of_the_fit(
    runs: dict[accuracy.MeasuredRun, accuracy.RunTimes],
) -> None:
    found = msgspec.structs.asdict(accuracy.fit(runs))
    assert found == pytest.approx(msgspec.structs.asdict(FITTED), rel=0.02)


def test_no_coefficient_is_below_its_bound(
    runs: dict[accuracy.MeasuredRun, accuracy.RunTimes],
) -> None:
    """A GPU is not faster than its data sheet, whatever the runs."""
    quick = {run: times._replace(tpot=times.tpot / 100) for run, times in runs.items()}
    found = accuracy.fit(quick)
    assert min(found.weights, found.kv, found.flops, found.attention) == 1.0
    assert min(msgspec.structs.astuple(found)) >= 0


def test_errors_of_the_simulated_closed_loops_are_no_worse_than_they_were(
    runs: dict[accuracy.MeasuredRun, accuracy.RunTimes],
) -> None:
    """Every 13th run, in the closed loop: all of them have 10.9 % of TPOT, before 26.8 %."""
    some = dict(list(runs.items())[::EVERY])
    after = {
        run: accuracy.simulated(run, accuracy.fitted(run, FITTED), FITTED_PATH) for run in some
    }
    found = accuracy.errors(some, after).values()
    assert mean(tpot for _, tpot in found) < 0.085
    assert mean(ttft for ttft, _ in found) < 0.28


def test_errors_of_a_model_left_out_are_no_worse_than_they_were(
    runs: dict[accuracy.MeasuredRun, accuracy.RunTimes],
) -> None:
    """The fit to the other models, TPOT only."""
    some = list(runs)[::EVERY]
    found = []
    for model in accuracy.CONFIGS:
        others = {run: times for run, times in runs.items() if run.model != model}
        coefficients = accuracy.fit(others)
        for run in some:
            if run.model == model:
                at = accuracy.simulated(run, accuracy.fitted(run, coefficients), FITTED_PATH)
                found.append(accuracy.error(at.tpot, runs[run].tpot))
    assert mean(found) < 0.118


def test_a_roofline_states_its_error() -> None:
    assert "TPOT by 15% and TTFT by 39%" in PerformanceSource("roofline", "h100").words()
    assert "on no l4: its error is not measured" in PerformanceSource("roofline", "l4").words()
