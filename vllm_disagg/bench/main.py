"""Measures the goodput of running deployments, side by side: `vllm-disagg bench`.

Each target first receives one request at a time. Then each round tries one more rate on every
target in turn. So a slowdown of the machine affects all targets.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from .. import http_client
from ..errors import ConfigError
from ..setting_values import GivenText
from ..workloads import lengths, traces
from . import instance, load, report, workload
from .load import BenchTarget, LoadGenerator
from .report import TargetRuns
from .results import BenchRun, GoodputObjectives
from .workload import RequestSchedule

MAX_COUNT = 10_000_000  # of requests and of tokens: more would fill memory
SEQUENTIAL_REQUESTS = 20  # requests sent one at a time, to begin with
EPILOG = (
    "One of --trace, --input-len with --output-len, and --workload gives the requests."
    " An API key is read from the environment variable OPENAI_API_KEY."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench`."""
    add = parser.add_argument
    parser.epilog = EPILOG
    add(
        "--target",
        metavar="NAME=URL",
        action="append",
        required=True,
        help="name and address of a running deployment; repeatable",
    )
    add(
        "--gpus",
        metavar="[NAME=]N",
        action="append",
        default=[],
        help="GPUs of a target, or of each target, for figures by GPU; repeatable",
    )
    add(
        "--ttft",
        metavar="SECONDS",
        type=_positive,
        required=True,
        help="objective: time to the first token",
    )
    add(
        "--tpot",
        metavar="SECONDS",
        type=_positive,
        required=True,
        help="objective: mean time per output token after the first, of a request",
    )
    add(
        "--attainment",
        metavar="SHARE",
        type=_share,
        default=0.9,
        help="share of requests that must meet both objectives (default: %(default)s)",
    )
    add(
        "--trace",
        action=GivenText,
        metavar="FILE",
        help=f"lengths and arrivals: {traces.ACCEPTED_FORMATS}",
    )
    add("--input-len", metavar="TOKENS", type=_count, help="length of all prompts")
    add("--output-len", metavar="TOKENS", type=_count, help="length of all answers")
    add(
        "--workload",
        choices=lengths.NAMED_DISTRIBUTIONS,
        help="lengths drawn from a distribution, as in vllm-disagg plan",
    )
    add(
        "--arrivals",
        choices=["poisson", "trace"],
        default="poisson",
        help="trace: the times of the trace, scaled to each rate (default: %(default)s)",
    )
    add(
        "--requests",
        metavar="N",
        type=_count,
        default=200,
        help="requests at each rate (default: %(default)s)",
    )
    add(
        "--precision",
        metavar="SHARE",
        type=_share,
        default=0.1,
        help="relative precision of the goodput (default: %(default)s)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="seed of lengths, arrivals and prompts (default: %(default)s)",
    )
    add(
        "--vllm",
        action=GivenText,
        metavar="PATH",
        default="",
        help="the vllm program (default: the one beside this Python)",
    )
    add(
        "--tokenizer",
        action=GivenText,
        metavar="NAME",
        default="",
        help="folder or name of the tokenizer, if not the model's own",
    )
    add(
        "--save",
        metavar="NAME",
        help="write NAME.json after each run, and NAME.png at the end",
    )
    add("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Runs `bench` and prints its table. Returns the exit status."""
    objectives = GoodputObjectives(args.ttft, args.tpot, args.attainment)
    schedule = _workload(args)
    vllm = load.find(args.vllm)
    if args.save is not None:
        _check_save(args.save)
    targets = _targets(args.target, args.gpus)
    schedule = _fitting(schedule, targets, args.requests)
    requests = schedule.requests
    if args.arrivals == "trace" and requests[0].arrival == requests[-1].arrival:
        raise ConfigError(
            f"--arrivals trace: the first {len(requests)} requests of the trace arrive at once"
        )
    measured = [TargetRuns(target) for target in targets]
    with _ends_by_signals(), _temporary_folder() as folder:
        generator = LoadGenerator(vllm, args.tokenizer, Path(folder))
        bench = GoodputBench(generator, schedule, objectives, args, measured)
        bench.alone()
        while bench.round():
            pass
    result = report.result(measured, objectives, done=True)
    if args.save:
        report.save(args.save, result)
        report.plot(args.save + ".png", measured, objectives)
    print(json.dumps(result) if args.json else report.table(measured, objectives))
    return 0


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Creates a folder for the load generator's files. Raises ConfigError where none can be."""
    try:
        return tempfile.TemporaryDirectory(prefix="vllm-disagg-bench-")
    except OSError as error:  # read-only or full
        raise ConfigError(
            f"no folder for temporary files can be used ({error.strerror}); set TMPDIR to one"
        ) from None


@contextmanager
def _ends_by_signals() -> Iterator[None]:
    """Has SIGTERM and SIGHUP raise SystemExit, so that the load generator is ended too."""

    def end(number: int, _: object) -> None:
        # A closed terminal may send two: a second one would cut the cleaning up short.
        for handled in before:
            signal.signal(handled, signal.SIG_IGN)
        sys.exit(128 + number)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    # One that is ignored, as SIGHUP by nohup, stays ignored.
    before = {n: h for n in numbers if (h := signal.getsignal(n)) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class GoodputBench:
    """Runs on all targets, with progress lines."""

    def __init__(
        self,
        generator: LoadGenerator,
        schedule: RequestSchedule,
        objectives: GoodputObjectives,
        args: argparse.Namespace,
        measured: Sequence[TargetRuns],
    ) -> None:
        self._generator = generator
        self._schedule = schedule
        self._objectives = objectives
        self._measured = measured
        self._seed = args.seed
        self._precision = args.precision
        self._save = args.save
        self._poisson = args.arrivals == "poisson"
        self._round = 0  # all runs of a round have the same prompts

    def alone(self) -> None:
        """Sends one request at a time: tests feasibility and gives a first rate."""
        schedule = self._schedule.first(SEQUENTIAL_REQUESTS)
        for one in self._measured:
            one.alone = self._run(one, schedule, None)
            self._save_so_far()
            if one.alone.failed == one.alone.sent:
                raise ConfigError(
                    f"{one.target.name}: no request was answered in full: {one.alone.error}"
                )

    def round(self) -> bool:
        """Tries one more rate on each unfinished target. Returns False when all are finished."""
        self._round += 1
        rates = [(one, one.next_rate(self._objectives, self._precision)) for one in self._measured]
        for one, rate in rates:
            if rate is not None:
                seed = self._seed if self._poisson else None
                one.runs.append(self._run(one, self._schedule.at_rate(rate, seed), rate))
                self._save_so_far()
        return any(rate is not None for _, rate in rates)

    def _run(self, one: TargetRuns, schedule: RequestSchedule, rate: float | None) -> BenchRun:
        """Sends a schedule to one target, with a progress line."""
        count = len(schedule.requests)
        load_text = f"{count} requests, one at a time"
        if rate:
            seconds = count / rate
            load_text = f"{count} requests at {rate:.3g} a second (about {seconds:.0f} s)"
        print(f"bench: {one.target.name}: {load_text} ...", end="", file=sys.stderr, flush=True)
        seed = self._seed + 1000 * self._round
        try:
            finished = self._generator.run(one.target, schedule, rate, self._objectives, seed)
        except BaseException:
            print(file=sys.stderr)
            raise
        print(f" {report.line(finished, self._objectives)}", file=sys.stderr, flush=True)
        return finished

    def _save_so_far(self) -> None:
        """Saves the results so far, in case of an interruption."""
        if self._save:
            report.save(self._save, report.result(self._measured, self._objectives, done=False))


def _workload(args: argparse.Namespace) -> RequestSchedule:
    """Returns the requests that the flags give."""
    fixed = args.input_len is not None or args.output_len is not None
    if [bool(args.trace), fixed, bool(args.workload)].count(True) != 1:
        raise ConfigError(
            "give exactly one of --trace, --input-len with --output-len, and --workload"
        )
    if args.arrivals == "trace" and not args.trace:
        raise ConfigError("--arrivals trace needs a --trace")
    if args.trace:
        trace = traces.read(args.trace, "--trace")
        if args.arrivals == "trace" and not trace.timed:
            raise ConfigError(f"--arrivals trace: {args.trace} has no arrival times")
        return workload.from_trace(trace)
    if args.workload:
        return workload.drawn(lengths.NAMED_DISTRIBUTIONS[args.workload], args.requests, args.seed)
    if args.input_len is None or args.output_len is None:
        raise ConfigError("--input-len and --output-len go together")
    return workload.fixed(args.input_len, args.output_len, args.requests)


def _fitting(
    schedule: RequestSchedule, targets: Sequence[BenchTarget], count: int
) -> RequestSchedule:
    """Returns the first `count` requests that the models of all targets accept.

    Raises ConfigError if there are fewer than two.
    """
    limits = [target.model.max_model_len for target in targets if target.model.max_model_len]
    limit = min(limits, default=None)
    total = len(schedule.requests)
    fitting = schedule.fitting(limit)
    kept = len(fitting.requests)
    if kept < total:
        dropped = f"{total - kept} of {total} requests"
        print(
            f"bench: {dropped} exceed the model's limit of {limit} tokens; they are not sent",
            file=sys.stderr,
        )
    if kept < 2:
        raise ConfigError(f"only {kept} of the requests fit into the model's {limit} tokens")
    if count > kept:
        print(f"bench: there are only {kept} requests to send", file=sys.stderr)
    return fitting.first(count)


def _targets(words: Sequence[str], gpus: Sequence[str]) -> list[BenchTarget]:
    """Parses --target and --gpus, and requests the model of each target."""
    urls: dict[str, str] = {}
    for word in words:
        name, _, url = word.partition("=")
        if not name or not url or "/" in name:
            raise ConfigError(f"--target {word}: give NAME=URL, such as ours=http://127.0.0.1:8000")
        if name in urls:
            raise ConfigError(f"--target {name} is given twice")
        urls[name] = http_client.address(f"--target {name}", url)
    counts = _gpus(gpus, list(urls))
    targets = []
    for name, url in urls.items():
        targets.append(BenchTarget(name, url, counts.get(name), instance.model(url)))
    models = {target.model.root or target.model.id for target in targets}
    if len(models) > 1:
        print(
            f"bench: warning: the targets serve different models: {', '.join(sorted(models))}",
            file=sys.stderr,
        )
    return targets


def _gpus(words: Sequence[str], names: Sequence[str]) -> dict[str, int]:
    """Parses --gpus into the number of GPUs of each target."""
    counts: dict[str, int] = {}
    for word in words:
        name, _, number = word.rpartition("=")
        if not number.isdecimal() or int(number) < 1 or (name and name not in names):
            raise ConfigError(
                f"--gpus {word}: give N or NAME=N, with the NAME of a target and N of 1 or more"
            )
        counts.update(dict.fromkeys([name] if name else names, int(number)))
    if missing := [name for name in names if counts and name not in counts]:
        raise ConfigError(f"--gpus: give the number of GPUs of {missing[0]} too")
    return counts


def _check_save(name: str) -> None:
    """Raises ConfigError before any work if --save cannot be written."""
    if not name:  # a variable that is not set
        raise ConfigError("--save: an empty text names no file; leave the flag out")
    if not find_spec("matplotlib"):
        raise ConfigError(
            "--save needs matplotlib, which is not installed: pip install 'vllm-disagg[plot]'"
        )
    folder = Path(name).parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"--save {name}: {folder} is not a writable folder")


def _positive(text: str) -> float:
    return _number(text, 0.0, math.inf, "a number above 0")


def _share(text: str) -> float:
    return _number(text, 0.0, 1.0 + 1e-9, "a share above 0, of at most 1")


def _number(text: str, low: float, high: float, expected: str) -> float:
    """Parses a number between two limits, both excluded."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not low < number < high:
        raise argparse.ArgumentTypeError(f"{text} is not {expected}")
    return number


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > len(str(MAX_COUNT)) or not 1 <= int(text) <= MAX_COUNT:
        raise argparse.ArgumentTypeError(f"{text[:80]} is not a number from 1 to {MAX_COUNT}")
    return int(text)
