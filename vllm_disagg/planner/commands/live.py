"""Judges the number of prefill and decode instances of a running deployment: `plan --live URL`.

The proxy's /metrics, read at both ends of a window, give the rate, the mean lengths and the mean
times. The list of instances comes from /disagg/instances. Step times come from the engines' own
/metrics (`engine_profiles.py`), with the hand-off and the path between them. With --gpu, --profile
or --coefficients, one factor for each phase scales that model instead, until a simulation of the
present deployment under the same traffic has the measured times.

Then each split of as many instances is simulated for its goodput. Means do not show the spread of
lengths. A log-normal distribution (LENGTH_LOG_SIGMA) is assumed unless --workload gives another.
"Cannot tell" is an answer, with the measurement that would decide.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ... import http_client
from ...errors import ConfigError
from ...fleet.keys import ADMIN_KEY
from ...setting_values import GivenText
from ...workloads import lengths
from ..cost.latency import LinearLatency
from ..search import optimizer, sample_size
from ..search.placement import Placement, ReplicaGroup
from ..search.scenario import Scenario
from ..simulation import workload
from ..simulation.simulator import simulate
from . import engine_profiles, flags, plan_inputs, simulated_steps
from .live_text import cannot_tell, doubt, text
from .live_verdict import ObservedTraffic, judge
from .metric_page import MetricSamples, MetricWindow, parse

# Standard deviation of the logarithm of lengths; between DistServe's ShareGPT and Azure's traces.
LENGTH_LOG_SIGMA = 0.8
DEFAULT_WINDOW_SECONDS = 60.0
DEFAULT_INSTANCE = "1x1"
REFIT_ROUNDS = 3
MAX_REFIT_FACTOR = 64.0  # factors are between 1 / MAX_REFIT_FACTOR and MAX_REFIT_FACTOR
REFIT_PRECISION_RATIO = 1.01  # of the ends of a bisection
MIN_WINDOW_REQUESTS = 20  # means of fewer requests are too uncertain
MAX_AGGREGATED_SHARE = 0.1  # of requests without a prefill leg: simulations have none
DRAWS = 4  # of step times within their intervals

COUNTERS = {
    "requests": "vllm_disagg_requests_total",
    "tokens": "vllm_disagg_tokens_total",
    "ttft": "vllm_disagg_ttft_seconds",
    "tpot": "vllm_disagg_tpot_seconds",
}
# The proxy counts others too, such as a balancer's /v1/models, which have no prompt.
GENERATION_MODES = ("disaggregated", "whole")
# Stands for step times that the engines have not measured yet.
UNMEASURED = LinearLatency(1, (1.0, 0.0, 0.0), (1.0, 0.0, 0.0), (1.0, 0.0, 0.0))


def add_arguments(parser: Any) -> None:
    """Adds the flags of `plan --live`."""
    add = parser.add_argument
    add(
        "--live",
        action=GivenText,
        metavar="URL",
        help="address of the proxy; takes the step times that its engines measured of themselves,"
        " or one of --gpu, --profile and --coefficients, refitted",
    )
    add(
        "--window",
        metavar="SECONDS",
        type=float,
        help=f"with --live: time to measure traffic for (default: {DEFAULT_WINDOW_SECONDS:g})",
    )
    add(
        "--instance",
        metavar="TPxPP",
        help=f"parallelism of each instance of --live or --replay (default: {DEFAULT_INSTANCE})",
    )


def run(args: argparse.Namespace, say: Callable[[str], None] | None = None) -> int:
    """Measures the traffic of a running proxy and prints the best split.

    `say` prints a progress line. Returns the exit status.
    """
    print_progress = say or (lambda line: print(line, file=sys.stderr, flush=True))
    seconds = DEFAULT_WINDOW_SECONDS if args.window is None else args.window
    if not 1 <= seconds <= 86_400:
        raise ConfigError(f"--window: {seconds:g} s is not between 1 s and a day")
    tp, pp = shape_of(args.instance)
    url = http_client.address("--live", args.live)
    prefills, decodes = instances(_page(url, "/disagg/instances"))
    if not flags.has_source(args):
        _refuse_ranks([*prefills, *decodes])
    present = Placement(ReplicaGroup(tp, pp, len(prefills)), ReplicaGroup(tp, pp, len(decodes)))
    is_own = not flags.has_source(args)
    budget_flag = "more GPUs, as an --instance of"
    planned = plan_inputs.read(args, present.gpus, budget_flag, UNMEASURED if is_own else None)
    source = planned.scenario.prefill
    if not is_own and (tp, pp) not in source.shapes(max(8, tp * pp)):
        raise ConfigError(f"--instance: {tp}x{pp} cannot be simulated with {source.name}")
    print_progress(
        f"plan: {len(prefills)} prefill and {len(decodes)} decode instances;"
        f" measuring {seconds:g} s of traffic"
    )
    windows = measure(url, [*prefills, *decodes] if is_own else [], seconds)
    traffic = between(windows[url].before, windows[url].after, windows[url].seconds)
    scenario = _with_lengths(planned.scenario, traffic, args.workload)
    if not args.requests:
        scenario = sample_size.lasting(scenario, traffic.rate)
    jobs = optimizer.process_count(args.jobs)
    if traffic.aggregated > MAX_AGGREGATED_SHARE:
        reason = (
            f"decode instances computed {traffic.aggregated:.0%} of the requests whole, and each"
            " simulated one has two legs: a window without --spill and --min-prompt-bytes decides"
        )
        document = cannot_tell(reason, msgspec.to_builtins(traffic))
    elif is_own:
        read = engine_profiles.read
        profile = engine_profiles.disaggregated(
            windows[url],
            [read(engine, windows[engine]) for engine in prefills],
            [read(engine, windows[engine]) for engine in decodes],
        )
        document = judge_measured(
            scenario, present, traffic, profile, args.link, jobs, not args.requests
        )
    elif reason := doubt(traffic.queue, traffic.ttft):
        document = cannot_tell(reason, msgspec.to_builtins(traffic))
    else:
        scenario = refit(scenario, present, traffic)
        document = judge(scenario, present, traffic, jobs, may_grow=not args.requests)
    print(json.dumps(document) if args.json else text(document))
    return 0


# --- pages of the proxy ---


def _page(url: str, path: str) -> bytes:
    return http_client.get(url, path, "a vllm-disagg proxy", ADMIN_KEY)


MetricPages = dict[str, tuple[float, MetricSamples]]  # by address: when it was read, and what


def measure(proxy: str, engines: Sequence[str], seconds: float) -> dict[str, MetricWindow]:
    """Reads the metrics of the proxy and of engines at both ends of a window; by address."""
    before = read_pages(proxy, engines)
    time.sleep(seconds)
    return windows_between(before, read_pages(proxy, engines))


def read_pages(proxy: str, engines: Sequence[str]) -> MetricPages:
    """Reads the metrics of the proxy and of engines."""
    pages = {}
    for url, server in ({proxy: "a vllm-disagg proxy"} | dict.fromkeys(engines, "a vLLM")).items():
        body = http_client.get(url, "/metrics", server, ADMIN_KEY if url == proxy else "")
        pages[url] = time.monotonic(), parse(body, url)
    return pages


def windows_between(before: MetricPages, later: MetricPages) -> dict[str, MetricWindow]:
    """Returns the window between two reads, by address."""
    windows = {}
    for url, (ended_at, after) in later.items():
        started_at, samples = before[url]
        windows[url] = MetricWindow(samples, after, ended_at - started_at)
    return windows


def instances(body: bytes) -> tuple[list[str], list[str]]:
    """Returns the addresses of the prefill and decode instances that the proxy can use now."""
    try:
        rows = json.loads(body)
        usable = [row for row in rows if row["usable"] and not row.get("leaving")]
        prefills = [row["url"] for row in usable if row["role"] == "prefill"]
        decodes = [row["url"] for row in usable if row["role"] == "decode"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ConfigError(
            "--live: /disagg/instances is not the answer of a vllm-disagg proxy: give its URL"
        ) from None
    if not prefills or not decodes:
        found = f"{len(prefills)} prefill and {len(decodes)} decode instances"
        raise ConfigError(f"--live: the proxy can use {found} now: there is no ratio to judge")
    return prefills, decodes


def _refuse_ranks(engines: Sequence[str]) -> None:
    """Raises ConfigError for a data parallel rank: its metrics page has those of the others, too.

    Its address, URL@RANK, is also none that can be asked for a page.
    """
    for url in engines:
        if "@" in url:
            raise ConfigError(
                f"--live: {url} is a data parallel rank, whose own steps are not read yet: give"
                " --gpu, --profile or --coefficients"
            )


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

    window = MetricWindow(before, after, seconds)
    increase = window.increase
    generated = {
        mode: increase(COUNTERS["requests"], outcome="ok", mode=mode) for mode in GENERATION_MODES
    }
    requests = sum(generated.values())
    if requests < MIN_WINDOW_REQUESTS:
        raise ConfigError(
            f"--live: {requests:.0f} requests of generation succeeded in {seconds:.0f} s;"
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
        queue=window.mean("vllm_disagg_queue_seconds"),
        aggregated=generated["whole"] / requests,
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


def judge_measured(
    scenario: Scenario,
    present: Placement,
    traffic: ObservedTraffic,
    profile: engine_profiles.FleetProfile,
    link: str,
    jobs: int,
    may_grow: bool,
) -> dict[str, Any]:
    """Judges with the engines' own step times, hand-off and path; `link`: the flag, or empty."""
    facts = engine_profiles.facts(profile)
    if reason := engine_profiles.uncertain(profile):
        return cannot_tell(reason, msgspec.to_builtins(traffic)) | {"engines": facts}
    ranks = present.prefill.tp * present.prefill.pp
    measured = engine_profiles.scenario_of(scenario, profile, 0 if link else ranks)
    alternatives = []
    draws = zip(profile.prefill.steps.draws(DRAWS), profile.decode.steps.draws(DRAWS), strict=True)
    for prefill, decode in draws:
        alternatives.append(engine_profiles.with_latencies(measured, prefill, decode))
    document = judge(measured, present, traffic, jobs, alternatives, may_grow)
    means = simulated_means(measured, present, traffic.rate)
    document |= {"engines": facts, "simulated": means}
    document["assumed"] = simulated_steps.assumptions(measured)
    document["setting"]["latency"] = dict.fromkeys(("prefill", "decode"), "the engines' own steps")
    waits = doubt(traffic.queue, traffic.ttft)
    document["overloaded"] = bool(waits)
    reason = simulated_steps.beyond(measured, present, profile, document)
    # A queue that grows has no mean to compare.
    if not reason and not waits:
        reason = engine_profiles.unexplained(means, traffic.ttft, traffic.tpot)
    if reason:
        document |= {"verdict": "cannot tell", "right": False, "why": reason}
    return document


def simulated_means(scenario: Scenario, present: Placement, rate: float) -> dict[str, float]:
    """Returns the mean TTFT and TPOT of the present split at the measured rate, as simulated."""
    result = simulate(scenario.deployment(present), scenario.samples()[0], rate)
    found = {}
    for name, values in (("ttft", result.ttft), ("tpot", result.tpot)):
        served = [seconds for seconds in values if seconds > 0]
        found[name] = sum(served) / len(served) if served else 0.0
    return found


def shape_of(text: str | None) -> tuple[int, int]:
    """Parses TPxPP; None is the default."""
    text = DEFAULT_INSTANCE if text is None else text
    match = re.fullmatch(r"([1-9][0-9]{0,3})x([1-9][0-9]{0,3})", text)
    if not match:
        raise ConfigError(f"--instance: {text[:80]} is not TPxPP, as 2x1")
    return int(match[1]), int(match[2])
