"""Published request traces: lengths, arrival times, shared prefixes.

A file is JSON lines, one JSON array or CSV with a header, optionally compressed with gzip. Its
first record selects one of TRACE_FORMATS. Every field of every record is checked.
"""

from __future__ import annotations

import csv
import gzip
import json
import math
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..errors import ConfigError

# Tokens that a hash id stands for. Mooncake's times are milliseconds, Alibaba's seconds.
MOONCAKE_BLOCK_TOKENS = 512
ALIBABA_BLOCK_TOKENS = 16
MAX_LENGTH = 1 << 31  # tokens of a prompt or an answer
GZIP_MAGIC = b"\x1f\x8b"


class TraceFormat(NamedTuple):
    """Field names of a trace format."""

    time: str  # seconds or a date; empty: the format has no times
    prompt: str
    answer: str
    ids: str = ""

    def __str__(self) -> str:
        return ",".join(filter(None, self))


TRACE_FORMATS = (
    # Mooncake, Alibaba; vLLM's timed traces
    TraceFormat("timestamp", "input_length", "output_length", "hash_ids"),
    TraceFormat("TIMESTAMP", "ContextTokens", "GeneratedTokens"),  # Azure
    TraceFormat("arrival_s", "input_tokens", "output_tokens"),  # LLMServingSim's lengths
    TraceFormat("start_time", "prompt_len", "output_len"),  # DistServe
    TraceFormat("", "num_prefill_tokens", "num_decode_tokens"),  # Vidur
)
ACCEPTED_FORMATS = (
    "JSON lines, a JSON array or CSV (also .gz) with the fields"
    f" {'; or '.join(map(str, TRACE_FORMATS))}"
)


class TraceRequest(msgspec.Struct, frozen=True):
    """One request of a trace."""

    arrival: float  # seconds after the trace's first; 0 where the trace has no times
    prompt: int  # tokens
    answer: int  # tokens
    hash_ids: tuple[int, ...] = ()  # equal ids are equal tokens; none: a prompt of its own
    # Of the blocks behind the prompt's last whole one that hold KV when its answer has ended; known
    # where a later turn of the conversation has them.
    answer_ids: tuple[int, ...] = ()


class Trace(msgspec.Struct, frozen=True):
    """Requests in order of arrival, one or more."""

    requests: tuple[TraceRequest, ...]
    block: int = MOONCAKE_BLOCK_TOKENS  # tokens that a hash id stands for
    timed: bool = True


def read(path: str, flag: str) -> Trace:
    """Reads a trace. Raises ConfigError with the flag, the file, the line and the field."""
    where = f"{flag} {path}"
    names, records = _records(where, _text(where, path))
    form = next((f for f in TRACE_FORMATS if f.prompt in names or f.answer in names), None)
    if not form:
        raise ConfigError(
            f"{where}: the format of its first line is not known; accepted: {ACCEPTED_FORMATS}"
        )
    requests = []
    chats = []
    blocks = {MOONCAKE_BLOCK_TOKENS, ALIBABA_BLOCK_TOKENS}
    for place, record in records:
        request = _request(f"{where}, {place}", record, form)
        if request.hash_ids:
            blocks = {b for b in blocks if math.ceil(request.prompt / b) == len(request.hash_ids)}
            if not blocks:
                found = f"{len(request.hash_ids)} {form.ids} for {request.prompt} tokens"
                raise ConfigError(
                    f"{where}, {place}: {found}: one id must stand for"
                    f" {MOONCAKE_BLOCK_TOKENS} tokens, or for {ALIBABA_BLOCK_TOKENS}"
                )
        requests.append(request)
        chats.append(_chat(record) if request.hash_ids else _Chat())
    if not requests:
        raise ConfigError(f"{where}: the file holds no requests")
    block = max(blocks)  # Mooncake unless the number of ids shows Alibaba
    unit = 1e-3 if form.ids and block == MOONCAKE_BLOCK_TOKENS else 1.0
    _find_answers(requests, chats, block)
    requests.sort(key=lambda request: request.arrival)
    start = requests[0].arrival
    shifted = []
    for request in requests:
        seconds = (request.arrival - start) * unit
        shifted.append(msgspec.structs.replace(request, arrival=seconds))
    return Trace(tuple(shifted), block, bool(form.time))


def _text(where: str, path: str) -> str:
    """Returns the text of a file, uncompressed. Raises ConfigError if it cannot be read."""
    try:
        raw = Path(path).read_bytes()
        data = gzip.decompress(raw) if raw.startswith(GZIP_MAGIC) else raw
        text = data.decode("utf-8-sig")  # spreadsheets begin a CSV with a byte order mark
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{where}: {getattr(error, 'strerror', None) or 'it is not text'}"
        ) from None
    if not text.strip():
        raise ConfigError(f"{where}: it is empty; it can be {ACCEPTED_FORMATS}")
    return text


