"""Runs of a workload at several rates, beside their predictions from windows around the runs.

The first window alone chooses the rates. A shorter one follows each run. In the end each run is
predicted again from all windows together, the first one too, and judged by that. No run is in a
profile: windows have the clients of their closed loop, and other requests.

Steps of few sequences do not show how those of many grow. So a window has about as many clients as
requests decode at the goodput that it predicts; else one with twice as many takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any, Protocol

from attainment import RateCount, bracket, goodput_interval, next_rate, rate_to_repeat
from loops import Lengths, OpenRun
from predictions import (
    MIN_REQUESTS,
    OBJECTIVE,
    Prediction,
    Run,
    met,
    part,
    predicted,
    prediction_of,
    requests_at,
    row,
)
from profile_windows import (
    StackAddresses,
    StackWindow,
    drift_words,
    mean_sequences,
    multiples,
    profile_of,
    steps_of,
)

from vllm_disagg.errors import ConfigError, DisaggError
from vllm_disagg.planner.commands import engine_profiles
from vllm_disagg.planner.simulation.workload import WorkloadSample
from vllm_disagg.product_sums import steps_by_kind

RATE_RATIOS = (0.7, 0.95, 1.25)  # of the predicted goodput
FURTHER_RATIO = 1.4  # between further rates, which are sent for the goodput only
CLOSE_RATIO = 1.15  # of the two rates around a goodput
MAX_FURTHER_RATES = 6
LEAST_RATE_RATIO = 0.125  # to the first predicted goodput: a lower goodput is not sought
MAX_SIMULATED_RATES = 12  # beside those of the runs
REPEATED_RUNS = 4  # of rates around the measured goodput
MAX_RUNS = len(RATE_RATIOS) + MAX_FURTHER_RATES + REPEATED_RUNS
MIN_REPEATED_REQUESTS = 100  # of a run of a rate around the measured goodput
GOODPUT_REQUESTS = 200  # of a simulation for a goodput, or more
WARM_UP_SECONDS = 3.0
CLIENTS = (1, 2, 4)  # of a closed loop in turn, for each engine that decodes; more if need be
MAX_DECODING_RATIO = 1.5  # of the requests that decode at a goodput, to the clients of its window
MAX_OTHER_FIRST_WINDOWS = 3
# Of the first window. With a third the windows would take more than a quarter of the time before.
LATER_WINDOW_SHARE = 0.25


class Loops(Protocol):
    """A running stack, as `measured_stack.py` has it. Each loop returns its own window."""

    addresses: StackAddresses

    def closed(
        self, requests: Iterator[Lengths], seconds: float, clients: Sequence[int]
    ) -> tuple[int, StackWindow]:
        """Runs a closed loop for some seconds; returns its failed requests, too."""

    def open(self, sent: WorkloadSample, rate: float) -> tuple[OpenRun, StackWindow]:
        """Sends requests at a rate; returns the times of each, too."""


class Comparison:
    """The runs of a workload so far, and the windows around them."""

    def __init__(self, stack: Loops, sample: WorkloadSample, folder: str, seconds: float) -> None:
        """Measures the first window. `seconds`: of it and of each run; `folder`: of the model."""
        self._stack = stack
        self._sample = sample
        self._folder = folder
        self._seconds = seconds
        self._requests = requests_of_windows(sample)
        at = stack.addresses
        engines = 1 if at.is_disaggregated else len(at.engines)
        self.clients = [count * engines for count in CLIENTS]
        stack.closed(self._requests, WARM_UP_SECONDS, self.clients)
        self._windows: list[StackWindow] = []
        self._failed_in_windows = 0  # requests
        self._runs: list[Run] = []
        self.rows: list[dict[str, Any]] = []  # by the first window
        decoding = self._measure_first()
        for _ in range(MAX_OTHER_FIRST_WINDOWS):
            if decoding <= MAX_DECODING_RATIO * self.clients[-1]:
                break
            print(f"  {self.clients[-1]} clients; at the goodput {decoding:.0f} requests decode")
            # Few clients predict too high a goodput, which would ask for too many.
            self.clients = [2 * count for count in self.clients]
            decoding = self._measure_first()

    def _measure_first(self) -> float:
        """Measures the first window; returns how many requests decode at the predicted goodput."""
        self._windows = []
        self._add_window(self._seconds)
        self.first = self._predict()
        requests = part(self._sample, 0, GOODPUT_REQUESTS)
        self.goodput = self.first.goodput(requests)
        return self.first.decoding(requests, self.goodput)

    def _predict(self) -> Prediction:
        """Returns the prediction from all windows so far."""
        at = self._stack.addresses
        profile = profile_of(at, self._windows)
        return prediction_of(profile, self._folder, is_disaggregated=at.is_disaggregated)

    def measure(self) -> None:
        """Sends the first rates, then others, then more of those around the measured goodput."""
        for ratio in RATE_RATIOS:
            self._send(ratio * self.goodput)
        for _ in range(MAX_FURTHER_RATES):
            rate = self._further_rate(has_predicted=True)
            if not rate:
                break
            self._send(rate)
        repeated = 0
        while len(self._runs) < MAX_RUNS:
            # A repeated run may move the measured goodput between other rates, or below all.
            rate = self._further_rate(has_predicted=False)
            again = rate_to_repeat(counts(self.rows, "met"), OBJECTIVE.attainment)
            if rate:
                self._send(rate)
            elif again and repeated < REPEATED_RUNS:
                self._send(again.rate, again.sent, MIN_REPEATED_REQUESTS)
                repeated += 1
            else:
                break

    def _further_rate(self, *, has_predicted: bool) -> float:
        """Returns a rate for the measured goodput, and for the predicted one.

        0 if each is between close rates, or none is in reach.
        """
        measured = counts(self.rows, "met")
        said = counts(self.rows, "met_predicted") if has_predicted else measured
        limit = OBJECTIVE.attainment
        rate = next_rate(measured, said, limit, step=FURTHER_RATIO, precision=CLOSE_RATIO)
        return rate if rate >= LEAST_RATE_RATIO * self.goodput else 0.0

    def _send(self, rate: float, start: int = 0, least: int = MIN_REQUESTS) -> None:
        """Adds a run, with its prediction by the first window, and a window.

        Raises ConfigError if an engine was started again in the run: that ends the workload.
        """
        at = self._stack.addresses
        sent = requests_at(self._sample, rate, self._seconds, start, least)
        opened, window = self._stack.open(sent, rate)
        steps = steps_of(at, window)
        try:
            path = profile_of(at, [window]).path
        except ConfigError:  # too few steps
            path = math.nan
        run = Run(rate, sent, opened.times, opened.lateness, steps, path)
        self._runs.append(run)
        self.rows.append(row(run, self.first))
        print(f"  {row_words(self.rows[-1], self.first)}", flush=True)
        self._add_window(LATER_WINDOW_SHARE * self._seconds)

    def _add_window(self, seconds: float) -> None:
        """Runs the closed loop, and adds its window."""
        failed, window = self._stack.closed(self._requests, seconds, self.clients)
        self._failed_in_windows += failed
        self._windows.append(window)

    def judged(self) -> dict[str, Any]:
        """Predicts each run again from all windows, and compares."""
        joint = self._predict()
        rows = []
        for run, before in zip(self._runs, self.rows, strict=True):
            again = predicted(run, joint)
            rows.append({**before, **again, "first_window": {name: before[name] for name in again}})
        found = judge(rows, self._simulated(joint, rows))
        first = goodput_of(self._simulated(self.first, self.rows))
        found["first_window"] = {"predicted": first, "error": first / found["measured"] - 1}
        at = self._stack.addresses
        drift = [multiples(joint.profile, steps_of(at, window)) for window in self._windows]
        failed = f"{self._failed_in_windows} of their requests failed"
        print(f"  all windows: {words(joint.profile)}; {drift_words(drift)}; {failed}")
        for each in rows:
            print(f"  {row_words(each, joint)}")
        print(f"  {goodput_words(found)}", flush=True)
        return {
            "goodput": found,
            **first_and_further(rows),
            "failed_in_windows": self._failed_in_windows,
            "clients": self.clients,
            "drift": drift,
            "profile": engine_profiles.facts(joint.profile),
            "first_window_profile": engine_profiles.facts(self.first.profile),
        }

    def _simulated(self, prediction: Prediction, rows: Sequence[dict[str, Any]]) -> list[RateCount]:
        """Returns the predicted counts of the runs, and of rates between and beyond them.

        The first window chose the rates, so another prediction may cross the objective elsewhere.
        """
        found = counts(rows, "met_predicted")
        for _ in range(MAX_SIMULATED_RATES):
            limit = OBJECTIVE.attainment
            rate = next_rate(found, found, limit, step=FURTHER_RATIO, precision=CLOSE_RATIO)
            if not rate:
                break
            sent = requests_at(self._sample, rate, self._seconds, least=GOODPUT_REQUESTS)
            found.append(RateCount(rate, met(prediction.times(sent, rate)), len(sent)))
        return found


def compare(
    stack: Loops, name: str, sample: WorkloadSample, folder: str, seconds: float
) -> dict[str, Any]:
    """Predicts a workload from the engines' own profiles, and measures it.

    After a failure the result has its reason, and the runs before it by the first window.
    """
    rows: list[dict[str, Any]] = []
    try:
        comparison = Comparison(stack, sample, folder, seconds)
        rows = comparison.rows
        first = words(comparison.first.profile)
        print(
            f"{name}: {first}, {comparison.clients[-1]} clients;"
            f" predicted {comparison.goodput:.2f} req/s",
            flush=True,
        )
        comparison.measure()
        return comparison.judged()
    except DisaggError as error:
        print(f"{name} has failed: {error}", flush=True)
        return {"reason": str(error), **first_and_further(rows)}


def first_and_further(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Divides rows into those of the first rates and all further ones."""
    first = len(RATE_RATIOS)
    return {"rates": rows[:first], "further_runs": rows[first:]}


