"""The JSON documents that `plan` and `simulate` print."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from ... import __version__
from ...fleet.conventions import NEWEST_VLLM, OLDEST_VLLM
from ..cost import queueing
from ..cost.latency import unloaded_decode
from ..cost.profile import LatencyFit
from ..search.advice import Advice
from ..search.performance_source import PerformanceSource
from ..search.placement import Criterion, Placement, ReplicaGroup
from ..search.placement_score import FlagTrial, PlacementScore
from ..search.scenario import Scenario
from . import rate_table
from .criteria import gpu_name, power_of
from .launch_commands import commands, remarks

BILLS = {"$/h": "cost_per_hour", "kW": "kilowatts"}  # names in JSON documents, by unit


def as_json(advice: Advice, model: str, with_rates: bool = False) -> dict[str, Any]:
    """Builds the document that `plan --json` prints; `with_rates` adds the times by rate."""
    scenario = advice.scenario
    placement = advice.chosen.placement
    lines = commands(scenario, placement, model) if advice.is_sure else []
    return {
        "made": made(scenario, model),
        "recommendation": _recommendation(advice),
        "best": _score(scenario, advice.best),
        "runner_up": _score(scenario, advice.runner_up),
        "colocated": _score(scenario, advice.colocated),
        "largest": _score(scenario, advice.largest),
        "counted": scenario.criterion.unit,
        "ratio": advice.ratio,
        "ratio_ci": advice.ratio_ci,
        "alternatives": [_score(scenario, score) for score in advice.alternatives],
        "flips": {
            name: {"at": crossover.at, "words": crossover.words}
            for name, crossover in advice.crossovers.items()
        },
        "commands": lines,
        "remarks": _remarks_of(advice) if advice.is_sure else [],
        "requests_needed": advice.missing or None,
        "considered": advice.considered,
        "proxy_flags": {
            "tried": [_trial(advice, trial) for trial in advice.flag_trials],
            "not_tried": advice.flags_not_tried or None,
        },
        "by_rate": rate_table.as_json(advice) if with_rates else [],
        "drafts": drafts(scenario, placement),
        "extrapolated": [],  # `plan` fills it in from the profiles
        "setting": describe(scenario),
    }


def _remarks_of(advice: Advice) -> list[str]:
    """Lists the limits of an answer and of its commands."""
    found = []
    if advice.ratio and not advice.ratio_ci:
        found.append("one sample shows no interval: how far chance moves the ratio is not known")
    return found + remarks(advice.scenario, advice.chosen.placement)


def made(scenario: Scenario, model: str) -> dict[str, str | None]:
    """Describes of what, when and by which releases an answer was made.

    DistServe's rules take no default of vLLM's.
    """
    defaults = None if scenario.distserve else f"vLLM {OLDEST_VLLM} to {NEWEST_VLLM}"
    fits = dict.fromkeys(source.fitted_to for source in (scenario.prefill, scenario.decode))
    return {
        "model": model,
        "date": datetime.now(UTC).date().isoformat(),
        "version": f"vllm-disagg {__version__}",
        "defaults_of": defaults,
        "fitted_to": "; ".join(filter(None, fits)) or None,
    }


def made_line(document: dict[str, Any]) -> str:
    """Formats of what, when and by which releases an answer was made."""
    found = document["made"]
    words = [f"model: {found['model']}", f"planned on {found['date']} by {found['version']}"]
    if found["defaults_of"]:
        words.append(f"defaults of {found['defaults_of']}")
    if found["fitted_to"]:
        words.append(f"step times fitted to {found['fitted_to']}")
    return "; ".join(words)


def part_lines(parts: int, gpus: int) -> list[str]:
    """Returns the line about equal parts of a budget; none if all of it is planned at once."""
    if parts == 1:
        return []
    return [
        f"planned as {parts} equal parts of up to {gpus} GPUs, each with a proxy of its own: what"
        " follows is one part"
    ]


def drafts(scenario: Scenario, placement: Placement) -> dict[str, Any] | None:
    """Describes speculative decoding and the TPOT of one request alone; None without it."""
    _, source = scenario.sources(placement)
    group = placement.decode or placement.prefill
    if not source.drafts:
        return None
    prompts = scenario.samples()[0].prompts
    context = round(sum(prompts) / len(prompts))
    plain = msgspec.structs.replace(source, drafts=None)
    with_drafts, without = (
        unloaded_decode(of.latency(group.tp, group.pp, group.dp), context) for of in (source, plain)
    )
    return {
        "method": source.drafts.method,
        "tokens": source.drafts.tokens,
        "acceptance_length": source.drafts.acceptance_length,
        "tpot_alone": with_drafts,
        "tpot_alone_without": without,
    }


def draft_lines(document: dict[str, Any]) -> list[str]:
    """Formats the effect of speculative decoding on TPOT; no line without it."""
    found = document["drafts"]
    if not found:
        return []
    tokens = f"{found['tokens']} by {found['method']}, {found['acceptance_length']:g} a step"
    alone = f"{1e3 * found['tpot_alone']:.3g} ms"
    without = f"{1e3 * found['tpot_alone_without']:.3g} ms without drafts"
    return [f"drafts: {tokens}: TPOT of a request alone {alone}, {without}"]


def fits_document(fits: Sequence[tuple[str, LatencyFit]]) -> dict[str, Any]:
    """Describes the fits of profiles by file, with the worst error of each phase."""
    return {
        path: {"worst_error": {phase: fit.worst(phase) for phase in fit.phases()}}
        for path, fit in fits
    }


def _recommendation(advice: Advice) -> str:
    if not advice.is_sure:
        return "cannot tell"
    return "disaggregate" if advice.disaggregate else "colocate"


def describe(scenario: Scenario) -> dict[str, Any]:
    """Describes a scenario for JSON documents."""
    objective = scenario.objective
    names = "TTFT and TPOT" if objective.itl is None else "TTFT, TPOT and ITL"
    counting = f"each request, {names} jointly" if objective.joint else f"{names} separately"
    return {
        "latency": {"prefill": scenario.prefill.words(), "decode": scenario.decode.words()},
        "workload": scenario.workload.name,
        "left_out": scenario.workload.left_out,
        "arrivals": scenario.arrivals.kind,
        "ttft": objective.ttft,
        "tpot": objective.tpot,
        "itl": objective.itl,
        "attainment": objective.attainment,
        "attainment_of": counting,
        "ttft_p99": objective.ttft_p99,
        "tpot_p99": objective.tpot_p99,
        "rules": "DistServe's" if scenario.distserve else "vLLM's",
        "gpus": scenario.gpus,
        "requests": scenario.requests,
        "seeds": scenario.seeds,
        "link": scenario.link.name,
        "links_per_gpu": scenario.nics or None,
        "links_per_decode_gpu": scenario.decode_nics or None,
        "overlap": scenario.overlap,
        "policy": scenario.policy,
        "prefill_concurrency": None if scenario.distserve else scenario.concurrency,
        "min_prompt_bytes": scenario.min_prompt_bytes,
        "spill": scenario.spill,
        "engines": {
            "prefill": _limits(scenario, scenario.prefill),
            "decode": _limits(scenario, scenario.decode),
        },
        "kv_limit": scenario.kv_limit or None,
        "max_model_len": scenario.max_model_len or None,
    }


def _limits(scenario: Scenario, source: PerformanceSource) -> dict[str, Any]:
    """Describes the limits of a P or D instance; DistServe's rules limit no tokens."""
    limits = scenario.limits(source)
    return {
        "max_num_batched_tokens": None if scenario.distserve else limits.budget,
        "max_num_seqs": None if scenario.distserve else limits.sequences,
        "gpu_memory_utilization": source.memory_utilization or None,
    }


