"""Who serves a request: prefill and decode instance are chosen as one decision, because not every two fit.

Pure: the fleet and the time are passed in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from .fleet import Fleet, Instance, mismatch


@dataclass(slots=True, frozen=True, eq=False)
class Pair:
    """A place at a prefill instance for one request, and where it will be decoded."""

    prefill: Instance
    decode: Instance
    size: int

    def take(self, now: float) -> None:
        for instance in (self.prefill, self.decode):
            instance.chosen(now)
        _turn(self.prefill, self.decode)
        self.prefill.legs += 1
        self.prefill.prompt_bytes += self.size
        self.decode.in_flight += 1

    def release_prefill(self) -> None:
        self.prefill.legs -= 1
        self.prefill.prompt_bytes -= self.size


Choice = Pair | Literal["busy", "none"]


def choose(fleet: Fleet, limit: int, size: int, now: float, avoid: Collection[Instance] = ()) -> Choice:
    """A pair for a prompt of `size` bytes; "busy" when every fitting prefill instance has `limit` legs at work,
    "none" when no two instances fit."""
    decodes = [d for d in fleet.of("decode") if d.transfers and d.up and d not in avoid]
    decodes = [d for d in decodes if d.usable(now)] or decodes
    prefills = [p for p in fleet.of("prefill") if p.can_prefill(now) and p not in avoid]
    fits = {p: [d for d in decodes if not mismatch(p, d)] for p in prefills}
    fits = {p: ds for p, ds in fits.items() if ds}
    if not fits:
        return "none"
    free = [p for p in fits if p.legs < limit]
    if not free:
        return "busy"
    prefill = min(free, key=lambda p: (p.prompt_bytes, p.turn))
    return Pair(prefill, _least_busy(fits[prefill]), size)


def choose_decode(fleet: Fleet, now: float, tried: Collection[Instance] = ()) -> Instance | None:
    """A decode instance that serves a request alone; one that rests only when there is no other."""
    up = [d for d in fleet.of("decode") if d.up and d not in tried]
    usable = [d for d in up if d.usable(now)] or up
    if not usable:
        return None
    chosen = _least_busy(usable)
    chosen.chosen(now)
    _turn(chosen)
    return chosen


def _least_busy(instances: Iterable[Instance]) -> Instance:
    return min(instances, key=lambda d: (d.in_flight, d.turn))


_turns = 0


def _turn(*instances: Instance) -> None:
    """Note who was chosen, so that equals take turns."""
    global _turns  # noqa: PLW0603
    _turns += 1
    for instance in instances:
        instance.turn = _turns
