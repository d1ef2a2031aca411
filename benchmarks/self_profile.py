"""Predictions from the engines' own step profiles, beside measurements; and a profile's cost.

    python benchmarks/self_profile.py MODEL [--only STACK ...] [--seconds N] [--save FILE]
    python benchmarks/self_profile.py --cost

Real CPU engines of a tiny model, with one core each for their model's threads:

  disaggregated  1 prefill and 1 decode engine with our connector, and the proxy
  colocated      2 engines with our connector behind the same proxy, which sends whole requests

Each stack has three workloads. A closed loop runs for N seconds, with 1, 2 and 4 clients for each
engine that decodes: the first window. The engines' own profiles, the hand-off and the path are read
from it; nothing is fitted to a run. They predict the goodput, and the median TTFT at three rates
around it. Runs follow at these rates, of N seconds each, but of at least 30 requests. Prediction
and run have the same requests.

At the predicted goodput more than 1.5 times as many requests may decode as the window has clients.
It does not show such steps: one with twice as many clients takes its place, at most three times.

Goodput is where attainment falls to 90 % (`attainment.py`). More rates follow, until the predicted
and the measured attainment cross it between two rates within 15 %. The two around the measured
goodput are sent again, with other requests, at least 100. More rates follow if that moves the
goodput. A goodput below an eighth of the first predicted one is not sought, and not found. The 95 %
of the printed interval are those of each rate, not of both ends together.

Failed requests meet no objective, and count as infinite in the median TTFT. TTFT begins when the
client sends a request. A run's line has the longest delay of that.

Behind each run the closed loop runs again, for a quarter of N seconds with other requests. A shared
machine may compute the same steps faster or slower by then. In the end the profile of all windows
together predicts each run again. The first window, which alone chose the rates, weighs four times
a later one there. The summary has the errors by all windows, and those by the first one alone. A
line has the least and the most seconds of a window's steps, as multiples of those by all windows:
the drift.

The engines measure their steps in each run too. A run's line has their seconds as multiples of
those that the profile gives steps of this composition. It has the path and the mean sequences of a
step that decodes, too, and in brackets those of the windows. A multiple of 1.0 says that the
profile has the mean of the run's steps; single steps may differ.

Each workload is saved when it has ended. One that fails has its `reason`; the others follow, and
the exit status is 1. Figures that are not known are null.

`--cost` measures how long the connector takes for one step's composition and sums.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from comparison import compare
from loops import WORKLOADS, draw
from measured_stack import MeasuredStack
from processes import free_port
from profile_cost import print_cost
from profile_windows import StackAddresses
from stack import COMMAND, KEY_FILE, Stack, StartFailed, start_pair, start_proxy

from vllm_disagg.errors import DisaggError

STACKS = ("disaggregated", "colocated")
# The targets of the planner: relative errors.
MAX_GOODPUT_ERROR = 0.15
MAX_TTFT_ERROR = 0.25
LOG_END_CHARACTERS = 2000  # of an engine or a proxy that did not start


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--cost", action="store_true", help="only the cost of a step")
    parser.add_argument("--only", nargs="+", choices=STACKS, default=STACKS)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument(
        "--seconds", type=float, default=15.0, help="of the first window and each run (default: 15)"
    )
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
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        if args.save:
            Path(args.save).write_text(json_text(rows, indent=1))

    with tempfile.TemporaryDirectory(prefix="self-profile") as folder:
        for name in args.only:
            run_stack(name, args, Path(folder), keep)
    print(json_text(summary(rows)), end="")
    return 1 if any("reason" in row for row in rows) else 0


def run_stack(
    name: str, args: argparse.Namespace, folder: Path, keep: Callable[[dict[str, Any]], None]
) -> None:
    """Starts a stack, and keeps a row of each workload."""
    stack = Stack(name, args.dtype)
    logs = folder / name
    logs.mkdir()
    try:
        measured = start_measured(stack, args.model, logs)
        for kind in args.workloads:
            found = compare(measured, f"{name}, {kind}", draw(kind), args.model, args.seconds)
            keep({"stack": name, "workload": kind, **found})
    except (StartFailed, DisaggError) as error:  # of the start: `compare` raises neither
        print(f"{name} has failed: {error}\n{log_ends(logs)}", flush=True)
        for kind in args.workloads:
            keep({"stack": name, "workload": kind, "reason": str(error)})
    finally:
        stack.stop()


def log_ends(logs: Path) -> str:
    """Returns the end of each log: their folder is removed."""
    texts = {log.name: log.read_text(errors="replace") for log in sorted(logs.glob("*.log"))}
    return "\n".join(f"{name}:\n{text[-LOG_END_CHARACTERS:]}" for name, text in texts.items())


def start_measured(stack: Stack, model: str, logs: Path) -> MeasuredStack:
    """Starts the engines and the proxy of a stack."""
    is_disaggregated = stack.name == "disaggregated"
    if is_disaggregated:
        engines = list(start_pair(stack, model, logs, {}))
        wait_all(stack, engines)
        front = start_proxy(stack, logs, *engines)
    else:
        engines = start_both(stack, model, logs)
        front = start_colocated_proxy(stack, logs, engines)
    return MeasuredStack(StackAddresses(is_disaggregated, front, engines))


def wait_all(stack: Stack, engines: Sequence[str]) -> None:
    for url in engines:
        stack.wait(url, "/health")


def start_both(stack: Stack, folder: str, logs: Path) -> list[str]:
    """Starts two engines with our connector, for whole requests."""
    key = str(logs / KEY_FILE)
    subprocess.run([*COMMAND, "key", key], check=True)
    config: dict[str, object] = {
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


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the worst errors and the shares within the targets.

    They are by all windows, and by the first one alone. Workloads that failed are counted only.
    """
    judged = [row for row in rows if "reason" not in row]
    goodputs = [row["goodput"] for row in judged]
    rates = [rate for row in judged for rate in row["rates"]]
    runs = [run for row in rows for key in ("rates", "further_runs") for run in row.get(key, ())]
    return {
        **accuracy(goodputs, rates),
        "first_window": accuracy(first_windows(goodputs), first_windows(rates)),
        "goodput_intervals": sum(map(has_interval, goodputs)),
        "workloads": len(rows),
        "workloads_failed": len(rows) - len(judged),
        "rates": len(rates),
        "failed": sum(int(run["failed"]) for run in runs),
        "failed_in_windows": sum(row["failed_in_windows"] for row in judged),
    }


