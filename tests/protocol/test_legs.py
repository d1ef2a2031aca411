"""Legs of one engine: the events that follow from the calls of vLLM's scheduler."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from vllm_disagg.kv import reshard
from vllm_disagg.kv.layout import uniform
from vllm_disagg.protocol import events
from vllm_disagg.protocol.legs import EngineLegs
from vllm_disagg.protocol.peers import WorkerInfo
from vllm_disagg.protocol.prefill_leg import REUSE_LOOKUP_SECONDS, REUSE_STALL_SECONDS
from vllm_disagg.protocol.request_leg import CacheFacts, LegFacts, blocks_of_tokens

BLOCK = 16
HOLDS = uniform(layers=2, block_size=BLOCK, block_bytes=[64])
OTHER = WorkerInfo("other/0", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", holds=HOLDS)
PLAN = reshard.plan([HOLDS], [HOLDS])
SKIPPED = events.LoadSkipped("t", [OTHER], reshard.nothing(1, 1))
FIVE = [[4, 5, 6, 7, 8]]


def machine(block_sizes: Sequence[int] = (BLOCK,), tokens_left_out: int = 0) -> EngineLegs:
    return EngineLegs(CacheFacts(list(block_sizes), tokens_left_out))


def facts(request: str = "r", tokens: int = 70, **change: Any) -> LegFacts:
    values: dict[str, Any] = {
        "transfer": "t",
        "prompt_tokens": tokens,
        "digest": "digest",
        "sources": [OTHER],
        "plan": PLAN,
        "stall_timeout": 60.0,
        "reuse": None,
    }
    return LegFacts(request=request, **values | change)


def prefill(tokens: int = 70, **change: Any) -> EngineLegs:
    """Returns an engine with one prefill leg that has arrived."""
    p = machine()
    p.add_prefill(facts(tokens=tokens, **change))
    p.on_arrived("r")
    return p


def decode(tokens: int = 70, cached: int = 0, **change: Any) -> EngineLegs:
    """Returns an engine with one decode leg whose blocks are allocated."""
    d = machine()
    d.add_decode(facts(tokens=tokens, **change), 0.0)
    count = d.tokens_to_load("r", cached, 0.0)
    assert count is not None
    d.on_blocks_allocated("r", FIVE, count)
    return d


def sent(legs: EngineLegs) -> list[events.ForSender]:
    """Returns the events for the sender since the last step."""
    legs.validate()
    return legs.take_events().for_sender


def received(legs: EngineLegs) -> list[events.ForReceiver]:
    """Returns the events for the receiver since the last step."""
    legs.validate()
    return legs.take_events().for_receiver


def test_calls_for_an_ordinary_request_have_no_effect() -> None:
    legs = machine()
    legs.on_arrived("plain")
    assert legs.tokens_to_load("plain", 0, 0.0) == 0
    legs.on_blocks_allocated("plain", [[1]], 0)
    legs.on_scheduled("plain", 16, [[1]])
    legs.on_preempted("plain")
    legs.on_load_finished("plain")
    legs.on_lookup_counts({"of another": [1]})
    assert not legs.on_finished("plain", is_normal=True)
    assert legs.take_events() == machine().take_events() and not legs.waits_for_kv


# Prefill leg, main transfer -----------------------------------------------------------------------
def test_a_prefill_leg_in_chunks() -> None:
    p = prefill(40)
    p.on_blocks_allocated("r", [[7, 8]], 0)
    p.on_scheduled("r", 20, [[7, 8]])
    first = p.take_events()
    assert first.for_sender == [events.BlocksScheduled("t", 20, [[7, 8]], prompt="digest")]
    assert first.serving_requests == {"t": "r"} and not first.loading_requests
    p.on_scheduled("r", 40, [[9]])
    assert sent(p) == [events.BlocksScheduled("t", 40, [[9]], prompt="digest")]
    p.on_scheduled("r", 41, None)
    assert sent(p) == [], "generated tokens are not sent"
    assert p.on_finished("r", is_normal=True) and sent(p) == [events.PrefillFinished("t")]
    assert p.take_events().serving_requests == {} and not p.legs


def test_a_chunk_without_new_blocks_has_an_empty_list_for_each_group() -> None:
    p = machine([16, 16])
    p.add_prefill(facts(tokens=40))
    p.on_scheduled("r", 20, [[7, 8], [9, 10]])
    p.on_scheduled("r", 30, None)
    assert sent(p)[1] == events.BlocksScheduled("t", 30, [[], []], prompt="digest")


@pytest.mark.parametrize("end", ["aborted", "preempted", "early"])
def test_a_prefill_leg_that_loses_its_blocks_keeps_nothing(end: str) -> None:
    p = prefill(40)
    p.on_scheduled("r", 20 if end == "early" else 40, [[7, 8, 9]])
    sent(p)
    if end == "preempted":
        p.on_preempted("r")
        assert sent(p) == [events.BlocksRevoked("t")]
        p.on_scheduled("r", 40, [[1, 2, 3]])
        assert sent(p) == [], "computed again, but not for D"
    assert not p.on_finished("r", is_normal=end != "aborted")
    assert sent(p) == ([] if end == "preempted" else [events.BlocksRevoked("t")])


def test_a_refused_leg_informs_the_other_engine_once() -> None:
    p, d = machine(), machine()
    p.add_prefill(facts(reuse="back"))
    d.add_decode(facts(reuse="back"), 0.0)
    for legs in (p, d):
        legs.refuse("r")
        legs.on_arrived("r")
        assert legs.tokens_to_load("r", 32, 0.0) == 0
        legs.on_blocks_allocated("r", FIVE, 0)
        legs.on_scheduled("r", 70, FIVE)
        assert not legs.on_finished("r", is_normal=True)
        legs.validate()
    of_p, of_d = p.take_events(), d.take_events()
    assert (of_p.for_sender, of_p.for_receiver) == ([events.BlocksRevoked("t")], [])
    assert (of_d.for_sender, of_d.for_receiver) == ([events.BlocksRevoked("back")], [SKIPPED])


def test_receivers_of_a_refused_grant_are_informed() -> None:
    p = machine()
    p.refuse_transfer("t")
    assert sent(p) == [events.BlocksRevoked("t")] and not p.legs


next_block = itertools.count(1)


def hand_over(
    legs: EngineLegs,
    request: str,
    blocks: int,
    *,
    shared: Sequence[int] = (),
    is_handover: bool = True,
) -> bool:
    """Computes a prompt: own blocks behind shared ones; returns whether they are held."""
    tokens = BLOCK * (len(shared) + blocks)
    legs.add_prefill(facts(request, tokens, transfer=request, is_handover=is_handover))
    own = [next(next_block) for _ in range(blocks)]
    legs.on_scheduled(request, tokens, [[*shared, *own]])
    return legs.on_finished(request, is_normal=True)


def test_handed_over_prompts_hold_only_their_share() -> None:
    p = EngineLegs(CacheFacts([BLOCK], max_handover_blocks=10))
    assert hand_over(p, "a", 6) and not hand_over(p, "b", 5)
    assert p.take_events().for_sender[-1] == events.BlocksRevoked("b")
    assert hand_over(p, "granted", 20, is_handover=False), "its receiver is known"
    assert hand_over(p, "c", 4) and not hand_over(p, "d", 1)
    p.on_released("granted")
    assert not hand_over(p, "e", 1)
    p.on_released("c")
    assert hand_over(p, "f", 4)
    p.on_released("a")
    p.on_released("f")
    assert hand_over(p, "large", 30), "one alone may hold more"


def test_blocks_that_handed_over_prompts_share_count_once() -> None:
    p = EngineLegs(CacheFacts([BLOCK], max_handover_blocks=10))
    shared = [next(next_block) for _ in range(6)]
    for request in ("a", "b", "c"):
        assert hand_over(p, request, 1, shared=shared)
    assert not hand_over(p, "d", 2, shared=shared), "six shared, and five of their own"
    for request in ("a", "b"):
        p.on_released(request)
    assert not hand_over(p, "e", 4), "the shared ones are held as long as one prompt has them"
    assert hand_over(p, "f", 3)
    p.on_released("c")
    assert hand_over(p, "g", 7)


def test_null_blocks_count_for_no_share() -> None:
    p = EngineLegs(CacheFacts([BLOCK, BLOCK], max_handover_blocks=6))
    for request in ("a", "b"):
        p.add_prefill(facts(request, 3 * BLOCK, transfer=request, is_handover=True))
        own = [next(next_block) for _ in range(3)]
        p.on_scheduled(request, 3 * BLOCK, [own[:2], [0, own[2]]])
        assert p.on_finished(request, is_normal=True)


# Decode leg, main transfer ------------------------------------------------------------------------
def test_a_decode_leg_loads_what_its_own_cache_lacks() -> None:
    d = machine()
    d.add_decode(facts(tokens=40), 0.0)
    assert [d.tokens_to_load("r", 16, 0.0) for _ in range(2)] == [24, 24], "until there is room"
    d.on_blocks_allocated("r", [[4, 5, 6]], 24)
    step = d.take_events()
    assert step.for_receiver == [
        events.LoadRequested(
            "t", [OTHER], PLAN, [events.GroupBlocks(16, [5, 6])], 40, 60.0, "digest"
        )
    ]
    assert step.loading_requests == {"t": "r"} and not step.serving_requests
    assert d.waits_for_kv and d.tokens_to_load("r", 0, 0.0) == 0, "loaded once"
    d.on_blocks_allocated("r", [[4, 5, 6]], 0)
    d.on_load_finished("r")
    assert not d.waits_for_kv and not d.on_finished("r", is_normal=True)
    assert received(d) == []


@pytest.mark.parametrize("cached", [32, 64, 70])
def test_a_nearly_cached_prompt_is_not_loaded_and_p_is_informed(cached: int) -> None:
    d = decode(70, cached=cached)
    if cached == 32:
        assert d.waits_for_kv
    else:
        assert received(d) == [SKIPPED] and not d.waits_for_kv


@pytest.mark.parametrize("when", ["waiting", "loading"])
def test_an_aborted_decode_leg_is_reported_once(when: str) -> None:
    d = machine()
    d.add_decode(facts(), 0.0)
    if when == "loading":
        d.on_blocks_allocated("r", FIVE, d.tokens_to_load("r", 0, 0.0) or 0)
        received(d)
    d.on_finished("r", is_normal=False)
    assert received(d) == ([SKIPPED] if when == "waiting" else [events.LoadCancelled("t")])
    d.on_finished("r", is_normal=False)
    assert received(d) == []


def windowed(tokens: int, window: int = 32) -> tuple[EngineLegs, int | None]:
    """Returns D of a model with a window and full attention, and the tokens that it loads."""
    d = EngineLegs(CacheFacts([BLOCK, BLOCK], tokens_left_out=1, windows=[0, window]))
    d.add_decode(facts(tokens=tokens), 0.0)
    return d, d.tokens_to_load("r", 0, 0.0)


@pytest.mark.parametrize(("tokens", "allocated"), [(66, 65), (65, 65), (64, 63), (1, 0)])
def test_with_windows_a_load_takes_the_block_in_which_the_last_token_is_first(
    tokens: int, allocated: int
) -> None:
    """vLLM would keep no block free for it, and stop its scan where it has none."""
    _, found = windowed(tokens)
    assert found == allocated


def test_the_last_token_is_not_loaded_into_its_block() -> None:
    d, found = windowed(65)
    assert found is not None
    unwritten = d.on_blocks_allocated("r", [[1, 2, 3, 4, 5], [0, 0, 6, 7, 8]], found)
    assert unwritten == [[5], [8]]
    (load,) = received(d)
    assert isinstance(load, events.LoadRequested)
    assert load.token_end == 64
    assert [group.ids for group in load.blocks] == [[1, 2, 3, 4], [6, 7]]


def test_a_block_that_a_load_writes_in_part_is_not_cleared() -> None:
    """The last token begins a block of one group, and is in the middle of the other one's."""
    d = EngineLegs(CacheFacts([16, 32], tokens_left_out=1, windows=[0, 20]))
    d.add_decode(facts(tokens=49), 0.0)
    assert d.tokens_to_load("r", 0, 0.0) == 49
    assert d.on_blocks_allocated("r", [[1, 2, 3, 4], [0, 5]], 49) == [[4], []]


