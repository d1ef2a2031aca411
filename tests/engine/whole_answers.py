"""Compares every part of two servers' answers; a stream as if it had come whole."""

from __future__ import annotations

import json
import math
from typing import Any

from asking import LOGPROB_TOLERANCE
from engines import ELEMENT_BYTES

# Different for each request, counted by events, or of an engine's own cache of prefixes.
VOLATILE = {
    "id",
    "call_id",
    "item_id",
    "tool_call_id",
    "request_id",
    "response_id",
    "created",
    "created_at",
    "completed_at",
    "sequence_number",
    "system_fingerprint",
    "kv_transfer_params",
    "metrics",
    "cached_tokens",
    "cache_write_tokens",
}
# In bfloat16 logits tie, and the order of their sums is another one beside other requests.
if ELEMENT_BYTES == 2:
    VOLATILE |= {"logprobs", "prompt_logprobs"}
# Texts that come in parts.
PARTS = frozenset(
    {"text", "content", "reasoning", "arguments", "delta", "partial_json", "thinking", "refusal"}
)


def joined(stream: bytes) -> dict[str, Any]:
    """Returns the events of a stream as one object, by their type."""
    whole: dict[str, Any] = {}
    for line in stream.decode().splitlines():
        if not line.startswith("data: "):
            continue
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            whole["done"] = whole.get("done", 0) + 1
            continue
        event = json.loads(data)
        kind = str(event.get("type", "chunk"))
        if kind.startswith("response."):
            _forget_logprobs(event)
        whole[kind] = _merged("", whole.get(kind), event)
    return whole


def _forget_logprobs(event: Any) -> None:
    """Takes all logprobs out of an event of `/v1/responses`.

    Their number differed twice between two servers. Not explained: docs/benchmarks/exactness.md.
    """
    if isinstance(event, list):
        for one in event:
            _forget_logprobs(one)
    if isinstance(event, dict):
        event.pop("logprobs", None)
        for one in event.values():
            _forget_logprobs(one)


def _merged(key: str, old: Any, new: Any) -> Any:
    """Returns two values of one field, of successive events, as one."""
    if old is None or new is None:
        return old if new is None else new
    if isinstance(old, dict) and isinstance(new, dict):
        return {name: _merged(name, old.get(name), new.get(name)) for name in old | new}
    if isinstance(old, list) and isinstance(new, list):
        return _merged_lists(old, new)
    if isinstance(old, str) and isinstance(new, str) and key in PARTS:
        return old + new
    return new


def _merged_lists(old: list[Any], new: list[Any]) -> list[Any]:
    if not all(isinstance(one, dict) and "index" in one for one in (*old, *new)):
        return old + new
    found = {one["index"]: one for one in old}
    for one in new:
        found[one["index"]] = _merged("", found.get(one["index"]), one)
    return [found[index] for index in sorted(found)]


def difference(ours: Any, plain: Any, where: str = "") -> str:
    """Returns the first place where two answers differ; empty for equal ones."""
    if isinstance(ours, dict) and isinstance(plain, dict):
        for name in sorted((ours.keys() | plain.keys()) - VOLATILE):
            compare = _best_difference if name == "top_logprobs" else difference
            if found := compare(ours.get(name), plain.get(name), f"{where}.{name}"):
                return found
        return ""
    if isinstance(ours, list) and isinstance(plain, list) and len(ours) == len(plain):
        for at, (one, other) in enumerate(zip(ours, plain, strict=True)):
            if found := difference(one, other, f"{where}[{at}]"):
                return found
        return ""
    if isinstance(ours, float) and isinstance(plain, float):
        is_close = math.isclose(ours, plain, abs_tol=LOGPROB_TOLERANCE)
        return "" if is_close else _unequal(where, ours, plain)
    return "" if ours == plain else _unequal(where, ours, plain)


def _best_difference(ours: Any, plain: Any, where: str) -> str:
    """Returns the first place at which the best tokens' logprobs differ; empty for none.

    The last of them may be another token, as likely. A dict has one value of two tokens with one
    text. So each logprob of the smaller set must be in the larger one.
    """
    if not isinstance(ours, list) or not isinstance(plain, list) or len(ours) != len(plain):
        return difference(ours, plain, where)
    for at, (one, other) in enumerate(zip(_best(ours), _best(plain), strict=True)):
        few, many = sorted((one, other), key=len)
        for value in few:
            if not any(math.isclose(value, x, abs_tol=LOGPROB_TOLERANCE) for x in many):
                return _unequal(f"{where}[{at}]", one, other)
    return ""


def _best(places: list[Any]) -> list[list[float]]:
    """Returns the logprobs of each place: a completion's list has all, a chat's is of one."""
    if places and isinstance(places[0], dict) and "logprob" in places[0]:
        return [[place["logprob"] for place in places]]
    return [list((place or {}).values()) for place in places]


def _unequal(where: str, ours: Any, plain: Any) -> str:
    return f"{where}: {ours!r:.300}, plain vLLM: {plain!r:.300}"
