"""Grants: signed permissions, the only part of a request that an engine acts on.

A client may write anything into `kv_transfer_params`.  An engine accepts only a *grant* there: a
token that a holder of the fleet key minted for one leg of one request.

    in a request, from the proxy:          kv_transfer_params = {"disagg_grant": "<payload>.<mac>"}
    in the answer to a prefill or probe:   kv_transfer_params = {"disagg_engine": {...}}
    in the answer to any other token:      kv_transfer_params = {"disagg_engine": {...}}

A grant names the incarnation of its engine, so it expires with that process.  It is valid until a
time of that engine's own clock, and each use of its transfer id is accepted once until then.  Every
answer of an engine has its clock, so a minter adds only durations.  A probe that names no engine is
answered with an EngineCard, which the next probe needs.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Literal

import msgspec

from ..errors import BadGrant
from ..protocol.peers import WorkerInfo
from . import sealing
from .keys import FleetKey

REQUEST_KEY = "disagg_grant"
WHOLE_KEY = "disagg_whole"  # the proxy meant the engine to compute this request whole
ANSWER_KEY = "disagg_engine"
REFUSED_KEY = "disagg_refused"  # beneath ANSWER_KEY: why a token is no grant of this fleet
VERSION: Literal[2] = 2  # of grants
OTHER_VERSION = "not a grant of version"  # begins the reason for a grant of another version
# Validity of a leg's grant beyond its patience: for the network, queues, and drifting clocks.
MARGIN_SECONDS = 60.0
# A grant with a longer validity is refused, so that used grants need not be kept for ever.
MAX_VALIDITY_SECONDS = 25 * 3600.0
USE = "grant"  # of the fleet key

Text = Annotated[str, msgspec.Meta(max_length=256)]
TransferId = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class Grant(msgspec.Struct, frozen=True, array_like=True):
    """The permission of one leg of one request.  An array on the wire."""

    version: Literal[2]
    leg: Literal["probe", "prefill", "decode"]
    transfer: TransferId
    engine: Text  # incarnation of the engine that may use it; a first probe names none
    # The sending engine's workers, by rank.
    sources: Annotated[list[WorkerInfo], msgspec.Meta(max_length=1024)] = []
    patience: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 60.0  # seconds without progress
    # Bidirectional reuse: the transfer in which P reads D's cached KV of this prompt.
    back: TransferId | None = None
    # End of validity by the engine's clock; 0, for a first probe: none.
    until: Annotated[float, msgspec.Meta(ge=0)] = 0.0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Grant).decode


def new_transfer() -> str:
    """Return a new transfer id: 128 random bits in hexadecimal."""
    return secrets.token_hex(16)


def mint(key: FleetKey, grant: Grant) -> str:
    """Return the token of a grant: `<payload>.<mac>`, both base64url."""
    return sealing.seal(key, USE, _encode(grant))


def verify(key: FleetKey, token: object) -> Grant:
    """Return the grant of a token.  Raises BadGrant for any other object.

    The caller checks the engine, the end of validity, and that the grant was not used before.
    """
    payload = sealing.unseal(key, USE, token)
    try:
        return _decode(payload)
    # UnicodeDecodeError: msgspec does not turn a text that is not UTF-8 into a DecodeError.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadGrant(f"{OTHER_VERSION} {VERSION}: {error}") from None
