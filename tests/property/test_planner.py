"""Tests the simulator with deployments and traffic of any shape.

Many steps at once change no result, KV is bounded, and every request is served.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_disagg.fleet.conventions import POLICY_NAMES
from vllm_disagg.planner.cost.hardware import NetworkLink
from vllm_disagg.planner.cost.latency import LinearLatency
from vllm_disagg.planner.simulation import simulator
from vllm_disagg.planner.simulation.deployment import Deployment, Handoff, ReplicaPool
from vllm_disagg.planner.simulation.objective import SimulationResult
from vllm_disagg.planner.simulation.replica import Replica, SchedulingRules
from vllm_disagg.planner.simulation.simulator import Simulation
from vllm_disagg.planner.simulation.workload import WorkloadSample

# All times are multiples of a power of two, so sums of them are exact: whatever comes at one moment
# comes at exactly one moment, however many steps an event stands for.
rules = st.builds(
    SchedulingRules,
    budget=st.sampled_from([64, 300, 2048, 1 << 40]),
    sequences=st.integers(1, 20),
    chunked=st.booleans(),
)


@st.composite
def sides(draw: st.DrawFn) -> ReplicaPool:
    latency = LinearLatency(
        draw(st.sampled_from([1, 2, 4])),
        (draw(st.sampled_from([0.0, 2**-6])), 2**-13, draw(st.sampled_from([0.0, 2**-23]))),
        (10 / 1024, draw(st.sampled_from([0.0, 2**-20])), 2**-13),
        (2**-7, 2**-19, 2**-12),
        threshold=draw(st.sampled_from([3, 1 << 30])),
    )
    return ReplicaPool(draw(st.integers(1, 3)), latency, draw(st.integers(700, 4000)), draw(rules))


BLOCK = 32


@pytest.fixture(autouse=True, scope="module")
def _read_back_short_prefixes() -> Iterator[None]:
    """Lets P read back what D has of these prompts, which are short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(simulator, "MIN_REUSE_TOKENS", BLOCK)
        yield


def _blocks(conversation: int, tokens: int) -> tuple[int, ...]:
    """Returns the ids of the first blocks of a conversation."""
    return tuple(1000 * conversation + number for number in range(tokens))


