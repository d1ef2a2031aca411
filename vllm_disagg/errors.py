"""Errors that this project raises, by their remedy.

DisaggError
  ConfigError       to be mended by the operator before the start; names the setting
  BadMessage        a peer sent bytes that are no message of this protocol
  BadGrant          a request has a grant that is forged, stale or for another engine
  Unmappable        the KV of two engines cannot be rearranged into each other
  CopyFailed        KV memory could not be copied; the piece is lost
  ProofFailed       KV in GPU memory is not moved as vLLM has it; the engine makes no transfers
"""

from __future__ import annotations


class DisaggError(Exception):
    """Base of all errors raised on purpose."""


class ConfigError(DisaggError):
    """A setting is missing or contradicts another; one line with the setting and the remedy."""


class BadMessage(DisaggError):
    """Bytes from a peer do not decode; the message is dropped and counted."""


class BadGrant(DisaggError):
    """An engine does not accept a grant; the request is served locally."""


class Unmappable(DisaggError):
    """The KV of one engine cannot become that of another; one line with the values of both."""


class CopyFailed(DisaggError):
    """KV memory could not be copied, as on a GPU without free memory; costs one piece."""


class ProofFailed(DisaggError):
    """The proof of a worker at its start has failed; one line with what differs."""
