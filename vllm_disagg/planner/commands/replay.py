"""Replays traces on fixed splits, and with roles that follow the load: `plan --replay TRACE`.

Several traces follow one another, so the mix of requests turns. All instances are alike. Each split
of them serves the same requests at the same times, and so do roles that the proxy's controller
changes (`--roles auto`), from an even split on.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ...fleet.role_control import RoleRules
from ...workloads import traces
from ...workloads.traces import Trace, TraceRequest
from ..search.placement import Placement, ReplicaGroup
from ..search.scenario import Scenario
from ..simulation.objective import Objective, SimulationResult, quantile
from ..simulation.role_simulation import simulate_roles
from ..simulation.simulator import simulate
from ..simulation.workload import Arrivals, Workload, WorkloadSample
from . import flags, plan_inputs
from .live import shape_of

PAUSE_SECONDS = 1.0  # between two traces
# The controller looks at the load every 2 s, also while there is none: 1.3 million times.
MAX_REPLAY_SECONDS = 30 * 86_400


def add_arguments(parser: Any) -> None:
    """Adds the flag of `plan --replay`."""
    parser.add_argument(
        "--replay",
        metavar="TRACE",
        nargs="+",
        help="simulate these traces, one after the other, on each split of --gpus among equal"
        " instances, and with roles that follow the load; --rate: mean requests/s instead of the"
        " traces' own",
    )


def run(args: argparse.Namespace) -> int:
    """Replays the traces and prints how many requests met the objective. Returns the status."""
    tp, pp = shape_of(args.instance)
    count = args.gpus // (tp * pp)
    if count < 2:
        raise ConfigError(f"--gpus: {args.gpus} is less than two instances of {tp}x{pp}")
    if args.rate is not None:
        flags.check_rate(args.rate)
    scenario = plan_inputs.read(args, args.gpus, "--gpus").scenario
    if scenario.prefill != scenario.decode:
        raise ConfigError("--replay: instances that change roles are alike: give one GPU type")
    if (tp, pp) not in scenario.prefill.shapes(args.gpus):
        raise ConfigError(f"--instance: {tp}x{pp} cannot be simulated with {scenario.prefill.name}")
    trace = joined([traces.read(path, "--replay") for path in args.replay])
    work = plan_inputs.within_length(
        Workload("replay", trace=trace), scenario.prefill, args.max_model_len
    )
    sample, rate = sample_of(work.trace or trace, args.rate)
    splits = [
        Placement(ReplicaGroup(tp, pp, prefills), ReplicaGroup(tp, pp, count - prefills))
        for prefills in range(1, count)
    ]
    rows = []
    for split in splits:
        print(f"plan: replay on {split}", file=sys.stderr, flush=True)
        with_gaps = scenario.objective.itl is not None
        result = simulate(scenario.deployment(split), sample, rate, with_gaps=with_gaps)
        name = f"{split.prefill.n}P{count - split.prefill.n}D"
        rows.append(_row(name, result, scenario.objective))
    print("plan: replay with roles that follow the load", file=sys.stderr, flush=True)
    auto = _auto(scenario, splits[count // 2 - 1], sample, rate)
    best = max(rows, key=lambda row: row["attainment"])
    document = {
        "requests": len(sample),
        "left_out": work.left_out,
        "rate": rate,
        "traces": [Path(path).name for path in args.replay],
        "splits": rows,
        "best": best["split"],
        "auto": auto,
    }
    print(json.dumps(document) if args.json else _text(scenario, document))
    return 0


def joined(parts: Sequence[Trace]) -> Trace:
    """Joins traces one after the other; equal ids of blocks in two traces are not equal tokens.

    Raises ConfigError for traces without times, and for blocks of two sizes.
    """
    rows: list[TraceRequest] = []
    begins = 0.0
    shift = 0
    sizes = {part.block for part in parts if any(row.hash_ids for row in part.requests)}
    if len(sizes) > 1:
        raise ConfigError("--replay: the traces count their blocks in different tokens")
    for part in parts:
        if not part.timed or len(part.requests) < 2:
            raise ConfigError("--replay: each trace needs arrival times, and two requests")
        for row in part.requests:
            of_prompt, of_answer = (
                tuple(number + shift for number in ids) for ids in (row.hash_ids, row.answer_ids)
            )
            rows.append(
                TraceRequest(begins + row.arrival, row.prompt, row.answer, of_prompt, of_answer)
            )
        begins = rows[-1].arrival + PAUSE_SECONDS
        shift = 1 + max((max(row.hash_ids, default=0) for row in rows), default=0)
    return Trace(tuple(rows), next(iter(sizes), traces.MOONCAKE_BLOCK_TOKENS))


def sample_of(trace: Trace, rate: float | None) -> tuple[WorkloadSample, float]:
    """Returns all requests of a trace, and the rate at which they arrive in the mean.

    Raises ConfigError if all arrive at once, or in more than MAX_REPLAY_SECONDS.
    """
    count = len(trace.requests)
    seconds = trace.requests[-1].arrival - trace.requests[0].arrival
    if seconds <= 0:
        raise ConfigError(
            "--replay: all requests of the trace arrive at once: give one with different times"
        )
    rate = rate or (count - 1) / seconds
    if (count - 1) / rate > MAX_REPLAY_SECONDS:
        raise ConfigError(
            f"--replay: {count} requests at {rate:.3g} req/s take more than"
            f" {MAX_REPLAY_SECONDS // 86_400} days: give a higher --rate"
        )
    return Workload("replay", trace=trace).sample(count, 0, Arrivals("trace")), rate


def _auto(
    scenario: Scenario, start: Placement, sample: WorkloadSample, rate: float
) -> dict[str, Any]:
    """Replays with roles that follow the load."""
    objective = scenario.objective
    rules = RoleRules(objective.ttft, objective.tpot)
    with_gaps = objective.itl is not None
    found = simulate_roles(scenario.deployment(start), sample, rate, rules, with_gaps)
    row = _row("roles auto", found.result, objective)
    return row | {"changes": len(found.changes), "mean_prefill": found.mean_prefill}


def _row(name: str, result: SimulationResult, objective: Objective) -> dict[str, Any]:
    """Describes one replay; a quantile that no request reached is None."""
    row: dict[str, Any] = {"split": name, "attainment": result.attainment(objective)}
    for time, values in (
        ("ttft_p90", result.ttft),
        ("tpot_p90", result.tpot),
        ("itl_p90", result.itl),
    ):
        if values is not None:
            found = quantile(values, 0.9)
            row[time] = found if found < math.inf else None
    return row


def _text(scenario: Scenario, document: dict[str, Any]) -> str:
    """Formats the result for a terminal."""
    limited = ["ttft", "tpot", *(["itl"] if scenario.objective.itl is not None else [])]
    names = "".join(f"{f'{name.upper()} p90':>12}" for name in limited)
    left_out = ""
    if document["left_out"]:
        left_out = f", {document['left_out']} left out: vLLM refuses their length"
    lines = [
        scenario.words()[0],
        f"objective: {scenario.objective.words()}",
        f"replay: {', '.join(document['traces'])}: {document['requests']} requests at"
        f" {document['rate']:.3g} req/s{left_out}",
        "",
        f"{'':12}{'attainment':>12}{names}",
    ]
    for row in (*document["splits"], document["auto"]):
        times = ""
        for name in limited:
            seconds = row[f"{name}_p90"]
            times += f"{'never' if seconds is None else f'{seconds:.3g} s':>12}"
        mark = "  best fixed" if row["split"] == document["best"] else ""
        lines.append(f"{row['split']:12}{row['attainment']:>12.1%}{times}{mark}")
    auto = document["auto"]
    lines.append(
        f"{auto['changes']} changes of roles; {auto['mean_prefill']:.1f} prefill instances in the"
        " mean"
    )
    return "\n".join(lines)
