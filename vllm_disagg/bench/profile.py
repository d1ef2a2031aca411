"""Measures prefill and decode times of one instance for the planner: `vllm-disagg profile`.

Prompts are fresh random token ids, so that no prefix cache holds them. Rounds measure all points,
small ones first, until the time is over. The file holds the medians.
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
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from .. import http_client
from ..errors import ConfigError, DisaggError
from ..setting_values import GivenText
from . import handoff, instance, neighbours, steps
from .steps import PROBE_TOKEN_IDS, DecodeProbe, MixedProbe, Probe, StepSample
from .stream import complete

# Of a point, for a useful median; also the least number of points of each kind, for a useful fit.
MIN_MEASUREMENTS = 3
PROGRESS_INTERVAL_SECONDS = 5.0  # between two progress lines
HANDOFF_SHARE = 0.25  # of --seconds, behind them


class ProfileSamples:
    """Measurements, and the points computed from them."""

    def __init__(self) -> None:
        # Seconds of one prompt from its arrival to the first token, by its length.
        self._alone: dict[int, list[float]] = {}
        # Seconds of the step alone, by the lengths of prompts that had waited for it.
        self._queued: dict[tuple[int, ...], list[float]] = {}
        self._decode: dict[DecodeProbe, list[StepSample]] = {}
        self._mixed: dict[MixedProbe, list[StepSample]] = {}

    def add(self, probe: Probe, step: StepSample) -> None:
        """Adds one measurement."""
        if isinstance(probe, MixedProbe):
            self._mixed.setdefault(probe, []).append(step)
        elif isinstance(probe, DecodeProbe):
            self._decode.setdefault(probe, []).append(step)
        elif probe.ahead:
            self._queued.setdefault(step.lengths, []).append(step.seconds)
        else:
            self._alone.setdefault(step.lengths[0], []).append(step.seconds)

    def fewest(self) -> int:
        """Returns the number of measurements of the point that has the fewest."""
        counts = [len(times) for times in self._alone.values()]
        counts += [len(times) for times in self._queued.values()]
        counts += [len(steps) for steps in self._decode.values()]
        counts += [len(steps) for steps in self._mixed.values()]
        return min(counts, default=0)

    def path(self) -> dict[str, float]:
        """Returns the seconds of a request outside the engine, fixed and per prompt token.

        A single prompt was measured twice: from its arrival, and as a step that it had waited for.
        The difference is the path of its request to the engine and back.
        """
        differences = []
        for lengths, times in self._queued.items():
            if len(lengths) == 1 and lengths[0] in self._alone:
                whole = statistics.median(self._alone[lengths[0]])
                differences.append((lengths[0], whole - statistics.median(times)))
        fixed, per_token = steps.path_line(differences)
        return {"seconds": round(fixed, 6), "seconds_per_token": round(per_token, 9)}

    def prefill(self) -> list[dict[str, object]]:
        """Returns prefill points, with the seconds of their steps and without the path."""
        path = self.path()
        points: dict[tuple[int, ...], float] = {}
        for length, times in self._alone.items():
            delay = path["seconds"] + path["seconds_per_token"] * length
            points[length,] = statistics.median(times) - delay
        for lengths, times in self._queued.items():
            points[lengths] = statistics.median(times)
        return [
            {"tokens": list(lengths), "seconds": round(seconds, 6)}
            for lengths, seconds in points.items()
            if seconds > 0
        ]

    def decode(self) -> list[dict[str, object]]:
        """Returns the median decode point of each probe."""
        points: list[dict[str, object]] = []
        for measured in self._decode.values():
            step = _middle(measured)
            points.append({"contexts": list(step.lengths), "seconds": round(step.seconds, 6)})
        return points

    def mixed(self) -> list[dict[str, object]]:
        """Returns the median point of each prompt beside decodes."""
        points: list[dict[str, object]] = []
        for probe, measured in self._mixed.items():
            step = _middle(measured)
            contexts = list(step.lengths)
            seconds = round(step.seconds, 6)
            points.append({"tokens": [probe.prompt], "contexts": contexts, "seconds": seconds})
        return points


def _middle(measured: Sequence[StepSample]) -> StepSample:
    """Returns the median sample."""
    ordered = sorted(measured, key=lambda step: step.seconds)
    return ordered[(len(ordered) - 1) // 2]


class InstanceProfiler:
    """Measures one instance."""

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = model
        self._random = random.Random()
        self._gap = 0.0  # seconds; tokens less than this apart are of one step

    def warm_up(self) -> None:
        """Warms up, and measures the shortest step."""
        self._gap = max(0.001, min(self._first_tokens([16])[0] for _ in range(5)) / 4)

    def measure(self, probe: Probe) -> StepSample | None:
        """Measures a probe once. Returns None if the answers do not show a step."""
        if isinstance(probe, MixedProbe):
            return self._mixed_step(probe)
        if isinstance(probe, DecodeProbe):
            prompts = [self._prompt(probe.context) for _ in range(probe.batch)]
            answers = complete(self._url, self._model, prompts, probe.answer)
            return steps.decode_step(probe.context, answers)
        if not probe.ahead:
            return StepSample(probe.prompts, self._first_tokens(probe.prompts)[0])
        lengths = (probe.ahead, *probe.prompts)
        return steps.batch_step(lengths, self._first_tokens(lengths), self._gap)

    def _mixed_step(self, probe: MixedProbe) -> StepSample | None:
        """Sends a prompt while a batch decodes, and measures the step that computes it."""
        batch = probe.decodes
        prompts = [self._prompt(batch.context) for _ in range(batch.batch)]
        origin = time.monotonic()
        decoding = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(
                complete, self._url, self._model, prompts, batch.answer, origin, decoding.set
            )
            running.add_done_callback(lambda _: decoding.set())  # a failure ends the wait too
            decoding.wait()
            end = self._first_tokens([probe.prompt], origin)[0]
            answers = running.result()
        return steps.mixed_step(batch.context, answers, end, self._gap)

    def _first_tokens(self, lengths: Sequence[int], origin: float | None = None) -> list[float]:
        """Returns the times of the first tokens of several prompts sent together.

        They are in seconds since the prompts were sent, or since `origin`.
        """
        prompts = [self._prompt(length) for length in lengths]
        answers = complete(self._url, self._model, prompts, 1, origin)
        return [events[0].time for events in answers]

    def _prompt(self, length: int) -> list[int]:
        return self._random.choices(PROBE_TOKEN_IDS, k=length)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `profile`."""
    add = parser.add_argument
    parser.epilog = "An API key is read from the environment variable OPENAI_API_KEY."
    add(
        "url",
        metavar="URL",
        help="an instance (not a proxy) without other traffic: http://127.0.0.1:8100",
    )
    add(
        "--output",
        metavar="FILE",
        required=True,
        help="file of measured points to write, for vllm-disagg plan --profile",
    )
    add(
        "--seconds",
        metavar="N",
        type=float,
        default=120.0,
        help="duration of the measurement (default: %(default)g)",
    )
    add(
        "--max-num-batched-tokens",
        metavar="N",
        type=int,
        help="the instance's token budget of a step; its API does not expose it",
    )
    add(
        "--beside",
        metavar="URL",
        action="append",
        default=[],
        help="another instance on the same machine, kept under load during the measurement;"
        " repeatable",
    )
    add(
        "--handoff",
        action=GivenText,
        metavar="URL",
        help="a proxy in front of prefill and decode instances: measures too how long KV takes from"
        " one to the other",
    )
    add(
        "--machine",
        metavar="WORDS",
        default="",
        help="description of the machine, for the file",
    )


