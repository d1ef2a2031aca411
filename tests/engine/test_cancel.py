"""Clients that leave at every stage: no block and no request remains, and other clients go on."""

from __future__ import annotations

import time

import pytest
from asking import Body, ask_and_leave, at_once, body, tally, tokens
from conftest import Main
from direct import with_grant
from engines import RUNNER

from vllm_disagg.fleet import grants

DELAYS = [0.0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64]


def leave(url: str, asked: Body, seconds: float) -> None:
    ask_and_leave(url, asked, seconds)
    tally["left"] += 1


@pytest.mark.parametrize("length", [100, 1000, 1900])
def test_through_the_proxy(main: Main, length: int) -> None:
    for delay in DELAYS:
        leave(
            main.proxy.url,
            body(tokens(length, f"leave {length} {delay}"), 100, ignore_eos=True),
            delay,
        )
    main.expect_well()


@pytest.mark.parametrize("who", ["P", "D", "both"])
def test_legs(main: Main, who: str) -> None:
    """The proxy leaves one leg, or both; the other leg goes on."""

    def one(delay: float) -> None:
        transfer = grants.new_transfer()
        asked = body(tokens(1800, f"legs {who} {delay}"), 60, ignore_eos=True)
        prefill = {**asked, "max_tokens": 1, **with_grant(main.legs.mint("prefill", transfer))}
        decode = {**asked, **with_grant(main.legs.mint("decode", transfer, patience=4.0))}
        legs = [(main.prefill.url, prefill, who != "D"), (main.decode.url, decode, who != "P")]
        at_once(lambda leg: leave(leg[0], leg[1], delay if leg[2] else 1.5), legs)

    for delay in DELAYS[::2]:
        one(delay)
    at_once(one, DELAYS)
    main.expect_well()


def test_many_at_once(main: Main) -> None:
    """24 requests at the same time, a third of which stay."""
    began = time.monotonic()
    asked = [body(tokens(600 + 40 * at, f"crowd {at}"), 24) for at in range(24)]

    def one(at: int) -> None:
        if at % 3:
            leave(main.proxy.url, asked[at], 0.03 * at)
        else:
            main.check(asked[at])

    at_once(one, range(24))
    assert time.monotonic() - began < 60 * RUNNER.slowness
    main.expect_well()
