"""Opens the status page in Chromium, in front of a proxy with two P and two D.

Needs the `playwright` package (extra `dev`) and Debian's chromium; axe-core from npm is optional.
Without them the tests are skipped. Environment:

    STATUS_BROWSER=required     fail instead of skipping
    STATUS_AXE=FILE             axe.min.js; by default .cache/axe/node_modules/axe-core/axe.min.js
    STATUS_SCREENSHOTS=FOLDER   write the pictures of the documents there, after STATUS_SECONDS
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from typing import Any

import pytest
from browser import COMPLETE_SECONDS, NOTICE_SECONDS, Tab, is_required, need_browser, skip, tab

from proxy_world import Call, World, until, world
from vllm_disagg.proxy.telemetry.metrics import LatencyObjectives

AXE = Path(os.environ.get("STATUS_AXE", ".cache/axe/node_modules/axe-core/axe.min.js"))
WIDTHS = (360, 1920)
SCHEMES = ("light", "dark")
HOSTILE = "<script>document.title='owned'</script>"
SEED = 5


@pytest.fixture(autouse=True)
def a_browser() -> None:
    need_browser()


def named(model: str = "Qwen/Qwen3-32B") -> Any:
    def prepare(w: World) -> None:
        for number, engine in enumerate(w.prefills + w.decodes):
            engine.models = [model]
            engine.kv_use = (0.22, 0.31, 0.58, 0.46)[number]
            engine.metric_lines = traffic(number, 0)

    return prepare


def traffic(number: int, gigabytes: float) -> list[str]:
    label = 'engine="0"'
    count = gigabytes * 1e9 if number >= 2 else 0.0
    transport = "nixl" if number == 2 else "tcp"
    return [
        f"vllm:disagg_received_bytes_total{{{label}}} {count}",
        f"vllm:disagg_overlapped_bytes_total{{{label}}} {count * 0.87}",
        f"vllm:disagg_reused_bytes_total{{{label}}} {count * 0.06}",
        f'vllm:disagg_received_wire_bytes_total{{{label},transport="{transport}"}} {count}',
        f"vllm:num_requests_waiting{{{label}}} {number % 2}",
    ]


async def paced(call: Call) -> None:
    """Answers in the time of a small model."""
    if call.leg == "prefill":
        await asyncio.sleep(random.uniform(0.03, 0.12))
        params = {"disagg_engine": call.engine.facts(call.rank)}
        await call.json({"choices": [{"text": "x"}], "kv_transfer_params": params})
        return
    await call.stream()
    await asyncio.sleep(random.uniform(0.13, 0.18))
    tokens = random.randint(6, 14)
    for _ in range(tokens):
        await call.event({"text": "a"})
        await asyncio.sleep(random.uniform(0.01, 0.02))
    usage = {"prompt_tokens": random.randint(300, 9000), "completion_tokens": tokens}
    await call.event({"choices": [], "usage": usage})
    await call.event("[DONE]")
    await call.end()


async def serve_some(w: World, requests: int) -> None:
    """Serves requests, three at a time, while KV flows."""
    random.seed(SEED)
    for engine in w.prefills + w.decodes:
        engine.script = paced
    for step in range(requests // 3):
        for number, engine in enumerate(w.prefills + w.decodes):
            engine.metric_lines = traffic(number, (step + 1) * (0.4 + 0.2 * number))
        await asyncio.gather(*(w.post(stream=True) for _ in range(3)))


async def test_the_page_is_complete_within_a_second() -> None:
    async with world(2, 2, prepare=named(HOSTILE)) as w, tab(w.port) as t:
        await w.post(stream=True)
        await t.open()  # a browser's first page also starts its processes
        await t.until_complete()
        await t.open()
        await t.until_complete()
        if is_required():  # elsewhere other tests take the page's cores
            assert await t.load_seconds() < COMPLETE_SECONDS
        body = await t.page.inner_text("body")
        for words in ("Goodput now", "TTFT", "hand-off", "Events", "Failovers by reason", HOSTILE):
            assert words in body
        assert await t.run("document.querySelectorAll('script').length") == 1
        assert await t.page.title() == "vllm-disagg: serving"
        assert await t.run("document.querySelectorAll('#requests tr').length") == 1
        assert await t.run("document.querySelectorAll('#lines path').length") == 4
        assert (t.complaints, t.foreign) == ([], [])


async def test_a_dead_d_is_red_and_green_again() -> None:
    async with world(2, 2, prepare=named()) as w, tab(w.port) as t:
        await t.open()
        await t.until_complete()
        assert "card good" in await t.card(w.d.url)
        began = asyncio.get_running_loop().time()
        await w.d.stop()
        await t.page.wait_for_selector(f".card.bad[data-url='{w.d.url}']")
        if is_required():
            assert asyncio.get_running_loop().time() - began < NOTICE_SECONDS
        assert "refuses connections" in await t.card(w.d.url)
        dashed = "#lines g.broken path[stroke-dasharray]"
        assert await t.run("s => document.querySelectorAll(s).length", dashed) == 2
        assert "refuses connections" in await t.page.inner_text("#problems")
        await w.d.start()
        await t.page.wait_for_selector(f".card.good[data-url='{w.d.url}']")
        await t.page.wait_for_selector("#problems:empty", state="attached")
        assert (t.complaints, t.foreign) == ([], [])


async def test_a_misfit_is_dashed_with_the_fields_name() -> None:
    def prepare(w: World) -> None:
        named()(w)
        w.decodes[1].layout["dtype"] = "float16"

    async with world(2, 2, prepare=prepare, ready=False) as w, tab(w.port) as t:
        await w.until_probed()
        await t.open()
        await t.until_complete()
        await t.page.wait_for_selector("#lines g.misfit path[stroke-dasharray]")
        assert await t.run("document.querySelectorAll('#lines g.misfit').length") == 2
        labels = await t.run(
            "[...document.querySelectorAll('#lines g.misfit text')].map(e => e.textContent)"
        )
        assert labels == ["dtype", "dtype"]
        assert "dtype is bf16" in await t.page.inner_text("#problems")
        assert "card warn" in await t.card(w.decodes[1].url)


async def test_the_key_is_asked_for_and_instances_are_drained_with_it() -> None:
    async with world(1, 2, prepare=named(), admin_key="root") as w, tab(w.port) as t:
        await t.open()
        await t.page.wait_for_selector("#gate:not([hidden])")
        assert await t.page.is_hidden("#board")
        await t.page.fill("#key", "wrong")
        await t.page.press("#key", "Enter")
        await t.page.wait_for_selector("#gate-error:has-text('refused this key')")
        await t.page.fill("#key", "root")
        await t.page.click("#gate button")
        await t.until_complete()
        assert t.page.url == f"{t.origin}/disagg/", "no key in an address"
        await t.page.reload()
        await t.until_complete()
        button = f"[data-url='{w.d.url}'] button"
        await t.page.click(button)
        await t.page.click(f"{button}.sure")  # it asks once more
        await t.page.wait_for_selector(f"[data-url='{w.d.url}'] .state:has-text('drained')")
        assert (await w.post()).status == 200 and not w.d.calls
        await t.page.click(f"{button}:has-text('Add back')")
        await t.page.wait_for_selector(f".card.good[data-url='{w.d.url}']")
        await t.page.click("#forget")
        await t.page.wait_for_selector("#gate:not([hidden])")
        assert await t.run("sessionStorage.length") == 0
        refused = [text for text in t.complaints if "401" not in text]
        assert (refused, t.foreign) == ([], [])


@pytest.mark.parametrize("width", WIDTHS)
async def test_the_page_fits_its_window(width: int) -> None:
    prepare = named("a-model-with-a-very-long-name/" * 6)
    async with world(2, 2, prepare=prepare) as w, tab(w.port, width) as t:
        await w.post(stream=True)
        await w.decodes[1].stop()
        await t.open()
        await t.until_complete()
        await t.page.wait_for_selector(".card.bad")
        widest = await t.run("document.documentElement.scrollWidth")
        assert widest <= width, "only tables scroll sideways"


async def test_axe_finds_no_serious_violation() -> None:
    if not AXE.exists():
        skip(f"no {AXE}: npm install --prefix .cache/axe axe-core")
    found = []
    async with world(2, 2, prepare=named(), admin_key="root") as w:
        await serve_some(w, 6)
        await w.d.stop()
        async with tab(w.port) as t:
            await t.open()
            await t.page.wait_for_selector("#gate:not([hidden])")
            # Injected by the debugger, past the page's policy.
            await t.run(AXE.read_text() + "; 0")
            found += await violations(t)
            await t.page.fill("#key", "root")
            await t.page.click("#gate button")
            await t.until_complete()
            await t.page.wait_for_selector(".card.bad")
            found += await violations(t)
    assert found == []


async def violations(t: Tab) -> list[str]:
    """Returns the serious violations of the page as it is, in light and in dark."""
    found = []
    for scheme in SCHEMES:
        await t.page.emulate_media(color_scheme=scheme)
        for rule in await t.run("axe.run().then(result => result.violations)"):
            if rule["impact"] in ("serious", "critical"):
                nodes = [f"{node['html']}: {node['failureSummary']}" for node in rule["nodes"]]
                found.append(f"{scheme}: {rule['id']}: {nodes}")
    return found


async def test_the_pictures_of_the_documents(tmp_path: Path) -> None:
    folder = Path(os.environ.get("STATUS_SCREENSHOTS", tmp_path))
    objectives = LatencyObjectives(ttft=0.5, tpot=0.05)
    async with world(2, 2, prepare=named(), objectives=objectives) as w:
        await serve_some(w, 6)
        stopped = w.decodes[1]
        served = len(stopped.calls)
        late = asyncio.create_task(serve_some(w, 12))
        await until(lambda: len(stopped.calls) > served)
        await stopped.stop()
        await late
        await stopped.start()
        await w.until_ready()
        load = asyncio.create_task(serve_some(w, 100_000))
        async with tab(w.port) as t:
            await t.open()
            await t.until_complete()
            await t.page.wait_for_selector("#lines .nixl")
            await asyncio.sleep(float(os.environ.get("STATUS_SECONDS", "0")))
            for scheme in SCHEMES:
                await t.page.emulate_media(color_scheme=scheme)
                picture = folder / f"status-page-{scheme}.png"
                await t.page.screenshot(path=str(picture))
                assert picture.stat().st_size > 50_000
            assert (t.complaints, t.foreign) == ([], [])
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
