"""Tests how the supervisor collects texts of all proxy workers, as their metrics."""

import asyncio

import pytest

from proxy_world import until
from vllm_disagg.proxy.telemetry.merged_metrics import merge
from vllm_disagg.proxy.workers import text_collection
from vllm_disagg.proxy.workers.bus import BusMessage, Topic
from vllm_disagg.proxy.workers.supervisor import BusHub
from vllm_disagg.proxy.workers.text_collection import MetricsCollection


def counted(value: int) -> str:
    return f"# TYPE a_total counter\na_total {value}.0\n# TYPE up gauge\nup 1.0\n"


async def test_what_a_dead_worker_had_counted_stays_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MetricsCollection, "pause_seconds", 0.0)
    hub = BusHub(2)
    said: list[BusMessage] = []
    first, second = hub.workers
    first.send = second.send = said.append  # type: ignore[assignment, method-assign]

    def scrape(*counts: int) -> list[str]:
        said.clear()
        hub.on_message(first, BusMessage("ask"), 0.0)
        for worker, count in zip(hub.workers, counts, strict=True):
            hub.on_message(worker, BusMessage("rendered", text=counted(count)), 0.0)
        (text,) = next(m.texts for m in said if m.kind == "texts")
        return text.splitlines()

    for worker in hub.workers:
        worker.ready.set()
    assert "a_total 7.0" in scrape(3, 4)
    for count in (5, 6):  # two lives of the second, each of which was asked before it died
        hub.on_death(second)
        lines = scrape(3, count)
        assert f"a_total {3 + 4 + count + (5 if count == 6 else 0)}.0" in lines
        assert "up 1.0" in lines
    hub.on_death(first)
    hub.on_death(second)
    (dead,) = hub.collections["metrics"].texts()
    assert "up" not in dead and "a_total 18.0" in dead


async def test_a_text_that_cannot_be_merged_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """It ended the connection of the worker that sent it, and each later scrape."""
    hub = BusHub(1)
    (worker,) = hub.workers
    said: list[BusMessage] = []
    worker.send = said.append  # type: ignore[assignment, method-assign]
    worker.ready.set()
    collection = hub.collections["metrics"]
    collection.last_texts[worker] = counted(3)
    hub.on_death(worker)
    hub.on_message(worker, BusMessage("ask"), 0.0)
    hub.on_message(worker, BusMessage("rendered", text="# no metrics"), 0.0)
    assert said[-1] == BusMessage("texts", topic="metrics", texts=[""])
    hub.on_death(worker)
    assert "a_total 3.0" in collection.texts()[0], "what was counted before stays"
    assert "cannot be merged" in caplog.text


