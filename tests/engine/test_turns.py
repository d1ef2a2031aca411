"""Conversations: P reads the KV of D's answers back, so each turn costs P its new text only."""

from __future__ import annotations

import random
import threading
import time
from contextlib import suppress

import pytest
from asking import (
    TIMEOUT_SECONDS,
    Record,
    ask,
    ask_and_leave,
    at_once,
    body,
    english,
    expect_exact_or_clean,
    expect_same,
    tokens,
)
from conftest import Main
from direct import with_grant
from engines import BLOCK, RUNNER, wait
from test_exact import BLOCK_BYTES

from vllm_disagg.fleet import grants
from vllm_disagg.protocol import peers

CONVERSATIONS = 8 if RUNNER.is_interpreted else 16
TURNS = 4 if RUNNER.is_interpreted else 6
REUSED_BLOCKS = 8 if RUNNER.is_interpreted else 30  # at least, of all conversations
# Of the test with one conversation at a time: (prompt tokens, new tokens of each turn).
ALONE = ((100, 40), (300, 10), (BLOCK, 1), (BLOCK - 1, 200))
TURNS_ALONE = 2 if RUNNER.is_interpreted else 4
COUNT_SECONDS = 30.0  # until P's answer is counted, once D has answered


def whole(count: int) -> int:
    """Returns how many of these tokens are in whole blocks."""
    return count // BLOCK * BLOCK


def computed_and_reused(main: Main, probe_tokens: int) -> tuple[float, float]:
    """Returns (prompt tokens that P has computed, bytes that it has read back).

    Each request counts `probe_tokens` less: so the proxy's probes, which may come at any time, have
    no effect.
    """
    by_source, source = "vllm:prompt_tokens_by_source_total", 'source="local_compute"'
    computed = main.prefill.metric(by_source, source)
    requests = main.prefill.metric("vllm:request_prefill_kv_computed_tokens_count")
    reused = main.prefill.metric("vllm:disagg_reused_bytes_total")
    return computed - probe_tokens * requests, reused


def talk(main: Main, name: str, turns: int = TURNS) -> None:
    chance = random.Random(name)
    prompt = tokens(chance.randint(20, 300), name)
    for turn in range(turns):
        answer = main.check(body(prompt, chance.randint(60, 230), ignore_eos=True))
        prompt = (
            prompt
            + list(answer.tokens[0])
            + tokens(chance.choice([1, 30, BLOCK, 200]), f"{name} {turn}")
        )
        if len(prompt) > 1700:
            return


def test_p_computes_the_new_text_only(main: Main) -> None:
    probe_tokens = ask(main.plain.url, body("probe", 1)).prompt_tokens
    for asked, new in ALONE:
        prompt, here, there = tokens(asked, f"turn {asked}"), 0, 0  # tokens that P has, and D
        for turn in range(TURNS_ALONE):
            computed, reused = computed_and_reused(main, probe_tokens)
            answer = main.check(body(prompt, 220, ignore_eos=True))
            computed += len(prompt) - there - probe_tokens
            reused += (there - here) // BLOCK * BLOCK_BYTES
            right = (computed, reused)
            with suppress(AssertionError):  # P may answer after D
                wait(
                    "", lambda n=right: computed_and_reused(main, probe_tokens) == n, COUNT_SECONDS
                )
            assert computed_and_reused(main, probe_tokens) == right, (asked, new, turn)
            here = whole(len(prompt))
            prompt = prompt + list(answer.tokens[0])
            there = whole(len(prompt) - 1)  # nobody has computed the last token
            prompt += tokens(new, f"{asked} {turn}")


@pytest.mark.wide
def test_many_conversations_at_once(main: Main) -> None:
    before = main.prefill.metric("vllm:disagg_reused_bytes_total")
    at_once(lambda at: talk(main, f"talk {at}"), range(CONVERSATIONS))
    reused = main.prefill.metric("vllm:disagg_reused_bytes_total") - before
    assert reused > REUSED_BLOCKS * BLOCK_BYTES
    main.expect_well(2)


def test_chats_of_text(main: Main) -> None:
    """Text that comes back is tokenized differently here and there."""

    def chat(at: int) -> None:
        messages = [{"role": "user", "content": english(500, f"chat {at}")}]
        for turn in range(3):
            answer = main.check(body(messages, 100), "/v1/chat/completions")
            messages = [*messages, {"role": "assistant", "content": answer.texts[0]}]
            messages.append({"role": "user", "content": english(200, f"chat {at} {turn}")})

    at_once(chat, range(6))


def warm(main: Main, name: str, length: int = 1000) -> tuple[list[int], Record]:
    """Returns a prompt that D has cached and P has not, and the right answer to it."""
    prompt = tokens(length, name)
    assert ask(main.decode.url, body(prompt, 1)).status == 200
    prompt += tokens(100, "new")
    return prompt, ask(main.plain.url, body(prompt, 24))


def test_a_prefill_leg_whose_decode_leg_never_comes(main: Main) -> None:
    prompt, right = warm(main, "no decode leg")
    transfer, back = grants.new_transfer(), grants.new_transfer()
    grant = main.legs.mint("prefill", transfer, sources=main.legs.d.workers, back=back)
    expect_same(ask(main.prefill.url, {**body(prompt, 24), **with_grant(grant)}), right)


def test_grants_that_are_odd(main: Main) -> None:
    """Only a proxy could mint them; each costs its request some time at most."""
    worker = main.legs.d.workers[0]
    for name, sources in (
        ("nobody", []),
        ("twice", [worker, worker]),
        (
            "not there",
            [
                peers.WorkerInfo(
                    "dead/0", "tcp://127.0.0.1:9", "tcp://127.0.0.1:9", holds=worker.holds
                )
            ],
        ),
        ("itself", main.legs.p.workers),
        ("nothing", [peers.WorkerInfo("x", "x", "x")]),
    ):
        prompt, right = warm(main, f"odd {name}", 300)
        transfer, back = grants.new_transfer(), grants.new_transfer()
        grant = main.legs.mint("prefill", transfer, sources=sources, back=back)
        prefill = main.legs.send_prefill(body(prompt), transfer, grant)
        decode = main.legs.send_decode(body(prompt, 24), transfer, back=back)
        assert prefill.result().status == 200, name
        expect_same(decode.result(), right, name)
    main.expect_well(1)


def test_clients_that_leave_while_p_reads(main: Main) -> None:
    conversations = [warm(main, f"leaving {at}", 1400)[0] for at in range(8)]
    for at, prompt in enumerate(conversations):
        ask_and_leave(main.proxy.url, body(prompt, 24), 0.005 + 0.01 * at)
    main.expect_well(2)


@pytest.mark.wide
def test_d_is_killed_while_p_reads(main: Main) -> None:
    jobs = [
        (body(prompt, 24), right)
        for prompt, right in (warm(main, f"killed {at}", 1400) for at in range(10))
    ]
    timer = threading.Timer(0.05, lambda: main.decode.stop(gently=0))
    timer.start()
    began = time.monotonic()
    answers = at_once(lambda job: ask(main.proxy.url, job[0]), jobs)
    timer.join()
    assert time.monotonic() - began < TIMEOUT_SECONDS / 4
    for answer, (_, right) in zip(answers, jobs, strict=True):
        expect_exact_or_clean(answer, right)
    main.prefill.wait_free()
    main.machine.start_again(main.decode)
    wait("the proxy has noticed", main.ready)
    main.legs.close()
    main.legs = main.new_legs()
    main.expect_well(2)
    talk(main, "afterwards", 3)