def test_d_computes_a_prompt_whose_last_window_begins_a_block_earlier() -> None:
    # vLLM allocates the window of the token after the prompt: from token 48 on, and not 47.
    assert windowed(65, window=18)[1] == 0
    assert windowed(66, window=18)[1] == 65
    assert windowed(17, window=18)[1] == 17  # the window begins before the prompt


@pytest.mark.parametrize(("blocks", "loaded"), [(5, 70), (4, 0), (None, 70)])
def test_d_computes_a_prompt_that_vllm_would_never_begin_to_load(
    blocks: int | None, loaded: int
) -> None:
    """Beside drafts vLLM keeps blocks free. The load would wait, and all requests behind it."""
    d = EngineLegs(CacheFacts([BLOCK], max_load_blocks=blocks))
    d.add_decode(facts(), 0.0)
    assert d.tokens_to_load("r", 0, 0.0) == loaded
    d.on_blocks_allocated("r", FIVE, loaded)
    if not loaded:
        assert received(d) == [SKIPPED]


def test_blocks_of_cached_tokens_count_and_those_before_a_window_do_not() -> None:
    d = EngineLegs(CacheFacts([BLOCK], max_load_blocks=4))
    d.add_decode(facts(), 0.0)
    assert d.tokens_to_load("r", 16, 0.0) == 0
    # Token 70 looks back to token 39: three of five blocks.
    assert CacheFacts([BLOCK, BLOCK], windows=[0, 32], max_load_blocks=8).can_load(70)
    assert not CacheFacts([BLOCK, BLOCK], windows=[0, 32], max_load_blocks=7).can_load(70)


