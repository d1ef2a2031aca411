"""A prefill engine that freezes, dies and comes back: every answer comes, and is right.

Runs late, since P dies, and through a proxy with the limits of users, which finds failures soon.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from asking import Record, ask, at_once, body, expect_same, tokens
from conftest import STALL_SECONDS, Main
from engines import wait

from vllm_disagg.fleet import grants

ENGINE_STALLED = ("vllm:disagg_failed_loads_total", 'reason="engine_stalled"')
FREEZE_SECONDS = 6.0
MAX_SECONDS = 20.0  # of an answer beside a failure of P, on an idle machine
# The same on a crowded machine, as a multiple of the plain engine's time for all these requests: D
# may compute as much as it does, and P has computed a part of that before.
MAX_RATIO = 5.0
STALLS = 3  # tries to stop a core in the middle of prompts


@pytest.fixture(scope="module", autouse=True)
def _prompt_proxy(main: Main) -> Iterator[None]:
    """Puts a proxy that is not patient in the place of the main one."""
    patient = main.proxy
    with main.other_proxy("proxy11", is_patient=False) as main.proxy:
        yield
    main.proxy = patient


def while_running(
    main: Main, count: int, length: int, do: Callable[[], object], after: float = 0.05
) -> None:
    """Runs requests while `do` changes an engine; all answers are right, and come soon."""
    asked = [body(tokens(length + at, time.monotonic()), 24) for at in range(count)]
    began = time.monotonic()
    plain = at_once(lambda one: ask(main.plain.url, one), asked)
    limit = max(MAX_SECONDS, MAX_RATIO * (time.monotonic() - began))
    timer = threading.Timer(after, do)
    timer.start()

    def timed(one: dict[str, object]) -> tuple[Record, float]:
        began = time.monotonic()
        return ask(main.proxy.url, one), time.monotonic() - began

    ours = at_once(timed, asked)
    timer.join()
    for (one, _), expected in zip(ours, plain, strict=True):
        expect_same(one, expected)
    took = [seconds for _, seconds in ours]
    assert max(took) < limit, took


def test_a_prefill_engine_that_freezes(main: Main) -> None:
    def freeze() -> None:
        main.prefill.signal(signal.SIGSTOP)
        time.sleep(FREEZE_SECONDS)  # connections break meanwhile, on one side
        main.prefill.signal(signal.SIGCONT)

    while_running(main, 16, 1800, freeze)
    main.expect_well()


def test_a_decode_engine_that_freezes(main: Main) -> None:
    def freeze() -> None:
        main.decode.signal(signal.SIGSTOP)
        time.sleep(4)
        main.decode.signal(signal.SIGCONT)

    while_running(main, 8, 1800, freeze)
    main.expect_well()


def test_a_prefill_engine_whose_core_stands_still_while_its_worker_lives(main: Main) -> None:
    """Worker and /health answer. D gives P up long before the prefill timeout."""
    # A crowded machine may run this process so late that P has computed all prompts before.
    is_found = any(stop_core_in_prompts(main) for _ in range(STALLS))
    assert is_found, f"D has found no engine that stands still in {STALLS} tries"
    main.expect_well()


def stop_core_in_prompts(main: Main) -> bool:
    """Stops P's core while requests run; returns whether D has found that."""
    asked = [body(tokens(1800 + at, time.monotonic()), 8) for at in range(8)]
    began = time.monotonic()
    plain = at_once(lambda one: ask(main.plain.url, one), asked)
    plain_seconds = time.monotonic() - began
    stalled, before = main.decode.metric(*ENGINE_STALLED), main.decode.received
    core = main.prefill.child("EngineCore")
    transfers = [grants.new_transfer() for _ in asked]
    legs = [
        main.legs.send_prefill(one, transfer)
        for one, transfer in zip(asked, transfers, strict=True)
    ]
    answers = [
        main.legs.send_decode(one, transfer) for one, transfer in zip(asked, transfers, strict=True)
    ]
    wait("KV moves", lambda: main.decode.received > before, every=0.01)
    os.kill(core, signal.SIGSTOP)
    began = time.monotonic()
    try:
        limit = STALL_SECONDS + max(30.0, MAX_RATIO * plain_seconds)
        for answer, expected in zip(answers, plain, strict=True):
            expect_same(answer.result(limit), expected)
        seconds = time.monotonic() - began
        wait("its API server lives", main.prefill.is_ready)
    finally:
        os.kill(core, signal.SIGCONT)
    assert {leg.result().status for leg in legs} == {200}
    is_found = main.decode.metric(*ENGINE_STALLED) > stalled
    assert not is_found or seconds > STALL_SECONDS / 2
    return is_found


def test_a_prefill_engine_that_dies_and_comes_back(main: Main) -> None:
    while_running(main, 8, 1800, lambda: main.prefill.stop(gently=0))
    for at in range(5):  # the decode engine alone
        main.check(body(tokens(300 + at, f"alone {at}")))
    main.machine.start_again(main.prefill)
    wait("the proxy has noticed", main.ready)
    main.legs.close()
    main.legs = main.new_legs()
    main.expect_well()


def test_a_decode_engine_that_dies(main: Main) -> None:
    """There is no other: each request soon ends with an explicit error, and P frees its blocks."""
    # Longer than it takes to kill D on a crowded machine.
    asked = [
        body(tokens(1500 + at, f"no decode engine {at}"), 500, ignore_eos=True) for at in range(6)
    ]
    killed_at: list[float] = []

    def kill() -> None:
        main.decode.stop(gently=0)
        killed_at.append(time.monotonic())

    timer = threading.Timer(0.1, kill)
    timer.start()
    answers = at_once(lambda one: ask(main.proxy.url, one), asked)
    timer.join()
    assert time.monotonic() - killed_at[0] < MAX_SECONDS
    for answer in answers:
        assert answer.status == 200 or (answer.status in (502, 503) and "error" in answer.error), (
            answer
        )
    assert any(answer.status != 200 for answer in answers)
    main.prefill.wait_free()
