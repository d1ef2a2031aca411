"""Grants: the only thing in a request that an engine acts on, and what an engine tells about
itself.

A client may write anything into `kv_transfer_params`; an engine believes none of it but a *grant*,
a token that whoever has the fleet key minted for one leg of one request:

    kv_transfer_params = {"disagg_grant": "<payload>.<mac>"}            in a request, from the proxy
    kv_transfer_params = {"disagg_engine": {...}}                       in the answer of a prefill or probe leg

A grant names the incarnation of the engine it is for, so it dies with that process. It is good
until a moment of that engine's own clock, and each use of its transfer id works once until then. An
engine tells its clock in every answer, so whoever mints adds only durations to it. A probe that
names no engine learns nothing but the `Card`, which is what the next probe needs.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from typing import Annotated, Literal

import msgspec

from ..errors import BadGrant
from ..protocol.peers import WorkerInfo
from .keys import FleetKey

REQUEST_KEY = "disagg_grant"
ANSWER_KEY = "disagg_engine"
VERSION: Literal[2] = 2  # of grants
# seconds that a leg's grant is good for besides its patience: on the way, in queues, for clocks
# that drift
MARGIN_SECONDS = 60.0
MAC_BYTES = 16
MAX_VALIDITY_SECONDS = (
    25 * 3600.0
    # seconds; a grant that is good for longer is refused, so that used ones need not be kept for
    # ever
)
MAX_TOKEN_CHARACTERS = 64 * 1024  # characters; 64 ranks of 80 layers need about 46 KiB

Text = Annotated[str, msgspec.Meta(max_length=256)]
TransferId = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """What one leg of one request may do."""

    version: Literal[2]
    leg: Literal["probe", "prefill", "decode"]
    transfer: TransferId
    engine: Text  # incarnation of the engine that may use it; a first probe names none
    sources: Annotated[
        list[WorkerInfo], msgspec.Meta(max_length=1024)
    ] = []  # the other engine's workers, by rank
    patience: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 60.0  # seconds without progress
    back: TransferId | None = None  # the transfer in which P reads what D has cached of this prompt
    until: Annotated[float, msgspec.Meta(ge=0)] = (
        0.0  # by the engine's clock; a first probe has no end
    )


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Grant).decode


def new_transfer() -> str:
    """A fresh transfer id: 128 random bits."""
    return secrets.token_hex(16)


def mint(key: FleetKey, grant: Grant) -> str:
    payload = _encode(grant)
    return f"{_b64(payload)}.{_b64(_mac(key, payload))}"


def verify(key: FleetKey, token: object) -> Grant:
    """The grant in a token, or BadGrant. Takes anything: what comes from a request has no type yet."""
    if not key.accepts_grants:
        raise BadGrant("this engine has no fleet key, so it believes no grant")
    if not isinstance(token, str) or len(token) > MAX_TOKEN_CHARACTERS:
        raise BadGrant("not a token")
    body, _, mac = token.partition(".")
    try:
        payload, given = _unb64(body), _unb64(mac)
    except (binascii.Error, UnicodeEncodeError, ValueError):
        raise BadGrant("not base64") from None
    if not hmac.compare_digest(_mac(key, payload), given):
        raise BadGrant("minted with another key")
    try:
        return _decode(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        raise BadGrant(f"not of this version: {error}") from None


def _mac(key: FleetKey, payload: bytes) -> bytes:
    return hashlib.blake2b(payload, key=key.derive("grant"), digest_size=MAC_BYTES).digest()


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _unb64(text: str) -> bytes:
    return base64.b64decode(
        text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True
    )