def test_p_reads_nothing_back_that_vllm_would_never_begin_to_load() -> None:
    p = EngineLegs(CacheFacts([BLOCK], max_load_blocks=3))
    p.add_prefill(facts(reuse="back"))
    p.on_arrived("r")
    p.on_lookup_counts({"back": [64]})
    assert p.tokens_to_load("r", 0, 0.0) == 0
    p.on_blocks_allocated("r", FIVE, 0)
    assert received(p)[-1] == events.LoadCancelled("back")


def test_a_load_leaves_out_the_last_token_and_the_blocks_before_the_window() -> None:
    d = machine([BLOCK, BLOCK], tokens_left_out=1)
    d.add_decode(facts(), 0.0)
    assert d.tokens_to_load("r", 16, 0.0) == 53
    assert not d.on_blocks_allocated("r", [[4, 5, 6, 7, 8], [0, 0, 0, 9, 10]], 53)
    (load,) = received(d)
    assert isinstance(load, events.LoadRequested) and load.token_end == 69
    assert load.blocks == [events.GroupBlocks(16, [5, 6, 7, 8]), events.GroupBlocks(48, [9, 10])]


def test_blocks_of_tokens() -> None:
    assert blocks_of_tokens([1, 2, 3], 16, range(20, 40)) == events.GroupBlocks(16, [2, 3])
    assert blocks_of_tokens([0, 0, 3], 16, range(48)) == events.GroupBlocks(32, [3])
    assert blocks_of_tokens([0, 0, 0], 16, range(48)) == events.GroupBlocks(32, [0])
    assert blocks_of_tokens([9], 1 << 30, range(69)) == events.GroupBlocks(0, [9])


