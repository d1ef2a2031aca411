"""Request bodies: forbidden fields, whether a request can be split, and the bodies of its legs.

A body is split into its top-level fields, and these stay the client's bytes: an engine reads each
number and string as the client wrote it.

Only the proxy may set the two fields that steer KV transfers (`FORBIDDEN`). An engine reads JSON
with Python's `json`, so they are searched at any depth, behind duplicate keys, and in every JSON
spelling of a key. `null` is allowed: it is their value without a transfer.

A large body is parsed in a thread, so that others are served meanwhile. A call of C holds Python's
lock there, so none may take long: text is searched in slices, and a body of too many fields is
refused while it is parsed.
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
from ...fleet.grants import WHOLE_KEY
from ..http.endpoint_schema import COMPLETIONS, EndpointSchema
from ..routing.fleet import Instance
from ..routing.policies import RoutingQuery
from ..routing.prefixes import PromptPrefix

PARAMS = "kv_transfer_params"
FORBIDDEN = (PARAMS, "ec_transfer_params")
# An escaped key has \u escapes of ASCII letters or the underscore: all begin with \u005, 6 or 7.
_ESCAPE = re.compile(rb"\\u00[567]")
# Of `output_mode`: token ids or their text. Others are parsed as chats are (vLLM 0.33).
_UNPARSED_OUTPUT = (b"null", b'"tokens"', b'"text"')
SMALL_BYTES = 8192  # a smaller body is searched as a whole, a larger one field by field
MAX_FIELDS = 1000
MAX_DIGITS = 64  # digits of a number that are read
FEW_FIELDS_BYTES = 64 * 1024  # a smaller body has so few fields that parsing them all is quick
LARGE_BYTES = 1024 * 1024  # a larger body is parsed in a thread
SLICE_BYTES = 1024 * 1024  # searched in one call: some 20 ms at worst
# An id that fits a header and a line of a log.
_REQUEST_ID = re.compile(rb'"([!#-\[\]-~]{1,128})"')
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_text = msgspec.json.Decoder(str).decode
_encode = msgspec.json.Encoder().encode
parser_thread = ThreadPoolExecutor(1, "bodies")
T = TypeVar("T")


def _spellings(name: str) -> str:
    """Returns a pattern of all JSON spellings of a name."""
    codes = [
        "".join(f"[{c}{c.upper()}]" if c.isalpha() else c for c in f"{ord(letter):02x}")
        for letter in name
    ]
    return "".join(rf"(?:{letter}|\\u00{code})" for letter, code in zip(name, codes, strict=True))


_KEY = re.compile(f'"(?:{"|".join(map(_spellings, FORBIDDEN))})"'.encode())
MAX_KEY_BYTES = 2 + 6 * max(map(len, FORBIDDEN))
_VALUE = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*(null)?")
# RFC 2231's extended names, in parts (name*0=) or with a charset (name*=). Some versions of
# python-multipart join them.
_EXTENDED_NAME = re.compile(rb"\*(?<=[;\s\x1c-\x1f\x85\xa0](?i:name)\*)[0-9=\s\x1c-\x1f\x85\xa0]")
MAX_NAME_BYTES = len(";name*0")


class BadBody(DisaggError):
    """A body that no engine may get; answered with 400.  `param`: the offending field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class Body:
    """The parsed body of a request to a generating endpoint."""

    def __init__(self, fields: dict[str, msgspec.Raw], size: int, schema: EndpointSchema) -> None:
        """`fields`: top-level fields as JSON.  `size`: bytes of the body."""
        self._fields = fields
        self._schema = schema
        self._sampling = fields  # the object with the sampling parameters
        self.size = size
        if schema.nested:
            try:
                self._sampling = _fields(bytes(fields.get(schema.nested, b"{}")))
            except msgspec.DecodeError:
                self._sampling = {}
        # Whether the first token is the whole answer, whatever the API server, so P may give it.
        self.one_token = self._asks_one_token()

    @property
    def aggregated_reason(self) -> str:
        """The field because of which one decode instance must serve this alone; "": none."""
        return self._schema.why_whole(self._fields, self._sampling)

    @property
    def has_several_choices(self) -> bool:
        """Whether its answer may have several choices, for several samples or prompts."""
        return self._schema.has_several_choices(self._fields, self._sampling)

    @property
    def uses_beam_search(self) -> bool:
        """Whether its answer is the best of several that the engine has begun."""
        return self._schema.uses_beam_search(self._fields, self._sampling)

    @property
    def may_end_unseen(self) -> bool:
        """Whether a stream of its answer may hide that the engine has aborted a part of it."""
        return self.has_several_choices or self.uses_beam_search

    @property
    def has_previous_response(self) -> bool:
        """Whether it continues a response, which one instance alone has stored."""
        given = bytes(self._fields.get("previous_response_id", b"null")) != b"null"
        return given and self._schema.stores  # other endpoints have no such field

    def _asks_one_token(self) -> bool:
        is_parsed = bytes(self._fields.get("output_mode", b"null")) not in _UNPARSED_OUTPUT
        if is_parsed or not self._schema.unparsed:
            return False
        # vLLM's two runners draw other random numbers from a seed. On a CPU one of them ends its
        # engine by a seeded prompt that it computes in chunks, so that a P never gets the seed.
        if self._is_seeded and not self._is_greedy:
            return False
        # The last of these fields that is set counts.
        for name in reversed(self._schema.caps):
            cap = bytes(self._sampling.get(name, b"null"))
            if cap != b"null":
                return cap == b"1"
        return False

    @property
    def reproducible(self) -> bool:
        """Whether an equal request gets an equal answer.

        Without a temperature the model's own default holds, which the proxy cannot see.
        """
        return self._is_seeded or self._is_greedy

    @property
    def _is_seeded(self) -> bool:
        return bytes(self._sampling.get("seed", b"null")) != b"null"

    @property
    def begins_with_prefill_token(self) -> bool:
        """Whether the answer is a stream that must begin with P's first token as plain text."""
        return self._is_greedy and self._schema.begins_with_prefill_token(self._fields)

    @property
    def _is_greedy(self) -> bool:
        """Whether each token is the most probable one."""
        temperature = memoryview(self._sampling.get("temperature", b"1"))[:MAX_DIGITS]
        try:
            return float(bytes(temperature)) == 0
        except ValueError:
            return False

    @property
    def model(self) -> str:
        """The model's name; "" if it is no string."""
        try:
            return _decode_text(self._fields.get("model", b'""'))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return ""

    @property
    def request_id(self) -> bytes:
        """The client's id of the request; empty if there is none, or no plain one."""
        given = _REQUEST_ID.fullmatch(self._fields.get("request_id", b""))
        return given[1] if given else b""

    def routing_query(self, session: bytes, with_prefix: bool) -> RoutingQuery:
        """Returns the facts that decide which instances serve this request."""
        schema = self._schema
        prompt = memoryview(self._fields.get(schema.prompt, b""))
        query = RoutingQuery(len(prompt), session=session, model=self.model)
        if with_prefix:
            salt = b"\0".join([bytes(self._fields.get(name, b"")) for name in schema.before])
            query.prefix = PromptPrefix(prompt, salt)
        return query

    @property
    def priority(self) -> int:
        """The client's priority; 0 if it is no number, which the engine refuses."""
        given = self._fields.get("priority")
        if given is None:
            return 0
        try:
            return int(bytes(memoryview(given)[:MAX_DIGITS]))
        except ValueError:
            return 0

    def aggregated_body(self) -> bytes:
        """Returns the JSON for an engine that serves this request alone."""
        return _encode(self._fields)

    def prefill_body(self, params: Mapping[str, object]) -> bytes:
        """Returns the JSON of the prefill leg: the same prompt, one token, no stream."""
        schema = self._schema
        fields: dict[str, object] = {k: v for k, v in self._fields.items() if k not in schema.drop}
        sampling = fields
        if schema.nested:
            sampling = {k: v for k, v in self._sampling.items() if k not in schema.drop}
            fields[schema.nested] = sampling
        for position, name in enumerate(schema.caps):
            if position == 0 or name in sampling:
                sampling[name] = 1
        fields["stream"] = False
        if schema.stores:
            fields["store"] = False
        fields[PARAMS] = {**dict.fromkeys(schema.extra, True), **params}
        return _encode(fields)

    def decode_body(self, params: object) -> bytes:
        """Returns the JSON of the decode leg: everything as the client asked."""
        return _encode({**self._fields, PARAMS: params})


