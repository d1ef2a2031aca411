"""Chooses replicas as the policies of the proxy choose instances."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from random import Random

from ...fleet.conventions import FULL_CACHE_RATIO, PolicyName
from .replica import Replica

_load = attrgetter("load", "last_choice")  # of equal loads the one whose turn it is
_last_choice = attrgetter("last_choice")


class ReplicaChooser:
    """Chooses replicas by one policy."""

    def __init__(
        self, policy: PolicyName, prefixes: Sequence[Sequence[int]] | None, seed: int
    ) -> None:
        """`prefixes`: the blocks of each request's prompt. `seed`: of power_of_two's choices."""
        self._policy = policy
        self._prefixes = prefixes
        self._random = Random(seed)
        self._choices = 0  # so far

    def count(self, replica: Replica) -> None:
        """Notes a choice, so that replicas take turns."""
        self._choices += 1
        replica.last_choice = self._choices

    def choose_prefill(self, replicas: list[Replica], r: int, limit: int) -> Replica:
        """Chooses a prefill replica with fewer than `limit` legs for a request; one has."""
        if self._policy != "power_of_two":
            # The least of all is the least of those with a free place, if it is one of them.
            chosen = self._choose(replicas, r)
            if chosen.active_legs < limit:
                return chosen
        return self._choose([p for p in replicas if p.active_legs < limit], r)

    def choose_decode(
        self, now: float, replicas: list[Replica], prefixes_of: int | None = None
    ) -> Replica:
        """Chooses a decode or colocated replica by the policy of the proxy, nearly full ones last.

        The policy prefix_aware subtracts what a replica has cached of request `prefixes_of`.
        """
        if len(replicas) == 1 or self._policy == "round_robin":
            return self._choose(replicas, prefixes_of)
        replicas = self._candidates(replicas)
        chosen = self._least_loaded(replicas, prefixes_of)
        if not _is_nearly_full(chosen, now):
            return chosen
        others = [replica for replica in replicas if not _is_nearly_full(replica, now)]
        return self._least_loaded(others, prefixes_of) if others else chosen

    def _choose(self, replicas: list[Replica], prefixes_of: int | None) -> Replica:
        """Chooses a replica by the policy of the proxy."""
        if len(replicas) == 1:
            return replicas[0]
        if self._policy == "round_robin":
            return min(replicas, key=_last_choice)
        return self._least_loaded(self._candidates(replicas), prefixes_of)

    def _candidates(self, replicas: list[Replica]) -> list[Replica]:
        """Returns two random replicas under the policy power_of_two, else all."""
        if self._policy == "power_of_two" and len(replicas) > 2:
            return self._random.sample(replicas, 2)
        return replicas

    def _least_loaded(self, replicas: list[Replica], prefixes_of: int | None) -> Replica:
        """Returns the replica with the least load, less what its cache has of a request."""
        prefixes = self._prefixes
        if not prefixes or prefixes_of is None or self._policy != "prefix_aware":
            return min(replicas, key=_load)
        ids = prefixes[prefixes_of]

        def rank(replica: Replica) -> tuple[int, int]:
            return replica.load - replica.cached_tokens(ids), replica.last_choice

        return min(replicas, key=rank)


def _is_nearly_full(decode: Replica, now: float) -> bool:
    """Returns whether a decode replica would soon preempt."""
    return decode.held_tokens(now) > FULL_CACHE_RATIO * decode.kv
