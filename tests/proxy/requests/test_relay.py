"""Courses of requests through a proxy, with every fault at a known moment."""

import asyncio
import json
from typing import Any

import pytest

from proxy_world import (
    Call,
    Script,
    ScriptedEngine,
    World,
    answer,
    answer_at_once,
    hold_time_limit,
    refuse_as_stopping,
    settle,
    until,
    world,
)
from vllm_disagg.proxy.requests import failover, legs
from vllm_disagg.proxy.requests.failover import MAX_DEATHS

# As vLLM 0.32 and 0.33 word it.
DEATHS = [
    "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    "The server had an error while processing your request.",
]


async def hang(call: Call) -> None:
    await call.forever()


async def reset(call: Call) -> None:
    call.reset()


async def fail(call: Call) -> None:
    await call.json({"error": {"message": "boom", "code": 500}}, 500)


async def test_both_legs_at_once() -> None:
    async with world() as w:
        both = asyncio.Event()

        async def meet(call: Call) -> None:
            if w.p.calls and w.d.calls:
                both.set()
            await both.wait()  # no leg ends before both are here
            await answer(call)

        w.p.script = w.d.script = meet
        client = await w.connect()
        body = {"model": "m", "prompt": [1, 2], "max_tokens": 9, "temperature": 0.0}
        client.send(
            "POST",
            "/v1/completions",
            json.dumps(body).encode(),
            authorization="Bearer k",
            x_request_id="r1",
            traceparent="t",
            connection="x-hop",
            x_hop="1",
        )
        reply = await client.receive()
        assert (reply.status, reply.json()) == (200, {"text": "d0", "leg": "decode"})
        p, d = w.p.calls[0], w.d.calls[0]
        assert p.grant and d.grant and p.grant.transfer == d.grant.transfer
        assert (p.grant.leg, p.grant.engine, p.grant.sources) == ("prefill", "p0-1", [])
        assert (d.grant.leg, d.grant.engine, [s.name for s in d.grant.sources]) == (
            "decode",
            "d0-1",
            ["p0-w0"],
        )
        assert d.body == {**body, "kv_transfer_params": d.body["kv_transfer_params"]}
        assert p.body["max_tokens"] == 1 and p.body["stream"] is False
        for call in (p, d):
            assert [call.headers[n] for n in ("authorization", "x-request-id", "traceparent")] == [
                "bearer k",
                "r1",
                "t",
            ]
            assert (
                "x-hop" not in call.headers
                and call.headers["host"] == f"127.0.0.1:{call.engine.port}"
            )
        client.close()


async def test_stream_passes_byte_for_byte() -> None:
    async with world() as w:
        pieces = [
            b"data: 1\n\n",
            b": keep-alive\n\n",
            b"data: 2",
            b"\n",
            b"\ndata: 3\n\nda",
            b"ta: 4\n\n",
            b"data: [DO",
            b"NE]",
        ]

        async def stream(call: Call) -> None:
            await call.stream()
            for piece in pieces:
                await call.chunk(piece)
                await asyncio.sleep(0.005)
            await call.end()

        w.d.script = stream
        reply = await w.post(stream=True)
        assert reply.body == b"".join(pieces) and reply.complete
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"


async def test_tokens_arrive_as_they_are_made() -> None:
    async with world() as w:
        go = asyncio.Event()

        async def stream(call: Call) -> None:
            await call.stream()
            await call.event("1")
            await go.wait()
            await call.end()

        w.d.script = stream
        client = await w.start(stream=True)
        text = await client.reader.readuntil(b"data: 1\n\n")
        assert b"200 OK" in text
        go.set()
        client.close()


async def test_chat_goes_to_both() -> None:
    async with world() as w:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]}).encode()
        assert (await w.post("/v1/chat/completions", body)).json()["leg"] == "decode"
        assert w.p.calls[0].path == "/v1/chat/completions" and w.p.calls[0].body["max_tokens"] == 1


@pytest.mark.parametrize(
    "fields", [{"n": 2}, {"prompt": ["a", "b"]}, {"echo": True}, {"prompt": None}]
)
async def test_aggregated_requests(fields: dict[str, Any]) -> None:
    async with world() as w:
        assert (await w.post(**fields)).json() == {"text": "d0", "leg": "whole"}
        assert not w.p.calls
        assert w.d.calls[0].body["kv_transfer_params"] == {"disagg_whole": True}
        assert await w.metric("vllm_disagg_requests_total", 'mode="whole"', 'outcome="ok"') == 1