async def test_what_a_slow_worker_had_counted_stays_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A counter that falls looks like a restart: rates would count all of it again."""
    monkeypatch.setattr(text_collection, "TEXTS_TIMEOUT_SECONDS", 0.01)
    monkeypatch.setattr(MetricsCollection, "pause_seconds", 0.0)
    hub = BusHub(2)
    told: asyncio.Queue[BusMessage] = asyncio.Queue()
    first, slow = hub.workers
    first.send = told.put_nowait  # type: ignore[assignment, method-assign]
    for worker in hub.workers:
        worker.ready.set()

    async def scrape(topic: Topic, *counts: int) -> list[str]:
        hub.on_message(first, BusMessage("ask", topic=topic), 0.0)
        for worker, count in zip(hub.workers, counts, strict=False):
            rendered = BusMessage("rendered", topic=topic, text=counted(count))
            hub.on_message(worker, rendered, 0.0)
        while (message := await asyncio.wait_for(told.get(), 10)).kind != "texts":
            pass
        return merge(message.texts).decode().splitlines()

    assert "a_total 7.0" in await scrape("metrics", 3, 4)
    assert "a_total 9.0" in await scrape("metrics", 5)
    hub.on_message(slow, BusMessage("rendered", text=counted(6)), 0.0)  # too late
    assert "a_total 11.0" in await scrape("metrics", 5)
    for counts, total in (((3, 4), 7), ((3,), 3)):
        assert f"a_total {total}.0" in await scrape("status", *counts), "of those that answer"


class Hub(BusHub):
    """Has two workers that serve, and keeps what each of them is sent."""

    def __init__(self) -> None:
        super().__init__(2)
        self.sent: list[list[BusMessage]] = [[], []]
        for worker, sent in zip(self.workers, self.sent, strict=True):
            worker.send = sent.append  # type: ignore[assignment, method-assign]
            worker.ready.set()

    def ask(self, *indices: int, topic: Topic = "metrics") -> None:
        for index in indices:
            self.on_message(self.workers[index], BusMessage("ask", topic=topic), 0.0)

    def render(self, index: int, text: str, topic: Topic = "metrics") -> None:
        rendered = BusMessage("rendered", topic=topic, text=text)
        self.on_message(self.workers[index], rendered, 0.0)

    def take_sent(self, index: int) -> list[BusMessage]:
        sent = self.sent[index].copy()
        self.sent[index].clear()
        return sent


async def test_clients_that_ask_at_once_share_one_collection_and_one_sum() -> None:
    """Metrics need no key. Each worker was sent all texts once for each client, and summed them."""
    hub = Hub()
    hub.ask(0, 0, 1, 0, 1)
    render = BusMessage("render")
    assert hub.take_sent(0) == hub.take_sent(1) == [render]
    hub.render(0, counted(3))
    hub.ask(1)
    hub.render(1, counted(4))
    for index in range(2):
        (message,) = hub.take_sent(index)
        (text,) = message.texts
        assert message.kind == "texts" and "a_total 7.0" in text.splitlines()


async def test_metrics_are_collected_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients without a key would have each worker render its metrics all the time."""
    monkeypatch.setattr(MetricsCollection, "pause_seconds", 0.3)
    hub = Hub()
    loop = asyncio.get_running_loop()
    began = loop.time()
    hub.ask(0)
    hub.render(0, counted(3))
    hub.render(1, counted(4))
    assert [m.kind for m in hub.take_sent(0)] == ["render", "texts"]
    hub.ask(0)
    hub.render(0, counted(5))
    hub.render(1, counted(5))
    assert not hub.take_sent(0), "late texts ended a collection that had not begun"
    await until(lambda: hub.sent[0])
    assert loop.time() - began > 0.29
    hub.render(0, counted(6))
    hub.render(1, counted(6))
    render, texts = hub.take_sent(0)
    assert render.kind == "render" and "a_total 12.0" in texts.texts[0]


async def test_the_status_is_collected_at_once_and_shared() -> None:
    hub = Hub()
    for _ in range(3):
        hub.ask(0, 1, 0, topic="status")
        assert hub.take_sent(0) == [BusMessage("render", topic="status")]
        hub.render(0, "a", "status")
        hub.render(1, "b", "status")
        (message,) = hub.take_sent(0)
        assert sorted(message.texts) == ["a", "b"]


async def test_a_worker_that_is_slow_has_one_request_to_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each second another one was queued there: at last it did nothing but render."""
    monkeypatch.setattr(text_collection, "TEXTS_TIMEOUT_SECONDS", 0.01)
    monkeypatch.setattr(MetricsCollection, "pause_seconds", 0.0)
    hub = Hub()

    async def scrape() -> list[str]:
        hub.ask(0)
        hub.render(0, counted(1))
        await until(lambda: any(m.kind == "texts" for m in hub.sent[0]))
        hub.take_sent(0)
        return [message.kind for message in hub.take_sent(1)]

    assert [await scrape(), await scrape()] == [["render"], []]
    hub.render(1, counted(2))
    assert [await scrape(), await scrape()] == [["render"], []]
    hub.on_death(hub.workers[1])
    assert await scrape() == ["render"], "another process"
