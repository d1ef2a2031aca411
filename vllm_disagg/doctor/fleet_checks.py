"""Checks instances and each pair of them: first alone, then by description, then by a proof."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from ..fleet.keys import FleetKey
from ..proxy.routing.fleet import Instance, Role
from .findings import Report
from .instance_checks import ExaminedInstance, InstanceExam
from .pair_checks import examine_pair
from .pair_proof import PairFigures, PairProof, Reference, make_reference
from .server_client import ServerClient


class FleetReport(Report):
    """The findings of a fleet, with the figures of its pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[PairFigures] = []

    def document(self) -> dict[str, object]:
        """Returns the report for programs."""
        return {**super().document(), "pairs": [pair.document() for pair in self.pairs]}


async def examine(
    report: FleetReport,
    prefill_urls: Sequence[str],
    decode_urls: Sequence[str],
    key: FleetKey,
    api_key: str,
) -> None:
    """Adds the findings of all instances and pairs. `api_key`: of the instances' API servers."""
    prefills = [_instance(url, "prefill", api_key) for url in prefill_urls]
    decodes = [_instance(url, "decode", api_key) for url in decode_urls]
    everyone = [*prefills, *decodes]
    try:
        reports = [Report() for _ in everyone]
        exams = [
            InstanceExam(examined, key, its_report)
            for examined, its_report in zip(everyone, reports, strict=True)
        ]
        await asyncio.gather(*(exam.run() for exam in exams))
        for its_report in reports:
            report.findings += its_report.findings
        await _examine_pairs(report, prefills, decodes, key)
    finally:
        for examined in everyone:
            examined.client.close()


def _instance(url: str, role: Role, api_key: str) -> ExaminedInstance:
    return ExaminedInstance(Instance(url, role), ServerClient(url, api_key))


async def _examine_pairs(
    report: FleetReport,
    prefills: list[ExaminedInstance],
    decodes: list[ExaminedInstance],
    key: FleetKey,
) -> None:
    """Adds the findings of each pair whose instances are ready."""
    # One after the other: seconds and bytes are those of one pair then.
    for decode in decodes:
        reference: Reference | None = None
        for prefill in prefills:
            if not (prefill.is_ready and decode.is_ready):
                continue
            if not examine_pair(prefill, decode, report):
                continue
            reference = reference or await make_reference(decode, report)
            if reference is None:
                break
            figures = await PairProof(prefill, decode, key, report).run(reference)
            if figures:
                report.pairs.append(figures)
