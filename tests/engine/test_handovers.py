"""Engines behind a router that is not ours: the standard handshake, and its misuse."""

from __future__ import annotations

import time

from asking import ask, at_once, body, english, expect_same, tokens
from conftest import Main
from engines import BLOCK, CHUNK, PEER_TIMEOUT_SECONDS, Engine, wait
from test_exact import Transfers, needed
from two_legs import PREFILL_PARAMS, Params, ask_both, send_decode, send_prefill

from vllm_disagg.fleet import grants, handovers

LENGTHS = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK, CHUNK + 1, 513, 1000, 1792]
REFUSED = "vllm:disagg_refused_parameters_total"
WITHOUT = "vllm:disagg_requests_without_parameters_total"


def expect_count(engine: Engine, name: str, count: float) -> None:
    wait(f"{engine.name} counts {name}", lambda: engine.metric(name) >= count)
    assert engine.metric(name) == count


def test_answers_by_both_legs_are_exact_and_all_kv_travels(main: Main) -> None:
    asked = [body(tokens(length, f"handed over {length}"), 16, logprobs=5) for length in LENGTHS]
    plain = at_once(lambda one: ask(main.plain.url, one), asked)
    with Transfers(main) as transfers:
        ours = at_once(lambda one: ask_both(main.prefill.url, main.decode.url, one), asked)
        transfers.expected = needed(LENGTHS)
    for one, expected in zip(ours, plain, strict=True):
        expect_same(one, expected)


def test_a_chat_by_both_legs(main: Main) -> None:
    messages = [{"role": "user", "content": english(1500, "handed over")}]
    asked = body(messages, 24, max_completion_tokens=24)
    path = "/v1/chat/completions"
    before = main.decode.received
    ours = ask_both(main.prefill.url, main.decode.url, asked, path)
    expect_same(ours, ask(main.plain.url, asked, path))
    wait("KV arrives", lambda: main.decode.received > before)


def misuses(params: Params, others: Params) -> dict[str, object]:
    """Returns by name parameters that D must refuse. `others`: of another prompt."""
    key = handovers.TOKEN_KEY
    token = str(params[key])
    middle = len(token) // 2
    letter = "A" if token[middle] != "A" else "B"
    return {
        "edited": {**params, key: token[:middle] + letter + token[middle + 1 :]},
        "cut": {**params, key: token[: len(token) // 2]},
        "other people's": others,
        "as a grant": {grants.REQUEST_KEY: token},
        "a number": {**params, key: 7},
        "NixlConnector's": {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": "x",
            "remote_request_id": "y",
            "remote_block_ids": [[1, 2, 3]],
            "remote_host": "127.0.0.1",
            "remote_port": 9,
            "tp_size": 1,
        },
        "of a prefill leg": PREFILL_PARAMS,
    }


def test_misused_parameters_make_a_local_request_and_a_count(main: Main) -> None:
    asked = body(tokens(400, "misused"))
    plain = ask(main.plain.url, asked)
    other = body(tokens(400, "of another client"))
    params, others = (send_prefill(main.prefill.url, one) for one in (asked, other))
    assert params is not None and others is not None
    before, refused = main.decode.received, main.decode.metric(REFUSED)
    cases = misuses(params, others)
    # At the same time: P keeps the other client's KV for the lease only.
    answers = at_once(lambda misused: send_decode(main.decode.url, asked, misused), cases.values())
    for name, answer in zip(cases, answers, strict=True):
        expect_same(answer, plain, name)
    assert main.decode.received == before
    expect_count(main.decode, REFUSED, refused + len(cases))
    # The thief has taken nothing from the other client.
    expect_same(send_decode(main.decode.url, other, others), ask(main.plain.url, other))
    wait("the other client's KV arrives", lambda: main.decode.received > before)


def test_parameters_that_come_again(main: Main) -> None:
    """One request of several uses them; all are exact."""
    asked = body(tokens(700, "again and again"))
    plain = ask(main.plain.url, asked)
    params = send_prefill(main.prefill.url, asked)
    refused = main.decode.metric(REFUSED)
    with Transfers(main) as transfers:
        at_a_time = at_once(lambda _: send_decode(main.decode.url, asked, params), range(4))
        later = send_decode(main.decode.url, asked, params)
        transfers.expected = needed([700])
    for one in (*at_a_time, later):
        expect_same(one, plain)
    expect_count(main.decode, REFUSED, refused + 4)


def test_two_prompts_in_one_body(main: Main) -> None:
    """vLLM's answer has the parameters of one; a router sends them with both."""
    asked = body([tokens(300, "one of two"), tokens(300, "two of two")])
    expect_same(
        ask_both(main.prefill.url, main.decode.url, asked), ask(main.plain.url, asked), "two"
    )


def test_parameters_that_nobody_uses(main: Main) -> None:
    """P keeps the blocks for the lease; then D's request with them is a local one, at once.

    The other tests here leave such blocks behind, so this one alone waits for the lease.
    """
    asked = body(tokens(700, "never claimed"))
    plain = ask(main.plain.url, asked)
    params = send_prefill(main.prefill.url, asked)
    assert main.prefill.usage > 0
    wait("P gives the blocks back", lambda: main.prefill.usage == 0, 20)
    before = main.decode.received
    began = time.monotonic()
    expect_same(send_decode(main.decode.url, asked, params), plain)
    assert time.monotonic() - began < PEER_TIMEOUT_SECONDS, "D has waited for P"
    assert main.decode.received == before
    main.expect_well(1)


def test_requests_without_parameters_are_counted_and_warned_of(main: Main) -> None:
    for engine in (main.prefill, main.decode):
        before = engine.metric(WITHOUT)
        for at in range(3):
            asked = body(tokens(60, f"without {engine.name} {at}"), 4)
            expect_same(ask(engine.url, asked), ask(main.plain.url, asked))
        expect_count(engine, WITHOUT, before + 3)
        wait(
            f"{engine.name} warns of it",
            lambda e=engine: "requests without parameters of a KV transfer: " in e.log.read_text(),
        )