@pytest.mark.parametrize("reuse", [False, True])
def test_a_load_that_has_ended_yields_its_turn_once(reuse: bool) -> None:
    legs = prefill(reuse="back") if reuse else machine()
    if not reuse:
        legs.add_decode(facts(), 0.0)
    legs.on_lookup_counts({"back": [64]})
    count = legs.tokens_to_load("r", 0, 0.0)
    assert count == (64 if reuse else 70)
    legs.on_blocks_allocated("r", FIVE, count or 0)
    legs.on_load_finished("r")
    assert [legs.tokens_to_load("r", 0, 0.0) for _ in range(3)] == [None, 0, 0]


@pytest.mark.parametrize("reuse", [False, True])
def test_a_request_that_ran_after_its_load_yields_no_turn(reuse: bool) -> None:
    """In front of loads that begin later it would stop an older vLLM for good."""
    legs = prefill(reuse="back") if reuse else decode()
    if reuse:
        legs.on_lookup_counts({"back": [64]})
        legs.on_blocks_allocated("r", FIVE, legs.tokens_to_load("r", 0, 0.0) or 0)
    legs.on_load_finished("r")
    legs.on_blocks_allocated("r", FIVE, 0)
    legs.on_preempted("r")
    assert legs.tokens_to_load("r", 0, 0.0) == 0


