"""Decides which instances prefill and which decode, as the load asks.  Pure: no clock, no I/O.

Engines that were started for both roles (`kv_both`) can take either. A change concerns new requests
only: running legs end where they are.

The wanted split is the one with the fewest misses in the load of the last minute
(`split_misses.py`). An instance changes its role towards it. Against changes to and fro:

    hysteresis   the split saves MIN_SAVED of all requests, and MIN_GAIN of those that miss
    confirmation a change in the same direction is wanted for CONFIRMATION_SECONDS
    cooldown     `RoleRules.cooldown` seconds lie between two changes

In an overload that no split would have served, the role with the larger pressure gets an instance
if the other one has room. Prefill instances that always compute get one likewise, if nobody is
harmed.

The numbers for an autoscaler need no such care. They come from the pressure of a role: its load, as
the share of the objective that one of so many instances would take.

Two cases wait for none of these: a fleet without a decode instance serves nobody, and one without a
prefill instance splits no request. A member changes its role at the first observation of that. Only
where an instance of the missing role is still starting, it has START_GRACE_SECONDS.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import Literal

import msgspec

from .split_misses import InstanceLimits, Moment, SplitMisses, StepTimes

Role = Literal["prefill", "decode"]

MIN_GAIN = 0.15  # of the misses
MIN_SAVED = 0.03  # of all requests
OVERLOAD = 0.5  # of all requests miss: what no split would have saved is relieved
ALWAYS_BUSY = 0.95  # of prefill instances: their work, and what waits within TTFT
MAX_GIVER_PRESSURE = 0.9  # of the role that gives an instance to relieve the other
WANTED_PRESSURE = 0.8  # at which the numbers of instances for an autoscaler are reckoned
CONFIRMATION_SECONDS = 3.0
START_GRACE_SECONDS = 30.0  # for the first answer of a role's instances, while it has none
SMOOTHING_SECONDS = 10.0  # in which an old load comes to count 1/e
MAX_WANTED = 1024  # instances of a role


class RoleMember(msgspec.Struct, frozen=True):
    """A usable instance that can take either role."""

    name: str
    role: Role
    active: int = 0  # running requests and prefill legs


class LoadObserved(msgspec.Struct, frozen=True, kw_only=True):
    """The members, and the load of the whole fleet."""

    members: tuple[RoleMember, ...]
    fixed_prefill: int = 0  # usable instances that can only prefill
    fixed_decode: int = 0  # usable instances that can only decode
    starting: frozenset[Role] = frozenset()  # roles of instances that have never answered
    # Work of the prompts of one second; None: it was not measured yet.
    prefill_work: float | None = None
    waiting_work: float = 0.0  # of prompts that are not computed yet
    sequences: float = 0.0  # that decode, in the whole fleet
    contexts: float = 0.0  # tokens of context of all of them
    kv_tokens: int = 0  # of one instance; 0: not known
    steps: StepTimes | None = None  # None: they were not measured yet


class ChangeRole(msgspec.Struct, frozen=True):
    """Sends a member's new requests in another role."""

    name: str
    role: Role


class ReportWanted(msgspec.Struct, frozen=True):
    """States how many instances of each role the load needs, whatever there are."""

    prefill: int
    decode: int


RoleAction = ChangeRole | ReportWanted


class RoleRules(msgspec.Struct, frozen=True):
    """The objectives, and the least time between two changes, in seconds."""

    ttft: float
    tpot: float
    cooldown: float = 10.0


class _SmoothedLoad(msgspec.Struct):
    """Load over the last seconds."""

    prefill_work: float
    sequences: float
    contexts: float
    at: float  # of the last observation

    def add(self, event: LoadObserved, now: float) -> None:
        """Adds an observation."""
        share = 1 - math.exp(-max(0.0, now - self.at) / SMOOTHING_SECONDS)
        self.at = now
        self.prefill_work += share * ((event.prefill_work or 0.0) - self.prefill_work)
        self.sequences += share * (event.sequences - self.sequences)
        self.contexts += share * (event.contexts - self.contexts)