# Each prompt, with its answer, is the beginning of one of three texts.
samples = st.lists(
    st.tuples(st.integers(1, 500), st.integers(1, 150), st.integers(0, 717), st.integers(0, 2)),
    min_size=1,
    max_size=40,
).map(
    lambda rows: WorkloadSample(
        [p for p, *_ in rows],
        [o for _, o, *_ in rows],
        [g / 1024 for *_, g, _ in rows],
        [_blocks(c, -(-p // BLOCK)) for p, _, _, c in rows],
        [_blocks(c, (p + o - 1) // BLOCK) for p, o, _, c in rows],
        BLOCK,
    )
)
rates = st.sampled_from([1.0, 4.0, 16.0])
handoffs = st.builds(
    Handoff,
    link=st.sampled_from(
        [NetworkLink("none", float("inf"), 0.0), NetworkLink("slow", 2.0**27, 2.0**-10)]
    ),
    bytes_per_token=st.just(2.0**17),
    layers=st.sampled_from([1, 2, 8, 32]),
    overlap=st.booleans(),
    concurrency=st.sampled_from([1, 8]),
)
deployments = st.builds(
    Deployment,
    prefill=sides(),
    decode=st.one_of(sides(), sides(), st.none()),
    handoff=handoffs,
    policy=st.sampled_from(POLICY_NAMES),
    distserve=st.booleans(),
    min_prompt_bytes=st.sampled_from([0, 0, 600]),
    spill=st.booleans(),
)


def _run(deployment: Deployment, sample: WorkloadSample, rate: float) -> Simulation:
    return Simulation(deployment, sample, rate, None, 0, with_gaps=True)


@settings(max_examples=150)
@given(deployments, samples, rates)
def test_everybody_is_served_and_kv_is_bounded(
    deployment: Deployment, sample: WorkloadSample, rate: float
) -> None:
    run = _run(deployment, sample, rate)
    replicas = [*run._prefills, *run._decodes]
    compose = Replica._compose_batch
    with pytest.MonkeyPatch.context() as patch:

        def watched(self: Replica, now: float) -> object:
            batch = compose(self, now)
            assert 0 <= self.used <= self.kv and 0 <= self.running <= self.rules.sequences + len(
                self.prefilling
            )
            return batch

        patch.setattr(Replica, "_compose_batch", watched)
        result = run.run()
    assert min(result.latency) > 0 and all(
        t >= 0 for t in (*result.ttft, *result.tpot, *result.transfer)
    )
    for replica in replicas:
        assert (
            replica.used,
            replica.running,
            replica.load,
            replica.active_legs,
            replica.aggregated_requests,
            replica.ready.n,
        ) == (0, 0, 0, 0, 0, 0)


@settings(max_examples=300)
@given(deployments, samples, rates)
def test_many_steps_at_once_are_one_step_at_a_time(
    deployment: Deployment, sample: WorkloadSample, rate: float
) -> None:
    _compare(deployment, sample, rate)


@pytest.mark.parametrize("prompts", [(115, 499), (179, 499), (194, 499), (293, 401)])
def test_steps_of_two_replicas_that_end_at_one_moment(prompts: tuple[int, int]) -> None:
    """Tests KV that lands at D at the moment at which one of D's steps ends."""
    latency = LinearLatency(
        1,
        prefill=(0.0, 2**-13, 0.0),
        small=(10 / 1024, 0.0, 2**-13),
        large=(2**-7, 2**-19, 2**-12),
        threshold=3,
    )
    chunks = SchedulingRules(budget=64, sequences=2, chunked=True)
    whole = SchedulingRules(budget=64, sequences=2, chunked=False)
    deployment = Deployment(
        ReplicaPool(1, latency, 1000, chunks),
        ReplicaPool(1, latency, 700, whole),
        Handoff(NetworkLink("none", float("inf"), 0.0), 2.0**17, 1, False, 8),
    )
    _compare(deployment, WorkloadSample([*prompts], [7, 1], [0.0, 0.0], [(1,), (1,)]), 1.0)


@pytest.mark.parametrize("seed", range(40))
def test_reservations_that_come_while_many_steps_are_under_way(seed: int) -> None:
    """Tests decode instances with little KV and steady traffic, rare in random deployments."""
    random = Random(seed)
    pairs = [(random.randint(20, 500), random.randint(20, 300)) for _ in range(60)]
    sample = WorkloadSample(
        [p for p, _ in pairs], [o for _, o in pairs], [random.expovariate(1.0) for _ in pairs]
    )
    latency = LinearLatency(1, (0.02, 1e-4, 0.0), (0.01, 1e-6, 1e-4), (0.01, 1e-6, 1e-4))
    decode = ReplicaPool(random.randint(1, 2), latency, random.randint(900, 3000))
    deployment = Deployment(
        ReplicaPool(1, latency, 4000), decode, Handoff(NetworkLink("slow", 1e8, 0.001), 1e5, 8)
    )
    _compare(deployment, sample, random.uniform(2.0, 9.0))


@pytest.mark.parametrize("seed", range(40))
def test_turns_of_conversations_at_instances_with_little_kv(seed: int) -> None:
    """Tests prompts that wait at P for a D that answers others, rare in random deployments."""
    random = Random(seed)
    tokens = [random.randint(100, 600) for _ in range(5)]
    rows = []
    for _ in range(60):
        text = random.randrange(len(tokens))
        answer = random.randint(1, 120)
        rows.append((tokens[text], answer, text))
        tokens[text] = min(1500, tokens[text] + answer + random.randint(1, 60))
    sample = WorkloadSample(
        [p for p, _, _ in rows],
        [o for _, o, _ in rows],
        [random.expovariate(1.0) for _ in rows],
        [_blocks(text, -(-p // BLOCK)) for p, _, text in rows],
        [_blocks(text, (p + o - 1) // BLOCK) for p, o, text in rows],
        BLOCK,
    )
    latency = LinearLatency(1, (0.02, 1e-4, 0.0), (0.01, 1e-6, 1e-4), (0.01, 1e-6, 1e-4))
    slow = LinearLatency(1, (0.02, 1e-4, 0.0), (0.1, 1e-6, 1e-4), (0.1, 1e-6, 1e-4))
    decode = ReplicaPool(random.randint(1, 2), random.choice([latency, slow]), 3000)
    deployment = Deployment(
        ReplicaPool(random.randint(1, 2), latency, 3000),
        decode,
        Handoff(NetworkLink("slow", 1e9, 0.001), 1e5, 8, notice=0.003),
    )
    found = _compare(deployment, sample, random.uniform(2.0, 9.0))
    assert found.at_decode > 0  # and P reads back where D is not slow, in all but 3 of the seeds


def _compare(deployment: Deployment, sample: WorkloadSample, rate: float) -> SimulationResult:
    """Returns the result, which is that of one step at a time."""

    def slow(side: ReplicaPool) -> ReplicaPool:
        return msgspec.structs.replace(
            side, rules=msgspec.structs.replace(side.rules, multi_step=False)
        )

    decode = slow(deployment.decode) if deployment.decode else None
    steps = _run(
        msgspec.structs.replace(deployment, prefill=slow(deployment.prefill), decode=decode),
        sample,
        rate,
    ).run()
    leaps = _run(deployment, sample, rate).run()
    assert leaps.preemptions == steps.preemptions
    for field in ("ttft", "tpot", "itl", "latency", "transfer", "at_decode", "read_back"):
        assert getattr(leaps, field) == pytest.approx(getattr(steps, field), rel=1e-6, abs=1e-9)
    return leaps
