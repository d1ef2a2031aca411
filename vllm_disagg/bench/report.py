"""Formats bench results as a line, a table, JSON and a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ..errors import ConfigError
from . import bisection
from .bisection import RateBracket, TriedRate
from .instance import ServedModel
from .load import BenchTarget
from .results import BenchRun, GoodputObjectives, LatencyPercentiles

COLUMNS = (
    "",
    "goodput",
    "/GPU",
    "attained (95 %)",
    "QPS",
    "out tok/s",
    "TTFT p50 / p90 / p99",
    "TPOT p50 / p90 / p99",
)


@dataclass
class TargetRuns:
    """All runs of one target."""

    target: BenchTarget
    alone: BenchRun | None = None
    runs: list[BenchRun] = field(default_factory=list)

    def bracket(self, objectives: GoodputObjectives) -> RateBracket:
        """Returns the bounds of the goodput."""
        return bisection.bracket(self._tried(objectives))

    def next_rate(self, objectives: GoodputObjectives, precision: float) -> float | None:
        """Returns the next rate to try, or None at the end."""
        if not self.alone or not self.alone.mean_latency or self.is_infeasible(objectives):
            return None
        return bisection.next_rate(self._tried(objectives), 1 / self.alone.mean_latency, precision)

    def is_infeasible(self, objectives: GoodputObjectives) -> bool:
        """Returns whether even one request at a time misses its objectives, and not by chance."""
        return self.alone is not None and self.alone.interval[1] < objectives.attainment

    def best(self, objectives: GoodputObjectives) -> BenchRun | None:
        """Returns the run at the goodput; None when no rate met the objectives."""
        rate = self.bracket(objectives).met
        return next((run for run in self.runs if rate is not None and run.rate == rate), None)

    def _tried(self, objectives: GoodputObjectives) -> list[TriedRate]:
        return [
            TriedRate(run.rate, run.met(objectives)) for run in self.runs if run.rate is not None
        ]


class _SavedTarget(msgspec.Struct):
    url: str
    model: str
    gpus: int | None
    alone: BenchRun | None
    runs: list[BenchRun]


class _SavedReport(msgspec.Struct):
    objectives: GoodputObjectives
    done: bool
    targets: dict[str, _SavedTarget]


def line(run: BenchRun, objectives: GoodputObjectives) -> str:
    """Formats one run as a progress line."""
    verdict = "met" if run.met(objectives) else "missed"
    text = f"{run.attainment:.0%} good"
    text += f", TTFT p90 {_time(run.ttft.p90)}, TPOT p90 {_time(run.tpot.p90)}"
    if run.failed:
        text += f", {run.failed} failed ({run.error[:80]})"
    text += f": {verdict}"
    if run.is_late():
        text += f"; warning: the load generator could send only {run.offered:.3g} a second"
    return text


def result(
    measured: Sequence[TargetRuns], objectives: GoodputObjectives, done: bool
) -> dict[str, Any]:
    """Builds the JSON document.

    `goodput` of a target is 0 if nothing met the objectives, and null during the search.
    """
    targets = {}
    for one in measured:
        met, missed = one.bracket(objectives)
        goodput = (met or 0.0) if done else None
        per_gpu = None
        if goodput is not None and one.target.gpus:
            per_gpu = goodput / one.target.gpus
        targets[one.target.name] = {
            "url": one.target.url,
            "model": one.target.model.root or one.target.model.id,
            "gpus": one.target.gpus,
            "goodput": goodput,
            "goodput_per_gpu": per_gpu,
            "missed_at": missed,
            "alone": msgspec.to_builtins(one.alone),
            "runs": [msgspec.to_builtins(run) for run in one.runs],
        }
    return {"objectives": msgspec.to_builtins(objectives), "done": done, "targets": targets}


def save(name: str, content: Mapping[str, Any]) -> None:
    """Writes NAME.json. Raises ConfigError on failure."""
    try:
        Path(name + ".json").write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"--save {name}: cannot write {name}.json: {error.strerror}") from None


def load(path: str) -> tuple[GoodputObjectives, list[TargetRuns]]:
    """Loads a finished document of `save`. Raises ConfigError for any other file."""
    try:
        content = msgspec.json.decode(Path(path).read_bytes(), type=_SavedReport)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} is not a file of vllm-disagg bench --save: {error}") from None
    if not content.done:
        raise ConfigError(f"{path} is of a bench that did not finish")
    measured = []
    for name, one in content.targets.items():
        target = BenchTarget(name, one.url, one.gpus, ServedModel(one.model))
        measured.append(TargetRuns(target, one.alone, one.runs))
    return content.objectives, measured


def table(measured: Sequence[TargetRuns], objectives: GoodputObjectives) -> str:
    """Formats all targets as a table."""
    rows = [COLUMNS]
    words = []
    for one in measured:
        best = one.best(objectives)
        shown = best or one.alone
        if shown is None:
            raise ValueError("nothing was measured")
        rate = best.rate if best and best.rate else 0.0
        low, high = shown.interval
        rows.append(
            (
                one.target.name,
                f"{rate:.3g}",
                f"{rate / one.target.gpus:.3g}" if one.target.gpus else "-",
                f"{shown.attainment:.0%} ({low:.0%} to {high:.0%})",
                f"{shown.qps:.3g}",
                f"{shown.output_tokens_per_s:.0f}",
                _times(shown.ttft),
                _times(shown.tpot),
            )
        )
        words.append(_words(one, objectives))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    head = f"Goodput: the highest rate, in requests a second, at which {objectives.words()}."
    return "\n".join([head, "", *lines, "", *words, *_ratios(measured, objectives)])


def _words(one: TargetRuns, objectives: GoodputObjectives) -> str:
    """Formats the bounds of the goodput of one target as a sentence."""
    name = one.target.name
    met, missed = one.bracket(objectives)
    if met is None:
        subject = "nothing" if one.is_infeasible(objectives) else "no rate tried"
        return (
            f"{name}: goodput 0: {subject} meets these objectives;"
            " the row shows requests sent one at a time."
        )
    if missed is None:
        return f"{name}: met at {met:.3g} and never missed: the goodput is at least that."
    return f"{name}: met at {met:.3g}, missed at {missed:.3g}."


def _ratios(measured: Sequence[TargetRuns], objectives: GoodputObjectives) -> list[str]:
    """Formats the ratios of the first target to the others, by GPU where known."""
    first, *others = measured
    lines = []
    for other in others:
        numerator = _goodput(first, objectives)
        denominator = _goodput(other, objectives)
        unit = " by GPU" if first.target.gpus else ""
        if denominator:
            ratio = f"{numerator / denominator:.2f}{unit}"
            lines.append(f"{first.target.name} / {other.target.name}: {ratio}.")
    return lines


def _goodput(one: TargetRuns, objectives: GoodputObjectives) -> float:
    """Returns the goodput of a target in requests/s, by GPU where their number is known."""
    return (one.bracket(objectives).met or 0.0) / (one.target.gpus or 1)


def plot(path: str, measured: Sequence[TargetRuns], objectives: GoodputObjectives) -> None:
    """Plots attainment, TTFT and TPOT by rate."""
    import matplotlib  # noqa: PLC0415 - an optional extra, and slow

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    by_gpu = all(one.target.gpus for one in measured)
    for one in measured:
        runs = sorted((run for run in one.runs if run.rate), key=lambda run: run.rate or 0.0)
        gpus = (one.target.gpus or 1) if by_gpu else 1
        rates = [(run.rate or 0.0) / gpus for run in runs]
        shares = [100 * run.attainment for run in runs]
        below = [max(0.0, 100 * (run.attainment - run.interval[0])) for run in runs]
        above = [max(0.0, 100 * (run.interval[1] - run.attainment)) for run in runs]
        line_style = {"fmt": "o-", "capsize": 3, "elinewidth": 0.8, "label": one.target.name}
        drawn, *_ = axes[0].errorbar(rates, shares, [below, above], **line_style)
        colour = drawn.get_color()
        axes[1].plot(rates, [run.ttft.p90 or math.nan for run in runs], "o-", color=colour)
        axes[2].plot(rates, [run.tpot.p90 or math.nan for run in runs], "o-", color=colour)
        if met := one.bracket(objectives).met:
            axes[0].axvline(met / gpus, color=colour, linestyle=":")
    limits = (100 * objectives.attainment, objectives.ttft, objectives.tpot)
    names = ("requests that meet both objectives, %", "TTFT p90, s", "TPOT p90, s")
    for axis, limit, name in zip(axes, limits, names, strict=True):
        axis.axhline(limit, color="gray", linestyle="--", linewidth=1)
        axis.set_xlabel("requests a second" + (" and GPU" if by_gpu else ""))
        axis.set_ylabel(name)
        axis.grid(alpha=0.3)
    for axis in axes[1:]:
        axis.set_yscale("log")
        for ticks in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            ticks(lambda value, _: f"{value:.2g}")
    axes[0].set_ylim(0, 103)
    axes[0].legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _times(latency: LatencyPercentiles) -> str:
    """Formats p50, p90 and p99."""
    return " / ".join(map(_time, (latency.median, latency.p90, latency.p99)))


def _time(seconds: float | None) -> str:
    """Formats a time in seconds or milliseconds."""
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.1f} ms"
