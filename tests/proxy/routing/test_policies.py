"""Policies: the preferences of each, and the rules that hold for all."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_pairing import engine, fleet, instance, pair

from vllm_disagg.fleet.conventions import POLICY_NAMES, REQUEST_COST_BYTES, PolicyName
from vllm_disagg.proxy.routing.fleet import Fleet, Instance
from vllm_disagg.proxy.routing.pairing import (
    choose,
    choose_decode,
    choose_spill,
    prefers_aggregated,
)
from vllm_disagg.proxy.routing.policies import (
    Policy,
    RoutingQuery,
)
from vllm_disagg.proxy.routing.prefixes import (
    MAX_HOLDERS,
    SHORT_PREFIX_BYTES,
    PrefixIndex,
    PromptPrefix,
)


def world(name: PolicyName, prefills: int, decodes: int, **kinds: str) -> tuple[Fleet, Policy]:
    made = [instance("prefill", str(i)) for i in range(prefills)] + [
        instance("decode", str(i)) for i in range(decodes)
    ]
    return Fleet(made), Policy(name, random.Random(1))


def ask(prompt: str, **fields: bytes) -> RoutingQuery:
    prefix = PromptPrefix(prompt.encode(), fields.pop("salt", b""))
    return RoutingQuery(len(prompt), prefix, **fields)  # type: ignore[arg-type]


def nixl(role: str, name: str, model: str = "m") -> Instance:
    made = Instance(f"http://{role}{name}", role)  # type: ignore[arg-type]
    made.on_probe_answered(model, None, nixl=True)
    return made


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_no_policy_chooses_an_unusable_instance(data: st.DataObject) -> None:
    """In any fleet every policy chooses only instances that are up, fit and have room."""
    kinds = st.sampled_from(["a", "b", "nixl", "plain"])
    members = []
    for role in ["prefill"] * data.draw(st.integers(0, 4)) + ["decode"] * data.draw(
        st.integers(0, 4)
    ):
        kind, name = data.draw(kinds), str(len(members))
        member = nixl(role, name) if kind == "nixl" else Instance(f"http://{role}{name}", role)  # type: ignore[arg-type]
        if kind != "nixl":
            member.on_probe_answered("m", None if kind == "plain" else engine(layout=kind))
        member.up = data.draw(st.booleans())
        member.open_until = data.draw(st.sampled_from([0.0, 5.0]))
        member.prefill_legs, member.kv_cache_usage = (
            data.draw(st.integers(0, 2)),
            data.draw(st.sampled_from([0.1, 0.95])),
        )
        members.append(member)
    it, policy = Fleet(members), Policy(data.draw(st.sampled_from(POLICY_NAMES)), random.Random(0))
    avoid = data.draw(st.lists(st.sampled_from(members), max_size=2)) if members else []
    session = data.draw(st.sampled_from([b"", b"s"]))
    choice = choose(it, policy, 2, ask("x" * 2000, session=session), 1.0, avoid)
    fitting = [
        (p, d)
        for p in it.with_role("prefill")
        for d in it.with_role("decode")
        if p.up
        and d.up
        and p.is_usable(1.0)
        and p.compatibility_key == d.compatibility_key
        and p.compatibility_key
        and p not in avoid
        and d not in avoid
    ]
    if isinstance(choice, str):
        assert choice == ("busy" if fitting else "none")
        assert not any(p.prefill_legs < 2 for p, _ in fitting)
    else:
        assert (choice.prefill, choice.decode) in fitting and choice.prefill.prefill_legs < 2
    alone = choose_decode(it, policy, 1.0, avoid, ask("x"))
    up = [d for d in it.with_role("decode") if d.up and d not in avoid]
    assert (alone in up) if up else alone is None
    if alone and not alone.is_usable(1.0):
        assert not any(d.is_usable(1.0) for d in up), "the least bad is used when all rest"


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_equal_requests_are_spread_evenly(name: PolicyName) -> None:
    it, policy = world(name, 3, 4)
    for i in range(240):
        pair(choose(it, policy, 1000, ask(f"{i}" * 600), 0.0)).take(it, policy, 0.0)
    legs = [p.prefill_legs for p in it.with_role("prefill")]
    running = [d.in_flight for d in it.with_role("decode")]
    assert max(legs) - min(legs) <= 24 and max(running) - min(running) <= 24


@pytest.mark.parametrize("name", ["least_loaded", "prefix_aware"])
def test_long_prompts_count_for_more(name: PolicyName) -> None:
    it, policy = world(name, 2, 2)
    long = pair(choose(it, policy, 9, ask("x" * 100_000), 0.0))
    long.take(it, policy, 0.0)
    for i in range(4):
        short = pair(choose(it, policy, 9, ask(f"{i}" * 1000), 0.0))
        short.take(it, policy, 0.0)
        assert short.prefill is not long.prefill and short.decode is not long.decode


def test_running_requests_count_beside_their_context() -> None:
    it, policy = world("least_loaded", 1, 2)
    a, b = it.with_role("decode")
    a.add_request(REQUEST_COST_BYTES)
    b.add_request(10)
    b.add_request(10)
    b.add_request(10)
    assert choose_decode(it, policy, 0.0) is a


def test_a_full_kv_cache_comes_last() -> None:
    it, policy = world("least_loaded", 1, 2)
    a, b = it.with_role("decode")
    a.kv_cache_usage = 0.95
    b.add_request(10**6)
    assert choose_decode(it, policy, 0.0) is b


def test_round_robin() -> None:
    it, policy = world("round_robin", 2, 3)
    it.with_role("prefill")[0].prompt_bytes = 10**9
    chosen = []
    for _ in range(6):
        one = pair(choose(it, policy, 9, RoutingQuery(1), 0.0))
        one.take(it, policy, 0.0)
        chosen.append((one.prefill.url[-1], one.decode.url[-1]))
    assert chosen == [("0", "0"), ("1", "1"), ("0", "2"), ("1", "0"), ("0", "1"), ("1", "2")]


def test_power_of_two_never_takes_the_worst() -> None:
    it, policy = world("power_of_two", 4, 1)
    it.with_role("prefill")[2].prompt_bytes = 10**9
    counts = Counter(pair(choose(it, policy, 9, RoutingQuery(1), 0.0)).prefill for _ in range(200))
    assert len(counts) == 3 and it.with_role("prefill")[2] not in counts


def test_a_prefix_is_found_again() -> None:
    it, policy = world("prefix_aware", 4, 4)
    history = "system" * 1000
    first = pair(choose(it, policy, 9, ask(history), 0.0))
    first.take(it, policy, 0.0)
    first.release_prefill()
    first.release_decode()
    for i in range(20):
        other = pair(choose(it, policy, 9, ask(f"{i}other" * 1000), 0.0))
        other.take(it, policy, 0.0)
        other.release_prefill()
        other.release_decode()
    again = pair(choose(it, policy, 9, ask(history + "next turn" * 100), 0.0))
    assert (again.prefill, again.decode) == (first.prefill, first.decode)


def test_a_prefix_attracts_as_far_as_it_saves_work() -> None:
    it, policy = world("prefix_aware", 2, 1)
    history = "h" * 10_000
    first = pair(choose(it, policy, 9, ask(history), 0.0))
    first.take(it, policy, 0.0)
    first.release_prefill()
    first.prefill.prompt_bytes = 8_000
    assert pair(choose(it, policy, 9, ask(history + "x"), 0.0)).prefill is first.prefill
    first.prefill.prompt_bytes = 12_000
    assert pair(choose(it, policy, 9, ask(history + "x"), 0.0)).prefill is not first.prefill, (
        "the queue costs more than it saves"
    )


def test_a_restart_empties_a_cache() -> None:
    it, policy = world("prefix_aware", 2, 1)
    history = ask("h" * 10_000)
    first = pair(choose(it, policy, 9, history, 0.0))
    first.take(it, policy, 0.0)
    first.release_prefill()
    assert policy.cached_bytes([first.prefill], history)
    first.prefill.mark_down("killed")
    first.prefill.on_probe_answered("m", engine())
    assert not policy.cached_bytes([first.prefill], history)


def test_salts_keep_prompts_apart() -> None:
    it, policy = world("prefix_aware", 1, 1)
    pair(choose(it, policy, 9, ask("p" * 5000, salt=b"mine"), 0.0)).take(it, policy, 0.0)
    assert policy.cached_bytes(it.instances, ask("p" * 5000, salt=b"mine"))
    assert not policy.cached_bytes(it.instances, ask("p" * 5000, salt=b"yours"))
    assert not policy.cached_bytes(it.instances, ask("p" * 5000))


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_sessions_stay_and_are_spread(name: PolicyName) -> None:
    it, policy = world(name, 3, 3)
    homes = {}
    for turn in range(3):
        for s in range(60):
            one = pair(choose(it, policy, 10**6, ask("x" * 100, session=b"%d" % s), 0.0))
            one.take(it, policy, 0.0)
            assert homes.setdefault(s, (one.prefill, one.decode)) == (one.prefill, one.decode), turn
    assert min(Counter(d for _, d in homes.values()).values()) >= 8
    gone = it.with_role("decode")[0]
    gone.mark_down("killed")
    for s, (p, d) in homes.items():
        one = pair(choose(it, policy, 10**6, ask("x" * 100, session=b"%d" % s), 0.0))
        assert one.prefill is p and (one.decode is d or d is gone), "only its own sessions move"


def test_a_session_leaves_an_instance_that_is_nearly_full() -> None:
    it, policy = world("least_loaded", 1, 2)
    home = choose_decode(it, policy, 0.0, (), ask("x", session=b"s"))
    assert home
    home.kv_cache_usage = 0.99
    assert choose_decode(it, policy, 0.0, (), ask("x", session=b"s")) is not home


def test_only_like_is_paired_with_like() -> None:
    ours, theirs = instance("prefill", "0"), nixl("prefill", "1")
    d_theirs = nixl("decode", "1")
    it, policy = fleet(ours, theirs, d_theirs), Policy()
    for _ in range(3):
        one = pair(choose(it, policy, 9, RoutingQuery(1), 0.0))
        one.take(it, policy, 0.0)
        assert (one.prefill, one.decode) == (theirs, d_theirs)
    d_theirs.mark_down("gone")
    assert choose(it, policy, 9, RoutingQuery(1), 0.0) == "none"


def test_both_instances_are_one_decision() -> None:
    """The best P fits only a busy D, so that another pair is chosen."""
    a = [instance("prefill", "a", engine(dtype="a")), instance("decode", "a", engine(dtype="a"))]
    b = [instance("prefill", "b", engine(dtype="b")), instance("decode", "b", engine(dtype="b"))]
    a[1].add_request(100_000)
    b[0].prompt_bytes = 500
    one = pair(choose(fleet(*a, *b), Policy(), 9, RoutingQuery(1), 0.0))
    assert [one.prefill, one.decode] == b


def test_models() -> None:
    it, policy = world("least_loaded", 1, 2)
    it.instances[2].models = frozenset(("other", "lora"))
    for model, place in (("m", 1), ("lora", 2), ("other", 2)):
        assert (
            choose_decode(it, policy, 0.0, (), RoutingQuery(1, model=model)) is it.instances[place]
        )
    assert choose_decode(it, policy, 0.0, (), RoutingQuery(1, model="nobody's")), (
        "for an answer in an engine's words"
    )


def test_short_or_cached_prompts_are_aggregated() -> None:
    it, policy = world("prefix_aware", 1, 2)
    assert prefers_aggregated(it, policy, ask("x" * 99), 100) and not prefers_aggregated(
        it, policy, ask("x" * 100), 100
    )
    assert not prefers_aggregated(it, policy, ask(""), 0)
    long = ask("y" * 20_000)
    assert not prefers_aggregated(it, policy, long, 4000)
    pair(choose(it, policy, 9, long, 0.0)).take(it, policy, 0.0)
    assert prefers_aggregated(it, policy, long, 4000) and not prefers_aggregated(
        it, policy, ask("z" * 20_000), 4000
    )


def test_spilling_takes_one_prompt_at_a_time() -> None:
    it, policy = world("least_loaded", 1, 2)
    a, b = it.with_role("decode")
    a.aggregated_requests = 1
    assert choose_spill(it, policy, 0.0, RoutingQuery(1)) is b
    b.aggregated_requests = 1
    assert choose_spill(it, policy, 0.0, RoutingQuery(1)) is None


# Prefixes -----------------------------------------------------------------------------------------


@given(st.binary(min_size=0, max_size=6000), st.integers(0, 6000))
@settings(deadline=None)
def test_beginnings_are_equal_as_far_as_prompts_are(prompt: bytes, cut: int) -> None:
    other = prompt[:cut] + bytes(b ^ 1 for b in prompt[cut:])
    one, two = dict(PromptPrefix(prompt).hashes), dict(PromptPrefix(other).hashes)
    assert one.keys() == two.keys()
    for length, mark in one.items():
        assert (mark == two[length]) is (length <= cut)


def test_each_hash_stands_for_all_bytes_before() -> None:
    one = PromptPrefix(b"a" + b"x" * 5000).hashes
    other = PromptPrefix(b"b" + b"x" * 5000).hashes
    assert not set(one) & set(other)


def test_few_marks_for_long_prompts() -> None:
    assert not PromptPrefix(b"x" * (SHORT_PREFIX_BYTES - 1)).hashes
    marks = PromptPrefix(b"x" * 400_000).hashes
    assert 40 < len(marks) < 70 and marks[-1][0] > 0.88 * 400_000


def test_memory_of_prefixes_is_bounded() -> None:
    memory = PrefixIndex(entries=100)
    caches = [object() for _ in range(3 * MAX_HOLDERS)]
    for i in range(500):
        memory.record_prompt(PromptPrefix(b"%d" % i * 1000), caches[:1])
        assert len(memory) <= 100
    for cache in caches:
        memory.record_prompt(PromptPrefix(b"499" * 1000), [cache])
    found = memory.longest_prefixes(PromptPrefix(b"499" * 1000), caches)
    assert set(found) == set(caches[-MAX_HOLDERS:])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5000)), max_size=30))
@settings(deadline=None)
def test_longest_prefixes_are_those_recorded(history: list[tuple[int, int]]) -> None:
    text = random.Random(0).randbytes(5000)
    memory, caches, seen = PrefixIndex(), [object() for _ in range(4)], [0] * 4
    for who, length in history:
        memory.record_prompt(PromptPrefix(text[:length]), [caches[who]])
        seen[who] = max([seen[who], *(end for end, _ in PromptPrefix(text[:length]).hashes)])
    assert memory.longest_prefixes(PromptPrefix(text), caches) == {
        c: n for c, n in zip(caches, seen, strict=True) if n
    }
