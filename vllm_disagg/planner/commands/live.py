"""Judges the number of prefill and decode instances of a running deployment: `plan --live URL`.

The proxy's /metrics, read at both ends of a window, give the rate, the mean lengths and the mean
times. The list of instances comes from /disagg/instances. One factor for each phase scales the
given latency model. With both factors, a simulation of the present deployment under the same
traffic has the measured times. Then each split of as many instances is simulated for its goodput.
Means do not show the spread of lengths. A log-normal distribution (LENGTH_LOG_SIGMA) is assumed
unless --workload gives another.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ... import http_client
from ...errors import ConfigError
from ...fleet.keys import ADMIN_KEY
from ...workloads import lengths
from ..search import optimizer, sample_size
from ..search.advice import MIN_GAIN_RATIO
from ..search.scenario import Placement, ReplicaGroup, Scenario
from ..simulation import workload
from ..simulation.simulator import simulate
from . import flags
from .output import describe

# Standard deviation of the logarithm of lengths; between DistServe's ShareGPT and Azure's traces.
LENGTH_LOG_SIGMA = 0.8
REFIT_ROUNDS = 3
MAX_REFIT_FACTOR = 64.0  # factors are between 1 / MAX_REFIT_FACTOR and MAX_REFIT_FACTOR
REFIT_PRECISION_RATIO = 1.01  # of the ends of a bisection
MIN_WINDOW_REQUESTS = 20  # means of fewer requests are too uncertain

COUNTERS = {
    "requests": "vllm_disagg_requests_total",
    "tokens": "vllm_disagg_tokens_total",
    "ttft": "vllm_disagg_ttft_seconds",
    "tpot": "vllm_disagg_tpot_seconds",
}

MetricSamples = dict[tuple[str, frozenset[tuple[str, str]]], float]


class ObservedTraffic(msgspec.Struct, frozen=True):
    """Averages over one window: requests/s, mean tokens, mean seconds."""

    seconds: float
    requests: int
    rate: float
    prompt: float
    output: float
    ttft: float
    tpot: float


def add_arguments(parser: Any) -> None:
    """Adds the flags of `plan --live`."""
    add = parser.add_argument
    add(
        "--live",
        metavar="URL",
        help="address of the proxy; needs --gpu, --profile or --coefficients",
    )
    add(
        "--window",
        metavar="SECONDS",
        type=float,
        default=60.0,
        help="time to measure traffic for (default: %(default)s)",
    )
    add(
        "--instance",
        metavar="TPxPP",
        default="1x1",
        help="parallelism of each running instance (default: %(default)s)",
    )


def run(args: argparse.Namespace, say: Callable[[str], None] | None = None) -> int:
    """Measures the traffic of a running proxy and prints the best split.

    `say` prints a progress line. Returns the exit status.
    """
    print_progress = say or (lambda line: print(line, file=sys.stderr, flush=True))
    if not 1 <= args.window <= 86_400:
        raise ConfigError(f"--window: {args.window:g} s is not between 1 s and a day")
    tp, pp = _shape(args.instance)
    url = http_client.address("--live", args.live)
    prefills, decodes = count(_page(url, "/disagg/instances"))
    gpus = (prefills + decodes) * tp * pp
    planned = flags.read(args, gpus, "more GPUs, as an --instance of")
    source = planned.scenario.prefill
    if (tp, pp) not in source.shapes(max(8, tp * pp)):
        raise ConfigError(f"--instance: {args.instance} cannot be simulated with {source.name}")
    before = parse(_page(url, "/metrics"))
    started_at = time.monotonic()
    print_progress(
        f"plan: {prefills} prefill and {decodes} decode instances;"
        f" measuring {args.window:g} s of traffic"
    )
    time.sleep(args.window)
    after = parse(_page(url, "/metrics"))
    traffic = between(before, after, time.monotonic() - started_at)
    present = Placement(ReplicaGroup(tp, pp, prefills), ReplicaGroup(tp, pp, decodes))
    scenario = _with_lengths(planned.scenario, traffic, args.workload)
    if not args.requests:
        scenario = sample_size.lasting(scenario, traffic.rate)
    scenario = refit(scenario, present, traffic)
    document = judge(scenario, present, traffic, optimizer.process_count(args.jobs))
    print(json.dumps(document) if args.json else _text(document))
    return 0


# --- pages of the proxy ---


def _page(url: str, path: str) -> bytes:
    return http_client.get(url, path, "a vllm-disagg proxy", ADMIN_KEY)


def count(body: bytes) -> tuple[int, int]:
    """Counts the prefill and decode instances that the proxy can use now."""
    try:
        rows = json.loads(body)
        roles = [row["role"] for row in rows if row["usable"] and not row.get("leaving")]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"--live: /disagg/instances is not the answer of a vllm-disagg proxy: {error!r}"
        ) from None
    if "prefill" not in roles or "decode" not in roles:
        found = f"{roles.count('prefill')} prefill and {roles.count('decode')} decode instances"
        raise ConfigError(f"--live: the proxy can use {found} now: there is no ratio to judge")
    return roles.count("prefill"), roles.count("decode")


def parse(body: bytes) -> MetricSamples:
    """Parses Prometheus text into samples by name and labels."""
    from prometheus_client.parser import text_string_to_metric_families  # noqa: PLC0415

    try:
        families = list(text_string_to_metric_families(body.decode()))
    except (ValueError, UnicodeDecodeError) as error:
        raise ConfigError(f"--live: /metrics is not Prometheus' text: {error}") from None
    samples: MetricSamples = {}
    for family in families:
        for sample in family.samples:
            samples[sample.name, frozenset(sample.labels.items())] = sample.value
    return samples


def between(before: MetricSamples, after: MetricSamples, seconds: float) -> ObservedTraffic:
    """Computes the traffic between two reads of the metrics.

    Raises ConfigError with one line if the metrics are incomplete or show too few requests.
    """
    names = {name for name, _ in after}
    for counter in COUNTERS.values():
        if not names & {counter, f"{counter}_count"}:
            raise ConfigError(
                f"--live: the proxy's metrics have no {counter}:"
                " the proxy is of an older release, or has served no request"
            )

    def increase(name: str, **labels: str) -> float:
        """Returns the increase of a counter, summed over all series with these labels."""
        total = 0.0
        for key, value in after.items():
            series_name, series_labels = key
            if series_name == name and series_labels >= labels.items():
                total += value - before.get(key, 0.0)
        return total

    requests = increase(COUNTERS["requests"], outcome="ok")
    if requests < MIN_WINDOW_REQUESTS:
        raise ConfigError(
            f"--live: {requests:.0f} requests succeeded in {seconds:.0f} s;"
            f" {MIN_WINDOW_REQUESTS} or more are needed: give more --window"
        )
    for key, value in before.items():
        if key[0] == COUNTERS["requests"] and after.get(key, value) < value:
            raise ConfigError(
                "--live: the proxy was restarted during the window: run this command again"
            )
    prompt = increase(COUNTERS["tokens"], kind="prompt")
    output = increase(COUNTERS["tokens"], kind="completion")
    if not prompt or not output:
        raise ConfigError(
            "--live: the answers state no usage, so lengths are not known: clients that stream"
            ' must ask for it with "stream_options": {"include_usage": true}'
        )
    ttft_count = increase(f"{COUNTERS['ttft']}_count")
    tpot_count = increase(f"{COUNTERS['tpot']}_count")
    if not ttft_count or not tpot_count:
        raise ConfigError("--live: no answer was streamed, so TTFT and TPOT are not known")
    return ObservedTraffic(
        seconds=seconds,
        requests=int(requests),
        rate=requests / seconds,
        prompt=prompt / requests,
        output=output / requests,
        ttft=increase(f"{COUNTERS['ttft']}_sum") / ttft_count,
        tpot=increase(f"{COUNTERS['tpot']}_sum") / tpot_count,
    )


# --- simulation of this traffic ---


def _with_lengths(scenario: Scenario, traffic: ObservedTraffic, workload_flag: str) -> Scenario:
    """Replaces the default workload by lengths like those of the traffic."""
    if workload_flag != flags.DEFAULT_WORKLOAD:
        return scenario
    spread = lengths.LengthDistribution(
        (math.log(traffic.prompt) - LENGTH_LOG_SIGMA**2 / 2, LENGTH_LOG_SIGMA),
        (math.log(max(1.0, traffic.output)) - LENGTH_LOG_SIGMA**2 / 2, LENGTH_LOG_SIGMA),
        limit=1 << 40,
    )
    work = workload.Workload(f"{traffic.prompt:.0f}:{traffic.output:.0f} as seen", lengths=spread)
    return msgspec.structs.replace(scenario, workload=work)


def refit(scenario: Scenario, present: Placement, traffic: ObservedTraffic) -> Scenario:
    """Scales prefill and decode times until the simulation has the measured mean TTFT and TPOT.

    Both means grow with the factor of their phase, so bisection finds each. The phases alternate
    because they interact: a first token needs a decode step, and slower decodes hold KV longer.
    """
    sample = scenario.samples()[0]

    def means(tried: Scenario) -> dict[str, float]:
        result = simulate(tried.deployment(present), sample, traffic.rate)
        times = {
            "prefill": [seconds for seconds in result.ttft if seconds >= 0],
            "decode": [seconds for seconds in result.tpot if seconds > 0],
        }
        if not all(times.values()):
            raise ConfigError(
                "--live: these instances cannot hold such requests, by the given model:"
                " check --instance"
            )
        return {phase: sum(values) / len(values) for phase, values in times.items()}

    for _ in range(REFIT_ROUNDS):
        for phase, measured in (("decode", traffic.tpot), ("prefill", traffic.ttft)):
            low = 1 / MAX_REFIT_FACTOR
            high = MAX_REFIT_FACTOR
            while high / low > REFIT_PRECISION_RATIO:
                middle = math.sqrt(low * high)
                if means(_scaled(scenario, phase, middle))[phase] > measured:
                    high = middle
                else:
                    low = middle
            scenario = _scaled(scenario, phase, math.sqrt(low * high))
    return scenario


def _scaled(scenario: Scenario, phase: str, factor: float) -> Scenario:
    return msgspec.structs.replace(
        scenario, **{phase: msgspec.structs.replace(getattr(scenario, phase), scale=factor)}
    )


def judge(
    scenario: Scenario, present: Placement, traffic: ObservedTraffic, jobs: int
) -> dict[str, Any]:
    """Compares the goodput of the present split with all others, and with one instance more.

    Raises ConfigError if no split of as many instances meets the objective.
    """
    tp = present.prefill.tp
    pp = present.prefill.pp
    decode = present.decode
    total = present.prefill.n + (decode.n if decode else 0)
    splits = []
    for prefills in range(1, total):
        decode_group = ReplicaGroup(tp, pp, total - prefills)
        splits.append(Placement(ReplicaGroup(tp, pp, prefills), decode_group))
    scores = optimizer.search(scenario, splits, 0, jobs, lambda *_: None)
    now = next((score for score in scores if score.placement == present), None)
    best = scores[0] if scores else None
    if not best:
        objective = scenario.objective
        raise ConfigError(
            f"--live: no split meets --ttft {objective.ttft:g} and --tpot {objective.tpot:g}"
            f" at any rate; the means are {traffic.ttft:.3g} and {traffic.tpot:.3g} s now;"
            " give more"
        )
    gain = best.goodput / now.goodput if now else None
    present_goodput = now.goodput * present.gpus if now else 0.0
    return {
        "right": gain is not None and gain <= MIN_GAIN_RATIO,
        "gain": gain,
        "present": _split(present, now),
        "best": _split(best.placement, best),
        "alternatives": [_split(score.placement, score) for score in scores],
        "one_more": {
            role: _one_more(scenario, present, role, present_goodput, jobs)
            for role in ("prefill", "decode")
        },
        "traffic": msgspec.to_builtins(traffic),
        "refit": {"prefill": scenario.prefill.scale, "decode": scenario.decode.scale},
        "headroom": present_goodput / traffic.rate,
        "setting": describe(scenario),
    }


def _one_more(
    scenario: Scenario, present: Placement, role: str, present_goodput: float, jobs: int
) -> dict[str, Any]:
    """Describes the goodput with one more instance of a role, and the gain over the present."""
    group = getattr(present, role)
    larger_group = msgspec.structs.replace(group, n=group.n + 1)
    grown = msgspec.structs.replace(present, **{role: larger_group})
    scores = optimizer.search(scenario, [grown], 0, jobs, lambda *_: None)
    found = _split(grown, scores[0] if scores else None)
    return found | {"gain": found["goodput"] / present_goodput if present_goodput else None}


def _split(placement: Placement, score: optimizer.PlacementScore | None) -> dict[str, Any]:
    """Describes a split with its goodput and its interval, in requests/s of all instances."""
    return {
        "prefill": placement.prefill.n,
        "decode": placement.decode.n if placement.decode else 0,
        "goodput": score.goodput * placement.gpus if score else 0.0,
        "ci": [edge * placement.gpus for edge in score.ci] if score else [0.0, 0.0],
    }


def _text(document: dict[str, Any]) -> str:
    """Formats the comparison for a terminal."""
    traffic = document["traffic"]
    present = document["present"]
    best = document["best"]
    factors = document["refit"]
    measured = (
        f"{traffic['requests']} requests in {traffic['seconds']:.0f} s: {traffic['rate']:.3g}/s,"
        f" mean {traffic['prompt']:.0f} tokens in and {traffic['output']:.0f} out,"
        f" TTFT {traffic['ttft']:.3g} s, TPOT {traffic['tpot']:.3g} s"
    )
    refitted = f"refitted: prefill x {factors['prefill']:.2f}, decode x {factors['decode']:.2f}"
    now = f"{present['prefill']}P{present['decode']}D: goodput {present['goodput']:.3g} requests/s"
    if document["right"]:
        verdict = "no other split of these instances gains more than 10 %: keep it"
    else:
        gain = "the present split meets the objective at no rate"
        if document["gain"]:
            gain = f"{document['gain']:.2f} times that"
        split = f"{best['prefill']}P{best['decode']}D"
        verdict = f"change to {split}: goodput {best['goodput']:.3g} requests/s, {gain}"
    lines = [measured, refitted, f"now {now}", verdict]
    for role, found in document["one_more"].items():
        gain = f", {found['gain']:.2f} times that" if found["gain"] else ""
        lines.append(f"one more {role} instance: {found['goodput']:.3g} requests/s{gain}")
    return "\n".join(lines)


def _shape(text: str) -> tuple[int, int]:
    """Parses TPxPP."""
    tp, _, pp = text.partition("x")
    if not (tp.isdecimal() and pp.isdecimal() and int(tp) and int(pp)):
        raise ConfigError(f"--instance: {text} is not TPxPP, as 2x1")
    return int(tp), int(pp)
