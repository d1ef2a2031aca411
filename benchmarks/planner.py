"""Checks the planner against DistServe's results and formulas, and measures its speed on one core.

    python benchmarks/planner.py [--save planner.json]

Prints a table and ends with one JSON line.  Takes a minute or two.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

from vllm_disagg.planner.cost import distserve, model, queueing
from vllm_disagg.planner.cost.hardware import GIB, LINKS
from vllm_disagg.planner.cost.latency import LinearLatency, unloaded_prefill
from vllm_disagg.planner.search import enumeration, evaluation, optimizer
from vllm_disagg.planner.search.placement import Placement, ReplicaGroup
from vllm_disagg.planner.search.placement_score import PlacementScore
from vllm_disagg.planner.simulation import workload
from vllm_disagg.planner.simulation.deployment import Deployment, Handoff, ReplicaPool
from vllm_disagg.planner.simulation.replica import SchedulingRules
from vllm_disagg.planner.simulation.simulator import simulate
from vllm_disagg.planner.simulation.workload import Arrivals, WorkloadSample

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from distserve_scenario import distserve_scenario

LARGE = 1 << 40
# req/s per GPU: the width of the bracket at which DistServe's search stops, and reports its lower
# end
GRID = 0.078125
FOUND: dict[str, Any] = {}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", metavar="FILE", help="write the JSON there, too")
    args = parser.parse_args()
    for part in (speed, opt_13b, opt_66b, queues, capacities, links):
        part()
    line = json.dumps(FOUND)
    if args.save:
        Path(args.save).write_text(json.dumps(FOUND, indent=1) + "\n")
    print(line)
    return 0


def note(name: str, value: Any, words: str) -> None:
    FOUND[name] = value
    print(
        f"{name:34} {value:<12.4g} {words}"
        if isinstance(value, float)
        else f"{name:34} {value!s:12} {words}",
        flush=True,
    )


def quiet(done: int, total: int, best: PlacementScore | None) -> None:
    """Prints no progress: these searches take seconds."""


def timed(run: Callable[[], Any]) -> tuple[float, Any]:
    began = time.process_time()
    result = run()
    return time.process_time() - began, result


def speed() -> None:
    thirteen = distserve_scenario("opt-13b", 0.2, 4, 300, 1)
    placement = Placement(ReplicaGroup(2, 1, 1), ReplicaGroup(1, 1, 1))
    sample = thirteen.samples()[0]
    deployment = thirteen.deployment(placement)
    runs = [timed(lambda: simulate(deployment, sample, 4.68))[0] for _ in range(20)]
    note(
        "simulation_300_requests_s",
        min(runs),
        "OPT-13B TP2 + TP1 at 4.68 req/s; target 0.10 s (DistServe's: 0.33)",
    )
    for name, sought in (
        ("opt_13b", thirteen),
        ("opt_66b", distserve_scenario("opt-66b", 0.4, 8, 300, 1)),
    ):
        everything = enumeration.disaggregated(sought)
        single = [p for p in everything if p.prefill.n == 1 and p.decode and p.decode.n == 1]
        for what, placements in (("one_each", single), ("all", everything)):
            seconds, _ = timed(lambda p=placements, s=sought: optimizer.search(s, p, 3, 1, quiet))  # type: ignore[misc]
            note(
                f"search_{name}_{what}_s",
                seconds,
                f"{len(placements)} placements, 300 requests, one seed, CPU time",
            )
    sixteen = distserve_scenario("opt-66b", 0.4, 16, 300, 5)
    placements = enumeration.disaggregated(sixteen)
    seconds, _ = timed(lambda: optimizer.search(sixteen, placements, 3, 1, quiet))
    note("search_opt_66b_16_gpus_5_seeds_s", seconds, f"{len(placements)} placements; target 120 s")


def opt_13b() -> None:
    for name, kv_limit in (("opt_13b", 0), ("opt_13b_kv_50000", 50_000)):
        sought = distserve_scenario("opt-13b", 0.2, 4, 1000, 5, kv_limit)
        found = optimizer.search(sought, enumeration.disaggregated(sought), 3, 1, quiet)
        note(
            f"{name}_best",
            str(found[0].placement),
            f"next: {found[1].placement}, {found[1].goodput:.3f}",
        )
        low, high = found[0].ci
        note(
            f"{name}_goodput_per_gpu",
            found[0].goodput,
            f"95 % interval {low:.3f} .. {high:.3f}; DistServe's 1.55 +-10 %",
        )
    sought = distserve_scenario("opt-13b", 0.2, 4, 1000, 20)
    for decode in (1, 2):
        score = evaluation.evaluate(
            sought,
            Placement(ReplicaGroup(2, 1, 1), ReplicaGroup(decode, 1, 1)),
            sought.samples(),
            -1.0,
        )
        if not score:
            raise AssertionError("nothing is pruned below zero")
        low, high = score.ci
        name = f"opt_13b_tp2_tp{decode}_20_seeds"
        note(
            name,
            score.goodput,
            f"the two that are close, with 20 seeds; 95 % interval {low:.3f} .. {high:.3f}",
        )
        cut = mean(int(rate / GRID) * GRID for rate in score.rates)
        note(
            f"{name}_cut",
            cut,
            "each cut down to where DistServe's search stops, whose six seeds have 1.55 (TP2, TP1)",
        )


def opt_66b() -> None:
    for name, kv_limit in (("opt_66b", 0), ("opt_66b_kv_50000", 50_000)):
        sought = distserve_scenario("opt-66b", 0.4, 8, 1000, 5, kv_limit)
        samples = sought.samples()
        found = optimizer.search(sought, enumeration.disaggregated(sought), 3, 1, quiet)
        note(f"{name}_best", str(found[0].placement), "OPT-66B at 0.4/0.1 s, up to 8 GPUs")
        note(f"{name}_goodput_per_gpu", found[0].goodput, "")
        two = evaluation.evaluate(
            sought, Placement(ReplicaGroup(4, 1, 1), ReplicaGroup(2, 1, 1)), samples, -1.0
        )
        note(
            f"{name}_decode_tp2", two.goodput if two else 0.0, "prefill TP4, decode TP2 on two GPUs"
        )


def queues() -> None:
    """Compares the mean TTFT of 50,000 equal prompts, one at a time, with M/D/1."""
    for pp in (1, 2):
        latency = LinearLatency(pp, (0.02, 1e-4, 1e-8), (0.01, 1e-6, 1e-4), (0.01, 1e-6, 1e-4))
        service = unloaded_prefill(latency, 512)
        worst = 0.0
        side = ReplicaPool(1, latency, LARGE, SchedulingRules(budget=512, sequences=LARGE))
        deployment = Deployment(
            side, side, Handoff(overlap=False, concurrency=LARGE), distserve=True
        )
        for load in (0.3, 0.5, 0.7, 0.85):
            rate = load / (service / pp)
            sample = workload.load("512:1").sample(50_000, 1, Arrivals("poisson"))
            found = simulate(deployment, sample, rate).ttft
            worst = max(
                worst, abs(sum(found) / len(found) / queueing.mean_ttft(service, rate, pp) - 1)
            )
        note(f"m_d_1_worst_error_pp{pp}", worst, "mean TTFT, load 0.3 to 0.85, 50,000 arrivals")


def capacities() -> None:
    for name, tp, tokens in (
        ("opt-13b", 1, 66_144),
        ("opt-66b", 2, 11_600),
        ("opt-66b", 4, 78_496),
        ("opt-175b", 8, 59_520),
    ):
        found = model.load(name).kv_capacity(80 * GIB, distserve.MEMORY_UTILIZATION, tp, 1)
        note(
            f"kv_{name}_tp{tp}",
            found,
            f"tokens; DistServe's table {tokens}: {found / tokens - 1:+.1%}",
        )


def links() -> None:
    opt = model.load("opt-66b")
    sample = WorkloadSample([512], [64], [0.0])
    side = ReplicaPool(
        1,
        distserve.latency("distserve-a100", "opt-66b", 4, 1),
        78_496,
        SchedulingRules(LARGE, LARGE),
    )

    def latency(handoff: Handoff) -> float:
        return simulate(Deployment(side, side, handoff, distserve=True), sample, 1.0).latency[0]

    for name in ("eth-25", "nvlink"):
        added = latency(Handoff(LINKS[name], opt.kv_per_token, opt.layers, False)) - latency(
            Handoff(overlap=False)
        )
        note(f"link_{name}_adds_s", added, "to a request of 512 tokens, OPT-66B, without overlap")


if __name__ == "__main__":
    sys.exit(main())
