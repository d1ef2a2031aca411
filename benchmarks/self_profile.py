"""Predictions from the engines' own step profiles, beside what is measured; and a profile's cost.

    python benchmarks/self_profile.py MODEL [--only STACK ...] [--seconds N] [--save FILE]
    python benchmarks/self_profile.py --cost

Real CPU engines of a tiny model, with one core each for their model's threads:

  disaggregated  1 prefill and 1 decode engine with our connector, and the proxy
  colocated      2 engines with our connector behind the same proxy, which sends whole requests

For each stack and each of three workloads: a closed loop of 1, 2 and 4 clients for N seconds, from
which the engines' own profiles, the hand-off and the path are read; nothing is fitted later. They
predict the goodput, and the median TTFT at three rates around it. Then the same requests are sent
at these rates, and measured. Goodput is where attainment falls to 90 %, between two rates: lower
and higher ones are sent too, until both the predicted and the measured attainment cross it.

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
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from processes import free_port
from stack import COMMAND, KEY_FILE, Stack, start_pair, start_proxy

from vllm_disagg.planner.commands import engine_profiles, live
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
MAX_FURTHER_RATES = 6
ATTAINED = ("attained_predicted", "attained")
MAX_REQUESTS = 2000
MIN_REQUESTS = 30  # of a run
WARM_UP_SECONDS = 3.0
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
    for _ in range(MAX_REQUESTS):
        length = round(prompt * chance.lognormvariate(0, prompt_sigma))
        prompts.append(min(LONGEST_PROMPT_TOKENS, max(8, length)))
        answers.append(max(2, round(answer * chance.lognormvariate(0, answer_sigma))))
        gaps.append(chance.expovariate(1.0))
    return WorkloadSample(prompts, answers, gaps[:MAX_REQUESTS])


def first(sample: WorkloadSample, count: int) -> WorkloadSample:
    return WorkloadSample(sample.prompts[:count], sample.outputs[:count], sample.gaps[:count])


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


def compare(
    name: str, kind: str, front: str, engines: list[str], args: argparse.Namespace
) -> dict[str, Any]:
    """Predicts a workload from the engines' own profiles, and measures it."""
    sample = draw(kind)
    closed_loop(front, sample, WARM_UP_SECONDS)
    profile = read_profile(name, front, engines, sample, args.seconds)
    deployment = deployment_of(name, profile, args.model)
    goodput = find_goodput(deployment, first(sample, 200))
    print(f"{name}, {kind}: {words(profile)}; predicted {goodput:.2f} req/s", flush=True)
    compared = partial(compare_at, deployment, sample, front, args.seconds)
    rates = [compared(ratio * goodput) for ratio in RATE_RATIOS]
    every = list(rates)
    while len(every) < len(rates) + MAX_FURTHER_RATES and (further := further_rate(every)):
        every.append(compared(further))
        every.sort(key=lambda row: row["rate"])
    predicted_goodput, measured_goodput = (crossing(every, attained) for attained in ATTAINED)
    error = predicted_goodput / measured_goodput - 1
    print(
        f"  goodput {predicted_goodput:.2f} predicted, {measured_goodput:.2f} measured"
        f" ({error:+.0%})",
        flush=True,
    )
    return {
        "stack": name,
        "workload": kind,
        "goodput": {
            "predicted": predicted_goodput,
            "measured": measured_goodput,
            "error": error,
        },
        "rates": rates,
        "further_rates": [row for row in every if row not in rates],
        "profile": engine_profiles.facts(profile),
    }


def compare_at(
    deployment: Deployment, sample: WorkloadSample, front: str, seconds: float, rate: float
) -> dict[str, float]:
    """Predicts and measures the first requests of a sample, as many as come in some seconds."""
    part = first(sample, min(MAX_REQUESTS, max(MIN_REQUESTS, round(rate * seconds))))
    predicted = simulate(deployment, part, rate)
    said = list(zip(predicted.ttft, predicted.tpot, strict=True))
    row = rate_row(rate, said, open_loop(front, part, rate))
    print(
        f"  {rate:6.2f} req/s: TTFT median {row['predicted']:.3f} predicted,"
        f" {row['measured']:.3f} measured ({row['error']:+.0%}); attained"
        f" {row['attained_predicted']:.0%}, {row['attained']:.0%}",
        flush=True,
    )
    return row


def further_rate(rates: list[dict[str, float]]) -> float:
    """Returns a rate beyond those tried, in order, if an attainment does not cross; else 0."""
    lowest, highest = rates[0], rates[-1]
    if min(lowest[name] for name in ATTAINED) < OBJECTIVE.attainment:
        return lowest["rate"] / FURTHER_RATIO
    if max(highest[name] for name in ATTAINED) >= OBJECTIVE.attainment:
        return highest["rate"] * FURTHER_RATIO
    return 0.0


def read_profile(
    name: str, front: str, engines: list[str], sample: WorkloadSample, seconds: float
) -> engine_profiles.FleetProfile:
    """Reads the profiles of a window in which a closed loop runs."""
    loop = threading.Thread(target=closed_loop, args=(front, sample, seconds + 1.0))
    loop.start()
    windows = live.measure(front, engines, seconds)
    loop.join()
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
        "attained_predicted": attained(said),
        "attained": attained(measured),
    }


def median(times: list[tuple[float, float]]) -> float:
    served = [ttft for ttft, _ in times if ttft >= 0]
    return statistics.median(served) if served else float("nan")


def attained(times: list[tuple[float, float]]) -> float:
    met = sum(0 <= ttft <= OBJECTIVE.ttft and tpot <= OBJECTIVE.tpot for ttft, tpot in times)
    return met / len(times)


def crossing(rates: list[dict[str, float]], name: str) -> float:
    """Returns the rate at which attainment falls to the objective, by a line between two rates.

    NaN if it does not cross.
    """
    limit = OBJECTIVE.attainment
    for lower, higher in pairwise(rates):
        if lower[name] >= limit > higher[name]:
            share = (lower[name] - limit) / (lower[name] - higher[name])
            return lower["rate"] + share * (higher["rate"] - lower["rate"])
    return float("nan")


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