async def test_forbidden_fields() -> None:
    async with world() as w:
        reply = await w.post(_body=b'{"prompt":"a","x":{"kv_transfer_param\\u0073":{}}}')
        assert reply.status == 400
        assert (
            reply.json()["error"]["param"] == "kv_transfer_params"
            and reply.json()["error"]["code"] == 400
        )
        assert (await w.post(_body=b"{")).status == 400
        assert not w.p.calls and not w.d.calls


@pytest.mark.parametrize("stream", [False, True])
async def test_prefill_refuses_verbatim(stream: bool) -> None:
    status = 429
    async with world() as w:

        async def refuse(call: Call) -> None:
            await call.json({"error": {"message": "bad prompt"}}, status, "retry-after: 7\r\n")

        async def wait(call: Call) -> None:
            if stream:
                await call.stream()  # vLLM sends a stream's head at once
            await call.forever()

        w.p.script, w.d.script = refuse, wait
        reply = await w.post(stream=stream)
        assert (reply.status, reply.json()) == (status, {"error": {"message": "bad prompt"}})
        assert reply.headers["retry-after"] == "7"
        await w.d.calls[0].gone.wait()
        assert await w.metric("vllm_disagg_requests_total", 'outcome="client_error"') == 1


@pytest.mark.parametrize(
    ("decode_status", "answered"),
    [(422, (422, "of D")), (500, (500, "of D")), (200, (200, "of D"))],
)
async def test_a_soon_refusal_of_decode_replaces_that_of_prefill(
    decode_status: int, answered: tuple[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """D answers the client's request, P only its leg."""
    monkeypatch.setattr(legs, "DECODE_REFUSAL_SECONDS", 60.0)
    async with world() as w:
        prefill_refused = asyncio.Event()

        async def refuse(call: Call) -> None:
            await call.json("of P", 400)
            prefill_refused.set()

        async def answer_later(call: Call) -> None:
            await prefill_refused.wait()
            await settle()
            await call.json("of D", decode_status)

        w.p.script, w.d.script = refuse, answer_later
        reply = await w.post()
        assert (reply.status, reply.json()) == answered
        assert len(w.d.calls) == 1


async def test_a_death_behind_a_refusal_of_prefill_is_a_death(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request under which two instances died gets no third, and none of them twice."""
    monkeypatch.setattr(legs, "DECODE_REFUSAL_SECONDS", 60.0)
    async with world(decode=3) as w:
        prefill_refused = asyncio.Event()

        async def refuse(call: Call) -> None:
            await call.json("of P", 400)
            prefill_refused.set()

        async def die(call: Call) -> None:
            await prefill_refused.wait()
            await call.stream()  # without a head, a kept connection may just have been idle
            call.reset()

        w.p.script = refuse
        for d in w.decodes:
            d.script = die
        assert (await w.post()).status == 502
        assert sorted(len(d.calls) for d in w.decodes) == [0, 1, 1]


@pytest.mark.parametrize("words", DEATHS)
async def test_a_request_that_ends_engines_gets_no_third(words: str) -> None:
    """vLLM's API server outlives its engine; how it words that depends on its version."""
    async with world(decode=4) as w:

        async def die(call: Call) -> None:
            if call.leg == "prefill":
                await call.forever()
            await call.json({"error": {"message": words, "code": 500}}, 500)

        for engine in (w.p, *w.decodes):
            engine.script = die
        assert (await w.post()).status == 500
        assert sum(len(d.calls) for d in w.decodes) == MAX_DEATHS


@pytest.mark.parametrize("status", [400, 401, 404])
@pytest.mark.parametrize("decode_status", [200, 400])
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"max_tokens": 1}])
async def test_decode_decides_what_prefill_refuses(
    status: int, decode_status: int, fields: dict[str, Any]
) -> None:
    """P's limits may be its own; its refusal need not be D's."""
    async with world(prefill=2) as w:

        async def refuse(call: Call) -> None:
            await call.json("of P", status)

        async def alone(call: Call) -> None:
            if call.leg == "decode":
                await call.forever()
            elif decode_status == 200:
                await answer(call)
            else:
                await call.json("of D", decode_status)

        for p in w.prefills:
            p.script = refuse
        w.d.script = alone
        reply = await w.post(**fields)
        assert reply.status == decode_status
        assert decode_status == 200 or reply.json() == "of D"
        assert sum(len(p.calls) for p in w.prefills) == 1 and len(w.d.legs("whole")) == 1
        assert all(row["usable"] for row in await w.instances())
        for name, label in (("fallbacks", 'reason="prefill_declined"'), ("failovers", "")):
            counted = await w.metric(f"vllm_disagg_{name}_total", label)
            assert counted == (decode_status == 200), "what D refuses, too, is no fallback"


