"""Goodput of 1 prefill + 1 decode engine beside 2 colocated ones and NixlConnector, and what the
planner says of each.

    python benchmarks/goodput.py MODEL [--router PATH] [--only [STACK ...]] [--save NAME]

Real CPU engines of a tiny model, with one core each for their model's threads, every engine with
the same flags:

  ours       1 prefill and 1 decode engine with our connector, and the proxy
  colocated  2 plain `vllm serve` behind the same proxy (`vllm-disagg proxy --decode --decode`),
             which distributes whole requests
  nixl       2 `vllm serve` with NixlConnector behind vllm-router; only if --router names that
             program

The stacks run one after the other, since two engines are as much as a small machine holds. Of each,
first the engines' step times are measured by `vllm-disagg profile`, each engine's while the other
one works, then its goodput by `vllm-disagg bench` with the same requests for all. What is measured
is saved (NAME.STACK.json, NAME.STACK-0.points.json and -1, NAME.STACK.log). At last all that is
saved is reported: a table, NAME.json and NAME.png with all stacks, and at each rate the planner's
prediction from those points beside what was measured. --only with fewer stacks, or none, measures
fewer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from processes import free_ports

from vllm_disagg.bench import bisection, report
from vllm_disagg.bench.results import BenchRun, GoodputObjectives
from vllm_disagg.errors import ConfigError

BUDGET = 512  # tokens a step
FLAGS = {
    "served-model-name": "tiny",
    "max-model-len": "2048",
    "max-num-batched-tokens": str(BUDGET),
}
ENGINE = ["--enforce-eager", *(f"--{flag}={value}" for flag, value in FLAGS.items())]
# Median and sigma of log-normal lengths.
PROMPT = (200.0, 0.6)
ANSWER = (16.0, 0.6)
LONGEST = 1000  # tokens of a prompt
SPLIT = ["--prefill", "1x1", "--decode", "1x1"]
STACKS = {
    "ours": SPLIT,
    "colocated": ["--colocated", "1x1x2"],
    "nixl": [*SPLIT, "--no-overlap"],
}  # as simulate is told
ATTAINMENT = 0.9
OURS = [sys.executable, "-m", "vllm_disagg.cli"]
VLLM = str(Path(sys.executable).with_name("vllm"))
START = 180.0  # seconds
ROUNDS = 6  # of a refit
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--router", help="the vllm-router program, for nixl")
    parser.add_argument(
        "--only", nargs="*", choices=STACKS, help="stacks to measure; the report follows"
    )
    parser.add_argument(
        "--save", metavar="NAME", default=".cache/goodput", help="(default: %(default)s)"
    )
    parser.add_argument("--ttft", type=float, default=1.0, help="seconds (default: %(default)s)")
    parser.add_argument("--tpot", type=float, default=0.1, help="seconds (default: %(default)s)")
    parser.add_argument(
        "--requests", type=int, default=100, help="at each rate (default: %(default)s)"
    )
    parser.add_argument(
        "--precision", type=float, default=0.1, help="of the bisection (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=int, default=40, help="for each profile (default: %(default)s)"
    )
    args = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("goodput: stopped")
    )  # so that no engine stays behind
    trace = write_trace(args)
    for name in STACKS if args.only is None else args.only:
        if name == "nixl" and not args.router:
            print("goodput: nixl is left out: --router names no vllm-router", file=sys.stderr)
            continue
        measure(name, trace, args)
    return tell(trace, args)


def write_trace(args: argparse.Namespace) -> str:
    """What is asked, as a trace that the bench and the planner both read: the same lengths, and the
    same Poisson arrivals scaled to each rate, so that a prediction is not wrong for having met
    other requests.
    """
    chance = random.Random(0)
    path = f"{args.save}.trace.csv"
    rows = ["arrival_s,input_tokens,output_tokens"]
    now = 0.0
    for _ in range(args.requests):
        prompt, answer = (
            round(median * chance.lognormvariate(0, sigma)) for median, sigma in (PROMPT, ANSWER)
        )
        rows.append(f"{now:.6f},{min(LONGEST, max(8, prompt))},{max(2, answer)}")
        now += chance.expovariate(1.0)
    Path(path).write_text("\n".join(rows) + "\n")
    return path


def measure(name: str, trace: str, args: argparse.Namespace) -> None:
    print(f"goodput: starting {name}", file=sys.stderr, flush=True)
    with open(f"{args.save}.{name}.log", "wb") as log, running(name, args, log) as (front, engines):
        for at, url in enumerate(engines):
            words = [
                "profile",
                url,
                "--output",
                points(args, name)[at],
                "--seconds",
                str(args.seconds),
            ]
            words += ["--max-num-batched-tokens", str(BUDGET)]
            ours(
                *words, *(word for other in engines if other != url for word in ("--beside", other))
            )
        words = [
            "bench",
            "--target",
            f"{name}={front}",
            "--gpus",
            "2",
            "--trace",
            trace,
            "--arrivals",
            "trace",
        ]
        words += [
            "--requests",
            str(args.requests),
            "--precision",
            str(args.precision),
            "--save",
            f"{args.save}.{name}",
        ]
        ours(
            *words,
            "--ttft",
            str(args.ttft),
            "--tpot",
            str(args.tpot),
            "--attainment",
            str(ATTAINMENT),
        )


def points(args: argparse.Namespace, name: str) -> list[str]:
    return [f"{args.save}.{name}-{at}.points.json" for at in range(2)]


def ours(*words: str) -> None:
    """Runs a command of this project, which ends its own children when it is ended."""
    process = subprocess.Popen([*OURS, *words])
    try:
        if process.wait():
            sys.exit(f"goodput: vllm-disagg {words[0]} failed")
    finally:
        process.terminate()
        process.wait()


class Stack:
    """Processes that end at the exit of the context."""

    def __init__(self, model: str, log: IO[bytes]) -> None:
        self._model = model
        self._log = log
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, command: list[str], **env: str) -> subprocess.Popen[bytes]:
        # A group, not a session: Linux's autogroups make a session one party to the sharing of a
        # core, and a process of it that rarely runs, as an API server, then waits for up to a
        # second while another session's worker spins.
        process = subprocess.Popen(
            command,
            env={**os.environ, **CPU, **env},
            stdout=self._log,
            stderr=self._log,
            process_group=0,
        )
        self._processes.append(process)
        return process

    def engines(self, *transfer: dict[str, object], **env: list[str]) -> list[str]:
        """Starts two engines, one on each of the first two cores. Returns their addresses."""
        urls = []
        for at, core in enumerate(sorted(os.sched_getaffinity(0))[:2]):
            (port,) = free_ports(1)
            own = {name: values[at] for name, values in env.items()}
            config = ["--kv-transfer-config", json.dumps(transfer[at])] if transfer else []
            command = [
                VLLM,
                "serve",
                self._model,
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                *ENGINE,
                *config,
            ]
            self.start(command, VLLM_CPU_OMP_THREADS_BIND=str(core), **own)
            urls.append(f"http://127.0.0.1:{port}")
        for url in urls:
            self.wait(url, "/health")
        return urls

    def wait(self, url: str, path: str) -> None:
        until = time.monotonic() + START
        while time.monotonic() < until:
            if any(process.poll() is not None for process in self._processes):
                sys.exit("goodput: a process ended at start; the log says why")
            try:
                with urllib.request.urlopen(url + path, timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        sys.exit(f"goodput: {url} did not come up in {START:.0f} s")

    def end(self) -> None:
        for number, patience in ((signal.SIGINT, 15.0), (signal.SIGKILL, 15.0)):
            for process in self._processes:
                if process.poll() is None or number == signal.SIGKILL:
                    try:
                        os.killpg(process.pid, number)
                    except ProcessLookupError:
                        continue
            until = time.monotonic() + patience
            for process in self._processes:
                try:
                    process.wait(max(0.1, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    continue


@contextmanager
def running(name: str, args: argparse.Namespace, log: IO[bytes]) -> Iterator[tuple[str, list[str]]]:
    """Addresses of a stack: its front, and its engines, the prefill engine first."""
    stack = Stack(args.model, log)
    try:
        if name == "ours":
            yield start_ours(stack, f"{args.save}.key")
        elif name == "colocated":
            yield start_colocated(stack)
        else:
            yield start_nixl(stack, args.router)
    finally:
        stack.end()


def start_ours(stack: Stack, key: str) -> tuple[str, list[str]]:
    Path(key).unlink(missing_ok=True)
    ours("key", key)
    config = {"kv_connector": "DisaggConnector", "kv_connector_extra_config": {"key_file": key}}
    engines = stack.engines(*pair(config))
    return proxy(stack, "--key-file", key, "--prefill", engines[0], "--decode", engines[1]), engines


def start_colocated(stack: Stack) -> tuple[str, list[str]]:
    engines = stack.engines()
    return proxy(stack, *(word for url in engines for word in ("--decode", url))), engines


def pair(config: dict[str, object]) -> list[dict[str, object]]:
    return [
        {**config, "kv_role": role, "kv_load_failure_policy": "recompute"}
        for role in ("kv_producer", "kv_consumer")
    ]


def proxy(stack: Stack, *words: str) -> str:
    (port,) = free_ports(1)
    stack.start([*OURS, "proxy", "--port", str(port), *words])
    stack.wait(f"http://127.0.0.1:{port}", "/readiness?mode=pair")
    return f"http://127.0.0.1:{port}"


def start_nixl(stack: Stack, router: str) -> tuple[str, list[str]]:
    side = [str(port) for port in free_ports(2)]
    (port, metrics) = free_ports(2)
    engines = stack.engines(
        *pair({"kv_connector": "NixlConnector", "kv_buffer_device": "cpu"}),
        VLLM_NIXL_SIDE_CHANNEL_HOST=["127.0.0.1"] * 2,
        VLLM_NIXL_SIDE_CHANNEL_PORT=side,
    )
    words = [
        "--vllm-pd-disaggregation",
        "--prefill",
        engines[0],
        "--decode",
        engines[1],
        "--kv-connector",
        "nixl",
    ]
    words += ["--policy", "round_robin", "--prometheus-port", str(metrics)]
    stack.start([router, *words, "--host", "127.0.0.1", "--port", str(port)])
    front = f"http://127.0.0.1:{port}"
    stack.wait(front, "/v1/models")
    return front, engines


# --- the report ---


def tell(trace: str, args: argparse.Namespace) -> int:
    """Prints the saved stacks beside each other, then each one beside the planner's figures."""
    objectives = GoodputObjectives(args.ttft, args.tpot, ATTAINMENT)
    saved = []
    for name in STACKS:
        try:
            saved.append(report.load(f"{args.save}.{name}.json"))
        except ConfigError as error:
            print(f"goodput: without {name}: {error}", file=sys.stderr)
    measured = [one for _, ones in saved for one in ones]
    if any(of != objectives for of, _ in saved) or not measured:
        sys.exit(f"goodput: {args.save}.*.json hold no measurements with these objectives")
    report.save(args.save, report.result(measured, objectives, done=True))
    report.plot(f"{args.save}.png", measured, objectives)
    print("\n" + report.table(measured, objectives))
    predicted = {}
    for one in measured:
        simulated = Simulated(one.target.name, trace, args)
        predicted[one.target.name] = {
            "profile": predict(one, objectives, simulated, "from the engines' step times")
        }
        if one.target.name != "colocated":
            words = simulated.refit(min(one.runs, key=lambda run: run.rate or 0.0))
            predicted[one.target.name]["refit"] = predict(one, objectives, simulated, words)
    Path(f"{args.save}.predicted.json").write_text(json.dumps(predicted, indent=1) + "\n")
    return 0


