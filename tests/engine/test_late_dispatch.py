"""`--decode-dispatch late` between real engines: D's leg comes while P computes, or behind it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from asking import ask, at_once, body, expect_same, tokens
from conftest import Main
from engines import Proxy
from test_exact import needed

# Several of each size: a late leg needs the times of earlier prompts.
LENGTHS = [100 + 40 * (at % 10) for at in range(40)]
TOGETHER = 4


@pytest.fixture(scope="module")
def proxy(main: Main) -> Iterator[Proxy]:
    with main.other_proxy("proxy10", "--decode-dispatch", "late") as made:
        yield made


def test_answers_equal_those_of_plain_vllm_and_kv_moves(main: Main, proxy: Proxy) -> None:
    jobs = [body(tokens(length, f"late {at}")) for at, length in enumerate(LENGTHS)]
    before = main.decode.received
    for place in range(0, len(LENGTHS), TOGETHER):
        some = jobs[place : place + TOGETHER]
        plain = at_once(lambda job: ask(main.plain.url, job), some)
        ours = at_once(lambda job: ask(proxy.url, job), some)
        for job, right, found in zip(some, plain, ours, strict=True):
            expect_same(found, right, f"{job!r:.200}")
    # A load may fail on a busy machine; then D computes.
    assert main.decode.received - before >= 0.9 * needed(LENGTHS)
