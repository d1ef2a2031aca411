"""Simulates one placement at one rate: `vllm-disagg simulate`."""

from __future__ import annotations

import argparse
import json
import re
from statistics import mean
from typing import Any

import msgspec

from ...errors import ConfigError
from ..search import sample_size
from ..search.performance_source import PerformanceSource
from ..search.placement import Placement, ReplicaGroup
from ..search.scenario import Scenario
from ..simulation.objective import SimulationResult, quantile
from ..simulation.simulator import simulate
from . import flags, plan_inputs, profile_range
from .documents import closed_form, describe

TIMES = (
    "ttft_mean",
    "ttft_p90",
    "tpot_mean",
    "tpot_p90",
    "itl_p90",
    "latency_mean",
    "transfer_mean",
    "path_mean",
)
UNUSED_BY_COLOCATED = (
    "decode_gpu",
    "decode_profile",
    "link",
    "overlap",
    "prefill_concurrency",
    "min_prompt_bytes",
    "spill",
)
MAX_SCALE = 1e6  # of step times, either way
# Of the result, in this order: shares of the time, of the requests, and of the prompts' tokens.
SHARES = (
    "prefill_busy",
    "decode_busy",
    "link_busy",
    "back_busy",
    "aggregated",
    "at_decode",
    "read_back",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `simulate`."""
    flags.add_arguments(parser)
    add = parser.add_argument_group("placement: TPxPP, or TPxPPxN for N instances").add_argument
    add(
        "--prefill",
        metavar="TPxPP[xN]",
        help="the prefill instances; with --expert-parallel also TPxPP[xN]dpN",
    )
    add("--decode", metavar="TPxPP[xN]", help="the decode instances")
    add(
        "--colocated", metavar="TPxPP[xN]", help="instead of both: instances for prefill and decode"
    )
    add(
        "--prefill-first",
        action="store_true",
        help="with --colocated and --rules distserve: whole prompts before decodes, not chunks",
    )
    add(
        "--scale",
        metavar="P:D",
        default="1:1",
        help="factors on prefill and decode times, as plan --live finds them (default: 1:1)",
    )
    add("--rate", metavar="R", type=float, required=True, help="requests/s of the whole deployment")


def run(args: argparse.Namespace) -> int:
    """Runs `simulate` and prints its result. Returns the exit status."""
    placement = _placement(args)
    planned = plan_inputs.read(args, placement.gpus, "instances of")
    scenario = _scaled(planned.scenario, args.scale)
    if args.prefill_first and not scenario.distserve:
        raise ConfigError(
            "--prefill-first goes with --rules distserve: vLLM 0.32 takes decodes into each step"
        )
    _check(scenario, placement)
    if not placement.decode:
        budget = scenario.limits(scenario.prefill).budget
        placement = msgspec.structs.replace(placement, budget=budget)
    flags.check_rate(args.rate)
    if not args.requests:
        scenario = sample_size.lasting(scenario, args.rate)
    deployment = scenario.deployment(placement)
    results = []
    for seed, sample in enumerate(scenario.samples()):
        results.append(simulate(deployment, sample, args.rate, None, seed, with_gaps=True))
    document = _document(scenario, placement, args.rate, results)
    document["extrapolated"] = profile_range.beyond(
        scenario, planned.fits, [(placement, args.rate)]
    )
    print(json.dumps(document) if args.json else _text(document, scenario, placement))
    return 0


def _placement(args: argparse.Namespace) -> Placement:
    """Returns the placement that the flags give. Raises ConfigError for a wrong combination."""
    if args.colocated:
        if args.prefill or args.decode:
            raise ConfigError("--colocated takes the place of --prefill and --decode")
        given = flags.given(args, add_arguments)
        for name in UNUSED_BY_COLOCATED:
            if name in given:
                raise ConfigError(f"{flags.named(name)} goes with --prefill and --decode")
        return Placement(
            _replica_group("--colocated", args.colocated),
            None,
            args.max_num_batched_tokens,
            not args.prefill_first,
        )
    if not args.prefill or not args.decode:
        raise ConfigError("give --prefill and --decode, or --colocated, as TPxPP: 4x1")
    if args.prefill_first:
        raise ConfigError("--prefill-first goes with --colocated")
    return Placement(
        _replica_group("--prefill", args.prefill),
        _replica_group("--decode", args.decode),
        min_prompt_bytes=args.min_prompt_bytes or 0,
        spill=bool(args.spill),
    )


def _scaled(scenario: Scenario, text: str) -> Scenario:
    """Returns the scenario with the factors of --scale on its prefill and decode times."""
    try:
        prefill_factor, decode_factor = map(float, text.split(":"))
    except ValueError:
        prefill_factor = decode_factor = 0.0
    least = 1 / MAX_SCALE
    if not (least <= prefill_factor <= MAX_SCALE and least <= decode_factor <= MAX_SCALE):
        raise ConfigError(
            f"--scale: {text} is not P:D, two factors from {least:g} to {MAX_SCALE:g}, as 1.6:1"
        )
    prefill = msgspec.structs.replace(scenario.prefill, scale=prefill_factor)
    decode = msgspec.structs.replace(scenario.decode, scale=decode_factor)
    return msgspec.structs.replace(scenario, prefill=prefill, decode=decode)


def _replica_group(flag: str, text: str) -> ReplicaGroup:
    """Parses TPxPP or TPxPPxN. Raises ConfigError with the name of the flag."""
    match = re.fullmatch(r"(\d{1,4})x(\d{1,4})(?:x(\d{1,4}))?(?:dp(\d{1,4}))?", text)
    if not match or "0" in match.groups():
        raise ConfigError(
            f"{flag}: {text} is not TPxPP or TPxPPxN with numbers of 1 or more, as 4x1 or 4x1x2,"
            " and dpN after it for ranks of data parallelism"
        )
    tp, pp, n, dp = match.groups()
    return ReplicaGroup(int(tp), int(pp), int(n or 1), int(dp or 1))


def _check(scenario: Scenario, placement: Placement) -> None:
    """Raises ConfigError if the source of the times has no instance of such a shape."""
    sides: list[tuple[str, PerformanceSource, ReplicaGroup]] = [
        ("--prefill", scenario.prefill, placement.prefill)
    ]
    if placement.decode:
        sides.append(("--decode", scenario.decode, placement.decode))
    else:
        sides = [("--colocated", scenario.prefill, placement.prefill)]
    for flag, source, group in sides:
        shapes = source.layouts(max(8, group.gpus))
        if msgspec.structs.replace(group, n=1) not in shapes:
            known = ", ".join(_flag_text(shape) for shape in shapes[:12])
            raise ConfigError(
                f"{flag}: {_flag_text(group)} cannot be simulated with {source.name}:"
                f" give one of {known}"
            )


def _flag_text(group: ReplicaGroup) -> str:
    """Formats the shape of a group as the flags take it."""
    return f"{group.tp}x{group.pp}" + (f"dp{group.dp}" if group.dp > 1 else "")


def _document(
    scenario: Scenario, placement: Placement, rate: float, results: list[SimulationResult]
) -> dict[str, Any]:
    """Builds the document that `simulate --json` prints; times are in seconds."""
    objective = scenario.objective
    ttft = [seconds for result in results for seconds in result.ttft]
    tpot = [seconds for result in results for seconds in result.tpot]
    itl = [seconds for result in results for seconds in result.itl or ()]
    latency = [seconds for result in results for seconds in result.latency]
    served = [seconds for seconds in latency if seconds >= 0]
    # Prompts that D computed have no transfer.
    transfers = [seconds for result in results for seconds in result.transfer if seconds > 0]
    document: dict[str, Any] = {
        "rate": rate,
        "gpus": placement.gpus,
        "attainment": mean(result.attainment(objective) for result in results),
        "attainment_ttft": mean(float(0 <= seconds <= objective.ttft) for seconds in ttft),
        "attainment_tpot": mean(float(0 <= seconds <= objective.tpot) for seconds in tpot),
    }
    if objective.itl is not None:
        document["attainment_itl"] = mean(float(0 <= gap <= objective.itl) for gap in itl)
    for name, values in (("ttft", ttft), ("tpot", tpot), ("itl", itl)):
        measured = [seconds for seconds in values if seconds >= 0]
        document[f"{name}_mean"] = mean(measured) if measured else None
        for share in (50, 90, 99):
            found = quantile(values, share / 100)
            document[f"{name}_p{share}"] = found if found < float("inf") else None
    document |= {
        "latency_mean": mean(served) if served else None,
        "transfer_mean": mean(transfers) if transfers else 0.0,
        "path_mean": mean(seconds for result in results for seconds in result.path),
        **{name: mean(getattr(result, name) for result in results) for name in SHARES},
        "refused": sum(seconds < 0 for seconds in latency),
        "preemptions": sum(result.preemptions for result in results),
        "closed_form": closed_form(scenario, placement),
        "setting": describe(scenario),
    }
    return document


def _text(document: dict[str, Any], scenario: Scenario, placement: Placement) -> str:
    """Formats the result for a terminal."""
    gpus = f"{placement.gpus} GPU{'s' if placement.gpus > 1 else ''}"
    limits = scenario.objective.limits()
    lines = [
        *scenario.words(),
        *profile_range.lines(document["extrapolated"]),
        f"{placement} at {document['rate']:g} req/s on {gpus}",
        f"  attainment     {document['attainment']:.1%} within {limits}",
    ]
    for name in TIMES:
        value = document[name]
        lines.append(f"  {name:14} never" if value is None else f"  {name:14} {value:.4f} s")
    lines += [f"  {name:14} {document[name]:.1%}" for name in SHARES]
    lines += [f"  {name:14} {document[name]}" for name in ("refused", "preemptions")]
    return "\n".join(lines)