def _records(where: str, text: str) -> tuple[Collection[str], Iterable[tuple[str, object]]]:
    """Returns the field names of the first record, and each record with its place."""
    start = text.lstrip()[0]
    if start not in "[{":
        rows = _csv_rows(where, text)
        _, fields = next(rows)
        return fields, rows
    records = _json_lines(where, text) if start == "{" else _json_array(where, text)
    first = next(records, ("", None))
    names = first[1] if isinstance(first[1], dict) else ()
    return names, chain([first], records)


def _csv_rows(where: str, text: str) -> Iterator[tuple[str, dict[str, object]]]:
    """Yields the names of the fields, then each record of CSV with its place."""
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
    number = 1
    try:
        yield "", dict.fromkeys(reader.fieldnames or ())
        for number, row in enumerate(reader, 2):
            yield f"line {number}", row
    except csv.Error as error:
        raise ConfigError(f"{where}, after line {number}: it is not CSV: {error}") from None


def _json_lines(where: str, text: str) -> Iterator[tuple[str, object]]:
    """Yields each record of JSON lines with its place."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            place = f"line {number}"
            yield place, _json(f"{where}, {place}", line, "object")


def _json_array(where: str, text: str) -> Iterator[tuple[str, object]]:
    """Yields each record of a JSON array with its place."""
    found = _json(where, text, "array")
    if isinstance(found, list):
        for number, record in enumerate(found, 1):
            yield f"record {number}", record


def _json(where: str, text: str, kind: str) -> object:
    """Parses JSON. Raises ConfigError with the place of the text and the expected kind."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{where}: it is not a JSON {kind}: {error}") from None


def _request(where: str, record: object, form: TraceFormat) -> TraceRequest:
    """Parses one record. Raises ConfigError with its place and the wrong field."""
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: it is not a JSON object")
    for name in filter(None, form[:3]):
        if record.get(name) in (None, ""):
            raise ConfigError(f"{where}: {name} is missing")
    ids = record.get(form.ids) or []
    if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise ConfigError(f"{where}: {form.ids} must be a list of whole numbers of 0 or more")
    prompt = _length(f"{where}: {form.prompt}", record[form.prompt])
    answer = _length(f"{where}: {form.answer}", record[form.answer])
    arrival = 0.0
    if form.time:
        arrival = _seconds(f"{where}: {form.time}", record[form.time])
    return TraceRequest(arrival, prompt, answer, tuple(ids))


class _Chat(NamedTuple):
    """A request's own id and that of the turn before it, as texts; empty: none."""

    own: str = ""
    parent: str = ""


def _chat(record: object) -> _Chat:
    """Reads Alibaba's ids of a conversation's turns."""
    if not isinstance(record, dict):
        return _Chat()
    found = [record.get(name) for name in ("chat_id", "parent_chat_id")]
    return _Chat(*("" if value is None else str(value) for value in found))


def _find_answers(requests: list[TraceRequest], chats: Sequence[_Chat], block: int) -> None:
    """Sets `answer_ids` where a later turn begins with the same prompt and has room for the answer.

    That prompt is taken to go on with the answer. vLLM computes no KV of an answer's last token.
    """
    numbers = {chat.own: number for number, chat in enumerate(chats) if chat.own}
    for later, chat in zip(tuple(requests), chats, strict=True):
        number = numbers.get(chat.parent)
        if number is None:
            continue
        before = requests[number]
        whole = before.prompt // block
        tokens = before.prompt + before.answer
        if tokens <= later.prompt and before.hash_ids[:whole] == later.hash_ids[:whole]:
            ids = later.hash_ids[whole : (tokens - 1) // block]
            requests[number] = msgspec.structs.replace(before, answer_ids=ids)


def _length(field: str, value: object) -> int:
    """Parses a whole number of 1 or more; CSV holds it as text."""
    number = _number(value)
    if number is None or number != number // 1:
        raise ConfigError(f"{field} is {_shown(value)}, which is not a whole number")
    if number < 1:
        raise ConfigError(f"{field} is {number:.0f}: it must be 1 or more")
    if number > MAX_LENGTH:
        raise ConfigError(f"{field} is {number:g}: it must be {MAX_LENGTH} or less")
    return int(number)


def _seconds(field: str, value: object) -> float:
    """Parses a number of 0 or more, or a date."""
    number = _number(value)
    if number is None and isinstance(value, str):
        with suppress(ValueError):
            date = datetime.fromisoformat(value.strip())
            number = (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()
    if number is None:
        raise ConfigError(f"{field} is {_shown(value)}, which is not a time")
    if not 0 <= number < math.inf:
        raise ConfigError(f"{field} is {number:g}: it must be 0 or more")
    return number


def _number(value: object) -> float | None:
    """Parses a number, or a text that holds one; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    with suppress(ValueError, OverflowError):
        return float(value)
    return None


def _shown(value: object) -> str:
    """Formats a value for an error text, shortened."""
    return value if isinstance(value, str) else json.dumps(value)[:80]
