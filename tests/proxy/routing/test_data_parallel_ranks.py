"""Data parallel ranks: each is an instance, URL@RANK, and each of its requests names the rank."""

import json
from collections.abc import Callable

import pytest

from proxy_world import Call, ScriptedEngine, World, answer, until, world
from vllm_disagg.errors import ConfigError
from vllm_disagg.protocol.peers import EngineInfo
from vllm_disagg.proxy.http.addresses import check_url
from vllm_disagg.proxy.http.reasons import Reason
from vllm_disagg.proxy.routing.fleet import Fleet, Instance


def ranks(*engines: str) -> Callable[[World], None]:
    """Gives two ranks to each of these engines (p0, d0 ...)."""

    def prepare(w: World) -> None:
        for engine in w.prefills + w.decodes:
            engine.ranks = 2 * (engine.name in engines)

    return prepare


def expect_own_rank(engine: ScriptedEngine) -> None:
    """Asserts that each leg came to the rank of its grant."""
    for call in engine.calls:
        assert call.grant and call.grant.engine == engine.facts(call.rank)["incarnation"]


@pytest.mark.parametrize("engines", [("p0",), ("d0",), ("p0", "d0")])
async def test_every_leg_goes_to_the_rank_that_its_grant_names(engines: tuple[str, ...]) -> None:
    async with world(prepare=ranks(*engines)) as w:
        for at in range(12):
            assert (await w.post(prompt=f"{at} different")).json()["leg"] == "decode"
        expect_own_rank(w.p)
        expect_own_rank(w.d)
        for engine in (w.p, w.d):
            assert {call.rank for call in engine.calls} == (
                {0, 1} if engine.name in engines else {None}
            )
        sources = {call.grant.transfer: call.rank for call in w.p.calls if call.grant}
        for grant in (call.grant for call in w.d.calls):
            assert grant
            served = w.p.facts(sources[grant.transfer])
            assert [worker.name for worker in grant.sources] == [
                worker["name"] for worker in served["workers"]
            ]


async def test_one_rank_dies_with_all_others() -> None:
    """vLLM ends all ranks together; after a restart each has a new incarnation."""
    async with world(prepare=ranks("d0")) as w:
        await w.d.stop()
        await until(lambda: down(w))
        w.d.incarnation = "d0-2"
        await w.d.start()
        await w.until_ready()
        w.d.calls.clear()
        for at in range(6):
            assert (await w.post(prompt=f"{at} different")).json()["leg"] == "decode"
        expect_own_rank(w.d)


async def reset(call: Call) -> None:
    """Breaks the connection, as a server does that is being killed."""
    call.reset()


async def test_a_server_that_breaks_connections_costs_a_request_one_attempt() -> None:
    """Its second rank would be the second death, after which a request is given up."""
    async with world(decode=2, prepare=ranks("d0", "d1")) as w:
        w.d.script = reset
        for at in range(16):
            reply = await w.post(prompt=f"{at} different", stream=at % 2 == 0)
            assert reply.status == 200 and b"d1" in reply.body
        tried = {(call.body["prompt"], call.rank) for call in w.d.calls}
        assert len(tried) == len({prompt for prompt, _ in tried}) > 0, "one rank a request"


async def test_a_prompt_of_a_dead_server_is_computed_at_d() -> None:
    """P's second rank would be the second death; D computes the prompt instead."""
    async with world(prepare=ranks("p0")) as w:
        w.p.script = reset
        for at in range(8):
            reply = await w.post(prompt=f"{at} different", stream=at % 2 == 0)
            assert reply.status == 200 and b"d0" in reply.body, reply.body
        tried = {(call.body["prompt"], call.rank) for call in w.p.calls}
        assert len(tried) == len({prompt for prompt, _ in tried}) > 0, "one rank a request"


async def test_of_one_server_alone_the_other_rank_is_tried() -> None:
    async def first_rank_breaks(call: Call) -> None:
        await (reset if call.rank == 0 else answer)(call)

    async with world(prefill=0, prepare=ranks("d0")) as w:
        w.d.script = first_rank_breaks
        for _ in range(4):
            assert (await w.post()).status == 200
        assert {call.rank for call in w.d.calls} == {0, 1}


def server(url: str) -> list[Instance]:
    """Returns two ranks of a server, which are up."""
    found = [Instance(f"{url}@{rank}", "decode") for rank in range(2)]
    for instance in found:
        instance.on_probe_answered("m", None)
    return found


@pytest.mark.parametrize(
    ("reason", "all_down"),
    [
        ("refused", True),
        ("no_connection", True),
        ("died", True),
        ("stopping", True),
        ("reset", False),
        ("5xx", False),
    ],
)
def test_a_dead_server_takes_all_its_ranks_down(reason: Reason, all_down: bool) -> None:
    dead, other = server("http://a:1"), server("http://b:1")
    fleet = Fleet([*dead, *other])
    fleet.on_leg_failed(dead[0], reason, 1.0)
    assert [i.up for i in dead] == [not all_down] * 2 and all(i.up for i in other)
    assert dead[0].unavailable_reason == dead[1].unavailable_reason
    if reason == "stopping":
        assert dead[0].unavailable_reason == "it is being stopped"


def test_a_rank_that_has_left_takes_no_other_down() -> None:
    left, stays = server("http://a:1")
    Fleet([stays]).on_leg_failed(left, "refused", 1.0)
    assert stays.up