def run(args: argparse.Namespace) -> int:
    """Runs `profile` and writes the points. Returns the exit status."""
    url = http_client.address("URL", args.url)
    _check(args)
    model = instance.model(url)
    kv_tokens = instance.kv_tokens(url)
    version = instance.version(url)
    if not model.max_model_len:
        raise ConfigError(f"{url}/v1/models lacks max_model_len: the server is not vLLM")
    neighbour_urls = [http_client.address("--beside", other) for other in args.beside]
    if url in neighbour_urls:
        raise ConfigError(f"--beside: {url} is the measured instance")
    beside = [(other, instance.model(other)) for other in neighbour_urls]
    proxy = http_client.address("--handoff", args.handoff) if args.handoff else ""
    decodes = handoff.decode_instances(proxy) if proxy else []
    plan = steps.plan(model.max_model_len, kv_tokens, args.max_num_batched_tokens)
    profile = InstanceProfiler(url, model.id)
    with neighbours.busy(beside):
        profile.warm_up()
        samples = _rounds(plan, profile.measure, args.seconds, time.monotonic)
    handed_over = None
    if proxy:
        _say(f"measuring hand-offs for {args.seconds * HANDOFF_SHARE:.0f} s")
        longest = min(model.max_model_len - handoff.ANSWER_TOKENS, steps.MAX_PROMPT_TOKENS)
        seconds = args.seconds * HANDOFF_SHARE
        handed_over = handoff.measure(proxy, decodes, instance.model(proxy), longest, seconds)
    gpu = _gpu(url)
    points: dict[str, Any] = {
        "version": 2,
        "model": model.root or model.id,  # what `vllm serve` takes: the name may be an alias
        "vllm": version,
        "machine": args.machine or gpu or _machine(url),
        "gpu": gpu,
        "tensor_parallel_size": instance.tensor_parallel_size(url, model.id),
        "beside": len(beside),
        "kv_tokens": kv_tokens,
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "path": samples.path(),
        "prefill": samples.prefill(),
        "decode": samples.decode(),
        "mixed": samples.mixed(),
    }
    if handed_over:
        points["handoff"] = msgspec.to_builtins(handed_over)
    for kind in ("prefill", "decode"):
        if len(points[kind]) < MIN_MEASUREMENTS:
            found = f"only {len(points[kind])} points of {kind} in {args.seconds:g} s"
            raise DisaggError(f"{found}: give more --seconds, and stop other traffic")
    try:
        Path(args.output).write_text(json.dumps(points, indent=1) + "\n")
    except OSError as error:
        raise DisaggError(f"--output {args.output}: {error.strerror}") from None
    _report(points, samples.fewest(), args.output)
    return 0


