"""Formats advice for people: text for a terminal, plots, one HTML page."""

from __future__ import annotations

import base64
import html
import os
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
from . import profile_range, rate_table
from .documents import made_line, part_lines

PLOTS = ("goodput.png", "attainment.png", "frontier.png")
PAGE_STYLE = (
    "body{font:15px/1.4 sans-serif;max-width:60em;margin:2em auto;padding:0 1em}"
    "h1{font-size:1.3em}img{max-width:100%}.wide{overflow-x:auto}"
    "td,th{padding:0 1em 0 0;text-align:left;white-space:nowrap}"
    "pre{white-space:pre-wrap;overflow-wrap:anywhere}li{overflow-wrap:anywhere}"
)
TITLES = ("Goodput by rate", "Attainment by rate", "Goodput per GPU by numbers of P and D")


def check(directory: str) -> None:
    """Raises ConfigError before any work if the report cannot be written."""
    if not directory:  # a variable that is not set
        raise ConfigError("--report: an empty text names no folder; leave the flag out")
    if not find_spec("matplotlib"):
        raise ConfigError(
            "--report needs matplotlib, which is not installed: pip install 'vllm-disagg[plot]'"
        )
    try:
        os.makedirs(directory, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--report: {directory} cannot be made: {error.strerror}") from None
    if not os.access(directory, os.W_OK):
        raise ConfigError(f"--report: {directory} cannot be written to")


def text(found: Advice, document: dict[str, Any], fits: Sequence[tuple[str, LatencyFit]]) -> str:
    """Formats the advice for a terminal."""
    scenario = found.scenario
    times, traffic = scenario.words()
    lines = [
        made_line(document),
        times,
        f"objective: {scenario.objective.words()}",
        traffic,
        *_fit_lines(fits),
        *profile_range.lines(document["extrapolated"]),
        *part_lines(document["parts"], scenario.gpus),
        "",
        _verdict(found),
        "",
        *_table(found, document),
        *_drafts(document),
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


def _drafts(document: dict[str, Any]) -> list[str]:
    """Formats the effect of speculative decoding on TPOT; no line without it."""
    found = document["drafts"]
    if not found:
        return []
    tokens = f"{found['tokens']} by {found['method']}, {found['acceptance_length']:g} a step"
    alone = f"{1e3 * found['tpot_alone']:.3g} ms"
    without = f"{1e3 * found['tpot_alone_without']:.3g} ms without drafts"
    return [f"drafts: {tokens}: TPOT of a request alone {alone}, {without}"]


def _proxy_flags(found: Advice, document: dict[str, Any]) -> list[str]:
    """Formats what flags of the proxy do, one trial a line; no line where they were given."""
    if found.flags_not_tried:
        return [f"--min-prompt-bytes and --spill were not tried: {found.flags_not_tried}"]
    lines = []
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


def _fit_lines(fits: Sequence[tuple[str, LatencyFit]]) -> list[str]:
    """Formats the coefficients and the residuals of each fit, one line for each phase."""
    lines = []
    for path, fit in fits:
        for phase in fit.phases():
            if phase == "prefill":
                coefficients = fit.latency.prefill
                units = ("token", "token^2")
            elif phase == "mixed":
                coefficients = fit.latency.beside
                units = ("token of prompts beside", "sequence")
            else:
                coefficients = fit.latency.small
                units = ("token of context", "sequence")
            constant, linear, last = coefficients
            terms = f"{constant * 1e3:.4g} ms + {linear * 1e6:.4g} us/{units[0]}"
            terms += f" + {last * 1e6:.4g} us/{units[1]}"
            errors = f"residuals: mean {fit.mean(phase):.1%}, worst {fit.worst(phase):.1%}"
            lines.append(f"fit of {path}: {phase} {terms}; {errors}")
    return lines


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
    page = folder / "report.html"
    try:
        page.write_text(_page(folder, found, document, fits), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--report: {page} cannot be written: {error.strerror}") from None
    return [str(page), *(str(folder / name) for name in PLOTS)]


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


def _page(
    folder: Path, found: Advice, document: dict[str, Any], fits: Sequence[tuple[str, LatencyFit]]
) -> str:
    """Formats the HTML page; the plots of `folder` become data URLs, so the page is one file."""
    scenario = found.scenario
    inputs = [made_line(document)]
    inputs += [*scenario.words(), f"objective: {scenario.objective.words()}", *_fit_lines(fits)]
    inputs += profile_range.lines(document["extrapolated"])
    inputs += part_lines(document["parts"], scenario.gpus)
    header, *rows = _rows(found, document)
    parts = [
        f"<h1>{html.escape(_verdict(found))}</h1>",
        _list(inputs),
        "<h2>Placements</h2>",
        _html_table(header, rows),
        _list([*_drafts(document), *_proxy_flags(found, document), *_changes(found)]),
    ]
    for name, title in zip(PLOTS, TITLES, strict=True):
        data = base64.b64encode((folder / name).read_bytes()).decode()
        parts.append(f'<h2>{title}</h2><img alt="{title}" src="data:image/png;base64,{data}">')
    if document["by_rate"]:
        rates = rate_table.cells(document["by_rate"])
        parts += [
            "<h2>Times by rate</h2>",
            _html_table(rate_table.HEADER, rates),
            _list(["ITL: the longest gap between two tokens of a request"]),
        ]
    if document["commands"]:
        commands = html.escape("\n".join(document["commands"]))
        parts.append(f"<h2>Commands</h2><pre>{commands}</pre>")
    parts += [_list(document["remarks"]), _residual_table(fits)]
    head = '<!doctype html><html lang="en"><meta charset="utf-8"><title>vllm-disagg plan</title>'
    return f"{head}<style>{PAGE_STYLE}</style>{''.join(parts)}</html>\n"


def _list(lines: Sequence[str]) -> str:
    """Formats lines as an HTML list; empty without lines."""
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def _html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Formats an HTML table that scrolls by itself where the page is narrow."""
    names = "".join(f"<th>{html.escape(name)}</th>" for name in header)
    body = ""
    for row in rows:
        cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row)
        body += f"<tr>{cells}</tr>"
    return f'<div class="wide"><table><tr>{names}</tr>{body}</table></div>'


def _residual_table(fits: Sequence[tuple[str, LatencyFit]]) -> str:
    """Formats the residuals of all fits as an HTML table; empty without fits."""
    if not fits:
        return ""
    names = ("file", "phase", "sizes", "measured s", "fitted s", "error")
    rows = [
        (
            path,
            residual.phase,
            f"{len(residual.sizes)} x {max(residual.sizes)}",
            f"{residual.measured:.5f}",
            f"{residual.fitted:.5f}",
            f"{residual.error:+.1%}",
        )
        for path, fit in fits
        for residual in fit.residuals
    ]
    return f"<h2>Residuals of the fit</h2>{_html_table(names, rows)}"