def test_all_requests_yield_once_after_an_empty_step_if_a_load_has_ended() -> None:
    d = decode()
    d.on_step_scheduled(0.0, is_empty=True)
    assert d.tokens_to_load("ordinary", 0, 0.0) == 0, "no load has ended"
    d.on_load_finished("r")
    turns = []
    for is_empty in (False, True, True, True, False, True):
        d.on_step_scheduled(0.0, is_empty=is_empty)
        turns.append(d.tokens_to_load("ordinary", 0, 0.0))
    assert turns == [0, None, 0, None, 0, None]
    d.on_blocks_allocated("r", FIVE, 0)
    d.on_step_scheduled(0.0, is_empty=True)
    assert d.tokens_to_load("ordinary", 0, 0.0) == 0


def test_a_step_in_which_a_failed_load_yields_its_turn_may_be_empty() -> None:
    d = decode()
    d.on_load_finished("r")
    assert d.tokens_to_load("r", 0, 0.0) is None
    d.on_step_scheduled(0.0, is_empty=True)
    assert d.tokens_to_load("r", 0, 0.0) == 0


# Decode leg that waits for blocks -----------------------------------------------------------------
EXPECTED = events.LoadExpected("t", [OTHER], PLAN, "digest")  # of a P with a lease of 10 s


def steps(d: EngineLegs, *times: float) -> list[list[events.ForReceiver]]:
    """Returns the events of steps at these times, which compute other requests."""
    found = []
    for now in times:
        d.on_step_scheduled(now, is_empty=False)
        found.append(received(d))
    return found


def test_p_is_asked_to_keep_a_prompt_that_waits_for_blocks() -> None:
    """At once, every third of its lease, and for 30 s at most."""
    d = machine()
    d.add_decode(facts(), 5.0)
    assert steps(d, 5.0, 8.0, 8.5, 11.0, 12.0) == [[EXPECTED], [], [EXPECTED], [], [EXPECTED]]
    assert steps(d, 31.0, 34.0, 34.9, 38.0, 99.0) == [[EXPECTED], [], [EXPECTED], [], []]
    d.on_blocks_allocated("r", FIVE, d.tokens_to_load("r", 0, 99.0) or 0)
    assert isinstance(received(d)[0], events.LoadRequested)


@pytest.mark.parametrize("end", ["loads", "has all cached", "is aborted", "is refused"])
def test_p_is_not_asked_to_keep_a_prompt_that_waits_no_longer(end: str) -> None:
    d = machine()
    d.add_decode(facts(), 0.0)
    if end == "loads":
        d.on_blocks_allocated("r", FIVE, d.tokens_to_load("r", 0, 0.0) or 0)
    elif end == "has all cached":
        d.on_blocks_allocated("r", FIVE, 0)
    elif end == "is aborted":
        d.on_finished("r", is_normal=False)
    else:
        d.refuse("r")
    received(d)
    assert steps(d, 0.0, 4.0, 8.0) == [[], [], []]


def test_an_engine_that_computes_nothing_asks_for_nothing() -> None:
    """It may have all its blocks for loads from a P that has none beside the prompts it keeps.

    Once it computes again, it asks within a second: P's lease has gone on.
    """
    d = machine()
    d.add_decode(facts(), 0.0)
    found = []
    for now, is_empty in (
        *((0.0, True), (1.0, False), (4.0, False), (4.5, True)),
        *((8.0, True), (8.5, False), (9.1, False), (12.0, False), (12.5, False)),
    ):
        d.on_step_scheduled(now, is_empty=is_empty)
        found.append(now if received(d) == [EXPECTED] else None)
    assert [now for now in found if now] == [1.0, 4.5, 9.1, 12.5]


