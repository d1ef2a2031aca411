"""Lease: how long a sender waits for a receiver that is silent.  Pure.

    renew      with each message
    shorten    when a connection of the receiver is lost.  A live receiver repeats its
               TransferRequest within the grace.  Blocks that a dead receiver would have read need
               not wait for the whole lease.
    prolong    when this process has slept

A lease serves liveness, never safety: its end takes no block from a running send.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Lease:
    """The lease of one receiver in one transfer.

    It runs out `seconds` after the last message, or `grace` seconds after a lost connection.
    """

    seconds: float
    grace: float
    last_seen: float

    def renew(self, now: float) -> None:
        """Begins the lease anew: the receiver lives, and has a connection."""
        self.last_seen = now

    def shorten(self, now: float) -> None:
        """Leaves the grace of a lost connection at most."""
        # Set back instead of ended: the receiver may live and go on by another transport.
        # The minimum, because a loss must never prolong the lease of a silent receiver.
        self.last_seen = min(self.last_seen, now + self.grace - self.seconds)

    def prolong(self, seconds: float) -> None:
        """Adds the time in which this process slept, so that the receiver only seemed silent."""
        self.last_seen += seconds

    @property
    def ends_at(self) -> float:
        """When the receiver counts as gone."""
        return self.last_seen + self.seconds
