"""Scripted stand-in for `vllm bench serve`, with result files in vLLM's format.

One server, first come first served, takes SCRIPTED_SERVICE seconds for each request. Two numbers
are for the target SCRIPTED_FIRST, and for any other.
"""

import json
import os
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path

words = sys.argv[1:]
assert words[:2] == ["bench", "serve"], words
option = {flag: value for flag, value in pairwise(words) if flag.startswith("--")}
with open(os.environ["SCRIPTED_LOG"], "a") as log:
    log.write(
        json.dumps(
            [option["--base-url"], os.environ["PYTHONHASHSEED"], option["--served-model-name"]]
        )
        + "\n"
    )
how = os.environ.get("SCRIPTED_HOW", "")
if how == "crash":
    sys.exit(
        "Traceback (most recent call last):\n  File x\n"
        "OSError: tiny is not a valid model identifier"
    )
if how in ("SIGHUP", "SIGTERM"):
    Path(os.environ["SCRIPTED_LOG"]).write_text(str(os.getpid()))
    os.kill(os.getppid(), getattr(signal, how))
    time.sleep(20)
if how == "garbage":
    Path(option["--result-filename"]).write_text("{}")
    sys.exit()
service = float(
    os.environ["SCRIPTED_SERVICE"].split(",")[option["--base-url"] != os.environ["SCRIPTED_FIRST"]]
)
requests = [json.loads(line) for line in Path(option["--dataset-path"]).read_text().splitlines()]
free = 0.0
ttfts: list[float] = []
for request in requests:
    arrival = free if "--max-concurrency" in option else request["timestamp"]
    free = max(free, arrival) + service
    ttfts.append(free - arrival)
result = {
    "duration": max(free, 1e-3),
    "input_lens": [r["input_length"] for r in requests],
    "output_lens": [0 if how == "refuse" else r["output_length"] for r in requests],
    "ttfts": ttfts,
    "itls": [[0.01] * (r["output_length"] - 1) for r in requests],
    "start_times": [1 + r["timestamp"] for r in requests],
    "errors": ["Too Many Requests" if how == "refuse" else "" for r in requests],
}
Path(option["--result-filename"]).write_text(json.dumps(result))
