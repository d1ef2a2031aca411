"""Streams of /v1/responses and /v1/messages that break off at every position."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
from test_continuation import Wire

from named_scripts import (
    CALLS,
    EMPTY,
    PLAIN,
    THINKING,
    Messages,
    Responses,
    Said,
    frame,
    hear_message,
    hear_response,
)
from proxy_world import Call, answer, settle, world
from vllm_disagg.proxy.requests import streams
from vllm_disagg.proxy.requests.completeness import END_MARKS
from vllm_disagg.proxy.requests.named_events import NamedTranscript, ResponsesSchema
from vllm_disagg.proxy.requests.streams import FOLD_BYTES

Kind = type[Responses] | type[Messages]
SAID: dict[str, list[Said]] = {"plain": PLAIN, "thinking": THINKING, "calls": CALLS, "empty": EMPTY}


def heard(kind: Kind, data: bytes) -> dict[str, Any]:
    return hear_response(data) if kind is Responses else hear_message(data)


ENDS = re.compile(
    rb'event: content_block_stop\n|.*\n.*"signature_delta"|event: response\.[a-z_]+\.done\n'
)


def written(data: bytes) -> list[bytes]:
    """Returns whole events without the last ones that end a part: these wait for the next event."""
    events = [event + b"\n\n" for event in data.split(b"\n\n")[:-1]]
    while events and ENDS.match(events[-1]):
        events.pop()
    return events


def same(kind: Kind, data: bytes, first: bytes, sent: bytes, again: bytes) -> None:
    """Asserts that an output is one stream with the first answer's start and all of its content."""
    sent = b"".join(written(sent))
    assert data.startswith(sent)
    ours, theirs, other = heard(kind, data), heard(kind, first), heard(kind, again)
    ids, old, new = (one.pop("ids") for one in (ours, theirs, other))
    for at, id in enumerate(ids):
        was_sent = id is None or json.dumps(id).encode() in sent
        assert id == (old[at] if was_sent else new[at]), "an id once sent is kept"
    assert ours == theirs


@pytest.mark.parametrize("kind", [Responses, Messages])
@pytest.mark.parametrize("said", SAID)
@pytest.mark.parametrize("widths", [(1, 1), (1, 3), (3, 1), (2, 3)])
def test_broken_off_at_every_event(kind: Kind, said: str, widths: tuple[int, int]) -> None:
    first, again = (
        kind(name, SAID[said], width, logprobs=True).events()
        for name, width in zip("AB", widths, strict=True)
    )
    for at in range(1, len(first)):
        wire = Wire(path=kind.path)
        assert not wire.play(b"".join(first[:at]))
        assert wire.recorder.resumable
        assert not wire.play(b"".join(again), step=50), (at, wire.stopped)
        assert wire.recorder.finish()
        same(kind, bytes(wire.out), b"".join(first), b"".join(first[:at]), b"".join(again))


@pytest.mark.parametrize("kind", [Responses, Messages])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_broken_off_at_every_byte(kind: Kind, line_end: bytes) -> None:
    first, again = (
        b"".join(kind(n, CALLS, w).events()).replace(b"\n", line_end)
        for n, w in (("A", 1), ("B", 3))
    )
    for at in range(first.index(2 * line_end) + 2 * len(line_end), len(first) - 1, 5):
        wire = Wire(path=kind.path)
        assert not wire.play(first[:at], step=31)
        sent = bytes(wire.out)
        assert wire.recorder.resumable and not wire.play(again, step=77)
        same(
            kind,
            bytes(wire.out),
            first.replace(line_end, b"\n"),
            sent,
            again.replace(line_end, b"\n"),
        )


@pytest.mark.parametrize("kind", [Responses, Messages])
@pytest.mark.parametrize("said", ["thinking", "calls"])
def test_broken_off_twice(kind: Kind, said: str) -> None:
    first, second, third = (
        kind(name, SAID[said], width).events() for name, width in (("A", 1), ("B", 2), ("C", 3))
    )
    for one in range(1, len(first)):
        for two in range(1, len(second)):
            wire = Wire(path=kind.path)
            wire.play(b"".join(first[:one]))
            assert wire.recorder.resumable and not wire.play(b"".join(second[:two]))
            assert wire.recorder.resumable and not wire.play(b"".join(third)), wire.stopped
            assert wire.recorder.finish()
            ours, theirs = (heard(kind, data) for data in (bytes(wire.out), b"".join(first)))
            assert ours.pop("ids") and theirs.pop("ids")
            assert ours == theirs


