"""Streams that break off at every position, continued by another instance's answer."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from proxy_world import Call, World, answer, settle, world
from vllm_disagg.proxy.requests.choice_events import form_of
from vllm_disagg.proxy.requests.continuation import ChoiceTranscript
from vllm_disagg.proxy.requests.streams import FOLD_BYTES, StreamRecorder, aborted

DONE = b"data: [DONE]\n\n"
WORDS = [
    "The",
    " quick",
    ' "brown"',
    "\n\n",
    " fóx 🦊",
    " data: [DONE]",
    "",
    ' {"error"',
    " jumps",
    ".",
]
CALLS = [
    {"index": 0, "id": "RANDOM", "type": "function", "function": {"name": "look", "arguments": ""}},
    {"index": 0, "function": {"arguments": '{"a'}},
    {"index": 0, "function": {"arguments": '": 1}'}},
    {"index": 1, "id": "RANDOM", "type": "function", "function": {"name": "wait", "arguments": ""}},
    {"index": 1, "function": {"arguments": "{}"}},
]


class Script:
    """A stream as vLLM 0.32 forms it, cut into events of `width` tokens."""

    def __init__(self, name: str, width: int = 1, **fields: Any) -> None:
        self.name, self.width, self.fields = name, width, fields
        self.words = fields.pop("words", WORDS)
        self.shift = fields.pop("shift", 0.0)  # of logprobs, in their last digits

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": f"{kind}-{self.name}",
            "object": kind,
            "created": 1000 + len(self.name) + ord(self.name[0]),
            "model": "m",
        }

    def groups(self) -> list[list[int]]:
        return [
            list(range(i, min(i + self.width, len(self.words))))
            for i in range(0, len(self.words), self.width)
        ]

    def completion(self) -> list[bytes]:
        events, offset = [], 0
        for group in self.groups():
            last = group[-1] == len(self.words) - 1
            text = "".join(self.words[i] for i in group)
            choice: dict[str, Any] = {"index": 0, "text": text, "logprobs": None}
            if self.fields.get("logprobs"):
                offsets = []
                for i in group:
                    offsets.append(offset)
                    offset += len(self.words[i])
                choice["logprobs"] = {
                    "text_offset": offsets,
                    "token_logprobs": [-0.5 * i - self.shift for i in group],
                    "tokens": [self.words[i] for i in group],
                    "top_logprobs": [{self.words[i]: -0.5 * i} for i in group],
                }
            choice |= {"finish_reason": "length" if last else None, "stop_reason": None}
            if self.fields.get("ids"):
                choice["prompt_token_ids"] = [7, 8] if group[0] == 0 else None
                choice["token_ids"] = [100 + i for i in group]
            events.append(self.event("text_completion", [choice]))
        return self.tail("text_completion", events)

    def chat(self) -> list[bytes]:
        kind = "chat.completion.chunk"
        choice: dict[str, Any] = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
        }
        events = [self.event(kind, [{**choice, "finish_reason": None}])]
        deltas: list[dict[str, Any]] = []
        for group in self.groups():
            field = "reasoning" if self.fields.get("reasoning") and group[-1] < 4 else "content"
            deltas.append({field: "".join(self.words[i] for i in group)})
        if self.fields.get("tools"):
            deltas += [
                {"tool_calls": [json.loads(json.dumps(c).replace("RANDOM", f"t{self.name}{i}"))]}
                for i, c in enumerate(CALLS)
            ]
        for i, delta in enumerate(deltas):
            last = i == len(deltas) - 1
            choice = {"index": 0, "delta": delta, "logprobs": None}
            if self.fields.get("logprobs") and "content" in delta:
                group = self.groups()[i]
                choice["logprobs"] = {
                    "content": [
                        {
                            "token": self.words[j],
                            "logprob": -0.5 * j - self.shift,
                            "top_logprobs": [],
                        }
                        for j in group
                    ]
                }
            events.append(self.event(kind, [{**choice, "finish_reason": "stop" if last else None}]))
        return self.tail(kind, events)

    def event(self, kind: str, choices: list[Any], **more: Any) -> bytes:
        if self.fields.get("nulls"):
            choices = [{**choice, "weight_versions": None} for choice in choices]
            more["kv_transfer_params"] = None
        obj = {**self.head(kind), "choices": choices, **more}
        return (
            b"data: "
            + json.dumps(obj, separators=(",", ":"), ensure_ascii=False).encode()
            + b"\n\n"
        )

    def tail(self, kind: str, events: list[bytes]) -> list[bytes]:
        if self.fields.get("usage"):
            events.append(
                self.event(
                    kind, [], usage={"prompt_tokens": 2, "completion_tokens": len(self.words)}
                )
            )
        return [*events, DONE]


def told(data: bytes) -> dict[str, Any]:
    """Returns all content that a client gets of a stream."""
    seen: dict[str, Any] = {"heads": set(), "finish": [], "usage": [], "calls": {}}
    *events, end = data.split(b"\n\n")
    assert end == b"" and events[-1] == b"data: [DONE]" and events.count(b"data: [DONE]") == 1
    for raw in events[:-1]:
        event = json.loads(raw.removeprefix(b"data: "))
        assert "error" not in event, event
        seen["heads"].add((event["id"], event["created"], event["object"], event["model"]))
        if not event["choices"]:
            seen["usage"].append(event["usage"])
        for choice in event["choices"]:
            hear(seen, choice)
    return seen


def hear(seen: dict[str, Any], choice: dict[str, Any]) -> None:
    pieces = {
        **choice.get("delta", {}),
        **{k: choice[k] for k in ("text", "prompt_token_ids", "token_ids") if k in choice},
    }
    for kind, piece in pieces.items():
        if kind == "tool_calls":
            for call in piece:
                known = seen["calls"].setdefault(
                    call["index"], {"ids": [], "names": [], "arguments": ""}
                )
                known["ids"] += [call["id"]] if "id" in call else []
                known["names"] += [call["function"]["name"]] if "name" in call["function"] else []
                known["arguments"] += call["function"].get("arguments") or ""
        elif piece is not None:
            seen[kind] = seen[kind] + piece if kind in seen else piece
    for kind, values in (choice.get("logprobs") or {}).items():
        seen[f"logprobs.{kind}"] = seen.get(f"logprobs.{kind}", []) + values
    if choice["finish_reason"]:
        seen["finish"].append(choice["finish_reason"])


class Wire:
    """A recorder and its output."""

    def __init__(self, keep: bool = True, path: str = "/v1/completions") -> None:
        self.out = bytearray()
        self.stopped: list[tuple[str, str]] = []
        self.recorder = StreamRecorder(self.out.extend, keep, path=path)

    def on_stop(self, reason: str, detail: str) -> None:
        """Notes why the recorder gave up an answer."""
        self.stopped.append((reason, detail))

    def play(self, data: bytes, step: int = 0) -> bool:
        """Feeds a sink in pieces; returns whether it was stopped."""
        before = len(self.stopped)
        sink = self.recorder.start_answer(self.on_stop)
        for at in range(0, len(data), step or len(data) or 1):
            if len(self.stopped) == before:
                sink(data[at : at + (step or len(data))])
        return len(self.stopped) > before


FORMS: list[tuple[str, dict[str, Any]]] = [
    ("completion", {}),
    ("completion", {"usage": True}),
    ("completion", {"logprobs": True, "usage": True}),
    ("completion", {"ids": True}),
    ("completion", {"nulls": True}),  # vLLM 0.33's
    ("chat", {}),
    ("chat", {"usage": True, "reasoning": True}),
    ("chat", {"logprobs": True}),
    ("chat", {"tools": True, "usage": True}),
]


def make(form: str, script: Script) -> list[bytes]:
    return script.completion() if form == "completion" else script.chat()


def same(data: bytes, expected: bytes, first: str) -> None:
    ours, theirs = told(data), told(expected)
    calls, others = ours.pop("calls"), theirs.pop("calls")
    for index, call in calls.items():
        assert (
            len(call["ids"]) == len(call["names"]) == 1 and call["names"] == others[index]["names"]
        )
        assert call["arguments"] == others[index]["arguments"]
    assert calls.keys() == others.keys()
    assert ours == theirs
    assert all(head[0].endswith(first) for head in ours["heads"])


@pytest.mark.parametrize(("form", "fields"), FORMS)
@pytest.mark.parametrize("widths", [(1, 1), (1, 3), (3, 1), (2, 3)])
def test_broken_off_at_every_event(
    form: str, fields: dict[str, Any], widths: tuple[int, int]
) -> None:
    if form == "chat" and fields.get("reasoning") and widths != (1, 1):
        pytest.skip("the scripted reasoning ends within an event")
    first, again = (make(form, Script(n, w, **fields)) for n, w in zip("AB", widths, strict=True))
    for at in range(1, len(first)):
        wire = Wire()
        assert not wire.play(b"".join(first[:at]))
        assert wire.recorder.resumable
        assert not wire.play(b"".join(again), step=50), wire.stopped
        assert wire.recorder.is_complete and wire.recorder.finish()
        same(bytes(wire.out), b"".join(first), "A")


@pytest.mark.parametrize(("form", "fields"), FORMS[:1] + FORMS[5:6])
def test_broken_off_at_every_byte(form: str, fields: dict[str, Any]) -> None:
    first, again = (
        b"".join(make(form, Script("A", 1, **fields))),
        b"".join(make(form, Script("B", 3, **fields))),
    )
    begin = first.index(b"\n\n") + 2
    for at in range(begin, len(first) - 1, 7):
        wire = Wire()
        assert not wire.play(first[:at], step=31)
        assert wire.recorder.resumable and not wire.play(again)
        same(bytes(wire.out), first, "A")


@pytest.mark.parametrize(("form", "fields"), FORMS)
def test_broken_off_twice(form: str, fields: dict[str, Any]) -> None:
    if fields.get("reasoning"):
        pytest.skip("the scripted reasoning ends within an event")
    scripts = [make(form, Script(n, w, **fields)) for n, w in (("A", 1), ("B", 2), ("C", 3))]
    for one in range(1, len(scripts[0])):
        for two in range(1, len(scripts[1])):
            wire = Wire()
            wire.play(b"".join(scripts[0][:one]))
            assert wire.recorder.resumable and not wire.play(b"".join(scripts[1][:two]))
            assert wire.recorder.resumable and not wire.play(b"".join(scripts[2])), wire.stopped
            same(bytes(wire.out), b"".join(scripts[0]), "A")


def test_the_last_digits_of_logprobs_may_differ() -> None:
    first, again = (
        Script("A", logprobs=True).completion(),
        Script("B", logprobs=True, shift=1e-6).completion(),
    )
    wire = Wire()
    wire.play(b"".join(first[:4]))
    assert wire.recorder.resumable and not wire.play(b"".join(again))
    assert told(bytes(wire.out))["logprobs.token_logprobs"][3:5] == [-1.5, -2.0 - 1e-6]


@pytest.mark.parametrize("form", ["completion", "chat"])
@pytest.mark.parametrize("again", [["The quick", " fox"], ["The ", "quick", " fox"]])
def test_logprobs_of_other_tokens_are_another_answer(form: str, again: list[str]) -> None:
    """Two tokens may have the text of one: then one logprob more or less would reach the client."""
    words = ["The", " quick", " fox"]
    first = make(form, Script("A", words=words, logprobs=True))
    second = make(form, Script("B", words=again, logprobs=True))
    for at in (2, 3) if form == "completion" else (3, 4):
        wire = Wire()
        wire.play(b"".join(first[:at]))
        assert wire.recorder.resumable and wire.play(b"".join(second))
        assert wire.stopped[-1][0] == "diverged"


@pytest.mark.parametrize("form", ["completion", "chat"])
def test_answers_that_part_after_the_break_are_the_second_one(form: str) -> None:
    """On GPUs without VLLM_BATCH_INVARIANT: the client has one engine's answer, from end to end."""
    first = make(form, Script("A", 1))
    words = [*WORDS[:5], " otherwise", *WORDS[6:]]
    again = make(form, Script("B", 1, words=words))
    wire = Wire()
    wire.play(b"".join(first[:4]))
    assert wire.recorder.resumable and not wire.play(b"".join(again)), wire.stopped
    assert wire.recorder.is_complete and wire.recorder.finish()
    same(bytes(wire.out), b"".join(make(form, Script("A", 1, words=words))), "A")


