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
from collections.abc import Collection, Iterable
from contextlib import suppress
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec

from ..errors import ConfigError

MOONCAKE_BLOCK_TOKENS, ALIBABA_BLOCK_TOKENS = (
    512,
    16,
)  # tokens that a hash id stands for; Mooncake's times are milliseconds, Alibaba's seconds
GZIP_MAGIC = b"\x1f\x8b"


class TraceFormat(NamedTuple):
    """Field names of a trace format."""

    time: str  # seconds or a date; empty: it has none
    prompt: str
    answer: str
    ids: str = ""

    def __str__(self) -> str:
        return ",".join(filter(None, self))


TRACE_FORMATS = (
    TraceFormat(
        "timestamp", "input_length", "output_length", "hash_ids"
    ),  # Mooncake, Alibaba; vLLM's timed traces
    TraceFormat("TIMESTAMP", "ContextTokens", "GeneratedTokens"),  # Azure
    TraceFormat("arrival_s", "input_tokens", "output_tokens"),  # LLMServingSim's lengths
    TraceFormat("start_time", "prompt_len", "output_len"),  # DistServe
    TraceFormat("", "num_prefill_tokens", "num_decode_tokens"),  # Vidur
)
ACCEPTED_FORMATS = f"JSON lines, a JSON array or CSV (also .gz) with the fields {'; or '.join(map(str, TRACE_FORMATS))}"


class TraceRequest(msgspec.Struct, frozen=True):
    """One request of a trace."""

    arrival: float  # seconds after the trace's first; 0 where the trace has no times
    prompt: int  # tokens
    answer: int  # tokens
    hash_ids: tuple[int, ...] = ()  # equal ids are equal tokens; none: a prompt of its own


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
            f"{where}: its first line is of no format known here; it can be {ACCEPTED_FORMATS}"
        )
    requests = []
    blocks = {MOONCAKE_BLOCK_TOKENS, ALIBABA_BLOCK_TOKENS}
    for place, record in records:
        request = _request(f"{where}, {place}", record, form)
        if request.hash_ids:
            blocks = {b for b in blocks if math.ceil(request.prompt / b) == len(request.hash_ids)}
            if not blocks:
                words = f"{len(request.hash_ids)} {form.ids} for {request.prompt} tokens"
                raise ConfigError(
                    f"{where}, {place}: {words}: one id must stand for {MOONCAKE_BLOCK_TOKENS} tokens,"
                    f" or for {ALIBABA_BLOCK_TOKENS}"
                )
        requests.append(request)
    if not requests:
        raise ConfigError(f"{where}: it holds no requests")
    block = max(blocks)  # Mooncake unless the ids say Alibaba
    unit = 1e-3 if form.ids and block == MOONCAKE_BLOCK_TOKENS else 1.0
    requests.sort(key=lambda r: r.arrival)
    began = requests[0].arrival
    shifted = (msgspec.structs.replace(r, arrival=(r.arrival - began) * unit) for r in requests)
    return Trace(tuple(shifted), block, bool(form.time))


def _text(where: str, path: str) -> str:
    try:
        raw = Path(path).read_bytes()
        text = (gzip.decompress(raw) if raw.startswith(GZIP_MAGIC) else raw).decode()
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
        reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
        return reader.fieldnames or (), ((f"line {n}", row) for n, row in enumerate(reader, 2))
    if start == "{":
        lines = ((f"line {n}", line) for n, line in enumerate(text.splitlines(), 1) if line.strip())
        records = ((place, _json(f"{where}, {place}", line, "object")) for place, line in lines)
    else:
        found = _json(where, text, "array")
        records = (
            (f"record {n}", record)
            for n, record in enumerate(found if isinstance(found, list) else [], 1)
        )
    first = next(records, ("", None))
    return first[1] if isinstance(first[1], dict) else (), chain([first], records)


def _json(where: str, text: str, kind: str) -> object:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{where}: it is not a JSON {kind}: {error}") from None


def _request(where: str, record: object, form: TraceFormat) -> TraceRequest:
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: it is not a JSON object")
    for name in filter(None, form[:3]):
        if record.get(name) in (None, ""):
            raise ConfigError(f"{where}: {name} is missing")
    ids = record.get(form.ids) or []
    if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise ConfigError(f"{where}: {form.ids} must be a list of whole numbers of 0 or more")
    prompt, answer = (
        _length(f"{where}: {name}", record[name]) for name in (form.prompt, form.answer)
    )
    return TraceRequest(
        _seconds(f"{where}: {form.time}", record[form.time]) if form.time else 0.0,
        prompt,
        answer,
        tuple(ids),
    )


def _length(what: str, value: object) -> int:
    """Parses a whole number of 1 or more; CSV holds it as text."""
    number = _number(value)
    if number is None or number != number // 1:
        raise ConfigError(f"{what} is {_shown(value)}, which is not a whole number")
    if number < 1:
        raise ConfigError(f"{what} is {number:.0f}: it must be 1 or more")
    return int(number)


def _seconds(what: str, value: object) -> float:
    """Parses a number of 0 or more, or a date."""
    number = _number(value)
    if number is None and isinstance(value, str):
        with suppress(ValueError):
            at = datetime.fromisoformat(value.strip())
            number = (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
    if number is None:
        raise ConfigError(f"{what} is {_shown(value)}, which is not a time")
    if not 0 <= number < math.inf:
        raise ConfigError(f"{what} is {number:g}: it must be 0 or more")
    return number


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    with suppress(ValueError, OverflowError):
        return float(value)
    return None


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)[:80]