@pytest.mark.parametrize("kind", [Responses, Messages])
def test_any_answer_broken_off_anywhere(kind: Kind) -> None:
    for seed in range(150):
        chance = random.Random(seed)
        said: list[Said] = []
        for _ in range(chance.randrange(6)):
            kinds = [chance.choice(["content", "reasoning", "arguments"])] * chance.randrange(1, 6)
            said += [("call", "look")] if kinds[0] == "arguments" else []
            said += [
                (name, chance.choice(["a", " b", "\n", '"', "é🦊", "event: error\n"]))
                for name in kinds
            ]
        scripts = [b"".join(kind(name, said, chance.randrange(1, 5)).events()) for name in "ABC"]
        wire = Wire(path=kind.path)
        for script in scripts[:-1]:
            assert not wire.play(
                script[: chance.randrange(len(script))], step=chance.randrange(1, 300)
            ), (seed, wire.stopped)
            assert wire.recorder.resumable
        assert (
            not wire.play(scripts[-1], step=chance.randrange(1, 300)) and wire.recorder.finish()
        ), (
            seed,
            wire.stopped,
        )
        ours, theirs = (heard(kind, data) for data in (bytes(wire.out), scripts[0]))
        assert {**ours, "ids": 0, "head": 0} == {**theirs, "ids": 0, "head": 0}, seed


@pytest.mark.parametrize("kind", [Responses, Messages])
@pytest.mark.parametrize(
    "change", ["other text", "shorter", "longer", "another call", "a call more", "thoughts first"]
)
@pytest.mark.parametrize("width", [1, 2, 3])
def test_another_answer_is_never_passed_on(kind: Kind, change: str, width: int) -> None:
    """At any position the client gets no part of a second answer after the two differ."""
    other: list[Said] = {
        "other text": [PLAIN[0], ("content", " quack"), *CALLS[2:]],
        "shorter": CALLS[:1],
        "longer": [*PLAIN[:2], ("content", " and"), *CALLS[2:]],
        "another call": [*PLAIN[:2], ("call", "lock"), *CALLS[3:]],
        "a call more": [*PLAIN[:2], ("call", "see"), ("arguments", "{}"), *CALLS[2:]],
        "thoughts first": [("reasoning", "hm"), *CALLS],
    }[change]
    first, again = kind("A", CALLS).events(), kind("B", other, width).events()
    parted = 0
    for at in range(1, len(first)):
        wire = Wire(path=kind.path)
        sent = b"".join(first[:at])
        wire.play(sent)
        assert wire.recorder.resumable
        if wire.play(b"".join(again)):
            parted += 1
            assert wire.stopped[0][0] == "diverged" and bytes(wire.out) == b"".join(written(sent))
        else:
            assert wire.recorder.finish()
            ours, theirs = (heard(kind, data) for data in (bytes(wire.out), b"".join(again)))
            assert ours["said"] == theirs["said"], "the answers part after what was sent"
    assert parted > 3


@pytest.mark.parametrize("kind", [Responses, Messages])
def test_an_answer_that_ends_too_early_was_cut(kind: Kind) -> None:
    first, again = kind("A", PLAIN).events(), kind("B", PLAIN).events()
    for cut in (again[:3], [*again[:-1], again[-1][:-1]]):
        wire = Wire(path=kind.path)
        wire.play(b"".join(first[:6]))
        assert wire.recorder.resumable and not wire.play(b"".join(cut))
        assert not wire.recorder.finish()


def test_logprobs_of_an_empty_text_count_in_both_answers() -> None:
    """A token that is a part of a character."""

    def delta(number: int, text: str, logprobs: int) -> bytes:
        fields = {"item_id": "i", "output_index": 0, "content_index": 0, "delta": text}
        kind = "response.output_text.delta"
        entries = [{"token": text}] * logprobs
        return frame({"type": kind, "sequence_number": number, "logprobs": entries, **fields})[:-2]

    transcript = NamedTranscript(ResponsesSchema())
    transcript.add([delta(0, "a", 1), delta(1, "", 1), delta(2, "é", 1)])
    replay = transcript.replay()
    assert not replay.new_part(delta(0, "a", 1)) and not replay.new_part(delta(1, "", 1))
    new = json.loads(replay.new_part(delta(2, "éb", 2)).partition(b"data: ")[2])
    assert (new["delta"], len(new["logprobs"])) == ("b", 1)