@pytest.mark.parametrize("form", ["completion", "chat"])
@pytest.mark.parametrize("change", ["other", "shorter", "longer", "ends otherwise"])
def test_another_answer_is_never_passed_on(form: str, change: str) -> None:
    first = make(form, Script("A"))
    words = {
        "other": ["THE", *WORDS[1:]],
        "shorter": WORDS[:2],
        "longer": [*WORDS, " more"],
        "ends otherwise": WORDS,
    }[change]
    again = b"".join(make(form, Script("B", 2, words=words)))
    if change == "ends otherwise":
        again = again.replace(b'"length"', b'"content_filter"').replace(
            b'"stop"', b'"content_filter"'
        )
    at = len(first) - 1 if change in ("longer", "ends otherwise") else 6
    wire = Wire()
    wire.play(b"".join(first[:at]))
    assert wire.recorder.resumable and wire.play(again)
    assert wire.stopped[0][0] == "diverged" and bytes(wire.out) == b"".join(first[:at])


def test_an_answer_that_ends_without_done_was_cut() -> None:
    first = Script("A").completion()
    wire = Wire()
    wire.play(b"".join(first[:6]))
    assert wire.recorder.resumable and not wire.play(b"".join(Script("B").completion()[:3]))
    assert not wire.recorder.finish()


