"""Failures before an answer's first event of content: any other answer may take over."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from proxy_world import (
    LAST_EVENTS,
    Call,
    Reply,
    Script,
    ScriptedEngine,
    World,
    answer,
    settle,
    until,
    world,
)
from vllm_disagg.proxy.http.upstream_response import HOLD_BYTES, UpstreamResponse

COMMENT = b": keep-alive\n\n"
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
CREATED = b'event: response.created\ndata: {"type":"response.created","response":{"id":"%s"}}\n\n'
START = b'event: message_start\ndata: {"type":"message_start","message":{"id":"%s"}}\n\n'
CHAT = "/v1/chat/completions"
# By path: what vLLM's endpoint sends before its engine has computed anything, and the rest.
PREFACES = {
    path: (preface, content + LAST_EVENTS[path])
    for path, preface, content in (
        ("/v1/completions", COMMENT, b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'),
        (CHAT, ROLE, b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'),
        (
            "/v1/responses",
            CREATED % b"r1",
            b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta"}\n\n',
        ),
        (
            "/v1/messages",
            START % b"m1",
            b'event: content_block_delta\ndata: {"type":"content_block_delta",'
            b'"delta":{"text":"a"}}\n\n',
        ),
    )
}
PATHS = [*PREFACES, "late comment"]
ENGINE_DEAD = b'"message":"EngineCore encountered an issue"'
ERRORS = {
    "/v1/completions": b'data: {"error":{%b,"code":500}}\n\ndata: [DONE]\n\n' % ENGINE_DEAD,
    "/v1/messages": b'event: error\ndata: {"type":"error","error":{"type":"internal_error",%b}}\n\n'
    % ENGINE_DEAD,
    "/v1/responses": b'event: error\ndata: {"type":"error","code":"server_error",%b}\n\n'
    % ENGINE_DEAD,
}


async def post(w: World, path: str) -> Reply:
    body: dict[str, Any] = {"model": "m", "stream": True, "max_tokens": 9}
    if path == "/v1/completions":
        body["prompt"] = "hi"
    elif path == "/v1/responses":
        body["input"] = "hi"
    else:
        body["messages"] = [{"role": "user", "content": "hi"}]
    return await w.post(path, json.dumps(body).encode())


def preface_of(path: str) -> tuple[str, bytes, bytes]:
    if (
        path == "late comment"
    ):  # as `--sse-keep-alive-interval` makes them after a preface, in pieces
        return CHAT, ROLE + COMMENT[:5], PREFACES[CHAT][1]
    return (path, *PREFACES[path])


def streaming(preface: bytes, content: bytes) -> Script:
    """Streams a whole answer; a pair's decode leg sends its preface and waits for KV."""

    async def script(call: Call) -> None:
        await call.stream()
        await call.chunk(preface)
        if call.leg == "decode":
            await call.forever()
        await call.chunk(content if preface.endswith(b"\n") else COMMENT[5:] + content)
        await call.end()

    return script


def after(call_of: list[Call], status: int) -> Script:
    """Answers at P after D has sent its preface."""

    async def script(call: Call) -> None:
        await until(lambda: call_of)
        await settle()
        await call.json(
            {"error": {"message": "of P", "code": status}}, status, "retry-after: 7\r\n"
        )

    return script


@pytest.mark.parametrize("path", PATHS)
async def test_a_failure_of_p_counts_until_there_is_content(path: str) -> None:
    path, preface, content = preface_of(path)
    async with world() as w:
        w.p.script, w.d.script = after(w.d.calls, 503), streaming(preface, content)
        reply = await post(w, path)
        assert reply.status == 200 and reply.complete and reply.body.endswith(content)
        assert reply.body.count(preface) == 1, "one beginning"
        assert [call.leg for call in w.d.calls] == ["decode", "whole"]
        assert await w.metric("vllm_disagg_fallbacks_total", 'reason="prefill_5xx"') == 1