def test_the_shortest_lease_decides_how_often_p_is_asked() -> None:
    """But no lease makes a step ask for ever."""
    d = machine()
    short, none = (msgspec.structs.replace(OTHER, lease=lease) for lease in (3.0, 1e-300))
    d.add_decode(facts("short", transfer="u", sources=[OTHER, short]), 0.0)
    d.add_decode(facts("none", transfer="v", sources=[none]), 0.0)
    found = [[event.transfer for event in step] for step in steps(d, 0.0, 0.05, 0.5, 1.0, 1.0)]
    assert found == [["v", "u"], [], ["v"], ["v", "u"], []]


# Prefill leg, bidirectional reuse -----------------------------------------------------------------
LOOKUP = events.LookupRequested("back", [OTHER], PLAN, "digest")


@pytest.mark.parametrize("turn", ["has blocks", "is aborted"])
def test_after_an_empty_step_no_load_begins_before_a_request_whose_load_has_ended(
    turn: str,
) -> None:
    d = decode()
    d.add_decode(facts("later", transfer="u"), 0.0)
    d.on_load_finished("r")
    d.on_step_scheduled(0.0, is_empty=True)
    assert d.tokens_to_load("later", 64, 0.0) is None, "each request yields one turn"
    d.on_step_scheduled(0.0, is_empty=True)
    assert d.tokens_to_load("later", 0, 0.0) is None
    assert d.tokens_to_load("later", 64, 0.0) == 0, "a prompt that is not loaded does not wait"
    d.on_step_scheduled(0.0, is_empty=False)
    assert d.tokens_to_load("later", 0, 0.0) == 70, "it may wait for something else than room"
    if turn == "has blocks":
        d.on_blocks_allocated("r", FIVE, 0)
    else:
        d.on_finished("r", is_normal=False)
    d.validate()
    d.on_step_scheduled(0.0, is_empty=True)
    assert d.tokens_to_load("later", 0, 0.0) == 70


def test_a_prefill_leg_looks_up_reads_back_and_computes_the_rest() -> None:
    p = prefill(reuse="back")
    assert p.tokens_to_load("r", 16, 0.0) is None and p.waits_for_kv
    assert received(p) == [LOOKUP]
    assert p.tokens_to_load("r", 16, 0.0) is None and received(p) == [], "requested once"
    p.on_lookup_counts({"back": [64], "of another": [16]})
    assert p.tokens_to_load("r", 16, 0.0) == 48
    assert p.tokens_to_load("r", 32, 0.0) == 32, "no room yet, and more is cached here by now"
    p.on_blocks_allocated("r", [[4, 5, 6, 7]], 32)
    step = p.take_events()
    assert step.for_receiver == [
        events.LoadRequested(
            "back",
            [OTHER],
            PLAN,
            [events.GroupBlocks(32, [6, 7])],
            64,
            REUSE_STALL_SECONDS,
            "digest",
        )
    ]
    assert step.loading_requests == {"back": "r"} and p.waits_for_kv
    p.on_load_finished("r")
    assert not p.waits_for_kv
    p.on_scheduled("r", 70, FIVE)
    assert sent(p) == [events.BlocksScheduled("t", 70, FIVE, prompt="digest")]
    assert p.on_finished("r", is_normal=True) and received(p) == [], "nothing left to cancel"


@pytest.mark.parametrize(
    ("at_d", "cached"), [(0, 0), (32, 32), (16, 32), (70, 0), (80, 0), (None, 0)]
)
def test_tokens_that_d_lacks_are_computed(at_d: int | None, cached: int) -> None:
    p = prefill(reuse="back")
    p.tokens_to_load("r", cached, 0.0)
    if at_d is not None:
        p.on_lookup_counts({"back": [at_d]})
    now = REUSE_LOOKUP_SECONDS if at_d is None else 0.0
    assert p.tokens_to_load("r", cached, now) == 0
    p.on_blocks_allocated("r", FIVE, 0)
    p.on_scheduled("r", 70, FIVE)
    assert received(p) == [LOOKUP, events.LoadCancelled("back")]
    p.on_lookup_counts({"back": [64]})
    assert p.on_finished("r", is_normal=True) and received(p) == []