def test_events_of_another_kind_are_not_continued() -> None:
    for event in (
        b'data: {"text":"a"}\n\n',
        b'event: x\ndata: {"a":1}\n\n',
        Script("A").event("text_completion", [{"index": 0, "text": "a", "novelty": [1]}]),
        b"data: {\n\n",
        b'data: {"id":"A","object":"o","created":1,"choices":[{"text":"\\ud800"}]}\n\n',
    ):
        wire = Wire()
        wire.play(event)
        assert bytes(wire.out) == event, "they are passed on all the same"
        if event.startswith(b"data"):
            assert not wire.recorder.resumable


def place_in(event: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns an object in an event by its path."""
    for name in place.split():
        event = event[int(name)] if isinstance(event, list) else event[name]
    return event


@pytest.mark.parametrize("value", [None, 7, "more", {"x": None}, [None]])
@pytest.mark.parametrize(
    "place",
    [
        "",
        "choices 0",
        "choices 0 delta",
        "choices 0 delta tool_calls 0",
        "choices 0 delta tool_calls 0 function",
    ],
)
def test_fields_of_later_versions_are_no_content_only_while_they_are_null(
    place: str, value: object
) -> None:
    """Of what they hold the client would have the same part twice."""
    first, again = (b"".join(Script(n, tools=True).chat()) for n in "AB")
    changed = []
    for event in first.split(b"\n\n")[:-2]:
        parsed = json.loads(event.removeprefix(b"data: "))
        if '"function"' in event.decode() or not place.count("tool"):
            place_in(parsed, place)["later"] = value
        changed.append(b"data: " + json.dumps(parsed, separators=(",", ":")).encode() + b"\n\n")
    wire = Wire(path="/v1/chat/completions")
    wire.play(b"".join(changed))
    assert wire.recorder.resumable is (value is None)
    assert wire.play(again) is (value is not None)


def test_an_unrecorded_stream_is_not_continued() -> None:
    wire = Wire(keep=False)
    wire.play(b"".join(Script("A").completion()[:3]))
    assert not wire.recorder.resumable


def test_memory_is_bounded() -> None:
    words = [f" word{i}" for i in range(5000)]
    events = Script("A", words=words, ids=True).completion()
    wire = Wire()
    for event in events[:4000]:
        wire.recorder.feed(event) if wire.out else wire.play(event)
        assert wire.recorder._recorded_bytes <= FOLD_BYTES
    transcript = wire.recorder._transcript
    assert isinstance(transcript, ChoiceTranscript) and len(transcript.channels) == 3
    assert wire.recorder.resumable
    assert not wire.play(b"".join(Script("B", 7, words=words, ids=True).completion()))
    same(bytes(wire.out), b"".join(events), "A")


def test_an_engine_that_reports_its_failure_is_cut_off() -> None:
    first = Script("A").completion()
    error = b'data: {"error": {"message": "EngineCore encountered an issue", "type": "InternalServerError", "code": 500}}\n\n'
    for at in range(1, len(first)):
        wire = Wire()
        assert wire.play(b"".join(first[:at]) + error + DONE)
        assert wire.stopped[0][0] == "died" and bytes(wire.out) == b"".join(first[:at])
        assert wire.recorder.resumable and wire.play(b"".join(Script("B").completion()[:1]) + error)
        assert wire.recorder.error_event == error[:-2]
        assert wire.recorder.resumable and not wire.play(b"".join(Script("C", 2).completion()))
        same(bytes(wire.out), b"".join(first), "A")


def test_an_engine_that_is_being_stopped_is_left() -> None:
    first = Script("A").completion()
    abort = first[-2].replace(b'"length"', b'"abort"').replace(b'"text":"."', b'"text":""')
    assert b'"finish_reason":"abort"' in abort
    for at in range(1, len(first) - 1):
        for data in ([*first[:at], abort, DONE], [b"".join(first[:at]) + abort + DONE]):
            wire = Wire()
            sink = wire.recorder.start_answer(wire.on_stop)
            for chunk in data:
                if not wire.stopped:
                    sink(chunk)
            assert wire.stopped[0][0] == "stopping" and bytes(wire.out) == b"".join(first[:at])
            assert wire.recorder.resumable and not wire.play(b"".join(Script("B", 2).completion()))
            same(bytes(wire.out), b"".join(first), "A")


async def test_an_answer_that_was_given_up_is_no_answer() -> None:
    async with world(decode=2) as w:

        async def stopping(call: Call) -> None:
            if call.leg == "prefill" or sum(len(d.calls) for d in w.decodes) > 1:
                await answer(call)
            else:
                data = b'{"choices":[{"text":"a","finish_reason":"abort"}]}'
                call.raw_write(
                    f"HTTP/1.1 200 X\r\ncontent-length: {len(data)}\r\n\r\n{data.decode()}"
                )

        for e in w.prefills + w.decodes:
            e.script = stopping
        assert (await w.post()).json()["leg"] == "decode"
        assert sum(len(d.calls) for d in w.decodes) == 2


GIVEN_UP = [
    b'{"choices":[{"finish_reason":"stop"},{"text":"a","finish_reason":"abort"}]}',
    b'data: {"choices":[{"finish_reason":"stop"}]}\n\ndata: {"choices":[{"finish_reason":"abort"}]}\n\n',
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":null}}\n\n',
]
ECHOED = [  # what a client, or a model, wrote
    b'{"status":"completed","metadata":{"finish_reason":"abort"}}',
    b'event: response.created\ndata: {"type":"response.created","response":{"metadata":{"finish_reason":"abort"}}}\n\n',
    b'{"type":"message","content":[{"type":"tool_use","input":{"finish_reason":"abort","delta":{"stop_reason":null}}}]}',
    b'{"choices":[{"finish_reason":"stop","message":{"x":{"finish_reason":"abort"}}}]}',
    b'data: {"choices":[{"finish_reason":"abort"',  # not all of it is here
]


def test_aborted_answers_and_texts_that_look_alike() -> None:
    assert [aborted(said) for said in [*GIVEN_UP, *ECHOED]] == [True] * len(GIVEN_UP) + [
        False
    ] * len(ECHOED)


async def test_a_client_cannot_make_an_engine_look_dead() -> None:
    async with world(decode=2) as w:

        async def echo(call: Call) -> None:
            if call.body.get("stream"):
                await call.stream()
                await call.chunk(ECHOED[1])
                await call.chunk(
                    b'event: response.completed\ndata: {"type":"response.completed"}\n\n'
                )
                await call.end()
            else:
                data = ECHOED[0].decode()
                call.raw_write(f"HTTP/1.1 200 X\r\ncontent-length: {len(data)}\r\n\r\n{data}")

        for e in w.prefills + w.decodes:
            e.script = echo
        derender = "/v1/chat/completions/derender"  # of an answer that some engine gave up
        given_up = b'{"choices":[{"finish_reason":"abort"}]}'

        async def back(call: Call) -> None:
            call.raw_write(
                f"HTTP/1.1 200 X\r\ncontent-length: {len(given_up)}\r\n\r\n{given_up.decode()}"
            )

        for e in w.prefills + w.decodes:
            e.script = back
        assert (await w.ask("POST", derender, given_up)).body == given_up
        for e in w.prefills + w.decodes:
            e.script = echo
        for stream in (False, True):
            body = json.dumps(
                {
                    "model": "m",
                    "input": "hi",
                    "stream": stream,
                    "metadata": {"finish_reason": "abort"},
                }
            )
            reply = await w.ask("POST", "/v1/responses", body.encode())
            assert (
                reply.status == 200 and b"completed" in reply.body and b'"error"' not in reply.body
            )
        assert all(row["usable"] for row in (await w.get("/disagg/instances")).json())


def test_another_function_whose_name_begins_alike_is_another_answer() -> None:
    def call(at: int, **function: str) -> bytes:
        delta = {"tool_calls": [{"index": 0, "function": function}]}
        head = f'data: {{"id":"c{at}","object":"chat.completion.chunk","created":{at},"model":"m","choices":'
        return (
            f'{head}[{{"index":0,"delta":{json.dumps(delta)},"finish_reason":null}}]}}\n\n'.encode()
        )

    for name, same_call in (("get_weather", False), ("get", True)):
        wire = Wire()
        assert wire.play(call(1, name="get") + b'data: {"error": {"code": 500}}\n\n')
        assert wire.recorder.resumable
        wire.play(call(2, name=name) + call(2, arguments="{}"))
        assert (wire.stopped[-1][0] != "diverged") == same_call
        assert (b"arguments" in wire.out) == same_call


def test_an_error_of_the_request_is_passed_on() -> None:
    error = b'data: {"error": {"message": "no", "code": 400}}\n\n' + DONE
    wire = Wire()
    assert not wire.play(Script("A").completion()[0] + error)
    assert bytes(wire.out).endswith(error)


def test_a_text_about_errors_is_no_error() -> None:
    events = b"".join(
        Script("A", words=['data: {"error": {"code": 500}}', "\n\n", 'data: {"error"']).completion()
    )
    wire = Wire()
    assert not wire.play(events)
    assert bytes(wire.out) == events


# Through a proxy ----------------------------------------------------------------------------------


def engine(form: str, width: int, die_after: int | None, **fields: Any) -> Callable[[Call], Any]:
    """Returns an instance that streams; with the first request it dies after so many events."""

    async def script(call: Call) -> None:
        if call.leg == "prefill":
            await call.json({"kv_transfer_params": {"disagg_engine": call.engine.facts()}})
            return
        await call.stream()
        for at, event in enumerate(make(form, Script(call.engine.name, width, **fields))):
            if at == die_after and call.engine.calls[0] is call and not call.engine.others:  # type: ignore[attr-defined]
                await settle()
                await call.engine.stop()
                return
            await call.chunk(event)
        await call.end()

    return script


async def ask(w: World, form: str, script: Callable[[Call], Any], **fields: Any) -> bytes:
    first: list[Any] = []
    for e in w.prefills + w.decodes:
        e.others = False  # type: ignore[attr-defined]

        async def once(call: Call) -> None:
            if call.leg != "prefill":
                call.engine.others = bool(first)  # type: ignore[attr-defined]
                first.append(call)
            await script(call)

        e.script = once
    path = "/v1/completions" if form == "completion" else "/v1/chat/completions"
    prompt = (
        {"prompt": "x"}
        if form == "completion"
        else {"messages": [{"role": "user", "content": "x"}]}
    )
    body = {"model": "m", "stream": True, "temperature": 0, **prompt, **fields}
    reply = await w.post(path, json.dumps(body).encode())
    assert reply.status == 200 and reply.complete
    return reply.body


@pytest.mark.parametrize("form", ["completion", "chat"])
async def test_a_stream_goes_on_elsewhere(form: str) -> None:
    for die_after in (2, 5):  # after the role alone nothing has begun
        async with world(decode=2) as w:
            body = await ask(w, form, engine(form, 1, die_after, usage=True))
            names = [d.name for d in w.decodes if d.calls]
            assert len(names) == 2
            first = told(body)["heads"].pop()[0].rpartition("-")[2]
            same(body, b"".join(make(form, Script(first, usage=True))), first)
            assert [c.leg for d in w.decodes for c in d.calls] == ["decode", "decode"], (
                "with a pair of its own"
            )
            assert await w.metric("vllm_disagg_fallbacks_total", 'reason="decode_in_stream"') == 1
            assert await w.metric("vllm_disagg_requests_total", 'outcome="ok"') == 1
            assert await w.metric("vllm_disagg_in_flight") == 0


@pytest.mark.parametrize("is_framed", [True, False], ids=["chunks", "unframed"])
async def test_a_stream_whose_body_ends_too_early_goes_on_elsewhere(is_framed: bool) -> None:
    """A killed process ends an answer without a length as if it were whole."""

    async def script(call: Call) -> None:
        if call.leg == "prefill":
            await call.json({"kv_transfer_params": {"disagg_engine": call.engine.facts()}})
            return
        events = make("completion", Script(call.engine.name))
        if not call.engine.others:  # type: ignore[attr-defined]
            events = events[:3]
        if is_framed:
            await call.stream()
            await call.chunk(b"".join(events))
            await call.end()
            return
        call.raw_write("HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n")
        call.writer.write(b"".join(events))
        await call.writer.drain()
        call.writer.close()

    async with world(decode=2) as w:
        body = await ask(w, "completion", script)
        assert told(body)["text"] == "".join(WORDS) and body.count(DONE) == 1
        assert await w.metric("vllm_disagg_fallbacks_total", 'reason="decode_in_stream"') == 1


@pytest.mark.parametrize("fields", [{"temperature": 0.5}, {"temperature": None}])
async def test_a_sampled_stream_ends_in_an_error(fields: dict[str, Any]) -> None:
    async with world(decode=2) as w:
        body = await ask(w, "completion", engine("completion", 1, 3), **fields)
        *events, error, done, _ = body.split(b"\n\n")
        assert len(events) == 3 and b'"code": 502' in error and done == b"data: [DONE]"


async def test_a_seeded_stream_goes_on() -> None:
    async with world(decode=2) as w:
        body = await ask(w, "completion", engine("completion", 1, 3), temperature=0.9, seed=4)
        assert told(body)["text"] == "".join(WORDS)


async def test_two_answers_are_never_mixed() -> None:
    async with world(decode=2) as w:

        async def script(call: Call) -> None:
            words = WORDS if not getattr(call.engine, "others", False) else ["An", "other"]
            await engine("completion", 1, 3, words=words)(call)

        body = await ask(w, "completion", script)
        *events, error, done, _ = body.split(b"\n\n")
        assert len(events) == 3 and b'"code": 502' in error and done == b"data: [DONE]"


async def test_an_engines_error_event_reaches_the_client_at_the_end() -> None:
    async with world(decode=2) as w:
        error = {"error": {"message": "EngineCore encountered an issue", "code": 500}}

        async def script(call: Call) -> None:
            if call.leg == "prefill":
                await call.json({"kv_transfer_params": {"disagg_engine": call.engine.facts()}})
                return
            await call.stream()
            await call.chunk(Script(call.engine.name).completion()[0])
            await settle()
            await call.event(error)
            await call.event("[DONE]")
            await call.end()

        body = await ask(w, "completion", script)
        _, last, done, _ = body.split(b"\n\n")
        assert json.loads(last.removeprefix(b"data: ")) == error and done == b"data: [DONE]"
        assert sum(len(d.calls) for d in w.decodes) == 2


async def test_an_engine_that_fails_before_its_first_token() -> None:
    """vLLM has sent the head of the stream by then, so that it reports the failure in an event."""
    async with world(decode=2) as w:

        async def script(call: Call) -> None:
            if call.leg != "prefill" and not call.engine.others:  # type: ignore[attr-defined]
                await call.stream()
                await call.event(
                    {"error": {"message": "EngineCore encountered an issue", "code": 500}}
                )
                await call.event("[DONE]")
                await call.end()
            else:
                await engine("completion", 1, None)(call)

        assert told(await ask(w, "completion", script))["text"] == "".join(WORDS)


async def test_many_streams_of_one_instance_go_on_at_once() -> None:
    async with world(decode=2, prefill_concurrency=100) as w:
        running = asyncio.Event()

        async def script(call: Call) -> None:
            if call.leg == "prefill":
                await call.json({"kv_transfer_params": {"disagg_engine": call.engine.facts()}})
                return
            await call.stream()
            for at, event in enumerate(Script(call.engine.name).completion()):
                if at == 4:
                    await running.wait()
                await call.chunk(event)
            await call.end()

        for e in w.prefills + w.decodes:
            e.script = script
        asks = [asyncio.ensure_future(w.post(stream=True, temperature=0)) for _ in range(200)]
        while sum(len(d.calls) for d in w.decodes) < 200:
            await asyncio.sleep(0.01)
        await settle()
        await w.decodes[0].stop()
        running.set()
        for reply in await asyncio.gather(*asks):
            assert reply.complete and told(reply.body)["text"] == "".join(WORDS)


async def test_a_stream_goes_on_past_an_engine_that_lacks_its_adapter() -> None:
    """As one that has replaced another. The client got an error event, beside an engine with it."""
    asked: list[Call] = []

    async def script(call: Call) -> None:
        asked.append(call)
        if len(asked) == 2:
            await call.json({"error": {"message": "The model does not exist."}}, 404)
            return
        await call.stream()
        for at, event in enumerate(Script(call.engine.name).completion()):
            if at == 4 and len(asked) == 1:
                await settle()
                await call.engine.stop()
                return
            await call.chunk(event)
        await call.end()

    async with world(prefill=0, decode=3) as w:
        for d in w.decodes:
            d.script = script
        reply = await w.post(stream=True, temperature=0)
        assert reply.complete and told(reply.body)["text"] == "".join(WORDS)
        assert len({call.engine for call in asked}) == 3


async def test_a_request_that_kills_engines_gets_no_third() -> None:
    async with world(decode=4) as w:

        async def die(call: Call) -> None:
            await call.json(
                {"error": {"message": "EngineCore encountered an issue.", "code": 500}}, 500
            )

        for d in w.decodes:
            d.script = die
        reply = await w.post()
        assert reply.status == 500 and b"EngineCore" in reply.body
        assert sum(len(d.calls) for d in w.decodes) == 2


TEXTS = [
    " a",
    " quick",
    ' "brown"',
    "\n",
    " fóx 🦊",
    "\\",
    " back\\slash",
    ' {"error"',
    " data: [DONE]",
    "\u2028",
    " end",
] * 5


@pytest.mark.parametrize("form", ["completion", "chat"])
def test_events_of_one_form_take_the_short_way(form: str) -> None:
    """Events come one by one; wherever the stream breaks off, no text is lost or sent twice."""
    first, again = (
        make(form, Script(name, width, words=TEXTS, usage=True))
        for name, width in (("A", 1), ("B", 2))
    )
    short = 0
    for at in range(1, len(first)):
        wire = Wire()
        sink = wire.recorder.start_answer(lambda *_: None)
        for event in first[:at]:
            sink(event)
        assert bytes(wire.out) == b"".join(first[:at])
        short = max(short, len(wire.recorder._recorded_texts))
        assert wire.recorder.resumable and not wire.play(b"".join(again)), wire.stopped
        same(bytes(wire.out), b"".join(first), "A")
    assert short > 1


@pytest.mark.parametrize("text", ["\\", "\\\\\\", "\\[", "a\\"])
def test_a_token_of_backslashes_is_a_token(text: str) -> None:
    said = (
        b'data: {"id":"x","object":"o","created":1,"choices":[{"index":0,"text":%b}]}\n\n'
        % json.dumps(text).encode()
    )
    assert form_of(said) is None
    got: list[bytes] = []
    feed = StreamRecorder(got.append, record=True, path="/v1/completions").start_answer(
        lambda *_: pytest.fail("it was given up")
    )
    for event in (said, said, said, DONE):
        feed(event)
    assert b"".join(got) == said * 3 + DONE


def test_a_stream_that_said_nothing_yet_goes_on_under_its_own_id() -> None:
    """Half of a character is an event without text."""
    event = b'data: {"id":"%b","object":"o","created":1,"choices":[{"index":0,"text":"%b"}]}\n\n'
    got: list[bytes] = []
    recorder = StreamRecorder(got.append, record=True, path="/v1/completions")
    recorder.start_answer(lambda *_: None)(event % (b"A", b""))
    feed = recorder.start_answer(lambda *_: pytest.fail("it was given up"))
    for text in (b"", b"x", b"y"):
        feed(event % (b"B", text))
    assert b'"B"' not in b"".join(got) and [b'"text":"x"' in said for said in got].count(True) == 1
    assert recorder.continued


@pytest.mark.parametrize("last", ["abort", "error", "part", "two"])
def test_the_short_way_is_only_for_one_more_text(last: str) -> None:
    first = Script("A", words=TEXTS).completion()
    stopped: list[str] = []
    wire = Wire()
    sink = wire.recorder.start_answer(lambda reason, _: stopped.append(reason))
    for event in first[:9]:
        sink(event)
    event = first[9]
    bad = {
        "abort": event.replace(b'"finish_reason":null', b'"finish_reason":"abort"'),
        "error": b'data: {"error":{"message":"EngineCore encountered an issue","code":500}}\n\n',
        "part": event[:-9],
        "two": event + first[10],
    }[last]
    sink(bad)
    assert stopped == {"abort": ["stopping"], "error": ["died"]}.get(last, [])
    assert bytes(wire.out) == b"".join(first[: 11 if last == "two" else 9])
    if last == "part":
        sink(event[-9:] + first[10])
        assert bytes(wire.out) == b"".join(first[:11])


def test_memory_is_bounded_on_the_short_way_too() -> None:
    words = [f" w{i}" for i in range(5000)]
    events = Script("A", words=words).completion()
    wire = Wire()
    sink = wire.recorder.start_answer(lambda *_: None)
    for event in events[:4000]:
        sink(event)
        assert wire.recorder._recorded_bytes <= FOLD_BYTES
        assert (
            sum(map(len, wire.recorder._recorded_texts)) + 48 * len(wire.recorder._recorded_texts)
            <= FOLD_BYTES
        )
    assert wire.recorder.resumable and not wire.play(
        b"".join(Script("B", 7, words=words).completion())
    )
    same(bytes(wire.out), b"".join(events), "A")
