"""Random values: bytes that were changed, and contents of any type that msgspec can describe.

All values come from the `Random` that is given, so one seed gives the same values again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec
from fuzz_campaign import corpus
from msgspec import inspect

Make = Callable[[Random], Any]

# Where code counts, compares or allocates.
NUMBERS = (0, 1, 2, 15, 16, 17, 127, 128, 255, 256, 4095, 65535, 65536, 2**31 - 1, 2**31, 2**32)
HUGE_NUMBERS = (2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**31), -(2**63))
FRACTIONS = (0.0, -0.0, 0.5, 1.0, 1e-9, 59.9, 1e9, 1e300, math.inf, -1.0, math.nan)
TEXTS = (
    "",
    "a",
    "\0",
    "a" * 256,
    "é" * 128,
    "../x",
    "%s{}",
    "line\r\nline",
    "\U0001f600",
    "0" * 32,
    "tcp:1",
    "zmq:",
    "nixl:x#1",
)
KEPT_FRAMES = corpus("frames")
MAX_ITEMS = 6  # of a random list; limits have tests of their own


def random_bytes(random: Random, longest: int = 64) -> bytes:
    """Returns bytes of any length up to `longest`."""
    return random.randbytes(random.randrange(longest + 1))


def mutated(random: Random, data: bytes, others: Sequence[bytes] = (b"",)) -> bytes:
    """Returns data with one to three changes; `others` are parts that may be put into it."""
    for _ in range(random.choice((1, 1, 2, 3))):
        data = _changed(random, data, others)
    return data


def _changed(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    at = random.randrange(len(data) + 1)
    end = min(len(data), at + random.randrange(1, 9))
    match random.randrange(8):
        case 0:  # one bit
            if at == len(data):
                return data
            return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:at] + random_bytes(random, 8) + data[end:]
        case 2:
            return data[:at] + data[end:]
        case 3:
            return data[:at]
        case 4:
            return data[:at] + data[at:end] * random.randrange(2, 40) + data[end:]
        case 5:
            return data[:at] + random.choice(others) + data[at:]
        case 6:
            return data[:at] + bytes([random.choice((0, 10, 13, 34, 127, 255))]) + data[end:]
        case _:
            return data + random_bytes(random, 16)


def spoiled(random: Random, frame: bytes) -> bytes:
    """Returns a frame with changes, or a kept one in its place."""
    return random.choice(KEPT_FRAMES) if random.random() < 0.1 else mutated(random, frame)


def values_of(kind: Any, wrong: float = 0.0) -> Make:
    """Returns a maker of values of a type, with its limits.

    `wrong`: the share of numbers and texts beyond their limits.
    """
    return _maker(inspect.type_info(kind), wrong)


def _maker(kind: inspect.Type, wrong: float) -> Make:
    match kind:
        case inspect.StructType():
            return _struct_maker(kind, wrong)
        case inspect.ListType():
            return _list_maker(_maker(kind.item_type, wrong), kind.min_length or 0, kind.max_length)
        case inspect.TupleType():
            parts = [_maker(part, wrong) for part in kind.item_types]
            return lambda random: tuple(make(random) for make in parts)
        case inspect.NamedTupleType():
            columns = [_maker(column.type, wrong) for column in kind.fields]
            return lambda random: kind.cls(*(make(random) for make in columns))
        case inspect.DictType():
            key = _maker(kind.key_type, wrong)
            value = _maker(kind.value_type, wrong)
            return lambda random: {
                key(random): value(random) for _ in range(random.randrange(MAX_ITEMS))
            }
        case inspect.UnionType():
            kinds = [_maker(one, wrong) for one in kind.types]
            return lambda random: random.choice(kinds)(random)
        case inspect.LiteralType():
            return lambda random: random.choice(kind.values)
    return _plain_maker(kind, wrong)


def _plain_maker(kind: inspect.Type, wrong: float) -> Make:
    match kind:
        case inspect.IntType():
            least, most = _int_limits(kind)
            inside = [n for n in (*NUMBERS, *HUGE_NUMBERS) if least <= n <= most]
            return lambda random: _one_of(random, inside or [least], HUGE_NUMBERS, wrong)
        case inspect.FloatType():
            return lambda random: _one_of(random, FRACTIONS[:6], FRACTIONS, wrong)
        case inspect.StrType():
            return _text_maker(kind, wrong)
        case inspect.BytesType():
            least_length = kind.min_length or 0
            most_length = min(kind.max_length or 64, 64)
            return lambda random: random.randbytes(random.randint(least_length, most_length))
        case inspect.BoolType():
            return lambda random: random.random() < 0.5
        case inspect.NoneType():
            return lambda random: None
    raise TypeError(f"no values of {kind}")


def _int_limits(kind: inspect.IntType) -> tuple[int, int]:
    least = -(2**63)
    most = 2**64 - 1
    if kind.ge is not None:
        least = kind.ge
    if kind.gt is not None:
        least = kind.gt + 1
    if kind.le is not None:
        most = kind.le
    if kind.lt is not None:
        most = kind.lt - 1
    return least, most


def _one_of(random: Random, inside: Sequence[Any], outside: Sequence[Any], wrong: float) -> Any:
    return random.choice(outside if random.random() < wrong else inside)


def _text_maker(kind: inspect.StrType, wrong: float) -> Make:
    longest = kind.max_length or 256
    inside = [text for text in TEXTS if len(text) <= longest]
    if kind.pattern == "^[0-9a-f]{32}$":
        return lambda random: _one_of(random, [f"{random.getrandbits(128):032x}"], TEXTS, wrong)
    return lambda random: _one_of(random, inside, [*TEXTS, "a" * 257], wrong)


def _list_maker(item: Make, least: int, most: int | None) -> Make:
    longest = MAX_ITEMS if most is None else min(most, MAX_ITEMS)
    return lambda random: [item(random) for _ in range(random.randint(least, max(least, longest)))]


def _struct_maker(kind: inspect.StructType, wrong: float) -> Make:
    fields = [(field.name, _maker(field.type, wrong)) for field in kind.fields]

    def make(random: Random) -> Any:
        return kind.cls(**{name: value(random) for name, value in fields})

    return make


def json_value(random: Random, depth: int = 3) -> Any:
    """Returns any value that JSON has."""
    kind = random.randrange(8 if depth else 6)
    match kind:
        case 0:
            return random.choice(TEXTS)
        case 1:
            return random.choice((*NUMBERS, *HUGE_NUMBERS))
        case 2:
            return random.choice([n for n in FRACTIONS if math.isfinite(n)])
        case 3:
            return random.random() < 0.5
        case 4:
            return None
        case 5:
            return random.choice(("hi", "m", "stop", "abort"))
        case 6:
            return [json_value(random, depth - 1) for _ in range(random.randrange(4))]
    return {random.choice(TEXTS): json_value(random, depth - 1) for _ in range(random.randrange(4))}


msgpack = msgspec.msgpack.Encoder().encode
