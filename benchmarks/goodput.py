"""Goodput of 1 prefill + 1 decode engine beside 2 colocated ones, measured, and the planner's prediction.

    python benchmarks/goodput.py MODEL [--only [profile] [colocated] [ours]] [--save NAME]

Real CPU engines of a tiny model, with one core each for their model's threads, every engine with the same flags:

  ours       `vllm-disagg up`: 1 prefill, 1 decode, the proxy
  colocated  2 plain `vllm serve` behind `vllm-disagg proxy`, which shares whole requests among them; first both are
             measured by `vllm-disagg profile`, at the same time

The stacks run one after the other, since two engines are as much as a small machine holds.  Each is measured by
`vllm-disagg bench` with the same requests.  What is measured is saved (NAME.ours.json, NAME.colocated.json,
NAME.points-0.json and -1), and reported; with --only, what is not measured again is reported from those files.  Where
`vllm-disagg simulate` is there, its prediction from the points stands beside what was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from vllm_disagg.bench import bisection

STACKS = ("ours", "colocated")
STEPS = ("profile", *STACKS)
BUDGET = 512  # tokens a step
FLAGS = {"served-model-name": "tiny", "max-model-len": "2048", "max-num-batched-tokens": str(BUDGET)}
VLLM = ["--enforce-eager", *(f"--{flag}={value}" for flag, value in FLAGS.items())]
PROMPT, ANSWER = (200.0, 0.6), (16.0, 0.6)  # median and sigma of lognormal lengths
PLACEMENT = {"ours": ["--prefill", "1x1", "--decode", "1x1"], "colocated": ["--colocated", "1x1x2"]}
ATTAINMENT = 0.9
LONGEST = 1000  # tokens of a prompt
OURS = [sys.executable, "-m", "vllm_disagg.cli"]
START = 180.0  # seconds
CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--only", nargs="*", choices=STEPS, default=STEPS, help="some of the steps; the report follows")
    parser.add_argument("--save", metavar="NAME", default=".cache/goodput", help="(default: %(default)s)")
    parser.add_argument("--ttft", default="0.5", help="seconds (default: %(default)s)")
    parser.add_argument("--tpot", default="0.06", help="seconds (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=100, help="at each rate (default: %(default)s)")
    parser.add_argument("--precision", default="0.1", help="of the bisection (default: %(default)s)")
    parser.add_argument("--seconds", default="40", help="for each profile (default: %(default)s)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("goodput: stopped"))  # so that no engine stays behind
    lengths = write_lengths(args)
    if {"profile", "colocated"}.intersection(args.only):
        measure("colocated", lengths, args)
    if "ours" in args.only:
        measure("ours", lengths, args)
    return report(lengths, args)


def write_lengths(args: argparse.Namespace) -> str:
    """The workload as a file that the bench and the planner both read."""
    chance, path = random.Random(0), f"{args.save}.lengths.csv"
    rows = ["arrival_s,input_tokens,output_tokens"]
    for at in range(args.requests):
        prompt, answer = (round(median * chance.lognormvariate(0, sigma)) for median, sigma in (PROMPT, ANSWER))
        rows.append(f"{at},{min(LONGEST, max(8, prompt))},{max(2, answer)}")
    Path(path).write_text("\n".join(rows) + "\n")
    return path


def measure(name: str, lengths: str, args: argparse.Namespace) -> None:
    print(f"goodput: starting {name}", file=sys.stderr, flush=True)
    with open(f"{args.save}.{name}.log", "wb") as log, running(name, args.model, log) as (front, engines):
        if "profile" in args.only and engines:
            # Both at once: each is then as disturbed by the other's processes as it will be under load.
            words = ["--seconds", args.seconds, "--max-num-batched-tokens", str(BUDGET)]
            ours(
                *(
                    ["profile", url, "--output", f"{args.save}.points-{at}.json", *words]
                    for at, url in enumerate(engines)
                )
            )
        if name in args.only:
            words = ["bench", "--target", f"{name}={front}", "--gpus", "2", "--trace", lengths]
            words += ["--save", f"{args.save}.{name}", "--attainment", str(ATTAINMENT)]
            words += ["--requests", str(args.requests), "--precision", args.precision]
            ours([*words, "--ttft", args.ttft, "--tpot", args.tpot])


def ours(*commands: list[str]) -> None:
    """Run commands of ours at the same time; they end their own children when we have to end them."""
    processes = [subprocess.Popen([*OURS, *words]) for words in commands]
    try:
        if any(process.wait() for process in processes):
            sys.exit(f"goodput: vllm-disagg {commands[0][0]} failed")
    finally:
        for process in processes:
            process.terminate()
            process.wait()


@contextmanager
def running(name: str, model: str, log: IO[bytes]) -> Iterator[tuple[str, list[str]]]:
    """A stack's front address, and its plain engines' to profile."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(command: list[str], **env: str) -> subprocess.Popen[bytes]:
        out = subprocess.PIPE if name == "ours" else log
        process = subprocess.Popen(
            command, env={**os.environ, **CPU, **env}, stdout=out, stderr=log, start_new_session=True
        )
        processes.append(process)
        return process

    try:
        if name == "ours":
            yield address(start([*OURS, "up", "--model", model, "--port", "0", "--", *VLLM])), []
        else:
            urls = [f"http://127.0.0.1:{port}" for port in free_ports(3)]
            for url, core in zip(urls[1:], sorted(os.sched_getaffinity(0)), strict=False):
                port = ["--host", "127.0.0.1", "--port", url.rpartition(":")[2]]
                vllm = str(Path(sys.executable).with_name("vllm"))
                start([vllm, "serve", model, *port, *VLLM], VLLM_CPU_OMP_THREADS_BIND=str(core))
            for url in urls[1:]:
                wait(url, "/health", processes)
            decode = [word for url in urls[1:] for word in ("--decode", url)]
            start([*OURS, "proxy", "--port", urls[0].rpartition(":")[2], *decode])
            wait(urls[0], "/readiness", processes)
            yield urls[0], urls[1:]
    finally:
        end(processes)


