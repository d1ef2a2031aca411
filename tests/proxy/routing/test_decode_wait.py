"""Tests how long new requests wait for the only decode instance, and for which they do."""

import asyncio

import pytest

from proxy_world import World, settle, stand_still, until, world
from vllm_disagg.proxy.http.upstream_response import Unreachable
from vllm_disagg.proxy.membership.instance_client import connection_refusal
from vllm_disagg.proxy.routing import decode_wait
from vllm_disagg.proxy.routing.decode_wait import DecodeWait
from vllm_disagg.proxy.routing.fleet import NO_CONNECTION, NOT_PROBED, SILENT, Fleet, Instance
from vllm_disagg.proxy.routing.policies import RoutingQuery
from vllm_disagg.proxy.routing.prefill_queue import QueueFull

QUERY = RoutingQuery(0)


def instance(url: str, reason: str = "", model: str = "m") -> Instance:
    """Returns a decode instance that is up, or down for a reason."""
    found = Instance(url, "decode", models=frozenset((model,)), unavailable_reason=reason)
    found.up = not reason
    found.state_since = asyncio.get_running_loop().time()
    return found


def waits(*instances: Instance, patience: float = 9.0, most: int = 9) -> DecodeWait:
    return DecodeWait(Fleet(list(instances)), most, patience)


async def began(
    waiting: DecodeWait, query: RoutingQuery = QUERY, failed: tuple[Instance, ...] = ()
) -> asyncio.Task[bool]:
    now = asyncio.get_running_loop().time()
    task = asyncio.create_task(waiting.wait(query, now, failed))
    await asyncio.sleep(0.01)
    return task


@pytest.mark.parametrize("reason", [SILENT, NO_CONNECTION, NOT_PROBED])
async def test_waits_until_the_instance_comes_back(reason: str) -> None:
    d = instance("http://d", reason)
    waiting = waits(d)
    tasks = [await began(waiting) for _ in range(3)]
    assert len(waiting) == 3 and not any(task.done() for task in tasks)
    waiting.wake()  # another change
    await asyncio.sleep(0.01)
    assert len(waiting) == 3
    d.up, d.unavailable_reason = True, ""
    waiting.wake()
    await asyncio.gather(*tasks)
    assert len(waiting) == 0


