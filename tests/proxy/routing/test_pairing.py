"""Fleet state, the circuit breaker, and the choice of pairs."""

import itertools

import msgspec
import pytest

from vllm_disagg.protocol.peers import EngineInfo, WorkerInfo
from vllm_disagg.proxy.routing.fleet import Fleet, Instance, mismatch
from vllm_disagg.proxy.routing.pairing import InstancePair, choose, choose_decode
from vllm_disagg.proxy.routing.pairing_table import PairingTable
from vllm_disagg.proxy.routing.policies import Policy, RoutingQuery

POLICY = Policy()
_names = itertools.count()


def engine(role: str = "both", workers: int = 1, **layout: str) -> EngineInfo:
    name = f"i{next(_names)}"
    listening = [WorkerInfo(f"{name}.{k}", "tcp://a:1", "tcp://a:2") for k in range(workers)]
    return EngineInfo(name, role, listening, layout)  # type: ignore[arg-type]


def instance(role: str, name: str = "", of: EngineInfo | None = None) -> Instance:
    made = Instance(f"http://{role}{name}", role)  # type: ignore[arg-type]
    made.on_probe_answered("m", of or engine())
    return made


def fleet(*instances: Instance) -> Fleet:
    return Fleet(list(instances))


def pair(choice: object) -> InstancePair:
    assert isinstance(choice, InstancePair)
    return choice


def test_least_prompt_bytes_then_turns() -> None:
    p = [instance("prefill", str(i)) for i in range(3)]
    world = fleet(*p, instance("decode"))
    p[0].prompt_bytes = 10
    chosen = []
    for _ in range(4):
        choice = pair(choose(world, POLICY, 9, RoutingQuery(0), 0.0))
        choice.take(world, POLICY, 0.0)
        chosen.append(choice.prefill)
    assert chosen == [p[1], p[2], p[1], p[2]]


def test_fewest_running_decode() -> None:
    d = [instance("decode", str(i)) for i in range(2)]
    d[0].in_flight = 1
    world = fleet(instance("prefill"), *d)
    first = pair(choose(world, POLICY, 9, RoutingQuery(5), 0.0))
    first.take(world, POLICY, 0.0)
    assert first.decode is d[1] and d[1].in_flight == 1 and first.prefill.prompt_bytes == 5
    second = pair(choose(world, POLICY, 9, RoutingQuery(5), 0.0))
    assert second.decode is d[0], "equals take turns"
    first.release_prefill()
    assert (first.prefill.prefill_legs, first.prefill.prompt_bytes) == (0, 0)


def test_busy_and_none() -> None:
    p, d = instance("prefill"), instance("decode")
    world = fleet(p, d)
    pair(choose(world, POLICY, 1, RoutingQuery(1), 0.0)).take(world, POLICY, 0.0)
    assert choose(world, POLICY, 1, RoutingQuery(1), 0.0) == "busy"
    d.mark_down("gone")
    assert choose(world, POLICY, 1, RoutingQuery(1), 0.0) == "none"


def test_only_fitting_pairs() -> None:
    a, b = instance("prefill", of=engine(dtype="a")), instance("prefill", of=engine(dtype="b"))
    d = instance("decode", of=engine(dtype="b"))
    world = fleet(a, b, d)
    for _ in range(3):
        choice = pair(choose(world, POLICY, 9, RoutingQuery(1), 0.0))
        choice.take(world, POLICY, 0.0)
        assert choice.prefill is b
    assert mismatch(a, d) == "dtype is a on one side and b on the other"


OTHER_RELEASES = "vllm-disagg 0.1.0 on one side and 0.2.0 on the other"
OTHER_TRANSFORMERS = "transformers 5.19.0 on one side and unknown on the other"