def changed(event: bytes, **fields: object) -> bytes:
    return frame({**json.loads(event.partition(b"data: ")[2]), **fields})


TOLD = Responses("A", PLAIN).events()
MESSAGE = Messages("A", PLAIN).events()
RESPONSE: dict[str, Any] = json.loads(TOLD[0].partition(b"data: ")[2])["response"]
UNKNOWN = [
    (
        Responses,
        [
            *TOLD[:4],
            frame(
                {"type": "response.web_search_call.searching", "sequence_number": 4, "item_id": "i"}
            ),
        ],
    ),
    (
        Responses,
        [
            *TOLD[:2],
            frame(
                {
                    "type": "response.output_item.added",
                    "sequence_number": 2,
                    "item": {"type": "mcp_call"},
                }
            ),
        ],
    ),
    (Responses, [changed(TOLD[0], response={**RESPONSE, "background": True})]),
    (Responses, [*TOLD[:4], changed(TOLD[4], token_ids=[1])]),
    (Responses, [*TOLD[:4], TOLD[5]]),  # one is missing
    (Responses, [*TOLD[:4], changed(TOLD[4], sequence_number=None)]),
    (
        Responses,
        [
            *TOLD[:4],
            TOLD[4].replace(
                b"event: response.output_text.delta", b"event: response.output_text.done"
            ),
            TOLD[5],
        ],
    ),
    (Responses, [*TOLD[:4], b"id: 4\n" + TOLD[4]]),
    (Responses, [*TOLD[:4], b'data: {"choices":[]}\n\n']),
    (Responses, [frame({"type": "response.created", "sequence_number": 0})]),
    (Messages, [*MESSAGE[:3], frame({"type": "novelty"})]),
    (Messages, [*MESSAGE[:1], changed(MESSAGE[1], content_block={"type": "server_tool_use"})]),
    (Messages, [*MESSAGE[:2], changed(MESSAGE[2], delta={"type": "citations_delta", "text": "a"})]),
    (
        Messages,
        [
            *MESSAGE[:2],
            changed(MESSAGE[2], delta={"type": "text_delta", "text": "a", "novelty": 1}),
        ],
    ),
    (Messages, [MESSAGE[0], b"data: {\n\n"]),
    (Messages, [MESSAGE[0], b"event: content_block_stop\ndata: {\n\n", MESSAGE[1]]),
    (
        Messages,
        [MESSAGE[0], b'event: message_stop\ndata: {"type":"content_block_stop","index":0}\n\n'],
    ),
    (
        Messages,
        [*MESSAGE[:2], MESSAGE[2].replace(b'"type":"content_block_delta"', b'"type":"ping"')],
    ),
    (Messages, [*MESSAGE, b"data: [DONE]\n\n", MESSAGE[0]]),
]


@pytest.mark.parametrize(("kind", "events"), UNKNOWN)
def test_unknown_events_are_not_continued(kind: Kind, events: list[bytes]) -> None:
    wire = Wire(path=kind.path)
    wire.play(b"".join(events))
    assert bytes(wire.out) == b"".join(events), "it is passed on all the same"
    assert not wire.recorder.resumable
    assert wire.play(b"".join(events)) and bytes(wire.out) == b"".join(events), (
        "nothing is appended"
    )


@pytest.mark.parametrize(("kind", "events"), UNKNOWN)
def test_nor_is_it_gone_on_with(kind: Kind, events: list[bytes]) -> None:
    wire = Wire(path=kind.path)
    told = kind("B", PLAIN).events()[:1]
    wire.play(b"".join(told))
    assert wire.recorder.resumable and wire.play(b"".join(events))
    assert wire.stopped[0][0] == "diverged" and b"novelty" not in wire.out


@pytest.mark.parametrize("kind", [Responses, Messages])
def test_comments_and_other_paths(kind: Kind) -> None:
    first, again = kind("A", PLAIN).events(), kind("B", PLAIN, 2).events()
    wire = Wire(path=kind.path)
    wire.play(b": keep-alive\n\n" + b": keep-alive\n\n".join(first[:5]))
    assert (
        wire.recorder.resumable
        and not wire.play(b": keep-alive\n\n".join(again))
        and wire.recorder.finish()
    )
    assert wire.out.count(b": keep-alive\n\n") == 5 + len(again) - 1, (
        "a sign of life while the second answer catches up"
    )
    same(
        kind,
        bytes(wire.out).replace(b": keep-alive\n\n", b""),
        b"".join(first),
        b"".join(first[:5]),
        b"".join(again),
    )
    for path in ("/v1/completions", "/other"):
        wire = Wire(path=path)
        wire.play(b"".join(first[:5]))
        assert not wire.recorder.resumable


