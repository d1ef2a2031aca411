"""Parses the file of `vllm bench serve --save-detailed` into figures; pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from ..errors import DisaggError

Z_SCORE_95 = 1.96  # standard deviations to either side of a 95 % interval


class GoodputObjectives(msgspec.Struct, frozen=True):
    """Limits of latency, and the share of requests that must meet both.

    A request is good if it meets both limits. A rate is met if enough requests are good.
    """

    ttft: float  # seconds
    tpot: float  # seconds, mean of a request
    attainment: float  # share of good requests, of all that were sent

    def words(self) -> str:
        """Describes the objectives for people."""
        return (
            f"at least {100 * self.attainment:.4g} % of requests get the first token within"
            f" {self.ttft:g} s and each further one within {self.tpot:g} s on average"
        )


class LatencyPercentiles(msgspec.Struct, frozen=True):
    """Percentiles in seconds over the complete answers; None without any.

    Percentiles of `itl` are over all gaps of those answers.
    """

    median: float | None
    p90: float | None
    p99: float | None


class BenchRun(msgspec.Struct, frozen=True):
    """One run of `vllm bench serve`."""

    rate: float | None  # requested rate in requests/s; None: one request at a time
    sent: int
    good: int
    failed: int  # errors, and answers that ended early; not good, and in none of the latencies
    attainment: float
    interval: tuple[float, float]  # Wilson's 95 % interval of the attainment
    offered: float | None  # requests/s that were really sent
    qps: float  # answered requests/s, over the whole run
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft: LatencyPercentiles
    tpot: LatencyPercentiles  # of a request: mean time between its tokens
    itl: LatencyPercentiles  # between two tokens that follow each other
    mean_latency: float | None  # of a whole request, seconds
    error: str = ""  # of one failed request, or the reason why there are no results

    def met(self, objectives: GoodputObjectives) -> bool:
        """Returns whether enough requests were good."""
        return self.attainment >= objectives.attainment

    def is_late(self) -> bool:
        """Whether the load generator could not keep up with the rate."""
        return bool(self.rate and self.offered and self.offered < 0.9 * self.rate)


class _DetailedResults(msgspec.Struct):
    """Required fields of vLLM's result file (`vllm/benchmarks/serve.py`, 0.28 to 0.33)."""

    duration: float
    input_lens: list[int]
    output_lens: list[int]
    ttfts: list[float]
    itls: list[list[float]]
    start_times: list[float]
    errors: list[str]


def parse(
    content: bytes, rate: float | None, answers: Sequence[int], objectives: GoodputObjectives
) -> BenchRun:
    """Parses a result file; `answers` are the requested tokens of each request, in order.

    Raises DisaggError for an invalid file.
    """
    try:
        raw = msgspec.json.decode(content, type=_DetailedResults)
    except msgspec.DecodeError as error:
        raise DisaggError(f"vllm bench serve wrote an unknown format: {error}") from None
    columns = (raw.output_lens, raw.ttfts, raw.itls, raw.errors, raw.input_lens, raw.start_times)
    if any(len(column) != len(answers) for column in columns):
        raise DisaggError(
            f"vllm bench serve wrote results of {len(raw.ttfts)} requests instead of {len(answers)}"
        )
    # vLLM counts an answer that ends early as a success, and guesses its length. Here only an
    # answer of the requested length is complete.
    complete = []
    for number, requested in enumerate(answers):
        if not raw.errors[number] and raw.output_lens[number] == requested:
            complete.append(number)
    ttft = {number: raw.ttfts[number] for number in complete}
    decode = {number: sum(raw.itls[number]) for number in complete}  # seconds after the first token
    tpot = {}
    for number in complete:
        gaps = answers[number] - 1
        tpot[number] = decode[number] / gaps if gaps > 0 else 0.0  # one token has no gap
    good = 0
    for number in complete:
        good += ttft[number] <= objectives.ttft and tpot[number] <= objectives.tpot
    sent_at = sorted(time for time in raw.start_times if time > 0)
    span = sent_at[-1] - sent_at[0] if sent_at else 0.0
    total = [ttft[number] + decode[number] for number in complete]
    return BenchRun(
        rate=rate,
        sent=len(answers),
        good=good,
        failed=len(answers) - len(complete),
        attainment=good / len(answers),
        interval=wilson(good, len(answers)),
        offered=(len(sent_at) - 1) / span if rate and span else None,
        qps=_per_second(len(complete), raw),
        prompt_tokens_per_s=_per_second(sum(raw.input_lens[n] for n in complete), raw),
        output_tokens_per_s=_per_second(sum(answers[n] for n in complete), raw),
        ttft=latency(list(ttft.values())),
        tpot=latency([tpot[number] for number in complete if answers[number] > 1]),
        itl=latency([gap for number in complete for gap in raw.itls[number]]),
        mean_latency=sum(total) / len(total) if total else None,
        error=_error(raw.errors, len(complete) == len(answers)),
    )


def _per_second(count: int, raw: _DetailedResults) -> float:
    """Returns a rate over the whole run; 0 for a run without duration."""
    return count / raw.duration if raw.duration else 0.0


def aborted_run(rate: float, sent: int, reason: str) -> BenchRun:
    """Returns an aborted run: all its requests count as missed."""
    none = LatencyPercentiles(None, None, None)
    return BenchRun(
        rate=rate,
        sent=sent,
        good=0,
        failed=sent,
        attainment=0.0,
        interval=wilson(0, sent),
        offered=None,
        qps=0.0,
        prompt_tokens_per_s=0.0,
        output_tokens_per_s=0.0,
        ttft=none,
        tpot=none,
        itl=none,
        mean_latency=None,
        error=reason,
    )


def _error(errors: list[str], are_complete: bool) -> str:
    """Returns the last line of the first error; vLLM keeps whole tracebacks."""
    for error in errors:
        if error.strip():
            return error.strip().splitlines()[-1]
    return "" if are_complete else "an answer ended before its last token"


def latency(values: list[float]) -> LatencyPercentiles:
    """Computes percentiles of seconds."""
    if not values:
        return LatencyPercentiles(None, None, None)
    return LatencyPercentiles(*(float(p) for p in np.percentile(values, (50, 90, 99))))


def wilson(good: int, sent: int) -> tuple[float, float]:
    """Returns the 95 % confidence interval of a share (E. B. Wilson, 1927)."""
    share = good / sent
    z2 = Z_SCORE_95 * Z_SCORE_95
    middle = (share + z2 / (2 * sent)) / (1 + z2 / sent)
    root = math.sqrt(share * (1 - share) / sent + z2 / (4 * sent * sent))
    half = Z_SCORE_95 / (1 + z2 / sent) * root
    return max(0.0, middle - half), min(1.0, middle + half)
