"""Who serves a request: prefill and decode instance are chosen as one decision, because not every
two fit.

Instances fit when they are of one *kin* (`Instance.kin`: the same connector, and the same layout).
Per kin the policy names its best P and its best D with their costs; the pair of the least sum is
taken. So all pairs are considered, in the time of looking at every instance once. One engine, given
under two names, is no pair.

Pure: the fleet, the time and the policy's chance are passed in.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from .fleet import Fleet, Instance, is_one_engine
from .policies import Policy, RoutingQuery


@dataclass(slots=True, frozen=True, eq=False)
class InstancePair:
    """A place at a prefill instance for one request, and where it will be decoded."""

    prefill: Instance
    decode: Instance
    ask: RoutingQuery
    reads_back: bool = False  # whether P may read what D has of the prompt

    def take(self, fleet: Fleet, policy: Policy, now: float) -> None:
        chosen(fleet, policy, self.ask, now, self.prefill, self.decode)
        self.prefill.legs += 1
        self.prefill.prompt_bytes += self.ask.size
        self.decode.enter(self.ask.size)

    def release_prefill(self) -> None:
        self.prefill.legs -= 1
        self.prefill.prompt_bytes -= self.ask.size

    def release_decode(self) -> None:
        self.decode.leave(self.ask.size)


Choice = InstancePair | Literal["busy", "none"]


def choose(
    fleet: Fleet,
    policy: Policy,
    limit: int,
    ask: RoutingQuery,
    now: float,
    avoid: Collection[Instance] = (),
) -> Choice:
    """A pair for a prompt; "busy" when every fitting prefill instance has `limit` legs at work,
    "none" when no two instances fit.
    """
    known = _is_known(fleet, ask.model)
    kins: dict[
        str, tuple[list[Instance], list[Instance]]
    ] = {}  # prefill and decode instances that fit each other
    for i in fleet.instances:
        if i.up and i.transfers and (not known or ask.model in i.models) and i not in avoid:
            if ask.path in i.deaf:
                continue
            if i.role == "decode":
                kins.setdefault(i.kin, ([], []))[1].append(i)
            elif now >= i.resting_until:
                kins.setdefault(i.kin, ([], []))[0].append(i)
    found: list[tuple[float, Instance, Instance]] = []
    fit = False
    for prefills, decodes in kins.values():
        free = [p for p in prefills if p.legs < limit]
        awake = [d for d in decodes if now >= d.resting_until]
        if best := _best(policy, free, awake, ask) or _best(policy, free, decodes, ask):
            found.append(best)
        fit = fit or bool(best) or any(not is_one_engine(p, d) for p in prefills for d in decodes)
    if not fit:
        return "none"
    if not found:
        return "busy"
    _, prefill, decode = (
        found[0] if len(found) == 1 else min(found, key=lambda f: (f[0], f[1].turn))
    )
    return InstancePair(prefill, decode, ask, policy.reads_back(prefill, decode, ask))


def _best(
    policy: Policy, prefills: list[Instance], decodes: list[Instance], ask: RoutingQuery
) -> tuple[float, Instance, Instance] | None:
    """The best pair of some that fit, and its cost; None without two different engines."""
    if not prefills or not decodes:
        return None
    (p_cost, p), (d_cost, d) = policy.best(prefills, ask), policy.best(decodes, ask)
    if not is_one_engine(p, d):
        return p_cost + d_cost, p, d
    found: list[tuple[float, Instance, Instance]] = []
    if others := [other for other in decodes if not is_one_engine(p, other)]:
        cost, other = policy.best(others, ask)
        found.append((p_cost + cost, p, other))
    if others := [other for other in prefills if not is_one_engine(other, d)]:
        cost, other = policy.best(others, ask)
        found.append((cost + d_cost, other, d))
    return min(found, key=lambda f: f[0], default=None)


def choose_decode(
    fleet: Fleet,
    policy: Policy,
    now: float,
    avoid: Collection[Instance] = (),
    ask: RoutingQuery | None = None,
) -> Instance | None:
    """A decode instance that serves a request alone: of the rank that the client names, if there
    are such; one that rests only when there is no other.
    """
    ask = ask or RoutingQuery(0)
    up = _of_model(fleet, [d for d in fleet.of("decode") if d.up and d not in avoid], ask)
    if not up:
        return None
    up = [d for d in up if ask.rank and d.rank is not None and b"%d" % d.rank == ask.rank] or up
    return policy.best([d for d in up if d.usable(now)] or up, ask)[1]


def better_whole(fleet: Fleet, policy: Policy, ask: RoutingQuery, threshold: int) -> bool:
    """Whether so little of a prompt is unknown to some decode instance that a transfer is not worth
    its while.
    """
    if not threshold or ask.size < threshold:
        return threshold > 0
    decodes = [d for d in fleet.of("decode") if d.up]
    return ask.size - max(policy.seen(decodes, ask).values(), default=0) < threshold


def spill(fleet: Fleet, policy: Policy, now: float, ask: RoutingQuery) -> Instance | None:
    """Where a prompt goes that finds every prefill instance full: to a D that computes no other
    whole prompt.
    """
    idle = _of_model(fleet, [d for d in fleet.of("decode") if d.usable(now) and not d.whole], ask)
    return policy.best(idle, ask)[1] if idle else None


def _of_model(fleet: Fleet, instances: list[Instance], ask: RoutingQuery) -> list[Instance]:
    """Those that serve the model; all, if none in the fleet ever did: an engine has the right words
    for a wrong name.
    """
    return (
        [i for i in instances if ask.model in i.models]
        if _is_known(fleet, ask.model)
        else instances
    )


def _is_known(fleet: Fleet, model: str) -> bool:
    return any(model in i.models for i in fleet.instances)


def chosen(
    fleet: Fleet, policy: Policy, ask: RoutingQuery, now: float, *instances: Instance
) -> None:
    """Note who was chosen, so that equals take turns and prefixes find their way back."""
    fleet.turns += 1
    for instance in instances:
        instance.turn = fleet.turns
        instance.chosen(now)
    policy.chose(ask, *instances)
