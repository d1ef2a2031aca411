"""Routes, keys, readiness and metrics."""

import asyncio
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest

from proxy_world import Call, ScriptedEngine, World, answer, settle, until, world
from vllm_disagg.proxy.http.routes import REFUSED, ROUTES, UNGUARDED, find
from vllm_disagg.proxy.requests import forward
from vllm_disagg.proxy.requests.failover import RetryBudget


async def test_unknown_paths_never_reach_an_engine() -> None:
    async with world() as w:
        for path in (
            "/",
            "//",
            "/v1//completions",
            "/v1/models/../../pause",
            "/v1/responses/.",
            "/v1/responses/../cancel",
            "/v1/responses/%2e%2E",
            "/v1/responses/%252e",
            "/v1/responses/a%2Fb",
            "/v1/responses/a%0A",
            "/v1/responses/%",
            "/static/x",
            "/adapters/..",
            "/adapters/a/b",
            "/adapters/%2e%2e",
            "/v1/responses//cancel",
            "/v1/responses/a/b",
            "/v1/responses/a/cancel/x",
            "/v1/responses/../../pause",
            "/v1/responses/%2e%2e/cancel",
        ):
            reply = await w.ask("POST", path, b"{}", x_request_id="mine")
            assert reply.status == 404
            assert reply.json() == {"detail": "Not Found", "request_id": "mine"}
        for path, why in REFUSED.items():
            for method in ("GET", "POST"):
                reply = await w.ask(method, path, b"{}")
                assert reply.status == 404 and reply.json()["error"]["message"] == f"{path} {why}"
        reply = await w.get("/v1/completions")
        assert (reply.status, reply.headers["allow"]) == (405, "POST")
        assert reply.json()["request_id"] == reply.headers["x-request-id"]
        reply = await w.get("/readiness?mode=zz")
        assert reply.json()["error"]["request_id"] == reply.headers["x-request-id"]
        assert (await w.ask("POST", "/health", b"")).status == 405
        assert not w.p.calls and not w.d.calls


def test_every_route_of_vllm_is_decided() -> None:
    """Read in the installed vLLM's source, without importing it."""
    spec = importlib.util.find_spec("vllm")
    if not spec or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    entrypoints = Path(spec.submodule_search_locations[0], "entrypoints")
    called = re.compile(
        r"@?\w*(?:router|app)\.(?:get|post|put|delete|websocket|add_api_route)\(\s*\"(/[^\"]*)\""
    )
    found = {
        path
        for file in entrypoints.rglob("*.py")
        if "launchers" not in file.parts
        and "cli" not in file.parts
        and file.name != "dp_supervisor.py"  # a launcher, in another folder before vLLM 0.32
        for path in called.findall(file.read_text())
    }
    assert len(found) > 60, "routes are written in another way now"
    assert not {
        p for p in found if not find(p.replace("{response_id}", "resp_1")) and p not in REFUSED
    }
    assert not REFUSED.keys() & ROUTES.keys()


async def test_load_counts_running_and_waiting_requests() -> None:
    async with world(decode=2, max_requests=2) as w:
        go = asyncio.Event()

        async def wait(call: Call) -> None:
            await go.wait()
            await answer(call)

        for e in w.prefills + w.decodes:
            e.script = wait
        assert (await w.get("/load")).json() == {"server_load": 0}
        asked = [asyncio.create_task(w.post()) for _ in range(2)]
        await until(lambda: sum(len(d.calls) for d in w.decodes) == 2)
        asked.append(asyncio.create_task(w.ask("POST", "/v1/embeddings", b'{"input":"a"}')))
        await until(lambda: load_is(w, 3))
        go.set()
        await asyncio.gather(*asked)
        assert (await w.get("/load")).json() == {"server_load": 0}


async def load_is(w: Any, load: int) -> bool:
    return bool((await w.get("/load")).json() == {"server_load": load})


