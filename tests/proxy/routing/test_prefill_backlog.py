"""The estimate of the time that one prefill instance needs for all prompts that wait or run."""

import pytest

from proxy_world import Call, World, until, world
from vllm_disagg.proxy.routing import prefill_backlog
from vllm_disagg.proxy.routing.fleet import Instance
from vllm_disagg.proxy.routing.prefill_backlog import PrefillBacklog, uncached_bytes


def compute(
    backlog: PrefillBacklog, instance: Instance, size: int, began: float, ended: float
) -> None:
    backlog.on_leg_started(instance, size, began)
    backlog.on_prompt_computed(size)
    backlog.on_leg_ended(instance, size, ended)


def test_nothing_is_known_before_the_first_prompt() -> None:
    backlog = PrefillBacklog()
    backlog.on_queued(1000)
    backlog.on_leg_started(Instance("http://p", "prefill"), 1000, 0.0)
    assert backlog.seconds(5.0) == 0.0


def test_waiting_and_running_prompts_count_at_the_rate_of_one_instance() -> None:
    backlog = PrefillBacklog()
    p = Instance("http://p", "prefill")
    q = Instance("http://q", "prefill")
    compute(backlog, p, 1000, 0.0, 2.0)
    compute(backlog, q, 1000, 0.0, 2.0)  # together, but the rate is that of one: 500 bytes/s
    assert backlog.seconds(9.0) == 0.0
    backlog.on_queued(1500)
    backlog.on_leg_started(p, 500, 10.0)
    assert backlog.seconds(10.0) == 4.0
    backlog.on_dequeued(1500)
    assert backlog.seconds(10.0) == 1.0


def test_legs_that_run_together_share_their_busy_time() -> None:
    backlog = PrefillBacklog()
    p = Instance("http://p", "prefill")
    backlog.on_leg_started(p, 600, 0.0)
    compute(backlog, p, 400, 1.0, 3.0)
    backlog.on_prompt_computed(600)
    backlog.on_leg_ended(p, 600, 4.0)  # 1000 bytes in 4 s, not in 6
    backlog.on_queued(500)
    assert backlog.seconds(100.0) == 2.0


def test_a_leg_that_failed_adds_time_and_no_rate() -> None:
    backlog = PrefillBacklog()
    p = Instance("http://p", "prefill")
    compute(backlog, p, 1000, 0.0, 1.0)
    backlog.on_leg_started(p, 1000, 1.0)
    backlog.on_leg_ended(p, 1000, 2.0)
    backlog.on_queued(1000)
    assert backlog.seconds(2.0) == 2.0


def test_an_instance_that_stalls_raises_the_backlog() -> None:
    backlog = PrefillBacklog()
    p = Instance("http://p", "prefill")
    compute(backlog, p, 1000, 0.0, 1.0)
    backlog.on_leg_started(p, 1000, 1.0)
    assert [backlog.seconds(at) for at in (1.0, 2.0, 5.0)] == [1.0, 2.0, 5.0]


def test_old_measurements_lose_weight() -> None:
    backlog = PrefillBacklog()
    p = Instance("http://p", "prefill")
    compute(backlog, p, 100_000, 0.0, 400.0)  # counts as 200 s
    compute(backlog, p, 50_000, 400.0, 450.0)
    backlog.on_queued(1000)
    assert backlog.seconds(450.0) == pytest.approx(1000 * 250 / 100_000)


@pytest.mark.parametrize("instances", [1, 3])
def test_so_they_do_while_no_instance_is_idle(instances: int) -> None:
    backlog = PrefillBacklog()
    prefills = [Instance(f"http://{number}", "prefill") for number in range(instances)]
    for p in prefills:
        backlog.on_leg_started(p, 4000, 0.0)
    seconds = 86_400
    for now in range(0, seconds + 1800, 2):
        size = 40_000 if now < seconds else 4_000
        for p in prefills:
            compute(backlog, p, size, now, now + 2)
    assert backlog.seconds(now + 2) == pytest.approx(instances * 4000 / 2000, rel=0.1)


def test_a_cached_prompt_is_computed_from_its_last_block_on() -> None:
    assert uncached_bytes(1000, 400) == 600
    assert uncached_bytes(1000, 1000) == prefill_backlog.MIN_UNCACHED_BYTES


async def hang(call: Call) -> None:
    await call.forever()


async def test_the_proxy_reports_its_backlog() -> None:
    async with world(prefill_concurrency=1) as w:
        assert (await w.post()).status == 200
        assert await w.metric("vllm_disagg_prefill_backlog_seconds") == 0
        w.p.script = hang
        started = [await w.start() for _ in range(3)]
        await w.until_waiting(2)
        first = await w.metric("vllm_disagg_prefill_backlog_seconds")
        assert first > 0
        later = await w.metric("vllm_disagg_prefill_backlog_seconds")
        assert later > first, "P answers nothing, so its rate falls"
        for client in started:
            client.close()

        async def is_over() -> bool:
            return await w.metric("vllm_disagg_prefill_backlog_seconds") == 0

        await until(is_over)


async def test_the_proxy_reports_cache_and_queue_of_the_engines() -> None:
    def prepare(w: World) -> None:
        w.d.kv_use = 0.25
        w.d.steps = 1
        w.d.waiting = 3

    async with world(prepare=prepare) as w:

        async def is_read() -> bool:
            return await w.metric("vllm_disagg_engine_waiting", w.d.url) == 3

        await until(is_read)  # not 102: the others wait for KV
        assert await w.metric("vllm_disagg_kv_cache_usage", w.d.url) == 0.25
        page = (await w.get("/metrics")).body.decode()
        assert f'vllm_disagg_engine_waiting{{url="{w.p.url}"' not in page, "P does not report it"
