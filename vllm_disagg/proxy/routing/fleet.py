"""The instances as the proxy knows them.  Pure state: no clock, no sockets.

An instance is `up` when it answers; `engine` says what its connector told a probe, None for a vLLM
without one. What fails twice in a row while up is left alone for a while. Then one request may try
it; success ends its penance, failure doubles it. Who has only such instances uses them all the
same: a rest is a preference, not a lock. In a row means one after the other: failures of requests
that were in flight together count once, and not at all beside a success.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ...protocol.peers import EngineInfo, difference
from ..http.addresses import split_rank
from ..http.endpoint_schema import RANKLESS
from .engine_steps import StepMonitor

Role = Literal["prefill", "decode"]
Kind = Literal["disagg", "nixl", "plain"]  # its connector: ours, NixlConnector, none that we know

MAX_FAILED_PROBES = 2  # health checks answered badly until an instance counts as down
NOT_PROBED = "not probed yet"
MAX_BACKOFF_SECONDS = 30.0  # seconds


@dataclass(slots=True, eq=False)
class Instance:
    """One engine: a vLLM server, or one data parallel rank of it (URL@RANK)."""

    url: str
    role: Role
    rank: int | None = field(init=False)
    model: str = ""
    engine: EngineInfo | None = None
    up: bool = False
    why_not: str = (
        NOT_PROBED  # for people: what keeps it from being used, or from being used in full
    )
    needs_probe: bool = True
    misses: int = 0
    failures: int = 0  # of legs, in a row
    judged: float = 0.0  # when the last failure that counts, or a success, came
    resting_until: float = 0.0
    in_flight: int = 0
    legs: int = 0  # prefill legs at work
    prompt_bytes: int = 0  # in those legs
    turn: int = 0  # when it was chosen last
    context: int = 0  # bytes of the prompts of requests in flight
    whole: int = 0  # requests of which it computes the whole prompt
    kv_use: float = 0.0  # of its KV cache, as it said last
    models: frozenset[str] = frozenset()  # all names that it serves
    deaf: set[str] = field(default_factory=set)  # paths at which it does not know what a grant is
    kind: Kind = "plain"
    kin: str = ""  # who of the other role has the same can be paired with it
    stepping: StepMonitor = field(default_factory=StepMonitor)  # whether its engine does
    worker_names: frozenset[str] = frozenset()
    ahead: float = 0.0  # of our clock is its engine's, as it said last
    told: float = float("-inf")  # when that was
    cache: object = field(
        default_factory=object
    )  # stands for what is in its prefix cache; another one after a restart

    def __post_init__(self) -> None:
        self.rank = split_rank(self.url)[1]

    def probed(
        self, model: str, engine: EngineInfo | None, models: Iterable[str] = (), nixl: bool = False
    ) -> None:
        """It answered a probe."""
        if (
            not self.up
            or not self.engine
            or not engine
            or self.engine.incarnation != engine.incarnation
        ):
            self.cache, self.deaf = object(), set() if self.rank is None else set(RANKLESS)
        self.up, self.needs_probe, self.why_not = True, False, ""
        self.misses = self.failures = 0
        self.resting_until = 0.0
        self.model, self.engine, self.models = model, engine, frozenset((model, *models))
        self.worker_names = (
            frozenset(worker.name for worker in engine.workers) if engine else frozenset()
        )
        self.kind, self.kin = "plain", ""
        if engine:
            self.kind = "disagg"
            self.kin = repr(("disagg", sorted(engine.layout.items())))  # a text knows its hash
        elif nixl:  # its engines compare themselves when they first meet
            self.kind, self.kin = "nixl", repr(("nixl", model))
            return
        if engine is None:
            self.why_not = (
                "serves no KV transfers: either it runs without a connector, or with another fleet"
                " key or version than this proxy"
            )
        elif engine.role not in (self.role, "both"):
            self.why_not = f"is given as --{self.role}, but its connector's role is {engine.role}"
        elif engine.rank != self.rank:
            self.why_not = (
                f"is no data parallel rank: give it as {split_rank(self.url)[0]}"
                if engine.rank is None
                else f"has several data parallel ranks: give each as an instance, {self.url}@0 and so on"
            )

    def tells_clock(self, clock: float, now: float) -> None:
        """Its engine's, in an answer that has just come."""
        self.ahead, self.told = clock - now, now

    def clock_after(self, seconds: float, now: float) -> float:
        """What its engine's clock will be; a little less, since answers take time."""
        return max(0.0, now + self.ahead + seconds)

    def down(self, why: str) -> None:
        self.up, self.needs_probe, self.why_not = False, True, why

    def missed(self, why: str) -> None:
        """A health check failed."""
        self.misses += 1
        if self.up and self.misses >= MAX_FAILED_PROBES:
            self.down(why)

    def leg_failed(
        self, reason: str, now: float, began: float | None = None, ended: float | None = None
    ) -> None:
        """A leg of a request, sent at `began` and over at `ended` (by default just now), failed in
        a way that is the instance's fault.
        """
        if reason == "refused":
            self.down("refuses connections")
        elif reason == "died":
            self.down("its engine died")
        elif reason == "reset":
            self.needs_probe = True  # perhaps it was restarted
        if began is None or began >= self.judged:
            self.failures += 1
            self.judged = now if ended is None else ended
            self._rest(now)

    def leg_succeeded(self, now: float) -> None:
        self.failures = 0
        self.judged = now
        self.resting_until = 0.0

    def chosen(self, now: float) -> None:
        """It gets a request.  If it comes from a rest, then only this one: the next rest begins."""
        if now >= self.resting_until:
            self._rest(now)

    def _rest(self, now: float) -> None:
        if self.failures > 1:
            self.resting_until = now + min(2.0 ** (self.failures - 2), MAX_BACKOFF_SECONDS)

    @property
    def busy(self) -> int:
        """Requests and legs at work."""
        return self.in_flight + self.legs

    @property
    def transfers(self) -> bool:
        """Whether it can take part in disaggregation in its role, once up."""
        return self.kind == "nixl" or (
            self.engine is not None
            and self.engine.role in (self.role, "both")
            and self.engine.rank == self.rank
        )

    @property
    def two_way(self) -> bool:
        return self.engine is not None and self.engine.two_way

    def enter(self, size: int) -> None:
        """A request of so many bytes comes to a decode instance."""
        self.in_flight += 1
        self.context += size

    def leave(self, size: int) -> None:
        self.in_flight -= 1
        self.context -= size

    def usable(self, now: float) -> bool:
        return self.up and now >= self.resting_until

    def can_prefill(self, now: float) -> bool:
        return self.role == "prefill" and self.transfers and self.usable(now)


