"""Answers that look complete although their stopping engine aborted them."""

from __future__ import annotations

import asyncio
import json

import pytest

from proxy_world import LAST_EVENTS, NO_KEYS, Call, ScriptedEngine, World, answer, world
from vllm_disagg.protocol.peers import EngineInfo
from vllm_disagg.proxy.requests import completeness
from vllm_disagg.proxy.requests.completeness import doubtful, doubtful_stream
from vllm_disagg.proxy.requests.streams import StreamRecorder
from vllm_disagg.proxy.routing.fleet import Instance

PARTS = {  # of a stream: its middle, its end
    "/v1/responses": (
        b'event: response.output_text.delta\ndata: {"delta":"a"}\n\n',
        b'event: response.completed\ndata: {"type":"response.completed","response":{"status":"completed"}}\n\n',
    ),
    "/cohere/v2/chat": (
        b'data: {"type":"content-delta","delta":{}}\n\n',
        b'data: {"type":"message-end","delta":{"finish_reason":"COMPLETE"}}\n\ndata: [DONE]\n\n',
    ),
}


async def as_vllm(call: Call, obj: object) -> None:
    """Returns JSON without spaces."""
    data = json.dumps(obj, separators=(",", ":"))
    call.raw_write(
        f"HTTP/1.1 200 X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n{data}"
    )


class Stopping:
    """Engines; the first that gets a client's request is stopping, answers, and is checked."""

    def __init__(self, w: World, living: int = 0) -> None:
        self.victim: ScriptedEngine | None = None
        self.asked: list[Call] = []  # for one more token
        self.living = living  # of so many questions the engine gives tokens still
        for engine in w.prefills + w.decodes:
            engine.script, engine.one_more = self.serve, self.one_more

    async def one_more(self, call: Call) -> None:
        self.asked.append(call)
        await asyncio.sleep(0.02)
        stopped = call.engine is self.victim and len(self.asked) > self.living
        await as_vllm(call, {"choices": [{"finish_reason": "abort" if stopped else "length"}]})

    async def serve(self, call: Call) -> None:
        if call.leg == "prefill":
            await answer(call)
        else:
            self.victim = self.victim or call.engine
            await self.tell(call)

    async def tell(self, call: Call) -> None:
        if call.body.get("stream"):
            await call.stream()
            for part in PARTS[call.path]:
                await call.chunk(part[:30])  # events do not come in whole pieces
                await call.chunk(part[30:])
            await call.end()
        else:
            await call.json(
                {"status": call.body.get("status", "completed"), "who": call.engine.name}
            )


def body(**fields: object) -> bytes:
    return json.dumps({"model": "m", "input": "hi", "messages": [], **fields}).encode()


async def unframed(call: Call, content_type: str, content: bytes, status: int = 200) -> None:
    """Answers with neither a length nor chunks: the end of the connection ends the body."""
    head = f"HTTP/1.1 {status} so\r\ncontent-type: {content_type}\r\nconnection: close\r\n\r\n"
    call.raw_write(head)
    call.writer.write(content)
    await call.writer.drain()
    call.writer.close()


SOME = b'data: {"choices":[{"index":0,"text":"a"}],"type":"novelty"}\n\n'


@pytest.mark.parametrize("is_framed", [True, False], ids=["chunks", "unframed"])
@pytest.mark.parametrize("path", [*LAST_EVENTS, "/cohere/v2/chat", "/v1/audio/transcriptions"])
async def test_a_stream_without_its_last_event_was_cut_off(path: str, is_framed: bool) -> None:
    async def cut(call: Call) -> None:
        if call.leg == "prefill":
            await answer(call)
        elif is_framed:
            await call.stream()
            await call.chunk(SOME)
            await call.end()
        else:
            await unframed(call, "text/event-stream", SOME)

    async with world() as w:
        for engine in w.prefills + w.decodes:
            engine.script = cut
        fields = {"prompt": "x", "token_ids": [1], "sampling_params": {}}
        reply = await w.ask("POST", path, body(stream=True, **fields))
        assert reply.body.startswith(SOME) and b'"error"' in reply.body and reply.complete
        assert await w.metric("vllm_disagg_requests_total", 'outcome="upstream_error"') == 1


