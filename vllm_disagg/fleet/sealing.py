"""Sealed tokens: bytes that a holder of the fleet key has signed, as text.

    <payload>.<mac>, both base64url

Each use has its own derived key, so no token of one use is valid for another.
"""

from __future__ import annotations

import base64
import binascii
import hmac

from ..errors import BadGrant
from .keys import FleetKey

MAC_BYTES = 16
MAX_TOKEN_CHARACTERS = 64 * 1024  # 64 ranks of 80 layers need about 46 KiB
_URL_SAFE = bytes.maketrans(b"+/", b"-_")


def seal(key: FleetKey, use: str, payload: bytes) -> str:
    """Returns the token of a payload. `use`: at most 16 ASCII characters."""
    text = _padless_base64(payload) + b"." + _padless_base64(mac_of(key, use, payload))
    return text.translate(_URL_SAFE).decode()


def unseal(key: FleetKey, use: str, token: object) -> bytes:
    """Returns the payload of a token.  Raises BadGrant for any other object."""
    if not key.accepts_grants:
        raise BadGrant("this engine has no fleet key, so it accepts no grant")
    if not isinstance(token, str) or len(token) > MAX_TOKEN_CHARACTERS:
        raise BadGrant("not a token, or too long")
    body, _, mac = token.partition(".")
    try:
        payload = decode(body)
        given_mac = decode(mac)
    except (binascii.Error, UnicodeEncodeError, ValueError):
        raise BadGrant("not base64") from None
    if not any(hmac.compare_digest(mac_of(k, use, payload), given_mac) for k in key.accepted):
        raise BadGrant(
            "minted with another key"
            if key.is_set
            else "minted with a fleet key, and this engine has none"
        )
    return payload


def mac_of(key: FleetKey, use: str, payload: bytes) -> bytes:
    """Returns the MAC of a payload for one use."""
    state = key.keyed_hash(use, MAC_BYTES)
    state.update(payload)
    return state.digest()


def _padless_base64(data: bytes) -> bytes:
    return binascii.b2a_base64(data, newline=False).rstrip(b"=")


def decode(text: str) -> bytes:
    """Returns the bytes of a base64url text.  Raises ValueError for any other text."""
    return base64.b64decode(
        text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True
    )