async def down(w: World) -> bool:
    rows = (await w.get("/disagg/instances")).json()
    return sum(not row["usable"] for row in rows) == 2


async def test_an_unknown_rank_of_a_client_turns_no_leg_away_from_its_instance() -> None:
    async with world(prepare=ranks("p0", "d0")) as w:
        for at in range(4):
            body = json.dumps({"model": "m", "prompt": f"{at}"}).encode()
            assert (await w.ask("POST", "/v1/completions", body, x_data_parallel_rank="7")).json()[
                "leg"
            ] == "whole"
        assert not w.p.calls and {call.headers["x-data-parallel-rank"] for call in w.d.calls} == {
            "0",
            "1",
        }


async def test_a_clients_rank_is_the_one_that_serves() -> None:
    async with world(prepare=ranks("p0", "d0")) as w:
        for at in range(4):
            body = json.dumps({"model": "m", "prompt": f"{at}"}).encode()
            assert (await w.ask("POST", "/v1/completions", body, x_data_parallel_rank="1")).json()[
                "leg"
            ] == "whole"
        assert (
            not w.p.calls
            and [call.headers["x-data-parallel-rank"] for call in w.d.calls] == ["1"] * 4
        )


async def test_ranks_that_are_not_named_transfer_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def prepare(w: World) -> None:
        w.d.ranks, w.d.names_ranks = 2, False

    async with world(prepare=prepare) as w:
        assert (await w.post()).json()["leg"] == "whole" and not w.p.calls
        words = (
            f"it has several data parallel ranks: give each as an instance, {w.d.url}@0 and so on"
        )
        assert f"{w.d.url} (decode) serves whole requests only: {words}" in caplog.text


def test_a_rank_of_an_engine_that_has_none() -> None:
    made = Instance("http://h:1@0", "decode")
    made.on_probe_answered("m", EngineInfo("i", "decode", [], {}))
    assert (
        not made.can_transfer
        and made.unavailable_reason == "is no data parallel rank: give it as http://h:1"
    )


async def test_responses_are_split_between_others_only() -> None:
    """vLLM gives such a request to any rank and ignores the header."""
    body = json.dumps({"model": "m", "input": "hi"}).encode()
    async with world(decode=2, prepare=ranks("d0")) as w:
        for _ in range(4):
            assert (await w.post("/v1/responses", body)).json() == {"text": "d1", "leg": "decode"}
        assert not w.d.calls
    async with world(prepare=ranks("d0")) as w:
        assert (await w.post("/v1/responses", body)).json()["leg"] == "whole"


@pytest.mark.parametrize("first", [0, 1, 2])  # rank of the engine at this API server
async def test_each_ranks_kv_cache_is_looked_at(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    monkeypatch.setattr("vllm_disagg.proxy.membership.metrics_poll.CACHE_POLL_SECONDS", 0.03)

    def prepare(w: World) -> None:
        ranks("d0")(w)
        w.d.first_rank = first
        w.d.kv_use = 0.95  # rank 0's of this server

    async with world(prepare=prepare) as w:

        async def is_read() -> bool:
            rows = (await w.get("/disagg/instances")).json()
            usage = {row["url"]: row["kv_cache_usage"] for row in rows}
            return [usage[url] for url in w.d.urls] == [0.95, 0.0]

        await until(is_read)
        for at in range(6):
            assert (await w.post(prompt=f"{at} different")).status == 200
        assert {call.rank for call in w.d.calls} == {1}


async def test_where_the_header_has_no_effect_prompts_are_not_split_any_more() -> None:
    """Some versions of vLLM have endpoints that ignore the header."""

    def prepare(w: World) -> None:
        w.p.ranks, w.p.rankless = 2, ("/v1/chat/completions",)

    async with world(prepare=prepare) as w:
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
        for _ in range(8):
            assert (await w.post("/v1/chat/completions", body)).status == 200
        assert await w.metric("vllm_disagg_fallbacks_total", 'reason="prefill_stale"') >= 1
        legs = len(w.p.calls)
        assert (await w.post("/v1/chat/completions", body)).json()["leg"] == "whole" and len(
            w.p.calls
        ) == legs
        assert (await w.post()).json()["leg"] == "decode"


async def test_adapters_are_loaded_once_for_all_ranks() -> None:
    async with world(prepare=ranks("p0", "d0")) as w:

        async def load(call: Call) -> None:
            await call.json("Success")

        w.p.script = w.d.script = load
        assert (await w.ask("POST", "/v1/load_lora_adapter", b'{"lora_name":"l"}')).status == 200
        assert len(w.p.calls) == len(w.d.calls) == 1
        await until(lambda: w.p.probes == w.d.probes == 4)
        w.p.script = w.d.script = answer


def test_urls() -> None:
    assert (
        check_url("http://h:1@3", "x")
        == check_url("http://h:1/@3", "x")
        == check_url("http://h:1@3/", "x")
        == "http://h:1@3"
    )
    for url in (
        "http://h:1@",
        "http://h:1@x",
        "http://h:1@-1",
        "http://h:1@12345",
        "http://u@h:1@2",
        "@1",
        "h:1@1",
    ):
        with pytest.raises(ConfigError, match=r"^x: "):
            check_url(url, "x")
