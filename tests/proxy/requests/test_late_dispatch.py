"""D's leg is sent when P's is nearly over: `--decode-dispatch late`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy_world import Call, World, answer, settle, until, world
from vllm_disagg.proxy.requests import legs
from vllm_disagg.proxy.routing.pairing import InstancePair
from vllm_disagg.proxy.routing.prefill_times import PrefillTimes


async def hang(call: Call) -> None:
    await call.forever()


async def reset(call: Call) -> None:
    call.reset()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the proxy expect that each prefill takes many minutes."""
    monkeypatch.setattr(PrefillTimes, "least", lambda *_: 1000.0)


async def test_ds_leg_is_sent_before_ps_is_over() -> None:
    async with world(decode_dispatch="late") as w:

        async def await_d(call: Call) -> None:
            asked = len(w.d.calls)
            await until(lambda: len(w.d.calls) > asked)
            await answer(call)

        # At first no time is known, then that of an earlier prompt.
        w.p.script = await_d
        for _ in range(3):
            assert (await w.post()).json()["leg"] == "decode"


async def calls_at_d_before_ps_end(w: World) -> int:
    """Returns how often D was asked when P has had time to compute, but has not answered."""
    seen: list[int] = []

    async def look(call: Call) -> None:
        await settle()
        seen.append(len(w.d.calls))
        await answer(call)

    w.p.script = look
    assert (await w.post()).json()["leg"] == "decode"
    return seen[0]


@pytest.mark.usefixtures("slow")
async def test_ds_leg_is_sent_late_and_at_the_end_of_ps_at_the_latest() -> None:
    async with world(decode_dispatch="late") as w:
        assert await calls_at_d_before_ps_end(w) == 0
        assert len(w.d.calls) == 1


async def test_the_time_of_a_prompt_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    # So many times a scripted prefill are minutes.
    monkeypatch.setattr(legs, "LATE_SHARE", 1e6)
    async with world(decode_dispatch="late") as w:
        await w.post()
        assert await calls_at_d_before_ps_end(w) == 1  # of the first request


@pytest.mark.usefixtures("slow")
async def test_d_is_asked_at_once_for_kv_that_p_reads_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """P looks for it for a quarter of a second only."""
    monkeypatch.setattr(InstancePair, "bidirectional_reuse", True)
    async with world(decode_dispatch="late") as w:

        async def await_d(call: Call) -> None:
            await until(lambda: w.d.calls)
            await answer(call)

        w.p.script = await_d
        assert (await w.post()).json()["leg"] == "decode"


@pytest.mark.usefixtures("slow")
async def test_ps_failure_before_ds_leg_leaves_d_alone() -> None:
    async with world(prefill=2, policy="round_robin", decode_dispatch="late") as w:
        w.prefills[0].script = reset
        for _ in range(2):
            assert (await w.post()).json()["leg"] == "decode"
        assert w.prefills[0].legs("prefill") and len(w.d.calls) == 2


@pytest.mark.usefixtures("slow")
async def test_ps_refusal_before_ds_leg_is_awaited_as_at_once() -> None:
    """D refuses the client's request, P only its leg."""

    async def refuse_at_p(call: Call) -> None:
        await call.json("of P", 400)

    async def refuse_at_d(call: Call) -> None:
        await call.json("of D", 422)

    async with world(decode_dispatch="late") as w:
        w.p.script, w.d.script = refuse_at_p, refuse_at_d
        reply = await w.post()
        assert (reply.status, reply.json()) == (422, "of D")


@pytest.mark.usefixtures("slow")
async def test_a_client_that_leaves_before_ds_leg_ends_ps() -> None:
    async with world(decode_dispatch="late") as w:
        w.p.script = hang
        body: dict[str, Any] = {"model": "m", "prompt": [1, 2], "max_tokens": 9, "temperature": 0}
        client = await w.connect()
        client.send("POST", "/v1/completions", json.dumps(body).encode())
        await until(lambda: w.p.legs("prefill"))
        client.close()
        await w.p.legs("prefill")[0].gone.wait()
        await settle()
        assert not w.d.calls
