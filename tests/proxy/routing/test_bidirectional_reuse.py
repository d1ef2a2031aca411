"""Bidirectional KV reuse: in the next turn of a conversation P reads KV from D."""

from __future__ import annotations

import json
import random

import msgspec
import pytest
from test_pairing import instance

from proxy_world import World, world
from vllm_disagg.fleet.conventions import POLICY_NAMES, PolicyName
from vllm_disagg.fleet.grants import Grant
from vllm_disagg.proxy.routing.fleet import Fleet, Instance
from vllm_disagg.proxy.routing.pairing import InstancePair, choose
from vllm_disagg.proxy.routing.policies import Policy, RoutingQuery
from vllm_disagg.proxy.routing.prefixes import PrefixIndex, PromptPrefix

QUESTION, ANSWER, NEXT = "What is it? " * 100, "It is this. " * 200, "And why?"


def fleet(
    name: PolicyName = "prefix_aware", two_way: str = "prefill decode", prefills: int = 1
) -> tuple[Fleet, Policy]:
    made = [instance("prefill", str(at)) for at in range(prefills)] + [instance("decode", "0")]
    for one in made:
        if one.engine is not None:
            one.engine = msgspec.structs.replace(one.engine, two_way=one.role in two_way)
    return Fleet(made), Policy(name, random.Random(1))


def ask(prompt: str) -> RoutingQuery:
    return RoutingQuery(len(prompt), PromptPrefix(prompt.encode()))


def turn(
    it: tuple[Fleet, Policy], prompt: str, avoid: list[Instance] | None = None
) -> InstancePair:
    """Runs a request from its choice to its answer."""
    instances, policy = it
    pair = choose(instances, policy, 9, ask(prompt), 0.0, avoid or [])
    assert isinstance(pair, InstancePair)
    pair.take(instances, policy, 0.0)
    pair.release_prefill()
    pair.release_decode()
    policy.record_answer(pair.query, pair.decode)
    return pair


@pytest.mark.parametrize("question", [QUESTION, QUESTION[:130]])
def test_the_next_turn_reads_the_answer_from_d(question: str) -> None:
    it = fleet()
    assert not turn(it, question).bidirectional_reuse
    assert turn(it, question + ANSWER + NEXT).bidirectional_reuse
    assert turn(it, question + ANSWER + NEXT + ANSWER).bidirectional_reuse


def test_kv_that_p_has_computed_is_not_read_from_d() -> None:
    it = fleet()
    turn(it, QUESTION)
    turn(it, QUESTION + ANSWER)
    assert not turn(it, QUESTION + ANSWER).bidirectional_reuse, "the same again"
    assert not turn(it, QUESTION + ANSWER + NEXT).bidirectional_reuse, "too little"


def test_other_questions_to_one_system_prompt_are_not_answers() -> None:
    it, system = fleet(), "You are kind. " * 2000
    for at in range(20):
        assert not turn(it, system + f"{at} {QUESTION}").bidirectional_reuse


def test_another_p_reads_the_whole_conversation_from_d() -> None:
    it = fleet(prefills=2)
    first = turn(it, QUESTION + ANSWER)
    other = turn(it, QUESTION + ANSWER + NEXT, avoid=[first.prefill])
    assert other.prefill is not first.prefill and other.bidirectional_reuse


@pytest.mark.parametrize("name", POLICY_NAMES)
@pytest.mark.parametrize("two_way", ["prefill", "decode", "prefill decode"])
def test_reuse_needs_both_connectors_and_the_prefix_aware_policy(
    name: PolicyName, two_way: str
) -> None:
    it = fleet(name, two_way)
    turn(it, QUESTION)
    expected = name == "prefix_aware" and two_way == "prefill decode"
    assert turn(it, QUESTION + ANSWER + NEXT).bidirectional_reuse is expected


def test_memory_of_answers_is_bounded() -> None:
    memory, cache = PrefixIndex(entries=10), object()
    for at in range(50):
        memory.record_answer(PromptPrefix(b"%d" % at * 500), 1000, cache)
    assert len(memory._answered) == 10
    assert memory.bytes_after_answer(PromptPrefix(b"49" * 2000), 4000, cache) == 3000
    assert (
        memory.bytes_after_answer(PromptPrefix(b"49" * 2000), 4000, object())
        == memory.bytes_after_answer(PromptPrefix(b"3" * 2000), 2000, cache)
        == 0
    )


async def grants_of(w: World, prompt: str) -> tuple[Grant, Grant]:
    client = await w.connect()
    body = {"model": "m", "prompt": prompt, "max_tokens": 9}
    client.send("POST", "/v1/completions", json.dumps(body).encode())
    assert (await client.receive()).status == 200
    (p, d) = w.p.calls[-1].grant, w.d.calls[-1].grant
    assert p and d
    return p, d


@pytest.mark.parametrize("can", [True, False])
async def test_both_grants_name_the_reuse_transfer(can: bool) -> None:
    def prepare(it: World) -> None:
        it.p.two_way = it.d.two_way = can

    async with world(prepare=prepare) as w:
        for prompt in (QUESTION, QUESTION + ANSWER + NEXT):
            p, d = await grants_of(w, prompt)
            back = can and prompt is not QUESTION
            assert (
                bool(p.back) is bool(d.back) is back and p.back == d.back and p.back != p.transfer
            )
            assert [s.name for s in p.sources] == ([f"{w.d.name}-w0"] if back else []) and len(
                d.sources
            ) == 1
