"""Engines that get SIGTERM with vLLM's `--shutdown-timeout`: their running requests end well.

P keeps the KV of finished prompts until it was read or its lease ends; D finishes its answers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from asking import Body, Record, ask, at_once, body, expect_same, tokens
from conftest import Machine
from direct import Legs
from engines import Engine, wait

from vllm_disagg.fleet import grants

pytestmark = pytest.mark.wide

SHUTDOWN_SECONDS = 60  # vLLM's own limit, much longer than the lease
LEASE_SECONDS = 20.0
END_SECONDS = 15.0  # for an engine without work to end
READ_SECONDS = 2.0  # between SIGTERM and D's first message
FLAGS = ("--shutdown-timeout", str(SHUTDOWN_SECONDS))


class Pair:
    """P and D, and the answers of D alone."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        settings: dict[str, object] = {"lease": LEASE_SECONDS}
        self.prefill = Engine(
            "Pstop", machine.folder, *FLAGS, role="kv_producer", cpu="0", settings=settings
        )
        self.decode = Engine(
            "Dstop", machine.folder, *FLAGS, role="kv_consumer", cpu="1", settings=settings
        )
        machine.start(self.prefill, self.decode)

    def right(self, asked: list[Body]) -> list[Record]:
        """Returns the answers of P alone: D's prefix cache must not have the prompts."""
        return at_once(lambda one: ask(self.prefill.url, one), asked)

    def legs(self) -> Legs:
        return Legs(self.machine.key, self.prefill, self.decode)


def requests_of(engine: Engine) -> float:
    """Returns how many requests run or wait in an engine, as its last step saw."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    return sum(engine.metric(name) for name in names)


@pytest.fixture(scope="module")
def pair(machine: Machine) -> Iterator[Pair]:
    made = Pair(machine)
    yield made
    machine.stop(made.decode, made.prefill)


def test_a_prefill_engine_ends_when_its_kv_was_read_or_its_lease_is_over(pair: Pair) -> None:
    asked = [body(tokens(1500 + at, f"read after SIGTERM {at}"), 24) for at in range(4)]
    right = pair.right(asked)
    legs = pair.legs()
    transfers = [grants.new_transfer() for _ in asked]
    prefills = [
        legs.send_prefill(one, transfer) for one, transfer in zip(asked, transfers, strict=True)
    ]
    assert all(leg.result().status == 200 for leg in prefills)
    finished_at = time.monotonic()
    before = pair.decode.received
    pair.prefill.begin_stop()
    time.sleep(READ_SECONDS)
    # The last prompt is never read.
    answers = [
        legs.send_decode(one, transfer)
        for one, transfer in list(zip(asked, transfers, strict=True))[:-1]
    ]
    for answer, expected in zip(answers, right[:-1], strict=True):
        expect_same(answer.result(), expected)
    assert not pair.decode.metric("vllm:disagg_failed_loads_total")
    assert pair.decode.received > before
    assert pair.prefill.runs(), "P ended before the lease of the KV that nothing has read"
    wait("P ends", lambda: not pair.prefill.runs(), LEASE_SECONDS + END_SECONDS)
    assert time.monotonic() - finished_at > LEASE_SECONDS
    legs.close()
    pair.machine.stop(pair.prefill)


def test_both_engines_of_a_pair_end_when_their_answers_have(pair: Pair) -> None:
    """D answers, loads and has requests in its queue when both get SIGTERM."""
    pair.machine.start(pair.prefill)
    asked = [body(tokens(1200 + at, f"both {at}"), 300 + 20 * at) for at in range(8)]
    right = pair.right(asked)
    legs = pair.legs()
    answers = []
    before = pair.decode.received
    for one in asked:
        transfer = grants.new_transfer()
        assert legs.send_prefill(one, transfer).result().status == 200
        answers.append(legs.send_decode(one, transfer))
    wait("D has all requests", lambda: requests_of(pair.decode) == len(asked), 20, every=0.05)
    assert pair.decode.received > before
    pair.prefill.begin_stop()
    pair.decode.begin_stop()
    for answer, expected in zip(answers, right, strict=True):
        expect_same(answer.result(), expected)
    for engine in (pair.prefill, pair.decode):
        wait(f"{engine.name} ends", lambda e=engine: not e.runs(), LEASE_SECONDS + END_SECONDS)
    legs.close()