def test_a_lookup_starts_at_arrival_and_its_limit_at_the_first_turn() -> None:
    p = prefill(reuse="back")
    assert received(p) == [LOOKUP]
    assert p.tokens_to_load("r", 0, 10.0) is None, "after ten seconds in the queue"
    assert p.tokens_to_load("r", 0, 10.0 + REUSE_LOOKUP_SECONDS / 2) is None
    p.on_lookup_counts({"back": [64]})
    assert p.tokens_to_load("r", 0, 10.0 + REUSE_LOOKUP_SECONDS / 2) == 64


def test_a_lookup_needs_the_counts_of_all_ranks() -> None:
    p = prefill(reuse="back", plan=reshard.plan([HOLDS], [HOLDS, HOLDS]))
    p.tokens_to_load("r", 0, 0.0)
    p.on_lookup_counts({"back": [64]})
    assert p.tokens_to_load("r", 0, 0.0) is None
    p.on_lookup_counts({"back": [48]})
    assert p.tokens_to_load("r", 0, 0.0) == 48


def test_a_failed_reuse_load_is_computed() -> None:
    p = prefill(reuse="back")
    p.on_lookup_counts({"back": [64]})
    p.on_blocks_allocated("r", [[4, 5, 6, 7]], p.tokens_to_load("r", 0, 0.0) or 0)
    p.take_events()
    p.on_load_finished("r")  # vLLM frees the blocks, and calls again
    assert [p.tokens_to_load("r", 0, 0.0) for _ in range(2)] == [None, 0]
    p.on_blocks_allocated("r", [[1, 2, 3, 4, 5]], 0)
    p.on_scheduled("r", 70, [[1, 2, 3, 4, 5]])
    step = p.take_events()
    assert step.for_receiver == []
    assert step.for_sender == [events.BlocksScheduled("t", 70, [[1, 2, 3, 4, 5]], prompt="digest")]


@pytest.mark.parametrize("when", ["before its arrival", "looking up", "reading"])
def test_an_aborted_prefill_leg_cancels_its_lookup(when: str) -> None:
    p = machine()
    p.add_prefill(facts(reuse="back"))
    if when != "before its arrival":
        p.on_arrived("r")
    if when == "reading":
        p.on_lookup_counts({"back": [64]})
        p.on_blocks_allocated("r", [[4, 5, 6, 7]], p.tokens_to_load("r", 0, 0.0) or 0)
    p.take_events()
    assert not p.on_finished("r", is_normal=False)
    p.validate()
    step = p.take_events()
    is_open = when != "before its arrival"
    assert step.for_receiver == ([events.LoadCancelled("back")] if is_open else [])
    assert step.for_sender == [events.BlocksRevoked("t")]


# Decode leg, bidirectional reuse ------------------------------------------------------------------
@pytest.mark.parametrize("end", ["loaded", "aborted", "preempted", "finished"])
def test_a_decode_leg_serves_cached_blocks_while_it_holds_them(end: str) -> None:
    tokens = 40 if end in ("preempted", "finished") else 70
    d = decode(tokens, cached=32, reuse="back")
    assert sent(d) == [events.BlocksScheduled("back", 32, [[4, 5]], cached=True, prompt="digest")]
    if end == "loaded":
        d.on_load_finished("r")
    elif end == "preempted":
        d.on_preempted("r")
    else:
        d.on_finished("r", is_normal=end == "finished")
    assert sent(d) == [events.BlocksRevoked("back")]
    d.on_finished("r", is_normal=True)
    assert sent(d) == [], "revoked once"


@pytest.mark.parametrize("why", ["nothing cached", "no blocks", "aborted early"])
def test_a_decode_leg_without_cached_blocks_revokes_at_once(why: str) -> None:
    d = machine()
    d.add_decode(facts(reuse="back"), 0.0)
    if why == "aborted early":
        d.on_finished("r", is_normal=False)
    else:
        d.tokens_to_load("r", 0 if why == "nothing cached" else 32, 0.0)
        has_blocks = why == "nothing cached"
        d.on_blocks_allocated("r", FIVE if has_blocks else [[]], 70 if has_blocks else 0)
    assert sent(d) == [events.BlocksRevoked("back")]