@pytest.mark.parametrize(
    "last", ["last event", "error", "compressed", "of another path", "comment", "comment apart"]
)
async def test_a_stream_that_ends_as_it_may_is_whole(last: str) -> None:
    """Bodies without a length: nothing else shows their end."""
    error = b'data: {"error":{"message":"no","type":"BadRequestError","code":400}}\n\n'
    done, comment = LAST_EVENTS["/v1/completions"], b": bye\n\n"
    ends = {"last event": done, "error": error, "comment": done + comment}
    end = ends.get(last, done + comment if last == "comment apart" else b"")
    kind = "text/event-stream"
    if last == "compressed":
        kind += "\r\ncontent-encoding: gzip"

    async def whole(call: Call) -> None:
        if last != "comment apart":
            await unframed(call, kind, SOME + end)
            return
        await call.stream()
        for chunk in (SOME, done, comment):
            await call.chunk(chunk)
            await asyncio.sleep(0.05)
        await call.end()

    async with world(prefill=0) as w:
        w.d.script = whole
        if last == "of another path":
            reply = await w.ask("GET", "/v1/responses/resp_1?stream=true", b"")
        else:
            reply = await w.ask("POST", "/v1/completions", body(stream=True, prompt="x"))
        assert (reply.status, reply.body, reply.complete) == (200, SOME + end, True)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/completions/render"])
async def test_json_without_a_length_that_was_cut_off_is_no_answer(path: str) -> None:
    asked: list[Call] = []

    async def cut(call: Call) -> None:
        if call.leg == "prefill":
            await answer(call)
            return
        asked.append(call)
        content = b'{"choices":[{"text":"a"}]}'
        await unframed(call, "application/json", content[:-5] if len(asked) == 1 else content)

    async with world(decode=2) as w:
        for engine in w.prefills + w.decodes:
            engine.script = cut
        reply = await w.ask("POST", path, body(prompt="x"))
        assert (reply.status, len(asked)) == (200, 2)
        assert reply.json() == {"choices": [{"text": "a"}]}


@pytest.mark.parametrize(
    ("status", "kind", "content"),
    [
        (200, "application/json-seq", b'\x1e{"a":1}\n\x1e{"a":2}\n'),
        (401, "application/json", b""),
    ],
)
async def test_other_bodies_without_a_length_are_whole(
    status: int, kind: str, content: bytes
) -> None:
    async def script(call: Call) -> None:
        await unframed(call, kind, content, status)

    async with world(prefill=0) as w:
        w.d.script = script
        reply = await w.get("/version")
        assert (reply.status, reply.body) == (status, content)


@pytest.mark.parametrize("path", PARTS)
async def test_a_cut_answer_with_status_completed_is_no_answer(path: str) -> None:
    async with world(decode=2) as w:
        engines = Stopping(w)
        reply = await w.ask("POST", path, body())
        assert engines.victim and reply.status == 200
        assert reply.json()["who"] in {d.name for d in w.decodes} - {engines.victim.name}


@pytest.mark.parametrize("path", PARTS)
async def test_a_stream_is_not_complete_until_one_more_token_came(path: str) -> None:
    async with world(decode=2) as w:
        engines = Stopping(w)
        reply = await w.ask("POST", path, body(stream=True))
        middle, end = PARTS[path]
        assert (
            middle in reply.body
            and end not in reply.body
            and b'"error"' in reply.body
            and reply.complete
        )
        engines.victim = None
        engines.living = 9
        reply = await w.ask("POST", path, body(stream=True))
        assert reply.body == middle + end and reply.complete


