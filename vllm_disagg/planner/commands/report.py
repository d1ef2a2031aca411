"""Formats advice for people: text for a terminal, plots, one HTML page."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from ...errors import ConfigError
from ..cost.profile import LatencyFit
from ..search.advice import MIN_GAIN_RATIO, Advice, RateCurve
from ..search.enumeration import disaggregated
from ..search.sample_size import shortage
from . import html_page, profile_range, rate_table
from .documents import draft_lines, made_line, part_lines

PLOTS = ("goodput.png", "attainment.png", "frontier.png")
TITLES = ("Goodput by rate", "Attainment by rate", "Goodput per GPU by numbers of P and D")


def check(directory: str) -> None:
    """Raises ConfigError before any work if the report cannot be written."""
    html_page.check_folder(directory)
    if not find_spec("matplotlib"):
        raise ConfigError(
            "--report needs matplotlib, which is not installed: pip install 'vllm-disagg[plot]'"
        )


def text(found: Advice, document: dict[str, Any], fits: Sequence[tuple[str, LatencyFit]]) -> str:
    """Formats the advice for a terminal."""
    scenario = found.scenario
    times, traffic = scenario.words()
    lines = [
        made_line(document),
        times,
        f"objective: {scenario.objective.words()}",
        traffic,
        *profile_range.fit_lines(fits),
        *profile_range.lines(document["extrapolated"]),
        *part_lines(document["parts"], scenario.gpus),
        "",
        _verdict(found),
        "",
        *_table(found, document),
        *draft_lines(document),
        *_proxy_flags(found, document),
        "",
    ]
    lines += _changes(found)
    if document["commands"]:
        lines += ["", "run it:"]
        lines += [f"  {command}" for command in document["commands"]]
    lines += [f"note: {remark}" for remark in document["remarks"]]
    return "\n".join(lines)


def _rows(found: Advice, document: dict[str, Any]) -> list[list[str]]:
    """Returns the cells of the best placements, with the names of the columns first."""
    scenario = found.scenario
    per = f"req/s per {scenario.criterion.unit}"
    table = [["", per, "95 % interval", "closed form", "all", "GPUs", "placement"]]
    rows = [
        ("best P:D", document["best"], found.best),
        ("runner-up", document["runner_up"], found.runner_up),
        ("colocated", document["colocated"], found.colocated),
        ("most in all", document["largest"], found.largest),
    ]
    for name, row, score in rows:
        if not row or not score:
            table.append([name, "none", *[""] * 5])
            continue
        # Goodput of a GPU in that of the criterion's unit.
        share = score.placement.gpus / scenario.criterion.units(score.placement)
        interval = "one sample"
        if row["ci"]:
            low, high = row["ci"]
            interval = f"{low * share:.3f} .. {high * share:.3f}"
        table.append(
            [
                name,
                f"{score.goodput * share:.3f}",
                interval,
                f"{row['closed_form']['rate_per_gpu'] * share:.3f}",
                f"{score.total:.2f}",
                str(score.placement.gpus),
                scenario.words_of(score.placement),
            ]
        )
    return table


def _table(found: Advice, document: dict[str, Any]) -> list[str]:
    """Formats the best placements for a terminal, one a line."""
    lines = []
    for name, value, interval, estimate, total, gpus, placement in _rows(found, document):
        columns = f"{name:11}{value:>14}  {interval:16}{estimate:>12}{total:>9}{gpus:>6}"
        lines.append(f"{columns}  {placement}".rstrip())
    return lines


def _proxy_flags(found: Advice, document: dict[str, Any]) -> list[str]:
    """Formats what flags of the proxy do, one trial a line; no line where they were given."""
    lines = []
    if found.flags_not_tried:
        lines.append(found.flags_not_tried)
    for trial, row in zip(found.flag_trials, document["proxy_flags"]["tried"], strict=True):
        words = " ".join(trial.placement.proxy_flags)
        verdict = "taken" if row["taken"] else "not taken"
        gain = "no more than the goodput"
        if trial.ci:
            low, high = trial.ci
            gain = f"{trial.gain:.2f} ({low:.2f} to {high:.2f}) times the goodput"
        lines.append(f"proxy {words}: {gain} without: {verdict}")
    return lines


def _changes(found: Advice) -> list[str]:
    """Lists at which objectives the answer changes, each line once."""
    return list(dict.fromkeys(crossover.words for crossover in found.crossovers.values()))


def _verdict(found: Advice) -> str:
    """Formats the recommendation in one line."""
    scenario = found.scenario
    per = f"req/s per {scenario.criterion.unit}"
    units = scenario.criterion.units
    if found.missing:
        return f"cannot tell: {shortage(scenario, found.missing, 'these rates')}"
    ratio = ""
    if found.ratio:
        interval = "one sample"
        if found.ratio_ci:
            low, high = found.ratio_ci
            interval = f"{low:.2f} to {high:.2f}"
        ratio = f"{found.ratio:.2f} ({interval})"
    if found.is_close:
        return (
            f"cannot tell: the best disaggregated placement has {ratio} times the goodput of the"
            f" best colocated; more than {MIN_GAIN_RATIO:.2f} is needed: more --requests or more"
            " --seeds decide"
        )
    if found.disaggregate and found.best:
        gain = (
            f", {ratio} times the best colocated"
            if found.ratio
            else "; nothing colocated meets the objective"
        )
        words = scenario.words_of(found.best.placement)
        return f"disaggregate: {words}: {found.best.value(units):.3f} {per}{gain}"
    base = found.colocated
    if not base:
        raise AssertionError("without a colocated placement the best one is disaggregated")
    placement = scenario.words_of(base.placement).removeprefix("colocated ")
    reason = "nothing disaggregated meets the objective"
    if not disaggregated(scenario):
        reason = f"no prefill instance fits beside a decode instance on {scenario.gpus} GPUs"
    if found.ratio:
        reason = f"disaggregation has {ratio} times that"
    return f"colocate: {placement}: {base.value(units):.3f} {per}; {reason}"


# --- files ---


def write(
    directory: str, found: Advice, document: dict[str, Any], fits: Sequence[tuple[str, LatencyFit]]
) -> list[str]:
    """Writes report.html, with the plots inside, and the plots. Returns the paths written."""
    import matplotlib as mpl  # noqa: PLC0415

    mpl.use("Agg")
    folder = Path(directory)
    for name, draw in zip(PLOTS, (_goodput, _attainment, _frontier), strict=True):
        draw(found, folder / name)
    page = html_page.write(directory, _parts(folder, found, document, fits))
    return [page, *(str(folder / name) for name in PLOTS)]


def _goodput(found: Advice, path: Path) -> None:
    """Plots the rate of requests that met the objective, over the offered rate."""
    figure, axes = _axes("offered requests/s per GPU", "requests/s per GPU within all limits")
    joint = msgspec.structs.replace(found.scenario.objective, joint=True)
    for curve in rate_table.shown(found.curves):
        shares = curve.attainment(joint)
        axes.plot(
            curve.rates,
            [rate * share for rate, share in zip(curve.rates, shares, strict=True)],
            label=str(curve.placement),
            linestyle=_style(curve),
        )
    _save(figure, axes, path)


def _attainment(found: Advice, path: Path) -> None:
    """Plots the share of requests that met the objective, over the offered rate."""
    figure, axes = _axes("requests/s per GPU", "share of requests that meet the objective")
    objective = found.scenario.objective
    for curve in rate_table.shown(found.curves):
        axes.plot(
            curve.rates,
            curve.attainment(objective),
            label=str(curve.placement),
            linestyle=_style(curve),
        )
    axes.axhline(objective.attainment, color="grey", linewidth=0.8)
    _save(figure, axes, path)


def _frontier(found: Advice, path: Path) -> None:
    """Plots goodput over the share of prefill GPUs, for the instances of the best placement.

    The line is the closed form for other numbers of instances; the points are simulated placements.
    """
    figure, axes = _axes("prefill GPUs / all GPUs", "requests/s per GPU")
    best = found.best
    if best and best.placement.decode:
        sample = found.scenario.samples()[0]
        prefill, decode = found.scenario.capacities(best.placement, sample)
        per_p = prefill / best.placement.prefill.gpus
        per_d = decode / best.placement.decode.gpus
        shares = [n / 100 for n in range(1, 100)]
        rates = [min(share * per_p, (1 - share) * per_d) for share in shares]
        axes.plot(shares, rates, color="grey", label="closed form, these instances")
    scores = [score for score in (best, *found.alternatives) if score and score.placement.decode]
    for number, score in enumerate(scores):
        low, high = score.ci
        # Points of equal shares stand beside each other.
        share = score.placement.prefill.gpus / score.placement.gpus + 0.006 * number
        axes.errorbar(
            [share],
            [score.goodput],
            [[score.goodput - low], [high - score.goodput]],
            fmt="o^sDv"[number % 5],
            capsize=3,
            label=str(score.placement),
        )
    if found.colocated:
        axes.axhline(found.colocated.goodput, linestyle="--", label=str(found.colocated.placement))
    _save(figure, axes, path)


def _style(curve: RateCurve) -> str:
    return "-" if curve.placement.decode else "--"


def _axes(x: str, y: str) -> tuple[Any, Any]:
    """Returns an empty figure and its axes."""
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 5.5), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    return figure, axes


def _label(figure: Any, axes: Any) -> None:
    """Adds the legend below the axes: inside it would hide curves."""
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside lower center", fontsize=7)


def _save(figure: Any, axes: Any, path: Path) -> None:
    _label(figure, axes)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"--report: {path} cannot be written: {error.strerror}") from None


def _parts(
    folder: Path, found: Advice, document: dict[str, Any], fits: Sequence[tuple[str, LatencyFit]]
) -> list[str]:
    """Formats the page; the plots of `folder` become data URLs, so the page is one file."""
    scenario = found.scenario
    inputs = [made_line(document), *scenario.words(), f"objective: {scenario.objective.words()}"]
    inputs += profile_range.fit_lines(fits)
    inputs += profile_range.lines(document["extrapolated"])
    inputs += part_lines(document["parts"], scenario.gpus)
    header, *rows = _rows(found, document)
    parts = [
        f"<h1>{html.escape(_verdict(found))}</h1>",
        html_page.bullet_list(inputs),
        "<h2>Placements</h2>",
        html_page.table(header, rows),
        html_page.bullet_list(
            [*draft_lines(document), *_proxy_flags(found, document), *_changes(found)]
        ),
    ]
    for name, title in zip(PLOTS, TITLES, strict=True):
        data = base64.b64encode((folder / name).read_bytes()).decode()
        parts.append(f'<h2>{title}</h2><img alt="{title}" src="data:image/png;base64,{data}">')
    if document["by_rate"]:
        rates = rate_table.cells(document["by_rate"])
        parts += [
            "<h2>Times by rate</h2>",
            html_page.table(rate_table.HEADER, rates),
            html_page.bullet_list(["ITL: the longest gap between two tokens of a request"]),
        ]
    remarks = html_page.bullet_list(document["remarks"])
    return [*parts, html_page.commands(document["commands"]), remarks, html_page.residuals(fits)]
