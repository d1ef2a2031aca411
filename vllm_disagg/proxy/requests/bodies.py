"""Request bodies: what they may not contain, whether they can be disaggregated, and what each leg
is sent.

A body is split into its top-level fields and those stay the client's bytes: an engine reads each
number and string as the client wrote it.

The two fields that steer KV transfers are ours alone. An engine reads JSON with Python's `json`, so
they are searched at any depth, through duplicate keys, and in every way to write a key. `null` is
what they are without a transfer.

A large body is read in a thread, so that others are served meanwhile. No call of C there, which
holds Python's lock, may last: text is searched in slices, and a body of too many fields is given up
while it is read.
"""

from __future__ import annotations

import asyncio
import codecs
import enum
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Self, TypeVar

import msgspec

from ...errors import DisaggError
from ..http.endpoint_schema import COMPLETIONS, EndpointSchema
from ..routing.policies import RoutingQuery
from ..routing.prefixes import PromptPrefix

PARAMS = "kv_transfer_params"
FORBIDDEN = (PARAMS, "ec_transfer_params")
# A key can hide only behind \u escapes of ASCII letters or the underscore: all begin with \u005, 6
# or 7.
_ESCAPE = re.compile(rb"\\u00[567]")
SMALL_BYTES = 8192  # bytes that are searched as they are
MAX_FIELDS = 1000
MAX_DIGITS = 64  # of a number, that are looked at
FEW_FIELDS_BYTES = 64 * 1024  # less has so few fields that reading them all is quick
LARGE_BYTES = 1024 * 1024  # more is read in a thread
SLICE_BYTES = 1024 * 1024  # searched in one call: some 20 ms at worst
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_encode = msgspec.json.Encoder().encode
_reader = ThreadPoolExecutor(1, "bodies")
T = TypeVar("T")


def _written(name: str) -> str:
    """A pattern of all ways to write a name in JSON."""
    codes = [
        "".join(f"[{c}{c.upper()}]" if c.isalpha() else c for c in f"{ord(letter):02x}")
        for letter in name
    ]
    return "".join(rf"(?:{letter}|\\u00{code})" for letter, code in zip(name, codes, strict=True))


_KEY = re.compile(f'"(?:{"|".join(map(_written, FORBIDDEN))})"'.encode())
MAX_KEY_BYTES = 2 + 6 * max(map(len, FORBIDDEN))
_VALUE = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*(null)?")
# RFC 2231's names, in parts or in a charset, which some versions of python-multipart put together:
# name*0=, name*=.
_EXTENDED_NAME = re.compile(rb"\*(?<=[;\s\x1c-\x1f\x85\xa0](?i:name)\*)[0-9=\s\x1c-\x1f\x85\xa0]")
MAX_NAME_BYTES = len(";name*0")