async def test_refusals_of_prefill_cost_no_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one client's invalid requests would use up the retries of all."""
    monkeypatch.setattr(failover.RetryBudget, "spend", lambda *_: False)
    async with world() as w:

        async def refuse(call: Call) -> None:
            await call.json("of P", 400)

        async def alone(call: Call) -> None:
            if call.leg == "decode":
                await call.forever()
            await answer(call)

        w.p.script, w.d.script = refuse, alone
        assert (await w.post()).json() == {"text": "d0", "leg": "whole"}


@pytest.mark.parametrize(("script", "reason"), [(fail, "5xx"), (reset, "reset")])
@pytest.mark.parametrize("stream", [False, True])
async def test_prefill_fails_and_decode_does_it_all(
    script: Script, reason: str, stream: bool
) -> None:
    async with world() as w:

        async def only_whole(call: Call) -> None:
            if call.leg == "whole":
                await answer(call)
            else:
                await (call.stream() if stream else asyncio.sleep(0))
                await call.forever()

        w.p.script, w.d.script = script, only_whole
        reply = await w.post(stream=stream)
        assert reply.status == 200
        assert reply.events()[-1] == "[DONE]" if stream else reply.json()["leg"] == "whole"
        assert [c.leg for c in w.d.calls] == ["decode", "whole"]
        await w.d.calls[0].gone.wait()
        assert await w.metric("vllm_disagg_fallbacks_total", f'reason="prefill_{reason}"') == 1


async def test_prefill_refuses_connections() -> None:
    async with world(probe_interval=60.0) as w:  # the proxy does not learn it from a probe

        async def only_whole(call: Call) -> None:
            await (answer(call) if call.leg == "whole" else call.forever())

        w.d.script = only_whole
        await w.p.stop()
        assert (await w.post()).json()["leg"] == "whole"
        assert await w.metric("vllm_disagg_fallbacks_total", 'reason="prefill_refused"') == 1
        assert await w.metric("vllm_disagg_failovers_total", 'rung="same_decode"') == 1
        assert (await w.post()).json()["leg"] == "whole"
        assert await w.metric("vllm_disagg_fallbacks_total", 'reason="no_pair"') == 1
        assert (await w.get("/readiness?mode=pair")).status == 503
        assert (await w.get("/readiness")).json()["degraded"]


async def test_prefill_hangs_while_decode_answers() -> None:
    async with world() as w:
        w.p.script, w.d.script = hang, answer_at_once
        assert (await w.post()).json()["leg"] == "decode"
        await w.p.calls[0].gone.wait()


async def test_prefill_of_another_process_is_not_waited_for() -> None:
    async with world(probe_interval=60.0) as w:

        async def of_another(call: Call) -> None:
            await (answer(call) if call.grant and len(w.p.calls) == 2 else call.forever())

        w.d.script = of_another
        w.p.incarnation = "p0-2"
        assert (await w.post()).json()["leg"] == "decode"
        assert await w.metric("vllm_disagg_fallbacks_total", 'reason="prefill_stale"') == 1
        assert [c.grant.engine for c in w.p.calls if c.grant] == ["p0-1", "p0-2"]
        assert w.d.calls[0].gone.is_set()


