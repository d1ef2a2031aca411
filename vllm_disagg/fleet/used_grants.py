"""Used grants: each use of a transfer id is accepted once, until its grant expires.

Pure: `now` comes with each call, by the clock of this engine.
"""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Literal

from ..errors import BadGrant
from .grants import MAX_VALIDITY_SECONDS

# Each grant works once, so used grants are remembered until they expire. This many may be valid at
# a time; they take up to 60 MB. Handovers have a limit of the same size of their own: clients of
# another router must not use up the grants of the proxy.
MAX_USED_GRANTS = 1 << 18
# A released transfer id stays used so long. Later P refuses it, since its lease has ended.
RELEASED_SECONDS = 600.0
# Without a key every client can mint grants, also one that expires before its transfer ends. So
# used ones are remembered longer, and still few enough for 30 requests a second.
KEYLESS_SECONDS = 3600.0

Direction = Literal["send", "load"]
Use = tuple[Direction, str]  # direction, transfer id
Permission = Literal["grant", "handover"]


class UsedGrants:
    """Remembers the used grants of one engine."""

    def __init__(self, *, has_key: bool) -> None:
        """Creates an empty memory. `has_key`: only holders of a fleet key mint grants."""
        self._has_key = has_key
        self._uses: dict[Use, Permission] = {}
        self._counts: Counter[Permission] = Counter()
        self._expiries: list[tuple[float, Use]] = []  # the same uses, as a heap

    def __len__(self) -> int:
        """Returns the number of remembered uses, of which some may have expired."""
        return len(self._uses)

    def use(self, direction: Direction, transfer: str, until: float, now: float) -> None:
        """Uses up a transfer id for one direction.

        `direction`: whether this engine sends KV or loads it. The workers know a transfer by its id
        and direction alone. Raises BadGrant if it was used before or is out of time.
        """
        self._forget_expired(now)
        check_time(until, now)
        self._add(direction, transfer, "grant")
        expires_at = until if self._has_key else until + KEYLESS_SECONDS
        heapq.heappush(self._expiries, (expires_at, (direction, transfer)))

    def hold(self, direction: Direction, transfer: str, now: float) -> None:
        """Uses up a handover's transfer id, which expires only after `release`.

        Raises BadGrant if it was used before.
        """
        self._forget_expired(now)
        self._add(direction, transfer, "handover")

    def release(self, direction: Direction, transfer: str, now: float) -> None:
        """Lets a held transfer id expire `RELEASED_SECONDS` from now."""
        heapq.heappush(self._expiries, (now + RELEASED_SECONDS, (direction, transfer)))

    def _add(self, direction: Direction, transfer: str, permission: Permission) -> None:
        if (direction, transfer) in self._uses:
            raise BadGrant("used before")
        # No used grant is forgotten to make room: it would become valid again.
        if self._counts[permission] >= MAX_USED_GRANTS:
            raise BadGrant(f"too many other {permission}s are valid now")
        self._uses[direction, transfer] = permission
        self._counts[permission] += 1

    def _forget_expired(self, now: float) -> None:
        while self._expiries and self._expiries[0][0] < now:
            _, expired = heapq.heappop(self._expiries)
            permission = self._uses.pop(expired, None)
            if permission is not None:
                self._counts[permission] -= 1


def check_time(until: float, now: float) -> None:
    """Raises BadGrant for a grant that has expired, or that is valid for too long."""
    if until < now:
        raise BadGrant(f"expired {now - until:.1f} s ago")
    if until > now + MAX_VALIDITY_SECONDS:
        raise BadGrant(f"valid for {until - now:.0f} s, which is too long")
