"""Ranks instances for a request.  Pure: the random generator is handed in.

Load is counted in bytes of prompts, which are proportional to tokens and need no tokenizer:

    at P   the prompts in running prefill legs
    at D   the prompts of running requests, and REQUEST_COST_BYTES for each: the cost of a decode
           step grows with context and with batch size. A D whose KV cache is nearly full comes
           after all others, since it would preempt

* `prefix_aware` adds to the load the part of the prompt that the instance has not cached. The sum
  is the work until this request is done there. So a cached prefix attracts exactly as far as it
  saves more than the queue in front of it costs: nothing to tune, and no hot spot. The default,
  since without shared prefixes it equals `least_loaded`.
* `least_loaded`: the load alone.
* `power_of_two`: the less loaded of two random instances, for several proxies without shared state.
* `round_robin`: in turn, for benchmarks and for equal requests.

A request with a session (`X-Session-ID`) goes to the instance of its session, by rendezvous
hashing: no memory, and when an instance leaves only its own sessions move. An instance that cannot
be used, or a D that is nearly full, is passed over.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import xxhash

from ...fleet.conventions import (
    FULL_CACHE_RATIO,
    MIN_REUSE_BYTES,
    REQUEST_COST_BYTES,
    REUSE_POLICY,
    PolicyName,
)
from .fleet import Instance
from .prefixes import PrefixIndex, PromptPrefix

_NO_PREFIX = PromptPrefix(b"")

# By cache identity: how many bytes of a prompt are probably cached. Without zeros.
CachedBytes = Mapping[object, int]


class RoutingQuery(msgspec.Struct, eq=False):
    """The facts about a request that decide which instances serve it."""

    prompt_bytes: int
    prefix: PromptPrefix = _NO_PREFIX
    session: bytes = b""
    model: str = ""
    path: str = ""
    rank: bytes = b""  # the data parallel rank that the client names, in decimal


@dataclass(slots=True)
class Policy:
    """One of the policies above, with its random generator and its memory of prefixes."""

    name: PolicyName = "least_loaded"
    chance: random.Random = field(default_factory=random.Random)
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)

    def best(
        self, candidates: Sequence[Instance], query: RoutingQuery, cached: CachedBytes
    ) -> tuple[float, Instance]:
        """Returns (cost, instance) of the best of at least one candidate of one role.

        `cached`: the result of `cached_bytes`. The cost is in bytes of work; for `round_robin`, in
        turns.
        """
        if query.session:
            chosen = max(
                candidates, key=lambda i: (not _load(i)[0], _session_weight(i, query.session))
            )
            return _load(chosen)[1], chosen
        if self.name == "round_robin":
            chosen = min(candidates, key=lambda i: i.last_choice)
            return chosen.last_choice, chosen
        if self.name == "power_of_two" and len(candidates) > 2:
            candidates = self.chance.sample(candidates, 2)
        chosen = candidates[0]
        least = (True, math.inf, 0)
        for i in candidates:
            missing = query.prompt_bytes - cached.get(i.cache_identity, 0)
            is_cache_full, load_bytes = _load(i)
            rank = (is_cache_full, load_bytes + missing, i.last_choice)
            if rank < least:
                least = rank
                chosen = i
        return least[1], chosen

    def cached_bytes(self, candidates: Iterable[Instance], query: RoutingQuery) -> CachedBytes:
        """Returns how many bytes of the prompt each candidate has probably cached."""
        if self.name != "prefix_aware":
            return {}
        return self.prefixes.longest_prefixes(query.prefix, {i.cache_identity for i in candidates})

    def is_reuse_worthwhile(
        self, prefill: Instance, decode: Instance, query: RoutingQuery, cached: CachedBytes
    ) -> bool:
        """Whether P should read the KV that D holds of the prompt, most likely an earlier answer.

        `cached`: the result of `cached_bytes`, before `record_choice`.
        """
        if self.name != REUSE_POLICY or not (prefill.bidirectional and decode.bidirectional):
            return False
        at_prefill = cached.get(prefill.cache_identity, 0)
        at_decode = cached.get(decode.cache_identity, 0)
        # D also has the answer to the prompt's beginning, of unknown length.
        beyond_answered = self.prefixes.bytes_after_answer(
            query.prefix, query.prompt_bytes, decode.cache_identity
        )
        possible_answer = min(query.prompt_bytes - at_prefill, beyond_answered)
        return max(at_decode - at_prefill, possible_answer) >= MIN_REUSE_BYTES

    def record_answer(self, query: RoutingQuery, decode: Instance) -> None:
        """Notes that D has the KV of the prompt and of its answer."""
        if self.name == "prefix_aware":
            self.prefixes.record_answer(query.prefix, query.prompt_bytes, decode.cache_identity)

    def record_choice(self, query: RoutingQuery, *instances: Instance) -> None:
        """Notes that these instances get the prompt."""
        if self.name == "prefix_aware":
            self.prefixes.record_prompt(query.prefix, [i.cache_identity for i in instances])


def _load(instance: Instance) -> tuple[bool, int]:
    """Returns whether a D's KV cache is nearly full, and the instance's load in bytes."""
    if instance.role == "prefill":
        return False, instance.prompt_bytes
    load_bytes = instance.context_bytes + REQUEST_COST_BYTES * instance.in_flight
    return instance.kv_cache_usage > FULL_CACHE_RATIO, load_bytes


def _session_weight(instance: Instance, session: bytes) -> int:
    """Returns the weight of rendezvous hashing."""
    return int(xxhash.xxh3_64_intdigest(instance.url.encode() + b"\0" + session))
