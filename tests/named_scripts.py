"""Streams of /v1/responses and /v1/messages as vLLM 0.32 forms them, and what a client makes of
one.
"""

from __future__ import annotations

import json
from typing import Any

# What the model says: (kind, text); of a call: its name, and then its arguments.
Said = tuple[str, str]
PLAIN: list[Said] = [
    ("content", w)
    for w in ("The", " quick", ' "brown"', "\n\n", " fóx 🦊", " event: error\n", " data: x", ".")
]
THINKING: list[Said] = [("reasoning", w) for w in ("Let", " me", " see", ".")] + PLAIN
CALLS: list[Said] = [
    *PLAIN[:2],
    ("call", "look"),
    ("arguments", '{"a'),
    ("arguments", '": 1}'),
    ("call", "wait"),
    ("arguments", "{}"),
]
EMPTY: list[Said] = []


def merged(said: list[Said], width: int) -> list[Said]:
    """The same, with up to `width` pieces of one kind as one."""
    out: list[tuple[str, str, int]] = []
    for kind, text in said:
        if out and kind != "call" and out[-1][0] == kind and out[-1][2] < width:
            out[-1] = (kind, out[-1][1] + text, out[-1][2] + 1)
        else:
            out.append((kind, text, 1))
    return [(kind, text) for kind, text, _ in out]


def frame(event: dict[str, Any]) -> bytes:
    data = json.dumps(event, separators=(",", ":"), ensure_ascii=False)
    return f"event: {event['type']}\ndata: {data}\n\n".encode()


class Responses:
    """One answer of an engine called `name`."""

    path = "/v1/responses"

    def __init__(self, name: str, said: list[Said], width: int = 1, logprobs: bool = False) -> None:
        self.name, self.said, self.with_logprobs = name, merged(said, width), logprobs
        self.tokens = len(said)
        self.made: list[bytes] = []
        self.items: list[dict[str, Any]] = []
        self.open: dict[str, Any] = {}

    def response(self, status: str, **fields: Any) -> dict[str, Any]:
        head = {
            "id": f"resp_{self.name}",
            "created_at": 1000 + ord(self.name[0]),
            "model": "m",
            "object": "response",
        }
        return {
            **head,
            "metadata": {"id": "mine"},
            "output": [],
            "status": status,
            "usage": None,
            **fields,
        }

    def emit(self, kind: str, **fields: Any) -> None:
        self.made.append(frame({**fields, "sequence_number": len(self.made), "type": kind}))

    def events(self) -> list[bytes]:
        self.emit("response.created", response=self.response("in_progress"))
        self.emit("response.in_progress", response=self.response("in_progress"))
        for kind, text in self.said:
            if kind == "call" or (kind != "arguments" and self.open.get("kind") != kind):
                self.close()
                self.begin(kind, text)
            if kind != "call":
                self.delta(kind, text)
        self.close()
        # a prefix cache that another instance does not have
        usage = {"input_tokens": 9, "output_tokens": self.tokens, "cached": ord(self.name[0])}
        self.emit(
            "response.completed",
            response=self.response("completed", output=self.items, usage=usage),
        )
        return self.made

    def place(self, **fields: Any) -> dict[str, Any]:
        return {"item_id": self.open["id"], "output_index": len(self.items), **fields}

    def begin(self, kind: str, name: str) -> None:
        prefix = {"content": "msg", "reasoning": "rs", "call": "fc"}[kind]
        self.open = {
            "kind": kind,
            "id": f"{prefix}_{self.name}{len(self.items)}",
            "text": "",
            "logprobs": [],
        }
        item: dict[str, Any] = {
            "id": self.open["id"],
            "type": "message",
            "content": [],
            "status": "in_progress",
        }
        if kind == "call":
            item |= {
                "type": "function_call",
                "call_id": f"call_{self.name}{len(self.items)}",
                "name": name,
                "arguments": "",
            }
        elif kind == "reasoning":
            item |= {"type": "reasoning", "summary": []}
        self.open["item"] = item
        self.emit("response.output_item.added", output_index=len(self.items), item=item)
        if kind != "call":
            part = {"type": "output_text" if kind == "content" else "reasoning_text", "text": ""}
            self.emit("response.content_part.added", **self.place(content_index=0), part=part)

    def delta(self, kind: str, text: str) -> None:
        self.open["text"] += text
        more: dict[str, Any] = {"content_index": 0}
        name = "response.output_text.delta"
        if kind == "content":
            count = len(text) if self.with_logprobs else 0
            more["logprobs"] = [
                {"token": text[at], "logprob": -0.5, "by": self.name} for at in range(count)
            ]
            self.open["logprobs"] += more["logprobs"]
        elif kind == "reasoning":
            name = "response.reasoning_text.delta"
        else:
            name, more = "response.function_call_arguments.delta", {}
        self.emit(name, **self.place(), **more, delta=text)

    def close(self) -> None:
        if not self.open:
            return
        kind, text, item = self.open["kind"], self.open["text"], self.open["item"]
        if kind == "call":
            self.emit(
                "response.function_call_arguments.done",
                **self.place(),
                arguments=text,
                name=item["name"],
            )
            done = {**item, "arguments": text, "status": "completed"}
        else:
            part = {"type": "output_text", "text": text, "logprobs": self.open["logprobs"] or None}
            name = "output_text" if kind == "content" else "reasoning_text"
            self.emit(f"response.{name}.done", **self.place(content_index=0), text=text)
            self.emit("response.content_part.done", **self.place(content_index=0), part=part)
            done = {**item, "content": [part], "status": "completed"}
        self.emit("response.output_item.done", output_index=len(self.items), item=done)
        self.items = [*self.items, done]
        self.open = {}