async def test_first_probes_of_others_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that waited for a restarted proxy went to the first of 500 that was up."""
    monkeypatch.setattr(decode_wait, "FIRST_PROBES_SECONDS", 600.0)
    first, second = instance("http://d", NOT_PROBED), instance("http://e", NOT_PROBED)
    waiting = waits(first, second)
    tasks = [await began(waiting) for _ in range(2)]
    first.up, first.unavailable_reason = True, ""
    assert (await began(waiting)).done(), "one that has not waited"
    waiting.wake()
    await asyncio.sleep(0.01)
    assert len(waiting) == 2 and not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert len(waiting) == 0
    monkeypatch.setattr(decode_wait, "FIRST_PROBES_SECONDS", 0.01)
    first.up, first.unavailable_reason = False, NOT_PROBED
    task = await began(waiting)
    first.up, first.unavailable_reason = True, ""
    waiting.wake()
    assert await asyncio.wait_for(task, 20.0)


async def test_one_that_goes_while_others_are_probed_is_waited_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_wait, "FIRST_PROBES_SECONDS", 0.05)
    first, second = instance("http://d", NOT_PROBED), instance("http://e", NOT_PROBED)
    waiting = waits(first, second)
    task = await began(waiting)
    first.up, first.unavailable_reason = True, ""
    waiting.wake()
    await asyncio.sleep(0)
    first.up, first.unavailable_reason = False, SILENT
    await asyncio.sleep(0.2)
    assert not task.done()
    second.up, second.unavailable_reason = True, ""
    waiting.wake()
    assert await asyncio.wait_for(task, 20.0)


@pytest.mark.parametrize("steps", range(5))
async def test_a_change_of_the_fleet_hides_no_departure(steps: int) -> None:
    """A request whose client had left, or whose time was over, went on, without a limit of time."""
    waiting = waits(instance("http://d", SILENT))
    task = await began(waiting)
    waiting.wake()
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=5.0)
    assert task.cancelled() and len(waiting) == 0


async def test_waits_from_the_leg_that_found_no_connection() -> None:
    """The instance has been up for an hour, and its next health check is still to come."""
    d = instance("http://d")
    now = asyncio.get_running_loop().time()
    d.state_since = now - 3600.0
    waiting = waits(d)
    waiting._fleet.on_leg_failed(d, "no_connection", now)
    task = await began(waiting)
    assert not task.done()
    task.cancel()


async def test_a_pause_of_the_proxy_is_no_wait() -> None:
    d = instance("http://d", SILENT)
    waiting = waits(d, patience=0.4)
    task = await began(waiting)
    came = asyncio.Event()
    stand_still(0.6, came.set)
    await came.wait()
    await settle()
    assert not task.done()
    d.up = True
    waiting.wake()
    assert await task


async def test_waits_for_nothing_else() -> None:
    for others in ([], [instance("http://d", "refuses connections")], [instance("http://e")]):
        task = await began(waits(*others))
        assert task.done(), others
    for reason in ("", SILENT):
        task = await began(waits(instance("http://d", SILENT), instance("http://e", reason)))
        assert task.done() is (not reason)
        task.cancel()


def restarting(seconds: float = 60.0) -> Instance:
    """Returns a decode instance that has ended so many seconds ago."""
    found = instance("http://e", "refuses connections: it has ended")
    found.state_since -= seconds
    return found


async def test_one_that_ended_earlier_may_come_back_when_the_last_one_ends() -> None:
    last = instance("http://d")
    last.state_since -= 3600.0
    waiting = waits(last, restarting())
    now = asyncio.get_running_loop().time()
    waiting._fleet.on_leg_failed(last, "stopping", now)
    task = await began(waiting)
    assert not task.done()
    waiting._fleet.instances[1].up = True
    waiting.wake()
    assert await task
    assert not await waiting.wait(QUERY, now)


async def test_the_wait_for_one_that_may_come_back_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    last = instance("http://d", "it is being stopped")
    waiting = waits(last, restarting(), patience=600.0)
    monkeypatch.setattr(decode_wait, "RESTART_SECONDS", 0.05)
    for failed in ((), (last,)):
        await asyncio.wait_for(waiting.wait(QUERY, last.state_since, failed), 20.0)
        await asyncio.sleep(0.01)  # a timer may be early by a millisecond
        assert not await waiting.wait(QUERY, last.state_since, failed), "it was given up"
    assert (await began(waiting)).done(), "from the end of the last one on"


async def test_those_that_end_together_are_not_waited_for() -> None:
    for others in ([], [restarting(0.5)]):
        assert (await began(waits(instance("http://d", "it is being stopped"), *others))).done()


async def test_ranks_of_one_server_end_together() -> None:
    ranks = [instance(f"http://d@{rank}") for rank in range(2)]
    for rank in ranks:
        rank.state_since -= 3600.0
    waiting = waits(*ranks)
    waiting._fleet.on_leg_failed(ranks[0], "refused", asyncio.get_running_loop().time())
    assert not ranks[1].up
    assert (await began(waiting)).done()
    assert (await began(waiting, failed=(ranks[0],))).done()


@pytest.mark.parametrize("reason", ["", SILENT])
async def test_a_query_waits_for_none_that_has_failed_it(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one may be up in the proxy's eyes: its connections were reset."""
    last, other = instance("http://d", reason), restarting()
    waiting = waits(last, other, patience=600.0)
    assert (await began(waiting, failed=(last, other))).done()
    task = await began(waiting, failed=(last,))
    assert not task.done()
    task.cancel()
    monkeypatch.setattr(decode_wait, "RESTART_SECONDS", 0.05)
    other.unavailable_reason = SILENT
    other.state_since = last.state_since
    await asyncio.wait_for(await began(waiting, failed=(last,)), 20.0)


async def test_no_query_waits_for_one_that_cannot_come_back_for_it() -> None:
    """Of another model, or another rank of the server that has failed it."""
    last, other = instance("http://d", "it is being stopped"), restarting()
    other.models = frozenset(("other",))
    waiting = waits(last, other)
    assert (await began(waiting, RoutingQuery(0, model="m"), (last,))).done()
    task = await began(waiting, RoutingQuery(0, model="other"), (last,))
    assert not task.done()
    task.cancel()
    ranks = [instance(f"http://d@{rank}", "it is being stopped") for rank in range(2)]
    ranks[1].state_since -= 60.0
    assert (await began(waits(*ranks), failed=(ranks[0],))).done()


@pytest.mark.parametrize("reason", [SILENT, NO_CONNECTION, NOT_PROBED])
@pytest.mark.parametrize("has_failed", [False, True])
async def test_only_an_instance_that_may_serve_a_query_is_waited_for(
    reason: str, has_failed: bool
) -> None:
    stopping = instance("http://d", "it is being stopped", "a")
    silent = instance("http://e", reason, "b")
    waiting = waits(stopping, silent)
    failed = (stopping,) if has_failed else ()
    assert (await began(waiting, RoutingQuery(0, model="a"), failed)).done()
    for model, models in (("b", {"b"}), ("", {"b"}), ("of none", {"b"}), ("a", set[str]())):
        silent.models = frozenset(models)
        task = await began(waiting, RoutingQuery(0, model=model), failed)
        assert not task.done(), model
        task.cancel()