async def test_passed_through() -> None:
    async with world() as w:
        assert (await w.get("/v1/models?x=1")).json() == {"data": [{"id": "m"}]}
        assert (await w.ask("POST", "/tokenize", b'{"prompt":"a"}')).json() == {"tokens": [1]}
        assert (await w.get("/version")).status == 200
        assert w.d.calls[0].path == "/version"
        assert (
            await w.metric("vllm_disagg_requests_total", 'mode="passthrough"', 'outcome="ok"') == 3
        )


async def test_passed_through_to_prefill_when_no_decode_is_up() -> None:
    async with world() as w:
        await w.d.stop()
        await until(lambda: down(w))
        assert (await w.get("/v1/models")).status == 200
        assert (await w.post()).status == 503


async def down(w: object) -> bool:
    return await w.metric("vllm_disagg_instance_up", 'role="decode"') == 0  # type: ignore[attr-defined, no-any-return]


async def test_api_key() -> None:
    async with world(api_keys=["one", "two"], ready=False) as w:
        await w.until_probed()
        for path in ("/v1/models", "/disagg/instances", "/v1/nothing"):
            reply = await w.get(path)
            assert (reply.status, reply.json()["error"]) == (401, "Unauthorized")
            assert "no key was sent" in reply.json()["detail"]
            wrong = await w.get(path, authorization="Bearer three")
            assert wrong.status == 401 and "none of those" in wrong.json()["detail"]
            assert (await w.get(path, authorization="Basic one")).status == 401
        for given in ("Bearer one", "bearer two"):
            assert (await w.get("/disagg/instances", authorization=given)).status == 200
        assert (await w.get("/health")).status == 200


async def test_readiness_and_metrics() -> None:
    def closed(w: object) -> None:
        w.d.health = 503  # type: ignore[attr-defined]

    async with world(ready=False, prepare=closed) as w:
        assert (await w.get("/health")).status == 200
        reply = await w.get("/readiness")
        assert (
            reply.status == 503
            and reply.json()["decode"] == 0
            and w.d.url in reply.json()["instances"]
        )
        w.d.health = 200
        await w.until_ready()
        assert (await w.get("/readiness")).json() == {"prefill": 1, "decode": 1}

        async def late(call: Call) -> None:
            await asyncio.sleep(0.05)
            await answer(call)

        w.d.script = late
        await w.post(stream=True)
        text = (await w.get("/metrics")).body.decode()
        for name in (
            "ttft_seconds_count 1.0",
            "queue_seconds_count 1.0",
            "prefill_leg_seconds_count 1.0",
        ):
            assert f"vllm_disagg_{name}" in text
        labels = 'requests_total{mode="disaggregated",outcome="ok",path="/v1/completions"} 1.0'
        assert f"vllm_disagg_{labels}" in text
        assert f'vllm_disagg_instance_up{{role="prefill",url="{w.p.url}"}} 1.0' in text


@pytest.mark.parametrize("path", ["/health", "/ping", "/readiness", "/metrics", "/load"])
async def test_a_load_balancer_may_ask_for_heads(path: str) -> None:
    async with world(prefill=0) as w:
        client = await w.connect()
        head = f"HEAD {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        client.writer.write(head.encode())
        text = await client.reader.read()
        assert text.startswith(b"HTTP/1.1 200") and text.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "DELETE"])
async def test_other_methods(method: str) -> None:
    async with world(prefill=0) as w:
        client = await w.connect()
        client.writer.write(
            f"{method} /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode()
        )
        text = await client.reader.read()
        assert text.startswith(b"HTTP/1.1 405") and text.endswith(b"\r\n\r\n") is (method == "HEAD")


async def test_an_engine_that_fails_a_forwarded_request() -> None:
    async def reset(call: Call) -> None:
        call.reset()

    async with world(prefill=0) as w:
        w.d.script = reset
        assert (await w.get("/version")).status == 502
        assert isinstance(w.d, ScriptedEngine)


