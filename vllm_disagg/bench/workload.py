"""What the requests of a benchmark look like: lengths and arrivals, from a trace or drawn at random; pure but for
reading the trace.

Formats, told by their first line:
  Mooncake / Alibaba JSONL   {"timestamp", "input_length", "output_length", "hash_ids"}: milliseconds with 512 tokens
                             to a hash id, or seconds with 16; hash_ids may be left out
  Azure CSV                  TIMESTAMP (date and time), ContextTokens, GeneratedTokens
  lengths CSV                arrival_s, input_tokens, output_tokens
"""

from __future__ import annotations

import csv
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from ..errors import ConfigError

FORMATS = "Mooncake JSONL, Azure CSV (TIMESTAMP,ContextTokens,GeneratedTokens), or arrival_s,input_tokens,output_tokens"
MOONCAKE, ALIBABA = 512, 16  # tokens that a hash id stands for
WHOLE = 1 << 24  # a hash id for a whole prompt: longer than any
# ShareGPT's lengths as DistServe used them (means 755.5 and 200.3 tokens, prompt and answer together below 2048):
# independent lognormals, sigma 1, drawn again until they fit; these `mu` give those means then.
SHAREGPT_MU, SHAREGPT_LIMIT = (6.8052, 4.9404), 2048


class Request(msgspec.Struct, frozen=True):
    arrival: float  # seconds since the trace's first
    prompt: int  # tokens
    answer: int  # tokens
    hash_ids: tuple[int, ...] = ()  # equal ids are equal tokens; none: a prompt of its own


class Workload(msgspec.Struct, frozen=True):
    requests: tuple[Request, ...]
    block: int = WHOLE  # tokens that a hash id stands for

    def fitting(self, limit: int | None) -> Workload:
        """Without the requests that are longer than the model takes."""
        kept = tuple(r for r in self.requests if limit is None or r.prompt + r.answer <= limit)
        return Workload(kept, self.block)

    def first(self, count: int) -> Workload:
        return Workload(self.requests[:count], self.block)

    def at_once(self) -> Workload:
        return Workload(tuple(msgspec.structs.replace(r, arrival=0.0) for r in self.requests), self.block)

    def at_rate(self, rate: float, seed: int | None) -> Workload:
        """The same requests at `rate` a second over the whole run: Poisson arrivals drawn from `seed`, the same at
        every rate but for the scale; None: the trace's own arrivals, scaled."""
        if seed is None:
            times = [r.arrival for r in self.requests]
        else:
            chance, times = random.Random(seed), [0.0]
            for _ in self.requests[1:]:
                times.append(times[-1] + chance.expovariate(1.0))
        span = times[-1] - times[0]
        scale = (len(times) - 1) / rate / span if span else 0.0
        moved = (
            msgspec.structs.replace(r, arrival=(t - times[0]) * scale)
            for r, t in zip(self.requests, times, strict=True)
        )
        return Workload(tuple(moved), self.block)

    def lines(self) -> Iterator[str]:
        """The file that `vllm bench serve --dataset-name timed_trace` reads; timestamps in seconds."""
        for number, r in enumerate(self.requests):
            ids = r.hash_ids or _own_ids(number, r.prompt, self.block)
            line = {"timestamp": r.arrival, "input_length": r.prompt, "output_length": r.answer, "hash_ids": ids}
            yield json.dumps(line) + "\n"


def _own_ids(number: int, tokens: int, block: int) -> list[int]:
    """Ids that nobody else has; a trace's own are not negative."""
    return [-(number * WHOLE + at + 1) for at in range(math.ceil(tokens / block))]


def fixed(prompt: int, answer: int, count: int) -> Workload:
    return Workload((Request(0.0, prompt, answer),) * count)


def sharegpt_like(count: int, seed: int) -> Workload:
    chance = random.Random(seed)

    def draw() -> Request:
        while True:
            prompt, answer = (max(1, round(chance.lognormvariate(mu, 1.0))) for mu in SHAREGPT_MU)
            if prompt + answer < SHAREGPT_LIMIT:
                return Request(0.0, prompt, answer)

    return Workload(tuple(draw() for _ in range(count)))


