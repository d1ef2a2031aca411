"""Request bodies: what they may not contain, whether they can be disaggregated, and what each leg is sent.

A body is split into its top-level fields and those stay the client's bytes: an engine reads each number and string
as the client wrote it.

The two fields that steer KV transfers are ours alone.  An engine reads JSON with Python's `json`, so a suspicious
body is searched with the same parser, at any depth and through duplicate keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

import msgspec

from ..errors import DisaggError
from ..grants import REQUEST_KEY

FORBIDDEN = ("kv_transfer_params", "ec_transfer_params")
# A key can hide only behind \u escapes of ASCII letters or the underscore: all begin with \u005, 6 or 7.
_ESCAPE = re.compile(rb"\\u00[567]")
SMALL = 8192  # bytes that are searched as they are
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode

# Only a prompt's KV is wanted of the prefill leg: neither more tokens, nor anything about them.
_NOT_FOR_PREFILL = {
    "stream", "stream_options", "stream_interval", "min_tokens", "n", "best_of", "logprobs", "top_logprobs",
    "logprob_token_ids", "return_token_ids", "return_tokens_as_token_ids",
    "seed",  # and vLLM 0.32 on CPUs dies of a seeded prompt that it computes in chunks
}  # fmt: skip
# Each of these, when set, asks for more than one sequence or for more of the prompt than its KV.
_WHOLE = ("use_beam_search", "echo", "prompt_logprobs", "prompt_embeds")


class BadBody(DisaggError):
    """A body that no engine may see; a 400."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Body:
    """A parsed request body."""

    def __init__(self, fields: dict[str, msgspec.Raw], size: int) -> None:
        self._fields = fields
        self.size = size

    def whole(self, chat: bool) -> str:
        """Why one decode instance must serve this alone; empty when the work can be split."""
        fields = self._fields
        for name in _WHOLE:
            if name in fields and bytes(fields[name]) not in (b"null", b"false"):
                return name
        for name in ("n", "best_of"):
            if name in fields and bytes(fields[name]) not in (b"null", b"1"):
                return name
        if bytes(fields.get("max_tokens", b"")) == b"0":
            return "max_tokens"
        if bytes(fields.get("truncate_prompt_tokens", b"")).startswith(b"-"):
            return "truncate_prompt_tokens"  # some versions of vLLM make it depend on max_tokens
        if chat:
            return "" if bytes(fields.get("messages", b"")).startswith(b"[") else "messages"
        return "" if _is_one_prompt(bytes(fields.get("prompt", b""))) else "prompt"

    @property
    def priority(self) -> int:
        """As the client wrote it; what is not a number is for the engine to refuse."""
        try:
            return int(bytes(self._fields.get("priority", b"0")))
        except ValueError:
            return 0

    def plain(self) -> bytes:
        """For an engine that serves this alone."""
        return _encode(self._fields)

    def prefill(self, chat: bool, grant: str) -> bytes:
        """For the prefill leg: the same prompt, one token, no stream."""
        fields: dict[str, object] = {k: v for k, v in self._fields.items() if k not in _NOT_FOR_PREFILL}
        fields["max_tokens"] = 1
        if chat and "max_completion_tokens" in fields:
            fields["max_completion_tokens"] = 1
        fields["stream"] = False
        return _with_grant(fields, grant)

    def decode(self, grant: str) -> bytes:
        """For the decode leg: everything as the client asked."""
        return _with_grant(self._fields, grant)


def parse(raw: bytes) -> Body:
    """A body from its bytes, or BadBody."""
    try:
        fields = _decode(raw)
        if _may_hide(raw) if len(raw) < SMALL else _large_may_hide(fields):
            json.loads(raw, object_pairs_hook=_check)
    except BadBody:
        raise
    except msgspec.ValidationError:
        raise BadBody("the request's body must be a JSON object") from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadBody(f"the request's body is not valid JSON: {error}") from None
    return Body(fields, len(raw))


def _may_hide(text: bytes) -> bool:
    """Whether a forbidden key may be in here.  One byte is found much faster than two, and most bodies have no escapes."""
    return b"_transfer_params" in text or (b"\\" in text and b"\\u00" in text and bool(_ESCAPE.search(text)))


def _large_may_hide(fields: Mapping[str, msgspec.Raw]) -> bool:
    """The same, for what the parser has made of a body: no key is within a string, and the long things are strings."""
    if not fields.keys().isdisjoint(FORBIDDEN):
        return True
    return any(_may_hide(bytes(value)) for value in fields.values() if memoryview(value)[0] in b"{[")


def _check(pairs: list[tuple[str, object]]) -> None:
    for name, _ in pairs:
        if name in FORBIDDEN:
            raise BadBody(f"`{name}` is set by the proxy; a client must not send it", name)


def _with_grant(fields: Mapping[str, object], grant: str) -> bytes:
    return _encode({**fields, "kv_transfer_params": {REQUEST_KEY: grant}})


def _is_one_prompt(prompt: bytes) -> bool:
    """A text, or a flat list of token ids."""
    return prompt.startswith(b'"') or (prompt.startswith(b"[") and prompt[1:].lstrip()[:1].isdigit())
