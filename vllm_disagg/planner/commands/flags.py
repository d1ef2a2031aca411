"""Flags that `plan` and `simulate` share, and the ranges of their numbers."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from ...errors import ConfigError
from ...fleet.conventions import (
    BYTES_PER_TOKEN,
    DEFAULT_POLICY,
    DEFAULT_PREFILL_CONCURRENCY,
    POLICY_NAMES,
)
from ...setting_values import GivenText
from ...workloads import lengths
from ..cost import aiconfigurator, distserve, hardware, known_models
from ..search import sample_size

DEFAULT_WORKLOAD = "sharegpt-like"
MIN_RATE = 1e-9  # requests/s
MAX_RATE = 1e9
DEFAULT_REQUESTS = sample_size.MIN_REQUESTS
# By flag: far more than an answer needs, and what still ends.
MOST = {"requests": 10_000_000, "seeds": 1000, "node_links": 1_000_000}
MAX_KV_TOKENS = 1 << 40
KV_CACHE_DTYPES = ("auto", "fp8")
STEP_TIMES = ("roofline", "aiconfigurator")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that `plan` and `simulate` share."""
    add = parser.add_argument_group("step times: one of these three").add_argument
    add(
        "--gpu",
        action=GivenText,
        metavar="NAME",
        help="roofline of a GPU; beside --profile the GPU that it must have measured:"
        f" {', '.join(hardware.GPUS)}",
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
    add(
        "--step-times",
        choices=STEP_TIMES,
        help="of --gpu: the planner's roofline, or the tables of aiconfigurator-core, an optional"
        f" package: {aiconfigurator.INSTALL} (default: {STEP_TIMES[0]})",
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
        help="GPU of the decode instances, or of --decode-profile (default: as --gpu)",
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


def given(args: argparse.Namespace, add: Callable[[argparse.ArgumentParser], None]) -> set[str]:
    """Returns the names of flags that have another value than by default; `add` declares them."""
    parser = argparse.ArgumentParser()
    add(parser)
    return {name for name, value in vars(args).items() if value != parser.get_default(name)}


def named(name: str) -> str:
    """Returns a flag as it is written."""
    return f"--{name.replace('_', '-')}"


def has_source(args: argparse.Namespace) -> bool:
    """Returns whether the flags name a source of step times."""
    return bool(args.gpu or args.profile or args.coefficients)


def check_rate(rate: float) -> None:
    """Raises ConfigError for what is no rate."""
    if not MIN_RATE <= rate <= MAX_RATE:
        raise ConfigError(
            f"--rate: {rate} is not a rate: give requests/s, from {MIN_RATE:g} to {MAX_RATE:g}"
        )


def check_numbers(args: argparse.Namespace) -> None:
    """Raises ConfigError for a number out of its range."""
    for name in ("ttft", "tpot", "itl", "ttft_p99", "tpot_p99"):
        seconds = getattr(args, name)
        if seconds is not None and not 0 < seconds < float("inf"):
            raise ConfigError(f"{named(name)}: {seconds} is not a time: give seconds, more than 0")
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
        flag = named(name)
        if value is not None and value < minimum:
            raise ConfigError(f"{flag}: {value} is too few: give {minimum} or more")
        maximum = MOST.get(name)
        if value is not None and maximum is not None and value > maximum:
            raise ConfigError(f"{flag}: {value} is too many: give {maximum} or fewer")
    if args.acceptance_length is not None and not args.speculative_config:
        raise ConfigError("--acceptance-length goes with --speculative-config")
    if args.kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ConfigError(
            f"--kv-cache-dtype: DisaggConnector serves no KV in {args.kv_cache_dtype}:"
            f" give {' or '.join(KV_CACHE_DTYPES)}"
        )
    if args.kv_cache_dtype != "auto" and not args.model:
        raise ConfigError("--kv-cache-dtype goes with --model")
    if not 0 <= args.kv_limit <= MAX_KV_TOKENS:
        raise ConfigError(
            f"--kv-limit: {args.kv_limit} is not a number of tokens: give at most {MAX_KV_TOKENS}"
        )