def whole_body(body: Body, instance: Instance) -> bytes:
    """Returns the JSON for an instance that serves the request alone.

    An engine with our connector warns of requests without parameters: of other ones than these.
    """
    return body.decode_body({WHOLE_KEY: True}) if instance.engine else body.aggregated_body()


async def parse_async(raw: bytes, schema: EndpointSchema = COMPLETIONS) -> Body:
    """Parses a body, in a thread if it is large; raises BadBody."""
    if len(raw) > LARGE_BYTES:
        return await _in_thread(parse, raw, schema)
    return parse(raw, schema)


def parse(raw: bytes, schema: EndpointSchema = COMPLETIONS) -> Body:
    """Parses a body; raises BadBody."""
    try:
        _check_utf8(raw)
        fields = _fields(raw)
        if name := _forbidden_field(raw, fields):
            raise BadBody(f"`{name}` is set by the proxy; a client must not send it", name)
        return Body(fields, len(raw), schema)
    except msgspec.ValidationError:
        raise BadBody("the request's body must be a JSON object") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadBody(f"the request's body is not valid JSON: {error}") from None


async def check_json(raw: bytes) -> Body:
    """Parses a body that is forwarded unchanged, if there is one; raises BadBody."""
    return await parse_async(raw or b"{}")


async def check_form(content_type: bytes, raw: bytes) -> None:
    """Raises BadBody for a form that may carry a forbidden field.

    vLLM parses the form's `vllm_xargs` as JSON, which may contain those fields.
    """
    if len(raw) > LARGE_BYTES:
        extended = await _in_thread(_has_extended_name, raw)
    else:
        extended = _has_extended_name(raw)
    # In another charset the bytes of the name would differ.
    if extended or b"vllm_xargs" in raw or b"charset" in content_type.lower():
        raise BadBody(
            "`vllm_xargs`, a charset and names as in RFC 2231 cannot be sent with a form",
            "vllm_xargs",
        )