@pytest.mark.parametrize(
    ("fact", "theirs", "words"),
    [
        ("weights", ("0.1.0", "5.19.0"), ""),
        ("weights", ("0.2.0", ""), f"; {OTHER_RELEASES}"),
        ("model config", ("0.1.0", ""), f"; {OTHER_TRANSFORMERS}"),
        ("draft", ("0.2.0", ""), f"; {OTHER_RELEASES}; {OTHER_TRANSFORMERS}"),
    ],
)
def test_a_difference_has_the_releases_that_may_explain_it(
    fact: str, theirs: tuple[str, str], words: str
) -> None:
    """Engines with equal files are kept apart by another release of a library, too."""
    p, d = (
        instance(
            role, of=EngineInfo(role, "both", [], {fact: value}, release=one, transformers=two)
        )
        for role, value, (one, two) in (
            ("prefill", "a", ("0.1.0", "5.19.0")),
            ("decode", "b", theirs),
        )
    )
    assert mismatch(p, d) == f"{fact} is a on one side and b on the other{words}"


def test_releases_alone_keep_no_engines_apart() -> None:
    d = instance("decode", of=msgspec.structs.replace(engine(dtype="a"), release="0.2.0"))
    assert not mismatch(instance("prefill", of=engine(dtype="a")), d)


def test_another_protocol_is_named_before_all_facts() -> None:
    """Its release may compute the others in another way."""
    facts = ("model config", "transfer protocol")
    p, d = (
        instance(role, of=EngineInfo(role, "both", [], dict.fromkeys(facts, number)))
        for role, number in (("prefill", "5"), ("decode", "6"))
    )
    assert mismatch(p, d).startswith("transfer protocol is 5 on one side and 6 on the other")


def test_the_least_cost_of_all_layouts_counts() -> None:
    """Of equal costs, that of the P which was chosen longest ago."""
    pairs = [
        (instance("prefill", of=engine(dtype=dtype)), instance("decode", of=engine(dtype=dtype)))
        for dtype in "abc"
    ]
    world = fleet(*itertools.chain(*pairs))
    pairs[1][0].prompt_bytes = 10
    pairs[2][1].in_flight = 1
    assert pair(choose(world, POLICY, 9, RoutingQuery(1), 0.0)).prefill is pairs[0][0]
    pairs[0][0].prompt_bytes = 10
    pairs[0][0].last_choice = 1
    chosen = pair(choose(world, POLICY, 9, RoutingQuery(1), 0.0))
    assert (chosen.prefill, chosen.decode) == pairs[1]


def test_any_number_of_workers() -> None:
    p, d = instance("prefill", of=engine(workers=2)), instance("decode")
    assert pair(choose(fleet(p, d), POLICY, 9, RoutingQuery(1), 0.0)).prefill is p
    assert mismatch(p, d) == ""


@pytest.mark.parametrize(
    ("role", "told", "fits"),
    [
        ("prefill", "decode", False),
        ("decode", "prefill", False),
        ("prefill", "both", True),
        ("decode", "decode", True),
    ],
)
def test_roles(role: str, told: str, fits: bool) -> None:
    odd = instance(role, of=engine(told))
    other = instance("decode" if role == "prefill" else "prefill")
    assert (
        isinstance(choose(fleet(odd, other), POLICY, 9, RoutingQuery(1), 0.0), InstancePair) is fits
    )
    assert bool(odd.unavailable_reason) is not fits
    assert (choose_decode(fleet(odd), POLICY, 0.0) is odd) is (role == "decode"), (
        "any decode instance serves whole requests"
    )


def test_a_decode_instance_without_connector_serves_aggregated_requests_only() -> None:
    d = Instance("u", "decode")
    d.on_probe_answered("m", None)
    world = fleet(instance("prefill"), d)
    assert (
        choose(world, POLICY, 9, RoutingQuery(1), 0.0) == "none"
        and choose_decode(world, POLICY, 0.0) is d
    )
    assert "connector" in d.unavailable_reason


