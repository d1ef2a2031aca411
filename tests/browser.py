"""Opens pages of a proxy in Chromium, and notes what they ask for and complain about.

Needs the `playwright` package (extra `dev`) and Debian's chromium. Without them tests are skipped,
or fail if the environment has STATUS_BROWSER=required.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
COMPLETE_SECONDS = 1.0
NOTICE_SECONDS = 3.0
LAUNCH_MS = 25_000
WAIT_MS = 60_000  # only ends a test that hangs, on a busy machine too


def missing() -> str:
    """Returns what this machine lacks for a browser."""
    try:
        import playwright.async_api  # noqa: F401
    except ImportError:
        return "no playwright: pip install playwright"
    return "" if CHROMIUM.exists() else f"no {CHROMIUM}: apt-get install chromium"


def need_browser() -> None:
    """Skips the test on a machine without a browser."""
    if reason := missing():
        skip(reason)


def skip(reason: str) -> None:
    """Skips the test, or fails it where a browser is required."""
    if is_required():
        pytest.fail(reason)
    pytest.skip(reason)


def is_required() -> bool:
    """Returns whether the run is to prove the page: nothing is skipped, all times count."""
    return os.environ.get("STATUS_BROWSER") == "required"


class Tab:
    """A page of a browser, with everything that it asked for or complained about."""

    def __init__(self, page: Any, port: int) -> None:
        self.page = page
        self.origin = f"http://localhost:{port}"
        self.complaints: list[str] = []
        self.foreign: list[str] = []
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", self._on_request)

    def _on_console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _on_request(self, request: Any) -> None:
        if not request.url.startswith((self.origin + "/", "data:")):
            self.foreign.append(request.url)

    async def open(self) -> None:
        await self.page.goto(f"{self.origin}/disagg/")

    async def until_complete(self) -> None:
        await self.page.wait_for_selector("html[data-ready]")

    async def load_seconds(self) -> float:
        """Returns how long the page took from its address to its last part."""
        took = await self.run(
            "performance.now() - performance.getEntriesByType('navigation')[0].startTime"
        )
        return float(took) / 1000

    async def run(self, script: str, argument: object = None) -> Any:
        return await self.page.evaluate(script, argument)

    async def card(self, url: str) -> str:
        """Returns the class of an instance's card, and its text."""
        found: str = await self.run(
            "url => { const card = document.querySelector(`[data-url='${url}']`);"
            " return card.className + ' ' + card.textContent; }",
            url,
        )
        return found


@contextlib.asynccontextmanager
async def tab(port: int, width: int = 1440) -> AsyncIterator[Tab]:
    """Opens a browser, with an empty profile of its own."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        # Playwright's own limits: the end of a test by its time limit leaves its driver behind.
        browser = await playwright.chromium.launch(
            executable_path=str(CHROMIUM), args=FLAGS, timeout=LAUNCH_MS
        )
        try:
            page = await browser.new_page(viewport={"width": width, "height": 1180})
            page.set_default_timeout(WAIT_MS)
            yield Tab(page, port)
        finally:
            await browser.close()