def test_nothing_but_comments_is_no_beginning() -> None:
    for keep in (True, False):
        wire = Wire(keep, Messages.path)
        wire.play(b": keep-alive\n\n")
        assert wire.recorder.resumable and not wire.play(b"".join(MESSAGE))
        assert bytes(wire.out) == b": keep-alive\n\n" + b"".join(MESSAGE)


@pytest.mark.parametrize("kind", [Responses, Messages])
def test_an_engine_that_reports_its_failure_is_cut_off(kind: Kind) -> None:
    first, again = kind("A", THINKING).events(), kind("B", THINKING, 2).events()
    error = frame(
        {
            "type": "error",
            "error": {"type": "internal_error", "message": "EngineCore encountered an issue"},
        }
    )
    for at in range(1, len(first)):
        wire = Wire(path=kind.path)
        assert wire.play(b"".join(first[:at]) + error)
        sent = b"".join(written(b"".join(first[:at])))
        assert wire.stopped[0][0] == "died" and bytes(wire.out) == sent
        assert wire.recorder.error_event == error[:-2]
        assert wire.recorder.resumable and not wire.play(b"".join(again)), wire.stopped
        same(kind, bytes(wire.out), b"".join(first), sent, b"".join(again))


@pytest.mark.parametrize("step", [0, 1, 40])
@pytest.mark.parametrize("keep", [True, False])
def test_a_block_that_ends_because_its_engine_failed_goes_on(keep: bool, step: int) -> None:
    """vLLM 0.33 ends the open block, of thoughts with a signature, before it reports a failure."""
    first, again = Messages("A", THINKING).events(), Messages("B", THINKING, 2).events()
    error = frame(
        {
            "type": "error",
            "error": {"type": "api_error", "message": "EngineCore encountered an issue"},
        }
    )
    signature = {"type": "signature_delta", "signature": "of half a thought"}
    signed = frame({"type": "content_block_delta", "index": 0, "delta": signature})
    for at in (3, 4):  # events of the first block
        end = signed + frame({"type": "content_block_stop", "index": 0})
        wire = Wire(keep, Messages.path)
        assert wire.play(b"".join(first[:at]) + end + error, step)
        assert wire.stopped[0][0] == "died" and bytes(wire.out) == b"".join(first[:at])
        if keep:
            assert wire.recorder.resumable and not wire.play(b"".join(again)), wire.stopped
            sent = b"".join(first[:at])
            same(Messages, bytes(wire.out), b"".join(first), sent, b"".join(again))
    wire = Wire(keep, Messages.path)
    assert not wire.play(b"".join(first), step) and wire.recorder.finish()
    assert bytes(wire.out) == b"".join(first), "in an answer that goes on all ends are sent"


@pytest.mark.parametrize("again", [True, False])
def test_ends_of_parts_behind_which_a_body_ends_are_sent(again: bool) -> None:
    """The last event may lack its blank line, as behind a gateway: it releases no held ends."""
    events = Responses("A", THINKING).events()
    whole = b"".join(events)[:-2]
    wire = Wire(path=Responses.path)
    if again:
        assert not wire.play(b"".join(events[:3]))
        other = b"".join(Responses("B", THINKING, 2).events())
        assert not wire.play(other)
    else:
        assert not wire.play(whole)
    assert wire.recorder.finish()
    if again:
        same(Responses, bytes(wire.out), b"".join(events), b"".join(events[:3]), other)
    else:
        assert bytes(wire.out) == whole


def test_a_comment_releases_no_end_of_a_part() -> None:
    first, again = Messages("A", PLAIN).events(), Messages("B", PLAIN, 2).events()
    given_up = frame({"type": "message_delta", "delta": {"stop_reason": None}, "usage": {}})
    end_of_block = frame({"type": "content_block_stop", "index": 0})
    wire = Wire(path=Messages.path)
    sink = wire.recorder.start_answer(lambda *stopped: wire.stopped.append(stopped))
    for event in (*first[:5], end_of_block, b": keep-alive\n\n", given_up):
        sink(event)
    assert wire.stopped[0][0] == "stopping" and bytes(wire.out) == b"".join(first[:5])
    assert not wire.play(b"".join(again))
    same(Messages, bytes(wire.out), b"".join(first), b"".join(first[:5]), b"".join(again))