@pytest.mark.parametrize("path", PATHS)
async def test_a_refusal_of_p_leaves_d_alone_until_there_is_content(path: str) -> None:
    path, preface, content = preface_of(path)
    async with world() as w:
        w.p.script, w.d.script = after(w.d.calls, 400), streaming(preface, content)
        reply = await post(w, path)
        assert reply.status == 200 and reply.complete and reply.body.endswith(content)
        assert reply.body.count(preface) == 1, "one beginning"
        assert [call.leg for call in w.d.calls] == ["decode", "whole"]
        await w.d.calls[0].gone.wait()


@pytest.mark.parametrize("path", PATHS)
async def test_a_full_p_is_the_answer_until_there_is_content(path: str) -> None:
    status = 429
    path, preface, content = preface_of(path)
    async with world() as w:
        w.p.script, w.d.script = after(w.d.calls, status), streaming(preface, content)
        reply = await post(w, path)
        assert (reply.status, reply.json()["error"]["message"], reply.headers["retry-after"]) == (
            status,
            "of P",
            "7",
        )
        await w.d.calls[0].gone.wait()


def first_fails(how: bytes | None, preface: bytes, content: bytes) -> Script:
    """Lets the first D sent to stream its preface, then `how`, or die."""
    asked: list[ScriptedEngine] = []

    async def script(call: Call) -> None:
        asked.append(call.engine)
        await call.stream()
        if preface:
            await call.chunk(preface)
        if len(asked) > 1:
            await call.chunk(content)
            await call.end()
            return
        await settle()
        if how is None:
            call.reset()
        else:
            await call.chunk(how)
            await call.end()

    return script


@pytest.mark.parametrize("path", PREFACES)
@pytest.mark.parametrize("how", [None, b""], ids=["dies", "ends"])
async def test_d_that_fails_before_its_content_is_replaced(path: str, how: bytes | None) -> None:
    """Needs no temperature and no seed: nothing was sent that another answer could contradict."""
    preface, content = PREFACES[path]
    async with world(decode=2) as w:
        script = (
            first_fails(None, preface, content) if how is None else ends_early(preface, content)
        )
        for d in w.decodes:
            d.script = script
        reply = await post(w, path)
        assert (reply.status, reply.body) == (200, preface + content)
        assert sum(len(d.calls) for d in w.decodes) == 2


# A stream of /v1/responses is held from its last event on, which must be whole for that.
@pytest.mark.parametrize("path", [path for path in PREFACES if path != "/v1/responses"])
async def test_a_last_event_needs_no_blank_line(path: str) -> None:
    preface, content = PREFACES[path]
    async with world(prefill=0) as w:

        async def script(call: Call) -> None:
            await call.stream()
            await call.chunk(preface)
            await call.chunk(content.rstrip(b"\n"))
            await call.end()

        w.d.script = script
        reply = await post(w, path)
        assert (reply.status, reply.body) == (200, preface + content.rstrip(b"\n"))


async def test_the_end_of_the_body_ends_its_last_event() -> None:
    """No other event shows that the answer has begun."""
    path = "/v1/messages"
    preface, _ = PREFACES[path]
    last = LAST_EVENTS[path].rstrip(b"\n")
    async with world(prefill=0) as w:

        async def script(call: Call) -> None:
            await call.stream()
            await call.chunk(preface)
            await call.chunk(last)
            await call.end()

        w.d.script = script
        reply = await post(w, path)
        assert (reply.status, reply.body) == (200, preface + last)


async def test_a_compressed_stream_begins_with_its_first_byte() -> None:
    asked: list[Call] = []

    async def script(call: Call) -> None:
        asked.append(call)
        encoded = "content-type: text/event-stream\r\ncontent-encoding: gzip\r\ntransfer-encoding: chunked\r\n"
        call.raw_write(f"HTTP/1.1 200 OK\r\n{encoded}\r\n")
        await call.writer.drain()
        if len(asked) == 1:
            await settle()
            call.reset()
        else:
            await call.chunk(b"packed")
            await call.end()

    async with world(prefill=0, decode=2) as w:
        for d in w.decodes:
            d.script = script
        reply = await post(w, "/v1/completions")
        assert (reply.status, reply.body, len(asked)) == (200, b"packed", 2)