def _score(scenario: Scenario, score: PlacementScore | None) -> dict[str, Any] | None:
    """Describes a placement with its goodput in requests/s per GPU; None for no placement."""
    if not score:
        return None
    return {
        **placement_document(scenario, score.placement),
        "goodput_per_gpu": score.goodput,
        "goodput": score.total,
        "ci": score.ci if len(score.rates) > 1 else None,
        "rates": score.rates,
        "closed_form": closed_form(scenario, score.placement),
    }


def _trial(advice: Advice, trial: FlagTrial) -> dict[str, Any]:
    """Describes what flags of the proxy gain on the best placement; None: nothing."""
    placement = trial.placement
    return {
        "min_prompt_bytes": placement.min_prompt_bytes,
        "spill": placement.spill,
        "gain": trial.gain if trial.score else None,
        "gain_ci": trial.ci,
        "taken": advice.best is not None and advice.best.placement == placement,
    }


def placement_document(scenario: Scenario, placement: Placement) -> dict[str, Any]:
    """Describes a placement for JSON documents, with what it costs."""
    found: dict[str, Any] = {"gpus": placement.gpus}
    for bill in bills(scenario):
        found[BILLS[bill.unit]] = bill.units(placement)
    if placement.decode:
        return {
            "prefill": _replica_group(placement.prefill) | _gpu_type(scenario.prefill),
            "decode": _replica_group(placement.decode) | _gpu_type(scenario.decode),
            "min_prompt_bytes": placement.min_prompt_bytes,
            "spill": placement.spill,
            **found,
        }
    schedule = {
        "schedule": "chunked" if placement.chunked else "prefill-first",
        "budget": placement.budget,
    }
    source, _ = scenario.sources(placement)
    return {**_replica_group(placement.prefill), **_gpu_type(source), **schedule, **found}


def bills(scenario: Scenario) -> list[Criterion]:
    """Lists what a placement costs beside GPUs: its price and its power, where they are known."""
    found = [scenario.price] if scenario.price else []
    if gpu_name(scenario.prefill) and gpu_name(scenario.decode):
        found.append(power_of(scenario))
    return found


def _gpu_type(source: PerformanceSource) -> dict[str, str]:
    return {"gpu": gpu_name(source)} if gpu_name(source) else {}


def _replica_group(group: ReplicaGroup) -> dict[str, int]:
    found = {"tp": group.tp, "pp": group.pp, "n": group.n}
    if group.dp > 1:
        found |= {"dp": group.dp, "ep": group.tp * group.dp}
    return found


def closed_form(scenario: Scenario, placement: Placement) -> dict[str, Any]:
    """Estimates capacities in requests/s by closed form, as a sanity check beside a simulation.

    For disaggregated placements it adds the mean TTFT, and bytes/s and seconds of the hand-off.
    """
    sample = scenario.samples()[0]
    prefill, decode = scenario.capacities(placement, sample)
    both = min(prefill, decode) if placement.decode else 1 / (1 / prefill + 1 / decode)
    found = {"prefill": prefill, "decode": decode, "rate_per_gpu": both / placement.gpus}
    model = scenario.prefill.model
    if placement.decode and model:
        mean_prompt = sum(sample.prompts) / len(sample)
        per_token = model.kv_bytes(math.ceil(mean_prompt)) / math.ceil(mean_prompt)
        found["bandwidth"] = queueing.handoff_bandwidth(per_token, mean_prompt, both)
        found["transfer"] = queueing.handoff_seconds(
            per_token, mean_prompt, scenario.link.bandwidth, scenario.link.latency
        )
    if placement.decode:
        service = placement.prefill.ranks / prefill  # seconds of one prompt in one rank
        found["ttft_mean_half_load"] = queueing.mean_ttft(service, 0.5 / service, 1)
    return found