class Simulated:
    """Predictions of the planner for a stack."""

    def __init__(self, name: str, trace: str, args: argparse.Namespace) -> None:
        prefill, decode = points(args, name)
        self._words = [
            *OURS,
            "simulate",
            "--json",
            "--profile",
            prefill,
            *(["--decode-profile", decode] if name != "colocated" else []),
            "--model",
            args.model,
            *STACKS[name],
        ]
        self._words += [
            "--workload",
            trace,
            "--arrivals",
            "trace",
            "--requests",
            str(args.requests),
            "--seeds",
            "1",
        ]
        self._words += [
            "--ttft",
            str(args.ttft),
            "--tpot",
            str(args.tpot),
            "--attainment",
            str(ATTAINMENT),
        ]
        self._precision = args.precision
        self._scale = [1.0, 1.0]

    def refit(self, run: BenchRun) -> str:
        """Find the factors on prefill and decode times that give a run's median TTFT and TPOT: what
        the hand-off and the proxy add to an engine's own. As `plan --live` does with means.
        """
        for _ in range(ROUNDS):
            said = self.at(run.rate or 0.0)
            for at, (seen, was) in enumerate(
                ((run.ttft, said["ttft_p50"]), (run.tpot, said["tpot_p50"]))
            ):
                self._scale[at] *= (seen.median or 0.0) / was
        return "with prefill x {:.2f} and decode x {:.2f}, from the lowest rate".format(
            *self._scale
        )

    def at(self, rate: float) -> dict[str, float]:
        words = ["--rate", str(rate), "--scale", ":".join(map(str, self._scale))]
        run = subprocess.run([*self._words, *words], check=False, stdout=subprocess.PIPE, text=True)
        if run.returncode:
            sys.exit("goodput: vllm-disagg simulate failed")
        return dict(json.loads(run.stdout))

    def goodput(self, first: float) -> float:
        """Predicts the goodput with the bisection of the measurement."""
        tried: list[bisection.TriedRate] = []
        while (rate := bisection.next_rate(tried, first, self._precision)) is not None:
            tried.append(bisection.TriedRate(rate, self.at(rate)["attainment"] >= ATTAINMENT))
        return bisection.bracket(tried).met or 0.0


