"""Samples of traffic: lengths, arrival times and shared prefixes.

One draw for each seed serves every placement and every rate (common random numbers).
"""

from __future__ import annotations

import os.path
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random

import msgspec

from ...errors import ConfigError
from ...workloads import traces
from ...workloads.lengths import NAMED_DISTRIBUTIONS, LengthDistribution
from ...workloads.traces import Trace, TraceRequest

MIN_CV = 1e-3  # of gamma arrivals: as even as a clock
MAX_CV = 100.0


class WorkloadSample(msgspec.Struct, frozen=True):
    """Requests of one seed.

    `gaps` are the times between arrivals in units of their mean; the first is 0. Results count
    `counted` only, without `edge` requests at either end.
    """

    prompts: list[int]
    outputs: list[int]
    gaps: list[float]
    prefixes: list[tuple[int, ...]] | None = None  # ids of each prompt's blocks
    # Ids of the blocks that an instance has when a request has ended there, as far as known.
    kept: list[tuple[int, ...]] | None = None  # None: those of the prompts
    block: int = traces.MOONCAKE_BLOCK_TOKENS  # tokens of a block
    edge: int = 0

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def counted(self) -> range:
        """Numbers of the requests between the edges."""
        return range(self.edge, len(self) - self.edge)

    def arrivals(self, rate: float) -> list[float]:
        """Returns arrival times in seconds, at `rate` requests/s."""
        now = 0.0
        times = []
        for gap in self.gaps:
            now += gap / rate
            times.append(now)
        return times