class Messages:
    """One answer of an engine called `name`."""

    path = "/v1/messages"

    def __init__(self, name: str, said: list[Said], width: int = 1, logprobs: bool = False) -> None:
        self.name, self.said = name, merged(said, width)
        self.tokens = len(said)
        self.made: list[bytes] = []
        self.index, self.kind = 0, ""

    def emit(self, kind: str, **fields: Any) -> None:
        self.made.append(frame({"type": kind, **fields}))

    def events(self) -> list[bytes]:
        usage = {
            "input_tokens": 9 - ord(self.name[0]) % 2,
            "output_tokens": 0,
            "cache_read_input_tokens": ord(self.name[0]) % 2,
        }
        message = {
            "id": f"msg-{self.name}",
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": "m",
        }
        self.emit(
            "message_start",
            message={**message, "stop_reason": None, "stop_sequence": None, "usage": usage},
        )
        for kind, text in self.said:
            if kind == "call" or kind not in ("arguments", self.kind):
                self.close()
                self.begin(kind, text)
            if kind != "call":
                field = {"content": "text", "reasoning": "thinking", "arguments": "partial_json"}[
                    kind
                ]
                named = {
                    "type": "input_json_delta" if kind == "arguments" else f"{field}_delta",
                    field: text,
                }
                self.emit("content_block_delta", index=self.index, delta=named)
        self.close()
        self.emit(
            "message_delta",
            delta={"stop_reason": "end_turn", "stop_sequence": None},
            usage={**usage, "output_tokens": self.tokens},
        )
        self.emit("message_stop")
        return self.made

    def begin(self, kind: str, name: str) -> None:
        self.kind = kind
        blocks: dict[str, dict[str, Any]] = {
            "content": {"type": "text", "text": ""},
            "reasoning": {"type": "thinking", "thinking": ""},
            "call": {
                "type": "tool_use",
                "id": f"call-{self.name}{self.index}",
                "input": {},
                "name": name,
            },
        }
        self.emit("content_block_start", index=self.index, content_block=blocks[kind])

    def close(self) -> None:
        if not self.kind:
            return
        if self.kind == "reasoning":
            signature = {"type": "signature_delta", "signature": f"s{self.name}{self.index}"}
            self.emit("content_block_delta", index=self.index, delta=signature)
        self.emit("content_block_stop", index=self.index)
        self.index, self.kind = self.index + 1, ""


