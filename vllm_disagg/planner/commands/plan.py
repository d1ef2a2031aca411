"""Searches the placement with the most goodput per GPU: `vllm-disagg plan`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from typing import Any

from ...errors import ConfigError
from ..cost import model, queueing
from ..cost.latency import LatencyModel, unloaded_decode, unloaded_prefill
from ..search import advice, optimizer, proxy_flags, sample_size
from ..search.performance_source import PerformanceSource, latency_of
from ..search.placement_score import PlacementScore
from ..search.scenario import Scenario
from ..simulation import workload
from ..simulation.objective import TAIL_SHARE, quantile
from . import (
    criteria,
    demand,
    documents,
    flags,
    html_page,
    live,
    plan_inputs,
    profile_range,
    replay,
    report,
)

DEFAULT_GPUS = 4
DEFAULT_GPUS_OF_RATE = 128
# Llama 3.1 8B has 157,644 placements on 128 GPUs, listed in 23 s (2026-11-26), and with twice the
# GPUs four times as many. A fleet of more is several equal ones.
MAX_GPUS = 512
MAX_JOBS = 1024  # far above the cores of a machine
# Flags that a mode has no use for.
SEARCHED = ("report", "by", "prices", "min_prompt_bytes", "spill", "expert_parallel")
UNUSED_FLAGS: dict[str, tuple[str, ...]] = {
    "live": ("gpus", "rate", "replay", *SEARCHED),
    "replay": ("requests", "seeds", "arrivals", *SEARCHED),
}
# Flags that have a use in some modes only, and those that the closed form has a use for.
MODES_OF_FLAGS = {"window": ("live",), "instance": ("live", "replay")}
CLOSED_FORMS = ("capacity_prefill", "capacity_decode")
USED_BY_CLOSED_FORMS = {*CLOSED_FORMS, "gpus", "model", "workload", "kv_cache_dtype", "json"}
KEPT_PLACEMENTS = 3  # placements of a kind that are evaluated to the end
PREFILL_LOADS = (0.5, 0.8)  # of a prefill GPU, for waiting times
PROGRESS_INTERVAL_SECONDS = 2.0  # between two progress lines


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `plan`."""
    flags.add_arguments(parser)
    add = parser.add_argument_group("search").add_argument
    add(
        "--gpus",
        metavar="N",
        type=int,
        help=f"budget of prefill and decode together (default: {DEFAULT_GPUS}; with --rate"
        f" {DEFAULT_GPUS_OF_RATE})",
    )
    question = parser.add_argument_group("question")
    question.add_argument(
        "--rate",
        metavar="R",
        type=float,
        help="requests/s to hold: the least GPUs (--by: the least cost or power) up to --gpus",
    )
    criteria.add_arguments(question)
    add("--jobs", metavar="N", type=int, default=0, help="processes (default: one for each core)")
    add(
        "--report",
        metavar="DIR",
        help="write report.html into this folder, and plots unless --rate is given",
    )
    add = parser.add_argument_group("closed form, without a simulation").add_argument
    add(
        "--capacity-prefill",
        metavar="R",
        type=float,
        help="requests/s of one GPU that only prefills",
    )
    add(
        "--capacity-decode", metavar="R", type=float, help="requests/s of one GPU that only decodes"
    )
    live.add_arguments(parser.add_argument_group("a running deployment"))
    replay.add_arguments(parser.add_argument_group("roles that follow the load"))


def run(args: argparse.Namespace) -> int:
    """Runs `plan` and prints its advice. Returns the exit status."""
    _refuse_unused(args)
    args.gpus = _budget(args)
    if args.gpus > MAX_GPUS and not args.live:
        raise ConfigError(f"--gpus: {args.gpus} is too many: give {MAX_GPUS} or fewer")
    if not 0 <= args.jobs <= MAX_JOBS:
        raise ConfigError(f"--jobs: {args.jobs} is not a number of processes, up to {MAX_JOBS}")
    if args.capacity_prefill is not None or args.capacity_decode is not None:
        return _closed(args)
    if args.live:
        return live.run(args)
    if args.replay:
        return replay.run(args)
    if args.gpus < 2:
        raise ConfigError(f"--gpus: {args.gpus} is too few: prefill and decode need 2 or more")
    if args.report is not None:
        # Only the goodput by rate is drawn.
        check = report.check if args.rate is None else html_page.check_folder
        check(args.report)
    planned = plan_inputs.read(args, args.gpus, "--gpus")
    scenario = criteria.counted(planned.scenario, args)
    planned = dataclasses.replace(planned, scenario=scenario)
    if args.rate is not None:
        return demand.run(planned, args.rate, args.json, args.report)
    return _compare(planned, args)


