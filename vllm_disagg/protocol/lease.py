"""Lease: how long a sender waits for a receiver that is silent.  Pure.

    renew      with each message
    shorten    when a connection of the receiver is lost.  A live receiver repeats its
               TransferRequest within the grace.  Blocks that a dead receiver would have read need
               not wait for the whole lease.

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
    # Of this process, while the receiver's connection is lost: the last time at which it ran.
    awake_at: float | None = None

    def renew(self, now: float) -> None:
        """Begins the lease anew: the receiver lives, and has a connection."""
        self.last_seen = now
        self.awake_at = None

    def shorten(self, now: float) -> None:
        """Leaves the grace of a lost connection at most."""
        # Another of its connections may have been lost before.
        self.forgive_sleep(now)
        # Set back instead of ended: the receiver may live and go on by another transport.
        # The minimum, because a loss must never prolong the lease of a silent receiver.
        self.last_seen = min(self.last_seen, now + self.grace - self.seconds)
        self.awake_at = now

    def forgive_sleep(self, now: float) -> None:
        """Prolongs the grace of a lost connection by the time that a tick was late.

        This process slept for that time, so the receiver could not connect anew.
        """
        if self.awake_at is not None:
            late = now - (self.awake_at + self.grace / 2)
            self.last_seen += max(0.0, late)
            self.awake_at = now

    def has_run_out(self, now: float) -> bool:
        """Returns whether the receiver counts as gone."""
        return self.last_seen + self.seconds <= now

    def deadlines(self) -> list[float]:
        """Returns the times at which a tick is due."""
        deadlines = [self.last_seen + self.seconds]
        # A tick that comes later than this shows that the process slept.
        if self.awake_at is not None:
            deadlines.append(self.awake_at + self.grace / 2)
        return deadlines
