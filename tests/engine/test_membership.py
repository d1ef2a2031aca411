"""A fleet that changes under load: an instance is drained and comes back, and engines register."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from asking import ask, body, expect_same, tokens
from conftest import Main
from engines import Proxy, wait

QUIET = 2.0  # seconds of load between changes


@contextmanager
def load(main: Main) -> Iterator[list[object]]:
    """Runs one client without a break; every answer must equal the plain engine's."""
    jobs = [body(tokens(20 + 90 * at, f"membership {at}"), 8) for at in range(6)]
    right = [ask(main.plain.url, job) for job in jobs]
    failed: list[object] = []
    over = threading.Event()

    def client() -> None:
        at = 0
        while not over.is_set():
            at += 1
            try:
                expect_same(ask(main.proxy.url, jobs[at % len(jobs)]), right[at % len(jobs)])
            except Exception as error:
                failed.append(error)
                return

    thread = threading.Thread(target=client)
    thread.start()
    try:
        yield failed
    finally:
        over.set()
        thread.join()
    assert not failed, failed[0]


def test_instances_come_and_go_under_load(main: Main) -> None:
    proxy, prefill = main.proxy, main.prefill.url
    with load(main):
        time.sleep(QUIET)
        proxy.change("POST", "/disagg/instances/drain", url=prefill)
        wait("the drained one is idle", lambda: proxy.is_drained(prefill))
        time.sleep(QUIET)
        proxy.change("POST", "/disagg/instances", url=prefill, role="prefill")
        wait("it is back", lambda: proxy.members().get(prefill, False))
        time.sleep(QUIET)
        proxy.change(
            "DELETE", "/disagg/instances", url=prefill
        )  # a flag still names it, so this drains it
        wait("it is idle again", lambda: proxy.is_drained(prefill))
        proxy.change("POST", "/disagg/instances", url=prefill, role="prefill")
        wait("it is back again", lambda: proxy.members().get(prefill, False))
    main.expect_well(2)


def test_engines_make_themselves_known(main: Main) -> None:
    """The proxy has no configured instances; both engines try to register since their start."""
    proxy = Proxy(
        main.machine.folder,
        [],
        [],
        "--allow-registration",
        name="meeting",
        port=main.meeting,
        is_patient=True,
    )
    main.machine.start(proxy)
    try:
        both = {main.prefill.url: True, main.decode.url: True}
        wait("both are known", lambda: proxy.members() == both)
        before = main.decode.received
        job = body(tokens(500, time.monotonic()))
        expect_same(ask(proxy.url, job), ask(main.plain.url, job))
        wait("KV is transferred", lambda: main.decode.received > before)
    finally:
        main.machine.stop(proxy)