def _compare(planned: plan_inputs.PlanInputs, args: argparse.Namespace) -> int:
    """Searches the best placements and prints the advice. Returns the exit status."""
    started_at = time.monotonic()
    scenario = planned.scenario
    jobs = optimizer.process_count(args.jobs)
    search = sample_size.search_fixed if args.requests else sample_size.search_sized
    result = search(scenario, KEPT_PLACEMENTS, jobs, _progress)
    if not result.split and not result.together:
        raise ConfigError(_nothing(scenario))
    result = proxy_flags.tuned(result, jobs, _progress, may_grow=not args.requests)
    found = advice.advise(result, draws=bool(args.report))
    document = documents.as_json(found, planned.model, with_rates=bool(args.report or args.json))
    document["parts"] = result.parts
    document["seconds"] = round(time.monotonic() - started_at, 2)
    document["fits"] = documents.fits_document(planned.fits)
    scores = [score for score in (found.best, found.colocated) if score]
    placements = [(score.placement, score.total) for score in scores]
    document["extrapolated"] = profile_range.beyond(found.scenario, planned.fits, placements)
    if args.report:
        document["report"] = report.write(args.report, found, document, planned.fits)
    print(json.dumps(document) if args.json else report.text(found, document, planned.fits))
    return 0


def _refuse_unused(args: argparse.Namespace) -> None:
    """Raises ConfigError for a flag that the mode asked for has no use for."""
    given = flags.given(args, add_arguments) - {"command", "extra"}
    unused = dict(UNUSED_FLAGS)
    for mode in CLOSED_FORMS:
        unused[mode] = tuple(sorted(given - USED_BY_CLOSED_FORMS))
    for mode, names in unused.items():
        for name in names:
            if mode in given and name in given:
                raise ConfigError(f"{flags.named(name)} goes without {flags.named(mode)}")
    for name, modes in MODES_OF_FLAGS.items():
        if name in given and not given & {*modes}:
            raise ConfigError(
                f"{flags.named(name)} goes with {' or '.join(map(flags.named, modes))}"
            )


def _budget(args: argparse.Namespace) -> int:
    """Returns the budget of GPUs: that of --gpus, or the default of the question."""
    if args.gpus is not None:
        return int(args.gpus)
    is_demand = args.rate is not None and not args.replay
    return DEFAULT_GPUS_OF_RATE if is_demand else DEFAULT_GPUS


def _closed(args: argparse.Namespace) -> int:
    """Prints the best ratio by closed form, from the capacities given. Returns the exit status."""
    prefill = args.capacity_prefill
    decode = args.capacity_decode
    for flag, value in (("--capacity-prefill", prefill), ("--capacity-decode", decode)):
        if value is None:
            raise ConfigError(
                "--capacity-prefill and --capacity-decode go together:"
                f" give {flag}, in requests/s of one GPU"
            )
        if not 0 < value < float("inf"):
            raise ConfigError(
                f"{flag}: {value} is not a rate: give requests/s of one GPU, more than 0"
            )
    if args.gpus < 2:
        raise ConfigError(f"--gpus: {args.gpus} is too few: prefill and decode need 2 or more")
    flags.check_numbers(args)
    if args.workload != flags.DEFAULT_WORKLOAD and not args.model:
        raise ConfigError("--workload goes with --model in the closed form")
    ratios = sorted(queueing.ratios(prefill, decode, args.gpus), key=lambda r: -r.rate_per_gpu)
    best = queueing.best_ratio(prefill, decode, args.gpus)
    one = min(prefill, decode) / 2
    rate = best.rate_per_gpu * (best.prefill + best.decode)
    waits = {load: queueing.mean_ttft(1 / prefill, load * prefill) for load in PREFILL_LOADS}
    document: dict[str, Any] = {
        "gpus": args.gpus,
        "best": {
            "prefill": {"n": best.prefill},
            "decode": {"n": best.decode},
            "goodput_per_gpu": best.rate_per_gpu,
        },
        "one_to_one": one,
        "limit": queueing.rate_limit_per_gpu(prefill, decode),
        "alternatives": [
            {
                "prefill": {"n": r.prefill},
                "decode": {"n": r.decode},
                "goodput_per_gpu": r.rate_per_gpu,
            }
            for r in ratios[:8]
        ],
        # By load of a prefill GPU.
        "ttft_mean": {f"{load:g}": wait for load, wait in waits.items()},
        "bandwidth": _bandwidth(args, rate) if args.model else None,
    }
    if args.json:
        print(json.dumps(document))
        return 0
    ratio = f"{best.prefill}P{best.decode}D"
    print(f"best of up to {args.gpus} GPUs: {ratio}, {best.rate_per_gpu:.3f} req/s per GPU")
    print(f"1P1D: {one:.3f}; limit for any number of GPUs: {document['limit']:.3f}")
    times = ", ".join(f"{wait:.3f} s at {load:.0%}" for load, wait in waits.items())
    print(f"mean TTFT of equal prompts, one at a time (M/D/1), by load of a prefill GPU: {times}")
    if args.model:
        bandwidth = f"{document['bandwidth'] / 1e9:.3g} GB/s ({args.workload})"
        print(f"between prefill and decode at {rate:.3g} req/s: {bandwidth}")
    return 0