def test_a_message_that_its_engine_gives_up_goes_on() -> None:
    first, again = Messages("A", PLAIN).events(), Messages("B", PLAIN, 2).events()
    given_up = frame({"type": "message_delta", "delta": {"stop_reason": None}, "usage": {}})
    end_of_block = frame({"type": "content_block_stop", "index": 0})
    for cut in (b"", end_of_block):
        wire = Wire(path=Messages.path)
        assert wire.play(b"".join(first[:5]) + cut + given_up)
        assert wire.stopped[0][0] == "stopping"
        assert wire.recorder.resumable and not wire.play(b"".join(again))
        same(Messages, bytes(wire.out), b"".join(first), b"".join(first[:5]), b"".join(again))


def test_memory_is_bounded() -> None:
    said = [("content", f" word{at}") for at in range(3000)]
    first, again = Responses("A", said).events(), Responses("B", said, 7).events()
    wire = Wire(path=Responses.path)
    sink = wire.recorder.start_answer(lambda *_: None)
    for event in first[:2500]:
        sink(event)
        assert wire.recorder._recorded_bytes <= FOLD_BYTES
    assert wire.recorder.resumable and len(wire.recorder._transcript.parts) == 5  # type: ignore[attr-defined]
    assert not wire.play(b"".join(again))
    same(Responses, bytes(wire.out), b"".join(first), b"".join(first[:2500]), b"".join(again))


def test_an_answer_of_too_many_parts_is_not_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_disagg.proxy.requests.named_events.MAX_PARTS", 4)
    for sent, resumable in ((TOLD[:4], True), (TOLD[:5], False)):
        wire = Wire(path=Responses.path)
        wire.play(b"".join(sent))
        assert wire.recorder.resumable == resumable


# Through a proxy ----------------------------------------------------------------------------------


def engines(
    kind: Kind, die_after: int, asked: list[Call], how: str = "reset"
) -> Callable[[Call], Any]:
    """Returns instances of which the first that gets a request breaks off after so many events."""

    async def script(call: Call) -> None:
        if call.leg == "prefill":
            await answer(call)
            return
        asked.append(call)
        first = len(asked) == 1
        await call.stream()
        for at, event in enumerate(kind(call.engine.name, THINKING, 1 if first else 2).events()):
            if first and at == die_after:
                await settle()
                if how == "freeze":
                    await call.forever()
                call.reset()
                return
            await call.chunk(event)
        await call.end()

    return script


@pytest.mark.parametrize("kind", [Responses, Messages])
@pytest.mark.parametrize("prefill", [0, 1])
@pytest.mark.parametrize("fields", [{"temperature": 0}, {"seed": 4}, {}])
async def test_a_stream_goes_on_elsewhere(kind: Kind, prefill: int, fields: dict[str, Any]) -> None:
    for die_after in (1, 2, 5, 12):
        async with world(prefill=prefill, decode=2) as w:
            asked: list[Call] = []
            for engine in w.prefills + w.decodes:
                engine.script = engines(kind, die_after, asked)
            prompt = {
                "input": "x",
                "messages": [{"role": "user", "content": "x"}],
                "max_tokens": 99,
            }
            reply = await w.post(
                kind.path, json.dumps({"model": "m", "stream": True, **prompt, **fields}).encode()
            )
            assert reply.status == 200 and reply.complete
            first, second = (asked[0].engine.name, asked[-1].engine.name)
            made = [b"".join(kind(n, THINKING, w_).events()) for n, w_ in ((first, 1), (second, 2))]
            sent = b"".join(kind(first, THINKING).events()[:die_after])
            if die_after < 3 and reply.body == made[1]:  # nothing had been sent
                continue
            if fields:
                assert first != second
                same(kind, reply.body, made[0], sent, made[1])
            else:
                assert reply.body.startswith(sent), "a sampled answer is another one"
                error = reply.body[len(sent) :]
                assert (
                    error.startswith((b"event: error\n", b'data: {"error"'))
                    and error.count(b"data: {") == 1
                )


