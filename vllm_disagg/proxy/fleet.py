"""The instances as the proxy knows them.  Pure state: no clock, no sockets.

An instance is `up` when it answers; `engine` says what its connector told a probe, None for a vLLM without one.
What fails now and then (answers 500, cuts connections) while up is left alone for a while that doubles.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ..grants import Engine, difference

Role = Literal["prefill", "decode"]

MISSES = 2  # failed health checks until an instance counts as down
MAX_PENANCE = 30.0  # seconds


@dataclass(slots=True, eq=False)
class Instance:
    """One vLLM server."""

    url: str
    role: Role
    model: str = ""
    engine: Engine | None = None
    up: bool = False
    why_not: str = "not probed yet"  # for people: what keeps it from being used, or from being used in full
    needs_probe: bool = True
    misses: int = 0
    failures: int = 0  # of legs, in a row
    resting_until: float = 0.0
    in_flight: int = 0
    legs: int = 0  # prefill legs at work
    prompt_bytes: int = 0  # in those legs
    turn: int = 0  # when it was chosen last

    def probed(self, model: str, engine: Engine | None) -> None:
        """It answered a probe."""
        self.up, self.needs_probe, self.why_not = True, False, ""
        self.misses = self.failures = 0
        self.resting_until = 0.0
        self.model, self.engine = model, engine
        if engine is None:
            self.why_not = (
                "serves no KV transfers: either it runs without this connector, "
                "or with another fleet key than this proxy"
            )
        elif engine.role not in (self.role, "both"):
            self.why_not = f"is given as --{self.role}, but its connector's role is {engine.role}"

    def down(self, why: str) -> None:
        self.up, self.needs_probe, self.why_not = False, True, why

    def missed(self, why: str) -> None:
        """A health check failed."""
        self.misses += 1
        if self.misses >= MISSES:
            self.down(why)

    def leg_failed(self, reason: str, now: float) -> None:
        """A leg of a request failed in a way that is the instance's fault."""
        self.failures += 1
        if reason == "refused":
            self.down("refuses connections")
        elif reason == "reset":
            self.needs_probe = True  # perhaps it was restarted
        if self.failures > 1:
            self.resting_until = now + min(2.0 ** (self.failures - 2), MAX_PENANCE)

    def leg_succeeded(self) -> None:
        self.failures = 0

    @property
    def busy(self) -> int:
        """Requests and legs at work."""
        return self.in_flight + self.legs

    @property
    def transfers(self) -> bool:
        """Whether it can take part in disaggregation in its role, once up."""
        return self.engine is not None and self.engine.role in (self.role, "both")

    def usable(self, now: float) -> bool:
        return self.up and now >= self.resting_until

    def can_prefill(self, now: float) -> bool:
        return self.role == "prefill" and self.transfers and self.usable(now)


def mismatch(prefill: Instance, decode: Instance) -> str:
    """What keeps these two from working as a pair, in words; empty when nothing does."""
    if not prefill.engine or not decode.engine:
        return "one of them serves no KV transfers"
    ours, theirs = len(prefill.engine.workers), len(decode.engine.workers)
    if ours != theirs:
        return f"one side has {ours} workers and the other {theirs}"
    if prefill.engine.layout == decode.engine.layout:  # asked for every pair and request
        return ""
    return difference(prefill.engine.layout, decode.engine.layout)


@dataclass(slots=True)
class Fleet:
    """All instances."""

    instances: list[Instance] = field(default_factory=list)
    leaving: list[Instance] = field(default_factory=list)  # chosen no more, until their requests have ended

    def of(self, role: Role) -> list[Instance]:
        return [instance for instance in self.instances if instance.role == role]

    def misfit(self) -> str:
        """Why no two instances can ever work together, once all of them answer; empty while that may still change."""
        prefills, decodes = self.of("prefill"), self.of("decode")
        if not prefills or not all(i.up for i in self.instances):
            return ""
        if any(p.transfers and d.transfers and not mismatch(p, d) for p in prefills for d in decodes):
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