def first_windows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns goodputs or rates with the predictions of the first window alone."""
    return [{**each, **each["first_window"]} for each in found]


def accuracy(goodputs: list[dict[str, Any]], rates: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the worst errors, and how many are within the targets."""
    # An error that is not known misses its target.
    errors = [abs(each["error"]) for each in goodputs]
    found = [error for error in errors if math.isfinite(error)]
    ttfts = [abs(each["error"]) for each in rates]
    known = [error for error in ttfts if math.isfinite(error)]
    return {
        "goodput_error_worst": round(max(found), 3) if found else None,
        "goodput_not_found": len(errors) - len(found),
        "goodput_within_target": sum(error <= MAX_GOODPUT_ERROR for error in found),
        "goodput_within_interval": sum(
            has_interval(each) and each["interval"][0] <= each["predicted"] <= each["interval"][1]
            for each in goodputs
        ),
        "ttft_error_worst": round(max(known), 3) if known else None,
        "ttft_not_found": len(ttfts) - len(known),
        "ttft_within_target": sum(error <= MAX_TTFT_ERROR for error in known),
    }


def has_interval(goodput: dict[str, Any]) -> bool:
    """Whether runs bound a measured goodput from below and from above."""
    low, high = goodput["interval"]
    return bool(low > 0 and math.isfinite(high))


def json_text(found: object, indent: int | None = None) -> str:
    """Returns JSON, which has no NaN and no infinity: they are null."""
    return json.dumps(without_nan(found), indent=indent, allow_nan=False) + "\n"


def without_nan(found: Any) -> Any:
    """Replaces numbers that are not finite by None."""
    if isinstance(found, dict):
        return {key: without_nan(value) for key, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [without_nan(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


if __name__ == "__main__":
    sys.exit(main())
