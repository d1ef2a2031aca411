"""Engines with little room: requests are preempted on both sides, and every answer is right."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from asking import ask, at_once, body, expect_same, tokens
from conftest import Machine, Main
from engines import RUNNER, Engine, Proxy
from test_exact import needed

POOL = {"P": 24, "D": 28}  # blocks; a request may need 16
# In tokens. In Triton's interpreter they are as long as preemption takes.
LONG_ANSWER = 250 if RUNNER.is_interpreted else 500
OWN_ANSWER = 400 if RUNNER.is_interpreted else 600
MIXED_ANSWER = 60 if RUNNER.is_interpreted else 150
# Of an answer: preempted again and again, the last one waits for most of the others.
ANSWER_SECONDS = 600.0 * RUNNER.slowness
# Answers of which D has room for two at a time: the last one waits for several leases.
QUEUED, QUEUED_LENGTH, QUEUED_ANSWER = 6, 850, LONG_ANSWER
LEASE_SECONDS = 2.0
FLAGS = [
    "--no-scheduler-reserve-full-isl",
    "--num-gpu-blocks-override",
]  # starts requests that will not fit


class Small:
    def __init__(self, machine: Machine) -> None:
        engines = {
            name: Engine(
                f"small-{name}",
                machine.folder,
                *FLAGS,
                str(blocks),
                role=role,
                cpu=cpu,
                settings={"lease": LEASE_SECONDS},
            )
            for (name, blocks), role, cpu in zip(
                POOL.items(), ("kv_producer", "kv_consumer"), "01", strict=True
            )
        }
        self.prefill, self.decode = engines["P"], engines["D"]
        self.proxy = Proxy(machine.folder, self.prefill, self.decode, name="small-proxy")
        machine.start(self.prefill, self.decode)
        machine.start(self.proxy)

    def preemptions(self) -> tuple[float, float]:
        return self.prefill.metric("vllm:num_preemptions_total"), self.decode.metric(
            "vllm:num_preemptions_total"
        )

    def expect_idle(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.wait_free()
            engine.expect_alive()


@pytest.fixture(scope="module")
def small(machine: Machine) -> Iterator[Small]:
    made = Small(machine)
    yield made
    machine.stop(made.proxy, made.decode, made.prefill)


def crowd(
    main: Main, small: Small, lengths: list[int], max_tokens: int, what: str, idle: bool = True
) -> None:
    asked = [
        body(tokens(length, f"{what} {at}"), max_tokens, ignore_eos=True)
        for at, length in enumerate(lengths)
    ]
    plain = at_once(lambda one: ask(main.plain.url, one, timeout=ANSWER_SECONDS), asked)
    ours = at_once(lambda one: ask(small.proxy.url, one, timeout=ANSWER_SECONDS), asked)
    for one, expected, length in zip(ours, plain, lengths, strict=True):
        expect_same(one, expected, f"{what}, {length} tokens:")
    if idle:
        small.expect_idle()


def test_long_answers_preempt_on_the_decode_side(main: Main, small: Small) -> None:
    _, before = small.preemptions()
    crowd(main, small, [120 + 11 * at for at in range(16)], LONG_ANSWER, "long answers")
    assert small.preemptions()[1] > before


def test_the_prefill_side_preempts(main: Main, small: Small) -> None:
    """P's own growing requests take blocks away from the prefill legs, which are younger."""
    before, _ = small.preemptions()
    own = [body(tokens(100 + at, f"own {at}"), OWN_ANSWER, ignore_eos=True) for at in range(6)]
    plain = at_once(lambda one: ask(main.plain.url, one, timeout=ANSWER_SECONDS), own)
    with ThreadPoolExecutor(len(own)) as pool:
        growing = [pool.submit(ask, small.prefill.url, one, timeout=ANSWER_SECONDS) for one in own]
        crowd(main, small, [1000 + 37 * at for at in range(16)], 24, "long prompts", idle=False)
        for one, expected in zip(growing, plain, strict=True):
            expect_same(one.result(), expected)
    small.expect_idle()
    assert small.preemptions()[0] > before


def test_p_keeps_prompts_that_wait_for_room_at_d(main: Main, small: Small) -> None:
    """Else D would compute them itself, behind P's lease, where it has least time."""
    before, started_at = small.decode.received, time.monotonic()
    lengths = [QUEUED_LENGTH + at for at in range(QUEUED)]
    crowd(main, small, lengths, QUEUED_ANSWER, "queued")
    assert time.monotonic() - started_at > 3 * LEASE_SECONDS, "nothing had to wait"
    assert small.decode.received - before >= 0.9 * needed(lengths)


def test_everything_at_once(main: Main, small: Small) -> None:
    crowd(main, small, [1 + 90 * at for at in range(20)], MIXED_ANSWER, "mixed")