def _bandwidth(args: argparse.Namespace, rate: float) -> float:
    """Returns the bytes/s from prefill to decode, all instances together."""
    sample = workload.load(args.workload).sample(1000, 0, workload.Arrivals("poisson"))
    mean_prompt = sum(sample.prompts) / len(sample)
    tokens = math.ceil(mean_prompt)
    per_token = model.load(args.model, args.kv_cache_dtype).kv_bytes(tokens) / tokens
    return queueing.handoff_bandwidth(per_token, mean_prompt, rate)


def _progress(kind: str) -> optimizer.ProgressCallback:
    """Returns a callback that prints a progress line every few seconds, and one at the end."""
    printed_at = time.monotonic()

    def print_progress(done: int, total: int, best: PlacementScore | None) -> None:
        nonlocal printed_at
        now = time.monotonic()
        if done < total and now - printed_at < PROGRESS_INTERVAL_SECONDS:
            return
        printed_at = now
        line = f"plan: {kind}: {done} of {total} placements"
        if best:
            line += f"; best so far {best.goodput:.3f} req/s per GPU: {best.placement}"
        print(line, file=sys.stderr)

    return print_progress


def _nothing(scenario: Scenario) -> str:
    """Explains which objective no placement meets, and which an idle deployment would meet."""
    objective = scenario.objective
    share = objective.attainment
    ttft = _alone(scenario, "ttft", share)
    tpot = _alone(scenario, "tpot", share)
    idle = f"alone on the fastest instance {share:.0%} of the requests take"
    if ttft > objective.ttft:
        return f"nothing meets --ttft {objective.ttft:g}: {idle} {ttft:.3g} s; give more"
    if tpot > objective.tpot:
        return f"nothing meets --tpot {objective.tpot:g}: {idle} {tpot:.3g} s; give more"
    for name, limit in (("ttft", objective.ttft_p99), ("tpot", objective.tpot_p99)):
        if limit is not None and (tail := _alone(scenario, name, TAIL_SHARE)) > limit:
            alone = f"alone on the fastest instance {TAIL_SHARE:.0%} of the requests take"
            return f"nothing meets --{name}-p99 {limit:g}: {alone} {tail:.3g} s; give more"
    least = [f"--ttft {ttft:.3g}", f"--tpot {tpot:.3g}"]
    if objective.itl is not None:
        if tpot > objective.itl:
            return f"nothing meets --itl {objective.itl:g}: {idle} {tpot:.3g} s; give more"
        least.append(f"--itl {tpot:.3g}")
    return (
        f"nothing meets {objective.flags()} together on {scenario.gpus} GPUs at any rate:"
        f" give more than {', '.join(least[:-1])} and {least[-1]}, or more GPUs"
    )


def _alone(scenario: Scenario, name: str, share: float) -> float:
    """Returns the TTFT or TPOT that a share of the requests has alone on the fastest instance."""
    prompts = scenario.samples()[0].prompts
    found = []
    for source in {scenario.prefill, scenario.decode}:  # colocated placements are on either
        for latency in _latencies(source, scenario.gpus):
            if name == "ttft":
                times = [unloaded_prefill(latency, p) + source.path.of(p) for p in prompts]
            else:
                times = [unloaded_decode(latency, p) for p in prompts]
            found.append(quantile(times, share))
    return min(found)


def _latencies(source: PerformanceSource, gpus: int) -> list[LatencyModel]:
    """Returns the step times of instances of all shapes that fit."""
    return [latency_of(source, group) for group in source.layouts(gpus)]
