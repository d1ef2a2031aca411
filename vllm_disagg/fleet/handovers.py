"""Handovers: signed permissions in P's answers, for the handshake that all P/D routers speak.

    prefill request   kv_transfer_params = {"do_remote_decode": true, ...}
    its answer        kv_transfer_params = {"disagg_handover": "..."}
    decode request    the same kv_transfer_params, unchanged

A grant names the engine that may use it.  P does not know which D will get the router's second
request, so a handover names the prompt, and D accepts it for that prompt only.  It has no time: the
lease of P's workers ends it.  The names of the workers hold their incarnation.

The answer has none of the fields that other connectors act on.  A router may hand it to an engine
with NixlConnector: with `do_remote_prefill` and without `remote_block_ids` that engine dies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from ..errors import BadGrant
from ..protocol.peers import WorkerInfo
from . import sealing
from .grants import TransferId
from .keys import FleetKey

TOKEN_KEY = "disagg_handover"
# Of every connector of the field: the request is a router's prefill leg, or its decode leg.
PREFILL_FLAG = "do_remote_decode"
DECODE_FLAG = "do_remote_prefill"
VERSION: Literal[1] = 1  # of handovers
USE = "handover"  # of the fleet key

Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class Handover(msgspec.Struct, frozen=True, array_like=True):
    """The permission to load the KV of one prompt, once.  An array on the wire."""

    version: Literal[1]
    transfer: TransferId
    prompt: Digest  # of all inputs of the KV
    # The prefill engine's workers, by rank.
    sources: Annotated[list[WorkerInfo], msgspec.Meta(min_length=1, max_length=1024)]
    layout: dict[str, str]  # facts that must be equal in two engines that exchange KV
    patience: Annotated[float, msgspec.Meta(gt=0, le=86400)]  # seconds without progress


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Handover).decode


def mint(key: FleetKey, handover: Handover) -> str:
    """Returns the token of a handover."""
    return sealing.seal(key, USE, _encode(handover))


def verify(key: FleetKey, token: object) -> Handover:
    """Returns the handover of a token.  Raises BadGrant for any other object.

    The caller checks the prompt, the layout, the sources, and that it was not used before.
    """
    payload = sealing.unseal(key, USE, token)
    try:
        return _decode(payload)
    # UnicodeDecodeError: msgspec does not turn a text that is not UTF-8 into a DecodeError.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadGrant(f"not a handover of version {VERSION}: {error}") from None


def is_prefill_leg(params: Mapping[str, object]) -> bool:
    """Returns whether a router's request asks for parameters in its answer."""
    return params.get(PREFILL_FLAG) is True


def is_decode_leg(params: Mapping[str, object]) -> bool:
    """Returns whether a router's request brings the parameters of a prefill engine."""
    return TOKEN_KEY in params or params.get(DECODE_FLAG) is True


def answer(token: str) -> dict[str, object]:
    """Returns the `kv_transfer_params` of P's answer, which a router hands to D."""
    return {TOKEN_KEY: token}
