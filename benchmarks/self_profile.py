"""Predictions from the engines' own step profiles, beside what is measured; and a profile's cost.

    python benchmarks/self_profile.py MODEL [--only STACK ...] [--seconds N] [--save FILE]
    python benchmarks/self_profile.py --cost

Real CPU engines of a tiny model, with one core each for their model's threads:

  disaggregated  1 prefill and 1 decode engine with our connector, and the proxy
  colocated      2 engines with our connector behind the same proxy, which sends whole requests

For each stack and each of three workloads: a closed loop of 1, 2 and 4 clients for N seconds, from
which the engines' own profiles, the hand-off and the path are read; nothing is fitted to a run.
They predict the goodput, and the median TTFT at three rates around it. Then requests are sent at
these rates, for N seconds each, and measured. Goodput is where attainment falls to 90 %
(`attainment.py`): more rates are sent, until the predicted and the measured attainment cross it
between two rates close to each other. Those around the measured goodput are sent again, with other
requests, 100 at least. Prediction and measurement have the same requests at each rate.

Behind each run the closed loop runs again, for a quarter of N seconds with other requests. A shared
machine may compute the same steps faster or slower by then. In the end the profile of all windows
together predicts each run again, and these predictions are compared. A line has the least and the
most seconds of a window's steps, as multiples of those by all windows: the drift.

The engines measure their steps in each run too. Behind a run stand the seconds of its steps as
multiples of those that the profile gives steps of this composition, the mean sequences of a step
that decodes and the path, and in brackets the last two in the profile's windows. With a multiple of
1.0 the profile knows the steps of the run, and an error of the prediction is elsewhere.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comparison import compare
from loops import WORKLOADS, draw
from measured_stack import MeasuredStack
from processes import free_port
from profile_cost import print_cost
from profile_windows import StackAddresses
from stack import COMMAND, KEY_FILE, Stack, start_pair, start_proxy

STACKS = ("disaggregated", "colocated")
# The targets of the planner: relative errors.
MAX_GOODPUT_ERROR = 0.15
MAX_TTFT_ERROR = 0.25


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
    rows = []
    with tempfile.TemporaryDirectory(prefix="self-profile") as folder:
        for name in args.only:
            rows += run_stack(name, args, Path(folder))
    if args.save:
        Path(args.save).write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps(summary(rows)))
    return 0


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
        measured = MeasuredStack(StackAddresses(name == "disaggregated", front, engines))
        rows = []
        for kind in args.workloads:
            found = compare(measured, f"{name}, {kind}", draw(kind), args.model, args.seconds)
            rows.append({"stack": name, "workload": kind, **found})
        return rows
    finally:
        stack.stop()


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


if __name__ == "__main__":
    sys.exit(main())
