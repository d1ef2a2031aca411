"""Decides which instances prefill and which decode, as the load asks.  Pure: no clock, no I/O.

Engines that were started for both roles (`kv_both`) can take either. A change concerns new requests
only: running legs end where they are.

The pressure of a role is the share of its objective that its load takes; above 1, requests miss it:

    prefill   (work that arrives within TTFT + work that waits) / (instances * TTFT)
    decode    seconds of a step with an instance's share of the sequences / TPOT, or, if more, the
              share of the KV cache that their contexts take

Work is counted in seconds of one instance, by the engines' own step times. The wanted split has the
least pressure of the role that has more of it. Against changes to and fro:

    hysteresis   a change lowers that pressure by MIN_GAIN at least
    donor        the role that gives an instance stays below MAX_DONOR_PRESSURE without it, or
                 below MAX_DONOR_PRESSURE_IF_URGENT if the other is above URGENT_PRESSURE
    confirmation the same change is wanted for CONFIRMATION_SECONDS
    cooldown     `RoleRules.cooldown` seconds lie between two changes

Two cases wait for none of these: a fleet without a decode instance serves nobody, and one without a
prefill instance splits no request. A member changes its role at the first observation of that. Only
where an instance of the missing role is still starting, it has START_GRACE_SECONDS.
"""

from __future__ import annotations

import math
from typing import Literal, Protocol

import msgspec

Role = Literal["prefill", "decode"]

MIN_GAIN = 0.15  # of the larger pressure
MAX_DONOR_PRESSURE = 0.7  # load varies: the mean must leave room
# The same where the other role misses its objective by far.
URGENT_PRESSURE = 2.5
MAX_DONOR_PRESSURE_IF_URGENT = 0.9
MIN_PRESSURE = 0.7  # below it no objective is in danger, and nothing changes
WANTED_PRESSURE = 0.8  # at which the numbers of instances for an autoscaler are reckoned
CONFIRMATION_SECONDS = 3.0
START_GRACE_SECONDS = 30.0  # for the first answer of a role's instances, while it has none
SMOOTHING_SECONDS = 10.0  # in which an old load comes to count 1/e
MAX_WANTED = 1024  # instances of a role


class StepTimes(Protocol):
    """Times of an instance's steps, as measured or modelled."""

    def decode_step(self, sequences: float, contexts: float) -> float:
        """Returns the seconds of a step of so many sequences with so many tokens of context."""


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
        actions: list[RoleAction] = [self._wanted(event)]
        wish = self._desired_gain(event)
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

    def prefill_pressure(self, event: LoadObserved, instances: int) -> float:
        """Returns the pressure of so many prefill instances; without any it is infinite."""
        if not instances:
            return math.inf
        load = self._load
        arriving = load.prefill_work if load else event.prefill_work or 0.0
        return (arriving + event.waiting_work / self._rules.ttft) / instances

    def decode_pressure(self, event: LoadObserved, instances: int) -> float:
        """Returns the pressure of so many decode instances; without any it is infinite."""
        if not instances or event.steps is None:
            return math.inf
        # What decodes now is there, even if it is new; what has ended may come again.
        load = self._load
        sequences = max(event.sequences, load.sequences if load else 0.0) / instances
        contexts = max(event.contexts, load.contexts if load else 0.0) / instances
        pressure = event.steps.decode_step(sequences, contexts) / self._rules.tpot
        return max(pressure, contexts / event.kv_tokens) if event.kv_tokens else pressure

    def _desired_gain(self, event: LoadObserved) -> Role | None:
        """Returns the role that should get a member from the other one; None for no change."""
        prefills, decodes = _counts(event)
        prefill = self.prefill_pressure(event, prefills)
        decode = self.decode_pressure(event, decodes)
        if max(prefill, decode) < MIN_PRESSURE:
            return None
        if prefill > decode:
            gains: Role = "prefill"
            before, after = prefill, self.prefill_pressure(event, prefills + 1)
            donor = self.decode_pressure(event, decodes - 1)
            is_free = _has_member(event, "decode")
        else:
            gains = "decode"
            before, after = decode, self.decode_pressure(event, decodes + 1)
            donor = self.prefill_pressure(event, prefills - 1)
            is_free = _has_member(event, "prefill")
        is_urgent = before > URGENT_PRESSURE
        most = MAX_DONOR_PRESSURE_IF_URGENT if is_urgent else MAX_DONOR_PRESSURE
        if not is_free or donor > most:
            return None
        return gains if max(after, donor) <= (1 - MIN_GAIN) * before else None

    def _wanted(self, event: LoadObserved) -> ReportWanted:
        """Returns the least numbers of instances whose pressures are as wanted."""
        prefill = math.ceil(self.prefill_pressure(event, 1) / WANTED_PRESSURE)
        decode = 1
        while decode < MAX_WANTED and self.decode_pressure(event, decode) > WANTED_PRESSURE:
            if self.decode_pressure(event, MAX_WANTED) > WANTED_PRESSURE:
                # A step of one sequence takes longer: more instances are no help.
                decode = _counts(event)[1]
                break
            decode += 1
        return ReportWanted(min(max(1, prefill), MAX_WANTED), decode)


def _counts(event: LoadObserved) -> tuple[int, int]:
    """Returns the numbers of usable prefill and decode instances."""
    prefills = sum(member.role == "prefill" for member in event.members)
    decodes = len(event.members) - prefills
    return event.fixed_prefill + prefills, event.fixed_decode + decodes


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