FORWARDED = [
    path for path, (methods, how) in ROUTES.items() if how == "forward" and methods == ("POST",)
]


@pytest.mark.parametrize("path", FORWARDED)
async def test_everything_else_is_passed_to_one_instance_as_it_is(path: str) -> None:
    async with world(decode=2) as w:
        raw = b'{ "model":"m", "input": ["a"],\t"novelty":1.50, "\\u00e9":null }'

        async def echo(call: Call) -> None:
            await call.json(
                {"id": call.headers["x-request-id"], "url": call.target}, 200, "x-engine: 1\r\n"
            )

        for d in w.decodes:
            d.script = echo
        if path.endswith("tokenize"):
            return  # of the scripted engine's own
        headers = {
            "x_request_id": "r",
            "authorization": "Bearer k",
            "traceparent": "t",
            "content_type": "a/b",
        }
        reply = await w.ask("POST", f"{path}?beta=true&x=%2F", raw, **headers)
        echoed = reply.json()
        if path.startswith("/v1/audio/"):
            echoed["id"] = echoed["id"].partition("-")[0]
        assert echoed == {"id": "r", "url": f"{path}?beta=true&x=%2F"}
        assert reply.headers["x-engine"] == "1"
        (call,) = [c for d in w.decodes for c in d.calls]
        assert call.raw == raw and [
            call.headers[n] for n in ("authorization", "traceparent", "content-type")
        ] == ["bearer k", "t", "a/b"]
        assert not w.p.calls
        if not path.startswith("/v1/audio/"):
            sly = b'{"kv_transfer_params":{"do_remote_prefill":true}}'
            assert (await w.ask("POST", path, sly)).status == 400


async def test_forms_are_passed_as_they_are() -> None:
    async with world() as w:
        form = b'--x\r\ncontent-disposition: form-data; name="file"\r\n\r\n\x00\xff\r\n--x--\r\n'
        kind = "multipart/form-data; boundary=x"
        assert (
            await w.ask("POST", "/v1/audio/transcriptions", form, content_type=kind)
        ).status == 200
        assert w.d.calls[0].raw == form


async def test_a_score_of_a_stopping_engine_is_made_by_another() -> None:
    """Its request was aborted, and vLLM takes that for a bad request."""
    message = "No logprobs available for item 0. This might indicate an issue with logprobs."
    theirs = "Unknown label 'No logprobs available for item 0'"

    async with world(decode=2, probe_interval=60.0) as w:

        async def refuse(call: Call) -> None:
            said = theirs if b"theirs" in call.raw else message
            await call.json({"error": {"message": said, "code": 400}}, 400)

        async def fine(call: Call) -> None:
            await call.json({"by": call.engine.name})

        w.decodes[0].script = refuse
        w.decodes[1].script = fine
        assert (await w.ask("POST", "/generative_scoring", b"{}")).json() == {"by": "d1"}
        (row,) = [row for row in await w.instances() if row["url"] == w.decodes[0].url]
        assert row["last_failure"]["reason"] == "stopping"
    async with world(prefill=0) as w:
        w.d.script = refuse
        assert (await w.ask("POST", "/generative_scoring", b'{"a":"theirs"}')).status == 400
        assert (await w.ask("POST", "/generative_scoring", b"{}")).status == 502


@pytest.mark.parametrize("stream", [False, True])
async def test_no_two_transcriptions_have_one_id(stream: bool) -> None:
    """When the client of one leaves, vLLM aborts all that have its id."""
    async with world(prefill=0) as w:

        async def as_with_request_id_headers(call: Call) -> None:
            of_engine = f"x-request-id: {call.headers['x-request-id']}\r\n"
            if stream:
                await call.stream(of_engine)
                await call.event("[DONE]")
                await call.end()
            else:
                call.raw_write(f"HTTP/1.1 200 X\r\n{of_engine}content-length: 2\r\n\r\n{{}}")

        w.d.script = as_with_request_id_headers
        for _ in range(2):
            client = await w.connect()
            client.send("POST", "/v1/audio/transcriptions", b"{}", x_request_id="mine")
            reply = await client.receive()
            assert reply.status == 200 and reply.headers["x-request-id"] == "mine"
            assert reply.header_names.count("x-request-id") == 1
            client.close()
        first, second = (call.headers["x-request-id"] for call in w.d.calls)
        assert first != second and first.startswith("mine-") and second.startswith("mine-")


