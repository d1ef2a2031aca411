"""Registration: an engine announces itself to proxies, without a service in between.

The connector posts a small note to each proxy every few seconds, in separate threads:

    POST /disagg/register   {"note": "<payload>", "mac": "<hex>"}
    200                            the proxy has registered the engine
    409 {"challenge": "<hex>"}     repeat the note with this challenge
    403                            the note was signed with another fleet key

HTTP, because the proxy serves it already, with the same address, firewall and TLS.  The MAC has a
key derived from the fleet key, because holding that key makes an engine a member.  A recorded note
is useless later: it has the proxy's challenge, which expires with the proxy's process, and a number
that must grow within an incarnation.

Engines and proxies may be of different releases: a proxy ignores fields that it does not know, and
a field that is added has a default.  A proxy refuses values that it does not know, as of a role.

Every failure here is logged and tried again; the engine never waits for registration.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import json
import logging
import threading
import time
import urllib.error
import urllib.request
from functools import cache
from typing import Annotated, Literal

import msgspec

from ..config import Config
from ..errors import BadGrant
from .grants import Text
from .keys import FleetKey

log = logging.getLogger("vllm_disagg.fleet.registration")

REGISTER_PATH = "/disagg/register"
REGISTER_SECONDS = 2.0  # between the beginnings of two notes
TIMEOUT_SECONDS = 3.0  # for one note
# Until the next note begins beside one that is not answered: a worker of the proxy may be frozen,
# and the next note may reach another one before this engine's registration runs out.
NEXT_NOTE_SECONDS = 1.0
MAX_PENDING_NOTES = 3  # each in a thread of its own, which sleeps while notes are answered
MAX_NOTE_BYTES = 4096  # of one note, and of its answer
MAX_TRIES = 2  # the first note, and the first after a proxy's restart, are answered by a challenge


class RegistrationNote(msgspec.Struct, frozen=True):
    """The announcement of an engine."""

    challenge: Text  # the proxy's
    incarnation: Text
    number: Annotated[int, msgspec.Meta(ge=0)]  # grows with each note of an incarnation
    role: Literal["prefill", "decode"]
    url: Text  # of its API server
    leaving: bool = False  # the engine is shutting down


class _Envelope(msgspec.Struct, frozen=True):
    note: str
    mac: str


_encode = msgspec.json.Encoder().encode
_envelope = msgspec.json.Decoder(_Envelope).decode
_note = msgspec.json.Decoder(RegistrationNote).decode


def sign(key: FleetKey, note: RegistrationNote) -> bytes:
    """Return the body of the request: the note and its MAC, as JSON."""
    text = _encode(note)
    return _encode(_Envelope(text.decode(), _mac(key, text)))


def read(key: FleetKey, data: bytes) -> RegistrationNote:
    """Return the note of a request's body.  Raises BadGrant for any other bytes."""
    if not key.is_set:
        raise BadGrant("this proxy has no fleet key, so it registers no engine")
    if len(data) > MAX_NOTE_BYTES:
        raise BadGrant(f"more than {MAX_NOTE_BYTES} bytes")
    try:
        # As text, which the proxy's other workers get: msgspec lets any bytes pass in a field that
        # it skips.
        envelope = _envelope(data.decode())
        text = envelope.note.encode()
        if not any(hmac.compare_digest(_mac(k, text), envelope.mac) for k in key.accepted):
            raise BadGrant("signed with another key")
        return _note(envelope.note)
    except (msgspec.DecodeError, UnicodeError, TypeError, RecursionError) as error:
        raise BadGrant(f"not a note of this version: {error}") from None


def _mac(key: FleetKey, text: bytes) -> str:
    return hashlib.blake2b(text, key=key.derive("register"), digest_size=32).hexdigest()


@cache
def _direct() -> urllib.request.OpenerDirector:
    """Returns the opener of URLs that leaves out the environment's `http_proxy`.

    That reaches no address of a fleet.
    """
    return urllib.request.build_opener(urllib.request.ProxyHandler({}))


def register_all(
    config: Config, key: FleetKey, incarnation: str, kind: str, rank: int | None = None
) -> list[Registration]:
    """Start the registration with every proxy of the settings.

    An engine of both roles registers as decode, a data parallel rank as a separate instance.
    """
    role: Literal["prefill", "decode"] = "prefill" if kind == "prefill" else "decode"
    url = config.advertise if rank is None else f"{config.advertise.rstrip('/')}@{rank}"
    return [Registration(proxy, key, incarnation, role, url) for proxy in config.proxies]


