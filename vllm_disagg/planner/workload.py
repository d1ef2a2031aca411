"""What is asked of the system: lengths, arrival times and shared prefixes; drawn once for a seed, so that every
placement and every rate meets the same requests (common random numbers).
"""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterator
from datetime import datetime
from itertools import islice, pairwise
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from ..errors import ConfigError

BLOCK = 512  # tokens of a hash id in Mooncake's traces


class Sample(msgspec.Struct, frozen=True):
    """Requests of one seed; `gaps` are the times between arrivals in units of their mean, the first is 0."""

    prompts: list[int]
    outputs: list[int]
    gaps: list[float]
    prefixes: list[list[int]] | None = None  # ids of each prompt's blocks of 512 tokens

    def __len__(self) -> int:
        return len(self.prompts)

    def arrivals(self, rate: float) -> list[float]:
        """Seconds, at `rate` requests/s."""
        now, times = 0.0, []
        for gap in self.gaps:
            now += gap / rate
            times.append(now)
        return times


class Lengths(msgspec.Struct, frozen=True):
    """Log-normal prompts and answers, drawn again while prompt + answer reaches `limit`.

    The location parameters are solved so that the means after truncation are those of the paper.
    """

    prompt: tuple[float, float]
    output: tuple[float, float]
    limit: int = 2048
    cut: tuple[int, int] | None = None  # prompts longer than a uniform draw from here are cut to it

    def draw(self, random: Random) -> tuple[int, int]:
        while True:
            prompt = max(1, round(random.lognormvariate(*self.prompt)))
            output = max(1, round(random.lognormvariate(*self.output)))
            if self.cut:
                prompt = min(prompt, random.randint(*self.cut))
            if prompt + output < self.limit:
                return prompt, output


class Row(msgspec.Struct, frozen=True):
    """A line of a trace; `time` in seconds, None where the file has lengths only."""

    time: float | None
    prompt: int
    output: int
    prefix: list[int]


class Workload(msgspec.Struct, frozen=True):
    """Where requests come from: a distribution or a trace."""

    name: str
    lengths: Lengths | None = None
    rows: list[Row] | None = None
    fixed: tuple[int, int] | None = None

    @property
    def timed(self) -> bool:
        return bool(self.rows) and self.rows is not None and self.rows[0].time is not None

    def native_rate(self) -> float | None:
        """Requests/s of a trace with times."""
        if not self.timed or self.rows is None:
            return None
        span = (self.rows[-1].time or 0.0) - (self.rows[0].time or 0.0)
        return (len(self.rows) - 1) / span if span > 0 else None

    def sample(self, requests: int, seed: int, arrivals: Arrivals) -> Sample:
        """`requests` requests; of a trace, the window that starts at seed * requests."""
        random = Random(f"{self.name}/{seed}")
        rows = self._window(requests, seed) if self.rows else []
        if rows:
            pairs = [(row.prompt, row.output) for row in rows]
        elif self.lengths:
            pairs = [self.lengths.draw(random) for _ in range(requests)]
        else:
            pairs = [self.fixed or (1, 1)] * requests
        gaps = _gaps_of(rows) if arrivals.kind == "trace" else [0.0, *arrivals.draw(random, len(pairs) - 1)]
        prefixes = [row.prefix for row in rows] if any(row.prefix for row in rows) else None
        return Sample([p for p, _ in pairs], [o for _, o in pairs], gaps, prefixes)

    def _window(self, requests: int, seed: int) -> list[Row]:
        rows = self.rows or []
        start = seed * requests % max(1, len(rows) - requests + 1)
        return rows[start : start + requests]


class Arrivals(msgspec.Struct, frozen=True):
    """poisson; gamma with a coefficient of variation `cv`; or trace: the trace's own times, stretched to the rate."""

    kind: str
    cv: float = 1.0

    def draw(self, random: Random, count: int) -> Iterator[float]:
        """Gaps with mean 1."""
        shape = 1 / self.cv**2
        if self.kind == "poisson":
            return (random.expovariate(1.0) for _ in range(count))
        return (random.gammavariate(shape, 1 / shape) for _ in range(count))


# Mean tokens in/out 755.5/200.3, 171.3/98.2 and 1738.3/90.7 with the OPT tokenizer (DistServe, figure 7); the shapes
# are ours: the paper prints no medians.
KNOWN = {
    "sharegpt-like": Lengths((6.805711, 1.0), (4.945537, 1.0)),
    "humaneval-like": Lengths((5.020300, 0.5), (4.406787, 0.6)),
    "longbench-like": Lengths((8.077833, 0.6), (4.520791, 0.7), cut=(1750, 2039)),
}


def load(text: str) -> Workload:
    """A workload by name, as IN:OUT, or the path of a trace; ConfigError says what would be accepted."""
    if text in KNOWN:
        return Workload(text, lengths=KNOWN[text])
    if (fixed := text.replace("/", ":").split(":")) and len(fixed) == 2 and all(f.isdecimal() for f in fixed):
        if min(map(int, fixed)) < 1:
            raise ConfigError(f"--workload: {text} has a length of 0")
        return Workload(text, fixed=(int(fixed[0]), int(fixed[1])))
    path = Path(text)
    if not path.is_file():
        raise ConfigError(
            f"--workload: {text} is neither a file nor known: give one of {', '.join(KNOWN)}, IN:OUT in tokens, or a trace"
        )
    rows = sorted(read_trace(path), key=lambda row: row.time or 0.0)
    if len(rows) < 2:
        raise ConfigError(f"--workload: {text} has {len(rows)} requests; 2 or more are needed")
    return Workload(path.name, rows=rows)


