"""Commands that start a placement, and the JSON documents that `plan` and `simulate` print."""

from __future__ import annotations

import json
import math
import shlex
from datetime import UTC, datetime
from typing import Any

import msgspec

from ... import __version__
from ...fleet.conventions import (
    BYTES_PER_TOKEN,
    DEFAULT_POLICY,
    DEFAULT_PREFILL_CONCURRENCY,
    KV_ROLES,
    NEWEST_VLLM,
    OLDEST_VLLM,
    QUIET_ACCESS_LOG_FLAG,
)
from ..cost import queueing
from ..cost.latency import unloaded_decode
from ..cost.sizes import ModelCosts
from ..search.advice import Advice
from ..search.optimizer import FlagTrial, PlacementScore
from ..search.scenario import (
    KV_MARGIN_RATIO,
    Criterion,
    PerformanceSource,
    Placement,
    ReplicaGroup,
    Scenario,
)
from . import rate_table
from .criteria import gpu_name, power_of

# Of a disaggregated placement: docs/explanation/planning.md has the rest.
NOT_SIMULATED = (
    "not simulated: the prefixes that decode instances keep, the connector's compress, and the"
    " proxy's --queue-size, --queue-timeout and --max-concurrent-requests"
)
BILLS = {"$/h": "cost_per_hour", "kW": "kilowatts"}  # names in JSON documents, by unit

# --- commands ---


def commands(scenario: Scenario, placement: Placement, model: str) -> list[str]:
    """Lists the commands that start `placement`, one a line.

    They give all flags that the simulation depends on. Ports and GPUs are an example, in which all
    instances are on one machine.
    """
    if not placement.decode:
        return _colocated(scenario, placement, model)
    lines = []
    p = placement.prefill
    d = placement.decode
    routing = _routing_flags(scenario, placement)
    of_prefill = _engine_flags(scenario, placement, scenario.prefill, p)
    of_decode = _engine_flags(scenario, placement, scenario.decode, d)
    # DistServe's rules limit no concurrency.
    is_default_proxy = scenario.policy == DEFAULT_POLICY and not placement.proxy_flags
    is_default_proxy &= scenario.distserve or scenario.concurrency == DEFAULT_PREFILL_CONCURRENCY
    # `up` starts instances of one shape with the same flags, and a proxy with default routing.
    is_one_shape = (p.tp, p.pp, p.dp) == (d.tp, d.pp, d.dp) == (d.tp, 1, 1)
    if is_one_shape and of_prefill == of_decode and is_default_proxy:
        parallel = ["--tensor-parallel-size", str(p.tp)] if p.tp > 1 else []
        instances = ["--prefill", str(p.n), "--decode", str(d.n)]
        passed_on = ["--", *of_prefill] if of_prefill else []
        up = ["vllm-disagg", "up", "--model", model, *instances, *parallel, *passed_on]
        lines.append(shlex.join(up))
    lines.append("vllm-disagg key fleet.key")
    proxy = ["vllm-disagg", "proxy", "--key-file", "fleet.key", *routing]
    prefixes = iter(_own_gpus(scenario, placement))
    for role, flag, group, engine, base in (
        (KV_ROLES["prefill"], "--prefill", p, of_prefill, 8100),
        (KV_ROLES["decode"], "--decode", d, of_decode, 8200),
    ):
        for n in range(group.n):
            transfer = {
                "kv_connector": "DisaggConnector",
                "kv_role": role,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"key_file": "fleet.key"},
            }
            extra = ["--kv-transfer-config", json.dumps(transfer, separators=(",", ":"))]
            argv = [*_serve(model, group, base + n), *engine, QUIET_ACCESS_LOG_FLAG, *extra]
            lines.append(next(prefixes) + shlex.join(argv))
            for url in _urls(base + n, group):
                proxy += [flag, url]
    return [*lines, shlex.join(proxy)]


def _urls(port: int, group: ReplicaGroup) -> list[str]:
    """Lists the instances of a server for the proxy: each data parallel rank is one."""
    server = f"http://127.0.0.1:{port}"
    return [server] if group.dp == 1 else [f"{server}@{rank}" for rank in range(group.dp)]