def requests_of_windows(sample: WorkloadSample) -> Iterator[Lengths]:
    """Yields the later half of a sample, again and again: runs begin with the first requests."""
    half = len(sample) // 2
    return cycle(zip(sample.prompts[half:], sample.outputs[half:], strict=True))


def counts(rows: Sequence[dict[str, Any]], name: str) -> list[RateCount]:
    """Returns the requests of each run that met the objective: met, or met_predicted."""
    return [RateCount(each["rate"], each[name], each["requests"]) for each in rows]


def goodput_of(found: Sequence[RateCount]) -> float:
    """Returns where the attainment falls to the objective; NaN if it does not."""
    around = bracket(found, OBJECTIVE.attainment)
    return around.goodput if around else math.nan


def judge(rows: Sequence[dict[str, Any]], simulated: Sequence[RateCount]) -> dict[str, Any]:
    """Compares the predicted goodput with the measured one."""
    predicted = goodput_of(simulated)
    around = bracket(counts(rows, "met"), OBJECTIVE.attainment)
    measured = around.goodput if around else math.nan
    return {
        "predicted": predicted,
        "measured": measured,
        "between": (around.lower, around.higher) if around else None,
        "interval": goodput_interval(counts(rows, "met"), OBJECTIVE.attainment),
        "error": predicted / measured - 1,
    }


