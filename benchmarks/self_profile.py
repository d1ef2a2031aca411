"""Predictions from the engines' own step profiles, beside what is measured; and a profile's cost.

    python benchmarks/self_profile.py MODEL [--only STACK ...] [--seconds N] [--save FILE]
    python benchmarks/self_profile.py --cost

Real CPU engines of a tiny model, with one core each for their model's threads:

  disaggregated  1 prefill and 1 decode engine with our connector, and the proxy
  colocated      2 engines with our connector behind the same proxy, which sends whole requests

For each stack and each of three workloads: a closed loop of 1, 2 and 4 clients for N seconds, from
which the engines' own profiles, the hand-off and the path are read; nothing is fitted later. They
predict the goodput, and the median TTFT at three rates around it. Then the same requests are sent
at these rates, for N seconds each, and measured. Goodput is where attainment falls to 90 %
(`attainment.py`): more rates are sent, until the predicted and the measured attainment cross it
between two rates close to each other. Those around the measured goodput are sent again, with other
requests, 100 at least. Prediction and measurement have the same requests at each rate.

The engines measure their steps in each run too. Behind a run stand the seconds of its steps as
multiples of those that the profile gives steps of this composition, the mean sequences of a step
that decodes and the path, and in brackets the last two in the profile's window. With a multiple of
1.0 the profile knows the steps of the run, and an error of the prediction is elsewhere.

`--cost` measures how long the connector takes for one step's composition and sums.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import timeit
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from attainment import RateCount, bracket, goodput_interval, next_rate, rate_to_repeat
from processes import free_port
from stack import COMMAND, KEY_FILE, Stack, start_pair, start_proxy

from vllm_disagg.errors import ConfigError
from vllm_disagg.planner.commands import engine_profiles, live
from vllm_disagg.planner.commands.metric_page import MetricWindow
from vllm_disagg.planner.cost import model
from vllm_disagg.planner.cost.hardware import LINKS
from vllm_disagg.planner.search.scenario import (
    PerformanceSource,
    Placement,
    ReplicaGroup,
    Scenario,
)
from vllm_disagg.planner.simulation.simulator import Deployment, Objective, simulate
from vllm_disagg.planner.simulation.workload import Arrivals, Workload, WorkloadSample
from vllm_disagg.product_sums import steps_by_kind
from vllm_disagg.sums_fit import Sums

OBJECTIVE = Objective(ttft=1.0, tpot=0.1, attainment=0.9)
LONGEST_PROMPT_TOKENS = 1000
# Medians and sigmas of log-normal lengths, of prompts and answers.
WORKLOADS = {
    "chat": ((200, 0.6), (16, 0.6)),
    "long prompts": ((500, 0.4), (8, 0.4)),
    "long answers": ((100, 0.4), (48, 0.4)),
}
STACKS = ("disaggregated", "colocated")
CLIENTS = (1, 2, 4)  # of the closed loop, one after the other
RATE_RATIOS = (0.7, 0.95, 1.25)  # of the predicted goodput
FURTHER_RATIO = 1.4  # between further rates, which are sent for the goodput only
CLOSE_RATIO = 1.15  # of the two rates around a goodput
MAX_FURTHER_RATES = 6
REPEATED_RUNS = 4  # of rates around the measured goodput
SAMPLE_REQUESTS = 8000
MAX_REQUESTS = 2000  # of a run
MIN_REQUESTS = 30
MIN_REPEATED_REQUESTS = 100  # of a run of a rate around the measured goodput
WARM_UP_SECONDS = 3.0
EXPORT_SECONDS = 1.2  # after which the next step exports all sums
REQUEST_TIMEOUT_SECONDS = 60.0
# The targets of the planner: relative errors.
MAX_GOODPUT_ERROR = 0.15
MAX_TTFT_ERROR = 0.25
COST_STEPS = 200  # of one timing: few, so that some run without another process
STEP_SHAPES = ((1, 0), (64, 0), (256, 0), (64, 1), (256, 2))  # sequences, prompts


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--cost", action="store_true", help="only the cost of a step")
    parser.add_argument("--only", nargs="+", choices=STACKS, default=STACKS)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--seconds", type=float, default=15.0, help="of each run (default: 15)")
    parser.add_argument(
        "--dtype", default="bfloat16", help="of the engines; float32 on CPUs without AVX-512"
    )
    parser.add_argument("--save", metavar="FILE", default="", help="JSON file of all rows")
    args = parser.parse_args()
    if args.cost:
        return print_cost()
    if not args.model:
        parser.error("name the folder of a model, or give --cost")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("self_profile: stopped"))
    rows = []
    with tempfile.TemporaryDirectory(prefix="self-profile") as folder:
        for name in args.only:
            rows += run_stack(name, args, Path(folder))
    if args.save:
        Path(args.save).write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps(summary(rows)))
    return 0


# --- stacks ---


def run_stack(name: str, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Starts a stack and compares prediction and measurement for each workload."""
    stack = Stack(name, args.dtype)
    logs = folder / name
    logs.mkdir()
    try:
        if name == "disaggregated":
            engines = list(start_pair(stack, args.model, logs, {}))
            wait_all(stack, engines)
            front = start_proxy(stack, logs, *engines)
        else:
            engines = start_both(stack, args.model, logs)
            front = start_colocated_proxy(stack, logs, engines)
        return [compare(name, kind, front, engines, args) for kind in args.workloads]
    finally:
        stack.stop()


