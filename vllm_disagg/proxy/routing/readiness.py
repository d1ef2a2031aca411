"""Judges whether the proxy can serve requests: the answer of GET /readiness.  Pure.

Two modes. A request is served as long as one decode instance is up: that is `any`. With `pair`, two
instances that fit must be usable too, if the fleet has prefill instances at all.

As a Kubernetes probe `any` is the right one: without a prefill instance the decode instances
compute all prompts. With `pair` an outage of P would take all proxies out of their Service.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from .fleet import Fleet
from .instance_report import DRAINED
from .pairing_table import PairingTable

ReadinessMode = Literal["any", "pair"]
READINESS_MODES: tuple[ReadinessMode, ...] = ("any", "pair")
DEFAULT_READINESS: ReadinessMode = "any"


class Readiness(msgspec.Struct, frozen=True, omit_defaults=True):
    """The JSON of GET /readiness: how many instances are usable, and what is missing."""

    prefill: int  # usable prefill instances that fit a decode instance
    decode: int  # decode instances that are up
    reason: str = ""  # why no request can be served
    degraded: str = ""  # why requests are served, but no prompt is computed by a prefill instance
    mismatch: str = ""  # why no two instances of now can be paired, although all answer
    instances: dict[str, str] = {}  # why an instance is not used, or not used in full, by URL

    def is_ready(self, mode: ReadinessMode) -> bool:
        """Returns whether the probe of this mode succeeds."""
        return not self.reason and (mode == "any" or not self.degraded)


def judge_readiness(fleet: Fleet, now: float) -> Readiness:
    """Returns the present readiness of a fleet; a drained instance counts as one that is down."""
    decodes = [d for d in fleet.with_role("decode") if d.up]
    table = PairingTable(fleet)
    prefills = [p for p in fleet.with_role("prefill") if p.can_prefill(now) and table.fitting(p)]
    found = Readiness(len(prefills), len(decodes), instances=_problems(table))
    if not decodes:
        return msgspec.structs.replace(found, reason=_missing("decode", fleet))
    if prefills or not _has_prefill(fleet):
        return found
    degraded = f"{_missing('prefill', fleet)}; decode instances compute all prompts"
    misfit = table.permanent_mismatch()
    return msgspec.structs.replace(
        found, degraded=degraded, mismatch=misfit.reason if misfit else ""
    )


def _has_prefill(fleet: Fleet) -> bool:
    """Whether the operator wants prefill instances, even if each of them is drained."""
    return bool(fleet.with_role("prefill")) or "prefill" in fleet.drained.values()


def _missing(role: str, fleet: Fleet) -> str:
    drained = [url for url, its_role in fleet.drained.items() if its_role == role]
    if drained:
        return f"no {role} instance can be used ({', '.join(sorted(drained))}: drained)"
    return f"no {role} instance can be used"


def _problems(table: PairingTable) -> dict[str, str]:
    problems = dict.fromkeys(table.fleet.drained, DRAINED)
    for instance in table.fleet.instances:
        reason = instance.unavailable_reason or table.problem(instance)
        if reason:
            problems[instance.url] = reason
    return problems
