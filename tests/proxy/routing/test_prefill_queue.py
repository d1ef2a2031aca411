"""The prefill queue alone."""

import asyncio

import pytest

from proxy_world import stand_still
from vllm_disagg.protocol.peers import EngineInfo, WorkerInfo
from vllm_disagg.proxy.routing.fleet import Fleet, Instance
from vllm_disagg.proxy.routing.pairing import InstancePair
from vllm_disagg.proxy.routing.policies import Policy, RoutingQuery
from vllm_disagg.proxy.routing.prefill_queue import PrefillQueue, QueueFull, QueueTimeout


def queue(
    concurrency: int = 1, size: int = 9, patience: float = 9.0
) -> tuple[PrefillQueue, Instance, Instance]:
    p, d = Instance("p", "prefill"), Instance("d", "decode")
    for instance in (p, d):
        instance.on_probe_answered(
            "m", EngineInfo(instance.url, "both", [WorkerInfo(instance.url, "a", "b")], {})
        )
    return PrefillQueue(Fleet([p, d]), Policy(), concurrency, size, patience), p, d


async def taken(admission: PrefillQueue) -> InstancePair:
    pair = await admission.acquire(RoutingQuery(1))
    assert pair
    return pair


async def waiter(admission: PrefillQueue) -> asyncio.Task[InstancePair | None]:
    task = asyncio.create_task(admission.acquire(RoutingQuery(1)))
    await asyncio.sleep(0)
    return task


async def test_no_request_overtakes() -> None:
    admission, p, _ = queue()
    await taken(admission)
    first = await waiter(admission)
    p.prefill_legs = 0  # free, but nobody was told
    second = await waiter(admission)
    assert not first.done() and not second.done() and len(admission) == 2
    admission.wake()
    await asyncio.sleep(0)
    assert first.done() and not second.done()
    second.cancel()


async def test_a_cancelled_request_makes_room() -> None:
    admission, p, d = queue(size=1)
    held = await taken(admission)
    first = await waiter(admission)
    with pytest.raises(QueueFull):
        await admission.acquire(RoutingQuery(1))
    first.cancel()
    await asyncio.sleep(0)
    assert len(admission) == 0
    second = await waiter(admission)
    admission.release(held)
    second.cancel()  # in the very moment that its turn came
    await asyncio.wait([second])
    assert (p.prefill_legs, p.prompt_bytes, d.in_flight) == (0, 0, 1), (
        "only the first is left, and it is decoding"
    )


async def test_no_request_waits_for_ever() -> None:
    admission, p, _ = queue(patience=0.02)
    await taken(admission)
    with pytest.raises(QueueTimeout):
        await admission.acquire(RoutingQuery(1))
    assert len(admission) == 0 and p.prefill_legs == 1


async def test_a_pause_of_the_proxy_counts_for_no_request() -> None:
    admission, _, _ = queue(patience=0.2)
    held = await taken(admission)
    waiting = await waiter(admission)
    stand_still(0.4, lambda: admission.release(held))
    assert await waiting


async def test_no_request_waits_without_a_fitting_pair() -> None:
    admission, p, _ = queue()
    await taken(admission)
    waiting = await waiter(admission)
    p.mark_down("gone")
    admission.wake()
    assert await waiting is None
    assert await admission.acquire(RoutingQuery(1)) is None


async def test_a_full_instance_holds_up_only_its_own_model() -> None:
    fleet = Fleet(
        [
            Instance("p1", "prefill"),
            Instance("d1", "decode"),
            Instance("p2", "prefill"),
            Instance("d2", "decode"),
        ]
    )
    for instance in fleet.instances:
        model = f"m{instance.url[1]}"
        instance.on_probe_answered(
            model,
            EngineInfo(
                instance.url, "both", [WorkerInfo(instance.url, "a", "b")], {"model": model}
            ),
        )
    admission = PrefillQueue(fleet, Policy(), 1, 9, 9.0)

    def ask(model: str, path: str = "/v1/completions") -> asyncio.Task[InstancePair | None]:
        return asyncio.create_task(admission.acquire(RoutingQuery(1, model=model, path=path)))

    held = [await ask("m1"), await ask("m2")]
    waiters = [ask("m1"), ask("m1"), ask("m2"), ask("m2", "/v1/responses"), ask("nobody's")]
    await asyncio.sleep(0)
    assert len(admission) == 5
    assert held[1] and held[1].prefill.url == "p2"
    admission.release(held[1])
    await asyncio.sleep(0)
    assert [task.done() for task in waiters] == [False, False, True, False, False]
    second = waiters[2].result()
    assert second and second.prefill.url == "p2"
    admission.release(
        second
    )  # the one with the other path came before the one that any instance may refuse
    await asyncio.sleep(0)
    assert [task.done() for task in waiters] == [False, False, True, True, False]
    for task in waiters:
        task.cancel()
    await asyncio.gather(*waiters, return_exceptions=True)
    assert len(admission) == 0 and not admission._queues
