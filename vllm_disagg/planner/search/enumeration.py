"""Lists all placements within a budget of GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import msgspec

from .performance_source import PerformanceSource
from .placement import Placement, ReplicaGroup
from .scenario import Scenario

BASELINE_BUDGETS_TOKENS = (512, 2048, 8192)  # of a step of the chunked baseline


def disaggregated(scenario: Scenario) -> list[Placement]:
    """Lists all (TP, PP) and numbers of P and D within the budget."""
    prefills = list(_replica_groups(scenario.prefill, scenario.gpus - 1))
    decodes = list(_replica_groups(scenario.decode, scenario.gpus - 1))
    limit = scenario.min_prompt_bytes or 0
    spill = bool(scenario.spill)
    return [
        Placement(p, d, min_prompt_bytes=limit, spill=spill)
        for p, d in product(prefills, decodes)
        if p.gpus + d.gpus <= scenario.gpus
    ]


def colocated(scenario: Scenario) -> list[Placement]:
    """Lists all (TP, PP) with as many replicas as fit.

    Each is listed with chunked prefill of several budgets. DistServe's rules have prefill first,
    too, the schedule of vLLM in 2023: today's takes decodes into each step.
    """
    sources = [scenario.prefill]
    if scenario.decode != scenario.prefill:
        sources.append(scenario.decode)
    found = []
    for on_decode_gpus, source in enumerate(sources):
        budgets = [source.budget]
        if not source.budget:
            budgets = sorted({*BASELINE_BUDGETS_TOKENS, source.defaults.budget})
        for shape in source.layouts(scenario.gpus):
            group = msgspec.structs.replace(shape, n=scenario.gpus // shape.gpus)
            found += [
                Placement(group, None, budget, True, bool(on_decode_gpus)) for budget in budgets
            ]
            if scenario.distserve:
                found.append(Placement(group, None, max(budgets), False, bool(on_decode_gpus)))
    return found


def _replica_groups(source: PerformanceSource, gpus: int) -> Iterator[ReplicaGroup]:
    """Yields all groups of equal instances of up to `gpus` GPUs."""
    for shape in source.layouts(gpus):
        for n in range(1, gpus // shape.gpus + 1):
            yield msgspec.structs.replace(shape, n=n)