def test_two_failed_probes_and_recovery() -> None:
    d = instance("decode")
    d.on_probe_failed("quiet")
    assert d.is_usable(0.0)
    d.on_probe_failed("quiet")
    assert not d.is_usable(0.0) and d.needs_probe and d.unavailable_reason == "quiet"
    d.on_probe_answered("m", engine())
    assert d.is_usable(0.0) and d.failed_probes == 0


def test_the_backoff_doubles_with_each_failure() -> None:
    p = instance("prefill")
    p.on_leg_failed("5xx", 0.0)
    assert p.can_prefill(0.0), "one failure may be its request's fault"
    rests = []
    for _ in range(8):
        p.on_leg_failed("5xx", 0.0)
        rests.append(p.open_until)
    assert rests == [1, 2, 4, 8, 16, 30, 30, 30]
    assert not p.can_prefill(29.9) and p.can_prefill(30.0)
    p.on_leg_succeeded(35.0)
    p.on_leg_failed("5xx", 40.0)
    assert p.can_prefill(40.0)


def test_a_probe_closes_the_breaker_of_another_process_only() -> None:
    """A D that failed all requests and answered all probes got 28 of 146 requests, not 4."""
    d = instance("decode")
    for at in (1.0, 2.0):
        d.on_leg_failed("5xx", at)
    d.on_probe_answered("m", d.engine)
    d.on_leg_failed("5xx", 3.0)
    assert d.consecutive_failures == 3 and not d.is_usable(4.9), "its backoff has doubled"
    d.on_probe_answered("m", engine())
    assert d.is_usable(3.0) and d.consecutive_failures == 0
    for at in (4.0, 5.0):
        d.on_leg_failed("5xx", at)
    d.mark_down("refuses connections")
    d.on_probe_answered("m", d.engine)
    assert d.is_usable(5.0)


def test_a_probe_of_an_engine_without_connector_leaves_the_breaker_alone() -> None:
    d = instance("decode")
    d.on_probe_answered("m", None)
    for at in (1.0, 2.0):
        d.on_leg_failed("5xx", at)
    d.on_probe_answered("m", None)
    assert not d.is_usable(2.5)


def test_an_instance_may_fail_for_days() -> None:
    p = instance("prefill")
    for at in range(0, 6000, 2):
        p.on_leg_failed("5xx", float(at + 1), float(at))
    assert p.consecutive_failures == 3000 and p.is_usable(6000.0 + 30.0)


def test_failures_of_requests_in_flight_together_count_once() -> None:
    p = instance("prefill")
    for _ in range(20):
        p.on_leg_failed("5xx", 1.0, started_at=0.5)
    assert p.consecutive_failures == 1 and p.is_usable(1.0), "a burst that met a full queue"
    p.on_leg_failed("5xx", 1.5, started_at=1.2)
    assert p.consecutive_failures == 2 and not p.is_usable(1.6), "and one that was sent after that"


def test_a_failure_counts_from_when_it_came() -> None:
    """A 5xx counts when another instance has answered, which may take long."""
    d = instance("decode")
    d.on_leg_failed("5xx", 60.0, started_at=0.5, ended_at=1.0)
    d.on_leg_failed("5xx", 61.0, started_at=2.0, ended_at=2.5)
    assert d.consecutive_failures == 2 and not d.is_usable(61.5)


def test_a_failure_beside_a_success_does_not_count() -> None:
    """Of a burst some are served: later reports of the others' failures change nothing."""
    d = instance("decode")
    d.on_leg_failed("5xx", 1.0, started_at=0.5)
    d.on_leg_succeeded(2.0)
    for k in range(20):
        d.on_leg_failed("5xx", 3.0 + k, started_at=1.5)
    assert d.is_usable(3.0) and d.consecutive_failures == 0


def test_a_dead_engine_is_down_at_once() -> None:
    d = instance("decode")
    d.on_leg_succeeded(2.0)
    d.on_leg_failed("died", 3.0, started_at=1.0)
    assert not d.up