@pytest.mark.parametrize(
    ("path", "fields", "is_asked"),
    [
        ("/v1/completions", {"prompt": "x", "n": 2}, True),
        ("/v1/completions", {"prompt": ["x", "y"]}, True),
        ("/v1/chat/completions", {"n": 2}, True),
        # Several choices, and other reasons to serve the request whole.
        ("/v1/completions", {"prompt": ["x", "y"], "truncate_prompt_tokens": -1}, True),
        ("/v1/completions", {"prompt": "x", "n": 2, "prompt_logprobs": 0}, True),
        ("/v1/completions", {"prompt": "x", "n": 2, "echo": True}, True),
        ("/v1/completions", {"prompt": "x", "n": 2, "prompt_embeds": "x"}, True),
        ("/v1/completions", {"prompt": ["x", "y"], "echo": True}, True),
        ("/v1/completions", {"prompt_embeds": ["x", "y"]}, True),
        ("/v1/chat/completions", {"n": 2, "prompt_logprobs": 0}, True),
        # Other reasons alone.
        ("/v1/completions", {"prompt": [1, 2], "echo": True}, False),
        ("/v1/completions", {"prompt": "x", "prompt_embeds": None, "n": None}, False),
        ("/v1/completions", {"prompt": "x"}, False),
        ("/v1/chat/completions", {}, False),
    ],
)
async def test_a_choice_without_a_token_is_missed(
    path: str, fields: dict[str, object], is_asked: bool
) -> None:
    """A stopping engine leaves out the choices that have no token yet."""
    async with world(decode=2) as w:
        engines = Stopping(w)

        async def tell(call: Call) -> None:
            await call.stream()
            await call.event({"choices": [{"index": 0, "text": "a", "finish_reason": "stop"}]})
            await call.event("[DONE]")
            await call.end()

        engines.tell = tell  # type: ignore[method-assign]
        reply = await w.ask("POST", path, body(stream=True, **fields))
        assert bool(engines.asked) is is_asked
        assert (b"[DONE]" in reply.body and b'"error"' in reply.body) == is_asked, reply.body
        engines.victim = None
        engines.living = 9
        reply = await w.ask("POST", path, body(stream=True, **fields))
        assert reply.complete and reply.body.endswith(b"data: [DONE]\n\n")
        assert b'"error"' not in reply.body


@pytest.mark.parametrize("cut", [1, 60, 1000])
async def test_a_text_about_the_end_is_no_end(cut: int) -> None:
    """A text that mentions `data: [DONE]` is sent at once, and so is what follows it."""
    async with world(decode=2) as w:
        engines = Stopping(w, living=9)
        go = asyncio.Event()
        text = "use data: [DONE]\n\ndata: [DONE] to end"
        chunk = {"choices": [{"index": 0, "text": text, "finish_reason": None}]}
        event = b"data: " + json.dumps(chunk).encode() + b"\n\n"

        async def tell(call: Call) -> None:
            await call.stream()
            for begin in range(0, len(event), cut):
                await call.chunk(event[begin : begin + cut])
            await go.wait()
            await call.chunk(event + b"data: [DONE]\n\n")
            await call.end()

        engines.tell = tell  # type: ignore[method-assign]
        client = await w.connect()
        client.send("POST", "/v1/completions", body(stream=True, prompt="x", n=2))
        read = b""
        try:
            async with asyncio.timeout(50):
                while b"to end" not in read:
                    read += await client.reader.read(65536)
        finally:
            go.set()  # a request that waits would delay the end of the proxy
        assert not engines.asked
        async with asyncio.timeout(50):
            while b"\r\n0\r\n\r\n" not in read:
                read += await client.reader.read(65536)
        assert engines.asked


TOOL_ENDS: dict[str, dict[str, object]] = {  # as vLLM writes them over "abort"
    "/v1/chat/completions": {"choices": [{"index": 0, "finish_reason": "tool_calls"}]},
    "/v1/messages": {"type": "message", "stop_reason": "tool_use"},
}
# By path: of a stream, a tool's call, its end (of vLLM before 0.31) and the stream's last event.
TOOL_STREAMS = {
    "/v1/chat/completions": (
        b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]}}]}\n\n',
        b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}]}\n\n',
        LAST_EVENTS["/v1/chat/completions"],
    ),
    "/v1/messages": (
        b'event: content_block_start\ndata: {"type":"content_block_start","index":0,'
        b'"content_block":{"type":"tool_use","id":"t","name":"f","input":{}}}\n\n',
        b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"tool_use"}}\n\n',
        LAST_EVENTS["/v1/messages"],
    ),
}