def predict(
    measured: report.TargetRuns, objectives: GoodputObjectives, simulated: Simulated, how: str
) -> dict[str, Any]:
    """Prints the planner's figures beside the measured ones, for every tried rate."""
    print(f"\n{measured.target.name}: measured -> predicted {how} (error)")
    print(f"{'rate':>6}  {'attained':12}  {'TTFT median':27}  {'TTFT p90':27}  {'TPOT median':27}")
    rows = []
    for run in sorted(measured.runs, key=lambda run: run.rate or 0.0):
        said = simulated.at(run.rate or 0.0)
        pairs = [
            (run.ttft.median, said["ttft_p50"]),
            (run.ttft.p90, said["ttft_p90"]),
            (run.tpot.median, said["tpot_p50"]),
        ]
        cells = "  ".join(
            f"{m:7.4f} -> {p:7.4f} s ({p / m - 1:+5.0%})" if m and p else " " * 27 for m, p in pairs
        )
        print(f"{run.rate:6.2f}  {run.attainment:4.0%} -> {said['attainment']:4.0%}  {cells}")
        rows.append({"rate": run.rate, "measured": run.attainment, "predicted": said})
    found = measured.bracket(objectives).met or 0.0
    goodput = simulated.goodput(found or 1.0)
    print(
        f"goodput {found:.3g} -> {goodput:.3g} req/s"
        + (f" ({goodput / found - 1:+.0%})" if found else "")
    )
    return {"how": how, "goodput": {"measured": found, "predicted": goodput}, "runs": rows}


if __name__ == "__main__":
    sys.exit(main())