def remarks(scenario: Scenario, placement: Placement) -> list[str]:
    """Lists the limits of the commands, for their reader."""
    p = placement.prefill
    d = placement.decode
    found = []
    if d and max(p.dp, d.dp) > 1:
        found.append(
            "vllm-disagg has served experts with data parallelism on CPUs only, with 2 ranks: see"
            " the compatibility matrix; plan without --expert-parallel for other instances"
        )
    if max(p.dp, d.dp if d else 1) > 1:
        found.append(
            "no run with data parallelism or parallel experts was measured: its error is not"
            " known; each rank is taken to have equal work, and all-to-alls are DeepEP's"
        )
    if _spans_machines(scenario, placement):
        found.append("an instance spans machines: its commands need vLLM's flags for several nodes")
    if d and ((p.tp, p.pp) != (d.tp, d.pp) or p.pp > 1):
        found.append(
            "prefill and decode differ in parallelism, or use pipelines: see the compatibility"
            " matrix before you start it"
        )
    found += _length_and_schedule_remarks(scenario, placement)
    if d and not scenario.overlap and not scenario.distserve:
        found.append("simulated with --no-overlap; these commands move KV during the prefill")
    if d and not scenario.distserve:
        found.append(NOT_SIMULATED)
    if placement.min_prompt_bytes:
        tokens = placement.min_prompt_bytes / BYTES_PER_TOKEN
        found.append(
            f"--min-prompt-bytes stands for prompts of fewer than {tokens:g} tokens, at"
            f" {BYTES_PER_TOKEN} bytes a token, as in English text: other text needs another number"
        )
    instances = p.n + (d.n if d else 0)
    if not _is_of_gpus(scenario) and instances > 1:
        found.append(
            "a profile does not name GPUs: on one machine with GPUs put CUDA_VISIBLE_DEVICES=N"
            " before each `vllm serve`, another N for each"
        )
    elif _is_on_machines(scenario, placement):
        found.append(
            "the commands number GPUs as if one machine had them all: on each machine begin"
            " CUDA_VISIBLE_DEVICES with 0"
        )
    return found