def test_an_engine_is_never_paired_with_itself() -> None:
    """An engine may be given under two names of its address."""
    one = engine()
    p, d = instance("prefill", of=one), instance("decode", of=one)
    world = fleet(p, d)
    assert (
        choose(world, POLICY, 9, RoutingQuery(1), 0.0) == "none"
        and choose_decode(world, POLICY, 0.0) is d
    )
    assert mismatch(p, d) == "they are one engine, and no engine is paired with itself"
    assert PairingTable(world).problem(p) == f"{p.url} and {d.url} do not fit: {mismatch(p, d)}"
    other = instance("decode", "2")
    world = fleet(p, d, other)
    d.last_choice, other.in_flight = 0, 5  # by its load the other is worse
    for _ in range(3):
        choice = pair(choose(world, POLICY, 9, RoutingQuery(1), 0.0))
        assert choice.decode is other
    assert not PairingTable(world).problem(p)
    third = instance("prefill", "3")
    world = fleet(p, d, third)
    assert pair(choose(world, POLICY, 1, RoutingQuery(1), 0.0)).prefill is third
    third.prefill_legs = 1
    assert choose(world, POLICY, 1, RoutingQuery(1), 0.0) == "busy"
    assert choose(fleet(p, d), POLICY, 0, RoutingQuery(1), 0.0) == "none", (
        "who waits for it would wait in vain"
    )


def test_workers_of_two_engines_are_never_the_same() -> None:
    """One process's workers under two incarnations would be a load that never ends."""
    one = engine()
    other = EngineInfo("another", "both", one.workers, {})
    assert "one engine" in mismatch(instance("prefill", of=one), instance("decode", of=other))
    bare = EngineInfo("i", "both", [], {})
    assert "one engine" in mismatch(instance("prefill", of=bare), instance("decode", of=bare))


def test_a_half_open_breaker_lets_one_trial_request_pass() -> None:
    p = instance("prefill")
    world = fleet(p, instance("decode"))
    for _ in range(3):
        p.on_leg_failed("5xx", 0.0)
    assert choose(world, POLICY, 9, RoutingQuery(1), 1.9) == "none"
    pair(choose(world, POLICY, 9, RoutingQuery(1), 2.0)).take(world, POLICY, 2.0)
    assert choose(world, POLICY, 9, RoutingQuery(1), 2.0) == "none", (
        "the others wait for how that one ends"
    )
    assert isinstance(choose(world, POLICY, 9, RoutingQuery(1), 4.0), InstancePair), (
        "and not for ever"
    )
    p.on_leg_succeeded(2.1)
    assert isinstance(choose(world, POLICY, 9, RoutingQuery(1), 2.1), InstancePair)


def test_open_decode_instances_serve_if_no_other_can() -> None:
    a, b = instance("decode", "a"), instance("decode", "b")
    a.open_until = 10.0
    b.in_flight = 99
    world = fleet(a, b)
    assert choose_decode(world, POLICY, 0.0) is b
    assert choose_decode(world, POLICY, 0.0, [b]) is a
    assert choose_decode(world, POLICY, 0.0, [a, b]) is None
    world = fleet(instance("prefill"), a)
    assert pair(choose(world, POLICY, 9, RoutingQuery(1), 0.0)).decode is a


def test_refused_is_down_and_reset_is_doubt() -> None:
    p, d = instance("prefill"), instance("decode")
    p.on_leg_failed("refused", 0.0)
    d.on_leg_failed("reset", 0.0)
    assert not p.up and d.up and d.needs_probe


def test_never_empty_handed_errors() -> None:
    for prefills, decodes in itertools.product(range(2), range(2)):
        world = fleet(
            *[instance("prefill") for _ in range(prefills)],
            *[instance("decode") for _ in range(decodes)],
        )
        assert isinstance(choose(world, POLICY, 1, RoutingQuery(1), 0.0), InstancePair) is bool(
            prefills and decodes
        )
