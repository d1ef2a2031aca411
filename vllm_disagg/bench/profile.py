"""Measures the times of prompts and decode steps of one instance, for `vllm-disagg plan`:
`vllm-disagg profile`.

Prompts are fresh random token ids, so that no prefix cache holds them. Rounds measure all points,
small ones first, until the time is over; the medians are written.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from .. import http_client
from ..errors import ConfigError, DisaggError
from . import instance, neighbours, steps
from .steps import PROBE_TOKEN_IDS, DecodeProbe, PrefillProbe, StepSample
from .stream import complete

# measurements of a point, below which a median means little; points of each kind, below which a fit
# does
MIN_MEASUREMENTS = 3
PROGRESS_INTERVAL_SECONDS = 5.0  # seconds between two lines of progress


class ProfileSamples:
    """Measurements, and the points computed from them."""

    def __init__(self) -> None:
        self._alone: dict[int, list[float]] = {}  # one prompt, from its arrival on, by its length
        self._behind: dict[
            tuple[int, ...], list[float]
        ] = {}  # the step alone, of prompts that waited for it
        self._decode: dict[DecodeProbe, list[StepSample]] = {}

    def add(self, what: PrefillProbe | DecodeProbe, step: StepSample) -> None:
        """Adds one measurement."""
        if isinstance(what, DecodeProbe):
            self._decode.setdefault(what, []).append(step)
        elif what.ahead:
            self._behind.setdefault(step.lengths, []).append(step.seconds)
        else:
            self._alone.setdefault(step.lengths[0], []).append(step.seconds)

    def fewest(self) -> int:
        """Returns the number of measurements of the point that has the fewest."""
        every: list[Sequence[object]] = [
            *self._alone.values(),
            *self._behind.values(),
            *self._decode.values(),
        ]
        return min(map(len, every), default=0)

    def prefill(self) -> list[dict[str, object]]:
        """Returns prefill points from arrival to first token.

        Batched prompts wait for their step, so their times lack the way to the engine and back. The
        difference between the two times of single prompts is added.
        """
        alone = {length: statistics.median(times) for length, times in self._alone.items()}
        behind = {lengths: statistics.median(times) for lengths, times in self._behind.items()}
        ones = {lengths[0]: time for lengths, time in behind.items() if len(lengths) == 1}
        ways = [alone[length] - time for length, time in ones.items() if length in alone]
        way = max(0.0, statistics.median(ways)) if ways else 0.0
        points: dict[tuple[int, ...], float] = {(length,): time for length, time in alone.items()}
        points |= {lengths: time + way for lengths, time in behind.items() if len(lengths) > 1}
        return [
            {"tokens": list(lengths), "seconds": round(time, 6)} for lengths, time in points.items()
        ]

    def decode(self) -> list[dict[str, object]]:
        """Returns the median decode point of each probe."""
        middle = [
            sorted(s, key=lambda step: step.seconds)[(len(s) - 1) // 2]
            for s in self._decode.values()
        ]
        return [
            {"contexts": list(step.lengths), "seconds": round(step.seconds, 6)} for step in middle
        ]


class InstanceProfiler:
    """Measures one instance."""

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = model
        self._random = random.Random()
        self._gap = 0.0  # seconds; tokens that are less apart come from one step

    def warm_up(self) -> None:
        """Warms up, and measures the shortest step."""
        self._gap = max(0.001, min(self._first_tokens([16])[0] for _ in range(5)) / 4)

    def measure(self, what: PrefillProbe | DecodeProbe) -> StepSample | None:
        """Measures a probe once. Returns None if it was not computed in one step."""
        if isinstance(what, DecodeProbe):
            prompts = [self._prompt(what.context) for _ in range(what.batch)]
            return steps.decode_step(
                what.context, complete(self._url, self._model, prompts, what.answer)
            )
        if not what.ahead:
            return StepSample(what.prompts, self._first_tokens(what.prompts)[0])
        lengths = (what.ahead, *what.prompts)
        return steps.batch_step(lengths, self._first_tokens(lengths), self._gap)

    def _first_tokens(self, lengths: Sequence[int]) -> list[float]:
        prompts = [self._prompt(length) for length in lengths]
        return [events[0].time for events in complete(self._url, self._model, prompts, 1)]

    def _prompt(self, length: int) -> list[int]:
        return self._random.choices(PROBE_TOKEN_IDS, k=length)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `profile`."""
    add = parser.add_argument
    parser.epilog = "An API key is taken from the environment, as OPENAI_API_KEY."
    add(
        "url",
        metavar="URL",
        help="an instance itself, without other traffic: http://127.0.0.1:8100",
    )
    add(
        "--output",
        metavar="FILE",
        required=True,
        help="the points file to write, for vllm-disagg plan --profile",
    )
    add(
        "--seconds",
        metavar="N",
        type=float,
        default=120.0,
        help="time to measure (default: %(default)g)",
    )
    add(
        "--max-num-batched-tokens",
        metavar="N",
        type=int,
        help="the instance's token budget a step, which it does not tell",
    )
    add(
        "--beside",
        metavar="URL",
        action="append",
        default=[],
        help="another instance on the same machine, to be kept at work meanwhile, as it will be; repeatable",
    )
    add(
        "--machine",
        metavar="WORDS",
        default="",
        help="what the instance runs on, in words, for the file",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `profile` and writes the points. Returns the exit status."""
    url = http_client.address("URL", args.url)
    _check(args)
    model = instance.model(url)
    kv_tokens = instance.kv_tokens(url)
    version = instance.version(url)
    if not model.max_model_len:
        raise ConfigError(f"{url}/v1/models does not say max_model_len, which every vLLM does")
    others = [http_client.address("--beside", other) for other in args.beside]
    if url in others:
        raise ConfigError(f"--beside: {url} is the instance that is measured")
    beside = [(other, instance.model(other)) for other in others]
    plan = steps.plan(model.max_model_len, kv_tokens, args.max_num_batched_tokens)
    profile = InstanceProfiler(url, model.id)
    with neighbours.busy(beside):
        profile.warm_up()
        samples = _rounds(plan, profile.measure, args.seconds, time.monotonic)
    points: dict[str, Any] = {
        "version": 1,
        "model": model.id,
        "vllm": version,
        "machine": args.machine or _machine(url),
        "beside": len(beside),
        "kv_tokens": kv_tokens,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "prefill": samples.prefill(),
        "decode": samples.decode(),
    }
    for kind in ("prefill", "decode"):
        if len(points[kind]) < MIN_MEASUREMENTS:
            words = f"only {len(points[kind])} points of {kind} in {args.seconds:g} s"
            raise DisaggError(f"{words}: give --seconds more, and the instance no other traffic")
    Path(args.output).write_text(json.dumps(points, indent=1) + "\n")
    _report(points, samples.fewest(), args.output)
    return 0


def _check(args: argparse.Namespace) -> None:
    folder = Path(args.output).parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(args.output).is_dir():
        raise ConfigError(f"--output {args.output}: it is not a file that we may write")
    if not 0 < args.seconds < float("inf"):
        raise ConfigError("--seconds must be more than 0")
    if args.max_num_batched_tokens is not None and args.max_num_batched_tokens < 1:
        raise ConfigError("--max-num-batched-tokens must be 1 or more")


def _rounds(
    plan: Sequence[PrefillProbe | DecodeProbe],
    measure: Callable[[PrefillProbe | DecodeProbe], StepSample | None],
    seconds: float,
    clock: Callable[[], float],
) -> ProfileSamples:
    """Repeats the plan until `seconds` are over; later rounds skip points that would end late."""
    samples = ProfileSamples()
    took = dict[PrefillProbe | DecodeProbe, float]()
    began = told = clock()
    number = 0
    skipped = 0
    while skipped < len(plan) and clock() - began < seconds:
        number = number + 1
        skipped = 0
        for at, what in enumerate(plan):
            start = clock()
            if start - began + took.get(what, 0.0) >= seconds:
                skipped += 1
                continue
            if step := measure(what):
                samples.add(what, step)
            took[what] = clock() - start
            if clock() - told >= PROGRESS_INTERVAL_SECONDS:
                told = clock()
                _say(
                    f"round {number}: {at + 1} of {len(plan)} points, {told - began:.0f} of {seconds:.0f} s"
                )
    if missing := len(plan) - len(took):
        _say(
            f"warning: no time for {missing} of {len(plan)} points, the largest ones: give --seconds more"
        )
    return samples


def _report(points: dict[str, Any], fewest: int, path: str) -> None:
    prefill = points["prefill"]
    decode = points["decode"]
    for kind, rows, name in (("prefill", prefill, "tokens"), ("decode", decode, "contexts")):
        for row in rows:
            lengths = row[name]
            milliseconds = 1000 * row["seconds"]
            print(
                f"{kind:8} {len(lengths):4} x {round(statistics.mean(lengths)):6} tokens {milliseconds:10.2f} ms"
            )
    print(
        f"{len(prefill)} points of prefill, {len(decode)} of decode, KV cache of {points['kv_tokens']} tokens: {path}"
    )
    if fewest < MIN_MEASUREMENTS:
        _say(
            f"warning: some points were measured fewer than {MIN_MEASUREMENTS} times: give --seconds more"
        )


def _say(line: str) -> None:
    print(f"profile: {line}", file=sys.stderr, flush=True)


def _machine(url: str) -> str:
    """Describes this machine, if the instance runs on it."""
    if urlsplit(url).hostname not in ("127.0.0.1", "localhost", "::1"):
        return "another machine (--machine says which)"
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        names = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout.split("\n")
        if names[0].strip():
            return names[0].strip()
    cpu = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(
            line.partition(":")[2].strip() for line in lines if line.startswith("model name")
        )
    return f"{cpu}, {os.cpu_count()} logical CPUs"
