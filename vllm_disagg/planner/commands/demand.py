"""Answers how many GPUs a rate needs: `vllm-disagg plan --rate R`."""

from __future__ import annotations

import html
import json
import math
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from ...errors import ConfigError
from ..cost.profile import LatencyFit
from ..search import demand, proxy_flags, sample_size
from ..search.advice import MIN_GAIN_RATIO
from ..search.demand import DemandResult, DemandScore
from ..search.placement import Placement
from ..search.scenario import Scenario
from ..simulation.objective import SimulationResult, quantile
from . import documents, flags, html_page, launch_commands, profile_range
from .plan_inputs import PlanInputs

PROGRESS_INTERVAL_SECONDS = 2.0  # between two progress lines
SHARES = (50, 90, 99)

Fits = Sequence[tuple[str, LatencyFit]]  # of profiles, with their paths


def run(planned: PlanInputs, rate: float, as_json: bool, directory: str | None) -> int:
    """Searches the cheapest placement for a rate and prints it. Returns the exit status.

    `directory` is the folder of a report, or None.
    """
    flags.check_rate(rate)
    started_at = time.monotonic()
    parts = sample_size.parts_of(planned.scenario, rate)
    gpus = planned.scenario.gpus // parts
    scenario = msgspec.structs.replace(planned.scenario, gpus=gpus)
    result = demand.cheapest(scenario, rate / parts, _progress())
    chosen = _chosen(result)
    if not chosen:
        of_part = f" (in one of {parts} equal parts)" if parts > 1 else ""
        raise ConfigError(_nothing(result) + of_part)
    document = _document(result, chosen, planned.model)
    scores = [score for score in (result.split, result.together) if score]
    placements = [(score.placement, rate / parts) for score in scores]
    document["extrapolated"] = profile_range.beyond(result.scenario, planned.fits, placements)
    document["fits"] = documents.fits_document(planned.fits)
    document |= {"rate": rate, "parts": parts}
    document["seconds"] = round(time.monotonic() - started_at, 2)
    if directory:
        page = _page(result, chosen, document, planned.fits)
        document["report"] = [html_page.write(directory, page)]
    print(json.dumps(document) if as_json else _text(result, chosen, document, planned.fits))
    return 0


def _progress() -> demand.TrialCallback:
    """Returns a callback that prints every few seconds what is tried."""
    printed_at = time.monotonic()
    tried = 0

    def print_progress(kind: str, placement: Placement) -> None:
        nonlocal printed_at, tried
        tried += 1
        now = time.monotonic()
        if now - printed_at >= PROGRESS_INTERVAL_SECONDS:
            printed_at = now
            line = f"plan: {kind}: {tried} placements tried; now {placement}"
            print(line, file=sys.stderr)

    return print_progress


def _chosen(result: DemandResult) -> DemandScore | None:
    """Returns the recommended placement: disaggregated only if it costs clearly less."""
    split = result.split
    together = result.together
    if not split or not together:
        return split or together
    units = result.scenario.criterion.units
    gain = units(together.placement) / units(split.placement)
    return split if gain > MIN_GAIN_RATIO else together


def _nothing(result: DemandResult) -> str:
    """Explains why no placement holds the rate."""
    scenario = result.scenario
    gpus = f"{scenario.gpus} GPU{'s' if scenario.gpus > 1 else ''}"
    within = f"within {scenario.objective.flags()}"
    if not result.is_feasible:
        return (
            f"nothing on {gpus} holds a rate {within}: too many requests miss it even alone on an"
            " idle instance: loosen it"
        )
    if result.most_rate < result.rate:
        return (
            f"nothing on {gpus} holds --rate {result.rate:g} {within}:"
            f" no schedule exceeds {result.most_rate:.4g} req/s there: give more --gpus"
        )
    return f"nothing on {gpus} holds --rate {result.rate:g} {within}: give more --gpus"


# --- what is printed ---


def _document(result: DemandResult, chosen: DemandScore, model: str) -> dict[str, Any]:
    """Builds the document that `plan --rate --json` prints."""
    scenario = result.scenario
    placement = chosen.placement
    return {
        "made": documents.made(scenario, model),
        "rate": result.rate,
        "recommendation": _recommendation(result, placement),
        "counted": scenario.criterion.unit,
        "disaggregated": _score(scenario, result.split),
        "colocated": _score(scenario, result.together),
        "least_possible": result.least_units,
        "considered": result.considered,
        "proxy_flags": {"not_tried": _flags_not_tried(result) or None},
        "requests_needed": result.missing or None,
        "drafts": documents.drafts(scenario, placement),
        "commands": [] if result.missing else launch_commands.commands(scenario, placement, model),
        "remarks": [] if result.missing else launch_commands.remarks(scenario, placement),
        "setting": documents.describe(scenario),
    }


def _flags_not_tried(result: DemandResult) -> str:
    """Names the proxy's flags that may save GPUs; empty if they cannot, or were given."""
    scenario = result.scenario
    if not result.split or scenario.gives_proxy_flags or scenario.no_proxy_flags:
        return ""
    return proxy_flags.not_tried(
        "--min-prompt-bytes and --spill were",
        "with --rate they are taken as given, and with them fewer GPUs may hold it: try --spill",
    )


def _recommendation(result: DemandResult, placement: Placement) -> str:
    if result.missing:
        return "cannot tell"
    return "disaggregate" if placement.decode else "colocate"


