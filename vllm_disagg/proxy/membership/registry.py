"""Keeps the engines that registered themselves (`vllm_disagg.fleet.registration`).

A registration is accepted if it
  * is signed with the fleet key,
  * repeats the present challenge, which makes those of an earlier proxy invalid,
  * has a higher number than the last one of the same incarnation, which makes replays invalid,
  * names an address in the allowed networks.

An engine that does not repeat its registration for EXPIRY_SECONDS is no longer listed.

A challenge that is given is the one of several proxy workers, and only `renew` replaces it. Without
one the registry draws its own at random.

No clock, no sockets: bytes and time are parameters.
"""

from __future__ import annotations

import secrets
from typing import Literal, NamedTuple

from ...errors import BadGrant, ConfigError
from ...fleet.keys import FleetKey
from ...fleet.registration import REGISTER_SECONDS, RegistrationNote, read
from ..http.addresses import AllowedNetworks, check_url
from .reconcile import Member

EXPIRY_SECONDS = 5 * REGISTER_SECONDS  # without a registration
MAX_INCARNATIONS = 4096  # whose numbers are remembered


def new_challenge() -> str:
    """Returns a challenge, drawn at random."""
    return secrets.token_hex(16)


class Registered(NamedTuple):
    """Carries an accepted registration to the other workers of this proxy."""

    note: bytes
    numbers: dict[str, int]  # by incarnation


class _Listed(NamedTuple):
    at: float  # time of the last registration
    incarnation: str


class Registry:
    """Lists the engines whose registrations are valid."""

    def __init__(
        self, key: FleetKey, challenge: str = "", networks: AllowedNetworks | None = None
    ) -> None:
        self._key = key
        self._networks = networks or AllowedNetworks()
        self._draws_challenges = not challenge
        self.challenge = challenge or new_challenge()
        self._numbers: dict[str, int] = {}  # the last one of each incarnation
        self.last_numbers: dict[str, int] = {}  # of the registration accepted last
        self._listed: dict[Member, _Listed] = {}
        # The engines that have registered, and have neither left nor expired. The same object until
        # they change.
        self.members: frozenset[Member] = frozenset()

    def register(self, data: bytes, now: float) -> Literal["ok", "again"]:
        """Accepts a registration; "again" asks for one with the present challenge.

        Raises BadGrant for a registration that is not of this fleet, or is a replay.
        """
        note = read(self._key, data)
        if note.challenge != self.challenge:
            return "again"
        if note.number <= self._numbers.get(note.incarnation, -1):
            raise BadGrant("heard before")
        try:
            url = check_url(note.url, "advertise")
            self._networks.check(url, "advertise")
        except ConfigError as error:
            raise BadGrant(str(error)) from None
        member = Member(url, note.role)
        self._remember_number(note)
        if not note.leaving:
            self._listed[member] = _Listed(now, note.incarnation)
            if member not in self.members:
                self.members = frozenset(self._listed)
            return "ok"
        listed = self._listed.get(member)
        # A later engine may have taken the URL.
        if listed and listed.incarnation == note.incarnation:
            del self._listed[member]
            self.members = frozenset(self._listed)
        return "ok"

    def mark_used(self, numbers: dict[str, int]) -> None:
        """Marks numbers, by incarnation, that another worker of this proxy has accepted."""
        for incarnation, number in numbers.items():
            self._numbers[incarnation] = max(number, self._numbers.get(incarnation, -1))

    def renew(self, challenge: str) -> None:
        """Takes a new challenge, and forgets all numbers.

        A number that is forgotten alone could be replayed. The challenge makes old ones invalid.
        """
        self._numbers.clear()
        self.challenge = challenge

    def expire(self, now: float) -> None:
        """Removes the engines whose registrations have expired.

        Only after `forgive`: behind a standstill a registration may be read before that.
        """
        self._listed = {
            member: listed
            for member, listed in self._listed.items()
            if now - listed.at < EXPIRY_SECONDS
        }
        if len(self._listed) < len(self.members):
            self.members = frozenset(self._listed)

    def forgive(self, seconds: float, now: float) -> None:
        """Lets all listed engines expire later: this process has not run for so long."""
        self._listed = {
            member: listed._replace(at=min(now, listed.at + seconds))
            for member, listed in self._listed.items()
        }

    def _remember_number(self, note: RegistrationNote) -> None:
        self._numbers[note.incarnation] = note.number
        self.last_numbers = {note.incarnation: note.number}
        if self._draws_challenges and len(self._numbers) > MAX_INCARNATIONS:
            self.renew(new_challenge())
