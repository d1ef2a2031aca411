"""Routes, keys, readiness and metrics."""

import asyncio

import pytest

from proxy_world import Call, ScriptedEngine, answer, until, world


async def test_unknown_paths_never_reach_an_engine() -> None:
    async with world() as w:
        for path in ("/", "/v1/embeddings", "/v1/completions/", "//v1/models", "/pause", "/v1/models/../../pause"):
            reply = await w.ask("POST", path, b"{}")
            assert (reply.status, reply.json()) == (404, {"detail": "Not Found"})
        reply = await w.get("/v1/completions")
        assert (reply.status, reply.headers["allow"]) == (405, "POST")
        assert (await w.ask("POST", "/health", b"")).status == 405
        assert not w.p.calls and not w.d.calls


async def test_passed_through() -> None:
    async with world() as w:
        assert (await w.get("/v1/models?x=1")).json() == {"data": [{"id": "m"}]}
        assert (await w.ask("POST", "/tokenize", b'{"prompt":"a"}')).json() == {"tokens": [1]}
        assert (await w.get("/version")).status == 200
        assert w.d.calls[0].path == "/version"
        assert await w.metric("vllm_disagg_requests_total", 'mode="passthrough"', 'outcome="ok"') == 3


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
        await until(lambda: w.p.probes and w.d.probes)
        for path in ("/v1/models", "/disagg/instances", "/v1/nothing"):
            reply = await w.get(path)
            assert (reply.status, reply.json()) == (401, {"error": "Unauthorized"})
            assert (await w.get(path, authorization="Bearer three")).status == 401
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
        assert reply.status == 503 and reply.json()["decode"] == 0 and w.d.url in reply.json()["instances"]
        w.d.health = 200
        await w.until_ready()
        assert (await w.get("/readiness")).json() == {"prefill": 1, "decode": 1}

        async def late(call: Call) -> None:
            await asyncio.sleep(0.05)
            await answer(call)

        w.d.script = late
        await w.post(stream=True)
        text = (await w.get("/metrics")).body.decode()
        for name in ("ttft_seconds_count 1.0", "queue_seconds_count 1.0", "prefill_leg_seconds_count 1.0"):
            assert f"vllm_disagg_{name}" in text
        labels = 'requests_total{mode="disaggregated",outcome="ok",path="/v1/completions"} 1.0'
        assert f"vllm_disagg_{labels}" in text
        assert f'vllm_disagg_instance_up{{role="prefill",url="{w.p.url}"}} 1.0' in text


@pytest.mark.parametrize("method", ["HEAD", "OPTIONS", "DELETE"])
async def test_other_methods(method: str) -> None:
    async with world(prefill=0) as w:
        client = await w.connect()
        client.writer.write(f"{method} /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        text = await client.reader.read()
        assert text.startswith(b"HTTP/1.1 405") and text.endswith(b"\r\n\r\n") is (method == "HEAD")


async def test_an_engine_that_fails_a_forwarded_request() -> None:
    async def reset(call: Call) -> None:
        call.reset()

    async with world(prefill=0) as w:
        w.d.script = reset
        assert (await w.get("/version")).status == 502
        assert isinstance(w.d, ScriptedEngine)