async def test_a_forwarded_request_goes_to_another_instance() -> None:
    async with world(decode=3, probe_interval=60.0) as w:

        async def reset(call: Call) -> None:
            call.reset()

        async def fine(call: Call) -> None:
            await call.json({"by": call.engine.name})

        for d, script in zip(w.decodes, (reset, reset, fine), strict=True):
            d.script = script
        for _ in range(3):
            assert (await w.ask("POST", "/v1/embeddings", b'{"input":"a"}')).json() == {"by": "d2"}

        async def bad(call: Call) -> None:
            await call.json({"error": "of the request"}, 500)

        w.decodes[2].script = bad
        assert (await w.ask("POST", "/v1/embeddings", b'{"input":"a"}')).status in (500, 502)


ENGINE_DEAD = {"error": {"message": "EngineCore encountered an issue.", "code": 500}}
DEAD_OF_33 = "The server had an error while processing your request."  # as of vLLM 0.33
ENGINE_DEAD_OF_33 = {"error": {"message": DEAD_OF_33, "type": "InternalServerError", "code": 500}}
# vLLM 0.32 fails so what its pooling models have begun or get, when they stop.
NO_WORDS = {"error": {"message": "", "type": "InternalServerError", "code": 500}}
# Of a client that names an image at such a URL, whose server answers 503; the second one quotes.
THEIR_WORDS, THEIR_QUOTES = (
    {"error": {"message": f"503, url='http://a/{words}'", "code": 500}}
    for words in ("EngineCore encountered an issue", '"message":"EngineCore encountered an issue')
)
FULL = {"error": {"message": "full", "code": 429}}


@pytest.mark.parametrize(
    ("failure", "status", "noted"),
    [
        (ENGINE_DEAD, 500, "died"),
        (ENGINE_DEAD_OF_33, 500, "died"),
        (NO_WORDS, 500, "5xx"),
        (THEIR_WORDS, 500, "5xx"),
        (THEIR_QUOTES, 500, "5xx"),
        (FULL, 503, "5xx"),
        (FULL, 429, None),
    ],
)
async def test_a_forwarded_request_that_an_instance_fails_goes_to_another(
    failure: dict[str, Any], status: int, noted: str | None
) -> None:
    async def fail(call: Call) -> None:
        await call.json(failure, status)

    async def fine(call: Call) -> None:
        await call.json({"by": call.engine.name})

    async with world(decode=2, probe_interval=60.0) as w:
        first, second = w.decodes
        first.script = fail
        second.script = fine
        for _ in range(4):
            reply = await w.ask("POST", "/v1/embeddings", b'{"input":"a"}')
            assert reply.status == 200 and reply.json() == {"by": "d1"}
        (row,) = [row for row in await w.instances() if row["url"] == first.url]
        assert (row["last_failure"] or {}).get("reason") == noted
        second.script = fail
        reply = await w.ask("POST", "/v1/embeddings", b'{"input":"a"}')
        assert reply.status == status and reply.json() == failure


async def test_repeats_of_forwarded_requests_have_a_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(call: Call) -> None:
        await call.json(NO_WORDS, 500)

    small = RetryBudget(share=0.0, rate=0.0, most=3.0)
    monkeypatch.setattr(forward, "RetryBudget", lambda: small)
    async with world(prefill=0, decode=2, probe_interval=60.0) as w:
        for d in w.decodes:
            d.script = fail
        for _ in range(10):
            assert (await w.ask("POST", "/v1/embeddings", b'{"input":"a"}')).status == 500
        assert sum(len(d.calls) for d in w.decodes) == 10 + 3


