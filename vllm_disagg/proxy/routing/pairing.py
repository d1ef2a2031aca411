"""Chooses prefill and decode instance in one decision, because not every two fit.

Two instances fit when their `Instance.compatibility_key` is equal: the same connector, and layouts
that can be transferred. For each key the policy names the best prefill and the best decode instance
with their costs, and the pair with the least sum is taken. So all pairs are considered while every
instance is looked at once. One engine that is given under two names is no pair.

Pure: the fleet, the time and the policy's random generator are passed in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Literal

import msgspec

from .fleet import Fleet, Instance, is_one_engine
from .policies import CachedBytes, Policy, RoutingQuery
from .prefill_backlog import uncached_bytes


class InstancePair(msgspec.Struct, frozen=True, eq=False):
    """A place at a prefill instance for one request, and the decode instance that continues it."""

    prefill: Instance
    decode: Instance
    query: RoutingQuery
    bidirectional_reuse: bool = False  # P may read the KV that D holds of the prompt
    uncached_bytes: int = 0  # of the prompt at P

    def take(self, fleet: Fleet, policy: Policy, now: float) -> None:
        """Counts the request at both instances."""
        record_choice(fleet, policy, self.query, now, self.prefill, self.decode)
        self.prefill.prefill_legs += 1
        self.prefill.prompt_bytes += self.query.prompt_bytes
        self.decode.add_request(self.query.prompt_bytes)

    def release_prefill(self) -> None:
        """Gives back the place at the prefill instance."""
        self.prefill.prefill_legs -= 1
        self.prefill.prompt_bytes -= self.query.prompt_bytes

    def release_decode(self) -> None:
        """Gives back the place at the decode instance."""
        self.decode.remove_request(self.query.prompt_bytes)


Choice = InstancePair | Literal["busy", "none"]


def choose(
    fleet: Fleet,
    policy: Policy,
    limit: int,
    query: RoutingQuery,
    now: float,
    avoid: Collection[Instance] = (),
) -> Choice:
    """Returns the best pair for a prompt, without the instances in `avoid`.

    "busy": every fitting prefill instance has `limit` running legs. "none": no two instances fit.
    """
    cached = policy.cached_bytes(fleet.instances, query)
    best: tuple[float, Instance, Instance] | None = None
    any_pair = False
    prefills_by_key, decodes_by_key = _serving_by_key(fleet, query, now, avoid)
    for key, prefills in prefills_by_key.items():
        decodes = decodes_by_key[key]
        free = [p for p in prefills if p.prefill_legs < limit]
        closed = [d for d in decodes if now >= d.open_until]
        found = _best_pair(policy, free, closed, query, cached)
        if not found:
            # A decode instance whose circuit breaker is open serves only if no other can.
            found = _best_pair(policy, free, decodes, query, cached)
        if found:
            if not best or _turn(found) < _turn(best):
                best = found
        elif any(not is_one_engine(p, d) for p in prefills for d in decodes):
            any_pair = True
    if not best:
        return "busy" if any_pair else "none"
    _, prefill, decode = best
    reuse = policy.is_reuse_worthwhile(prefill, decode, query, cached)
    uncached = uncached_bytes(query.prompt_bytes, cached.get(prefill.cache_identity, 0))
    return InstancePair(prefill, decode, query, reuse, uncached)


def _turn(found: tuple[float, Instance, Instance]) -> tuple[float, int]:
    """Returns the order of (cost, P, D): the least cost first, then P chosen longest ago."""
    return found[0], found[1].last_choice


def _serving_by_key(
    fleet: Fleet, query: RoutingQuery, now: float, avoid: Collection[Instance]
) -> tuple[defaultdict[str, list[Instance]], defaultdict[str, list[Instance]]]:
    """Returns the prefill and the decode instances that serve the query, by compatibility key."""
    known = fleet.knows_model(query.model)
    prefills: defaultdict[str, list[Instance]] = defaultdict(list)
    decodes: defaultdict[str, list[Instance]] = defaultdict(list)
    for i in fleet.instances:
        if not (i.up and i.can_transfer) or i in avoid:
            continue
        if known and query.model not in i.models:
            continue
        if query.path in i.unsupported_paths:
            continue
        if i.role == "decode":
            decodes[i.compatibility_key].append(i)
        elif now >= i.open_until:
            prefills[i.compatibility_key].append(i)
    return prefills, decodes


def _best_pair(
    policy: Policy,
    prefills: list[Instance],
    decodes: list[Instance],
    query: RoutingQuery,
    cached: CachedBytes,
) -> tuple[float, Instance, Instance] | None:
    """Returns (cost, P, D) of the best pair of instances that fit; None if all are one engine."""
    if not prefills or not decodes:
        return None
    p_cost, p = policy.best(prefills, query, cached)
    d_cost, d = policy.best(decodes, query, cached)
    if not is_one_engine(p, d):
        return p_cost + d_cost, p, d
    # The best two are one engine: keep one of them, and take the second best of the other role.
    found: list[tuple[float, Instance, Instance]] = []
    if other_decodes := [other for other in decodes if not is_one_engine(p, other)]:
        cost, other = policy.best(other_decodes, query, cached)
        found.append((p_cost + cost, p, other))
    if other_prefills := [other for other in prefills if not is_one_engine(other, d)]:
        cost, other = policy.best(other_prefills, query, cached)
        found.append((cost + d_cost, other, d))
    return min(found, key=lambda f: f[0], default=None)


def choose_decode(
    fleet: Fleet,
    policy: Policy,
    now: float,
    avoid: Collection[Instance] = (),
    query: RoutingQuery | None = None,
) -> Instance | None:
    """Returns a decode instance that serves a request alone; None if none is up.

    Prefers the data parallel rank that the client names, if there is one. An instance whose circuit
    breaker is open is taken only if there is no other.
    """
    query = query or RoutingQuery(0)
    candidates = decodes_for(fleet, query, avoid)
    if not candidates:
        return None
    candidates = [d for d in candidates if _is_named_rank(d, query)] or candidates
    usable = [d for d in candidates if d.is_usable(now)]
    return policy.best(usable or candidates, query, policy.cached_bytes(candidates, query))[1]


def decodes_for(
    fleet: Fleet, query: RoutingQuery, avoid: Collection[Instance] = ()
) -> list[Instance]:
    """Returns the decode instances that are up and serve the query's model, not those in `avoid`.

    If the whole fleet lacks the model, all that are up.
    """
    up = [d for d in fleet.with_role("decode") if d.up and d not in avoid]
    return _serving_model(fleet, up, query)


def _is_named_rank(instance: Instance, query: RoutingQuery) -> bool:
    if not query.rank or instance.rank is None:
        return False
    return b"%d" % instance.rank == query.rank


def prefers_aggregated(fleet: Fleet, policy: Policy, query: RoutingQuery, min_bytes: int) -> bool:
    """Whether a decode instance lacks so little of a prompt that a transfer does not pay.

    `min_bytes`: the smallest missing part that is disaggregated; 0: always disaggregate.
    """
    if not min_bytes:
        return False
    if query.prompt_bytes < min_bytes:
        return True
    decodes = [d for d in fleet.with_role("decode") if d.up]
    cached = max(policy.cached_bytes(decodes, query).values(), default=0)
    return query.prompt_bytes - cached < min_bytes


def choose_spill(fleet: Fleet, policy: Policy, now: float, query: RoutingQuery) -> Instance | None:
    """Returns a decode instance for a prompt when every prefill instance is full.

    Takes only one that computes no other whole prompt; None if there is none.
    """
    idle = [d for d in fleet.with_role("decode") if d.is_usable(now) and not d.aggregated_requests]
    idle = _serving_model(fleet, idle, query)
    if not idle:
        return None
    return policy.best(idle, query, policy.cached_bytes(idle, query))[1]


def _serving_model(fleet: Fleet, instances: list[Instance], query: RoutingQuery) -> list[Instance]:
    """Returns the instances that serve the query's model; all, if the whole fleet lacks the model.

    In that case an engine's own error answer is the right one for the client.
    """
    if not fleet.knows_model(query.model):
        return instances
    return [i for i in instances if query.model in i.models]


def record_choice(
    fleet: Fleet,
    policy: Policy,
    query: RoutingQuery,
    now: float,
    *instances: Instance,
    is_trial: bool = True,
) -> None:
    """Notes a choice, so that equal instances take turns and prefixes are found again.

    `is_trial`: the answer will show whether the engines work.
    """
    fleet.choices += 1
    for instance in instances:
        instance.last_choice = fleet.choices
        if is_trial:
            instance.on_chosen(now)
    policy.record_choice(query, *instances)