@pytest.mark.parametrize("script", [fail, reset])
async def test_decode_fails_and_another_pair_serves(script: Script) -> None:
    async with world(decode=2) as w:
        failing: list[ScriptedEngine] = []

        async def first_fails(call: Call) -> None:
            failing.append(call.engine)
            await (script(call) if call.engine is failing[0] else answer(call))

        w.decodes[0].script = w.decodes[1].script = first_fails
        reply = await w.post()
        assert reply.status == 200 and reply.json()["leg"] == "decode"
        assert reply.json()["text"] != failing[0].name
        transfers = [c.grant.transfer for c in w.p.calls if c.grant]
        assert len(set(transfers)) == 2, "each pair has its own transfer"
        assert await w.metric("vllm_disagg_fallbacks_total", 'reason="decode_failed"') == 1
        assert await w.metric("vllm_disagg_failovers_total", 'rung="pair"') == 1


async def test_decode_dead_and_another_does_it_all() -> None:
    async with world(decode=2, probe_interval=60.0) as w:
        await w.decodes[0].stop()
        for _ in range(3):
            assert (await w.post()).json()["text"] == "d1"


@pytest.mark.parametrize(("script", "status"), [(fail, 500), (reset, 502)])
async def test_decode_fails_and_there_is_no_other(script: Script, status: int) -> None:
    async with world() as w:
        w.d.script = script
        reply = await w.post(stream=True)
        assert reply.status == status and reply.json()["error"]["code"] == status
        assert await w.metric("vllm_disagg_requests_total", 'outcome="upstream_error"') == 1


async def test_an_engine_without_what_is_requested_has_not_failed() -> None:
    """As vLLM answers for an API that its model has not."""

    async def refuse(call: Call) -> None:
        await call.json({"error": {"message": "no such API", "code": 501}}, 501)

    async with world() as w:
        w.p.script = w.d.script = refuse
        assert (await w.post()).status == 501
        assert await w.metric("vllm_disagg_requests_total", 'outcome="client_error"') == 1


async def test_no_decode_at_all() -> None:
    async with world(probe_interval=60.0) as w:
        await w.d.stop()
        assert (await w.post()).status == 502
        reply = await w.post()
        assert reply.status == 503 and int(reply.headers["retry-after"]) > 0


@pytest.mark.parametrize("status", [400, 422, 429])
async def test_decode_refuses_verbatim(status: int) -> None:
    async with world(decode=2) as w:

        async def refuse(call: Call) -> None:
            await call.json({"error": "no"}, status, "retry-after: 3\r\n")

        w.p.script = hang
        for d in w.decodes:
            d.script = refuse
        reply = await w.post()
        assert (reply.status, reply.json(), reply.headers["retry-after"]) == (
            status,
            {"error": "no"},
            "3",
        )
        await w.p.calls[0].gone.wait()
        is_full = status == 429  # another one may have room
        assert sum(len(d.calls) for d in w.decodes) == (2 if is_full else 1)


@pytest.mark.parametrize("part", [b"", b'data: {"te'])
async def test_decode_dies_in_a_stream(part: bytes) -> None:
    async with world(decode=2) as w:

        async def die(call: Call) -> None:
            await call.stream()
            await call.event({"text": "a"})
            if part:
                await call.chunk(part)
            await settle()
            call.reset()

        for d in w.decodes:
            d.script = die
        reply = await w.post(stream=True)
        assert reply.complete and reply.status == 200
        first, error, done = reply.events()
        assert (first, done) == ({"text": "a"}, "[DONE]")
        assert error["error"]["code"] == 502
        assert sum(len(d.calls) for d in w.decodes) == 1
        assert await w.metric("vllm_disagg_requests_total", 'outcome="upstream_error"') == 1


@pytest.mark.parametrize("framing", ["whole", "first event", "later event", "failed event"])
async def test_no_client_reads_a_grant(framing: str) -> None:
    """vLLM 0.28 repeats the body of a leg in errors about some fields."""

    async def refuse(call: Call) -> None:
        error = {"message": f"Value error, 'input': {call.body}", "code": 400}
        if framing == "whole":
            await call.json({"error": error}, 400)
            return
        await call.stream()
        if framing == "later event":
            await call.event({"choices": [{"index": 0, "text": "a"}]})
        await call.event({"error": error | {"code": 500 if framing == "failed event" else 400}})
        await call.end()

    async with world() as w:
        w.p.script = hang
        w.d.script = refuse
        reply = await w.post(stream=framing != "whole")
        assert reply.complete and b"..." in reply.body
        for call in w.p.calls + w.d.calls:
            params = call.body["kv_transfer_params"]
            if "disagg_grant" in params:
                assert params["disagg_grant"].encode()[:60] not in reply.body


