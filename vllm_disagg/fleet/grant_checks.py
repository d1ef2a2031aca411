"""Checks of grants by the engine that they name: engine, role, time, sources.

Pure: `now` comes with each call, by the clock of this engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..errors import BadGrant, Unmappable
from ..kv import reshard
from ..kv.reshard import ReshardPlan
from ..protocol.peers import EngineInfo, WorkerInfo, difference
from . import dialling
from .grants import Grant
from .handovers import Handover
from .used_grants import UsedGrants, check_time

MAX_CACHED_PLANS = 256  # reshard plans, by the names of the other engine's workers


class _CachedPlan(NamedTuple):
    """A reshard plan, and the workers from which it reads."""

    sources: list[WorkerInfo]
    plan: ReshardPlan


class GrantChecker:
    """Checks the grants of one engine, and plans the reads that they permit."""

    def __init__(self, engine: EngineInfo, used: UsedGrants, *, loopback_only: bool) -> None:
        """Creates the checks of an engine. `loopback_only`: it dials no other machine."""
        self.engine = engine
        self._used = used
        self._loopback_only = loopback_only
        self._plans: dict[tuple[str, ...], _CachedPlan] = {}  # by the other workers' names

    def check_probe(self, grant: Grant, now: float) -> None:
        """Raises BadGrant unless a probe is for this engine and valid now.

        A probe changes nothing, so it may be repeated.
        """
        self._check_engine(grant)
        check_time(grant.until, now)

    def use_leg(self, grant: Grant, now: float) -> None:
        """Uses up the grant of a leg.

        Raises BadGrant unless it is for this engine and its role, valid now, and not used yet.
        """
        self._check_engine(grant)
        self.check_role(grant.leg)
        self._used.use(
            "load" if grant.leg == "decode" else "send", grant.transfer, grant.until, now
        )

    def check_role(self, leg: str) -> None:
        """Raises BadGrant for a leg that this engine's role excludes. `leg`: prefill or decode."""
        if self.engine.role not in (leg, "both"):
            raise BadGrant(f"a {leg} leg, but this engine's role is {self.engine.role}")

    def use_handover(self, handover: Handover, prompt: str, now: float) -> None:
        """Uses up a handover, which stays used until `end_handover`. `prompt`: our own digest.

        Raises BadGrant unless it is for this prompt, of an engine with equal KV, and not used yet.
        """
        self.check_role("decode")
        # Before it is used up: a request with another prompt must not take it from its owner.
        if not prompt:
            raise BadGrant("the inputs of this prompt cannot be compared between engines")
        if handover.prompt != prompt:
            raise BadGrant("for another prompt")
        # Behind a proxy of ours this was compared when the pair was made.
        if found := difference(self.engine.layout, handover.layout):
            raise BadGrant(f"the KV of P is another: {found}")
        self._check_workers(handover.sources)
        self._check_readable(handover.sources)
        self._used.hold("load", handover.transfer, now)

    def end_handover(self, transfer: str, now: float) -> None:
        """Forgets a handover after a while: no worker of this engine knows its transfer now."""
        self._used.release("load", transfer, now)

    def _check_engine(self, grant: Grant) -> None:
        if grant.engine != self.engine.incarnation:
            raise BadGrant("for another engine, or for this one before its restart")

    def check_sources(self, grant: Grant) -> None:
        """Raises BadGrant for workers that this engine must not read from, before it dials one."""
        self._check_workers(grant.sources)
        # A prefill leg runs without reuse as well: see `plan_reuse`.
        if grant.leg != "decode":
            return
        self._check_readable(grant.sources)

    def _check_workers(self, sources: Sequence[WorkerInfo]) -> None:
        """Raises BadGrant unless these are different workers of another engine."""
        names = {worker.name for worker in sources}
        if len(names) < len(sources):
            raise BadGrant("names one worker twice")
        if names & {worker.name for worker in self.engine.workers}:
            raise BadGrant(
                "names this engine's own workers: it cannot be both engines of a request"
            )

    def _check_readable(self, sources: Sequence[WorkerInfo]) -> None:
        """Raises BadGrant for workers that this engine must not dial, or cannot read from."""
        if refusal := dialling.refusal(sources, loopback_only=self._loopback_only):
            raise BadGrant(refusal)
        try:
            self.plan_reads(sources)
        except Unmappable as error:
            raise BadGrant(f"the KV of P cannot be read here: {error}") from None

    def plan_reads(self, sources: Sequence[WorkerInfo]) -> ReshardPlan:
        """Returns which of our ranks reads what of these workers; Unmappable if none can be."""
        return self._cached_plan(sources).plan

    def share_sources(self, sources: Sequence[WorkerInfo]) -> list[WorkerInfo]:
        """Returns equal workers, the same objects for each leg that reads from them.

        Raises Unmappable as `plan_reads` does.
        """
        # vLLM pickles the events of a step for its workers: the descriptions of a P's workers are
        # in it once then, however many requests wait for their KV.
        return self._cached_plan(sources).sources

    def _cached_plan(self, sources: Sequence[WorkerInfo]) -> _CachedPlan:
        names = tuple(worker.name for worker in sources)
        cached = self._plans.get(names)
        # Compared, because the other engine's HTTP has described its workers: a plan for other
        # layouts would end the driver's thread, and with it all transfers.
        if cached is not None and cached.sources == list(sources):
            return cached
        own_layouts = [worker.holds for worker in self.engine.workers]
        plan = reshard.plan([worker.holds for worker in sources], own_layouts)
        made = _CachedPlan(list(sources), plan)
        self._plans[names] = made
        if len(self._plans) > MAX_CACHED_PLANS:
            del self._plans[next(iter(self._plans))]
        return made

    def plan_reuse(self, grant: Grant) -> ReshardPlan:
        """Returns the plan by which a prefill leg reads from D.

        Raises BadGrant or Unmappable if it must run without reuse.
        """
        if refusal := dialling.refusal(grant.sources, loopback_only=self._loopback_only):
            raise BadGrant(refusal)
        return self.plan_reads(grant.sources)

    def use_reuse(self, grant: Grant, now: float) -> str | None:
        """Uses up the transfer id of a leg's reuse; returns None if it may not be used."""
        if not self.engine.two_way or not grant.back or grant.back == grant.transfer:
            return None
        try:
            # The opposite of the leg's own direction: one id must not name two loads, or two sends.
            self._used.use(
                "send" if grant.leg == "decode" else "load", grant.back, grant.until, now
            )
        except BadGrant:
            return None
        return grant.back
