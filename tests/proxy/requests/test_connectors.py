"""Fleets with NixlConnector, without a connector, and mixed; requests of one leg."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from test_continuation import Script, same, told

from proxy_world import Call, World, answer, settle, until, world

PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


def with_nixl(*names: str) -> Any:
    def prepare(w: World) -> None:
        for engine in w.prefills + w.decodes:
            if not names or engine.name in names:
                engine.nixl = True
                engine.script = nixl

    return prepare


def answered(call: Call) -> dict[str, Any]:
    """Answers a prefill leg as vLLM 0.32's NixlConnector does."""
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[3, 4]],
        "remote_engine_id": call.engine.incarnation,
        "remote_request_id": f"cmpl-{len(call.engine.calls)}",
        "remote_host": "127.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
    }


async def nixl(call: Call) -> None:
    params = call.body.get("kv_transfer_params") or {}
    if params.get("do_remote_decode"):
        await asyncio.sleep(0.01)
        await call.json({"choices": [{"text": "x"}], "kv_transfer_params": answered(call)})
    elif call.body.get("stream"):
        await call.stream()
        for event in Script(call.engine.name).completion():
            await call.chunk(event)
        await call.end()
    else:
        await call.json({"by": call.engine.name, "with": params})


async def test_nixl_legs_go_one_after_the_other() -> None:
    async with world(prepare=with_nixl()) as w:
        reply = await w.post(max_tokens=9, temperature=0.5)
        p, d = w.p.calls[0], w.d.calls[0]
        assert p.body["kv_transfer_params"] == PREFILL and (
            p.body["max_tokens"],
            p.body["stream"],
        ) == (1, False)
        assert d.body["kv_transfer_params"] == answered(p) and d.body["max_tokens"] == 9
        assert reply.json() == {"by": "d0", "with": answered(p)}
        assert await w.metric("vllm_disagg_requests_total", 'mode="disaggregated"') == 1
        assert await w.metric("vllm_disagg_in_flight") == 0


async def test_nixl_is_found_by_one_probe(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with world(prepare=with_nixl()) as w:
        await asyncio.sleep(0.2)
        assert w.p.probes == w.d.probes == 1, "a probe leaves blocks at the engine for a while"
        assert f"{w.p.url} (prefill) is ready: m, NixlConnector" in caplog.text
        assert (await w.get("/readiness")).json() == {"prefill": 1, "decode": 1}


async def test_a_nixl_prefill_that_has_nothing_to_give() -> None:
    async with world(prepare=with_nixl()) as w:

        async def nothing(call: Call) -> None:
            await call.json({"choices": [{"text": "x"}], "kv_transfer_params": None})

        w.p.script = nothing
        assert (await w.post()).json() == {"by": "d0", "with": {}}


async def test_a_nixl_decode_that_cannot_load() -> None:
    """`kv_load_failure_policy: fail`: D answers 500, and the request starts again."""
    async with world(prefill=2, decode=2, prepare=with_nixl()) as w:
        failed: list[Call] = []

        async def once(call: Call) -> None:
            if not failed:
                failed.append(call)
                await call.json({"error": {"message": "KV load failed", "code": 500}}, 500)
            else:
                await nixl(call)

        for d in w.decodes:
            d.script = once
        reply = (await w.post()).json()
        assert reply["by"] != failed[0].engine.name
        fresh = failed[0].body["kv_transfer_params"]
        assert reply["with"]["remote_block_ids"] and reply["with"] is not fresh
        assert sum(len(p.calls) for p in w.prefills) == 2


async def test_nixl_prefill_refuses() -> None:
    async with world(prepare=with_nixl()) as w:

        async def refuse(call: Call) -> None:
            await call.json({"error": "too long"}, 400)

        w.p.script = refuse
        reply = await w.post()
        assert reply.status == 200 and "remote_block_ids" not in reply.body.decode()
        assert len(w.d.calls) == 1 and "kv_transfer_params" not in w.d.calls[0].body


async def test_a_nixl_stream_goes_on_elsewhere() -> None:
    async with world(decode=2, prepare=with_nixl()) as w:

        async def dies(call: Call) -> None:
            if sum(len(d.calls) for d in w.decodes) > 1:
                await nixl(call)
                return
            await call.stream()
            for event in Script(call.engine.name).completion()[:4]:
                await call.chunk(event)
            await settle()
            await call.engine.stop()

        for d in w.decodes:
            d.script = dies
        reply = await w.post(stream=True, temperature=0)
        first = told(reply.body)["heads"].pop()[0].rpartition("-")[2]
        same(reply.body, b"".join(Script(first).completion()), first)
        assert len(w.p.calls) == 2


async def test_clients_cannot_speak_nixl() -> None:
    async with world(prepare=with_nixl()) as w:
        assert (await w.post(kv_transfer_params=answered_by("evil"))).status == 400
        assert not w.p.calls and not w.d.calls


def answered_by(host: str) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "remote_host": host,
        "remote_port": 1,
        "remote_engine_id": "e",
    }


