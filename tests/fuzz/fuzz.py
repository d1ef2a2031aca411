"""Runs the fuzzing campaigns of this folder; the last line is JSON.

python tests/fuzz/fuzz.py --frames 10000000          parsers and machines, in one process
python tests/fuzz/fuzz.py --port-seconds 300         real processes, at each of their ports
python tests/fuzz/fuzz.py --target tcp --seed 5 --batch 7      one batch again
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import sys
import time
from collections.abc import Iterator
from random import Random

from fuzz_campaign import MakeTarget, Tally, Target, run
from fuzz_decoders import DecoderTarget
from fuzz_files import FileTarget
from fuzz_proxy import AnswerTarget, BodyTarget, RegistrationTarget, RequestTarget
from fuzz_transports import ChannelTarget, LinkTarget, NixlTarget, TcpTarget
from fuzz_worker import WorkerTarget


def _permission_target(random: Random) -> Target:
    # Here: it imports vLLM, which takes half a minute on a busy machine.
    from fuzz_permissions import PermissionTarget

    return PermissionTarget(random)


TARGETS: dict[str, MakeTarget] = {
    "decoder": DecoderTarget,
    "worker": WorkerTarget,
    "tcp": TcpTarget,
    "link": LinkTarget,
    "nixl": NixlTarget,
    "channel": ChannelTarget,
    "request": RequestTarget,
    "body": BodyTarget,
    "answer": AnswerTarget,
    "registration": RegistrationTarget,
    "file": FileTarget,
    "permission": _permission_target,
}
REPORT_SECONDS = 10.0


class FormattingHandler(logging.Handler):
    """Formats each log line, and writes none: hostile input writes thousands."""

    def emit(self, record: logging.LogRecord) -> None:
        """Formats the line; an error in it, or an exception that it reports, ends the batch."""
        record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            raise record.exc_info[1]


def _say(text: str) -> None:
    print(f"fuzz: {text}", flush=True)


def _in_process(args: argparse.Namespace, tally: Tally) -> None:
    """Runs batches of the targets until enough frames were given."""
    targets = {name: TARGETS[name] for name in args.target or TARGETS}
    _say(f"seed {args.seed}, targets {', '.join(targets)}")
    began = time.monotonic()
    reported = began

    def on_batch(number: int) -> bool:
        nonlocal reported
        now = time.monotonic()
        if now > reported + REPORT_SECONDS:
            reported = now
            _say(
                f"{now - began:.0f} s, {tally.frames} frames, {tally.bodies} bodies, "
                f"{tally.deaths} deaths, {tally.leaks} leaks"
            )
        return tally.frames + tally.bodies < args.frames

    numbers: Iterator[int] = itertools.count() if args.batch is None else iter([args.batch])
    run(targets, args.seed, numbers, on_batch, tally)
    _say(f"inputs by target: {json.dumps(tally.inputs)}")


def _at_ports(args: argparse.Namespace, tally: Tally) -> tuple[float, float]:
    """Fires at real processes; returns the largest slowdowns of good answers, and in a flood."""
    # Here: tests of the parsers alone need no processes.
    from fuzz_ports import PORTS

    under_fire = [0.0]
    in_floods = [0.0]
    for name, fire in PORTS.items():
        found = fire(args.port_seconds, args.flood, args.seed)
        under_fire.append(found.slowdown)
        in_floods.append(found.flood_slowdown)
        tally.frames += found.frames
        tally.bodies += found.bodies
        tally.deaths += len(found.deaths)
        tally.leaks += len(found.leaks)
        for text in found.failures():
            tally.fail(f"{name}: {text[:40]}", f"{name}: {text}")
        _say(
            f"{name}: {found.frames} frames, {found.bodies} bodies, {found.good} good answers, "
            f"slowdown {found.slowdown:.2f}, in a flood {found.flood_slowdown:.2f}"
        )
    return max(under_fire), max(in_floods)


def main() -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", action="append", choices=TARGETS, help="only these targets")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--batch", type=int, help="only the batch of this number")
    parser.add_argument("--frames", type=int, default=0, help="inputs in one process")
    parser.add_argument("--port-seconds", type=float, default=0.0, help="of each real process")
    parser.add_argument("--flood", type=int, default=0, help="frames of a flood at each worker")
    args = parser.parse_args()
    logging.getLogger("vllm_disagg").addHandler(FormattingHandler())
    logging.getLogger("vllm_disagg").propagate = False
    tally = Tally()
    slowdown = flood_slowdown = 0.0
    if args.port_seconds:
        slowdown, flood_slowdown = _at_ports(args, tally)
    if args.frames or args.batch is not None:
        _in_process(args, tally)
    for line in tally.lines():
        _say(line)
    result = {
        "frames": tally.frames,
        "bodies": tally.bodies,
        "deaths": tally.deaths,
        "leaks": tally.leaks,
        "slowdown": round(slowdown, 2),
        "flood_slowdown": round(flood_slowdown, 2),
    }
    print(json.dumps(result))
    return 1 if tally.failures else 0


if __name__ == "__main__":
    sys.exit(main())