async def _in_thread(work: Callable[..., T], *args: object) -> T:
    return await asyncio.get_running_loop().run_in_executor(parser_thread, work, *args)


class _FieldName(enum.Enum):
    """The name of a field.

    The parser looks each name up here, so that parsing can end at the first name too many.
    """

    NONE = ""

    @classmethod
    def _missing_(cls, value: object) -> Self:
        _parsed.field_count += 1
        if _parsed.field_count > MAX_FIELDS:
            raise ValueError(f"more than {MAX_FIELDS} fields")
        name = object.__new__(cls)
        name._value_ = value
        name._name_ = str(value)
        return name


_parsed = threading.local()  # field_count: names seen in the body that is being parsed
_decode_few = msgspec.json.Decoder(dict[_FieldName, msgspec.Raw]).decode


def _fields(raw: bytes) -> dict[str, msgspec.Raw]:
    """Returns the top-level fields of a JSON object; raises BadBody for too many."""
    if len(raw) <= FEW_FIELDS_BYTES:
        fields = _decode(raw)
        too_many = len(fields) > MAX_FIELDS
    else:
        _parsed.field_count = 0
        try:
            fields = {str(name.value): value for name, value in _decode_few(raw).items()}
        except msgspec.ValidationError:
            if _parsed.field_count <= MAX_FIELDS:
                raise
        too_many = _parsed.field_count > MAX_FIELDS
    if too_many:
        raise BadBody(f"the request's body has more than {MAX_FIELDS} fields")
    return fields


def _check_utf8(raw: bytes) -> None:
    """Raises UnicodeDecodeError for bytes that are no UTF-8.

    Python's json accepts surrogates, and an engine fails with them later.
    """
    if raw.isascii():
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    for begin in range(0, len(raw), SLICE_BYTES):
        decoder.decode(raw[begin : begin + SLICE_BYTES])
    decoder.decode(b"", final=True)


def _forbidden_field(raw: bytes, fields: Mapping[str, msgspec.Raw]) -> str | None:
    """Returns the name of a field that only the proxy may set, or None."""
    # Of a duplicate key `fields` has the last value only, so the whole body is searched then.
    if len(raw) < SMALL_BYTES or not fields.keys().isdisjoint(FORBIDDEN):
        return _first_forbidden_key(raw)
    # Strings have no keys in them, and most long values are strings.
    for value in fields.values():
        if memoryview(value)[0] in b"{[":
            hidden = _first_forbidden_key(bytes(value))
            if hidden:
                return hidden
    return None


def _first_forbidden_key(json: bytes) -> str | None:
    """Returns the first forbidden key of valid JSON, in any spelling, whose value is not null."""
    if not _may_have_forbidden_key(json):
        return None
    for found in _search_slices(_KEY, json, MAX_KEY_BYTES):
        value = _VALUE.match(json, found.end())
        if value and not value[1]:  # no match: a string value, no key; group 1: null
            return _decode_text(found[0])
    return None


def _may_have_forbidden_key(json: bytes) -> bool:
    """Whether a forbidden key is possible.

    One byte is found much faster than two, and most bodies have no escapes.
    """
    if b"_transfer_params" in json:
        return True
    if b"\\" not in json or b"\\u00" not in json:
        return False
    return any(True for _ in _search_slices(_ESCAPE, json, len("\\u005")))


def _has_extended_name(form: bytes) -> bool:
    return any(True for _ in _search_slices(_EXTENDED_NAME, form, MAX_NAME_BYTES))


def _search_slices(
    pattern: re.Pattern[bytes], text: bytes, max_match_bytes: int
) -> Iterator[re.Match[bytes]]:
    """Yields matches of at most `max_match_bytes`, some of them twice."""
    for begin in range(0, len(text), SLICE_BYTES):
        # Slices overlap, so that no match is lost at their border.
        yield from pattern.finditer(text, begin, begin + SLICE_BYTES + max_match_bytes)