def parse(data: bytes) -> list[dict[str, Any]]:
    """The events of a whole stream, each well formed."""
    *raw, end = data.split(b"\n\n")
    assert end == b"", data[-80:]
    events = []
    for event in raw:
        name, _, said = event.partition(b"\n")
        events.append(json.loads(said.removeprefix(b"data: ")))
        assert name == b"event: " + events[-1]["type"].encode(), event
    return events


def hear_response(data: bytes) -> dict[str, Any]:
    """What a client makes of a stream of /v1/responses, and whether it is one stream."""
    events = parse(data)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    names = [event["type"] for event in events]
    assert (
        names[:2] == ["response.created", "response.in_progress"]
        and names[-1] == "response.completed"
    )
    heads = {(e["response"]["id"], e["response"]["created_at"]) for e in events if "response" in e}
    assert len(heads) == 1, heads
    assert [
        names.count(n) for n in ("response.created", "response.in_progress", "response.completed")
    ] == [1, 1, 1]
    items: list[dict[str, Any]] = []
    said: list[tuple[str, str]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            items.append({"item": event["item"], "text": "", "logprobs": 0, "done": False})
            assert event["output_index"] == len(items) - 1
        elif kind.endswith(".delta"):
            assert (event["item_id"], event["output_index"]) == (
                items[-1]["item"]["id"],
                len(items) - 1,
            )
            items[-1]["text"] += event["delta"]
            items[-1]["logprobs"] += len(event.get("logprobs") or [])
            assert event["delta"]
        elif kind == "output_item.done":
            _check_done(items[-1], event["item"])
            said.append((event["item"]["type"] + event["item"].get("name", ""), items[-1]["text"]))
        elif kind.endswith(".done") and kind != "content_part.done":
            assert event["item_id"] == items[-1]["item"]["id"]
            assert event.get("text", event.get("arguments")) == items[-1]["text"]
    final = events[-1]["response"]
    assert [item["id"] for item in final["output"]] == [item["item"]["id"] for item in items]
    assert len({item["item"]["id"] for item in items}) == len(items) and all(
        item["done"] for item in items
    )
    for item, told in zip(final["output"], items, strict=True):
        assert item.get("call_id") == told["item"].get("call_id")
    return {
        "head": heads.pop(),
        "said": said,
        "usage": final["usage"]["output_tokens"],
        "status": final["status"],
        "ids": [item["item"]["id"] for item in items],
        "logprobs": [item["logprobs"] for item in items],
        "metadata": final["metadata"],
    }


def _check_done(told: dict[str, Any], item: dict[str, Any]) -> None:
    assert item["id"] == told["item"]["id"] and item.get("call_id") == told["item"].get("call_id")
    assert told["text"] == (
        item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
    )
    told["done"] = True


def hear_message(data: bytes) -> dict[str, Any]:
    """What a client makes of a stream of /v1/messages, and whether it is one stream."""
    events = parse(data)
    names = [event["type"] for event in events]
    assert names[0] == "message_start" and names[-2:] == ["message_delta", "message_stop"]
    assert [names.count(n) for n in ("message_start", "message_delta", "message_stop")] == [1, 1, 1]
    said: list[list[str]] = []
    ids, is_open, signatures = [], False, 0
    for event in events[1:-2]:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(said)
            is_open = True
            said.append(
                [event["content_block"]["type"] + event["content_block"].get("name", ""), ""]
            )
            ids.append(event["content_block"].get("id"))
        elif event["type"] == "content_block_stop":
            assert is_open and event["index"] == len(said) - 1
            is_open = False
        else:
            assert is_open and event["index"] == len(said) - 1
            signatures += event["delta"]["type"] == "signature_delta"
            said[-1][1] += next(
                (
                    event["delta"][n]
                    for n in ("text", "thinking", "partial_json")
                    if n in event["delta"]
                ),
                "",
            )
    assert not is_open
    return {
        "head": events[0]["message"]["id"],
        "said": said,
        "ids": ids,
        "signatures": signatures,
        "stop": events[-2]["delta"],
        "usage": events[-2]["usage"]["output_tokens"],
    }
