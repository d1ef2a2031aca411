"""Requests directly to the engines: invalid grants, and legs without their other leg."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from asking import Record, ask, at_once, body, expect_exact_or_clean, expect_same, tokens
from conftest import Main
from direct import with_grant
from engines import PEER_TIMEOUT_SECONDS, wait
from test_exact import BLOCK_BYTES

from vllm_disagg.fleet import grants, keys
from vllm_disagg.protocol import peers

# Of a request with a grant that does not hold: P's time limit for silence, and a prefill. Less than
# the patience of a grant, which is 60 s.
MAX_REFUSED_SECONDS = PEER_TIMEOUT_SECONDS + 30
GARBAGE: list[Any] = [
    {},
    {"disagg_grant": None},
    {"disagg_grant": ""},
    {"disagg_grant": "."},
    {"disagg_grant": "x" * 100_000},
    {"disagg_grant": "\u00e9\u0000.\ud83d\ude00"},
    {"disagg_grant": 7},
    {"disagg_grant": ["a", "b"]},
    {"disagg_grant": {"disagg_grant": "a.b"}},
    {"disagg_engine": {"incarnation": "x"}},
    {
        "do_remote_prefill": True,
        "remote_block_ids": [1, 2],
        "remote_host": "10.0.0.1",
        "remote_port": 1,
    },
    {"do_remote_decode": True, "remote_engine_id": "x"},
    {"\ud800": 1},
    {"a": 10**400},
    {"disagg_grant": "x", **{str(n): [[]] for n in range(1000)}},
    [],
    "text",
    7,
]


def engines(main: Main) -> list[tuple[str, str]]:
    return [("P", main.prefill.url), ("D", main.decode.url)]


@pytest.mark.parametrize("params", GARBAGE, ids=lambda params: f"{params!r:.40}")
def test_garbage(main: Main, params: object) -> None:
    asked = body(tokens(300, f"garbage {params!r:.40}"))
    plain = ask(main.plain.url, asked)
    for name, url in engines(main):
        expect_exact_or_clean(
            ask(url, {**asked, "kv_transfer_params": params}), plain, (name, params)
        )


def refused(main: Main) -> dict[str, tuple[str, str]]:
    """Yields (role, grant) of grants that must have no effect."""
    legs, stranger = main.legs, keys.FleetKey(b"s" * keys.KEY_BYTES)
    new = grants.new_transfer
    good = legs.mint("decode", new())
    p_end, d_end, of_p = legs.until("prefill"), legs.until("decode"), legs.p.workers
    payload, mac = good.split(".")
    dead = peers.WorkerInfo("dead/0", "tcp://127.0.0.1:9", "tcp://127.0.0.1:9")
    return {
        "another key": (
            "D",
            grants.mint(
                stranger, grants.Grant(2, "decode", new(), legs.d.incarnation, of_p, until=d_end)
            ),
        ),
        "another key on P": (
            "P",
            grants.mint(
                stranger, grants.Grant(2, "prefill", new(), legs.p.incarnation, until=p_end)
            ),
        ),
        "without a key": (
            "D",
            grants.mint(
                keys.FleetKey(None),
                grants.Grant(2, "decode", new(), legs.d.incarnation, of_p, until=d_end),
            ),
        ),
        "ended": ("D", legs.mint("decode", new(), until=0.5)),
        "ended on P": ("P", legs.mint("prefill", new(), until=0.5)),
        "without an end": ("D", legs.mint("decode", new(), until=legs.until("decode", 1e6))),
        "changed payload": ("D", f"AAAA{payload[4:]}.{mac}"),
        "changed mac": ("D", f"{payload}.{mac[:-3]}AAA"),
        "before a restart": ("D", legs.mint("decode", new(), engine="0123456789abcdef")),
        "before a restart of P": ("P", legs.mint("prefill", new(), engine="0123456789abcdef")),
        "for the other engine": ("D", legs.mint("decode", new(), engine=legs.p.incarnation)),
        "a prefill leg on D": ("D", legs.mint("prefill", new(), engine=legs.d.incarnation)),
        "a decode leg on P": ("P", legs.mint("decode", new(), engine=legs.p.incarnation)),
        "no sources": ("D", legs.mint("decode", new(), sources=[])),
        "too many sources": ("D", legs.mint("decode", new(), sources=legs.p.workers * 2)),
        "a source that is not there": ("D", legs.mint("decode", new(), sources=[dead])),
        "a source that is no address": (
            "D",
            legs.mint("decode", new(), sources=[peers.WorkerInfo("x", "x", "x")]),
        ),
        "a source that is no port": (
            "D",
            legs.mint(
                "decode", new(), sources=[peers.WorkerInfo("y", "tcp://127.0.0.1:999999", "ipc://")]
            ),
        ),
        "P's address before its restart": (
            "D",
            legs.mint(
                "decode",
                new(),
                sources=[
                    peers.WorkerInfo("gone/0", legs.p.workers[0].control, legs.p.workers[0].data)
                ],
            ),
        ),
        "itself as source": ("D", legs.mint("decode", new(), sources=legs.d.workers, patience=3.0)),
    }


def test_grants_that_do_not_hold(main: Main) -> None:
    """Each one costs its request a prefill here, at most after P's time limit for silence."""
    cases = refused(main)
    urls = dict(engines(main))
    asked = {name: body(tokens(400, f"refused {name}")) for name in cases}

    def send(name: str) -> Record:
        role, grant = cases[name]
        return ask(urls[role], {**asked[name], **with_grant(grant)}, timeout=MAX_REFUSED_SECONDS)

    answers = dict(zip(cases, at_once(send, cases), strict=True))
    for name, answer in answers.items():
        expect_same(answer, ask(main.plain.url, asked[name]), name)
    main.expect_well(3)


