"""How an engine makes itself known to a proxy, without a service in between.

The connector posts a small message to the proxy every few seconds, in a thread of its own:

    POST /disagg/register   {"note": "<payload>", "mac": "<hex>"}
    200: known | 409 {"challenge": "<hex>"}: say that again with this challenge | 403: another fleet
    key

HTTP because the proxy listens to that already, with the same address, firewall and TLS; the MAC,
with a key derived from the fleet key, because the fleet key is what makes a member. A recorded
message is worth nothing later: it names the proxy's challenge, which dies with the proxy, and a
number that must grow within an incarnation.

Whatever goes wrong here is logged and tried again; the engine never waits for it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import threading
import urllib.error
import urllib.request
from typing import Annotated, Literal

import msgspec

from ..config import Config
from ..errors import BadGrant
from .grants import Text
from .keys import FleetKey

log = logging.getLogger("vllm_disagg.fleet.registration")

REGISTER_PATH = "/disagg/register"
REGISTER_SECONDS = 2.0  # seconds
TIMEOUT_SECONDS = 3.0  # seconds for one message
MAX_NOTE_BYTES = 4096  # bytes of a message


class RegistrationNote(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an engine says."""

    challenge: Text  # the proxy's
    incarnation: Text
    number: Annotated[int, msgspec.Meta(ge=0)]  # grows with each note of an incarnation
    role: Literal["prefill", "decode"]
    url: Text  # where its API server is reached
    leaving: bool = False


class _Envelope(msgspec.Struct, frozen=True):
    note: str
    mac: str


_encode = msgspec.json.Encoder().encode
_envelope = msgspec.json.Decoder(_Envelope).decode
_note = msgspec.json.Decoder(RegistrationNote).decode


def sign(key: FleetKey, note: RegistrationNote) -> bytes:
    text = _encode(note)
    return _encode(_Envelope(text.decode(), _mac(key, text)))


def read(key: FleetKey, data: bytes) -> RegistrationNote:
    """The note in a message, or BadGrant."""
    if not key.is_set:
        raise BadGrant("this proxy has no fleet key, so it knows nobody")
    if len(data) > MAX_NOTE_BYTES:
        raise BadGrant("too long")
    try:
        envelope = _envelope(data)
        if not hmac.compare_digest(_mac(key, envelope.note.encode()), envelope.mac):
            raise BadGrant("signed with another key")
        return _note(envelope.note)
    except (msgspec.DecodeError, UnicodeError, TypeError, RecursionError) as error:
        raise BadGrant(f"not of this version: {error}") from None


def _mac(key: FleetKey, text: bytes) -> str:
    return hashlib.blake2b(text, key=key.derive("register"), digest_size=32).hexdigest()


def register_all(
    config: Config, key: FleetKey, incarnation: str, kind: str, rank: int | None = None
) -> list[Registration]:
    """Begin with every proxy of the settings; an engine that is both prefill and decode registers
    as decode, and a data parallel rank as an instance of its own.
    """
    role: Literal["prefill", "decode"] = "prefill" if kind == "prefill" else "decode"
    url = config.advertise if rank is None else f"{config.advertise.rstrip('/')}@{rank}"
    return [Registration(proxy, key, incarnation, role, url) for proxy in config.proxies]


class Registration:
    """Tells one proxy of this engine until it is closed."""

    def __init__(
        self,
        proxy: str,
        key: FleetKey,
        incarnation: str,
        role: Literal["prefill", "decode"],
        url: str,
    ) -> None:
        self._to = proxy.rstrip("/") + REGISTER_PATH
        self._key = key
        self._incarnation, self._role, self._url = incarnation, role, url
        self._challenge = ""
        self._number = 0
        self._over = threading.Event()
        self._said = ""
        self._thread = threading.Thread(target=self._run, name="vllm-disagg-register", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say goodbye and stop; waits for little."""
        self._over.set()
        self._thread.join(TIMEOUT_SECONDS)

    def _run(self) -> None:
        while not self._over.is_set():
            self._over.wait(self._tell(leaving=False))
        self._tell(leaving=True)

    def _tell(self, leaving: bool) -> float:
        """Seconds until the next note."""
        for _ in range(
            2
        ):  # the first note, and the first after the proxy's restart, learn the challenge
            self._number += 1
            note = RegistrationNote(
                self._challenge, self._incarnation, self._number, self._role, self._url, leaving
            )
            try:
                status, answer = self._post(sign(self._key, note))
                if status == 200:
                    self._log("%s knows this engine as %s", self._to, self._url)
                    return REGISTER_SECONDS
                if status != 409:
                    self._log("%s refuses this engine: %s", self._to, answer)
                    return REGISTER_SECONDS
                self._challenge = str(answer["challenge"])
            except Exception as error:  # a thread inside vLLM: whatever it is, the engine goes on
                self._log("%s is not reached: %s", self._to, error)
                return REGISTER_SECONDS
        return REGISTER_SECONDS

    def _post(self, data: bytes) -> tuple[int, dict[str, object]]:
        request = urllib.request.Request(self._to, data, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                return answer.status, json.loads(answer.read(MAX_NOTE_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                body = error.read(MAX_NOTE_BYTES)
            return error.code, json.loads(body) if body.startswith(b"{") else {}

    def _log(self, words: str, *what: object) -> None:
        """Once, until something else happens."""
        if (said := words % what) != self._said:
            self._said = said
            log.info("%s", said)