def wait_all(stack: Stack, engines: Sequence[str]) -> None:
    for url in engines:
        stack.wait(url, "/health")


def start_both(stack: Stack, folder: str, logs: Path) -> list[str]:
    """Starts two engines with our connector, for whole requests."""
    key = str(logs / KEY_FILE)
    subprocess.run([*COMMAND, "key", key], check=True)
    config = {
        "kv_connector": "DisaggConnector",
        "kv_connector_extra_config": {"key_file": key},
        "kv_role": "kv_both",
    }
    engines = [stack.engine(folder, logs / f"both{core}.log", core, config) for core in (0, 1)]
    wait_all(stack, engines)
    return engines


def start_colocated_proxy(stack: Stack, logs: Path, engines: Sequence[str]) -> str:
    """Starts a proxy that has no prefill instance, so that each request stays whole."""
    port = str(free_port())
    words = ["proxy", "--port", port, "--key-file", str(logs / KEY_FILE)]
    for url in engines:
        words += ["--decode", url]
    stack.start(logs / "proxy.log", [*COMMAND, *words])
    front = f"http://127.0.0.1:{port}"
    stack.wait(front, "/readiness")
    return front


# --- requests ---


def draw(kind: str) -> WorkloadSample:
    """Draws the requests of a workload: the same ones each time."""
    chance = random.Random(kind)
    (prompt, prompt_sigma), (answer, answer_sigma) = WORKLOADS[kind]
    prompts = []
    answers = []
    gaps = [0.0]
    for _ in range(SAMPLE_REQUESTS):
        length = round(prompt * chance.lognormvariate(0, prompt_sigma))
        prompts.append(min(LONGEST_PROMPT_TOKENS, max(8, length)))
        answers.append(max(2, round(answer * chance.lognormvariate(0, answer_sigma))))
        gaps.append(chance.expovariate(1.0))
    return WorkloadSample(prompts, answers, gaps[:SAMPLE_REQUESTS])


def part(sample: WorkloadSample, start: int, count: int) -> WorkloadSample:
    """Returns so many requests of a sample; the first ones, where it has not so many from there."""
    start = start if start + count <= len(sample) else 0
    end = start + count
    gaps = [0.0, *sample.gaps[start + 1 : end]]
    return WorkloadSample(sample.prompts[start:end], sample.outputs[start:end], gaps)


def send(front: str, prompt: int, answer: int) -> tuple[float, float]:
    """Sends a request; returns TTFT and TPOT at the client, (-1, -1) after a failure."""
    body = {
        "model": "tiny",
        "prompt": random.choices(range(10, 1000), k=prompt),
        "max_tokens": answer,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
    }
    address = front.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=REQUEST_TIMEOUT_SECONDS)
    times = []
    try:
        began = time.monotonic()
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        if reply.status != http.client.OK:
            return -1.0, -1.0
        for line in reply:
            if line.startswith(b"data: {") and b'"choices":[]' not in line:
                times.append(time.monotonic() - began)
    except (OSError, http.client.HTTPException):
        return -1.0, -1.0
    finally:
        connection.close()
    if not times:
        return -1.0, -1.0
    return times[0], (times[-1] - times[0]) / (answer - 1)


def closed_loop(front: str, sample: WorkloadSample, seconds: float) -> None:
    """Sends requests for some seconds, of few clients and then of more."""
    turn = iter(range(len(sample)))
    lock = threading.Lock()

    def client(until: float) -> None:
        while time.monotonic() < until:
            with lock:
                r = next(turn)
            send(front, sample.prompts[r], sample.outputs[r])

    for count in CLIENTS:
        until = time.monotonic() + seconds / len(CLIENTS)
        run_all([partial(client, until)] * count)


