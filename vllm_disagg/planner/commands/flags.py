"""Flags that `plan` and `simulate` share, and the scenario built from them."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass

import msgspec

from ...errors import ConfigError
from ...fleet.conventions import (
    BYTES_PER_TOKEN,
    DEFAULT_POLICY,
    DEFAULT_PREFILL_CONCURRENCY,
    POLICY_NAMES,
)
from ...setting_values import GivenText
from ...workloads import lengths
from ..cost import distserve, hardware, known_models, model, profile, speculative
from ..cost.latency import FITTED_PATH, LinearLatency, PathDelay
from ..cost.sizes import ModelCosts
from ..search import sample_size
from ..search.performance_source import PerformanceSource, check_model
from ..search.scenario import Scenario
from ..simulation import workload
from ..simulation.objective import Objective

DEFAULT_WORKLOAD = "sharegpt-like"
MIN_RATE = 1e-9  # requests/s
MAX_RATE = 1e9
DEFAULT_REQUESTS = sample_size.MIN_REQUESTS
# By flag: far more than an answer needs, and what still ends.
MOST = {"requests": 10_000_000, "seeds": 1000, "node_links": 1_000_000}
MAX_KV_TOKENS = 1 << 40
KV_CACHE_DTYPES = ("auto", "fp8")
# No default is a free hand-off. A profile beside other instances of its machine is of one machine.
# With "live" the engines measured their own.
DEFAULT_LINKS = {
    "coefficients": "nvlink",
    "profile": "eth-25",
    "roofline": "ib-400",
    "live": "none",
}


@dataclass(frozen=True)
class PlanInputs:
    """Holds the scenario, the model's name for commands, and the fits to show."""

    scenario: Scenario
    model: str
    fits: list[tuple[str, profile.LatencyFit]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `plan` and `simulate` share."""
    add = parser.add_argument_group("step times: one of these three").add_argument
    add(
        "--gpu",
        action=GivenText,
        metavar="NAME",
        help=f"roofline of a GPU: {', '.join(hardware.GPUS)}",
    )
    add(
        "--profile",
        action=GivenText,
        metavar="FILE",
        help="points measured by vllm-disagg profile, of instances as the measured one",
    )
    add(
        "--coefficients",
        action=GivenText,
        metavar="NAME",
        help=f"published fits: {', '.join(distserve.COEFFICIENTS)}",
    )
    add = parser.add_argument_group("model, traffic and objective").add_argument
    add(
        "--model",
        action=GivenText,
        metavar="MODEL",
        help=f"a folder with a config.json, or one of {', '.join(known_models.MODELS)}",
    )
    add(
        "--decode-gpu",
        action=GivenText,
        metavar="NAME",
        help="GPU of the decode instances (default: as --gpu)",
    )
    add(
        "--decode-profile",
        action=GivenText,
        metavar="FILE",
        help="measured points of the decode instances (default: as --profile)",
    )
    add(
        "--workload",
        metavar="W",
        default=DEFAULT_WORKLOAD,
        help=f"{', '.join(lengths.NAMED_DISTRIBUTIONS)}, IN:OUT tokens, or a trace"
        " (.jsonl, .json, .csv) (default: %(default)s)",
    )
    add(
        "--arrivals",
        action=GivenText,
        metavar="A",
        default="",
        help="poisson, gamma:CV or trace (default: the times of the trace, else poisson)",
    )
    add(
        "--ttft",
        metavar="SECONDS",
        type=float,
        default=0.5,
        help="objective: time to first token (default: %(default)s)",
    )
    add(
        "--tpot",
        metavar="SECONDS",
        type=float,
        default=0.05,
        help="objective: mean time per output token after the first (default: %(default)s)",
    )
    add(
        "--itl",
        metavar="SECONDS",
        type=float,
        help="objective: longest gap between two tokens of a request, which TPOT's mean hides;"
        " vLLM's own ITL counts the gaps of all requests together (default: no limit)",
    )
    for name in ("ttft", "tpot"):
        add(
            f"--{name}-p99",
            metavar="SECONDS",
            type=float,
            help=f"objective beside: {name.upper()} that 99 %% of the requests must meet",
        )
    add(
        "--attainment",
        metavar="SHARE",
        type=float,
        default=0.9,
        help="share of requests that must meet the objective (default: %(default)s)",
    )
    add(
        "--attainment-of",
        choices=("joint", "each"),
        help="all limits in one request, or each by itself"
        " (default: joint; each under DistServe's rules)",
    )
    add(
        "--speculative-config",
        action=GivenText,
        metavar="JSON",
        help="vLLM's flag: drafts of --gpu's engines, as"
        ' {"method":"mtp","num_speculative_tokens":3}',
    )
    add(
        "--acceptance-length",
        metavar="TOKENS",
        type=float,
        help="tokens of an answer in a step with drafts, in the mean: vLLM logs it as the mean"
        " acceptance length",
    )
    add(
        "--expert-parallel",
        action="store_true",
        help="also instances with expert parallelism and data-parallel attention",
    )
    add = parser.add_argument_group("simulation").add_argument
    add(
        "--requests",
        metavar="N",
        type=int,
        help="requests of each seed (default: plan takes as many as it needs,"
        f" at least {DEFAULT_REQUESTS})",
    )
    add(
        "--seeds",
        metavar="N",
        type=int,
        default=5,
        help="samples, 1000 at most; the confidence interval is over them (default: %(default)s)",
    )
    add(
        "--link",
        action=GivenText,
        metavar="LINK",
        default="",
        help=f"network between prefill and decode: {', '.join(hardware.LINKS)}, or GB/s"
        " (default: ib-400 with --gpu, nvlink with --coefficients, else as the profile measured its"
        " hand-off, loopback if it did not and was beside others, eth-25 without)",
    )
    add(
        "--node-gpus",
        metavar="N",
        type=int,
        help="GPUs of a node, joined by NVLink or PCIe (default: 8; 72 of GB200 and GB300)",
    )
    add(
        "--node-links",
        metavar="N",
        type=int,
        help="links of a node: an instance has those of its GPUs, a part of one where GPUs share it"
        " (default: each instance has one)",
    )
    add(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="start both legs at once and move KV during the prefill, as this project does;"
        " off: after the prefill; the proxy's --decode-dispatch late is not simulated (default: on;"
        " off under DistServe's rules)",
    )
    add(
        "--policy",
        choices=POLICY_NAMES,
        default=DEFAULT_POLICY,
        help="routing policy of the proxy (default: %(default)s)",
    )
    add(
        "--prefill-concurrency",
        metavar="N",
        type=int,
        default=DEFAULT_PREFILL_CONCURRENCY,
        help="legs at one prefill instance, as the proxy's flag (default: %(default)s)",
    )
    add(
        "--min-prompt-bytes",
        metavar="N",
        type=int,
        help="as the proxy's flag: decode instances compute prompts of fewer bytes than this alone,"
        f" a token taken as {BYTES_PER_TOKEN} bytes (default: plan tries some on the best"
        " placement; else 0)",
    )
    add(
        "--spill",
        action="store_true",
        default=None,
        help="as the proxy's flag: with all prefill instances full each decode instance computes"
        " one prompt at a time alone (default: plan tries it on the best placement)",
    )
    add(
        "--max-num-batched-tokens",
        metavar="N",
        type=int,
        help="token budget of a step (default: that of the profile, else vLLM's for the GPU:"
        " 16384 from 160 GiB, 8192 from 70 GiB except A100, 2048)",
    )
    add(
        "--max-num-seqs",
        metavar="N",
        type=int,
        help="sequences that run at once in an instance"
        " (default: vLLM's for the GPU: 1024 from 70 GiB except A100, 256; 128 on a CPU)",
    )
    add(
        "--max-model-len",
        metavar="TOKENS",
        type=int,
        help="longest request, as vLLM's flag: longer ones are left out, and instances must hold"
        " one (default: not limited)",
    )
    add(
        "--kv-cache-dtype",
        metavar="DTYPE",
        default="auto",
        help="as vLLM's flag: auto or fp8, which DisaggConnector serves"
        " (default: as the checkpoint has it)",
    )
    add(
        "--kv-limit",
        metavar="TOKENS",
        type=int,
        default=0,
        help="KV of an instance (default: as much as its memory holds)",
    )
    add(
        "--rules",
        choices=("vllm", "distserve"),
        help="rules of batching and of measuring (default: vllm; distserve with --coefficients)",
    )
    add("--json", action="store_true", help="print one JSON object")


def has_source(args: argparse.Namespace) -> bool:
    """Returns whether the flags name a source of step times."""
    return bool(args.gpu or args.profile or args.coefficients)


def read(
    args: argparse.Namespace, gpus: int, flag: str, live: LinearLatency | None = None
) -> PlanInputs:
    """Builds the scenario from the flags.

    `gpus` is the budget, and `flag` the flag that raises it. `live` stands for the step times that
    running engines will have measured, and takes the place of a source. Raises ConfigError with one
    line for an invalid value.
    """
    _check(args)
    kind, prefill, decode, fits = _live_source(args, live) if live else _sources(args)
    rules = args.rules or ("distserve" if kind == "coefficients" else "vllm")
    like_distserve = rules == "distserve"
    link = hardware.link(args.link) if args.link else _default_link(kind, prefill, decode)
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
    if (args.min_prompt_bytes or args.spill) and (reason := scenario.no_proxy_flags):
        raise ConfigError(f"--min-prompt-bytes and --spill cannot be simulated: {reason}")
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


def check_rate(rate: float) -> None:
    """Raises ConfigError for what is no rate."""
    if not MIN_RATE <= rate <= MAX_RATE:
        raise ConfigError(
            f"--rate: {rate} is not a rate: give requests/s, from {MIN_RATE:g} to {MAX_RATE:g}"
        )


def _default_link(
    kind: str, prefill: PerformanceSource, decode: PerformanceSource
) -> hardware.NetworkLink:
    """Returns the link of sources of step times: as measured with them.

    Else it is the loopback if they had neighbours on one machine.
    """
    if prefill.link:
        return prefill.link
    is_one_machine = prefill.beside and prefill.machine == decode.machine
    return hardware.link("loopback" if is_one_machine else DEFAULT_LINKS[kind])


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


def _check(args: argparse.Namespace) -> None:
    """Raises ConfigError for a number out of its range."""
    for name in ("ttft", "tpot", "itl", "ttft_p99", "tpot_p99"):
        seconds = getattr(args, name)
        if seconds is not None and not 0 < seconds < float("inf"):
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag}: {seconds} is not a time: give seconds, more than 0")
    if not 0 < args.attainment < 1:
        raise ConfigError(
            f"--attainment: {args.attainment} is not a share: give more than 0 and less than 1,"
            " as 0.9"
        )
    least = {
        "requests": 10,
        "seeds": 1,
        "prefill_concurrency": 1,
        "min_prompt_bytes": 0,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 1,
        "max_model_len": 2,
        "node_gpus": 1,
        "node_links": 1,
    }
    for name, minimum in least.items():
        value = getattr(args, name)
        flag = f"--{name.replace('_', '-')}"
        if value is not None and value < minimum:
            raise ConfigError(f"{flag}: {value} is too few: give {minimum} or more")
        maximum = MOST.get(name)
        if value is not None and maximum is not None and value > maximum:
            raise ConfigError(f"{flag}: {value} is too many: give {maximum} or fewer")
    if args.kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ConfigError(
            f"--kv-cache-dtype: DisaggConnector serves no KV in {args.kv_cache_dtype}:"
            f" give {' or '.join(KV_CACHE_DTYPES)}"
        )
    if not 0 <= args.kv_limit <= MAX_KV_TOKENS:
        raise ConfigError(
            f"--kv-limit: {args.kv_limit} is not a number of tokens: give at most {MAX_KV_TOKENS}"
        )


def _live_source(
    args: argparse.Namespace, latency: LinearLatency
) -> tuple[str, PerformanceSource, PerformanceSource, list[tuple[str, profile.LatencyFit]]]:
    """Returns sources whose step times running engines measure."""
    for flag in ("decode_gpu", "decode_profile"):
        if getattr(args, flag):
            name = flag.replace("_", "-")
            raise ConfigError(f"--{name} goes with --{name.removeprefix('decode-')}")
    if args.speculative_config:
        raise ConfigError("--speculative-config goes with --gpu: --live measures drafts")
    loaded = model.load(args.model, args.kv_cache_dtype) if args.model else None
    source = PerformanceSource("live", "the running engines", loaded, fitted=latency)
    return "live", source, source, []


def _sources(
    args: argparse.Namespace,
) -> tuple[str, PerformanceSource, PerformanceSource, list[tuple[str, profile.LatencyFit]]]:
    """Returns the kind of source, the sources of prefill and of decode, and the fits to show."""
    _check_source(args)
    if args.profile:
        loaded = model.load(args.model, args.kv_cache_dtype) if args.model else None
        if args.decode_gpu:
            raise ConfigError("--decode-gpu goes with --gpu; give --decode-profile")
        points = _points(args.profile, args.model)
        prefill, fits = _profiled(args.profile, points, loaded)
        decode = prefill
        if args.decode_profile:
            decode_points = _points(args.decode_profile, args.model)
            profile.check_pair(points, decode_points)
            decode, decode_fits = _profiled(args.decode_profile, decode_points, loaded)
            fits += decode_fits
        return "profile", prefill, decode, fits
    if args.decode_profile:
        raise ConfigError("--decode-profile goes with --profile")
    if not args.model:
        raise ConfigError(
            f"give --model: a folder with a config.json, or one of {', '.join(known_models.MODELS)}"
        )
    loaded = model.load(args.model, args.kv_cache_dtype)
    if args.expert_parallel and (args.coefficients or not loaded.experts):
        raise ConfigError("--expert-parallel goes with --gpu and a model that has experts")
    if args.coefficients:
        if args.decode_gpu:
            raise ConfigError("--decode-gpu goes with --gpu: the coefficients are of one GPU")
        distserve.degrees(args.coefficients, loaded.name)
        source = PerformanceSource("coefficients", args.coefficients, loaded)
        return "coefficients", source, source, []
    prefill, decode = (
        _roofline(args, name, loaded) for name in (args.gpu, args.decode_gpu or args.gpu)
    )
    return "roofline", prefill, decode, []


def _check_source(args: argparse.Namespace) -> None:
    """Raises ConfigError unless one source is given, with flags that go with it."""
    given = [name for name in ("gpu", "profile", "coefficients") if getattr(args, name)]
    for name in ("node_gpus", "node_links", "speculative_config"):
        if getattr(args, name) and not args.gpu:
            raise ConfigError(f"--{name.replace('_', '-')} goes with --gpu")
    if args.acceptance_length is not None and not args.speculative_config:
        raise ConfigError("--acceptance-length goes with --speculative-config")
    if args.itl is not None and args.speculative_config:
        raise ConfigError("--itl goes without --speculative-config: steps have several tokens")
    if args.profile and args.expert_parallel:
        raise ConfigError("--expert-parallel goes with --gpu and a model that has experts")
    if len(given) != 1:
        raise ConfigError(
            "give one of --gpu, --profile and --coefficients: the source of the step times"
        )


def _roofline(args: argparse.Namespace, name: str, loaded: ModelCosts) -> PerformanceSource:
    """Returns the roofline of a GPU type."""
    config = args.speculative_config
    return PerformanceSource(
        kind="roofline",
        name=name,
        model=loaded,
        gpu=_in_nodes(args, hardware.gpu(name)),
        path=FITTED_PATH,
        expert_parallel=args.expert_parallel,
        drafts=speculative.parse(config, args.acceptance_length) if config else None,
    )


def _links_per_gpu(args: argparse.Namespace, source: PerformanceSource) -> float:
    """Returns the links of each GPU of a node; 0: each instance has one link."""
    return args.node_links / source.gpu.node if args.node_links and source.gpu else 0.0


def _in_nodes(args: argparse.Namespace, gpu: hardware.GpuType) -> hardware.GpuType:
    """Returns a GPU with the nodes and links that the flags give."""
    found = msgspec.structs.replace(gpu, node=args.node_gpus or gpu.node)
    if not args.node_links:
        return found
    link = hardware.link(args.link or DEFAULT_LINKS["roofline"])
    return msgspec.structs.replace(found, fabric=link.bandwidth * args.node_links / found.node)


def _points(path: str, name: str | None) -> profile.ProfilePoints:
    """Loads points. Raises ConfigError if they are of another model than the one named."""
    points = profile.load(path)
    if name:
        profile.check_model(points, path, name)
    return points


def _profiled(
    path: str, points: profile.ProfilePoints, loaded: ModelCosts | None
) -> tuple[PerformanceSource, list[tuple[str, profile.LatencyFit]]]:
    """Returns the source fitted to a file's points, and the fit with the file's path."""
    fit = profile.fit(points)
    ranks = points.tensor_parallel_size or 1
    source = PerformanceSource(
        kind="profile",
        name=path,
        model=loaded,
        fitted=fit.latency,
        kv_tokens=points.kv_tokens,
        budget=points.max_num_batched_tokens or 0,
        beside=points.beside,
        served=points.model,
        machine=points.machine,
        vllm=points.vllm,
        was_on_gpu=bool(points.gpu),
        measured_tp=ranks,
        path=PathDelay(points.path.seconds, points.path.seconds_per_token),
        link=points.handoff.link(ranks, has_bytes=bool(loaded)) if points.handoff else None,
    )
    return source, [(path, fit)]