@pytest.mark.parametrize("path", TOOL_ENDS)
async def test_a_tools_call_may_hide_an_abort(path: str) -> None:
    """The engine stops after the first of two calls."""
    async with world(prefill=0, decode=2) as w:
        engines = Stopping(w)

        async def serve(call: Call) -> None:
            engines.victim = engines.victim or call.engine
            await as_vllm(call, {**TOOL_ENDS[path], "who": call.engine.name})

        for engine in w.prefills + w.decodes:
            engine.script = serve
        reply = await w.ask("POST", path, body(max_tokens=9))
        assert engines.victim and reply.status == 200
        assert reply.json()["who"] != engines.victim.name
        assert [call.engine is engines.victim for call in engines.asked] == [True, False]


@pytest.mark.parametrize("path", TOOL_STREAMS)
async def test_the_end_of_a_streamed_tools_call_waits_for_one_more_token(path: str) -> None:
    call_of_tool, end, last = TOOL_STREAMS[path]
    async with world(prefill=0) as w:
        engines = Stopping(w, living=1)

        async def tell(call: Call) -> None:
            await call.stream()
            await call.chunk(call_of_tool + end[:40])
            await call.chunk(end[40:])
            if call.body.get("is_whole"):
                await call.chunk(last)
            await call.end()

        engines.tell = tell  # type: ignore[method-assign]
        reply = await w.ask("POST", path, body(stream=True, is_whole=True))
        assert reply.body == call_of_tool + end + last and len(engines.asked) == 1
        reply = await w.ask("POST", path, body(stream=True))
        assert reply.status == 200 and call_of_tool in reply.body
        assert end not in reply.body and b'"error"' in reply.body, "it was cut behind the call"
        assert len(engines.asked) == 1
        reply = await w.ask("POST", path, body(stream=True, is_whole=True))
        assert end not in reply.body and b'"error"' in reply.body and reply.complete
        assert len(engines.asked) == 2


def test_nothing_overtakes_a_held_event() -> None:
    """Events of one form go a shorter way; in one chunk, and in chunks of their own."""

    def event(**choice: object) -> bytes:
        chunk = {"id": "c", "choices": [{"index": 0, "delta": {}, **choice}]}
        return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"

    path = "/v1/chat/completions"
    text = event(delta={"content": "a"})
    end = event(finish_reason="tool_calls")
    for chunks in (
        [text, text, text + end, text, text, LAST_EVENTS[path]],
        [text, text, end, text, text, LAST_EVENTS[path]],
    ):
        sent: list[bytes] = []
        recorder = StreamRecorder(sent.append, False, completeness.TOOL_MARKS[path], path)
        feed = recorder.start_answer(lambda *_: pytest.fail("it was stopped"))
        for chunk in chunks:
            feed(chunk)
        assert b"".join(sent) == b"".join(chunks).partition(end)[0]
        assert recorder.finish() and b"".join(sent) == b"".join(chunks)


async def take_no_more(call: Call) -> None:
    """Sends the end of a tool's call after SIGTERM; refuses the token that is requested then."""
    call.engine.is_stopping = True
    if call.body.get("stream"):
        call_of_tool, end, last = TOOL_STREAMS[call.path]
        await call.stream()
        await call.chunk(call_of_tool + end)
        await call.chunk(last)
        await call.end()
    else:
        await as_vllm(call, TOOL_ENDS[call.path])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", TOOL_ENDS)
async def test_an_engine_that_drains_cuts_no_tools_call(path: str, stream: bool) -> None:
    """SIGTERM lets running requests finish, and the engine refuses new ones."""

    def drain(w: World) -> None:
        w.d.drains = True

    async with world(prefill=0, prepare=drain) as w:
        w.d.script = take_no_more
        reply = await w.ask("POST", path, body(stream=stream))
        assert reply.status == 200 and reply.complete and b'"error"' not in reply.body
        assert not w.d.refused, "it needs no check"