class Registration:
    """Registers this engine with one proxy, again and again, until `close`."""

    def __init__(
        self,
        proxy: str,
        key: FleetKey,
        incarnation: str,
        role: Literal["prefill", "decode"],
        url: str,
    ) -> None:
        self._register_url = proxy.rstrip("/") + REGISTER_PATH
        self._key = key
        self._incarnation = incarnation
        self._role = role
        self._url = url
        self._challenge = ""
        self._numbers = itertools.count(1)  # one call of `next` is one step for all threads
        self._turn = threading.Lock()  # of the thread that sends the next note
        self._next_note_at = 0.0
        self._closing = threading.Event()
        self._announcing = threading.Lock()  # of the thread that announces the shutdown
        self._has_left = threading.Event()
        self._last_logged = ""
        self._has_warned = False  # of challenges that change
        for number in range(MAX_PENDING_NOTES):
            thread = threading.Thread(target=self._run, name="vllm-disagg-register", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # this process may have no more threads
                if not number:
                    raise
                log.warning("registration: no more than %d threads: %s", number, error)
                break

    def close(self) -> None:
        """Announce the shutdown and stop the threads; waits at most TIMEOUT_SECONDS."""
        self._closing.set()
        self._has_left.wait(TIMEOUT_SECONDS)

    def _run(self) -> None:
        """Send notes in turn with the other threads; the first to end announces the shutdown."""
        while self._wait_for_turn():
            began = time.monotonic()
            self._register(leaving=False)
            # An answer, or an error that came at once. If a note began meanwhile, another one is
            # due earlier or later by a second at most, so no lock is needed.
            self._next_note_at = max(self._next_note_at, began + REGISTER_SECONDS)
        if self._announcing.acquire(blocking=False):
            self._register(leaving=True)
            self._has_left.set()

    def _wait_for_turn(self) -> bool:
        """Wait until the next note is due.  False: the engine shuts down."""
        with self._turn:
            while (pause := self._next_note_at - time.monotonic()) > 0:
                if self._closing.wait(pause):
                    return False
            self._next_note_at = time.monotonic() + NEXT_NOTE_SECONDS
        return not self._closing.is_set()

    def _register(self, leaving: bool) -> None:
        """Send one note, and once more if the proxy answers with a challenge."""
        for _ in range(MAX_TRIES):
            # Before the question: a number above that of the announcement finds the engine closing.
            number = next(self._numbers)
            if self._closing.is_set() and not leaving:
                return  # behind the announcement of the shutdown a note would undo it
            note = RegistrationNote(
                self._challenge,
                self._incarnation,
                number,
                self._role,
                self._url,
                leaving,
            )
            try:
                status, answer = self._post(sign(self._key, note))
                if status == 200:
                    self._log(
                        "registration: %s has registered this engine as %s",
                        self._register_url,
                        self._url,
                    )
                    return
                if status != 409:
                    self._log(
                        "registration: %s refuses this engine: %s", self._register_url, answer
                    )
                    return
                self._challenge = str(answer["challenge"])
            except Exception as error:  # in a thread of vLLM's process: no error may end the engine
                self._log("registration: %s is not reached: %s", self._register_url, error)
                return
        self._warn_of_challenges()

    def _warn_of_challenges(self) -> None:
        """Warns, once, that each answer had another challenge: no note can repeat the right one."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "registration: %s answers with another challenge each time, as several proxies"
                " behind one balancer do; name each proxy's own URL, separated by commas",
                self._register_url,
            )

    def _post(self, data: bytes) -> tuple[int, dict[str, object]]:
        request = urllib.request.Request(
            self._register_url, data, {"content-type": "application/json"}
        )
        try:
            with _direct().open(request, timeout=TIMEOUT_SECONDS) as answer:
                return answer.status, json.loads(answer.read(MAX_NOTE_BYTES))
        except urllib.error.HTTPError as error:
            with error:
                body = error.read(MAX_NOTE_BYTES)
            return error.code, json.loads(body) if body.startswith(b"{") else {}

    def _log(self, template: str, *values: object) -> None:
        """Log a line unless it repeats the last one."""
        line = template % values
        if line != self._last_logged:
            self._last_logged = line
            log.info("%s", line)