def test_a_grant_works_once(main: Main) -> None:
    transfer = grants.new_transfer()
    asked, other = body(tokens(400, "once")), body(tokens(500, "twice"))
    plain = ask(main.plain.url, asked), ask(main.plain.url, other)
    decode = {**with_grant(main.legs.mint("decode", transfer))}
    prefill = main.legs.send_prefill(asked, transfer)
    expect_same(ask(main.decode.url, {**asked, **decode}), plain[0])
    assert prefill.result().status == 200
    before = main.decode.received
    expect_same(
        ask(main.decode.url, {**other, **decode}), plain[1], "the same grant for another prompt"
    )
    expect_same(
        main.legs.send_prefill(other, transfer).result(),
        ask(main.plain.url, {**other, "max_tokens": 1}),
    )
    expect_same(main.legs.send_decode(other, transfer).result(), plain[1])
    assert main.decode.received == before
    main.expect_well(1)


def test_two_prompts_and_one_grant(main: Main) -> None:
    """vLLM makes several requests of one body: at most one of them may use the grant."""
    prompts = [tokens(300, "first"), tokens(300, "second")]
    asked = body(prompts)
    plain = ask(main.plain.url, asked)
    transfer = grants.new_transfer()
    prefill = main.legs.send_prefill(body(prompts[0]), transfer)
    expect_exact_or_clean(main.legs.send_decode(asked, transfer).result(), plain)
    assert prefill.result().status == 200
    several = body(
        tokens(60, "several"), 24, n=2, temperature=0.8, seed=3
    )  # one chunk: see test_seeds
    plain = ask(main.plain.url, several)
    assert plain.status == 200, plain
    grant = with_grant(main.legs.mint("decode", grants.new_transfer(), patience=1.0))
    expect_same(ask(main.decode.url, {**several, **grant}), plain, "two answers and one grant")
    main.expect_well(1)


def test_legs_that_are_not_of_one_prompt(main: Main) -> None:
    """As when two engines tokenize one body differently: D computes its own prompt, at once."""
    before = main.decode.received
    for at, (delay, what) in enumerate(
        itertools.product((0.0, 1.0), ("longer", "shorter", "one token"))
    ):
        ours = tokens(500, f"legs {at}")
        theirs = {
            "longer": ours + tokens(200, f"more {at}"),
            "shorter": ours[:300],
            "one token": [ours[0] ^ 1, *ours[1:]],
        }
        asked, transfer = body(ours), grants.new_transfer()
        prefill = main.legs.send_prefill(body(theirs[what]), transfer)
        time.sleep(delay)
        expect_same(
            main.legs.send_decode(asked, transfer).result(), ask(main.plain.url, asked), what
        )
        assert prefill.result().status == 200
    assert main.decode.received == before
    main.expect_well(1)


@pytest.mark.parametrize("ahead", [0.0, 0.02, 0.3, 2.0])
@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_one_leg_long_before_the_other(main: Main, first: str, ahead: float) -> None:
    transfer, asked = grants.new_transfer(), body(tokens(700, f"ahead {first} {ahead}"))
    plain, before = ask(main.plain.url, asked), main.decode.received
    send = {"prefill": main.legs.send_prefill, "decode": main.legs.send_decode}
    one = send.pop(first)(asked, transfer)
    time.sleep(ahead)
    (other,) = send.values()
    two = other(asked, transfer)
    expect_same(one.result() if first == "decode" else two.result(), plain)
    wait("all KV arrives", lambda: main.decode.received == before + 6 * BLOCK_BYTES)


def test_a_decode_leg_without_a_prefill_leg(main: Main) -> None:
    asked = body(tokens(500, "nobody prefills"))
    began = time.monotonic()
    answer = main.legs.send_decode(asked, grants.new_transfer(), patience=2.0).result()
    assert 1.5 < time.monotonic() - began < 10
    expect_same(answer, ask(main.plain.url, asked))
    main.expect_well(1)


def test_a_prefill_leg_without_a_decode_leg(main: Main) -> None:
    """P keeps the blocks for the lease, and not longer."""
    asked = body(tokens(700, "nobody decodes"))
    main.prefill.wait_free()  # what other tests have left unclaimed is counted by then
    unclaimed = main.prefill.metric("vllm:disagg_unclaimed_prefills_total")
    assert main.legs.send_prefill(asked, grants.new_transfer()).result().status == 200
    assert main.prefill.usage > 0
    wait("P gives the blocks back", lambda: main.prefill.usage == 0, 20)
    wait(
        "P counts it",
        lambda: main.prefill.metric("vllm:disagg_unclaimed_prefills_total") == unclaimed + 1,
    )
    main.expect_well(1)
