"""Zamba2, a model whose layers are computed in another order than their names have.

It has two blocks of attention in turn. Layers announced too early would be read too early, with a
checksum that fits.
"""

from __future__ import annotations

import time

import pytest
from asking import ask, body, difference, tokens
from conftest import Machine
from engines import wait
from test_models import FLOAT32, LENGTHS, Pair, several

pytestmark = pytest.mark.wide


def test_zamba_is_exact_with_overlap(machine: Machine) -> None:
    machine.stop()  # all others, for the memory's sake
    pair = Pair(machine, "zamba", "zamba", "--no-enable-prefix-caching", *FLOAT32)
    count = 5 * len(LENGTHS)
    asked = [
        body(tokens(LENGTHS[at % len(LENGTHS)], f"{time.time()} zamba {at}"), 16, logprobs=3)
        for at in range(count)
    ]
    plain, ours = (
        several(lambda one: ask(pair.plain.url, one), asked),
        several(pair.legs.ask, asked),
    )
    wrong = [
        found
        for one, expected in zip(ours, plain, strict=True)
        if (found := difference(one, expected))
    ]
    assert not wrong, f"{len(wrong)} of {count} answers are wrong: {wrong[0]}"
    loads = sum(len(one["prompt"]) > 1 for one in asked)  # D computes the last token
    wait("all are loaded", lambda: pair.decode.metric("vllm:disagg_load_seconds_count") == loads)
    assert not pair.decode.metric("vllm:disagg_damaged_pieces_total")
    pair.legs.close()
    machine.stop()
