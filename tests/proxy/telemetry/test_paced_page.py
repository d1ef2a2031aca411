"""Tests that many clients who ask for metrics at once take little of the event loop's time."""

import asyncio
import time

import pytest

from proxy_world import world
from vllm_disagg.proxy.telemetry import paced_page
from vllm_disagg.proxy.telemetry.metrics import Metrics
from vllm_disagg.proxy.telemetry.paced_page import PAUSE_FACTOR, PacedPage


class Pages:
    """Makes numbered pages, each of which stops the event loop for a while."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.made: list[tuple[float, float]] = []  # beginnings and ends
        self._seconds = seconds

    def make(self) -> bytes:
        began = time.monotonic()
        time.sleep(self._seconds)
        self.made.append((began, time.monotonic()))
        return b"%d" % len(self.made)


async def test_all_that_ask_at_once_get_one_page() -> None:
    pages = Pages()
    paced = PacedPage(pages.make)
    assert set(await asyncio.gather(*(paced.get() for _ in range(50)))) == {b"1"}
    assert await paced.get() == b"2", "it may have counts from after the first page"


async def test_pages_take_a_part_of_the_time() -> None:
    pages = Pages(0.02)
    paced = PacedPage(pages.make)
    for _ in range(3):
        await paced.get()
    for (began, ended), (next_began, _) in zip(pages.made, pages.made[1:], strict=False):
        assert next_began - ended > 0.9 * PAUSE_FACTOR * (ended - began)


async def test_a_page_in_whose_making_the_proxy_stood_still_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(paced_page, "MAX_PAUSE_SECONDS", 0.0)
    paced = PacedPage(Pages(0.05).make)
    await paced.get()
    began = time.monotonic()
    assert paced._earliest_start <= began
    await paced.get()


async def test_a_client_that_leaves_takes_no_page_from_the_others() -> None:
    paced = PacedPage(Pages().make)
    leaving, staying = (asyncio.create_task(paced.get()) for _ in range(2))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying == b"1"


async def test_clients_that_scrape_at_once_share_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them stopped all streams for as long as one page takes, up to seconds together."""
    rendered: list[bytes] = []

    def render(metrics: Metrics) -> bytes:
        rendered.append(b"a 1\n")
        time.sleep(0.001)
        return rendered[-1]

    monkeypatch.setattr(Metrics, "render", render)
    monkeypatch.setattr(paced_page, "PAUSE_FACTOR", 1000)
    async with world(prefill=0) as w:
        replies = await asyncio.gather(*(w.get("/metrics") for _ in range(40)))
        assert {(reply.status, reply.body) for reply in replies} == {(200, b"a 1\n")}
    assert 1 <= len(rendered) <= 3