def is_one_engine(a: Instance, b: Instance) -> bool:
    """Whether two instances are one engine, as under two names of its address. It cannot read its
    own KV: both legs of a request would wait in one scheduler, and share their workers' tables.
    """
    if not a.engine or not b.engine:
        return False
    return a.engine.incarnation == b.engine.incarnation or not a.worker_names.isdisjoint(
        b.worker_names
    )


def mismatch(prefill: Instance, decode: Instance) -> str:
    """What keeps these two from working as a pair, in words; empty when nothing does."""
    if is_one_engine(prefill, decode):
        return "they are one engine, and no engine is paired with itself"
    if prefill.kin and prefill.kin == decode.kin:
        return ""
    if prefill.kind != decode.kind and "plain" not in (prefill.kind, decode.kind):
        return "they have different connectors"
    if prefill.kind == "nixl":
        return f"one serves {prefill.model} and the other {decode.model}"
    if not prefill.engine or not decode.engine:
        return "one of them serves no KV transfers"
    return difference(prefill.engine.layout, decode.engine.layout)


@dataclass(slots=True)
class Fleet:
    """All instances."""

    instances: list[Instance] = field(default_factory=list)
    turns: int = 0  # how many choices were made
    leaving: list[Instance] = field(
        default_factory=list
    )  # chosen no more, until their requests have ended

    def of(self, role: Role) -> list[Instance]:
        return [instance for instance in self.instances if instance.role == role]

    def unpaired(self, instance: Instance) -> str:
        """Why an instance fits none of the other role, of those that are up; empty while one does
        or there are none.
        """
        if not (instance.up and instance.transfers):
            return ""
        words = ""
        for other in self.instances:
            if other.role != instance.role and other.up and other.transfers:
                prefill, decode = (
                    (instance, other) if instance.role == "prefill" else (other, instance)
                )
                if not (why := mismatch(prefill, decode)):
                    return ""
                words = words or f"{prefill.url} and {decode.url} do not fit: {why}"
        return words

    def misfit(self) -> str:
        """Why no two instances can ever work together, once all of them answer; empty while that
        may still change.
        """
        prefills, decodes = self.of("prefill"), self.of("decode")
        if not prefills or not all(i.up for i in self.instances):
            return ""
        if any(
            p.transfers and d.transfers and not mismatch(p, d) for p in prefills for d in decodes
        ):
            return ""
        for instance in self.instances:
            if not instance.transfers:
                return f"{instance.url} {instance.why_not}"
        return f"{prefills[0].url} and {decodes[0].url} do not fit: {mismatch(prefills[0], decodes[0])}"

    def readiness(self, now: float) -> tuple[bool, dict[str, object]]:
        """Whether requests are served as configured, with counts and, if not, the reason."""
        decodes = [d for d in self.of("decode") if d.up]
        prefills = [
            p
            for p in self.of("prefill")
            if p.can_prefill(now) and any(d.transfers and not mismatch(p, d) for d in decodes)
        ]
        facts: dict[str, object] = {"prefill": len(prefills), "decode": len(decodes)}
        ready = bool(decodes) and (bool(prefills) or not self.of("prefill"))
        if not ready:
            role = "prefill" if decodes else "decode"
            facts["reason"] = f"no {role} instance can be used"
            facts["instances"] = {i.url: i.why_not for i in self.instances if i.why_not}
        return ready, facts
