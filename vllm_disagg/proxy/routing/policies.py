"""Who is the best of several instances for a request. Pure: the only chance is a generator that is
handed in.

Loads are counted in bytes of prompts, which are proportional to tokens and known without a
tokenizer:

    at P   the prompts in prefill legs at work
    at D   the prompts of running requests, and `REQUEST` for each of them: a decode step costs by context and by batch;
           a D whose KV cache is nearly full comes after all others, since it would preempt

* `prefix_aware` adds to its load the part of the prompt that an instance has not seen.  The sum is
  the work until this
  request is done there, so a cached prefix attracts exactly as far as it saves more than the queue
  in front of it
  costs: nothing to tune, and no hot spot.  The default, since without shared prefixes it *is*
  least_loaded.
* `least_loaded`: the load alone.
* `power_of_two`: the less loaded of two taken at random, for several proxies that do not know of
  each other.
* `round_robin`: in turn, for benchmarks and for equal requests.

A request with a session (`X-Session-ID`) goes where its session goes, by rendezvous hashing: no
memory, and when an instance leaves only its own sessions move. An instance that cannot be used, or
a D that is nearly full, is left aside.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import xxhash

from .fleet import Instance
from .prefixes import PrefixIndex, PromptPrefix

Name = Literal["prefix_aware", "least_loaded", "power_of_two", "round_robin"]
POLICY_NAMES: tuple[Name, ...] = get_args(Name)

REQUEST_COST_BYTES = (
    2048  # bytes: what a running request costs beside its context, about 500 tokens' worth
)
FULL_CACHE_RATIO = 0.9  # of the KV cache
MIN_REUSE_BYTES = (
    1024  # bytes of a prompt, about 250 tokens: what a D must have more of it than a P for P to ask
)
_NONE = PromptPrefix(b"")


@dataclass(slots=True)
class RoutingQuery:
    """What a choice needs to know of a request."""

    size: int  # bytes
    prefix: PromptPrefix = _NONE
    session: bytes = b""
    model: str = ""
    path: str = ""
    rank: bytes = b""  # of the data parallel ones, which the client names


@dataclass(slots=True)
class Policy:
    name: Name = "least_loaded"
    chance: random.Random = field(default_factory=random.Random)
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)

    def best(self, candidates: Sequence[Instance], ask: RoutingQuery) -> tuple[float, Instance]:
        """The best of some instances of one role, at least one, and its cost: bytes of work, or
        turns.
        """
        if ask.session:
            chosen = max(candidates, key=lambda i: (not _full(i), _weight(i, ask.session)))
            return _load(chosen), chosen
        if self.name == "round_robin":
            chosen = min(candidates, key=lambda i: i.turn)
            return chosen.turn, chosen
        if self.name == "power_of_two" and len(candidates) > 2:
            candidates = self.chance.sample(candidates, 2)
        seen = self.seen(candidates, ask)
        chosen = min(candidates, key=lambda i: (_full(i), _load(i) - seen.get(i.cache, 0), i.turn))
        return _load(chosen) + ask.size - seen.get(chosen.cache, 0), chosen

    def seen(self, candidates: Iterable[Instance], ask: RoutingQuery) -> dict[object, int]:
        """How many bytes of the prompt each cache has, as far as this policy knows."""
        if self.name != "prefix_aware":
            return {}
        return self.prefixes.longest(ask.prefix, {i.cache for i in candidates})

    def reads_back(self, prefill: Instance, decode: Instance, ask: RoutingQuery) -> bool:
        """Whether P should ask D for what it has of the prompt, most likely an earlier answer.
        Before they are `chose`n.
        """
        if self.name != "prefix_aware" or not (prefill.two_way and decode.two_way):
            return False
        seen = self.seen((prefill, decode), ask)
        here, there = seen.get(prefill.cache, 0), seen.get(decode.cache, 0)
        more = min(ask.size - here, self.prefixes.goes_on(ask.prefix, ask.size, decode.cache))
        return max(there - here, more) >= MIN_REUSE_BYTES

    def answered(self, ask: RoutingQuery, decode: Instance) -> None:
        """D has the prompt and the answer."""
        if self.name == "prefix_aware":
            self.prefixes.answered(ask.prefix, ask.size, decode.cache)

    def chose(self, ask: RoutingQuery, *instances: Instance) -> None:
        """These get the prompt."""
        if self.name == "prefix_aware":
            self.prefixes.saw(ask.prefix, *(i.cache for i in instances))


def _load(instance: Instance) -> int:
    if instance.role == "prefill":
        return instance.prompt_bytes
    return instance.context + REQUEST_COST_BYTES * instance.in_flight


def _full(instance: Instance) -> bool:
    return instance.role == "decode" and instance.kv_use > FULL_CACHE_RATIO


def _weight(instance: Instance, session: bytes) -> int:
    return int(xxhash.xxh3_64_intdigest(instance.url.encode() + b"\0" + session))
