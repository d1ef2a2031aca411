"""Commands that start a placement, and remarks on what they assume and leave out."""

from __future__ import annotations

import json
import math
import shlex

from ...fleet.conventions import (
    BYTES_PER_TOKEN,
    DEFAULT_POLICY,
    DEFAULT_PREFILL_CONCURRENCY,
    KV_ROLES,
    QUIET_ACCESS_LOG_FLAG,
    REUSE_POLICY,
)
from ..cost.sizes import ModelCosts
from ..search.performance_source import PerformanceSource
from ..search.placement import Placement, ReplicaGroup
from ..search.scenario import KV_MARGIN_RATIO, Scenario

# Of a disaggregated placement: docs/explanation/planning.md has the rest.
NOT_SIMULATED = (
    "not simulated: the proxy's --queue-size, --queue-timeout and --max-concurrent-requests"
)
NO_COMPRESSION_ON_GPUS = (
    "the connector's compress stays off, in these commands and as simulated: it serves KV in host"
    " memory only, and with KV on GPUs an engine refuses to start"
)
NO_COMPRESSION_ON_CPUS = (
    "the connector's compress stays off, in these commands and as simulated: with it answers are"
    " not exact"
)


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
            "vllm-disagg has served experts with data parallelism on CPUs only, on 4 ranks at most:"
            " see the compatibility matrix; plan without --expert-parallel for other instances"
        )
    if max(p.dp, d.dp if d else 1) > 1:
        found.append(
            "no run with data parallelism or parallel experts is compared: its error is not"
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
        found.append(_prefix_remark(scenario, placement))
        on_gpus = any(source.is_on_gpu for source in scenario.sources(placement))
        found.append(NO_COMPRESSION_ON_GPUS if on_gpus else NO_COMPRESSION_ON_CPUS)
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


def _prefix_remark(scenario: Scenario, placement: Placement) -> str:
    """Names what was simulated of cached prefixes."""
    trace = scenario.workload.trace
    rows = trace.requests if trace else ()
    if not any(row.hash_ids for row in rows):
        return "the traffic has no hash_ids: each prompt is simulated as new to all instances"
    handoff = scenario.deployment(placement).handoff
    if handoff.state_bytes:
        return "simulated without cached prefixes, which engines of a model with states do not keep"
    found = "simulated: prefixes that P and D keep, of which D is sent only what it lacks"
    if scenario.policy == REUSE_POLICY and handoff.reads_back:
        found += " and P reads from D what D has more"
    if not any(row.answer_ids for row in rows):
        found += "; of the answers that D keeps the trace tells none (parent_chat_id)"
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
    """Returns whether the step times are of GPUs; a profile without --gpu may be of a CPU."""
    return scenario.prefill.gpu is not None or scenario.prefill.kind != "profile"


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
