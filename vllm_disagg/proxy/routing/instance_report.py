"""Describes instances to operators: the rows of GET /disagg/instances, and who pairs with whom.

Pure: the times of the event loop's clock and of the wall clock are passed in.
"""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import islice
from typing import Literal

import msgspec

from .fleet import Connector, Instance, Role
from .pairing_table import PairingTable

BreakerState = Literal["closed", "open", "half-open"]
DRAINED = "drained"  # why an instance is not used, until the admin API ends its drain
UNNAMED = "leaves, since no source names it"
MAX_PARTNERS = 64  # in each list of a row; 1,000 rows with all of theirs have 12 MB


class Misfit(msgspec.Struct, frozen=True):
    """An instance of the other role with which no request can be split, and the reason."""

    url: str
    why: str


class LastFailure(msgspec.Struct, frozen=True):
    """The last failure of an instance: of a leg, a probe or a health check."""

    reason: str
    at: str  # UTC, ISO 8601


class InstanceReport(msgspec.Struct, frozen=True, kw_only=True):
    """One row of GET /disagg/instances."""

    url: str
    role: Role  # of its new requests
    # Roles that its connector can take: prefill, decode or both; empty without this project's.
    connector_role: str = ""
    usable: bool
    why_not: str
    incarnation: str
    in_flight: int
    leaving: bool
    model: str
    version: str  # of vLLM; empty if its connector does not state it
    release: str = ""  # of vllm-disagg there; empty if its connector does not state it
    connector: Connector
    # What its vLLM does after a failed load; empty if its connector does not state it.
    failure_policy: str = ""
    # Whether a stream may begin with its first token; None without this project's connector.
    computes_last_token: bool | None = None
    transports: list[str]  # that can carry its KV; empty without this project's connector
    kv_cache_usage: float | None  # 0 to 1; None if it is not known
    breaker: BreakerState
    state_since: str  # when it became up or down, in UTC, ISO 8601
    last_failure: LastFailure | None
    pairs_with: list[str]  # MAX_PARTNERS at most, and so of `misfits`
    pair_count: int = 0  # instances with which it can be paired
    misfits: list[Misfit]


class Clock(msgspec.Struct, frozen=True):
    """One moment: by the event loop's clock, and in seconds since 1970."""

    loop: float
    wall: float

    def iso(self, at: float) -> str:
        """Returns a time of the event loop's clock in UTC, ISO 8601, to the millisecond."""
        moment = datetime.fromtimestamp(self.wall - self.loop + at, UTC)
        return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def report(table: PairingTable, instance: Instance, clock: Clock) -> InstanceReport:
    """Returns the row of one instance."""
    usable = instance.is_usable(clock.loop)
    is_leaving = instance in table.fleet.leaving
    pairs_with, misfits = partners(table, instance)
    failure = None
    if instance.last_failure:
        failure = LastFailure(instance.last_failure, clock.iso(instance.last_failure_at))
    return InstanceReport(
        url=instance.url,
        role=instance.role,
        connector_role=instance.engine.role if instance.engine else "",
        usable=usable and not is_leaving and (instance.role == "decode" or instance.can_transfer),
        why_not=why_not(table, instance, usable),
        incarnation=instance.engine.incarnation if instance.engine else "",
        in_flight=instance.active_requests,
        leaving=is_leaving,
        model=instance.model,
        version=instance.engine.version if instance.engine else "",
        release=instance.engine.release if instance.engine else "",
        connector=instance.connector,
        failure_policy=instance.engine.failure_policy if instance.engine else "",
        computes_last_token=instance.engine.computes_last_token if instance.engine else None,
        transports=instance.engine.transports if instance.engine else [],
        kv_cache_usage=instance.kv_cache_usage if instance.is_usage_known else None,
        breaker=breaker_state(instance, clock.loop),
        state_since=clock.iso(instance.state_since),
        last_failure=failure,
        pairs_with=pairs_with,
        pair_count=len(table.fitting(instance)) if pairs_with else 0,
        misfits=misfits,
    )


def partners(table: PairingTable, instance: Instance) -> tuple[list[str], list[Misfit]]:
    """Returns the URLs with which an instance can be paired, and those that do not fit.

    Each list has MAX_PARTNERS at most.
    Instances that are down or leave are in neither list: nothing is known of them.
    """
    if not instance.up or instance in table.fleet.leaving:
        return [], []
    fitting = [other.url for other in table.fitting(instance)[:MAX_PARTNERS]]
    misfits = islice(table.misfits(instance), MAX_PARTNERS)
    return fitting, [Misfit(other.url, why) for other, why in misfits]


def breaker_state(instance: Instance, now: float) -> BreakerState:
    """Returns the state of an instance's circuit breaker."""
    if instance.consecutive_failures < 2:
        return "closed"
    return "open" if now < instance.open_until else "half-open"


def why_not(table: PairingTable, instance: Instance, usable: bool) -> str:
    """Returns why an instance is not used, or not in full; "" if it is.

    `usable`: it is up, and its circuit breaker is not open.
    """
    fleet = table.fleet
    if instance in fleet.leaving:
        return DRAINED if instance.url in fleet.drained else UNNAMED
    if instance.unavailable_reason:
        return instance.unavailable_reason
    if instance.up and not usable:
        return "rests after failures"
    return table.problem(instance)