async def test_forwarded_requests_close_a_circuit_breaker() -> None:
    failing = True

    async def script(call: Call) -> None:
        if failing:
            call.reset()
        else:
            await call.json({"by": call.engine.name})

    async with world(prefill=0, decode=1, probe_interval=60.0) as w:
        w.d.script = script
        for _ in range(2):
            assert (await w.ask("POST", "/v1/embeddings", b'{"input":"a"}')).status == 502
        assert (await w.instances())[0]["breaker"] != "closed"
        failing = False
        assert (await w.ask("POST", "/v1/embeddings", b'{"input":"a"}')).status == 200
        assert (await w.instances())[0]["breaker"] == "closed"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/version"),
        ("GET", "/v1/models"),
        ("POST", "/tokenize"),
        ("POST", "/v1/chat/completions/derender"),
    ],
)
async def test_answers_that_no_engine_computes_are_no_trial_of_one(method: str, path: str) -> None:
    """vLLM's API server gives them, whatever its engine does."""

    async def script(call: Call) -> None:
        if call.path == "/v1/embeddings":
            call.reset()
        else:
            await call.json({"data": [], "models": []})

    async with world(prefill=0, decode=1, probe_interval=60.0) as w:
        w.d.script = script

        async def breaker() -> object:
            return (await w.instances())[0]["breaker"]

        for _ in range(2):
            assert (await w.ask("POST", "/v1/embeddings", b'{"input":"a"}')).status == 502
        body = b"{}" if method == "POST" else b""
        assert (await w.ask(method, path, body)).status == 200
        assert await breaker() != "closed"
        while await breaker() != "half-open":
            await asyncio.sleep(0.02)
        assert (await w.ask(method, path, body)).status == 200
        assert await breaker() == "half-open", "the trial is left to a request for the engine"


async def test_a_forwarded_stream() -> None:
    async with world() as w:

        async def stream(call: Call) -> None:
            await call.stream()
            for i in range(3):
                await call.event({"text": str(i)})
            if call.body.get("die"):
                await settle()
                call.reset()
            elif call.body.get("cut"):
                await call.end()
            else:
                await call.chunk(b'data: {"type":"message-end"}\n\ndata: [DONE]\n\n')
                await call.end()

        w.d.script = stream
        reply = await w.ask("POST", "/cohere/v2/chat", b'{"stream":true}')
        texts = [{"text": str(i)} for i in range(3)]
        assert reply.events() == [*texts, {"type": "message-end"}, "[DONE]"]
        reply = await w.ask("POST", "/cohere/v2/chat", b'{"stream":true,"cut":true}')
        assert reply.complete and reply.events()[3]["error"]["code"] == 502
        reply = await w.ask("POST", "/cohere/v2/chat", b'{"stream":true,"die":true}')
        assert reply.complete and reply.events()[3]["error"]["code"] == 502


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/inference/v1/generate"])
async def test_other_generating_endpoints_use_both_legs(path: str) -> None:
    async with world() as w:
        prompts: dict[str, dict[str, object]] = {
            "/v1/responses": {"input": "x"},
            "/v1/messages": {"messages": [], "max_tokens": 9},
            "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": 9}},
        }
        prompt = prompts[path]
        reply = await w.ask(
            "POST", f"{path}?beta=true", json.dumps({"model": "m", **prompt}).encode()
        )
        assert reply.json() == {"text": "d0", "leg": "decode"}
        assert w.p.calls[0].target == w.d.calls[0].target == f"{path}?beta=true"
        assert w.d.calls[0].body == {
            "model": "m",
            **prompt,
            "kv_transfer_params": w.d.calls[0].body["kv_transfer_params"],
        }