@pytest.mark.parametrize("done", [False, True])
async def test_an_unverified_answer_is_continued_elsewhere(done: bool) -> None:
    """The held last event comes from the second answer, as does the end of the text."""
    async with world(prefill=0, decode=2) as w:
        asked: list[Call] = []
        victims: list[Any] = []

        async def one_more(call: Call) -> None:
            finish = "abort" if call.engine in victims else "length"
            data = json.dumps({"choices": [{"finish_reason": finish}]}, separators=(",", ":"))
            call.raw_write(f"HTTP/1.1 200 X\r\ncontent-length: {len(data)}\r\n\r\n{data}")

        async def script(call: Call) -> None:
            asked.append(call)
            first = len(asked) == 1
            events = Responses(call.engine.name, PLAIN[:3] if first else PLAIN).events()
            if first:  # it was cut, and says that it is complete
                victims.append(call.engine)
                events = events if done else [*events[:7], changed(events[-1], sequence_number=7)]
            await call.stream()
            for event in events:
                await call.chunk(event)
            await call.end()

        for engine in w.decodes:
            engine.script, engine.one_more = script, one_more
        body = json.dumps({"model": "m", "stream": True, "input": "x", "temperature": 0}).encode()
        reply = await w.post("/v1/responses", body)
        assert reply.complete and len(asked) == 2
        said = hear_response(reply.body)
        assert said["said"] == [("message", "".join(text for _, text in PLAIN))]
        assert said["head"][0] == f"resp_{asked[0].engine.name}"


def test_endless_bytes_after_the_end_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_disagg.proxy.http.sse.EVENT_LIMIT_BYTES", 10_000)
    wire = Wire(path=Responses.path)
    wire.recorder._end_mark = END_MARKS[Responses.path]
    sink = wire.recorder.start_answer(lambda reason, detail: wire.stopped.append((reason, detail)))
    for _ in range(100):
        if not wire.stopped:
            sink(TOLD[-1])
    limit = streams.MAX_HELD_EVENTS * 10_000
    assert wire.stopped[0][0] == "garbled" and len(wire.recorder.held) < limit + 1000


def test_endless_ends_of_parts_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_disagg.proxy.http.sse.EVENT_LIMIT_BYTES", 1000)
    wire = Wire(path=Responses.path)
    sink = wire.recorder.start_answer(lambda reason, detail: wire.stopped.append((reason, detail)))
    end = b'event: response.output_text.done\ndata: {"text":"x"}\n\n'
    for _ in range(100):
        if not wire.stopped:
            sink(end)
    assert wire.stopped == [("garbled", "it ends parts again and again")]
    assert len(wire.recorder._held_ends) < streams.MAX_HELD_EVENTS * 1000 + len(end)


@pytest.mark.parametrize("kind", [Responses, Messages])
def test_only_a_large_event_ends_a_recording(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ends of a part and the next event counted as one: 350 KB of text were too much."""
    told = b"".join(kind("A", THINKING, 3).events()[:-1])
    largest = max(map(len, written(told))) - len(b"\n\n")
    for limit, is_recorded in ((largest, True), (largest - 1, False)):
        monkeypatch.setattr("vllm_disagg.proxy.http.sse.PARSED_LIMIT_BYTES", limit)
        wire = Wire(path=kind.path)
        assert not wire.play(told, step=1)
        assert wire.recorder.resumable is is_recorded


def test_an_end_of_large_events_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has all logprobs of the answer: 14,000 tokens with 20 each made more than 64 MiB."""
    monkeypatch.setattr("vllm_disagg.proxy.http.sse.EVENT_LIMIT_BYTES", 1000)
    names = ("output_text.done", "content_part.done", "output_item.done", "completed")
    padding = b"x" * 900
    events = [
        b'event: response.%b\ndata: {"type":"response.%b","x":"%b"}\n\n' % (name, name, padding)
        for name in (name.encode() for name in names)
    ]
    for size in (100, 10_000):
        out = bytearray()
        mark = END_MARKS[Responses.path]
        recorder = streams.StreamRecorder(out.extend, True, mark, Responses.path)
        sink = recorder.start_answer(lambda *_: pytest.fail("it was stopped"))
        told = b"".join([*events[:3], b"event: x\ndata: {}\n\n", *events])
        for at in range(0, len(told), size):
            sink(told[at : at + size])
        assert bytes(out).endswith(b"event: x\ndata: {}\n\n"), "the end is held"
        assert recorder.finish() and bytes(out) == told
