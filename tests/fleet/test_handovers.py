"""Handovers: what a prefill engine mints in its answer, and when a decode engine believes it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_disagg.errors import BadGrant
from vllm_disagg.fleet import grants, handovers, keys, sealing
from vllm_disagg.fleet.grant_checks import GrantChecker
from vllm_disagg.fleet.handovers import Handover
from vllm_disagg.fleet.used_grants import RELEASED_SECONDS, UsedGrants
from vllm_disagg.kv.layout import uniform
from vllm_disagg.protocol.peers import EngineInfo, WorkerInfo

KEY = keys.FleetKey(b"k" * keys.KEY_BYTES)
HOLDS = uniform(layers=2, block_size=16, block_bytes=[64])
NEAR, FAR = "tcp://127.0.0.1:1", "tcp://198.51.100.7:9999"
OWN = WorkerInfo("own/0", NEAR, NEAR, holds=HOLDS)
OTHER = WorkerInfo("other/0", NEAR, NEAR, holds=HOLDS)
DISTANT = WorkerInfo("other/2", FAR, FAR, holds=HOLDS)
PROMPT = "12" * 16
LAYOUT = {"model": "tiny"}
HANDOVER = Handover(1, "ab" * 16, PROMPT, [OTHER], LAYOUT, 5.0)
TOKEN = handovers.mint(KEY, HANDOVER)


def checker(role: Any = "decode") -> GrantChecker:
    engine = EngineInfo("engine", role, [OWN], LAYOUT)
    return GrantChecker(engine, UsedGrants(has_key=True), loopback_only=True)


def test_what_was_minted_verifies() -> None:
    assert handovers.verify(KEY, TOKEN) == HANDOVER


def test_a_grant_is_no_handover_and_a_handover_no_grant() -> None:
    """Also where the same bytes would be one."""
    with pytest.raises(BadGrant, match="another key"):
        grants.verify(KEY, TOKEN)
    payload = sealing.unseal(KEY, handovers.USE, TOKEN)
    with pytest.raises(BadGrant, match="another key"):
        handovers.verify(KEY, sealing.seal(KEY, grants.USE, payload))


@pytest.mark.parametrize("other", [keys.FleetKey(b"x" * keys.KEY_BYTES), keys.FleetKey(None)])
def test_another_key_mints_no_handover(other: keys.FleetKey) -> None:
    with pytest.raises(BadGrant, match="another key"):
        handovers.verify(KEY, handovers.mint(other, HANDOVER))


@given(place=st.integers(0, len(TOKEN) - 1), letter=st.sampled_from("Aa0-_.= \u00e9"))
def test_a_changed_letter_is_refused(place: int, letter: str) -> None:
    changed = TOKEN[:place] + letter + TOKEN[place + 1 :]
    try:
        # The last letter of a base64 text has spare bits.
        assert handovers.verify(KEY, changed) == HANDOVER
    except BadGrant:
        assert changed != TOKEN


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"transfer": "x"},
        {"prompt": ""},
        {"sources": []},
        {"layout": {"model": 5}},
        {"patience": 0.0},
        {"patience": 1e6},
    ],
)
def test_a_signed_text_that_is_no_handover_is_refused(change: dict[str, Any]) -> None:
    """A member of the fleet may have another version."""
    made = handovers.mint(KEY, msgspec.structs.replace(HANDOVER, **change))
    with pytest.raises(BadGrant, match="not a handover of version 1"):
        handovers.verify(KEY, made)


def test_a_text_that_is_not_utf_8_is_no_handover() -> None:
    payload = sealing.unseal(KEY, handovers.USE, TOKEN).replace(b"tiny", b"t\xff\xfey")
    with pytest.raises(BadGrant, match="not a handover"):
        handovers.verify(KEY, sealing.seal(KEY, handovers.USE, payload))


def test_a_handover_is_used_once() -> None:
    check = checker()
    check.use_handover(HANDOVER, PROMPT, 0.0)
    with pytest.raises(BadGrant, match="used before"):
        check.use_handover(HANDOVER, PROMPT, 0.0)


@pytest.mark.parametrize(
    ("change", "prompt", "words"),
    [
        ({}, "34" * 16, "for another prompt"),
        ({}, "", "cannot be compared"),
        ({"layout": {"model": "huge"}}, PROMPT, "model is tiny on one side and huge on the other"),
        ({"sources": [OWN]}, PROMPT, "own workers"),
        ({"sources": [OTHER, OTHER]}, PROMPT, "one worker twice"),
        ({"sources": [DISTANT]}, PROMPT, "not loopback"),
    ],
)
def test_a_refused_handover_is_not_used_up(change: dict[str, Any], prompt: str, words: str) -> None:
    """Who has seen another client's handover cannot take it away."""
    check = checker()
    with pytest.raises(BadGrant, match=words):
        check.use_handover(msgspec.structs.replace(HANDOVER, **change), prompt, 0.0)
    check.use_handover(HANDOVER, PROMPT, 0.0)


def test_a_prefill_engine_takes_no_handover() -> None:
    with pytest.raises(BadGrant, match="role is prefill"):
        checker("prefill").use_handover(HANDOVER, PROMPT, 0.0)
    checker("both").use_handover(HANDOVER, PROMPT, 0.0)


def test_a_handover_stays_used_while_its_request_waits() -> None:
    """Two loads under one name would end the engine."""
    check = checker()
    check.use_handover(HANDOVER, PROMPT, 0.0)
    late = 100 * RELEASED_SECONDS
    with pytest.raises(BadGrant, match="used before"):
        check.use_handover(HANDOVER, PROMPT, late)
    check.end_handover(HANDOVER.transfer, late)
    with pytest.raises(BadGrant, match="used before"):
        check.use_handover(HANDOVER, PROMPT, late + RELEASED_SECONDS)
    check.use_handover(HANDOVER, PROMPT, late + RELEASED_SECONDS + 1)


@pytest.mark.parametrize(
    ("params", "is_prefill", "is_decode"),
    [
        ({"do_remote_decode": True}, True, False),
        ({"do_remote_decode": False, "do_remote_prefill": True}, False, True),
        (handovers.answer(TOKEN), False, True),
        ({"do_remote_decode": "yes"}, False, False),
        ({}, False, False),
    ],
)
def test_the_legs_of_other_routers(
    params: dict[str, object], is_prefill: bool, is_decode: bool
) -> None:
    assert handovers.is_prefill_leg(params) == is_prefill
    assert handovers.is_decode_leg(params) == is_decode
