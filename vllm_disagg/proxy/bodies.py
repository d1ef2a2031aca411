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
from .dialects import COMPLETIONS, Dialect
from .policies import Ask
from .prefixes import Prefix

PARAMS = "kv_transfer_params"
FORBIDDEN = (PARAMS, "ec_transfer_params")
# A key can hide only behind \u escapes of ASCII letters or the underscore: all begin with \u005, 6 or 7.
_ESCAPE = re.compile(rb"\\u00[567]")
SMALL = 8192  # bytes that are searched as they are
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode


class BadBody(DisaggError):
    """A body that no engine may see; a 400."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Body:
    """A parsed request body of an endpoint."""

    def __init__(self, fields: dict[str, msgspec.Raw], size: int, dialect: Dialect) -> None:
        self._fields = fields
        self._dialect = dialect
        self._sampling = fields
        self.size = size
        if dialect.nested:
            try:
                self._sampling = _decode(fields.get(dialect.nested, b"{}"))
            except msgspec.DecodeError:
                self._sampling = {}

    @property
    def whole(self) -> str:
        """Why one decode instance must serve this alone; empty when the work can be split."""
        return self._dialect.why_whole(self._fields, self._sampling)

    @property
    def refers(self) -> bool:
        """Whether it goes on from something that one instance remembers."""
        return bytes(self._fields.get("previous_response_id", b"null")) != b"null"

    @property
    def one_token(self) -> bool:
        """Whether the answer is over when the prompt is computed, and P may give it."""
        if self._dialect.stores and bytes(self._fields.get("store", b"null")) != b"false":
            return False  # it is looked up at decode instances
        for name in reversed(self._dialect.caps):  # the last one that is set counts
            if (cap := bytes(self._sampling.get(name, b"null"))) != b"null":
                return cap == b"1"
        return False

    @property
    def reproducible(self) -> bool:
        """Whether the same request gets the same answer.  Without a temperature the model's own default holds, which
        is not known here."""
        if bytes(self._sampling.get("seed", b"null")) != b"null":
            return True
        try:
            return float(bytes(self._sampling.get("temperature", b"1"))) == 0
        except ValueError:
            return False

    @property
    def model(self) -> str:
        try:
            return msgspec.json.decode(self._fields.get("model", b'""'), type=str)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return ""

    def ask(self, session: bytes, with_prefix: bool) -> Ask:
        """What a choice of instances needs to know of this request."""
        prompt = memoryview(self._fields.get(self._dialect.prompt, b""))
        ask = Ask(len(prompt), session=session, model=self.model)
        if with_prefix:
            salt = b"\0".join(bytes(self._fields.get(name, b"")) for name in self._dialect.before)
            ask.prefix = Prefix(prompt, salt)
        return ask

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

    def prefill(self, params: Mapping[str, object]) -> bytes:
        """For the prefill leg: the same prompt, one token, no stream."""
        dialect = self._dialect
        fields: dict[str, object] = {k: v for k, v in self._fields.items() if k not in dialect.drop}
        sampling = fields
        if dialect.nested:
            sampling = {k: v for k, v in self._sampling.items() if k not in dialect.drop}
            fields[dialect.nested] = sampling
        for at, name in enumerate(dialect.caps):
            if at == 0 or name in sampling:
                sampling[name] = 1
        fields["stream"] = False
        if dialect.stores:
            fields["store"] = False
        return _encode({**fields, PARAMS: {**dict.fromkeys(dialect.extra, True), **params}})

    def decode(self, params: object) -> bytes:
        """For the decode leg: everything as the client asked."""
        return _encode({**self._fields, PARAMS: params})


def parse(raw: bytes, dialect: Dialect = COMPLETIONS) -> Body:
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
    return Body(fields, len(raw), dialect)


def check(raw: bytes) -> str:
    """Refuse what only the proxy may send, in a body that is passed on as it is; the model it is for, if it says so."""
    return parse(raw).model if raw else ""


def check_form(kind: bytes, raw: bytes) -> None:
    """The same for a form: vLLM reads `vllm_xargs` there as JSON, which may hold what FORBIDDEN names."""
    if b"vllm_xargs" in raw or b"charset" in kind.lower():  # in another charset the name would look otherwise
        raise BadBody("`vllm_xargs` and a charset cannot be sent with a form", "vllm_xargs")


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