def open_loop(front: str, sample: WorkloadSample, rate: float) -> list[tuple[float, float]]:
    """Sends the requests of a sample at a rate; returns the TTFT and TPOT of each."""
    found = [(-1.0, -1.0)] * len(sample)
    began = time.monotonic()

    def request(r: int, at: float) -> None:
        time.sleep(max(0.0, began + at - time.monotonic()))
        found[r] = send(front, sample.prompts[r], sample.outputs[r])

    arrivals = sample.arrivals(rate)
    run_all([partial(request, r, at) for r, at in enumerate(arrivals)])
    return found


def run_all(calls: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# --- prediction beside measurement ---


@dataclass(frozen=True)
class Case:
    """A stack under a workload, with what its engines have measured before."""

    name: str
    front: str
    engines: list[str]
    sample: WorkloadSample
    profile: engine_profiles.FleetProfile
    deployment: Deployment
    seconds: float  # of a run


def compare(
    name: str, kind: str, front: str, engines: list[str], args: argparse.Namespace
) -> dict[str, Any]:
    """Predicts a workload from the engines' own profiles, and measures it."""
    sample = draw(kind)
    closed_loop(front, sample, WARM_UP_SECONDS)
    profile = read_profile(name, front, engines, sample, args.seconds)
    deployment = deployment_of(name, profile, args.model)
    goodput = find_goodput(deployment, part(sample, 0, 200))
    print(f"{name}, {kind}: {words(profile)}; predicted {goodput:.2f} req/s", flush=True)
    case = Case(name, front, engines, sample, profile, deployment, args.seconds)
    runs = [compare_at(case, ratio * goodput, 0) for ratio in RATE_RATIOS]
    add_runs(case, runs)
    found = judge(runs)
    print(f"  {goodput_words(found)}", flush=True)
    return {
        "stack": name,
        "workload": kind,
        "goodput": found,
        "rates": runs[: len(RATE_RATIOS)],
        "further_runs": runs[len(RATE_RATIOS) :],
        "profile": engine_profiles.facts(profile),
    }


def add_runs(case: Case, runs: list[dict[str, Any]]) -> None:
    """Adds runs at other rates, then more of those around the measured goodput."""
    limit = OBJECTIVE.attainment
    for _ in range(MAX_FURTHER_RATES):
        measured, said = counts(runs, "met"), counts(runs, "met_predicted")
        rate = next_rate(measured, said, limit, step=FURTHER_RATIO, precision=CLOSE_RATIO)
        if not rate:
            break
        runs.append(compare_at(case, rate, 0))
    for _ in range(REPEATED_RUNS):
        again = rate_to_repeat(counts(runs, "met"), limit)
        if not again:
            break
        runs.append(compare_at(case, again.rate, again.sent, MIN_REPEATED_REQUESTS))


def counts(runs: list[dict[str, Any]], name: str) -> list[RateCount]:
    """Returns the requests of each run that met the objective: met, or met_predicted."""
    return [RateCount(run["rate"], run[name], run["requests"]) for run in runs]


def judge(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Compares the predicted goodput with the measured one, of the same runs."""
    limit = OBJECTIVE.attainment
    ends = [bracket(counts(runs, name), limit) for name in ("met_predicted", "met")]
    predicted, measured = (found.goodput if found else math.nan for found in ends)
    return {
        "predicted": predicted,
        "measured": measured,
        "interval": goodput_interval(counts(runs, "met"), limit),
        "error": predicted / measured - 1,
    }


def goodput_words(found: dict[str, Any]) -> str:
    low, high = found["interval"]
    return (
        f"goodput {found['predicted']:.2f} predicted, {found['measured']:.2f} measured"
        f" ({found['error']:+.0%}), with 95 % chance {low:.2f} to {high:.2f}"
    )


def compare_at(case: Case, rate: float, start: int, least: int = MIN_REQUESTS) -> dict[str, Any]:
    """Predicts and measures the requests of a sample from `start` that come in some seconds.

    There are `least` of them or more.
    """
    count = min(MAX_REQUESTS, max(least, round(rate * case.seconds)))
    sent = part(case.sample, start, count)
    predicted = simulate(case.deployment, sent, rate)
    said = list(zip(predicted.ttft, predicted.tpot, strict=True))
    export_sums(case.front, len(case.engines))
    before = live.read_pages(case.front, case.engines)
    measured = open_loop(case.front, sent, rate)
    export_sums(case.front, len(case.engines))
    windows = live.windows_between(before, live.read_pages(case.front, case.engines))
    row = rate_row(rate, said, measured) | steps_of(case, windows)
    print(f"  {row_words(row, case.profile)}", flush=True)
    return row


def row_words(row: dict[str, Any], profile: engine_profiles.FleetProfile) -> str:
    before = mean_sequences(profile.decode.steps.sums)
    return (
        f"{row['rate']:6.2f} req/s: TTFT median {row['predicted']:.3f} predicted,"
        f" {row['measured']:.3f} measured ({row['error']:+.0%}); attained"
        f" {row['met_predicted'] / row['requests']:.0%}, {row['met'] / row['requests']:.0%}; steps"
        f" with prompts {row['prompt_steps_ratio']:.2f} and decodes"
        f" {row['decode_steps_ratio']:.2f} of those predicted, {row['sequences']:.1f} sequences"
        f" ({before:.1f}), path {1e3 * row['path']:.0f} ms ({1e3 * profile.path:.0f})"
    )


def export_sums(front: str, engines: int) -> None:
    """Has each engine export its sums: with the end of a step, a second after the last time."""
    time.sleep(EXPORT_SECONDS)
    run_all([partial(send, front, 8, 2)] * engines)


def steps_of(case: Case, windows: dict[str, MetricWindow]) -> dict[str, float]:
    """Compares the steps of a run with those that the profile gives steps of this composition."""
    try:
        run = profile_of(case.name, case.front, case.engines, windows)
    except ConfigError:  # too few steps, or an engine that was started again
        return dict.fromkeys(
            ("prompt_steps_ratio", "decode_steps_ratio", "sequences", "path"), math.nan
        )
    _, prompts = steps_by_kind(run.prefill.steps.sums)
    decodes, _ = steps_by_kind(run.decode.steps.sums)
    return {
        "prompt_steps_ratio": case.profile.prefill.steps.slowness(prompts),
        "decode_steps_ratio": case.profile.decode.steps.slowness(decodes),
        "sequences": mean_sequences(run.decode.steps.sums),
        "path": run.path,
    }


def mean_sequences(sums: Sums) -> float:
    """Returns the mean sequences of a step that only decodes."""
    decodes, _ = steps_by_kind(sums)
    return decodes["steps*sequences"] / decodes["steps*steps"]


def read_profile(
    name: str, front: str, engines: list[str], sample: WorkloadSample, seconds: float
) -> engine_profiles.FleetProfile:
    """Reads the profiles of a window in which a closed loop runs."""
    loop = threading.Thread(target=closed_loop, args=(front, sample, seconds + 1.0))
    loop.start()
    windows = live.measure(front, engines, seconds)
    loop.join()
    return profile_of(name, front, engines, windows)


def profile_of(
    name: str, front: str, engines: list[str], windows: dict[str, MetricWindow]
) -> engine_profiles.FleetProfile:
    """Fits the engines of a stack to a window."""
    read = [engine_profiles.read(url, windows[url]) for url in engines]
    if name == "disaggregated":
        return engine_profiles.disaggregated(windows[front], read[:1], read[1:])
    return engine_profiles.colocated(windows[front], read)


def deployment_of(name: str, profile: engine_profiles.FleetProfile, folder: str) -> Deployment:
    """Builds the simulated deployment, from the profile only."""
    source = PerformanceSource("live", "the engines", model.load(folder), fitted=live.UNMEASURED)
    scenario = Scenario(
        prefill=source,
        decode=source,
        workload=Workload("sent", fixed=(1, 1)),
        arrivals=Arrivals("poisson"),
        objective=OBJECTIVE,
        link=LINKS["loopback"],
    )
    measured = engine_profiles.scenario_of(scenario, profile, 1)
    if name == "disaggregated":
        return measured.deployment(Placement(ReplicaGroup(1, 1, 1), ReplicaGroup(1, 1, 1)))
    budget = measured.limits(measured.prefill).budget
    return measured.deployment(Placement(ReplicaGroup(1, 1, 2), None, budget))


def find_goodput(deployment: Deployment, sample: WorkloadSample) -> float:
    """Returns the highest rate, within 2 %, at which the simulation attains the objective."""
    low = 0.05
    high = 200.0
    while high / low > 1.02:
        rate = (low * high) ** 0.5
        if simulate(deployment, sample, rate).attainment(OBJECTIVE) >= OBJECTIVE.attainment:
            low = rate
        else:
            high = rate
    return low


def rate_row(
    rate: float, said: list[tuple[float, float]], measured: list[tuple[float, float]]
) -> dict[str, float]:
    """Compares the median TTFT and the attainment at one rate."""
    predicted = median(said)
    found = median(measured)
    return {
        "rate": rate,
        "requests": len(measured),
        "failed": sum(ttft < 0 for ttft, _ in measured),
        "predicted": predicted,
        "measured": found,
        "error": predicted / found - 1,
        "met_predicted": met(said),
        "met": met(measured),
    }


def median(times: list[tuple[float, float]]) -> float:
    served = [ttft for ttft, _ in times if ttft >= 0]
    return statistics.median(served) if served else float("nan")


def met(times: list[tuple[float, float]]) -> int:
    """Returns how many requests met the objective."""
    return sum(0 <= ttft <= OBJECTIVE.ttft and tpot <= OBJECTIVE.tpot for ttft, tpot in times)


def words(profile: engine_profiles.FleetProfile) -> str:
    """Describes a profile in a line."""
    facts = engine_profiles.facts(profile)
    steps = []
    for role in ("prefill", "decode"):
        found = facts[role]
        steps.append(f"{role} step {1e3 * found['seconds']:.1f} ms +- {found['error']:.0%}")
    between = f"hand-off {1e3 * facts['handoff']:.1f} ms, path {1e3 * facts['path']:.1f} ms"
    return ", ".join([*steps, between])


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the worst errors and the shares within the targets."""
    # A goodput that was not found misses its target.
    goodputs = [abs(row["goodput"]["error"]) for row in rows]
    found = [error for error in goodputs if math.isfinite(error)]
    errors = [abs(rate["error"]) for row in rows for rate in row["rates"]]
    ttfts = [error for error in errors if math.isfinite(error)]
    return {
        "goodput_error_worst": round(max(found), 3) if found else None,
        "goodput_not_found": len(goodputs) - len(found),
        "goodput_within_target": sum(error <= MAX_GOODPUT_ERROR for error in goodputs),
        "ttft_error_worst": round(max(ttfts), 3) if ttfts else None,
        "ttft_within_target": sum(error <= MAX_TTFT_ERROR for error in ttfts),
        "workloads": len(goodputs),
        "rates": len(errors),
        "failed": sum(int(rate["failed"]) for row in rows for rate in row["rates"]),
        "goodput_within_interval": sum(
            row["goodput"]["interval"][0]
            <= row["goodput"]["predicted"]
            <= row["goodput"]["interval"][1]
            for row in rows
        ),
    }


# --- cost ---


def print_cost() -> int:
    """Prints the microseconds that a step's profile takes, by the step's shape."""
    from kv_connectors.step_profile import StepProfile  # noqa: PLC0415 - it needs vLLM

    worst = 0.0
    for sequences, prompts in STEP_SHAPES:
        output: Any = scheduled(sequences, prompts)
        profile = StepProfile()
        profile.on_arrived("request", 0.0, 0.0)
        clock = iter(range(1 << 40))

        def step(profile: StepProfile = profile, output: Any = output, clock: Any = clock) -> None:
            now = 0.01 * next(clock)
            profile.on_scheduled(output)
            profile.on_step_ended(now)
            profile.take(now)

        best = min(timeit.repeat(step, number=COST_STEPS, repeat=100)) / COST_STEPS * 1e6
        worst = max(worst, best)
        print(f"{sequences:4} sequences, {prompts} prompts: {best:5.1f} us a step")
    print(json.dumps({"step_profile_us_worst": round(worst, 1)}))
    return 0


def scheduled(sequences: int, prompts: int) -> SimpleNamespace:
    """Returns vLLM's output of a step of this shape."""
    ids = [f"cmpl-{number:032x}-0" for number in range(sequences)]
    new = [SimpleNamespace(req_id=f"cmpl-new-{n}", num_computed_tokens=0) for n in range(prompts)]
    counts = dict.fromkeys(ids, 1) | {request.req_id: 512 for request in new}
    return SimpleNamespace(
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_spec_decode_tokens={},
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(req_ids=ids, num_computed_tokens=[1000] * sequences),
    )


if __name__ == "__main__":
    sys.exit(main())