def arrivals(text: str, workload: Workload) -> Arrivals:
    """From the flag: poisson, gamma:CV or trace; empty: a trace's own times where it has them."""
    if not text:
        return Arrivals("trace" if workload.timed else "poisson")
    kind, _, value = text.partition(":")
    if kind == "trace" and not value:
        if not workload.timed:
            raise ConfigError(f"--arrivals trace: {workload.name} has no arrival times: give poisson or gamma:CV")
        return Arrivals("trace")
    if kind == "poisson" and not value:
        return Arrivals("poisson")
    try:
        cv = float(value) if kind == "gamma" else 0.0
    except ValueError:
        cv = 0.0
    if not 0 < cv < 100:
        raise ConfigError(f"--arrivals: {text} is not one of poisson, gamma:CV with CV more than 0, trace")
    return Arrivals("gamma", cv)


def _gaps_of(rows: list[Row]) -> list[float]:
    times = [row.time or 0.0 for row in rows]
    mean = (times[-1] - times[0]) / max(1, len(times) - 1)
    if mean <= 0:
        raise ConfigError("--workload: all requests of the trace arrive at once: give --arrivals poisson")
    return [0.0, *((b - a) / mean for a, b in pairwise(times))]


# --- traces ---

# (time, its unit in seconds, prompt, output, ids): the first set whose lengths a file has is taken.
FIELDS = (
    ("timestamp", 1e-3, "input_length", "output_length", "hash_ids"),  # Mooncake; vLLM's timed-trace
    ("TIMESTAMP", 1.0, "ContextTokens", "GeneratedTokens", ""),  # Azure
    ("arrival_s", 1.0, "input_tokens", "output_tokens", ""),  # LLMServingSim's lengths
    ("start_time", 1.0, "prompt_len", "output_len", ""),  # DistServe
    ("", 1.0, "num_prefill_tokens", "num_decode_tokens", ""),  # Vidur
)


def read_trace(path: Path) -> Iterator[Row]:
    """The requests of a .jsonl, .json or .csv file, also with .gz; ConfigError names the line and the field."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()
        records = list(_records(text, path.name.removesuffix(".gz")))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(f"--workload: {path} cannot be read: {error}") from None
    if not records:
        return
    first = records[0][1]
    fields = next((f for f in FIELDS if f[2] in first or f[3] in first), None)
    if not fields:
        accepted = "; ".join(", ".join(filter(None, (f[0], f[2], f[3]))) for f in FIELDS)
        raise ConfigError(f"--workload: {path} has no fields that are known: give {accepted}")
    for line, record in records:
        try:
            yield _row(record, fields)
        except ValueError as error:
            raise ConfigError(f"--workload: {path} line {line}: {error}") from None


def _records(text: str, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    if name.endswith(".csv"):
        yield from enumerate(csv.DictReader(io.StringIO(text)), 2)
        return
    if text.lstrip().startswith("["):
        yield from ((n, r if isinstance(r, dict) else {}) for n, r in enumerate(json.loads(text), 1))
        return
    for n, line in enumerate(text.splitlines(), 1):
        if line.strip():
            record = json.loads(line)
            yield n, record if isinstance(record, dict) else {}


def _row(record: dict[str, Any], fields: tuple[str, float, str, str, str]) -> Row:
    time_field, unit, prompt_field, output_field, ids_field = fields
    prompt, output = _length(record, prompt_field), _length(record, output_field)
    moment = None
    if time_field in record:
        moment = _time(time_field, record[time_field]) * unit
    elif time_field in ("timestamp", "TIMESTAMP", "start_time", "arrival_s"):
        raise ValueError(f"{time_field} is missing")
    prefix = record.get(ids_field) or []
    if not isinstance(prefix, list) or not all(isinstance(i, int) for i in islice(prefix, 4)):
        raise ValueError(f"{ids_field} is not a list of numbers")
    return Row(moment, prompt, output, prefix)


def _length(record: dict[str, Any], field: str) -> int:
    value = record.get(field)
    if value is None or value == "":
        raise ValueError(f"{field} is missing")
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise ValueError(f"{field} is {value!r}, not a number of tokens") from None
    if number < 1:
        raise ValueError(f"{field} is {number}, not 1 or more")
    return number


def _time(field: str, value: object) -> float:
    for parse in _TIMES:
        try:
            moment = parse(str(value))
        except ValueError:
            continue
        if not 0 <= moment < float("inf"):
            break
        return moment
    raise ValueError(f"{field} is {value!r}, not a time of 0 or more")


_TIMES: tuple[Callable[[str], float], ...] = (float, lambda text: datetime.fromisoformat(text[:26]).timestamp())
