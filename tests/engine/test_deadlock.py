"""Loads hold nearly all of D's pool, and P dies: a failed load of a model with windows stops nobody, itself included."""

from __future__ import annotations

import signal
import time

from asking import ask, body, expect_same, tokens
from conftest import Machine
from engines import wait
from test_models import FLOAT32, Pair

from vllm_disagg import grants

LEGS, LENGTH = 14, 1000  # about nine of these loads fit
BLOCKS = ["--num-gpu-blocks-override", "94", "--max-num-batched-tokens", "1024"]
SECONDS = 40.0


def test_loads_that_fail_when_they_hold_the_pool(machine: Machine) -> None:
    """vLLM looks at them first, and to compute them it needs more blocks than they had to be loaded."""
    machine.stop()  # all others, for the memory's sake
    pair = Pair(machine, "deadlock", "sliding", *BLOCKS, *FLOAT32)
    asked = [body(tokens(LENGTH, f"deadlock {at}"), 8) for at in range(LEGS)]
    plain = [ask(pair.plain.url, one) for one in asked]
    machine.stop(pair.plain)
    legs = [pair.legs.send_decode(one, grants.new_transfer(), patience=60.0) for one in asked]
    wait("loads hold the pool", lambda: pair.decode.usage > 0.8, 20)
    pair.prefill.signal(signal.SIGKILL)
    end = time.monotonic() + SECONDS
    wait("all legs end", lambda: all(leg.done() for leg in legs) or time.monotonic() > end - 1, SECONDS)
    assert sum(leg.done() for leg in legs) == LEGS, f"usage {pair.decode.usage}, {pair.decode.tail(5)}"
    for leg, expected in zip(legs, plain, strict=True):
        expect_same(leg.result(), expected)
    expect_same(ask(pair.decode.url, asked[0], timeout=10), plain[0], "whoever comes next")
    assert pair.decode.is_alive()
    pair.legs.close()
    machine.stop()