async def test_a_mixed_fleet_pairs_like_with_like() -> None:
    def prepare(w: World) -> None:
        with_nixl("p1", "d1")(w)
        w.decodes[2].plain = True

    async with world(prefill=2, decode=3, prepare=prepare) as w:
        replies = [(await w.post(user=str(i))).json() for i in range(8)]
        assert {r.get("by") or r["text"] for r in replies} == {"d0", "d1"}
        for call in w.p.calls + w.d.calls:
            assert call.grant
        for call in w.prefills[1].calls + w.decodes[1].calls:
            assert "remote_engine_id" in call.body["kv_transfer_params"]


async def test_plain_instances_are_balanced() -> None:
    def prepare(w: World) -> None:
        for d in w.decodes:
            d.plain = True

    async with world(prefill=0, decode=3, prepare=prepare) as w:
        replies = await asyncio.gather(*(w.post(user=str(i)) for i in range(30)))
        assert all(r.json()["leg"] == "whole" for r in replies)
        assert [len(d.calls) for d in w.decodes] == [10, 10, 10]
        assert (await w.get("/readiness")).status == 200


async def test_a_fleet_that_changes_its_connector() -> None:
    async with world(prepare=with_nixl()) as w:
        for engine in (w.p, w.d):
            await engine.stop()
            engine.nixl, engine.script = False, answer

        async def gone() -> bool:
            return not any(row["usable"] for row in (await w.get("/disagg/instances")).json())

        await until(gone)
        for engine in (w.p, w.d):
            await engine.start()
        await w.until_ready()
        assert (await w.post()).json() == {"text": "d0", "leg": "decode"}


# One leg ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_one_token_ends_at_prefill(stream: bool) -> None:
    async with world() as w:
        reply = await w.post(max_tokens=1, stream=stream, logprobs=2)
        assert (
            reply.events()[2]["text"] if stream else reply.json()["text"]
        ) == "p0" and not w.d.calls
        assert w.p.calls[0].body == {
            "model": "m",
            "prompt": "hi",
            "max_tokens": 1,
            "stream": stream,
            "logprobs": 2,
            "kv_transfer_params": {"disagg_whole": True},
        }
        assert await w.metric("vllm_disagg_in_flight") == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_one_token_of_a_chat_is_made_and_parsed_as_ds_chats_are(path: str) -> None:
    """P may have another chat template or parser, or none, as it answers no other chats."""

    def prepare(w: World) -> None:
        w.p.plain_chat = w.d.plain_chat = True

    prompt = '"input":"hi","max_output_tokens":1,"store":false'
    if path != "/v1/responses":
        prompt = '"messages":[],"max_tokens":1'
    async with world(prepare=prepare) as w:
        reply = await w.ask("POST", path, b'{"model":"m",%b}' % prompt.encode())
        assert reply.json()["text"] == "d0"
        assert [call.leg for call in w.p.calls + w.d.calls] == ["prefill", "decode"]


def with_settings(p: str, d: str) -> Callable[[World], None]:
    def prepare(w: World) -> None:
        w.p.answer_settings, w.d.answer_settings = p, d

    return prepare


def with_adapters(w: World) -> None:
    w.p.models = w.d.models = ["base", "m"]


