"""Loads hold nearly all of D's pool, and P dies: failed loads block no request.

`tests/connector/test_failed_loads.py` has the same with vLLM's scheduler alone.
"""

from __future__ import annotations

import signal
import time

import pytest
from asking import ask, body, expect_same, tokens
from conftest import Machine
from direct import Legs
from engines import Engine, wait
from test_models import FLOAT32, model

from vllm_disagg.fleet import grants

pytestmark = pytest.mark.wide

LEGS, LENGTH = 14, 1000  # about nine of these loads fit
FLAGS = ["--num-gpu-blocks-override", "94", "--max-num-batched-tokens", "1024", *FLOAT32]
SECONDS = 60.0


def test_loads_that_fail_when_they_hold_the_pool(machine: Machine) -> None:
    """vLLM looks at failed loads first. To compute them takes more blocks than to load them."""
    machine.stop()  # all others, for the memory's sake
    p = Engine(
        "deadlock-P", machine.folder, *FLAGS, role="kv_producer", cpu="0", model=model("sliding")
    )
    d = Engine(
        "deadlock-D", machine.folder, *FLAGS, role="kv_consumer", cpu="1", model=model("sliding")
    )
    machine.start(p, d)
    asked = [body(tokens(LENGTH, f"deadlock {at}"), 8) for at in range(LEGS)]
    plain = [ask(p.url, one) for one in asked]  # ordinary requests there
    talk = Legs(machine.key, p, d)
    legs = [talk.send_decode(one, grants.new_transfer(), patience=60.0) for one in asked]
    wait("loads hold the pool", lambda: d.usage > 0.8)
    p.signal(signal.SIGKILL)
    end = time.monotonic() + SECONDS
    while not all(leg.done() for leg in legs) and time.monotonic() < end:
        time.sleep(0.2)
    assert sum(leg.done() for leg in legs) == LEGS, f"of {LEGS} after {SECONDS} s; usage {d.usage}"
    for leg, expected in zip(legs, plain, strict=True):
        expect_same(leg.result(), expected)
    expect_same(ask(d.url, asked[0], timeout=10), plain[0], "whoever comes next")
    assert d.is_alive()
    talk.close()
    machine.stop()
