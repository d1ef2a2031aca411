"""The flags that `plan` and `simulate` share, and how they become a setting."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from ...errors import ConfigError
from ...workloads import lengths
from ..cost import distserve, hardware, known_models, model, profile
from ..search.scenario import PerformanceSource, Scenario, check_model
from ..simulation import workload
from ..simulation.simulator import POLICIES, Objective

DEFAULT_WORKLOAD = "sharegpt-like"  # unless another is given
DEFAULT_BUDGET_TOKENS = 8192  # tokens of a step, unless given or in the profile
DEFAULT_LINKS = {"coefficients": "none", "profile": "none", "roofline": "ib-400"}


@dataclass(frozen=True)
class PlanInputs:
    """Holds the scenario, the model's name for commands, and the fits to show."""

    scenario: Scenario
    model: str
    fits: list[tuple[str, profile.LatencyFit]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `plan` and `simulate` share."""
    add = parser.add_argument_group("how fast: one of these three").add_argument
    add("--gpu", metavar="NAME", help=f"roofline of a GPU: {', '.join(hardware.GPUS)}")
    add(
        "--profile",
        metavar="FILE",
        help="points that vllm-disagg profile measured; an instance counts as one GPU",
    )
    add(
        "--coefficients",
        metavar="NAME",
        help=f"published fits: {', '.join(distserve.COEFFICIENTS)}",
    )
    add = parser.add_argument_group("what").add_argument
    add(
        "--model",
        metavar="MODEL",
        help=f"a folder with a config.json, or one of {', '.join(known_models.MODELS)}",
    )
    add("--decode-gpu", metavar="NAME", help="the decode instances' GPU (default: as --gpu)")
    add(
        "--decode-profile",
        metavar="FILE",
        help="the decode instances' points (default: as --profile)",
    )
    add(
        "--workload",
        metavar="W",
        default=DEFAULT_WORKLOAD,
        help=f"{', '.join(lengths.NAMED_DISTRIBUTIONS)}, IN:OUT tokens, or a trace (.jsonl, .json, .csv)"
        " (default: %(default)s)",
    )
    add(
        "--arrivals",
        metavar="A",
        default="",
        help="poisson, gamma:CV or trace (default: a trace's own times, or poisson)",
    )
    add(
        "--ttft",
        metavar="SECONDS",
        type=float,
        default=0.5,
        help="objective: first token (default: %(default)s)",
    )
    add(
        "--tpot",
        metavar="SECONDS",
        type=float,
        default=0.05,
        help="objective: each later token (default: %(default)s)",
    )
    add(
        "--attainment",
        metavar="SHARE",
        type=float,
        default=0.9,
        help="share of requests that must meet them (default: %(default)s)",
    )
    add(
        "--attainment-of",
        choices=("joint", "each"),
        help="both objectives in one request, or each by itself (default: joint; each under DistServe's rules)",
    )
    add = parser.add_argument_group("how it is simulated").add_argument
    add(
        "--requests",
        metavar="N",
        type=int,
        default=1000,
        help="of each seed (default: %(default)s)",
    )
    add(
        "--seeds",
        metavar="N",
        type=int,
        default=5,
        help="samples; the interval is over them (default: %(default)s)",
    )
    add(
        "--link",
        metavar="LINK",
        default="",
        help=f"between prefill and decode: {', '.join(hardware.LINKS)}, or GB/s"
        " (default: ib-400 with --gpu, else none)",
    )
    add(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="both legs at once and KV moves during the prefill, as this project does it; off: after it"
        " (default: on; off under DistServe's rules)",
    )
    add(
        "--policy",
        choices=POLICIES,
        default="least_loaded",
        help="the proxy's choice (default: %(default)s)",
    )
    add(
        "--prefill-concurrency",
        metavar="N",
        type=int,
        default=8,
        help="as the proxy's flag (default: %(default)s)",
    )
    add(
        "--max-num-batched-tokens",
        metavar="N",
        type=int,
        help=f"token budget of a step (default: {DEFAULT_BUDGET_TOKENS}, or the profile's)",
    )
    add(
        "--max-num-seqs",
        metavar="N",
        type=int,
        default=256,
        help="sequences at once (default: %(default)s)",
    )
    add(
        "--kv-limit",
        metavar="TOKENS",
        type=int,
        default=0,
        help="KV of an instance (default: what its memory holds)",
    )
    add(
        "--rules",
        choices=("vllm", "distserve"),
        help="how engines batch and clocks run (default: vllm; distserve with --coefficients)",
    )
    add("--json", action="store_true", help="print one JSON object")


def read(args: argparse.Namespace, gpus: int, flag: str) -> PlanInputs:
    """Builds the scenario from the flags.

    `gpus` is the budget, and `flag` the flag that raises it. Raises ConfigError with one line for
    an invalid value.
    """
    _check(args)
    kind, prefill, decode, fits = _sources(args)
    like_distserve = (
        args.rules or ("distserve" if kind == "coefficients" else "vllm")
    ) == "distserve"
    work = workload.load(args.workload)
    overlap = not like_distserve if args.overlap is None else args.overlap
    joint = (args.attainment_of or ("each" if like_distserve else "joint")) == "joint"
    for source in (prefill, decode):
        check_model(source, gpus, flag)
    arrivals = workload.arrivals(args.arrivals, work)
    requests, seeds = workload.extent(work, arrivals, args.requests, args.seeds)
    scenario = Scenario(
        prefill=prefill,
        decode=decode,
        workload=work,
        arrivals=arrivals,
        objective=Objective(args.ttft, args.tpot, args.attainment, joint),
        requests=requests,
        seeds=seeds,
        gpus=gpus,
        link=hardware.link(args.link or DEFAULT_LINKS[kind]),
        overlap=overlap,
        policy=args.policy,
        concurrency=args.prefill_concurrency,
        kv_limit=args.kv_limit,
        budget=args.max_num_batched_tokens or prefill.budget or DEFAULT_BUDGET_TOKENS,
        sequences=args.max_num_seqs,
        distserve=like_distserve,
    )
    return PlanInputs(scenario, args.model or prefill.name, fits)


def _check(args: argparse.Namespace) -> None:
    for flag in ("ttft", "tpot"):
        if not 0 < getattr(args, flag) < float("inf"):
            raise ConfigError(
                f"--{flag}: {getattr(args, flag)} is not a time: give seconds, more than 0"
            )
    if not 0 < args.attainment < 1:
        raise ConfigError(
            f"--attainment: {args.attainment} is not a share: give more than 0 and less than 1, as 0.9"
        )
    least = {
        "requests": 10,
        "seeds": 1,
        "prefill_concurrency": 1,
        "max_num_batched_tokens": 16,
        "max_num_seqs": 1,
    }
    for flag, few in least.items():
        value = getattr(args, flag)
        if value is not None and value < few:
            raise ConfigError(f"--{flag.replace('_', '-')}: {value} is too few: give {few} or more")
    if args.kv_limit < 0:
        raise ConfigError(f"--kv-limit: {args.kv_limit} is not a number of tokens")


def _sources(
    args: argparse.Namespace,
) -> tuple[str, PerformanceSource, PerformanceSource, list[tuple[str, profile.LatencyFit]]]:
    given = [name for name in ("gpu", "profile", "coefficients") if getattr(args, name)]
    if len(given) != 1:
        raise ConfigError(
            "give one of --gpu, --profile and --coefficients: how fast are the instances?"
        )
    if args.profile:
        loaded = model.load(args.model) if args.model else None
        prefill, fits = _profiled(args.profile, loaded)
        decode = prefill
        if args.decode_profile:
            decode, more = _profiled(args.decode_profile, loaded)
            fits += more
        return "profile", prefill, decode, fits
    if args.decode_profile:
        raise ConfigError("--decode-profile goes with --profile")
    if not args.model:
        raise ConfigError(
            f"give --model: a folder with a config.json, or one of {', '.join(known_models.MODELS)}"
        )
    loaded = model.load(args.model)
    if args.coefficients:
        if args.decode_gpu:
            raise ConfigError("--decode-gpu goes with --gpu: the coefficients are of one GPU")
        distserve.degrees(args.coefficients, loaded.name)
        source = PerformanceSource("coefficients", args.coefficients, loaded)
        return "coefficients", source, source, []
    names = args.gpu, args.decode_gpu or args.gpu
    prefill, decode = (
        PerformanceSource("roofline", name, loaded, hardware.gpu(name)) for name in names
    )
    return "roofline", prefill, decode, []


def _profiled(
    path: str, loaded: model.ModelCosts | None
) -> tuple[PerformanceSource, list[tuple[str, profile.LatencyFit]]]:
    points = profile.load(path)
    fit = profile.fit(points)
    budget = points.max_num_batched_tokens or 0
    return PerformanceSource(
        "profile", path, loaded, None, fit.latency, points.kv_tokens, budget, points.beside
    ), [(path, fit)]
