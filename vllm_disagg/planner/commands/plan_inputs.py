"""Builds the scenario that the flags describe."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import msgspec

from ...errors import ConfigError
from ...fleet.conventions import DEFAULT_PREFILL_CONCURRENCY
from ..cost import hardware, known_models, profile
from ..cost.latency import LinearLatency
from ..search import sample_size
from ..search.performance_source import PerformanceSource, check_model
from ..search.scenario import Scenario
from ..simulation import workload
from ..simulation.objective import Objective
from .flags import DEFAULT_REQUESTS, check_numbers
from .step_sources import default_link, live_sources, named_sources


@dataclass(frozen=True)
class PlanInputs:
    """Holds the scenario, the model's name for commands, and the fits to show."""

    scenario: Scenario
    model: str
    fits: list[tuple[str, profile.LatencyFit]]


def read(
    args: argparse.Namespace, gpus: int, flag: str, live: LinearLatency | None = None
) -> PlanInputs:
    """Builds the scenario from the flags.

    `gpus` is the budget, and `flag` the flag that raises it. `live` stands for the step times that
    running engines will have measured, and takes the place of a source. Raises ConfigError with one
    line for an invalid value.
    """
    check_numbers(args)
    kind, prefill, decode, fits = live_sources(args, live) if live else named_sources(args, gpus)
    rules = args.rules or ("distserve" if kind == "coefficients" else "vllm")
    like_distserve = rules == "distserve"
    if like_distserve and args.prefill_concurrency != DEFAULT_PREFILL_CONCURRENCY:
        raise ConfigError("--prefill-concurrency goes without --rules distserve")
    link = hardware.link(args.link) if args.link else default_link(kind, prefill, decode)
    _check_handoff(args, prefill, link)
    work = within_length(workload.load(args.workload), prefill, args.max_model_len)
    if args.max_model_len:
        longest = {"max_model_len": args.max_model_len}
        is_same = prefill == decode
        prefill = msgspec.structs.replace(prefill, **longest)
        decode = prefill if is_same else msgspec.structs.replace(decode, **longest)
    overlap = not like_distserve if args.overlap is None else args.overlap
    counting = args.attainment_of or ("each" if like_distserve else "joint")
    for source in (prefill, decode):
        check_model(source, gpus, flag)
    arrivals = workload.arrivals(args.arrivals, work)
    wanted = args.requests or DEFAULT_REQUESTS
    requests, seeds = workload.extent(work, arrivals, wanted, args.seeds)
    context = _mean_context(work.sample(min(requests, DEFAULT_REQUESTS), 0, arrivals))
    is_same = prefill == decode
    prefill = msgspec.structs.replace(prefill, context=context)
    decode = prefill if is_same else msgspec.structs.replace(decode, context=context)
    scenario = Scenario(
        prefill=prefill,
        decode=decode,
        workload=work,
        arrivals=arrivals,
        objective=Objective(
            args.ttft,
            args.tpot,
            args.attainment,
            counting == "joint",
            args.ttft_p99,
            args.tpot_p99,
            args.itl,
        ),
        requests=requests,
        seeds=seeds,
        gpus=gpus,
        link=link,
        overlap=overlap,
        policy=args.policy,
        concurrency=args.prefill_concurrency,
        min_prompt_bytes=args.min_prompt_bytes,
        spill=args.spill,
        kv_limit=args.kv_limit,
        budget=args.max_num_batched_tokens or 0,
        sequences=args.max_num_seqs or 0,
        distserve=like_distserve,
        max_model_len=args.max_model_len or 0,
        nics=_links_per_gpu(args, prefill),
        decode_nics=_links_per_gpu(args, decode),
    )
    if not args.requests:
        sample_size.check_attainment(scenario)
    for name, is_given, reason in (
        ("--min-prompt-bytes", args.min_prompt_bytes, scenario.no_min_prompt_bytes),
        ("--spill", args.spill, scenario.no_proxy_flags),
    ):
        if is_given and reason:
            raise ConfigError(f"{name} cannot be simulated: {reason}")
    return PlanInputs(scenario, known_models.servable_name(args.model or prefill.served), fits)


def within_length(
    work: workload.Workload, source: PerformanceSource, max_model_len: int | None
) -> workload.Workload:
    """Returns the workload without requests that are longer than the flag, or the model, permits.

    Raises ConfigError for a flag above the model's own length, with which vLLM does not start.
    """
    own = source.model.max_tokens if source.model else 0
    name = source.model.name if source.model else ""
    if max_model_len and 0 < own < max_model_len:
        raise ConfigError(
            f"--max-model-len: {name} takes at most {own} tokens: where you serve it with more,"
            " give its config.json with that length"
        )
    tokens = max_model_len or own
    limiter = "--max-model-len" if max_model_len else f"--model: the length of {name}"
    return workload.limited(work, tokens, limiter) if tokens else work


def _links_per_gpu(args: argparse.Namespace, source: PerformanceSource) -> float:
    """Returns the links of each GPU of a node; 0: each instance has one link."""
    return args.node_links / source.gpu.node if args.node_links and source.gpu else 0.0


def _check_handoff(
    args: argparse.Namespace, prefill: PerformanceSource, link: hardware.NetworkLink
) -> None:
    """Raises ConfigError if a hand-off is simulated whose bytes are not known."""
    if prefill.model or math.isinf(link.bandwidth) or getattr(args, "colocated", None):
        return
    raise ConfigError(
        f"give --model: the bytes of a hand-off depend on it, and {prefill.name} measured"
        f" {prefill.served}; or --link none for a free one"
    )


def _mean_context(sample: workload.WorkloadSample) -> int:
    """Returns the tokens that a request holds at its end, in the mean."""
    return math.ceil((sum(sample.prompts) + sum(sample.outputs)) / len(sample))