@pytest.mark.parametrize("drains", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_the_best_beam_may_be_that_of_a_search_that_was_cut(
    path: str, stream: bool, drains: bool
) -> None:
    """Each step of a search is a new request, which a draining engine aborts, too."""
    kind = "text" if path == "/v1/completions" else "delta" if stream else "message"

    def drain(w: World) -> None:
        for engine in w.decodes:
            engine.drains = drains

    async with world(decode=2, prepare=drain) as w:
        engines = Stopping(w)

        async def tell(call: Call) -> None:
            choice = {"index": 0, kind: "a", "finish_reason": "stop"}
            if not stream:
                await as_vllm(call, {"who": call.engine.name, "choices": [choice]})
                return
            await call.stream()
            await call.event({"choices": [choice]})
            await call.event("[DONE]")
            await call.end()

        engines.tell = tell  # type: ignore[method-assign]
        searching = body(stream=stream, use_beam_search=True, prompt="x", temperature=0)
        reply = await w.ask("POST", path, searching)
        first, *others = (call.engine for call in engines.asked)
        assert first is engines.victim
        if stream:
            assert reply.complete and b'"error"' in reply.body and not others
        else:
            assert [reply.json()["who"]] == [other.name for other in others]
            assert others[0] is not first, "another one has searched anew"
        asked = len(engines.asked)
        await w.ask("POST", path, body(stream=stream, use_beam_search=False, prompt="x"))
        assert len(engines.asked) == asked


@pytest.mark.parametrize(("version", "is_cut"), [("0.32.0+cpu", False), ("0.30.0", True)])
@pytest.mark.parametrize("path", TOOL_STREAMS)
async def test_vllm_031_shows_aborts_in_streams(path: str, version: str, is_cut: bool) -> None:
    def has_version(w: World) -> None:
        w.d.version = version

    async with world(prefill=0, prepare=has_version) as w:
        w.d.script = take_no_more
        reply = await w.ask("POST", path, body(stream=True))
        assert reply.status == 200 and reply.complete
        assert (b'"error"' in reply.body) is is_cut
        assert (TOOL_STREAMS[path][1] in reply.body) is not is_cut
        assert w.d.refused == is_cut
        whole = await w.ask("POST", path, body())
        assert whole.status in (502, 503), "of a whole answer it is not shown"


def test_a_chats_fingerprint_states_the_version() -> None:
    def end(fingerprint: str) -> bytes:
        return b'data: {"system_fingerprint":"%b"}' % fingerprint.encode()

    path = "/v1/chat/completions"
    older = EngineInfo("i", "decode", [], {}, version="0.30.0")
    for engine in (None, older):
        assert not doubtful_stream(path, False, end("vllm-0.32.0+cpu-tp2-1a2b"), engine)
        assert doubtful_stream(path, True, end("vllm-0.32.0-1a2b"), engine)
        for other in ("vllm-0.30.1-1a2b", "vllm-0.31.0rc1-1a2b", "vllm-my-own", "mine"):
            assert doubtful_stream(path, False, end(other), engine)
    escaped = json.dumps({"text": end("vllm-9-1").decode()}).encode()
    assert doubtful_stream(path, False, escaped, None)


async def test_one_question_serves_all_answers_before_it() -> None:
    async with world(prefill=0) as w:
        engines = Stopping(w, living=99)
        replies = await asyncio.gather(*(w.ask("POST", "/v1/responses", body()) for _ in range(20)))
        assert all(reply.status == 200 for reply in replies)
        assert 1 <= len(engines.asked) <= 10


@pytest.mark.parametrize("status", ["cancelled", "incomplete"])
async def test_gpt_oss_gives_cut_answers_another_status(status: str) -> None:
    async with world(decode=2) as w:
        engines = Stopping(w)
        reply = await w.ask("POST", "/v1/responses", body(status=status))
        assert engines.victim and reply.json()["who"] in {d.name for d in w.decodes} - {
            engines.victim.name
        }
        engines.living = 99
        reply = await w.ask("POST", "/v1/responses", body(status=status))
        assert reply.status == 200 and reply.json()["status"] == status, (
            "an answer that ended so is one"
        )


async def test_status_in_progress_needs_no_check() -> None:
    async with world(prefill=0) as w:
        engines = Stopping(w)
        assert (await w.ask("POST", "/v1/responses", body(status="in_progress"))).status == 200
        assert not engines.asked


async def test_an_engine_with_much_to_do_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue does not make an answer incomplete."""
    monkeypatch.setattr(completeness, "RETRY_SECONDS", 0.02)
    async with world(prefill=0) as w:
        engines = Stopping(w, living=99)

        async def busy(call: Call) -> None:
            engines.asked.append(call)
            await asyncio.sleep(0.3)
            await as_vllm(call, {"choices": [{"finish_reason": "length"}]})

        w.d.one_more = busy
        assert (await w.ask("POST", "/v1/responses", body())).status == 200
        assert len(engines.asked) == 1


async def test_an_engine_that_is_gone_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def silent(url: str, model: str) -> bool:
        instance.mark_down("it is frozen")
        await asyncio.Event().wait()
        return True

    instance, asks = (
        Instance("http://d", "decode", up=True),
        completeness.CompletenessCheck({}, NO_KEYS),
    )
    monkeypatch.setattr(completeness, "RETRY_SECONDS", 0.02)
    monkeypatch.setattr(asks, "_request_token", silent)
    assert not await asks.is_engine_running(instance)


async def test_tokens_that_do_not_come_are_a_line_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    check = completeness.CompletenessCheck({}, NO_KEYS)
    for _ in range(3):
        assert not await check.is_engine_running(Instance("http://d", "decode", up=True))
    assert caplog.text.count("did not produce one more token") == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/cohere/v2/chat"])
async def test_an_engine_without_completions_verifies_nothing(path: str, stream: bool) -> None:
    """A gateway may have some paths only: its 404 was taken for the end of its engine."""

    async def not_found(call: Call) -> None:
        await call.json({"detail": "Not Found"}, 404)

    def prepare(w: World) -> None:
        for d in w.decodes:
            d.probe_status, d.one_more = 404, not_found

    async def serve(call: Call) -> None:
        if call.body.get("stream"):
            await call.stream()
            for part in PARTS.get(path, (b"data: {}\n\n", LAST_EVENTS["/v1/chat/completions"])):
                await call.chunk(part)
            await call.end()
        else:
            await as_vllm(call, {"status": "completed", **call.body.get("told", {})})

    async with world(prefill=0, decode=2, prepare=prepare) as w:
        for d in w.decodes:
            d.script = serve
        fields: dict[str, object] = {"told": TOOL_ENDS.get(path, {}), "n": 1 + stream}
        reply = await w.ask("POST", path, body(stream=stream, **fields))
        error = json.loads(reply.body.split(b"data: ")[-2] if stream else reply.body)["error"]
        assert error["code"] == 501 and reply.status == (200 if stream else 501)
        assert "has no /v1/completions" in error["message"]
        assert sum(len(d.calls) for d in w.decodes) == 1, "another one verifies it no more"
        assert all(row["usable"] and not row["last_failure"] for row in await w.instances())
        # A chat of one choice without a tool's call is complete by itself.
        assert (await w.ask("POST", "/v1/chat/completions", body())).status == 200


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions/batch"])
async def test_forwarded_answers_are_checked_too(path: str) -> None:
    """No other instance has the id, so the client gets an error."""
    async with world(prefill=0, decode=2) as w:
        engines = Stopping(w)

        async def tell(call: Call) -> None:
            if call.path != "/v1/responses":
                finish = "abort" if call.engine is engines.victim else "stop"
                await as_vllm(call, {"choices": [{"finish_reason": finish}]})
            elif call.engine is engines.victim:
                await call.json({"status": "completed"})
            else:
                await call.json({"error": {}}, 404)

        engines.tell = tell  # type: ignore[method-assign]
        reply = await w.ask("POST", path, body(previous_response_id="x"))
        assert b"abort" not in reply.body
        assert reply.status == (502 if path == "/v1/responses" else 200)


def test_doubtful() -> None:
    assert doubtful("/v1/responses", b'{"status":"completed","output":[{"status":"incomplete"}]}')
    assert doubtful("/v1/responses", b'{"status":"incomplete"}') and not doubtful(
        "/v1/responses", b'{"status":"queued"}'
    )
    assert doubtful("/v1/audio/transcriptions", b"just a text")
    assert not doubtful("/v1/completions", b'{"status":"completed"}')
    assert not doubtful("/v1/chat/completions", b'{"choices":[{"finish_reason":"stop"}]}')
    escaped = json.dumps({"text": '"finish_reason":"tool_calls"'}, separators=(",", ":")).encode()
    assert not doubtful("/v1/chat/completions", escaped)