async def test_a_model_that_only_a_prefill_instance_lists_may_be_that_of_any() -> None:
    """An adapter that was loaded since the last probe of a silent D."""
    prefill = instance("http://p", "", "a")
    prefill.role = "prefill"
    waiting = waits(prefill, instance("http://d", SILENT, "b"))
    task = await began(waiting, RoutingQuery(0, model="a"))
    assert not task.done()
    task.cancel()


async def test_another_models_instance_is_no_alternative() -> None:
    fleet = (instance("http://d", SILENT, "a"), instance("http://e", "", "b"))
    query = RoutingQuery(0, model="a")
    waiting = waits(*fleet)
    task = await began(waiting, query)
    assert not task.done()
    fleet[0].unavailable_reason = "refuses connections"
    waiting.wake()
    await task


async def test_a_model_that_no_instance_serves_may_be_that_of_one_not_probed_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another model's instance would answer that there is no such model."""
    monkeypatch.setattr(decode_wait, "UNKNOWN_MODEL_SECONDS", 600.0)
    new = instance("http://d", NOT_PROBED)
    new.models = frozenset()
    waiting = waits(new, instance("http://f", "", "b"), restarting(), patience=600.0)
    for model in ("b", ""):
        assert (await began(waiting, RoutingQuery(0, model=model))).done()
    task = await began(waiting, RoutingQuery(0, model="a"))
    assert not task.done()
    new.unavailable_reason = SILENT  # an unknown name must not wait for each dead address
    assert (await began(waiting, RoutingQuery(0, model="a"))).done()
    waiting.wake()
    await asyncio.wait_for(task, 20.0)


async def test_a_model_waits_not_long_for_an_unprobed_instance_beside_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of the others may have it as an adapter that no probe has listed."""
    monkeypatch.setattr(decode_wait, "UNKNOWN_MODEL_SECONDS", 0.05)
    new = instance("http://d", NOT_PROBED)
    new.models = frozenset()
    task = await began(waits(new, instance("http://e"), patience=600.0), RoutingQuery(0, model="a"))
    await asyncio.wait_for(task, 20.0)


async def test_a_dead_address_makes_no_model_uncertain() -> None:
    new = instance("http://d", NOT_PROBED)
    new.models = frozenset()
    fleet = Fleet([new, instance("http://e")])
    assert fleet.is_model_uncertain("a") and not fleet.is_model_uncertain("m")
    new.mark_down(connection_refusal(Unreachable("refused", "Connection refused")))
    assert not fleet.is_model_uncertain("a")
    new.up, new.unavailable_reason = True, ""  # its models are not known yet
    assert fleet.is_model_uncertain("a")


async def test_the_wait_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    task = await began(waits(instance("http://d", SILENT), patience=0.05))
    assert not task.done()
    await asyncio.wait_for(task, 5.0)
    monkeypatch.setattr(decode_wait, "MAX_SILENCE_SECONDS", 0.05)
    waiting = waits(instance("http://d", SILENT))
    task = await began(waiting)
    assert not task.done()
    await asyncio.wait_for(task, 5.0)
    assert (await began(waiting)).done(), "it was given up"


async def test_who_leaves_and_who_is_too_many() -> None:
    waiting = waits(instance("http://d", SILENT), most=1)
    task = await began(waiting)
    with pytest.raises(QueueFull):
        await waiting.wait(QUERY, asyncio.get_running_loop().time())
    task.cancel()
    await asyncio.wait({task})
    assert len(waiting) == 0


async def test_a_request_before_the_first_probe_is_served() -> None:
    """As the first one of a proxy worker that was started anew."""

    def hold(w: World) -> None:
        for engine in (w.p, w.d):
            engine.probe_hangs = True

    async with world(ready=False, prepare=hold) as w:
        client = await w.start()
        await w.until_waiting(1)
        for engine in (w.p, w.d):
            engine.probe_hangs = False
        async with asyncio.timeout(20.0):  # less than it waits unless it is woken
            assert (await client.receive()).status == 200
        client.close()


async def test_a_frozen_instance_that_is_given_up_means_503(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_wait, "MAX_SILENCE_SECONDS", 0.3)
    async with world(probe_interval=0.02, liveness_timeout=0.1) as w:
        w.d.frozen = True

        async def is_silent() -> bool:
            return any(row["why_not"] == SILENT for row in await w.instances())

        await until(is_silent)
        reply = await w.post()
        assert reply.status == 503 and reply.headers["retry-after"] == "5"
