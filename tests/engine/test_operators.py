"""What operators see of real engines: the status page in a browser, and a request's id in all logs.

One decode engine of two is killed under load, and started again.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from asking import body, tokens
from browser import COMPLETE_SECONDS, NOTICE_SECONDS, Tab, is_required, need_browser, tab
from conftest import Machine
from engines import ADMIN, RUNNER, Engine, Proxy, wait

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(
        RUNNER.is_interpreted, reason="the page's limits are for engines that are not interpreted"
    ),
]
LOADS = 5  # of the page; the best one counts, since engines take the cores
REQUESTS = 24
ANSWER_SECONDS = 120.0  # only ends a request that hangs


@dataclass
class Fleet:
    """One prefill and two decode engines behind a proxy, whose access log is in its own log."""

    machine: Machine
    prefill: Engine
    decodes: list[Engine]
    proxy: Proxy

    def answered(self, name: str) -> int:
        """Sends a request with an id; returns the status of its answer."""
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.proxy.port, timeout=ANSWER_SECONDS
        )
        headers = {"content-type": "application/json", "x-request-id": name}
        try:
            connection.request(
                "POST", "/v1/completions", json.dumps(body(tokens(700, name), 24)), headers
            )
            answer = connection.getresponse()
            answer.read()
            return answer.status
        finally:
            connection.close()

    def replace_first(self) -> None:
        """Starts the decode engine again that is killed."""
        self.decodes[0].stop(gently=0)
        self.machine.start_again(self.decodes[0])
        wait("the proxy uses all", lambda: all(self.proxy.members().values()), 60)


@pytest.fixture(scope="module")
def fleet(machine: Machine) -> Any:
    folder = machine.folder
    prefill = Engine("seen-P", folder, role="kv_producer", cpu="0")
    decodes = [Engine(f"seen-D{at}", folder, role="kv_consumer", cpu="1") for at in range(2)]
    flags = ("--policy", "round_robin", "--access-log", "-")
    proxy = Proxy(folder, prefill, decodes, *flags, name="seen-proxy")
    machine.start(prefill, *decodes)
    machine.start(proxy)
    made = Fleet(machine, prefill, decodes, proxy)
    wait("the proxy uses all", lambda: all(proxy.members().values()), 60)
    yield made
    machine.stop(proxy, *decodes, prefill)


def test_one_grep_finds_each_request_of_a_run_with_a_killed_d(fleet: Fleet) -> None:
    """In the logs of the proxy, of P, and of each D that had it, also of the killed one."""
    try:
        follow(fleet)
    finally:
        fleet.replace_first()


def follow(fleet: Fleet) -> None:
    """Kills a decode engine under load, and looks for each request in the logs."""
    names = [f"followed-{at:03}" for at in range(REQUESTS)]
    killed, other = fleet.decodes
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(fleet.answered, name) for name in names]
        wait("the first has requests", lambda: "followed-" in killed.log.read_text(), 60)
        killed.stop(gently=0)
        statuses = [answer.result() for answer in answers]
    assert statuses == [200] * REQUESTS
    wait("the access log is written", lambda: names[-1] in fleet.proxy.log.read_text())
    servers = (fleet.proxy, fleet.prefill, killed, other)
    logs = {server.name: server.log.read_text() for server in servers}
    for name in names:
        found = {server for server, text in logs.items() if name in text}
        assert {fleet.proxy.name, fleet.prefill.name} <= found, (name, found)
        assert found & {killed.name, other.name}, (name, found)
    moved = [name for name in names if name in logs[killed.name] and name in logs[other.name]]
    print(f"{REQUESTS} requests found by their ids; {len(moved)} were at both D")
    assert any(name in logs[killed.name] for name in names) and moved


def test_the_page_with_real_engines(fleet: Fleet) -> None:
    need_browser()
    for at in range(4):
        assert fleet.answered(f"shown-{at}") == 200
    asyncio.run(watch(fleet))


async def watch(fleet: Fleet) -> None:
    """Opens the page, kills a decode engine and starts it again."""
    killed = fleet.decodes[0]
    async with tab(fleet.proxy.port) as t:
        await t.open()
        await t.page.fill("#key", ADMIN)
        await t.page.click("#gate button")
        await t.until_complete()
        best = min([await load_again(t) for _ in range(LOADS)])
        text = await t.page.inner_text("body")
        assert "tiny" in text and "shown-3" in text
        assert await t.run("document.querySelectorAll('#lines path').length") == 2
        for engine in (fleet.prefill, *fleet.decodes):
            assert "card good" in await t.card(engine.url)
            title = await t.run(
                "url => document.querySelector(`[data-url='${url}']`).title", engine.url
            )
            assert "tcp" in title, "what it can send and receive by"
        began = time.monotonic()
        killed.stop(gently=0)
        await t.page.wait_for_selector(f".card.bad[data-url='{killed.url}']")
        noticed = time.monotonic() - began
        assert "refuses connections" in await t.card(killed.url)
        assert await asyncio.to_thread(fleet.answered, "while-it-is-dead") == 200
        fleet.machine.start_again(killed)
        await t.page.wait_for_selector(f".card.good[data-url='{killed.url}']", timeout=60_000)
        await t.page.wait_for_selector("#problems:empty", state="attached")
        print(f"complete after {best:.2f} s, a killed D red after {noticed:.1f} s")
        if is_required():  # elsewhere the engines take the page's cores
            assert best < COMPLETE_SECONDS and noticed < NOTICE_SECONDS
        refused = [text for text in t.complaints if "401" not in text]  # before the key was given
        assert (refused, t.foreign) == ([], [])


async def load_again(t: Tab) -> float:
    """Returns how long the page takes to be complete again, in seconds."""
    await t.page.reload()
    await t.until_complete()
    return await t.load_seconds()