def ends_early(preface: bytes, content: bytes) -> Script:
    asked: list[Call] = []

    async def script(call: Call) -> None:
        asked.append(call)
        await call.stream()
        await call.chunk(preface)
        if len(asked) > 1:
            await call.chunk(content)
        await call.end()

    return script


@pytest.mark.parametrize("path", ERRORS)
@pytest.mark.parametrize("preface", [b"", COMMENT])
async def test_an_answer_that_begins_with_an_error_has_failed(path: str, preface: bytes) -> None:
    content = PREFACES[path][1]
    async with world(decode=2) as w:
        script = first_fails(ERRORS[path], preface, content)
        for d in w.decodes:
            d.script = script
        reply = await post(w, path)
        assert (reply.status, reply.body) == (200, preface + content)
        assert await w.metric("vllm_disagg_fallbacks_total", 'reason="decode_failed"') == 1
    async with world() as w:
        w.d.script = first_fails(ERRORS[path], preface, content)
        reply = await post(w, path)
        assert reply.status == 502 and "EngineCore encountered" in reply.body.decode()
        assert await w.metric("vllm_disagg_requests_total", 'outcome="upstream_error"') == 1


async def test_an_error_of_the_request_is_its_answer() -> None:
    error = b'event: error\ndata: {"type":"error","error":{"type":"invalid_request_error","message":"no"}}\n\n'
    async with world(decode=2) as w:
        for d in w.decodes:
            d.script = first_fails(error, COMMENT, b"")
        reply = await post(w, "/v1/messages")
        assert (reply.status, reply.body) == (200, COMMENT + error)


def in_two_chunks(preface: bytes, content: bytes, pause: float) -> Script:
    """Returns an engine's script: a stream's preface, a pause in seconds, its content."""

    async def script(call: Call) -> None:
        if call.leg == "prefill":
            await answer(call)
            return
        await call.stream()
        await call.chunk(preface)
        await asyncio.sleep(pause)
        await call.chunk(content)
        await call.end()

    return script


async def test_a_long_preface_is_delivered() -> None:
    """`response.created` repeats the request's instructions and tools."""
    preface, content = CREATED % (b"x" * 700_000), PREFACES["/v1/responses"][1]
    async with world() as w:
        w.p.script = w.d.script = in_two_chunks(preface, content, pause=0.05)
        body = {"model": "m", "stream": True, "input": "hi", "instructions": "y" * 200_000}
        reply = await w.post("/v1/responses", json.dumps(body).encode())
        assert reply.status == 200 and reply.body == preface + content


async def test_held_bytes_are_bounded() -> None:
    """A preface that is longer than any real one is passed on unchanged."""
    async with world() as w:

        async def flood(call: Call) -> None:
            await call.stream()
            with_comment = COMMENT * 1000
            for _ in range(40):
                await call.chunk(with_comment)
            await call.forever()

        w.d.script = flood
        client = await w.start(stream=True)
        await client.reader.readuntil(COMMENT * 10)
        client.close()


async def test_a_preface_that_came_at_once_is_not_waited_for() -> None:
    """Reading resumes when a preface exceeds the bound before `until` is called."""
    flows: list[bool] = []
    held = UpstreamResponse(SimpleNamespace(pause_reading=lambda paused: flows.append(paused)))  # type: ignore[arg-type]
    held.on_chunk(b"x" * (HOLD_BYTES + 1))
    assert flows == [True]
    waiting = asyncio.create_task(held.read_until(lambda data: b"!" in data, 1 << 20))
    await asyncio.sleep(0)
    assert flows[-1] is False
    held.on_chunk(b"!")
    assert await waiting


async def test_the_first_content_counts_as_the_first_token() -> None:
    """The held bytes reach the client in one piece with the first content."""
    preface, content = PREFACES["/v1/completions"]
    async with world() as w:
        w.p.script = w.d.script = in_two_chunks(preface, content, pause=0.02)
        assert (await post(w, "/v1/completions")).body == preface + content
        assert await w.metric("vllm_disagg_ttft_seconds_count") == 1
