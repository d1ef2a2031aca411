"""Endings: what a sender remembers of transfers that have ended.  Pure.

    confirmed      the last MAX_ENDINGS transfers, revoked ones too, with the sums that their
                   receivers got: a repeated ReadComplete has the answer of the first one
    undelivered    the names of the last MAX_UNDELIVERED transfers that ended before all receivers
                   had them: a late receiver is refused at once

One memory alone would not do: an entry with sums is large, and delivered transfers would displace
the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

MAX_ENDINGS = 4096
# Names of undelivered endings; some 200 bytes each, 13 MB in all.  A receiver may ask minutes
# later, when its engine's queue lets it.  The default patience of 120 s and its margin of 60 s are
# covered up to 364 undelivered endings a second, ten minutes up to 109.
MAX_UNDELIVERED = 65536


class Endings:
    """The last endings of one sender."""

    def __init__(self) -> None:
        # By transfer, the receivers that had sent ReadComplete by then, with the sums of their
        # Confirm.
        self.confirmed: dict[str, Mapping[str, list[int]]] = {}
        # Ordered: of a plain dict, the first entry of so many takes 0.2 ms to find.
        self.undelivered: OrderedDict[str, None] = OrderedDict()

    def add(self, transfer: str, complete: Mapping[str, list[int]], *, delivered: bool) -> None:
        """Remembers that a transfer has ended.

        `complete`: sums of the Confirm, by receiver that had all bytes.  `delivered`: all had.
        """
        self.confirmed[transfer] = complete
        # Insertion order is the order of endings: the oldest one is forgotten first.  Its
        # ReadComplete is then answered as not valid, and the receiver recomputes.
        while len(self.confirmed) > MAX_ENDINGS:
            oldest = next(iter(self.confirmed))
            del self.confirmed[oldest]
        # A receiver of a forgotten one would wait in WANTED until its load stalls.
        if not delivered:
            self.undelivered[transfer] = None
        while len(self.undelivered) > MAX_UNDELIVERED:
            self.undelivered.popitem(last=False)

    def __contains__(self, transfer: str) -> bool:
        """Whether the ending of a transfer is remembered."""
        return transfer in self.confirmed or transfer in self.undelivered

    def confirmed_receivers(self, transfer: str) -> Mapping[str, list[int]]:
        """Returns the sums of the Confirm by receiver that had all bytes; empty if forgotten."""
        return self.confirmed.get(transfer, {})