async def test_a_response_is_looked_up_where_it_is() -> None:
    async with world(decode=3) as w:

        async def knows(call: Call) -> None:
            known = call.engine.name == "d1"
            await call.json(
                {"by": call.engine.name} if known else {"error": {"code": 404}},
                200 if known else 404,
            )

        async def knows_nothing(call: Call) -> None:
            await call.json({"error": {"code": 404}}, 404)

        for d in w.decodes:
            d.script = knows
        for name in ("resp_1", "job.17", "job:17~2", "resp%5F1", "job%3a17", "...", "a.."):
            assert (await w.get(f"/v1/responses/{name}")).json() == {"by": "d1"}
            assert w.decodes[1].calls[-1].path == f"/v1/responses/{name}"
        assert (await w.ask("POST", "/v1/responses/resp_1/cancel", b"")).json() == {"by": "d1"}
        body = b'{"input":"x","previous_response_id":"resp_1"}'
        assert (await w.ask("POST", "/v1/responses", body)).json() == {"by": "d1"}
        for d in w.decodes:
            d.script = knows_nothing
        assert (await w.get("/v1/responses/resp_1")).status == 404
        assert (await w.ask("DELETE", "/v1/responses/resp_1", b"")).status == 405


async def test_a_response_may_be_at_an_instance_that_is_down() -> None:
    async with world(decode=2) as w:

        async def knows(call: Call) -> None:
            known = call.engine is w.d
            await call.json({"by": "d0"} if known else {"error": {}}, 200 if known else 404)

        async def usable() -> list[bool]:
            return [row["usable"] for row in await w.instances() if row["role"] == "decode"]

        async def down() -> bool:
            return await usable() == [False, True]

        for d in w.decodes:
            d.script = knows
        w.d.frozen = True
        await until(down)
        body = b'{"input":"x","previous_response_id":"resp_1"}'
        for method, path, content in (
            ("GET", "/v1/responses/resp_1", b""),
            ("POST", "/v1/responses/resp_1/cancel", b""),
            ("POST", "/v1/responses", body),
        ):
            reply = await w.ask(method, path, content)
            assert reply.status == 503 and reply.headers["retry-after"]
            assert b"an instance that may have it" in reply.body
        w.d.frozen = False
        await w.until_ready()
        assert (await w.get("/v1/responses/resp_1")).json() == {"by": "d0"}


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenizer_info", "/v1/load_lora_adapter"])
async def test_a_redirect_is_no_answer(path: str) -> None:
    """Its Location names the engine."""

    async def redirect(call: Call) -> None:
        if call.leg == "prefill":
            await answer(call)
        else:
            await call.json({}, 307, "location: http://10.0.0.1:8000/x\r\n")

    async with world() as w:
        for engine in w.prefills + w.decodes:
            engine.script = redirect
        method = "GET" if path == "/tokenizer_info" else "POST"
        reply = await w.ask(method, path, b"" if method == "GET" else b'{"prompt":"x"}')
        assert reply.status == 502 and "location" not in reply.headers


async def test_adapters_are_loaded_everywhere() -> None:
    async with world(prefill=2, decode=2) as w:
        engines = w.prefills + w.decodes

        async def load(call: Call) -> None:
            await call.json("Success", 200)

        for e in engines:
            e.script = load
        assert (
            await w.ask("POST", "/v1/load_lora_adapter", b'{"lora_name":"l"}')
        ).json() == "Success"
        assert [len(e.calls) for e in engines] == [1] * 4
        await until(lambda: all(e.probes == 2 for e in engines))

        async def refuse(call: Call) -> None:
            await call.json({"error": {"message": "no such path"}}, 400)

        w.decodes[1].script = refuse
        assert (await w.ask("POST", "/v1/unload_lora_adapter", b'{"lora_name":"l"}')).status == 400
        await w.p.stop()
        await until(lambda: down_prefill(w))
        assert (await w.ask("POST", "/v1/load_lora_adapter", b"{}")).status == 503


