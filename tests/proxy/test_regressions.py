"""Tests faults of the proxy that a reader found."""

from __future__ import annotations

import asyncio
import json

import pytest

from proxy_world import Call, answer, settle, until, world
from vllm_disagg.proxy.http.connection_pool import ConnectionPool, pool_of
from vllm_disagg.proxy.http.upstream_response import Unreachable
from vllm_disagg.proxy.membership.discovery import Discovery
from vllm_disagg.proxy.membership.members import Members, MembershipChange
from vllm_disagg.proxy.requests import bodies, legs
from vllm_disagg.proxy.routing.fleet import Fleet

EVENT = b'data: {"id":"x","object":"c","created":1,"choices":[{"index":0,"delta":%s%s}]}\n\n'
ROLE = EVENT % (b'{"role":"assistant","content":""}', b"")
ENDINGS = {
    "abort": EVENT % (b'{"content":""}', b',"finish_reason":"abort"'),
    "error": b'data: {"error":{"message":"EngineCore encountered an issue","code":500}}\n\n',
}


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=ENDINGS)
async def test_a_failed_stream_that_came_in_one_piece_is_no_answer(ending: bytes) -> None:
    """The answer is complete before the proxy reads it."""
    async with world(decode=2) as w:

        async def stopping(call: Call) -> None:
            if call.leg == "prefill" or sum(len(d.calls) for d in w.decodes) > 1:
                await answer(call)
                return
            chunks = "".join(
                f"{len(piece):x}\r\n{piece.decode()}\r\n"
                for piece in (ROLE, ending, b"data: [DONE]\n\n")
            )
            head = (
                "HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\n"
                "transfer-encoding: chunked\r\n\r\n"
            )
            call.raw_write(f"{head}{chunks}0\r\n\r\n")

        for e in w.prefills + w.decodes:
            e.script = stopping
        messages = [{"role": "user", "content": "a"}]
        reply = await w.post("/v1/chat/completions", messages=messages, stream=True, temperature=0)
        assert sum(len(d.calls) for d in w.decodes) == 2, "nobody else was asked"
        assert b"abort" not in reply.body and b"EngineCore encountered an issue" not in reply.body


@pytest.mark.parametrize(
    "kind", [b"multipart/form-data; boundary=x", b"multipart/form-data; boundary=x; charset=utf-16"]
)
def test_a_form_cannot_carry_what_json_must_not(kind: bytes) -> None:
    name = b"other" if b"charset" in kind else b"vllm_xargs"
    disposition = b'Content-Disposition: form-data; name="%s"' % name
    part = b'--x\r\n%s\r\n\r\n{"kv_transfer_params":"x"}\r\n--x--' % disposition
    with pytest.raises(bodies.BadBody):
        asyncio.run(bodies.check_form(kind, part))
    asyncio.run(bodies.check_form(b"multipart/form-data; boundary=x", part.replace(name, b"model")))


async def test_a_drain_ends_with_its_instance() -> None:
    members = Members(Fleet(), {}, ConnectionPool, Discovery.watch, lambda: None)  # type: ignore[arg-type]  # not started: it only listens
    members.apply(MembershipChange("add", "http://a"))
    for kind in ("drain", "remove"):
        members.apply(MembershipChange(kind, "http://a"))  # type: ignore[arg-type]
    assert not members.is_drained("http://a")


async def test_a_refusal_is_in_words_about_what_the_client_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P refuses a request for one token; D, a little later, one for the client's number."""
    monkeypatch.setattr(legs, "DECODE_REFUSAL_SECONDS", 60.0)
    async with world() as w:

        async def refuse(call: Call) -> None:
            if call.leg != "prefill":
                await until(lambda: w.p.calls)
                await settle()
            data = json.dumps({"error": {"message": f"{call.leg} refuses", "code": 400}})
            call.raw_write(
                f"HTTP/1.1 400 X\r\ncontent-type: application/json\r\n"
                f"content-length: {len(data)}\r\n\r\n{data}"
            )

        w.p.script = w.d.script = refuse
        reply = await w.post()
        assert reply.status == 400 and reply.json()["error"]["message"] == "decode refuses"


def test_who_was_cut_from_the_fleet_is_not_reached() -> None:
    with pytest.raises(Unreachable):
        pool_of({}, "http://a")