class RoleController:
    """Chooses roles. One controller decides for a fleet."""

    def __init__(self, rules: RoleRules) -> None:
        self._rules = rules
        self._load: _SmoothedLoad | None = None
        self._misses = SplitMisses()
        self._changed_at = -math.inf
        self._wish: Role | None = None  # the role that should get one more member
        self._wished_since = 0.0
        self._lacking_since: float | None = None  # an instance of one role; None: none is lacking

    def handle(self, event: LoadObserved, now: float) -> list[RoleAction]:
        """Takes an observation at `now`, in seconds; returns the changes."""
        repair = _repair(event)
        if repair is None:
            self._lacking_since = None
        elif self._waits_for_start(event, repair.role, now):
            return []
        else:
            self._note_change(now)
            return [repair]
        if event.steps is None or event.prefill_work is None:
            return []
        if self._load is None:
            self._load = _SmoothedLoad(event.prefill_work, event.sequences, event.contexts, now)
        self._load.add(event, now)
        self._misses.add(_moment(event, event.prefill_work, now))
        limits = InstanceLimits(self._rules.ttft, self._rules.tpot, event.kv_tokens)
        actions: list[RoleAction] = [self._wanted(event, event.steps, limits)]
        wish = self._desired_gain(event, event.steps, limits)
        if wish != self._wish:
            self._wish = wish
            self._wished_since = now
        is_confirmed = now - self._wished_since >= CONFIRMATION_SECONDS
        is_cool = now - self._changed_at >= self._rules.cooldown
        if wish and is_confirmed and is_cool:
            actions.append(_move(event, wish))
            self._note_change(now)
        return actions

    def _waits_for_start(self, event: LoadObserved, role: Role, now: float) -> bool:
        """Whether a missing role may soon have an instance that is still starting."""
        if self._lacking_since is None:
            self._lacking_since = now
        return role in event.starting and now - self._lacking_since < START_GRACE_SECONDS

    def _note_change(self, now: float) -> None:
        self._changed_at = now
        self._wish = None

    def _desired_gain(
        self, event: LoadObserved, steps: StepTimes, limits: InstanceLimits
    ) -> Role | None:
        """Returns the role that should get a member from the other one; None for no change."""
        prefills, decodes = _counts(event)
        if not prefills or not decodes:
            return None
        missed = self._misses.share(steps, limits, prefills, decodes)
        gain, least = 0, missed
        for more in _moves(event):
            found = self._misses.share(steps, limits, prefills + more, decodes - more)
            if found < least:
                gain, least = more, found
        if missed - least >= MIN_SAVED and least <= (1 - MIN_GAIN) * missed:
            return "prefill" if gain > 0 else "decode"
        return self._relief(event, steps, limits, missed)

    def _relief(
        self, event: LoadObserved, steps: StepTimes, limits: InstanceLimits, missed: float
    ) -> Role | None:
        """Returns the role that should get a member though no split saves enough.

        Queues that no split can end still grow more slowly with the better one. Prefill instances
        that always compute get one, too, if that harms nobody: clients that wait for each answer
        would only be slower. `missed`: the share that misses now.
        """
        prefills, decodes = _counts(event)
        work = self._work(event, limits)

        def pressures(more: int) -> dict[Role, float]:
            sequences = event.sequences / (decodes - more)
            contexts = event.contexts / (decodes - more)
            return {
                "prefill": work / (prefills + more),
                "decode": limits.decode_share(steps, sequences, contexts),
            }

        before = pressures(0)
        is_overload = missed > OVERLOAD
        if not is_overload and before["prefill"] < ALWAYS_BUSY:
            return None
        takes: Role = "prefill" if before["prefill"] > before["decode"] else "decode"
        gives: Role = "decode" if takes == "prefill" else "prefill"
        more = 1 if takes == "prefill" else -1
        if more not in _moves(event):
            return None
        after = pressures(more)
        is_better = max(after.values()) <= (1 - MIN_GAIN) * before[takes]
        if not is_better or after[gives] > MAX_GIVER_PRESSURE:
            return None
        harms = self._misses.share(steps, limits, prefills + more, decodes - more) > missed
        return takes if is_overload or not harms else None

    def _work(self, event: LoadObserved, limits: InstanceLimits) -> float:
        """Returns the seconds of one instance that prompts take of a second, to be in time."""
        arriving = self._load.prefill_work if self._load else 0.0
        return arriving + event.waiting_work / limits.ttft

    def _wanted(
        self, event: LoadObserved, steps: StepTimes, limits: InstanceLimits
    ) -> ReportWanted:
        """Returns the least numbers of instances whose pressures are as wanted."""
        load = self._load
        assert load is not None
        prefill = self._work(event, limits) / WANTED_PRESSURE
        # What decodes now is there, even if it is new; what has ended may come again.
        sequences = max(event.sequences, load.sequences)
        contexts = max(event.contexts, load.contexts)

        def is_enough(decodes: int) -> bool:
            share = limits.decode_share(steps, sequences / decodes, contexts / decodes)
            return share <= WANTED_PRESSURE

        decodes = range(1, MAX_WANTED + 1)
        if is_enough(MAX_WANTED):
            decode = decodes[bisect_left(decodes, True, key=is_enough)]
        else:  # a step of one sequence takes longer: more instances are no help
            decode = _counts(event)[1]
        return ReportWanted(min(max(1, math.ceil(prefill)), MAX_WANTED), decode)


def _moment(event: LoadObserved, prefill_work: float, now: float) -> Moment:
    """Returns what is kept of an observation."""
    prefills, decodes = _counts(event)
    return Moment(
        at=now,
        prefills=prefills,
        decodes=decodes,
        prefill_work=prefill_work,
        waiting_work=event.waiting_work,
        sequences=event.sequences,
        contexts=event.contexts,
    )


def _counts(event: LoadObserved) -> tuple[int, int]:
    """Returns the numbers of usable prefill and decode instances."""
    prefills = sum(member.role == "prefill" for member in event.members)
    decodes = len(event.members) - prefills
    return event.fixed_prefill + prefills, event.fixed_decode + decodes


def _moves(event: LoadObserved) -> list[int]:
    """Returns by how many instances prefill can grow, or, below 0, shrink: by 1, 2, 4, all."""
    found = []
    for role, sign, fixed in (
        ("decode", 1, event.fixed_decode),
        ("prefill", -1, event.fixed_prefill),
    ):
        members = sum(member.role == role for member in event.members)
        most = max(0, members if fixed else members - 1)  # one instance of a role stays
        steps = {2**power for power in range(most.bit_length())} | {most}
        found += [sign * step for step in sorted(steps - {0})]
    return found


def _has_member(event: LoadObserved, role: Role) -> bool:
    return any(member.role == role for member in event.members)


def _repair(event: LoadObserved) -> ChangeRole | None:
    """Returns the change that a fleet without instances of one role needs."""
    prefills, decodes = _counts(event)
    if not decodes and _has_member(event, "prefill"):
        return _move(event, "decode")
    if not prefills and decodes > 1 and _has_member(event, "decode"):
        return _move(event, "prefill")
    return None


def _move(event: LoadObserved, gains: Role) -> ChangeRole:
    """Returns the change of the member of the other role that has the fewest requests."""
    donors = [member for member in event.members if member.role != gains]
    least = min(donors, key=lambda member: (member.active, member.name))
    return ChangeRole(least.name, gains)