def _spans_machines(scenario: Scenario, placement: Placement) -> bool:
    """Returns whether an instance has more GPUs than a machine of its type."""
    groups = (placement.prefill, placement.decode)
    sides = zip(groups, scenario.sources(placement), strict=True)
    return any(group.gpus // group.n > source.machine_gpus for group, source in sides if group)


def _is_on_machines(scenario: Scenario, placement: Placement) -> bool:
    """Returns whether a placement has more GPUs than a machine, or GPUs of two types."""
    prefill, decode = scenario.sources(placement)
    return prefill.name != decode.name or placement.gpus > prefill.machine_gpus


def _length_and_schedule_remarks(scenario: Scenario, placement: Placement) -> list[str]:
    """Lists the limits of the commands in the length of requests and in the schedule of steps."""
    found = []
    length = 0 if scenario.max_model_len else _fitting_length(scenario, placement)
    if length:
        found.append(
            f"an instance's KV holds no request of the model's own length: --max-model-len {length}"
            " is what fits; longer requests are refused"
        )
    if not placement.chunked:
        found.append(
            "prefill first is a schedule of vLLM in 2023, simulated by DistServe's rules: vLLM 0.32"
            " takes decodes into each step"
        )
    return found


def _is_of_gpus(scenario: Scenario) -> bool:
    """Returns whether the step times are of GPUs; a profile may be of a CPU."""
    return scenario.prefill.kind != "profile"


def _own_gpus(scenario: Scenario, placement: Placement) -> list[str]:
    """Returns for each instance what gives it GPUs of its own, before its command."""
    groups = [placement.prefill, *filter(None, [placement.decode])]
    sizes = [group.gpus // group.n for group in groups for _ in range(group.n)]
    if not _is_of_gpus(scenario) or len(sizes) == 1:
        return [""] * len(sizes)
    found = []
    first = 0
    for size in sizes:
        gpus = ",".join(str(gpu) for gpu in range(first, first + size))
        found.append(f"CUDA_VISIBLE_DEVICES={gpus} ")
        first += size
    return found


def _colocated(scenario: Scenario, placement: Placement, model: str) -> list[str]:
    """Lists the commands of a colocated placement; one instance needs no proxy."""
    source, _ = scenario.sources(placement)
    limits = scenario.limits(source, placement.budget)
    budget = ["--max-num-batched-tokens", str(limits.budget)]
    schedule = [*budget, *_length_flags(scenario, placement)]
    if not placement.chunked:
        schedule = ["--no-enable-chunked-prefill", *_whole_prompts(scenario, limits.budget)]
    if not scenario.distserve:
        schedule += ["--max-num-seqs", str(limits.sequences)]
    schedule += _memory_flags(scenario, source, placement.prefill)
    schedule += _draft_flags(source)
    lines = []
    proxy = ["vllm-disagg", "proxy", "--policy", scenario.policy]
    prefixes = _own_gpus(scenario, placement)
    for n in range(placement.prefill.n):
        argv = [*_serve(model, placement.prefill, 8200 + n), *schedule]
        lines.append(prefixes[n] + shlex.join(argv))
        proxy += ["--decode", f"http://127.0.0.1:{8200 + n}"]
    return lines if placement.prefill.n == 1 else [*lines, shlex.join(proxy)]


def _whole_prompts(scenario: Scenario, budget: int) -> list[str]:
    """Returns the token budget of steps with whole prompts, and the longest request.

    Without chunks vLLM starts only if the longest request fits a step.
    """
    length = scenario.max_model_len or scenario.workload.longest
    limits = ["--max-num-batched-tokens", str(max(budget, length))]
    return [*limits, "--max-model-len", str(length)]


def _engine_flags(
    scenario: Scenario, placement: Placement, source: PerformanceSource, group: ReplicaGroup
) -> list[str]:
    """Returns the flags of an instance; DistServe's rules limit neither tokens nor sequences."""
    memory = _memory_flags(scenario, source, group)
    memory += _length_flags(scenario, placement) + _draft_flags(source)
    if scenario.distserve:
        return memory
    limits = scenario.limits(source)
    budget = ["--max-num-batched-tokens", str(limits.budget)]
    return [*budget, "--max-num-seqs", str(limits.sequences), *memory]


def _length_flags(scenario: Scenario, placement: Placement) -> list[str]:
    """Returns the flag of the longest request, if it was given or if vLLM needs it to start."""
    length = scenario.max_model_len or _fitting_length(scenario, placement)
    return ["--max-model-len", str(length)] if length else []


def _fitting_length(scenario: Scenario, placement: Placement) -> int:
    """Returns the longest request that instances can take; 0 if that is the model's own.

    vLLM starts only if the KV of an instance holds one request of the longest.
    """
    prefill, decode = scenario.sources(placement)
    sides = [(prefill, placement.prefill)]
    if placement.decode:
        sides.append((decode, placement.decode))
    if all(
        not source.model or scenario.holds(source, group, source.model.max_tokens)
        for source, group in sides
    ):
        return 0
    kv = min(scenario.kv_tokens(source, group) for source, group in sides)
    return int(kv / KV_MARGIN_RATIO)


def _draft_flags(source: PerformanceSource) -> list[str]:
    """Returns the flag of speculative decoding, if it was given."""
    return ["--speculative-config", source.drafts.config] if source.drafts else []


def _limit_bytes(model: ModelCosts, tokens: int, group: ReplicaGroup, context: int) -> int:
    """Returns the bytes of a KV limit on one GPU."""
    sequence = model.rank_bytes(context, group.tp, group.pp)
    return math.ceil(tokens * sequence / context)


def _memory_flags(scenario: Scenario, source: PerformanceSource, group: ReplicaGroup) -> list[str]:
    """Returns the flags for the memory of an instance; a profile without --kv-limit has none."""
    dtype = ["--kv-cache-dtype", "fp8"] if source.model and source.model.is_kv_fp8 else []
    if scenario.kv_limit and source.model:
        rank_bytes = _limit_bytes(source.model, scenario.kv_limit, group, source.context)
        return [*dtype, "--kv-cache-memory-bytes", str(rank_bytes)]
    if source.memory_utilization:
        return [*dtype, "--gpu-memory-utilization", f"{source.memory_utilization:g}"]
    return dtype


def _routing_flags(scenario: Scenario, placement: Placement) -> list[str]:
    """Returns the routing flags of the proxy; DistServe's rules limit no concurrency."""
    policy = ["--policy", scenario.policy]
    if scenario.distserve:
        return policy
    legs = ["--prefill-concurrency", str(scenario.concurrency)]
    return [*policy, *legs, *placement.proxy_flags]


def _serve(model: str, group: ReplicaGroup, port: int) -> list[str]:
    """Returns the arguments of the `vllm serve` command of one instance."""
    words = ["vllm", "serve", model, "--port", str(port)]
    for flag, value in (
        ("--tensor-parallel-size", group.tp),
        ("--pipeline-parallel-size", group.pp),
        ("--data-parallel-size", group.dp),
    ):
        if value > 1:
            words += [flag, str(value)]
    return [*words, "--enable-expert-parallel"] if group.dp > 1 else words


# --- JSON ---


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