def end(processes: list[subprocess.Popen[bytes]]) -> None:
    for number, patience in ((signal.SIGINT, 15.0), (signal.SIGKILL, 15.0)):
        for process in processes:
            if process.poll() is None or number == signal.SIGKILL:
                try:
                    os.killpg(process.pid, number)
                except ProcessLookupError:
                    continue
        until = time.monotonic() + patience
        for process in processes:
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue


def address(up: subprocess.Popen[bytes]) -> str:
    """The proxy's, from what `up` prints once it is ready."""
    assert up.stdout
    for line in up.stdout:
        if line.startswith(b"ready: "):
            return line.split()[1].decode()
    sys.exit("goodput: the instances did not start; the log says why")


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def wait(url: str, path: str, processes: list[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + START
    while time.monotonic() < until:
        if any(process.poll() is not None for process in processes):
            sys.exit("goodput: a process ended at start; the log says why")
        try:
            with urllib.request.urlopen(url + path, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    sys.exit(f"goodput: {url} did not come up in {START:.0f} s")


def report(lengths: str, args: argparse.Namespace) -> int:
    found: dict[str, Any] = {}
    for name in STACKS:
        path = Path(f"{args.save}.{name}.json")
        if path.exists() and (saved := json.loads(path.read_text()))["done"]:
            found[name] = saved["targets"][name]
    print("\nstack      goodput, req/s  by engine")
    for name, target in found.items():
        print(f"{name:10} {target['goodput']:14.3g} {target['goodput_per_gpu']:10.3g}")
    points = [f"{args.save}.points-{at}.json" for at in range(2)]
    if not find_spec("vllm_disagg.planner") or not all(map(os.path.exists, points)):
        print("\n(no prediction: it needs vllm-disagg simulate, and the points of both profiles)")
        return 0
    with open(f"{args.save}.predicted.json", "w") as out:
        predicted = {
            name: predict(name, target, Simulated(name, points, lengths, args)) for name, target in found.items()
        }
        json.dump(predicted, out, indent=1)
    return 0


class Simulated:
    """The planner's answers for a stack."""

    def __init__(self, name: str, points: list[str], lengths: str, args: argparse.Namespace) -> None:
        self._words = [*OURS, "simulate", "--json", "--profile", points[0], *PLACEMENT[name]]
        self._words += ["--decode-profile", points[1]] if name == "ours" else []
        self._words += ["--workload", lengths, "--arrivals", "poisson", "--requests", str(args.requests)]
        self._words += ["--ttft", args.ttft, "--tpot", args.tpot]
        self.precision = float(args.precision)

    def at(self, rate: float) -> dict[str, float]:
        run = subprocess.run([*self._words, "--rate", str(rate)], check=False, stdout=subprocess.PIPE, text=True)
        if run.returncode:
            sys.exit("goodput: vllm-disagg simulate failed")
        return dict(json.loads(run.stdout))

    def goodput(self, first: float) -> float:
        """By the bisection that found the measured one."""
        tried: list[bisection.Tried] = []
        while (rate := bisection.next_rate(tried, first, self.precision)) is not None:
            tried.append(bisection.Tried(rate, self.at(rate)["attainment"] >= ATTAINMENT))
        return bisection.bracket(tried).met or 0.0


def predict(name: str, measured: dict[str, Any], simulated: Simulated) -> dict[str, Any]:
    """The planner's figures beside the measured ones, at every rate that was tried."""
    print(f"\n{name}: measured -> predicted (error)")
    print(
        "  rate          attained                 TTFT median                    TTFT p90                    TPOT median"
    )
    rows = []
    for run in sorted(measured["runs"], key=lambda run: run["rate"]):
        said = simulated.at(run["rate"])
        pairs = [
            (run["ttft"]["median"], said["ttft_p50"]),
            (run["ttft"]["p90"], said["ttft_p90"]),
            (run["tpot"]["median"], said["tpot_p50"]),
        ]
        cells = "  ".join(f"{m:7.4f} -> {p:7.4f} s ({p / m - 1:+5.0%})" if m and p else " " * 27 for m, p in pairs)
        print(f"{run['rate']:6.2f}  {run['attainment']:4.0%} -> {said['attainment']:4.0%}  {cells}")
        rows.append({"rate": run["rate"], "measured": run, "predicted": said})
    goodput = simulated.goodput(measured["goodput"] or 1.0)
    error = goodput / measured["goodput"] - 1 if measured["goodput"] else float("nan")
    print(f"goodput {measured['goodput']:.3g} -> {goodput:.3g} req/s ({error:+.0%})")
    return {"goodput": {"measured": measured["goodput"], "predicted": goodput}, "runs": rows}


if __name__ == "__main__":
    sys.exit(main())