async def test_decode_dies_after_done() -> None:
    async with world() as w:

        async def die(call: Call) -> None:
            await call.stream()
            await call.event({"text": "a"})
            await call.event("[DONE]")
            await settle()
            call.reset()

        w.d.script = die
        reply = await w.post(stream=True)
        assert reply.complete and reply.events()[1:] == ["[DONE]"]


async def test_decode_dies_in_json() -> None:
    async with world() as w:

        async def die(call: Call) -> None:
            call.raw_write(
                'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n{"a":'
            )
            await call.writer.drain()
            await settle()
            call.reset()

        w.d.script = die
        reply = await w.post()
        assert (reply.status, reply.complete) == (502, True) and reply.json()["error"][
            "code"
        ] == 502


@pytest.mark.parametrize("stage", ["queue", "prefill", "stream", "json", "alone"])
async def test_client_leaves(stage: str) -> None:
    async with world(prefill_concurrency=1) as w:

        async def d_script(call: Call) -> None:
            if stage in ("stream", "alone"):
                await call.stream()
                await call.event("a")
            elif stage == "json":
                call.raw_write("HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{")
            await call.forever()

        w.p.script, w.d.script = hang, d_script
        others = [await w.start()] if stage == "queue" else []
        await until(lambda: len(w.p.calls) == len(others))
        client = await w.start(stream=stage in ("stream", "alone"), n=2 if stage == "alone" else 1)
        if stage in ("stream", "alone"):
            await client.reader.readuntil(b"data: a\n\n")
        elif stage == "queue":
            await w.until_waiting(1)
        else:
            await until(lambda: w.p.calls and w.d.calls)
        client.close()
        if stage == "queue":
            w.p.script = w.d.script = answer
            assert len(w.p.calls) == 1
            others[0].close()
            assert (await w.post()).status == 200
            assert len(w.p.calls) == 2, "the one that left was not started"
        else:
            for call in w.p.calls + w.d.calls:
                await call.gone.wait()
            assert w.d.calls
        left = 2 if stage == "queue" else 1
        assert await w.metric("vllm_disagg_requests_total", 'outcome="cancelled"') == left
        await until(lambda: nothing_left(w))


async def nothing_left(w: Any) -> bool:
    return await w.metric("vllm_disagg_in_flight") == 0


async def test_queue_is_first_in_first_out() -> None:
    async with world(prefill_concurrency=1) as w:
        go = asyncio.Event()

        async def wait(call: Call) -> None:
            await go.wait()
            await answer(call)

        w.p.script = w.d.script = wait
        clients = []
        for i in range(4):
            clients.append(await w.start(user=str(i)))
            await until(lambda: w.p.calls)
            await w.until_waiting(i)
        assert len(w.p.calls) == len(w.d.calls) == 1, "engines see only what can run"
        go.set()
        for client in clients:
            assert (await client.receive()).status == 200
            client.close()
        assert [c.body["user"] for c in w.p.calls] == list("0123")


async def test_a_full_queue_is_429() -> None:
    async with world(prefill_concurrency=1, queue_size=1) as w:
        w.p.script = w.d.script = hang
        first = await w.start()
        await until(lambda: w.p.calls)
        second = await w.start()
        await w.until_waiting(1)
        third = await w.post()
        assert third.status == 429 and third.headers["retry-after"]
        assert len(w.p.calls) == 1
        first.close()
        second.close()


async def test_a_wait_without_a_turn_is_503() -> None:
    async with world(prefill_concurrency=1, queue_size=1, queue_timeout=0.1) as w:
        w.p.script = w.d.script = hang
        first = await w.start()
        await until(lambda: w.p.calls)
        for _ in range(2):  # the first of them has left the queue
            reply = await w.post()
            assert (reply.status, reply.json()["error"]["code"]) == (503, 503)
            assert reply.headers["retry-after"]
        assert len(w.p.calls) == 1
        first.close()