@pytest.mark.parametrize(
    "prepare",
    [
        with_settings("a temperature", "none"),
        with_settings("a temperature", ""),
        with_settings("", ""),  # of an older version
        with_adapters,
    ],
)
async def test_one_token_is_ds_where_p_may_make_another(prepare: Callable[[World], None]) -> None:
    """A P may lack --override-generation-config, which no transfer needs."""
    async with world(prepare=prepare) as w:
        reply = await w.post(max_tokens=1)
        assert (reply.json()["text"], len(w.p.legs("prefill"))) == ("d0", 1)


async def test_one_token_of_nixl_is_ds() -> None:
    """What else P's answer depends on is not known of other connectors."""
    async with world(prepare=with_nixl()) as w:
        await w.post(max_tokens=1)
        assert len(w.p.calls) == len(w.d.calls) == 1


@pytest.mark.parametrize(("is_plain", "params"), [(False, {"disagg_whole": True}), (True, None)])
async def test_engines_with_our_connector_learn_that_a_request_is_theirs_alone(
    is_plain: bool, params: object
) -> None:
    """So they do not warn of a router that sends no parameters. A plain vLLM would warn of some."""

    def prepare(w: World) -> None:
        w.d.plain = is_plain

    async with world(prefill=0, prepare=prepare) as w:
        assert (await w.post()).status == 200
        assert w.d.calls[0].body.get("kv_transfer_params") == params


async def test_one_token_when_prefill_fails() -> None:
    async with world(prefill=2) as w:

        async def fail(call: Call) -> None:
            await call.json({}, 500)

        for p in w.prefills:
            p.script = fail
        assert (await w.post(max_tokens=1)).json()["text"] == "d0"
        assert [len(p.calls) for p in w.prefills] == [1, 1]


async def test_a_rank_is_one_instance_s_affair() -> None:
    async with world() as w:
        body = b'{"model":"m","prompt":"hi"}'
        assert (await w.ask("POST", "/v1/completions", body, x_data_parallel_rank="1")).json()[
            "leg"
        ] == "whole"
        assert w.d.calls[0].headers["x-data-parallel-rank"] == "1" and not w.p.calls


async def test_sessions_stay_where_they_are() -> None:
    async with world(prefill=3, decode=3) as w:
        body = b'{"model":"m","prompt":"hi"}'
        for _ in range(4):
            await w.ask("POST", "/v1/completions", body, x_session_id="s")
        assert (
            sorted(len(e.calls) for e in w.prefills)
            == sorted(len(e.calls) for e in w.decodes)
            == [0, 0, 4]
        )


async def test_short_prompts_are_aggregated() -> None:
    async with world(min_prompt_bytes=1000) as w:
        assert (await w.post(prompt="x" * 900)).json()["leg"] == "whole"
        assert (await w.post(prompt="x" * 4000)).json()["leg"] == "decode"
        assert (await w.post(prompt="x" * 4000)).json()["leg"] == "whole", "D has most of it"


async def test_spilling() -> None:
    async with world(prefill_concurrency=1, spill=True) as w:
        go = asyncio.Event()

        async def wait(call: Call) -> None:
            await go.wait()
            await answer(call)

        w.p.script = w.d.script = wait
        clients = [await w.start(user=str(i)) for i in range(3)]
        await until(lambda: len(w.d.calls) == 2)
        await asyncio.sleep(0.05)
        assert sorted(c.leg for c in w.d.calls) == ["decode", "whole"], (
            "one at a time; the third waits"
        )
        go.set()
        for client in clients:
            assert (await client.receive()).status == 200
            client.close()
        assert await w.metric("vllm_disagg_fallbacks_total", 'reason="prefill_full"') == 1


async def test_the_next_turn_finds_its_prefix() -> None:
    async with world(prefill=3, decode=3) as w:
        turns = [{"role": "user", "content": "a" * 5000}]
        for _ in range(4):
            body = json.dumps({"model": "m", "messages": turns}).encode()
            assert (await w.post("/v1/chat/completions", body)).status == 200
            turns += [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c" * 100}]
            await w.post("/v1/chat/completions", body.replace(b"aaa", b"xyz"))  # someone else's
        used = [[c for c in e.calls if "xyz" not in c.raw.decode()] for e in w.prefills + w.decodes]
        assert sorted(len(calls) for calls in used) == [0, 0, 0, 0, 4, 4]
