"""Formats advice for people: text for a terminal, plots, one HTML page."""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..cost.profile import LatencyFit
from ..search.advice import Advice, RateCurve
from ..simulation.simulator import Objective

PLOTS = ("goodput.png", "attainment.png", "frontier.png")
TITLES = ("Goodput by rate", "Attainment by rate", "Goodput per GPU by numbers of P and D")


def check(directory: str) -> None:
    """Raises ConfigError before any work if the report cannot be written."""
    if not find_spec("matplotlib"):
        raise ConfigError(
            "--report draws with matplotlib, which is not installed: pip install 'vllm-disagg[plot]'"
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
    objective = found.scenario.objective
    times, traffic = scenario.words()
    how = "in one request" if objective.joint else "each by itself"
    lines = [
        times,
        f"objective: TTFT {objective.ttft:g} s and TPOT {objective.tpot:g} s, {objective.attainment:.0%} of requests, {how}",
        traffic,
        *_fit_lines(fits),
        "",
        _verdict(found),
        "",
        f"{'':11}{'req/s per GPU':>14}  {'95 % interval':16}{'closed form':>12}  placement",
    ]
    rows = [
        ("best P:D", document["best"], found.best),
        ("runner-up", document["runner_up"], found.runner_up),
        ("colocated", document["colocated"], found.colocated),
    ]
    for name, row, score in rows:
        if row and score:
            low, high = row["ci"]
            form = row["closed_form"]["rate_per_gpu"]
            confidence_interval = f"{low:.3f} .. {high:.3f}" if scenario.seeds > 1 else "one sample"
            lines.append(
                f"{name:11}{row['goodput_per_gpu']:14.3f}  {confidence_interval:16}{form:12.3f}  {score.placement}"
            )
        else:
            lines.append(f"{name:11}{'none':>14}")
    lines += [
        "",
        *(f.words for f in found.crossovers.values()),
        "",
        "run it:",
        *(f"  {c}" for c in document["commands"]),
    ]
    return "\n".join([*lines, *(f"note: {r}" for r in document["remarks"])])


def _verdict(found: Advice) -> str:
    if found.disaggregate and found.best:
        gain = (
            f", {found.ratio:.2f} times the best colocated"
            if found.ratio
            else "; nothing colocated meets the objective"
        )
        return f"disaggregate: {found.best.placement}: {found.best.goodput:.3f} req/s per GPU{gain}"
    base = found.colocated
    if not base:
        raise AssertionError("without a colocated placement the best one is disaggregated")
    why = (
        f"disaggregation has {found.ratio:.2f} times that"
        if found.ratio
        else "nothing disaggregated meets the objective"
    )
    return f"colocate: {str(base.placement).removeprefix('colocated ')}: {base.goodput:.3f} req/s per GPU; {why}"


def _fit_lines(fits: Sequence[tuple[str, LatencyFit]]) -> list[str]:
    lines = []
    for path, fit in fits:
        for phase in ("prefill", "decode"):
            a, b, c = fit.latency.prefill if phase == "prefill" else fit.latency.small
            names = ("token", "token^2") if phase == "prefill" else ("token of context", "sequence")
            terms = f"{a * 1e3:.4g} ms + {b * 1e6:.4g} us/{names[0]} + {c * 1e6:.4g} us/{names[1]}"
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
    figure, axes = _axes(
        "requests/s per GPU that came", "requests/s per GPU within both objectives"
    )
    joint = _joint(found.scenario.objective)
    for curve in _shown(found):
        axes.plot(
            curve.rates,
            [r * a for r, a in zip(curve.rates, curve.attainment(joint), strict=True)],
            label=str(curve.placement),
            linestyle=_style(curve),
        )
    _save(figure, axes, path)


def _attainment(found: Advice, path: Path) -> None:
    figure, axes = _axes("requests/s per GPU", "share of requests that meet the objective")
    objective = found.scenario.objective
    for curve in _shown(found):
        axes.plot(
            curve.rates,
            curve.attainment(objective),
            label=str(curve.placement),
            linestyle=_style(curve),
        )
    axes.axhline(objective.attainment, color="grey", linewidth=0.8)
    _save(figure, axes, path)


def _frontier(found: Advice, path: Path) -> None:
    """The best placement's instances in other numbers, by closed form; the simulated best ones as
    points.
    """
    figure, axes = _axes("prefill GPUs / all GPUs", "requests/s per GPU")
    best = found.best
    if best and best.placement.decode:
        sample = found.scenario.samples()[0]
        prefill, decode = found.scenario.capacities(best.placement, sample)
        per_p = prefill / best.placement.prefill.gpus
        per_d = decode / best.placement.decode.gpus
        shares = [n / 100 for n in range(1, 100)]
        rates = [min(s * per_p, (1 - s) * per_d) for s in shares]
        axes.plot(shares, rates, color="grey", label="closed form, these instances")
    for at, score in enumerate(s for s in (best, *found.alternatives) if s and s.placement.decode):
        low, high = score.ci
        share = (
            score.placement.prefill.gpus / score.placement.gpus + 0.006 * at
        )  # beside each other where they are equal
        axes.errorbar(
            [share],
            [score.goodput],
            [[score.goodput - low], [high - score.goodput]],
            fmt="o^sDv"[at % 5],
            capsize=3,
            label=str(score.placement),
        )
    if found.colocated:
        axes.axhline(found.colocated.goodput, linestyle="--", label=str(found.colocated.placement))
    _save(figure, axes, path)


def _shown(found: Advice) -> list[RateCurve]:
    """Selects the best three curves of each kind; the others serve the crossovers only."""
    split = [c for c in found.curves if c.placement.decode]
    return split[:3] + [c for c in found.curves if not c.placement.decode][:3]


def _joint(objective: Objective) -> Objective:
    return Objective(objective.ttft, objective.tpot, objective.attainment, True)


def _style(curve: RateCurve) -> str:
    return "-" if curve.placement.decode else "--"


def _axes(x: str, y: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    return figure, axes


def _save(figure: Any, axes: Any, path: Path) -> None:
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=7)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"--report: {path} cannot be written: {error.strerror}") from None


def _page(
    folder: Path, found: Advice, document: dict[str, Any], fits: Sequence[tuple[str, LatencyFit]]
) -> str:
    pictures = []
    for name, title in zip(PLOTS, TITLES, strict=True):
        data = base64.b64encode((folder / name).read_bytes()).decode()
        pictures.append(f'<h2>{title}</h2><img alt="{title}" src="data:image/png;base64,{data}">')
    residuals = "".join(
        f"<tr><td>{html.escape(path)}</td><td>{r.phase}</td><td>{len(r.sizes)} x {max(r.sizes)}</td>"
        f"<td>{r.measured:.5f}</td><td>{r.fitted:.5f}</td><td>{r.error:+.1%}</td></tr>"
        for path, fit in fits
        for r in fit.residuals
    )
    head = "<tr><th>file</th><th>phase</th><th>sizes</th><th>measured s</th><th>fitted s</th><th>error</th></tr>"
    table = f"<h2>Residuals of the fit</h2><table>{head}{residuals}</table>" if fits else ""
    style = "body{font:15px/1.4 sans-serif;max-width:60em;margin:2em auto}img{max-width:100%}td,th{padding:0 1em 0 0}"
    body = html.escape(text(found, document, fits))
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>vllm-disagg plan</title><style>{style}</style>'
        f"<h1>{html.escape(_verdict(found))}</h1><pre>{body}</pre>{''.join(pictures)}{table}</html>\n"
    )