def goodput_words(found: dict[str, Any]) -> str:
    """Describes the goodput in a line."""
    first = found["first_window"]
    said = (
        f"goodput {rate_words(found['predicted'])} predicted by all windows,"
        f" {rate_words(first['predicted'])} by the first window alone"
    )
    if not found["between"]:
        return f"{said}; not found in the runs"
    lower, higher = found["between"]
    low, high = found["interval"]
    return (
        f"{said}; {found['measured']:.2f} measured (errors {found['error']:+.0%},"
        f" {first['error']:+.0%}),"
        f" between runs at {lower:.2f} and {higher:.2f}; {low:.2f} to {high:.2f} with the 95 %"
        " intervals of each rate"
    )


def rate_words(rate: float) -> str:
    """Describes a goodput that may be missing."""
    return f"{rate:.2f}" if math.isfinite(rate) else "none"


def row_words(found: dict[str, Any], prediction: Prediction) -> str:
    """Describes a run and its prediction in a line."""
    profile = prediction.profile
    before = mean_sequences(steps_by_kind(profile.decode.steps.sums)[0])
    return (
        f"{found['rate']:6.2f} req/s: TTFT median {found['predicted']:.3f} predicted,"
        f" {found['measured']:.3f} measured ({found['error']:+.0%}); attained"
        f" {found['met_predicted'] / found['requests']:.0%},"
        f" {found['met'] / found['requests']:.0%}; steps"
        f" with prompts {found['prompt_steps_ratio']:.2f} and decodes"
        f" {found['decode_steps_ratio']:.2f} of those predicted, {found['sequences']:.1f} sequences"
        f" ({before:.1f}), path {1e3 * found['path']:.0f} ms ({1e3 * profile.path:.0f}),"
        f" sent up to {1e3 * found['lateness']:.0f} ms late, {found['failed']} failed"
    )


def words(profile: engine_profiles.FleetProfile) -> str:
    """Describes a profile in a line."""
    facts = engine_profiles.facts(profile)
    steps = []
    for role in ("prefill", "decode"):
        found = facts[role]
        steps.append(f"{role} step {1e3 * found['seconds']:.1f} ms +- {found['error']:.0%}")
    between = f"hand-off {1e3 * facts['handoff']:.1f} ms, path {1e3 * facts['path']:.1f} ms"
    return ", ".join([*steps, between])
