"""The errors this project raises, by what the person who sees them can do.

DisaggError
  ConfigError       ours to fix before anything starts; names the setting
  BadMessage        a peer sent bytes that are not a message of this protocol
  BadGrant          a request carries a grant that is forged, stale or not for this engine
  Unmappable        two engines hold KV in ways that do not fit
"""

from __future__ import annotations


class DisaggError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(DisaggError):
    """A setting is missing or contradicts another; one line that names it and says what to do."""


class BadMessage(DisaggError):
    """Bytes from a peer that do not decode; the message is dropped and counted."""


class BadGrant(DisaggError):
    """A grant that this engine does not accept; the request is served locally."""


class Unmappable(DisaggError):
    """What one engine holds cannot be made of what another holds; one line that names both sides'
    values.
    """