def _score(scenario: Scenario, score: DemandScore | None) -> dict[str, Any] | None:
    """Describes a placement with its times at the rate; None for no placement."""
    if not score:
        return None
    found = documents.placement_document(scenario, score.placement)
    found["attainment"] = score.attainment(scenario)
    for name in _times(scenario):
        for share in SHARES:
            found[f"{name}_p{share}"] = _quantile(score.results, name, share)
    return found


def _times(scenario: Scenario) -> tuple[str, ...]:
    """Returns the names of the times that the objective limits."""
    return ("ttft", "tpot") if scenario.objective.itl is None else ("ttft", "tpot", "itl")


def _quantile(results: list[SimulationResult], name: str, share: int) -> float | None:
    """Returns a quantile over all samples; None where too few requests have a value."""
    values = [seconds for result in results for seconds in getattr(result, name)]
    found = quantile(values, share / 100)
    return found if found < math.inf else None


def _verdict(result: DemandResult, chosen: DemandScore, document: dict[str, Any]) -> str:
    """Formats the recommendation in one line."""
    scenario = result.scenario
    if result.missing:
        return f"cannot tell: {sample_size.shortage(scenario, result.missing, 'this rate')}"
    words = scenario.words_of(chosen.placement).removeprefix("colocated ")
    cost = _cost(scenario, chosen.placement)
    return f"{document['recommendation']}: {words}: {cost} for {result.rate:g} req/s"


def _inputs(result: DemandResult, document: dict[str, Any], fits: Fits) -> list[str]:
    """Lists what the answer is of."""
    scenario = result.scenario
    return [
        documents.made_line(document),
        *scenario.words(),
        f"objective: {scenario.objective.words()}",
        *profile_range.fit_lines(fits),
        *profile_range.lines(document["extrapolated"]),
        *documents.part_lines(document["parts"], scenario.gpus),
    ]


def _notes(result: DemandResult, document: dict[str, Any]) -> list[str]:
    """Lists the bound of all placements, the effect of drafts, and flags that were not tried."""
    unit = result.scenario.criterion.unit
    lines = documents.draft_lines(document)
    if result.least_units:
        least = _of_unit(result.least_units, unit)
        lines.append(f"by capacity alone no placement needs less than {least}")
    if not_tried := document["proxy_flags"]["not_tried"]:
        lines.append(not_tried)
    return lines


def _rows(result: DemandResult, document: dict[str, Any]) -> list[list[str]]:
    """Returns the cells of the two placements, with the names of the columns first."""
    scenario = result.scenario
    unit = scenario.criterion.unit
    times = [(name, share) for name in _times(scenario) for share in (90, 99)]
    columns = [f"{name.upper()} p{share}" for name, share in times]
    is_counted = unit != "GPU"
    columns = [*([unit] if is_counted else []), "attainment", *columns]
    rows = [["", "GPUs", *columns, "placement"]]
    for name, score in (("disaggregated", result.split), ("colocated", result.together)):
        row = document[name]
        if not score or not row:
            rows.append([name, "none", *[""] * len(columns), ""])
            continue
        units = scenario.criterion.units(score.placement)
        rows.append(
            [
                name,
                str(score.placement.gpus),
                *([f"{units:.4g}"] if is_counted else []),
                f"{row['attainment']:.1%}",
                *(_seconds(row[f"{metric}_p{share}"]) for metric, share in times),
                scenario.words_of(score.placement),
            ]
        )
    return rows


def _text(result: DemandResult, chosen: DemandScore, document: dict[str, Any], fits: Fits) -> str:
    """Formats the answer for a terminal."""
    lines = [*_inputs(result, document, fits), "", _verdict(result, chosen, document), ""]
    for name, gpus, *cells, placement in _rows(result, document):
        columns = "".join(f"{cell:>12}" for cell in cells)
        row = f"{name:14}{gpus:>5}{columns}  {placement}"
        lines.append(row.rstrip())
    if notes := _notes(result, document):
        lines += ["", *notes]
    if document["commands"]:
        lines += ["", "run it:", *(f"  {command}" for command in document["commands"])]
    lines += [f"note: {remark}" for remark in document["remarks"]]
    return "\n".join(lines)


def _page(
    result: DemandResult, chosen: DemandScore, document: dict[str, Any], fits: Fits
) -> list[str]:
    """Formats the answer as parts of an HTML page."""
    header, *rows = _rows(result, document)
    return [
        f"<h1>{html.escape(_verdict(result, chosen, document))}</h1>",
        html_page.bullet_list(_inputs(result, document, fits)),
        "<h2>Placements</h2>",
        html_page.table(header, rows),
        html_page.bullet_list(_notes(result, document)),
        html_page.commands(document["commands"]),
        html_page.bullet_list(document["remarks"]),
        html_page.residuals(fits),
    ]


def _of_unit(value: float, unit: str) -> str:
    """Formats a number of GPUs, or of another unit."""
    plural = "s" if unit == "GPU" and value != 1 else ""
    return f"{value:.4g} {unit}{plural}"


def _seconds(value: float | None) -> str:
    return "never" if value is None else f"{value:.3f}"


def _cost(scenario: Scenario, placement: Placement) -> str:
    """Formats GPUs, price and power of a placement."""
    parts = [_of_unit(placement.gpus, "GPU")]
    for found in documents.bills(scenario):
        parts.append(f"{found.units(placement):.4g} {found.unit}")
    return ", ".join(parts)