async def test_the_queue_empties_when_prefill_dies() -> None:
    async with world(prefill_concurrency=1) as w:

        async def only_whole(call: Call) -> None:
            await (answer(call) if call.leg == "whole" else call.forever())

        w.p.script, w.d.script = hang, only_whole
        clients = [await w.start() for _ in range(3)]
        await until(lambda: w.p.calls)
        await w.until_waiting(2)
        await w.p.stop()
        for client in clients:
            assert (await client.receive()).json()["leg"] == "whole"
            client.close()


@pytest.mark.parametrize("stage", ["silent", "stream", "json"])
async def test_out_of_time(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = hold_time_limit(monkeypatch)
    async with world(request_timeout=77.0) as w:

        async def slow(call: Call) -> None:
            if stage == "stream":
                await call.stream()
                await call.event({"text": "a"})
            if stage == "json":
                call.raw_write("HTTP/1.1 200 OK\r\ncontent-length: 50\r\n\r\n{")
            await settle()
            limit.expire(77.0)
            await call.forever()

        w.d.script = slow
        reply = await w.post(stream=stage == "stream")
        assert reply.complete
        if stage == "stream":
            assert (
                reply.status == 200
                and reply.events()[1]["error"]["code"] == 504
                and reply.events()[2] == "[DONE]"
            )
        else:
            assert reply.status == 504 and reply.json()["error"]["code"] == 504
        await w.d.calls[0].gone.wait()
        assert await w.metric("vllm_disagg_requests_total", 'outcome="timeout"') == 1


async def test_engine_connections_are_reused_by_requests() -> None:
    async with world() as w:
        for _ in range(5):
            await w.post()
        assert len(w.d.calls) == 5 and w.d.connections <= 2 and w.p.connections <= 2


async def test_an_engine_that_closes_idle_connections_costs_no_answer() -> None:
    async with world() as w:
        for engine in (w.p, w.d):
            engine.close_after = True
        for _ in range(20):
            assert (await w.post()).json()["leg"] == "decode"


async def test_many_at_once() -> None:
    async with world(prefill=2, decode=2, prefill_concurrency=2) as w:
        replies = await asyncio.gather(*(w.post(stream=i % 2 == 0, user=str(i)) for i in range(60)))
        assert all(r.status == 200 and r.complete for r in replies)
        assert sum(len(p.calls) for p in w.prefills) == sum(len(d.calls) for d in w.decodes) == 60
        assert min(len(e.calls) for e in w.prefills + w.decodes) > 10
        assert (
            await w.metric("vllm_disagg_requests_total", 'mode="disaggregated"', 'outcome="ok"')
            == 60
        )
        await until(lambda: nothing_left(w))


async def test_without_prefill_instances() -> None:
    async with world(prefill=0) as w:
        assert (await w.post()).json()["leg"] == "whole"
        assert (await w.get("/readiness")).status == 200
        assert await w.metric("vllm_disagg_fallbacks_total") == 0


async def test_an_error_inside_the_proxy_is_a_500(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> str:
        raise ZeroDivisionError

    async with world() as w:
        monkeypatch.setattr("vllm_disagg.proxy.requests.legs.mint", broken)
        reply = await w.post()
        assert reply.status == 500 and reply.json()["error"]["code"] == 500
        monkeypatch.undo()
        for _ in range(9):  # no place is lost at the prefill instance
            assert (await w.post()).json()["leg"] == "decode"
        await until(lambda: nothing_left(w))


async def test_an_anthropic_stream_ends_in_an_anthropic_error() -> None:
    async with world() as w:

        async def die(call: Call) -> None:
            await call.stream()
            await call.chunk(b'event: message_start\ndata: {"type":"message_start"}\n\n')
            await call.chunk(
                b'event: content_block_delta\ndata: {"type":"content_block_delta"}\n\n'
            )
            await settle()
            call.reset()

        w.d.script = die
        body = {"model": "m", "messages": [], "max_tokens": 9, "stream": True, "temperature": 0}
        reply = await w.post("/v1/messages", json.dumps(body).encode())
        first, _, error, end = reply.body.split(b"\n\n")
        assert first.startswith(b"event: message_start") and end == b"" and reply.complete
        name, data = error.split(b"\n")
        said = json.loads(data.removeprefix(b"data: "))
        assert name == b"event: error" and (said["type"], said["error"]["type"]) == (
            "error",
            "api_error",
        )


async def test_a_request_that_fails_everywhere_blames_no_instance() -> None:
    async with world(prefill=0, decode=2) as w:

        async def script(call: Call) -> None:
            await (
                fail(call)
                if call.body.get("user") == "bad" or call.engine.name == "d0"
                else answer(call)
            )

        for d in w.decodes:
            d.script = script
        for _ in range(4):
            assert (await w.post(user="bad")).status == 500
        assert all(row["usable"] for row in (await w.get("/disagg/instances")).json())
        for _ in range(4):
            assert (await w.post()).json()["text"] == "d1"
        rows = {row["url"]: row for row in (await w.get("/disagg/instances")).json()}
        assert (
            rows[w.d.url]["why_not"] == "rests after failures" and rows[w.decodes[1].url]["usable"]
        )


async def test_open_breakers_are_ignored_when_all_are_open() -> None:
    async with world(decode=2) as w:
        failing = True

        async def script(call: Call) -> None:
            await (reset(call) if failing else answer(call))

        for d in w.decodes:
            d.script = script
        for _ in range(6):
            assert (await w.post()).status == 502
        failing = False
        replies = await asyncio.gather(*(w.post() for _ in range(10)))
        assert [r.status for r in replies] == [200] * 10


@pytest.mark.parametrize("prefill", [0, 1])
async def test_a_burst_that_meets_a_full_queue_opens_no_breaker(prefill: int) -> None:
    """vLLM answers 503 beyond its --max-num-queued-reqs: the engine is healthy and soon idle."""
    async with world(prefill=prefill, decode=2, prefill_concurrency=64) as w:
        room = [w.d, *w.prefills]

        async def narrow(call: Call) -> None:
            if call.engine in room and call.leg != "decode":
                if (
                    sum(
                        not other.gone.is_set() and other is not call for other in call.engine.calls
                    )
                    >= 4
                ):
                    await call.json({"error": {"message": "the queue is full", "code": 503}}, 503)
                    call.gone.set()
                    return
                await asyncio.sleep(0.02)
            elif call.leg == "whole":
                await asyncio.sleep(
                    0.1
                )  # its guilt is known when another has served its requests: it is idle by then
            await answer(call)
            call.gone.set()

        for engine in (*w.prefills, *w.decodes):
            engine.script = narrow
        replies = await asyncio.gather(*(w.post() for _ in range(24)))
        assert {r.status for r in replies} == {200}
        assert any(call.leg != "decode" for engine in room for call in engine.calls)
        rows = (await w.get("/disagg/instances")).json()
        assert all(row["usable"] for row in rows), rows


async def test_streams_that_break_together_open_no_breaker() -> None:
    """One cause broke all of them, so they count once."""
    async with world(prefill=0) as w:

        async def broken(call: Call) -> None:
            await call.stream()
            await call.event({"text": "a"})
            await until(lambda: len(w.d.calls) == 3)
            await asyncio.sleep(0.05)
            call.raw_write("no chunk\r\n")
            await call.writer.drain()

        w.d.script = broken
        replies = await asyncio.gather(*(w.post(stream=True) for _ in range(3)))
        assert all(
            reply.events()[0] == {"text": "a"} and "error" in reply.events()[1] for reply in replies
        )
        assert all(row["usable"] for row in (await w.get("/disagg/instances")).json())


async def test_one_engine_given_twice_serves_aggregated_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Alias(ScriptedEngine):
        """Another name of D's address."""

        @property
        def urls(self) -> list[str]:
            return [f"http://localhost:{named_twice[0].port}"]

        async def start(self) -> None:
            pass

    def prepare(w: World) -> None:
        named_twice.append(w.d)
        w.d.role = "both"
        w.prefills.append(Alias("p0", "prefill"))

    named_twice: list[ScriptedEngine] = []
    async with world(prefill=0, prepare=prepare) as w:
        assert (await w.post()).json()["leg"] == "whole"
        rows = (await w.get("/disagg/instances")).json()
        words = f"http://localhost:{w.d.port} and {w.d.url} do not fit: they are one engine"
        assert all(words in row["why_not"] for row in rows), rows
        assert "are never paired: they are one engine" in caplog.text
        assert (await w.get("/readiness?mode=pair")).status == 503
        assert (await w.get("/readiness")).json()["degraded"]


@pytest.mark.parametrize("whole", [False, True])
async def test_a_full_prefill_instance_sends_its_requests_to_another(whole: bool) -> None:
    """A 429 reaches the client only if no other prefill instance has room."""
    async with world(prefill=2) as w:
        first: list[ScriptedEngine] = []

        async def full(call: Call) -> None:
            first.append(call.engine)
            if call.engine is first[0]:
                await call.json({"error": {"message": "too many"}}, 429, "retry-after: 7\r\n")
            else:
                await answer(call)

        for p in w.prefills:
            p.script = full
        fields: dict[str, Any] = {"max_tokens": 1} if whole else {}
        reply = await w.post(**fields)
        assert reply.status == 200 and reply.json()["leg"] == ("whole" if whole else "decode")
        assert len({p.name for p in first}) == 2
        assert all(row["usable"] for row in (await w.get("/disagg/instances")).json())


@pytest.mark.parametrize("prefill", [0, 1])
async def test_a_full_decode_instance_sends_its_requests_to_another(prefill: int) -> None:
    async with world(prefill=prefill, decode=2) as w:

        async def full(call: Call) -> None:
            if call.engine is w.d:
                await call.json({"error": {"message": "too many"}}, 429)
            else:
                await answer(call)

        for engine in w.prefills + w.decodes:
            engine.script = full
        assert [(await w.post()).status for _ in range(4)] == [200] * 4
        assert w.d.calls and all(row["usable"] for row in await w.instances())


async def test_when_every_prefill_instance_is_full_the_client_gets_429() -> None:
    async with world(prefill=2, prefill_concurrency=1) as w:

        async def full(call: Call) -> None:
            await call.json({"error": {"message": "too many"}}, 429, "retry-after: 7\r\n")

        for p in w.prefills:
            p.script = full
        w.d.script = hang
        reply = await w.post()
        assert (reply.status, reply.headers["retry-after"]) == (429, "7")
        assert [len(p.calls) for p in w.prefills] == [1, 1] and all(
            c.leg == "decode" for c in w.d.calls
        )
        assert await w.metric("vllm_disagg_failovers_total", 'rung="none"') == 0, (
            "nothing has failed"
        )


async def test_another_prefill_instance_is_tried() -> None:
    async with world(prefill=3) as w:
        for p, script in zip(w.prefills, (fail, reset, answer), strict=True):
            p.script = script
        for _ in range(6):
            assert (await w.post()).json()["leg"] == "decode"
        assert len(w.prefills[2].calls) >= 6 and w.p.calls and w.prefills[1].calls


async def test_an_endpoint_that_ignores_grants() -> None:
    """A vLLM of which one endpoint ignores `kv_transfer_params`."""
    async with world() as w:

        async def ignorant(call: Call) -> None:
            if call.path == "/v1/messages":
                await (call.json({"type": "message"}) if call.leg != "decode" else call.forever())
            else:
                await answer(call)

        w.p.script = w.d.script = ignorant
        body = json.dumps({"model": "m", "messages": [], "max_tokens": 9}).encode()
        for _ in range(3):
            assert (await w.post("/v1/messages", body)).json() == {"type": "message"}
        assert len(w.p.calls) == 1, "it is asked once"
        assert (await w.post()).json()["leg"] == "decode", "and for other paths as before"


@pytest.mark.parametrize(
    "fields", [{"stream": True}, {"stream": True, "without_event": True}, {}], ids=str
)
async def test_instances_that_are_stopping_are_not_blamed_on_the_request(
    fields: dict[str, Any],
) -> None:
    """A request that comes to two of them while a fleet is replaced is served by a third."""
    async with world(prefill=1, decode=4) as w:
        stopping: list[ScriptedEngine] = []

        async def stop_the_first_three(call: Call) -> None:
            if len(stopping) < 3:
                call.engine.is_stopping = True
                stopping.append(call.engine)
                await refuse_as_stopping(call)
            else:
                await answer(call)

        for decode in w.decodes:
            decode.script = stop_the_first_three
        reply = await w.post(**fields)
        assert len(stopping) == 3
        assert reply.status == 200 and reply.complete
        assert b"abort" not in reply.body and b"error" not in reply.body
