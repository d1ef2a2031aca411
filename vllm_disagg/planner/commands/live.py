"""Judges the number of prefill and decode instances of a running deployment: `plan --live URL`.

The proxy's /metrics, read at both ends of a window, give the rate, the mean lengths and the mean
times. The list of instances comes from /disagg/instances. One factor for each phase scales the
given latency model, so that a simulation of the present deployment under the same traffic has the
measured times. Then each split of as many instances is simulated for its goodput. Means do not tell
the spread of lengths: a log-normal distribution (LENGTH_LOG_SIGMA) is assumed unless --workload
gives another.
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
from ..search import optimizer
from ..search.advice import MIN_GAIN_RATIO
from ..search.scenario import Placement, ReplicaGroup, Scenario
from ..simulation import workload
from ..simulation.simulator import simulate
from . import flags
from .output import describe

LENGTH_LOG_SIGMA = 0.8  # of the lengths' logarithm; between DistServe's ShareGPT and Azure's traces
REFIT_ROUNDS = 3  # of refitting
MAX_REFIT_FACTOR = 64.0  # a refit's factors are between 1 / REACH and REACH
REFIT_PRECISION_RATIO = 1.01  # and as close to what is right
MIN_WINDOW_REQUESTS = 20  # requests in a window, for means that mean something

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
    add("--live", metavar="URL", help="the proxy; together with --gpu, --profile or --coefficients")
    add(
        "--window",
        metavar="SECONDS",
        type=float,
        default=60.0,
        help="of traffic to look at (default: %(default)s)",
    )
    add(
        "--instance",
        metavar="TPxPP",
        default="1x1",
        help="of each instance that runs (default: %(default)s)",
    )


def run(args: argparse.Namespace, say: Callable[[str], None] | None = None) -> int:
    """Measures the traffic of a running proxy and prints the best split. Returns the exit status."""
    tell = say or (lambda line: print(line, file=sys.stderr, flush=True))
    if not 1 <= args.window <= 86_400:
        raise ConfigError(f"--window: {args.window:g} s is not between 1 s and a day")
    tp, pp = _shape(args.instance)
    url = http_client.address("--live", args.live)
    prefills, decodes = count(_page(url, "/disagg/instances"))
    planned = flags.read(args, (prefills + decodes) * tp * pp, "more GPUs, as an --instance of")
    if (tp, pp) not in planned.scenario.prefill.shapes(max(8, tp * pp)):
        raise ConfigError(
            f"--instance: {args.instance} cannot be simulated with {planned.scenario.prefill.name}"
        )
    before = parse(_page(url, "/metrics"))
    began = time.monotonic()
    tell(
        f"plan: {prefills} prefill and {decodes} decode instances; looking at {args.window:g} s of traffic"
    )
    time.sleep(args.window)
    traffic = between(before, parse(_page(url, "/metrics")), time.monotonic() - began)
    present = Placement(ReplicaGroup(tp, pp, prefills), ReplicaGroup(tp, pp, decodes))
    scenario = refit(_under(planned.scenario, traffic, args.workload), present, traffic)
    document = judge(scenario, present, traffic, optimizer.process_count(args.jobs))
    print(json.dumps(document) if args.json else _text(document))
    return 0


# --- what the proxy says ---


def _page(url: str, path: str) -> bytes:
    return http_client.get(url, path, "a vllm-disagg proxy", ADMIN_KEY)


def count(body: bytes) -> tuple[int, int]:
    """Counts the prefill and decode instances that the proxy can use now."""
    try:
        rows = json.loads(body)
        roles = [row["role"] for row in rows if row["usable"] and not row.get("leaving")]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"--live: /disagg/instances is not what a vllm-disagg proxy answers: {error!r}"
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
    return {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}


def between(before: MetricSamples, after: MetricSamples, seconds: float) -> ObservedTraffic:
    """Computes the traffic between two reads of the metrics.

    Raises ConfigError with one line if the metrics are incomplete or show too few requests.
    """
    names = {name for name, _ in after}
    for counter in COUNTERS.values():
        if not names & {counter, f"{counter}_count"}:
            raise ConfigError(
                f"--live: the proxy's metrics have no {counter}: it is of an older release, or served nothing"
            )

    def gained(name: str, **labels: str) -> float:
        wanted = labels.items()
        return sum(
            v - before.get(key, 0.0)
            for key, v in after.items()
            if key[0] == name and key[1] >= wanted
        )

    requests = gained(COUNTERS["requests"], outcome="ok")
    if requests < MIN_WINDOW_REQUESTS:
        raise ConfigError(
            f"--live: {requests:.0f} requests ended well in {seconds:.0f} s;"
            f" {MIN_WINDOW_REQUESTS} or more are needed: give more --window"
        )
    if any(
        after[key] < value
        for key, value in before.items()
        if key in after and key[0] == COUNTERS["requests"]
    ):
        raise ConfigError("--live: the proxy was started again meanwhile: ask once more")
    prompt = gained(COUNTERS["tokens"], kind="prompt")
    output = gained(COUNTERS["tokens"], kind="completion")
    times = {
        name: (gained(f"{COUNTERS[name]}_sum"), gained(f"{COUNTERS[name]}_count"))
        for name in ("ttft", "tpot")
    }
    if not prompt or not output:
        raise ConfigError(
            "--live: the answers state no usage, so lengths are not known: clients that stream must ask for it with"
            ' "stream_options": {"include_usage": true}'
        )
    if not all(n for _, n in times.values()):
        raise ConfigError("--live: no answer was streamed, so TTFT and TPOT are not known")
    return ObservedTraffic(
        seconds,
        int(requests),
        requests / seconds,
        prompt / requests,
        output / requests,
        *(total / n for total, n in times.values()),
    )


# --- what follows ---


def _under(scenario: Scenario, traffic: ObservedTraffic, asked: str) -> Scenario:
    """Replaces the default workload by lengths like those of the traffic."""
    if asked != flags.DEFAULT_WORKLOAD:
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
        outcome = simulate(tried.deployment(present), sample, traffic.rate)
        found = {
            "prefill": [t for t in outcome.ttft if t >= 0],
            "decode": [t for t in outcome.tpot if t > 0],
        }
        if not all(found.values()):
            raise ConfigError(
                "--live: these instances cannot hold such requests, by the model given: check --instance"
            )
        return {phase: sum(times) / len(times) for phase, times in found.items()}

    for _ in range(REFIT_ROUNDS):
        for phase, seen in (("decode", traffic.tpot), ("prefill", traffic.ttft)):
            low = 1 / MAX_REFIT_FACTOR
            high = MAX_REFIT_FACTOR
            while high / low > REFIT_PRECISION_RATIO:
                middle = math.sqrt(low * high)
                low, high = (
                    (low, middle)
                    if means(_scaled(scenario, phase, middle))[phase] > seen
                    else (middle, high)
                )
            scenario = _scaled(scenario, phase, math.sqrt(low * high))
    return scenario


def _scaled(scenario: Scenario, phase: str, factor: float) -> Scenario:
    return msgspec.structs.replace(
        scenario, **{phase: msgspec.structs.replace(getattr(scenario, phase), scale=factor)}
    )


def judge(
    scenario: Scenario, present: Placement, traffic: ObservedTraffic, jobs: int
) -> dict[str, Any]:
    """Compares the goodput of the present split with every other split, and with one instance more."""
    tp = present.prefill.tp
    pp = present.prefill.pp
    decode = present.decode
    total = present.prefill.n + (decode.n if decode else 0)
    splits = [
        Placement(ReplicaGroup(tp, pp, n), ReplicaGroup(tp, pp, total - n)) for n in range(1, total)
    ]
    scores = optimizer.search(scenario, splits, 0, jobs, lambda *_: None)
    now = next((score for score in scores if score.placement == present), None)
    best = scores[0] if scores else None
    if not best:
        raise ConfigError(
            f"--live: no split meets --ttft {scenario.objective.ttft:g} and --tpot {scenario.objective.tpot:g} at any rate;"
            f" means now are {traffic.ttft:.3g} and {traffic.tpot:.3g} s: give more"
        )
    gain = best.goodput / now.goodput if now else None
    right = gain is not None and gain <= MIN_GAIN_RATIO
    held = now.goodput * present.gpus if now else 0.0
    return {
        "right": right,
        "gain": gain,
        "present": _split(present, now),
        "best": _split(best.placement, best),
        "alternatives": [_split(score.placement, score) for score in scores],
        "one_more": {
            role: _one_more(scenario, present, role, held, jobs) for role in ("prefill", "decode")
        },
        "traffic": msgspec.to_builtins(traffic),
        "refit": {"prefill": scenario.prefill.scale, "decode": scenario.decode.scale},
        "headroom": held / traffic.rate,
        "setting": describe(scenario),
    }


def _one_more(
    scenario: Scenario, present: Placement, role: str, held: float, jobs: int
) -> dict[str, Any]:
    group = getattr(present, role)
    grown = msgspec.structs.replace(
        present, **{role: msgspec.structs.replace(group, n=group.n + 1)}
    )
    scores = optimizer.search(scenario, [grown], 0, jobs, lambda *_: None)
    found = _split(grown, scores[0] if scores else None)
    return found | {"gain": found["goodput"] / held if held else None}


def _split(placement: Placement, score: optimizer.PlacementScore | None) -> dict[str, Any]:
    return {
        "prefill": placement.prefill.n,
        "decode": placement.decode.n if placement.decode else 0,
        "goodput": score.goodput * placement.gpus if score else 0.0,
        "ci": [edge * placement.gpus for edge in score.ci] if score else [0.0, 0.0],
    }


def _text(document: dict[str, Any]) -> str:
    traffic = document["traffic"]
    present = document["present"]
    best = document["best"]
    seen = f"{traffic['requests']} requests in {traffic['seconds']:.0f} s: {traffic['rate']:.3g}/s, mean"
    seen += f" {traffic['prompt']:.0f} tokens in and {traffic['output']:.0f} out, TTFT {traffic['ttft']:.3g} s,"
    seen += f" TPOT {traffic['tpot']:.3g} s"
    factors = f"refitted: prefill x {document['refit']['prefill']:.2f}, decode x {document['refit']['decode']:.2f}"
    now = f"now {present['prefill']}P{present['decode']}D: good for {present['goodput']:.3g} requests/s"
    if document["right"]:
        verdict = "no other split of these instances gains more than 10 %: keep it"
    else:
        gain = (
            f"{document['gain']:.2f} times that"
            if document["gain"]
            else "where the present split meets them at no rate"
        )
        change = f"{best['prefill']}P{best['decode']}D: good for {best['goodput']:.3g} requests/s, {gain}"
        verdict = f"change to {change}"
    more = []
    for role, found in document["one_more"].items():
        gain = f", {found['gain']:.2f} times that" if found["gain"] else ""
        more.append(f"one more {role} instance: {found['goodput']:.3g} requests/s{gain}")
    return "\n".join([seen, factors, now, verdict, *more])


def _shape(text: str) -> tuple[int, int]:
    tp, _, pp = text.partition("x")
    if not (tp.isdecimal() and pp.isdecimal() and int(tp) and int(pp)):
        raise ConfigError(f"--instance: {text} is not TPxPP, as 2x1")
    return int(tp), int(pp)
