"""Times of the best placements at each rate of their curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..search.advice import Advice, RateCurve
from ..simulation.objective import SimulationResult, quantile

SHOWN_OF_A_KIND = 3
TIMES = ("ttft", "tpot", "itl")
SHARES = (50, 90, 99)
HEADER = (
    "placement",
    "req/s per GPU",
    "attainment",
    *(f"{name.upper()} p{share}" for name in TIMES for share in (50, 90)),
)


def shown(curves: Sequence[RateCurve]) -> list[RateCurve]:
    """Selects the best curves of each kind; the others serve the crossovers only."""
    disaggregated = [curve for curve in curves if curve.placement.decode]
    colocated = [curve for curve in curves if not curve.placement.decode]
    return disaggregated[:SHOWN_OF_A_KIND] + colocated[:SHOWN_OF_A_KIND]


def as_json(found: Advice) -> list[dict[str, Any]]:
    """Describes each placement at each rate for JSON documents.

    A quantile that the requests do not reach is None, and so are gaps that were not recorded.
    """
    scenario = found.scenario
    rows = []
    for curve in shown(found.curves):
        shares = curve.attainment(scenario.objective)
        for rate, result, share in zip(curve.rates, curve.results, shares, strict=True):
            row: dict[str, Any] = {
                "placement": scenario.words_of(curve.placement),
                "rate_per_gpu": rate,
                "rate": rate * curve.placement.gpus,
                "attainment": share,
            }
            rows.append(row | _quantiles(result))
    return rows


def _quantiles(result: SimulationResult) -> dict[str, float | None]:
    """Returns the quantiles of each time."""
    found: dict[str, float | None] = {}
    for name in TIMES:
        values = sorted(getattr(result, name) or ())  # once: quantiles sort sorted values fast
        for share in SHARES:
            seconds = quantile(values, share / 100) if values else math.inf
            found[f"{name}_p{share}"] = seconds if seconds < math.inf else None
    return found


def cells(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Formats rows of the document for a table with the columns of HEADER."""
    found = []
    for row in rows:
        times = [row[f"{name}_p{share}"] for name in TIMES for share in (50, 90)]
        found.append(
            [
                row["placement"],
                f"{row['rate_per_gpu']:.3f}",
                f"{row['attainment']:.1%}",
                *("never" if seconds is None else f"{seconds:.4g} s" for seconds in times),
            ]
        )
    return found
