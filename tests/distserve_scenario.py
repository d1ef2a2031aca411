"""DistServe's rules, coefficients and lengths, for tests and for benchmarks/planner.py."""

from __future__ import annotations

from vllm_disagg.planner.cost import model
from vllm_disagg.planner.cost.hardware import LINKS
from vllm_disagg.planner.search.performance_source import PerformanceSource
from vllm_disagg.planner.search.scenario import Scenario
from vllm_disagg.planner.simulation import workload
from vllm_disagg.planner.simulation.objective import Objective
from vllm_disagg.planner.simulation.workload import Arrivals

TPOT_SECONDS = 0.1
ATTAINMENT = 0.9


def distserve_scenario(
    name: str, ttft: float, gpus: int, requests: int, seeds: int, kv_limit: int = 0
) -> Scenario:
    """Returns a scenario of DistServe's evaluation. `ttft`: the objective in seconds."""
    source = PerformanceSource("coefficients", "distserve-a100", model.load(name))
    return Scenario(
        prefill=source,
        decode=source,
        workload=workload.load("sharegpt-like"),
        arrivals=Arrivals("poisson"),
        objective=Objective(ttft, TPOT_SECONDS, ATTAINMENT, joint=False),
        requests=requests,
        seeds=seeds,
        gpus=gpus,
        link=LINKS["none"],  # as in its simulator
        overlap=False,
        distserve=True,
        kv_limit=kv_limit,
    )