def read(path: str) -> Workload:
    """A trace, or ConfigError that names the line and the field."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--trace {path}: {getattr(error, 'strerror', None) or 'it is not text'}") from None
    if not lines or not lines[0].strip():
        raise ConfigError(f"--trace {path}: it is empty; it can be {FORMATS}")
    header = [name.strip() for name in lines[0].split(",")]
    if lines[0].lstrip().startswith("{"):
        return _jsonl(path, lines)
    for names, seconds in (AZURE, LENGTHS):
        if set(names) <= set(header):
            return Workload(_sorted(path, _csv(path, lines, names, seconds)))
    raise ConfigError(f"--trace {path}: its first line is of no format known here; it can be {FORMATS}")


def _sorted(path: str, requests: Iterable[Request]) -> tuple[Request, ...]:
    """By arrival, the first at 0."""
    ordered = sorted(requests, key=lambda r: r.arrival)
    if not ordered:
        raise ConfigError(f"--trace {path}: it holds no requests")
    return tuple(msgspec.structs.replace(r, arrival=r.arrival - ordered[0].arrival) for r in ordered)


def _csv(path: str, lines: list[str], names: tuple[str, ...], seconds: Callable[[str], float]) -> Iterator[Request]:
    for number, row in enumerate(csv.DictReader(lines, skipinitialspace=True), start=2):
        where = f"--trace {path}, line {number}"
        time, prompt, answer = (row.get(name) for name in names)
        if not time or not prompt or not answer:
            missing = next(name for name in names if not row.get(name))
            raise ConfigError(f"{where}: {missing} is missing")
        try:
            arrival = seconds(time.strip())
        except ValueError:
            raise ConfigError(f"{where}: {names[0]} is {time}, which is not a time") from None
        yield _checked(where, names, Request(arrival, _whole(where, names[1], prompt), _whole(where, names[2], answer)))


def _whole(where: str, name: str, text: object) -> int:
    try:
        number = float(str(text))
        if number == int(number):
            return int(number)
    except (ValueError, OverflowError):
        pass
    raise ConfigError(f"{where}: {name} is {text}, which is not a whole number")


def _checked(where: str, names: tuple[str, ...], request: Request) -> Request:
    if not math.isfinite(request.arrival) or request.arrival < 0:
        raise ConfigError(f"{where}: {names[0]} is {request.arrival:g}: it must be 0 or more")
    for name, length in zip(names[1:], (request.prompt, request.answer), strict=True):
        if length < 1:
            raise ConfigError(f"{where}: {name} is {length}: it must be 1 or more")
    return request


def _date(text: str) -> float:
    at = datetime.fromisoformat(text)
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _date
LENGTHS = ("arrival_s", "input_tokens", "output_tokens"), float
FIELDS = ("timestamp", "input_length", "output_length")


def _jsonl(path: str, lines: list[str]) -> Workload:
    requests, blocks = [], {MOONCAKE, ALIBABA}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"--trace {path}, line {number}"
        try:
            fields = msgspec.json.decode(line, type=dict[str, object])
        except msgspec.DecodeError:
            raise ConfigError(f"{where}: it is not a JSON object") from None
        request = _record(where, fields)
        if request.hash_ids:
            blocks = {b for b in blocks if math.ceil(request.prompt / b) == len(request.hash_ids)}
            if not blocks:
                words = f"{len(request.hash_ids)} hash_ids for {request.prompt} tokens"
                raise ConfigError(f"{where}: {words}: one id must stand for {MOONCAKE} tokens, or for {ALIBABA}")
        requests.append(request)
    block = max(blocks)  # Mooncake unless the ids say Alibaba
    scale = 1e-3 if block == MOONCAKE else 1.0
    return Workload(_sorted(path, (msgspec.structs.replace(r, arrival=r.arrival * scale) for r in requests)), block)


def _record(where: str, fields: dict[str, object]) -> Request:
    for name in FIELDS:
        if isinstance(fields.get(name), bool) or not isinstance(fields.get(name), int | float):
            missing = "is missing" if name not in fields else f"is {json.dumps(fields[name])}, which is not a number"
            raise ConfigError(f"{where}: {name} {missing}")
    time, prompt, answer = (fields[name] for name in FIELDS)
    ids = fields.get("hash_ids") or []
    if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
        raise ConfigError(f"{where}: hash_ids must be a list of whole numbers of 0 or more")
    arrival = float(time)  # type: ignore[arg-type] # checked above
    return _checked(
        where, FIELDS, Request(arrival, _whole(where, FIELDS[1], prompt), _whole(where, FIELDS[2], answer), tuple(ids))
    )
