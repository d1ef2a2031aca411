"""Compares the instances of a fleet at one moment: which can be paired, and why others cannot.

A fleet of 500 and 500 has 250,000 pairs, and is compared twice a second. So its instances are
grouped by their compatibility keys, and two layouts are compared once for each pair of keys. Pure.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from .fleet import (
    OTHER_RELEASE,
    TRANSFERS_OFF,
    Fleet,
    Instance,
    Role,
    in_order,
    is_one_engine,
    kind,
    mismatch,
)

_OTHER_ROLE: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}


@dataclass(frozen=True, slots=True)
class FleetMismatch:
    """Why no prefill and decode instance of a fleet can be paired."""

    reason: str  # for people
    may_pass: bool  # a roll-out that goes on, or a restart, may end it; else the operator must


class PairingTable:
    """The instances of a fleet that are up, by role and compatibility key."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        # The key is "" for instances without KV transfers.
        self._groups: dict[Role, defaultdict[str, list[Instance]]] = {
            "prefill": defaultdict(list),
            "decode": defaultdict(list),
        }
        for instance in fleet.instances:
            if instance.up:
                self._groups[instance.role][_key(instance)].append(instance)
        self._engine_names = {role: self._names(role) for role in self._groups}
        self._mismatches: dict[tuple[object, object], str] = {}  # by the kinds of P and D

    def fitting(self, instance: Instance) -> list[Instance]:
        """Returns the instances of the other role with which one that is up can be paired."""
        role = _OTHER_ROLE[instance.role]
        key = _key(instance)
        group = self._groups[role].get(key, []) if key else []
        if instance.engine_names.isdisjoint(self._engine_names[role]):
            return group
        return [other for other in group if not is_one_engine(instance, other)]

    def misfits(self, instance: Instance) -> Iterator[tuple[Instance, str]]:
        """Yields the instances with which one that is up cannot be paired, each with the reason."""
        role = _OTHER_ROLE[instance.role]
        own_key = _key(instance)
        for key, group in self._groups[role].items():
            fits = bool(key) and key == own_key
            if fits and instance.engine_names.isdisjoint(self._engine_names[role]):
                continue
            for other in group:
                if not fits or is_one_engine(instance, other):
                    yield other, self.misfit(*in_order(instance, other))

    def misfit_examples(self) -> Iterator[tuple[Instance, Instance]]:
        """Yields a prefill and a decode instance for each pair of keys that do not fit."""
        pairs = product(self._groups["prefill"].items(), self._groups["decode"].items())
        for (key, prefills), (other_key, decodes) in pairs:
            if not key or key != other_key:
                yield prefills[0], decodes[0]

    def misfit(self, prefill: Instance, decode: Instance) -> str:
        """Returns why no request is split between two instances; "" if one can be."""
        for instance in (prefill, decode):
            if not instance.can_transfer:
                return f"{instance.url} {instance.unavailable_reason}"
        if is_one_engine(prefill, decode):
            return mismatch(prefill, decode)
        kinds = kind(prefill), kind(decode)
        if kinds not in self._mismatches:
            self._mismatches[kinds] = mismatch(prefill, decode)
        return self._mismatches[kinds]

    def problem(self, instance: Instance) -> str:
        """Returns why an instance fits no instance of the other role that is up.

        "" if one fits, or if none is up.
        """
        if not (instance.up and instance.can_transfer) or self.fitting(instance):
            return ""
        for key, group in self._groups[_OTHER_ROLE[instance.role]].items():
            if key:
                return self._words_of(*in_order(instance, group[0]))
        return ""

    def working_pairs(self) -> int:
        """Returns how many pairs of instances can work: both are up, and they fit."""
        prefills = self._groups["prefill"].values()
        return sum(len(self.fitting(prefill)) for group in prefills for prefill in group)

    def permanent_mismatch(self) -> FleetMismatch | None:
        """Returns why no two instances can be paired, although all of them answer.

        None while that is not known.
        """
        instances = self.fleet.instances
        prefills = self.fleet.with_role("prefill")
        decodes = self.fleet.with_role("decode")
        if not (prefills and decodes) or not all(i.up for i in instances):
            return None
        if any(self.fitting(prefill) for prefill in prefills):
            return None
        prefills = [p for p in prefills if p.can_transfer]
        decodes = [d for d in decodes if d.can_transfer]
        # Versions, flags or weights of two engines, which change one engine after the other.
        for prefill, decode in product(prefills, decodes):
            if not is_one_engine(prefill, decode):
                return FleetMismatch(self._words_of(prefill, decode), may_pass=True)
        reasons = [f"{i.url} {i.unavailable_reason}" for i in instances if not i.can_transfer]
        if reasons:
            passing = (OTHER_RELEASE, TRANSFERS_OFF)
            return FleetMismatch(reasons[0], any(words in r for r in reasons for words in passing))
        return FleetMismatch(self._words_of(prefills[0], decodes[0]), may_pass=False)

    def _words_of(self, prefill: Instance, decode: Instance) -> str:
        return f"{prefill.url} and {decode.url} do not fit: {self.misfit(prefill, decode)}"

    def _names(self, role: Role) -> frozenset[str]:
        groups = self._groups[role].values()
        return frozenset().union(*(i.engine_names for group in groups for i in group))


def _key(instance: Instance) -> str:
    return instance.compatibility_key if instance.can_transfer else ""
