"""Prefixes in the cache of one side, both, or neither: only missing KV is transferred."""

from __future__ import annotations

import pytest
from asking import ask, body, expect_same, tokens
from conftest import Main
from engines import BLOCK, wait
from test_exact import BLOCK_BYTES

TAILS = [1, BLOCK - 1, BLOCK, BLOCK + 1, 400]
PREFIXES = [BLOCK, 4 * BLOCK, 5 * BLOCK + 60]


def warm(main: Main, where: str, prefix: list[int]) -> None:
    """Has engines compute a prefix without a transfer."""
    for engine in (main.prefill, main.decode):
        if engine.name in where:
            assert ask(engine.url, body(prefix + tokens(BLOCK, "warming"), 1)).status == 200


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("where", ["", "P", "D", "PD"])
def test_one_prefix_many_tails(main: Main, where: str, prefix: int) -> None:
    common = tokens(prefix, f"prefix {where} {prefix}")
    warm(main, where, common)
    cached = prefix // BLOCK if "D" in where else 0
    for at, tail in enumerate(TAILS):
        prompt = common + tokens(tail, f"tail {where} {prefix} {tail}")
        before = main.decode.received
        main.check(body(prompt, 24))
        # Computed here are a rest of at most a block, and a last block that is cached in full.
        missing = -(-len(prompt) // BLOCK) - min(cached, (len(prompt) - 1) // BLOCK)
        travels = 0 if cached and len(prompt) - cached * BLOCK <= BLOCK else missing * BLOCK_BYTES
        if at:
            wait(f"{travels} bytes arrive", lambda n=before + travels: main.decode.received >= n)
            assert main.decode.received - before == travels, (where, prefix, tail)
        cached = prefix // BLOCK  # this request has warmed D


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 1000])
def test_the_same_again(main: Main, length: int) -> None:
    asked = body(tokens(length, f"again {length}"), 24)
    first = main.check(asked)
    before = main.decode.received
    for _ in range(3):
        expect_same(main.check(asked), first)
    whole = -(-length // BLOCK) * BLOCK_BYTES
    assert main.decode.received - before == (0 if length > BLOCK else 3 * whole)


def test_an_answer_becomes_the_next_prompt(main: Main) -> None:
    """A conversation: D has cached its generated tokens, P has not."""
    prompt = tokens(200, "conversation")
    for turn in range(6):
        answer = main.check(body(prompt, 60, ignore_eos=True))
        prompt = prompt + list(answer.tokens[0]) + tokens(40, f"turn {turn}")


def test_cache_salts_keep_prompts_apart(main: Main) -> None:
    prompt = tokens(3 * BLOCK, "salt")
    for salt in ("one", "other"):
        before = main.decode.received
        main.check(body(prompt, 24, cache_salt=salt))
        wait("all of it arrives", lambda n=before + 3 * BLOCK_BYTES: main.decode.received == n)