class BadBody(DisaggError):
    """A body that no engine may see; a 400."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Body:
    """A parsed request body of an endpoint."""

    def __init__(self, fields: dict[str, msgspec.Raw], size: int, dialect: EndpointSchema) -> None:
        self._fields = fields
        self._dialect = dialect
        self._sampling = fields
        self.size = size
        if dialect.nested:
            try:
                self._sampling = _fields(bytes(fields.get(dialect.nested, b"{}")))
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
        """Whether the same request gets the same answer. Without a temperature the model's own
        default holds, which is not known here.
        """
        if bytes(self._sampling.get("seed", b"null")) != b"null":
            return True
        try:
            return (
                float(bytes(memoryview(self._sampling.get("temperature", b"1"))[:MAX_DIGITS])) == 0
            )
        except ValueError:
            return False

    @property
    def model(self) -> str:
        try:
            return msgspec.json.decode(self._fields.get("model", b'""'), type=str)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return ""

    def ask(self, session: bytes, with_prefix: bool) -> RoutingQuery:
        """What a choice of instances needs to know of this request."""
        prompt = memoryview(self._fields.get(self._dialect.prompt, b""))
        ask = RoutingQuery(len(prompt), session=session, model=self.model)
        if with_prefix:
            salt = b"\0".join(bytes(self._fields.get(name, b"")) for name in self._dialect.before)
            ask.prefix = PromptPrefix(prompt, salt)
        return ask

    @property
    def priority(self) -> int:
        """As the client wrote it; what is not a number is for the engine to refuse."""
        try:
            return int(bytes(memoryview(self._fields.get("priority", b"0"))[:MAX_DIGITS]))
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


async def parsed(raw: bytes, dialect: EndpointSchema = COMPLETIONS) -> Body:
    """A body from its bytes, or BadBody."""
    return await _apart(parse, raw, dialect) if len(raw) > LARGE_BYTES else parse(raw, dialect)


def parse(raw: bytes, dialect: EndpointSchema = COMPLETIONS) -> Body:
    """The same, at once."""
    try:
        _check_utf8(raw)
        fields = _fields(raw)
        if name := _forbidden(raw, fields):
            raise BadBody(f"`{name}` is set by the proxy; a client must not send it", name)
        return Body(fields, len(raw), dialect)
    except msgspec.ValidationError:
        raise BadBody("the request's body must be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadBody(f"the request's body is not valid JSON: {error}") from None


async def check(raw: bytes) -> str:
    """Refuse what only the proxy may send, in a body that is passed on as it is; the model it is
    for, if it says so.
    """
    return (await parsed(raw)).model if raw else ""


async def check_form(kind: bytes, raw: bytes) -> None:
    """The same for a form: vLLM reads `vllm_xargs` there as JSON, which may hold what FORBIDDEN
    names.
    """
    extended = (
        await _apart(_has_extended_name, raw) if len(raw) > LARGE_BYTES else _has_extended_name(raw)
    )
    if (
        extended or b"vllm_xargs" in raw or b"charset" in kind.lower()
    ):  # in another charset the name would look otherwise
        raise BadBody(
            "`vllm_xargs`, a charset and names as in RFC 2231 cannot be sent with a form",
            "vllm_xargs",
        )


async def _apart(work: Callable[..., T], *args: object) -> T:
    return await asyncio.get_running_loop().run_in_executor(_reader, work, *args)


class _FieldName(enum.Enum):
    """The name of a field, made while a body is read, so that reading ends at one too many."""

    NONE = ""

    @classmethod
    def _missing_(cls, value: object) -> Self:
        _made.names += 1
        if _made.names > MAX_FIELDS:
            raise ValueError(f"more than {MAX_FIELDS} fields")
        name = object.__new__(cls)
        name._value_, name._name_ = value, str(value)
        return name


_made = threading.local()  # how many
_decode_few = msgspec.json.Decoder(dict[_FieldName, msgspec.Raw]).decode


def _fields(raw: bytes) -> dict[str, msgspec.Raw]:
    """The top-level fields of a body."""
    if len(raw) <= FEW_FIELDS_BYTES:
        fields = _decode(raw)
        too_many = len(fields) > MAX_FIELDS
    else:
        _made.names = 0
        try:
            fields = {str(name.value): value for name, value in _decode_few(raw).items()}
        except msgspec.ValidationError:
            if _made.names <= MAX_FIELDS:
                raise
        too_many = _made.names > MAX_FIELDS
    if too_many:
        raise BadBody(f"the request's body has more than {MAX_FIELDS} fields")
    return fields


def _check_utf8(raw: bytes) -> None:
    """UnicodeDecodeError for what is not: Python's json lets surrogates pass, and an engine fails
    of them later.
    """
    if raw.isascii():
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    for at in range(0, len(raw), SLICE_BYTES):
        decoder.decode(raw[at : at + SLICE_BYTES])
    decoder.decode(b"", final=True)


def _forbidden(raw: bytes, fields: Mapping[str, msgspec.Raw]) -> str | None:
    """The name of a field that only the proxy may set."""
    if len(raw) < SMALL_BYTES or not fields.keys().isdisjoint(
        FORBIDDEN
    ):  # given twice, `fields` has the last one only
        return _key_in(raw)
    for value in fields.values():  # no key is within a text, and the long things are texts
        if memoryview(value)[0] in b"{[" and (hidden := _key_in(bytes(value))):
            return hidden
    return None


def _key_in(text: bytes) -> str | None:
    """The first such key in valid JSON, however written, with another value than null."""
    if not _may_hide(text):
        return None
    for found in _search(_KEY, text, MAX_KEY_BYTES):
        value = _VALUE.match(text, found.end())
        if value and not value[1]:  # else it is no key, or null
            return msgspec.json.decode(found[0], type=str)
    return None


def _may_hide(text: bytes) -> bool:
    """Whether a forbidden key may be in here. One byte is found much faster than two, and most
    bodies have no escapes.
    """
    if b"_transfer_params" in text:
        return True
    return (
        b"\\" in text
        and b"\\u00" in text
        and any(True for _ in _search(_ESCAPE, text, len("\\u005")))
    )


def _has_extended_name(text: bytes) -> bool:
    return any(True for _ in _search(_EXTENDED_NAME, text, MAX_NAME_BYTES))


def _search(pattern: re.Pattern[bytes], text: bytes, longest: int) -> Iterator[re.Match[bytes]]:
    """Matches of at most `longest` bytes, some of them twice."""
    for at in range(0, len(text), SLICE_BYTES):
        yield from pattern.finditer(text, at, at + SLICE_BYTES + longest)