def _check(args: argparse.Namespace) -> None:
    output = Path(args.output)
    try:
        # A new file needs a folder that can be written, an old one only itself.
        written = output if output.exists() else output.parent
        is_writable = not output.is_dir() and written.exists() and os.access(written, os.W_OK)
    except OSError:  # such as a name that is too long
        is_writable = False
    if not is_writable:
        raise ConfigError(f"--output {args.output}: cannot write such a file")
    if not 0 < args.seconds < float("inf"):
        raise ConfigError("--seconds must be more than 0")
    if args.max_num_batched_tokens is not None and args.max_num_batched_tokens < 1:
        raise ConfigError("--max-num-batched-tokens must be 1 or more")


def _rounds(
    plan: Sequence[Probe],
    measure: Callable[[Probe], StepSample | None],
    seconds: float,
    clock: Callable[[], float],
) -> ProfileSamples:
    """Repeats the plan until `seconds` are over; later rounds skip points that would end late."""
    samples = ProfileSamples()
    durations = dict[Probe, float]()
    started_at = clock()
    printed_at = started_at
    number = 0
    skipped = 0
    while skipped < len(plan) and clock() - started_at < seconds:
        number += 1
        skipped = 0
        for position, probe in enumerate(plan, 1):
            probe_started_at = clock()
            if probe_started_at - started_at + durations.get(probe, 0.0) >= seconds:
                skipped += 1
                continue
            if step := measure(probe):
                samples.add(probe, step)
            durations[probe] = clock() - probe_started_at
            if clock() - printed_at >= PROGRESS_INTERVAL_SECONDS:
                printed_at = clock()
                elapsed = f"{printed_at - started_at:.0f} of {seconds:.0f} s"
                _say(f"round {number}: {position} of {len(plan)} points, {elapsed}")
    if missing := len(plan) - len(durations):
        _say(
            f"warning: no time for {missing} of {len(plan)} points, the largest ones:"
            " give more --seconds"
        )
    return samples


def _report(points: dict[str, Any], fewest: int, path: str) -> None:
    """Prints the points, and a warning if a point has few measurements."""
    for kind, name in (("prefill", "tokens"), ("decode", "contexts")):
        for row in points[kind]:
            lengths = row[name]
            mean = round(statistics.mean(lengths))
            milliseconds = 1000 * row["seconds"]
            print(f"{kind:8} {len(lengths):4} x {mean:6} tokens {milliseconds:10.2f} ms")
    for row in points["mixed"]:
        sequences = f"{len(row['contexts']):4} x {round(statistics.mean(row['contexts'])):6}"
        milliseconds = 1000 * row["seconds"]
        print(f"mixed    {sequences} tokens {milliseconds:10.2f} ms beside {row['tokens'][0]}")
    fixed = 1e3 * points["path"]["seconds"]
    per_token = 1e6 * points["path"]["seconds_per_token"]
    print(f"path of a request: {fixed:.2f} ms + {per_token:.2f} us/token")
    if found := points.get("handoff"):
        per_byte = found["seconds_per_byte"]
        rate = f" + the missing bytes at {1e-9 / per_byte:.2f} GB/s" if per_byte else ""
        print(
            f"hand-off after the prefill: {1e3 * found['mean']:.2f} ms in the mean;"
            f" {1e3 * found['seconds']:.2f} ms{rate}"
        )
    size = points["tensor_parallel_size"] or "not known, counted as 1"
    print(f"tensor parallel size, by the engine's answers: {size}")
    counts = ", ".join(
        f"{len(points[kind])} points of {name}"
        for kind, name in (("prefill", "prefill"), ("decode", "decode"), ("mixed", "both"))
    )
    print(f"{counts}, KV cache of {points['kv_tokens']} tokens: {path}")
    if fewest < MIN_MEASUREMENTS:
        _say(
            f"warning: some points were measured fewer than {MIN_MEASUREMENTS} times:"
            " give more --seconds"
        )


def _say(line: str) -> None:
    """Prints a progress line or a warning."""
    print(f"profile: {line}", file=sys.stderr, flush=True)


def _is_local(url: str) -> bool:
    """Returns whether the instance runs on this machine."""
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")


def _gpu(url: str) -> str:
    """Returns this machine's first GPU, if the instance runs on it; empty without one."""
    if not _is_local(url):
        return ""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return listed.stdout.partition("\n")[0].strip()
    return ""


def _machine(url: str) -> str:
    """Describes this machine by its CPUs, if the instance runs on it."""
    if not _is_local(url):
        return "another machine (describe it with --machine)"
    cpu = platform.processor() or platform.machine()
    with suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("model name"))
        cpu = line.partition(":")[2].strip()
    return f"{cpu}, {os.cpu_count()} logical CPUs"
