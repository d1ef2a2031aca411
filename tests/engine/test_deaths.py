"""A prefill engine that freezes, dies and comes back: every answer comes, and is right.

Runs late, since P dies.
"""

from __future__ import annotations

import os
import signal
import threading
import time

from asking import Record, ask, at_once, body, expect_same, tokens
from conftest import STALL_SECONDS, Main
from engines import wait

from vllm_disagg.fleet import grants

ENGINE_STALLED = ("vllm:disagg_failed_loads_total", 'reason="engine_stalled"')


def while_running(
    main: Main, count: int, length: int, do: object, after: float = 0.05
) -> list[float]:
    """Runs requests while `do` changes an engine; returns their durations, all answers right."""
    asked = [body(tokens(length + at, time.monotonic()), 24) for at in range(count)]
    plain = at_once(lambda one: ask(main.plain.url, one), asked)
    timer = threading.Timer(after, do)  # type: ignore[arg-type]
    timer.start()

    def timed(one: dict[str, object]) -> tuple[Record, float]:
        began = time.monotonic()
        return ask(main.proxy.url, one), time.monotonic() - began

    ours = at_once(timed, asked)
    timer.join()
    for (one, _), expected in zip(ours, plain, strict=True):
        expect_same(one, expected)
    return [seconds for _, seconds in ours]


def test_a_prefill_engine_that_freezes(main: Main) -> None:
    def freeze() -> None:
        main.prefill.signal(signal.SIGSTOP)
        time.sleep(6)  # connections break meanwhile, on one side
        main.prefill.signal(signal.SIGCONT)

    took = while_running(main, 16, 1800, freeze)
    assert max(took) < 20, took
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
    asked = [body(tokens(1800 + at, time.monotonic()), 8) for at in range(8)]
    plain = at_once(lambda one: ask(main.plain.url, one), asked)
    stalled, before = (
        main.decode.metric(*ENGINE_STALLED),
        main.decode.received,
    )
    core = main.prefill.child("EngineCore")
    transfers = [grants.new_transfer() for _ in asked]
    legs = [
        main.legs.send_prefill(one, transfer)
        for one, transfer in zip(asked, transfers, strict=True)
    ]
    answers = [
        main.legs.send_decode(one, transfer) for one, transfer in zip(asked, transfers, strict=True)
    ]
    wait("KV moves", lambda: main.decode.received > before, 20, every=0.01)
    os.kill(core, signal.SIGSTOP)
    began = time.monotonic()
    try:
        for answer, expected in zip(answers, plain, strict=True):
            expect_same(answer.result(STALL_SECONDS + 30), expected)
        assert main.prefill.is_ready(), "its API server lives"
        assert time.monotonic() - began > STALL_SECONDS / 2
        assert main.decode.metric(*ENGINE_STALLED) > stalled
    finally:
        os.kill(core, signal.SIGCONT)
    assert {leg.result().status for leg in legs} == {200}
    main.expect_well()


def test_a_prefill_engine_that_dies_and_comes_back(main: Main) -> None:
    took = while_running(main, 8, 1800, lambda: main.prefill.stop(gently=0))
    assert max(took) < 20, took
    for at in range(5):  # the decode engine alone
        main.check(body(tokens(300 + at, f"alone {at}")))
    main.machine.start_again(main.prefill)
    wait("the proxy has noticed", main.ready, 15)
    main.legs.close()
    main.legs = main.new_legs()
    main.expect_well()


def test_a_decode_engine_that_dies(main: Main) -> None:
    """There is no other: each request soon ends with an explicit error, and P frees its blocks."""
    asked = [body(tokens(1500 + at, f"no decode engine {at}"), 24) for at in range(6)]
    timer = threading.Timer(0.1, lambda: main.decode.stop(gently=0))
    timer.start()
    began = time.monotonic()
    answers = at_once(lambda one: ask(main.proxy.url, one), asked)
    timer.join()
    assert time.monotonic() - began < 20
    for answer in answers:
        assert answer.status == 200 or (answer.status in (502, 503) and "error" in answer.error), (
            answer
        )
    assert any(answer.status != 200 for answer in answers)
    wait("P gives its blocks back", lambda: main.prefill.usage == 0, 20)