class Workload(msgspec.Struct, frozen=True):
    """Source of requests: a distribution, fixed lengths or a trace."""

    name: str
    lengths: LengthDistribution | None = None
    trace: Trace | None = None
    fixed: tuple[int, int] | None = None
    left_out: int = 0  # requests of the trace that were longer than a limit

    @property
    def longest(self) -> int:
        """Most tokens of a request, prompt and answer."""
        if self.trace:
            return max(row.prompt + row.answer for row in self.trace.requests)
        return self.lengths.limit - 1 if self.lengths else sum(self.fixed or (1, 1))

    @property
    def timed(self) -> bool:
        """Whether the trace has arrival times."""
        return self.trace is not None and self.trace.timed

    def sample(self, requests: int, seed: int, arrivals: Arrivals) -> WorkloadSample:
        """Draws `requests` requests; of a trace, the window that starts at seed * requests."""
        random = Random(f"{self.name}/{seed}")
        rows = self._window(requests, seed)
        if rows:
            pairs = [(row.prompt, row.answer) for row in rows]
        elif self.lengths:
            pairs = [self.lengths.draw(random) for _ in range(requests)]
        else:
            pairs = [self.fixed or (1, 1)] * requests
        gaps = [0.0]
        if arrivals.kind == "trace":
            gaps = _gaps_of(rows)
        else:
            gaps += arrivals.draw(random, len(pairs) - 1)
        has_prefixes = any(row.hash_ids for row in rows)
        block = self.trace.block if self.trace else traces.MOONCAKE_BLOCK_TOKENS
        kept = None
        if any(row.answer_ids for row in rows):
            kept = [(*row.hash_ids[: row.prompt // block], *row.answer_ids) for row in rows]
        return WorkloadSample(
            prompts=[prompt for prompt, _ in pairs],
            outputs=[output for _, output in pairs],
            gaps=gaps,
            prefixes=[row.hash_ids for row in rows] if has_prefixes else None,
            kept=kept,
            block=block,
        )

    def _window(self, requests: int, seed: int) -> Sequence[TraceRequest]:
        """Returns the requests of the trace that a seed selects; none without a trace."""
        rows = self.trace.requests if self.trace else ()
        start = seed * requests % max(1, len(rows) - requests + 1)
        return rows[start : start + requests]


class Arrivals(msgspec.Struct, frozen=True):
    """Arrival process, stretched to a rate.

    `kind` is poisson, gamma with a coefficient of variation `cv`, or trace for the trace's times.
    """

    kind: str
    cv: float = 1.0

    def draw(self, random: Random, count: int) -> Iterator[float]:
        """Draws gaps with mean 1."""
        shape = 1 / self.cv**2
        if self.kind == "poisson":
            return (random.expovariate(1.0) for _ in range(count))
        return (random.gammavariate(shape, 1 / shape) for _ in range(count))


def load(text: str) -> Workload:
    """Loads a workload by name, as IN:OUT, or by the path of a trace.

    Raises ConfigError with the accepted values.
    """
    if text in NAMED_DISTRIBUTIONS:
        return Workload(text, lengths=NAMED_DISTRIBUTIONS[text])
    fixed = text.replace("/", ":").split(":")
    if len(fixed) == 2 and all(part.isdecimal() for part in fixed):
        if max(map(len, fixed)) > len(str(traces.MAX_LENGTH)):
            raise ConfigError(f"--workload: {text[:80]} has more than {traces.MAX_LENGTH} tokens")
        if min(map(int, fixed)) < 1:
            raise ConfigError(f"--workload: {text} has a length of 0")
        return Workload(text, fixed=(int(fixed[0]), int(fixed[1])))
    path = Path(text)
    if not os.path.isfile(text):  # also False for a text that is too long for a path
        raise ConfigError(
            f"--workload: {text} is neither a file nor known: give one of"
            f" {', '.join(NAMED_DISTRIBUTIONS)}, IN:OUT in tokens, or a trace"
        )
    trace = traces.read(text, "--workload")
    if len(trace.requests) < 2:
        raise ConfigError(f"--workload {text}: it has 1 request; 2 or more are needed")
    return Workload(path.name, trace=trace)


def limited(workload: Workload, tokens: int, limiter: str = "--max-model-len") -> Workload:
    """Returns the workload without requests of more than `tokens` tokens, which vLLM refuses.

    `limiter` names what limits them. Raises ConfigError if fewer than two are left.
    """
    if workload.lengths:
        limit = min(workload.lengths.limit, tokens + 1)
        lengths = msgspec.structs.replace(workload.lengths, limit=limit)
        return msgspec.structs.replace(workload, lengths=lengths)
    if workload.trace:
        kept = [row for row in workload.trace.requests if row.prompt + row.answer <= tokens]
        if len(kept) >= 2:
            left_out = len(workload.trace.requests) - len(kept)
            trace = msgspec.structs.replace(workload.trace, requests=kept)
            return msgspec.structs.replace(workload, trace=trace, left_out=left_out)
    elif sum(workload.fixed or ()) <= tokens:
        return workload
    raise ConfigError(
        f"{limiter}: fewer than 2 requests of {workload.name} have at most {tokens} tokens"
    )


def arrivals(text: str, workload: Workload) -> Arrivals:
    """Parses poisson, gamma:CV or trace.

    An empty text selects the times of the trace, and poisson if there are none.
    """
    if not text:
        return Arrivals("trace" if workload.timed else "poisson")
    kind, _, value = text.partition(":")
    if kind == "trace" and not value:
        if not workload.timed:
            raise ConfigError(
                f"--arrivals trace: {workload.name} has no arrival times: give poisson or gamma:CV"
            )
        return Arrivals("trace")
    if kind == "poisson" and not value:
        return Arrivals("poisson")
    try:
        cv = float(value) if kind == "gamma" else 0.0
    except ValueError:
        cv = 0.0
    if not MIN_CV <= cv <= MAX_CV:
        raise ConfigError(
            f"--arrivals: {text} is not one of poisson, gamma:CV with CV from {MIN_CV:g} to"
            f" {MAX_CV:g}, trace"
        )
    return Arrivals("gamma", cv)


def extent(workload: Workload, arrivals: Arrivals, requests: int, seeds: int) -> tuple[int, int]:
    """Limits requests and seeds to those that a trace provides."""
    if not workload.trace:
        return requests, seeds
    available = len(workload.trace.requests)
    requests = min(requests, available)
    if arrivals.kind == "trace":
        seeds = min(seeds, available // requests)
    return requests, seeds


def _gaps_of(rows: Sequence[TraceRequest]) -> list[float]:
    """Returns the gaps of the trace in units of their mean."""
    times = [row.arrival for row in rows]
    mean = (times[-1] - times[0]) / max(1, len(times) - 1)
    if mean <= 0:
        raise ConfigError(
            "--workload: all requests of the trace arrive at once: give --arrivals poisson"
        )
    return [0.0, *((b - a) / mean for a, b in pairwise(times))]
