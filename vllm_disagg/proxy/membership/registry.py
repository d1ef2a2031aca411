"""The engines that have made themselves known (`vllm_disagg.fleet.registration`).

No clock, no sockets: bytes and time are passed in. A challenge is drawn at random where none is
given.
"""

from __future__ import annotations

import secrets
from typing import Literal, NamedTuple

from ...errors import BadGrant, ConfigError
from ...fleet.keys import FleetKey
from ...fleet.registration import REGISTER_SECONDS, RegistrationNote, read
from ..http.addresses import AllowedNetworks, check_url
from .reconcile import Member

EXPIRY_SECONDS = 5 * REGISTER_SECONDS  # seconds without a word, until an engine is no longer wanted
MAX_INCARNATIONS = 4096  # incarnations whose numbers are remembered


class Registered(NamedTuple):
    """A registration that was taken in, for the other workers of this proxy."""

    note: bytes
    numbers: dict[str, int]  # by incarnation


class Registry:
    """Who is there by their own word."""

    def __init__(
        self, key: FleetKey, challenge: str = "", networks: AllowedNetworks | None = None
    ) -> None:
        self._key = key
        self._networks = networks or AllowedNetworks()
        self.challenge = challenge or secrets.token_hex(16)
        self._numbers: dict[str, int] = {}  # the last one of each incarnation
        self.last: dict[str, int] = {}  # the number taken last
        self._heard: dict[Member, tuple[float, str]] = {}  # when, and from which incarnation

    def tell(self, data: bytes, now: float) -> Literal["ok", "again"]:
        """A message came; "again": with the present challenge, please. BadGrant: not of this fleet,
        or heard before.
        """
        note = read(self._key, data)
        if note.challenge != self.challenge:
            return "again"
        if note.number <= self._numbers.get(note.incarnation, -1):
            raise BadGrant("heard before")
        try:
            member = Member(
                self._networks.check(check_url(note.url, "advertise"), "advertise"), note.role
            )
        except ConfigError as error:
            raise BadGrant(str(error)) from None
        self._remember(note)
        if note.leaving:
            if (
                self._heard.get(member, (0.0, ""))[1] == note.incarnation
            ):  # not somebody else's place by now
                del self._heard[member]
        else:
            self._heard[member] = (now, note.incarnation)
        return "ok"

    def knows(self, numbers: dict[str, int]) -> None:
        """What another worker of this proxy has heard is not news."""
        for incarnation, number in numbers.items():
            self._numbers[incarnation] = max(number, self._numbers.get(incarnation, -1))

    def members(self, now: float) -> frozenset[Member]:
        self._heard = {
            member: heard
            for member, heard in self._heard.items()
            if now - heard[0] < EXPIRY_SECONDS
        }
        return frozenset(self._heard)

    def _remember(self, note: RegistrationNote) -> None:
        self._numbers[note.incarnation] = note.number
        self.last = {note.incarnation: note.number}
        if len(self._numbers) > MAX_INCARNATIONS:  # what we forget must not be said again
            self._numbers.clear()
            self.challenge = secrets.token_hex(16)
