"""Parses the file of `vllm bench serve --save-detailed` into figures; pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from ..errors import DisaggError

Z_SCORE_95 = 1.96  # standard deviations to either side of a 95 % interval


class GoodputObjectives(msgspec.Struct, frozen=True):
    """Objectives: a request is good if it meets both times; a rate is met if enough requests are
    good.
    """

    ttft: float  # seconds to the first token
    tpot: float  # seconds for each further one, on average over the request
    attainment: float  # share of good requests, of all that were sent

    def words(self) -> str:
        """Describes the objectives for people."""
        return (
            f"at least {100 * self.attainment:.4g} % of requests get the first token within {self.ttft:g} s and "
            f"each further one within {self.tpot:g} s on average"
        )


class LatencyPercentiles(msgspec.Struct, frozen=True):
    """Seconds over the completely answered requests (over all gaps, for `itl`); None without any."""

    median: float | None
    p90: float | None
    p99: float | None


class BenchRun(msgspec.Struct, frozen=True):
    """One run of `vllm bench serve`."""

    rate: float | None  # requests a second as asked for; None: one request at a time
    sent: int
    good: int
    failed: int  # errors, and answers that ended early; not good, and in none of the latencies
    attainment: float
    interval: tuple[float, float]  # 95 %, Wilson's, of the attainment
    offered: float | None  # requests a second as they were really sent
    qps: float  # answered requests a second, over the whole run
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    ttft: LatencyPercentiles
    tpot: LatencyPercentiles  # of a request: mean time between its tokens
    itl: LatencyPercentiles  # between two tokens that follow each other
    mean_latency: float | None  # of a whole request, seconds
    error: str = ""  # one of the failed requests' errors, or why there are no results at all

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
        raise DisaggError(f"what vllm bench serve wrote is not understood: {error}") from None
    columns = (raw.output_lens, raw.ttfts, raw.itls, raw.errors, raw.input_lens, raw.start_times)
    if any(len(column) != len(answers) for column in columns):
        raise DisaggError(
            f"vllm bench serve wrote results of {len(raw.ttfts)} requests instead of {len(answers)}"
        )
    # vLLM calls an answer that ends early a success, and guesses its length: only the length asked
    # for is an answer.
    whole = [
        not error and length == asked
        for error, length, asked in zip(raw.errors, raw.output_lens, answers, strict=True)
    ]
    done = [at for at, is_whole in enumerate(whole) if is_whole]
    ttft = {at: raw.ttfts[at] for at in done}
    tpot = {at: sum(raw.itls[at]) / (answers[at] - 1) if answers[at] > 1 else 0.0 for at in done}
    good = sum(ttft[at] <= objectives.ttft and tpot[at] <= objectives.tpot for at in done)
    begun = sorted(time for time in raw.start_times if time > 0)
    span = begun[-1] - begun[0] if begun else 0.0
    return BenchRun(
        rate=rate,
        sent=len(answers),
        good=good,
        failed=len(answers) - len(done),
        attainment=good / len(answers),
        interval=wilson(good, len(answers)),
        offered=(len(begun) - 1) / span if rate and span else None,
        qps=len(done) / raw.duration if raw.duration else 0.0,
        prompt_tokens_per_s=sum(raw.input_lens[at] for at in done) / raw.duration
        if raw.duration
        else 0.0,
        output_tokens_per_s=sum(answers[at] for at in done) / raw.duration if raw.duration else 0.0,
        ttft=latency(list(ttft.values())),
        tpot=latency([tpot[at] for at in done if answers[at] > 1]),
        itl=latency([gap for at in done for gap in raw.itls[at]]),
        mean_latency=sum(ttft[at] + sum(raw.itls[at]) for at in done) / len(done) if done else None,
        error=_error(raw.errors, whole),
    )


def aborted_run(rate: float, sent: int, why: str) -> BenchRun:
    """Returns an aborted run: all its requests count as missed."""
    none = LatencyPercentiles(None, None, None)
    return BenchRun(
        rate, sent, 0, sent, 0.0, wilson(0, sent), None, 0.0, 0.0, 0.0, none, none, none, None, why
    )


def _error(errors: list[str], whole: list[bool]) -> str:
    """Returns the last line of the first error; vLLM keeps whole tracebacks."""
    told = next((error.strip().splitlines()[-1] for error in errors if error.strip()), "")
    return told or ("" if all(whole) else "an answer ended before its last token")


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
    half = (
        Z_SCORE_95
        / (1 + z2 / sent)
        * math.sqrt(share * (1 - share) / sent + z2 / (4 * sent * sent))
    )
    return max(0.0, middle - half), min(1.0, middle + half)
