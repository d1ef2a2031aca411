"""Predictions of runs from engines' own profiles, and rows of them beside the measurements."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from loops import Times
from profile_windows import StepKinds, mean_sequences, multiples

from vllm_disagg.planner.commands import engine_profiles, live
from vllm_disagg.planner.cost import model
from vllm_disagg.planner.cost.hardware import LINKS
from vllm_disagg.planner.search.performance_source import PerformanceSource
from vllm_disagg.planner.search.placement import Placement, ReplicaGroup
from vllm_disagg.planner.search.scenario import Scenario
from vllm_disagg.planner.simulation.deployment import Deployment
from vllm_disagg.planner.simulation.objective import Objective
from vllm_disagg.planner.simulation.simulator import simulate
from vllm_disagg.planner.simulation.workload import Arrivals, Workload, WorkloadSample

OBJECTIVE = Objective(ttft=1.0, tpot=0.1, attainment=0.9)
MAX_REQUESTS = 2000  # of a run
MIN_REQUESTS = 30


class Prediction(NamedTuple):
    """A profile, and the deployment that is simulated with it."""

    profile: engine_profiles.FleetProfile
    deployment: Deployment

    def times(self, sent: WorkloadSample, rate: float) -> list[Times]:
        """Returns the simulated times of the requests of a run."""
        result = simulate(self.deployment, sent, rate)
        return list(zip(result.ttft, result.tpot, strict=True))

    def goodput(self, sample: WorkloadSample) -> float:
        """Returns the highest rate, within 2 %, at which the simulation attains the objective."""
        low = 0.05
        high = 200.0
        while high / low > 1.02:
            rate = (low * high) ** 0.5
            attained = simulate(self.deployment, sample, rate).attainment(OBJECTIVE)
            if attained >= OBJECTIVE.attainment:
                low = rate
            else:
                high = rate
        return low

    def decoding(self, sample: WorkloadSample, rate: float) -> float:
        """Returns the mean number of requests that decode at a rate, by Little's law."""
        result = simulate(self.deployment, sample, rate)
        times = zip(result.latency, result.ttft, strict=True)
        return rate * statistics.fmean(latency - ttft for latency, ttft in times if ttft >= 0)


@dataclass(frozen=True)
class Run:
    """Requests that were sent at a rate, and their measurements."""

    rate: float
    sent: WorkloadSample
    times: list[Times]
    lateness: float  # seconds, of the request that was sent latest behind its time
    steps: StepKinds
    path: float  # seconds; NaN after too few steps


def prediction_of(
    profile: engine_profiles.FleetProfile, folder: str, *, is_disaggregated: bool
) -> Prediction:
    """Builds the simulated deployment, from the profile only."""
    source = PerformanceSource("live", "the engines", model.load(folder), fitted=live.UNMEASURED)
    scenario = Scenario(
        prefill=source,
        decode=source,
        workload=Workload("sent", fixed=(1, 1)),
        arrivals=Arrivals("poisson"),
        objective=OBJECTIVE,
        link=LINKS["loopback"],
    )
    measured = engine_profiles.scenario_of(scenario, profile, 1)
    if is_disaggregated:
        placement = Placement(ReplicaGroup(1, 1, 1), ReplicaGroup(1, 1, 1))
        return Prediction(profile, measured.deployment(placement))
    budget = measured.limits(measured.prefill).budget
    placement = Placement(ReplicaGroup(1, 1, 2), None, budget)
    return Prediction(profile, measured.deployment(placement))


def part(sample: WorkloadSample, start: int, count: int) -> WorkloadSample:
    """Returns so many requests of a sample; the first ones, where it has not so many from there."""
    start = start if start + count <= len(sample) else 0
    end = start + count
    gaps = [0.0, *sample.gaps[start + 1 : end]]
    return WorkloadSample(sample.prompts[start:end], sample.outputs[start:end], gaps)


def requests_at(
    sample: WorkloadSample, rate: float, seconds: float, start: int = 0, least: int = MIN_REQUESTS
) -> WorkloadSample:
    """Returns the requests from `start` that come in some seconds, `least` of them or more."""
    count = min(MAX_REQUESTS, max(least, round(rate * seconds)))
    return part(sample, start, count)


def row(run: Run, prediction: Prediction) -> dict[str, Any]:
    """Compares a run with its prediction: median TTFT, attainment, and the steps."""
    return {
        "rate": run.rate,
        "requests": len(run.times),
        "failed": sum(ttft < 0 for ttft, _ in run.times),
        "measured": median(run.times),
        "met": met(run.times),
        "sequences": mean_sequences(run.steps.decodes),
        "path": run.path,
        "lateness": run.lateness,
        **predicted(run, prediction),
    }


def predicted(run: Run, prediction: Prediction) -> dict[str, float]:
    """Returns the part of a row that depends on the prediction."""
    said = prediction.times(run.sent, run.rate)
    steps = multiples(prediction.profile, run.steps)
    return {
        "predicted": median(said),
        "error": median(said) / median(run.times) - 1,
        "met_predicted": met(said),
        "prompt_steps_ratio": steps["prompts"],
        "decode_steps_ratio": steps["decodes"],
    }


def median(times: Sequence[Times]) -> float:
    """Returns the median TTFT; NaN if it is that of a failed request, which counts as infinite."""
    found = statistics.median(ttft if ttft >= 0 else math.inf for ttft, _ in times)
    return found if math.isfinite(found) else math.nan


def met(times: Sequence[Times]) -> int:
    """Returns how many requests met the objective."""
    return sum(0 <= ttft <= OBJECTIVE.ttft and tpot <= OBJECTIVE.tpot for ttft, tpot in times)