async def down_prefill(w: Any) -> bool:
    return any(not row["usable"] for row in (await w.get("/disagg/instances")).json())


async def test_keys_guard_all_that_costs() -> None:
    async with world(api_keys=["k"], ready=False) as w:
        await w.until_probed()
        for path in ROUTES:
            free = path in UNGUARDED
            reply = await w.ask(ROUTES[path][0][0], path, b"")
            assert (reply.status == 401) is not free, path
        assert (
            await w.ask("POST", "/v1/embeddings", b"{}", authorization="Bearer k")
        ).status == 200


async def test_two_models() -> None:
    def prepare(w: Any) -> None:
        w.decodes[1].models = ["other", "adapter"]

    async with world(prefill=0, decode=3, prepare=prepare) as w:
        reply = await w.get("/v1/models")
        assert reply.json() == {
            "object": "list",
            "data": [{"id": "m"}, {"id": "other"}, {"id": "adapter"}],
        }
        for model, names in (
            ("m", {"d0", "d2"}),
            ("adapter", {"d1"}),
            ("nobody's", {"d0", "d1", "d2"}),
        ):
            assert {(await w.post(model=model)).json()["text"] for _ in range(6)} == names


async def test_models_are_those_of_the_instances_that_answer() -> None:
    def prepare(w: Any) -> None:
        w.decodes[2].models = ["other"]

    def models(reply: Any) -> list[str]:
        return [model["id"] for model in reply.json()["data"]]

    async with world(prefill=0, decode=3, prepare=prepare, probe_interval=60.0) as w:
        await w.d.stop()
        assert models(await w.get("/v1/models")) == ["m", "other"]
        w.decodes[1].models_status = 500
        assert models(await w.get("/v1/models")) == ["other"]
        w.decodes[2].models_status = 429
        reply = await w.get("/v1/models")
        assert reply.status == 503 and reply.headers["retry-after"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_a_model_of_an_instance_that_has_not_answered_is_not_unknown(path: str) -> None:
    """As behind a proxy that starts before a model's only engine: clients got 404 for the model."""

    async def serve_other(call: Call) -> None:
        if call.body["model"] == "other":
            await answer(call)
        else:
            await call.json({"error": {"message": "The model does not exist."}}, 404)

    def prepare(w: Any) -> None:
        w.d.models = ["other"]
        w.d.script = serve_other
        w.decodes[1].probe_status = 500

    async def has_failed(w: World) -> bool:
        return any(row["why_not"].startswith("does not answer") for row in await w.instances())

    async with world(prefill=0, decode=2, prepare=prepare, ready=False) as w:
        await w.until_probed(w.d)
        await until(lambda: has_failed(w))
        reply = await w.post(path)
        assert (reply.status, reply.headers["retry-after"]) == (503, "5")
        assert (await w.post(path, model="other")).status == 200
        w.decodes[1].probe_status = 200
        await w.until_ready()
        assert (await w.post(path)).json()["text"] == "d1"
        w.decodes[1].script = serve_other
        assert (await w.post(path, model="unknown")).status == 404


async def test_an_adapter_loaded_since_the_probe_is_served_beside_an_instance_that_is_down() -> (
    None
):
    def prepare(w: Any) -> None:
        w.decodes[1].probe_status = 500

    async with world(prefill=0, decode=2, prepare=prepare, ready=False) as w:
        await w.until_probed(w.d)
        for path in ("/v1/completions", "/v1/embeddings"):
            assert (await w.post(path, model="adapter")).json()["text"] == "d0"


async def lack_adapter(call: Call) -> None:
    await call.json({"error": {"message": "The model `adapter` does not exist."}}, 404)


@pytest.mark.parametrize("prefill", [0, 1])
async def test_an_adapter_is_sought_at_other_instances(prefill: int) -> None:
    """An engine that replaced another has no adapters that were loaded at run time."""
    async with world(prefill=prefill, decode=3) as w:
        for engine in (w.decodes[0], w.decodes[2]):
            engine.script = lack_adapter
        for _ in range(6):
            assert (await w.post(model="adapter")).json()["text"] == "d1"
        names = "vllm_disagg_fallbacks_total{"
        assert 0 < await w.metric(names, "decode_failed") <= 6, "one for each request at most"
        assert not await w.metric(names, "prefill")
        w.decodes[1].script = lack_adapter
        before = sum(len(engine.calls) for engine in w.decodes)
        reply = await w.post(model="adapter")
        assert (reply.status, "does not exist" in reply.body.decode()) == (404, True)
        assert sum(len(engine.calls) for engine in w.decodes) == before + 3, "each once"
        assert all(row["breaker"] == "closed" for row in await w.instances())


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/chat/completions/batch", "/rerank"])
async def test_a_forwarded_request_seeks_its_adapter_at_other_instances(path: str) -> None:
    """Clients got the 404 of the first engine asked, in turn with answers of the right one."""
    async with world(prefill=0, decode=5) as w:
        for engine in w.decodes[1:]:
            engine.script = lack_adapter
        for _ in range(5):
            assert (await w.post(path, model="adapter")).json()["text"] == "d0"
        w.d.script = lack_adapter
        before = sum(len(engine.calls) for engine in w.decodes)
        reply = await w.post(path, model="adapter")
        assert (reply.status, "does not exist" in reply.body.decode()) == (404, True)
        assert sum(len(engine.calls) for engine in w.decodes) == before + 5, "each once"
        assert all(row["breaker"] == "closed" for row in await w.instances())


async def test_a_forwarded_404_is_no_last_word_behind_the_death_of_another_instance() -> None:
    async with world(prefill=0, decode=3) as w:

        async def die(call: Call) -> None:
            call.reset()

        w.d.script = die
        for engine in w.decodes[1:]:
            engine.script = lack_adapter
        reply = await w.post("/v1/embeddings", model="adapter")
        assert (reply.status, reply.headers["retry-after"]) == (503, "5")
        assert "one failed that may have it" in reply.json()["error"]["message"]
        w.d.script = lack_adapter
        await w.until_ready()
        assert (await w.post("/v1/embeddings", model="adapter")).status == 404


@pytest.mark.parametrize("prefill", [0, 1])
@pytest.mark.parametrize("status", [429, 500])
async def test_a_404_is_no_last_word_behind_the_failure_of_another_instance(
    prefill: int, status: int
) -> None:
    """The one with the adapter failed or was full; clients took the other's 404 for the truth."""
    async with world(prefill=prefill, decode=2) as w:
        failed: list[ScriptedEngine] = []

        async def fail_first(call: Call) -> None:
            if failed:
                await lack_adapter(call)
            else:
                failed.append(call.engine)
                await call.json({"error": {"message": "no"}}, status)

        for engine in w.decodes:
            engine.script = fail_first
        reply = await w.post(model="adapter")
        assert (reply.status, reply.headers["retry-after"]) == (503, "5")
        assert "one failed that may have it" in reply.json()["error"]["message"]
        await w.until_ready()
        assert (await w.post(model="adapter")).status == 404, "both have said so"


async def test_requests_for_a_model_wait_for_the_first_probe_of_its_instance() -> None:
    def prepare(w: Any) -> None:
        w.d.models = ["other"]
        w.decodes[1].probe_hangs = True

    async with world(prefill=0, decode=2, prepare=prepare, ready=False) as w:
        await w.until_probed(w.d)
        client = await w.start()
        await w.until_waiting(1)
        w.decodes[1].probe_hangs = False
        w.decodes[1].drop_connections()  # else the probe is repeated only after its timeout
        assert (await client.receive()).json()["text"] == "d1"
        client.close()
