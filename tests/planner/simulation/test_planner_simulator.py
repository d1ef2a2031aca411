"""The simulator against formulas, and against itself one step at a time."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise, product
from random import Random
from statistics import mean

import pytest

from vllm_disagg.fleet.conventions import BYTES_PER_TOKEN, POLICY_NAMES, PolicyName
from vllm_disagg.planner.cost import distserve, queueing
from vllm_disagg.planner.cost.hardware import LINKS, NetworkLink
from vllm_disagg.planner.cost.latency import LinearLatency, PathDelay, unloaded_prefill
from vllm_disagg.planner.cost.sizes import KvLayers
from vllm_disagg.planner.simulation import workload
from vllm_disagg.planner.simulation.batch import Batch
from vllm_disagg.planner.simulation.deployment import Deployment, Handoff, ReplicaPool
from vllm_disagg.planner.simulation.objective import Objective, quantile
from vllm_disagg.planner.simulation.replica import Replica, SchedulingRules
from vllm_disagg.planner.simulation.simulator import Simulation, simulate, simulate_closed
from vllm_disagg.planner.simulation.workload import Arrivals, WorkloadSample
from vllm_disagg.protocol.peers import EngineInfo, WorkerInfo
from vllm_disagg.proxy.routing.fleet import Fleet, Instance
from vllm_disagg.proxy.routing.pairing import (
    choose,
    choose_decode,
    choose_spill,
    prefers_aggregated,
)
from vllm_disagg.proxy.routing.policies import CachedBytes, Policy, RoutingQuery

LARGE = 1 << 40
PLAIN = LinearLatency(1, (0.02, 1e-4, 1e-8), (0.01, 1e-6, 1e-4), (0.01, 1e-6, 1e-4))
SHAREGPT = workload.load("sharegpt-like")


def _linear(pp: int) -> LinearLatency:
    return LinearLatency(pp, PLAIN.prefill, PLAIN.small, PLAIN.large)


def _ratio_to_m_d_1(pp: int, load: float, seed: int, count: int = 50_000) -> float:
    """Simulates equal prompts, one at a time. Returns the mean TTFT by the formula's."""
    latency = _linear(pp)
    service = unloaded_prefill(latency, 512)
    rate = load / (service / pp)
    sample = workload.load("512:1").sample(count, seed, Arrivals("poisson"))
    prefill = ReplicaPool(1, latency, LARGE, SchedulingRules(budget=512, sequences=LARGE))
    decode = ReplicaPool(1, latency, LARGE, SchedulingRules(sequences=LARGE))
    handoff = Handoff(overlap=False, concurrency=LARGE)
    result = simulate(Deployment(prefill, decode, handoff, distserve=True), sample, rate)
    return mean(result.ttft) / queueing.mean_ttft(service, rate, pp)


@pytest.mark.parametrize(
    ("pp", "load", "tolerance"),
    [(1, 0.6, 0.02), (2, 0.3, 0.05), (2, 0.6, 0.05), (2, 0.85, 0.05)],
)
def test_mean_ttft_is_that_of_an_m_d_1_queue(pp: int, load: float, tolerance: float) -> None:
    """With two stages each takes half."""
    assert _ratio_to_m_d_1(pp, load, seed=1) == pytest.approx(1, rel=tolerance)


@pytest.mark.parametrize(
    ("load", "count"), [(0.3, 10_000), (0.5, 10_000), (0.7, 20_000), (0.85, 50_000)]
)
def test_mean_ttft_is_that_of_an_m_d_1_queue_over_five_seeds(load: float, count: int) -> None:
    """The more load, the longer a queue remembers: more prompts for the same error."""
    ratios = [_ratio_to_m_d_1(1, load, seed, count) for seed in range(5)]
    assert mean(ratios) == pytest.approx(1, rel=0.03)


@pytest.mark.parametrize("policy", ["least_loaded", "prefix_aware"])
def test_a_full_prefill_replica_gets_no_prompt(policy: PolicyName) -> None:
    """The one with less work has no free place, so the last prompt waits at the other."""
    deployment = Deployment(
        ReplicaPool(2, PLAIN, LARGE, SchedulingRules(budget=LARGE)),
        ReplicaPool(1, PLAIN, LARGE),
        Handoff(concurrency=2),
        policy,
    )
    sample = WorkloadSample([50_000, 10, 10, 10], [1] * 4, [0.0, 1e-3, 1e-3, 1e-3])
    ttft = simulate(deployment, sample, 1.0).ttft
    assert max(ttft[1:3]) < 0.2 and ttft[3] > ttft[0] > 5


def _deployments() -> dict[str, Deployment]:
    small = 9_000
    large = 60_000
    tight = SchedulingRules(budget=512, sequences=24)
    link = Handoff(LINKS["eth-10"], 200_000, 40)
    alone = Handoff(LINKS["eth-10"], 200_000, 40, False)
    return {
        "P:D": Deployment(ReplicaPool(2, PLAIN, large), ReplicaPool(1, PLAIN, large), link),
        "P:D with little KV": Deployment(
            ReplicaPool(2, PLAIN, small, tight), ReplicaPool(2, PLAIN, small, tight), link
        ),
        "P:D without overlap": Deployment(
            ReplicaPool(1, PLAIN, small), ReplicaPool(2, PLAIN, small), alone
        ),
        "DistServe": Deployment(
            ReplicaPool(1, PLAIN, large), ReplicaPool(1, PLAIN, large), alone, distserve=True
        ),
        "pipelines": Deployment(
            ReplicaPool(1, _linear(2), large), ReplicaPool(1, _linear(3), small), link
        ),
        "colocated": Deployment(ReplicaPool(2, PLAIN, large, SchedulingRules(budget=512))),
        "colocated with little KV": Deployment(ReplicaPool(2, PLAIN, small, tight)),
        "prefill first": Deployment(
            ReplicaPool(2, PLAIN, small, SchedulingRules(budget=2048, chunked=False))
        ),
        "whole prompts at D": Deployment(
            ReplicaPool(1, PLAIN, small, tight),
            ReplicaPool(2, PLAIN, small, tight),
            Handoff(LINKS["eth-10"], 200_000, 40, concurrency=2),
            min_prompt_bytes=4 * 100,
            spill=True,
        ),
    }


@pytest.mark.parametrize("name", _deployments())
@pytest.mark.parametrize("rate", [1.0, 6.0, 40.0])
def test_leaps_change_nothing(name: str, rate: float) -> None:
    deployment = _deployments()[name]
    sample = SHAREGPT.sample(120, 3, Arrivals("poisson"))
    leaps = simulate(deployment, sample, rate, with_gaps=True)
    steps = simulate(_slow(deployment), sample, rate, with_gaps=True)
    for field in ("ttft", "tpot", "itl", "latency", "transfer"):
        assert getattr(leaps, field) == pytest.approx(getattr(steps, field), rel=1e-9, abs=1e-12)
    assert leaps.preemptions == steps.preemptions
    assert min(leaps.latency) > 0
    assert all(t >= f for t, f in zip(leaps.latency, leaps.ttft, strict=True))


def _slow(deployment: Deployment) -> Deployment:
    def side(s: ReplicaPool) -> ReplicaPool:
        rules = s.rules
        return ReplicaPool(
            s.count,
            s.latency,
            s.kv,
            SchedulingRules(rules.budget, rules.sequences, rules.chunked, False),
        )

    decode = side(deployment.decode) if deployment.decode else None
    return Deployment(
        side(deployment.prefill),
        decode,
        deployment.handoff,
        deployment.policy,
        deployment.distserve,
        min_prompt_bytes=deployment.min_prompt_bytes,
        spill=deployment.spill,
    )


@pytest.mark.parametrize("name", _deployments())
@pytest.mark.parametrize("rate", [6.0, 40.0])
def test_the_longest_gap_is_that_of_the_tokens(
    name: str, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tests the gaps with times of tokens that are noted one step at a time."""
    sample = SHAREGPT.sample(120, 3, Arrivals("poisson"))
    times: list[list[float]] = [[] for _ in range(len(sample))]
    complete = Replica.complete_batch
    prefilled = Simulation.on_prefill_complete

    def watched_batch(replica: Replica, now: float, batch: Batch) -> None:
        for _, r in batch.group.ends:
            times[r].append(now)
        complete(replica, now, batch)

    def watched_prefill(run: Simulation, replica: Replica, now: float, r: int) -> None:
        distserve = run._deployment.distserve
        if not run._decodes or run._decode_of[r] is replica or distserve:
            times[r].append(now)
        prefilled(run, replica, now, r)

    monkeypatch.setattr(Replica, "complete_batch", watched_batch)
    monkeypatch.setattr(Simulation, "on_prefill_complete", watched_prefill)
    found = simulate(_slow(_deployments()[name]), sample, rate, with_gaps=True)
    gaps = [max((b - a for a, b in pairwise(tokens)), default=0.0) for tokens in times]
    assert found.itl == pytest.approx(gaps, rel=1e-9, abs=1e-12)


def test_gaps_are_recorded_only_where_they_are_wanted() -> None:
    sample = SHAREGPT.sample(50, 0, Arrivals("poisson"))
    for deployment in _deployments().values():
        plain = simulate(deployment, sample, 6.0)
        recorded = simulate(deployment, sample, 6.0, with_gaps=True)
        assert plain.itl is None and recorded.itl is not None
        assert plain.ttft == recorded.ttft and plain.tpot == recorded.tpot


def test_a_stall_misses_itl_and_not_tpot() -> None:
    """A whole prompt of 1.46 s runs between two tokens of an answer of ten."""
    sample = WorkloadSample([100, 8000], [10, 2], [0.0, 0.05])
    rules = SchedulingRules(budget=512, chunked=False)
    deployment = Deployment(ReplicaPool(1, PLAIN, 200_000, rules))
    found = simulate(deployment, sample, 1.0, with_gaps=True)
    assert found.itl is not None and found.tpot[0] < 0.2
    stall = unloaded_prefill(PLAIN, 8000)
    assert stall < found.itl[0] < stall + 0.03 and found.itl[1] < 0.03
    loose = Objective(10.0, 0.2)
    strict = Objective(10.0, 0.2, itl=1.0)
    assert found.attainment(loose) == 1.0 and found.attainment(strict) == 0.5
    assert not simulate(deployment, sample, 1.0, loose).stopped
    assert simulate(deployment, sample, 1.0, strict).stopped
    assert "ITL 1 s" in strict.words() and strict.flags() == "--ttft 10, --tpot 0.2 and --itl 1"


def test_little_kv_preempts_and_still_finishes() -> None:
    result = simulate(
        _deployments()["P:D with little KV"], SHAREGPT.sample(200, 0, Arrivals("poisson")), 20.0
    )
    assert result.preemptions > 0 and min(result.latency) > 0


def test_the_same_seed_gives_the_same_result() -> None:
    sample = SHAREGPT.sample(100, 0, Arrivals("gamma", 2.0))
    for policy in POLICY_NAMES:
        deployment = Deployment(
            ReplicaPool(3, PLAIN, 60_000), ReplicaPool(2, PLAIN, 60_000), policy=policy
        )
        assert simulate(deployment, sample, 20.0) == simulate(deployment, sample, 20.0)


@pytest.mark.parametrize(
    ("link", "least", "most"), [("eth-25", 0.386, 0.39), ("nvlink", 0.004, 0.005)]
)
def test_what_a_link_adds_to_a_request(link: str, least: float, most: float) -> None:
    """OPT-66B, 512 tokens: 1.208e9 bytes, after the prefill as DistServe moves them."""
    latency = distserve.latency("distserve-a100", "opt-66b", 4, 1)
    sample = WorkloadSample([512], [64], [0.0])

    def time(handoff: Handoff) -> float:
        side = ReplicaPool(1, latency, 78_496, SchedulingRules(LARGE, LARGE))
        return simulate(Deployment(side, side, handoff, distserve=True), sample, 1.0).latency[0]

    added = time(Handoff(LINKS[link], 2_359_296, 64, overlap=False)) - time(Handoff(overlap=False))
    assert least <= added <= most


def test_overlap_hides_the_transfer_behind_the_prefill() -> None:
    """A transfer that takes half as long as the prefill: what is left is the last layer of 40."""
    sample = WorkloadSample([2048], [10], [0.0])
    prefill = unloaded_prefill(PLAIN, 2048)
    handoff = Handoff(LINKS["eth-100"], 0.5 * prefill * LINKS["eth-100"].bandwidth / 2048, 40)
    result = simulate(
        Deployment(ReplicaPool(1, PLAIN, 60_000), ReplicaPool(1, PLAIN, 60_000), handoff),
        sample,
        1.0,
    )
    assert result.transfer[0] == pytest.approx(0.5 * prefill / 40 + LINKS["eth-100"].latency)


def test_a_path_delays_the_first_token_and_occupies_no_engine() -> None:
    """The same arrivals with a path of 10 ms + 1 us/token: the same steps, later answers."""
    count = 200
    sample = WorkloadSample([512] * count, [20] * count, [0.0, *[1.0] * (count - 1)])
    pool = ReplicaPool(1, PLAIN, 60_000)
    rate = 0.9 / unloaded_prefill(PLAIN, 512)
    for decode in (None, pool):
        near = simulate(Deployment(pool, decode), sample, rate)
        far = simulate(Deployment(pool, decode, path=PathDelay(0.01, 1e-6)), sample, rate)
        added = [b - a for a, b in zip(near.ttft, far.ttft, strict=True)]
        assert added == pytest.approx([0.01 + 512e-6] * count)
        assert far.tpot == near.tpot and far.prefill_busy == near.prefill_busy
        assert [b - a for a, b in zip(near.latency, far.latency, strict=True)] == pytest.approx(
            added
        )


def test_a_closed_loop_has_as_many_requests_as_clients() -> None:
    """One client never waits; with two the second prompt waits for the first one's step."""
    sample = WorkloadSample([512] * 6, [10] * 6, [0.0] * 6)
    deployment = Deployment(ReplicaPool(1, PLAIN, 60_000))
    alone = unloaded_prefill(PLAIN, 512)
    one = simulate_closed(deployment, sample, 1)
    assert one.ttft == pytest.approx([alone] * 6) and one.prefill_busy == pytest.approx(1.0)
    two = simulate_closed(deployment, sample, 2)
    assert two.ttft[0] == pytest.approx(alone) and two.ttft[1] > 1.5 * alone
    assert min(two.latency) > 0 and two.prefill_busy == pytest.approx(1.0)


def test_a_path_counts_for_the_objective() -> None:
    sample = WorkloadSample([512], [2], [0.0])
    limit = Objective(1.5 * unloaded_prefill(PLAIN, 512), 1.0)
    pool = ReplicaPool(1, PLAIN, 60_000)
    near = simulate(Deployment(pool), sample, 1.0, limit)
    far = simulate(Deployment(pool, path=PathDelay(limit.ttft)), sample, 1.0, limit)
    assert not near.stopped and far.stopped


def test_shares_of_engine_and_link_are_their_work() -> None:
    """One request: P computes its prompt, the link moves it, D decodes; the rest is delay."""
    sample = WorkloadSample([1000], [11], [0.0])
    link = NetworkLink("test", 1e9, 0.5)
    handoff = Handoff(link, 100_000, overlap=False, notice=0.25)
    pool = ReplicaPool(1, PLAIN, 60_000)
    found = simulate(Deployment(pool, pool, handoff), sample, 1.0)
    whole = found.latency[0]
    prefill = unloaded_prefill(PLAIN, 1000)
    assert found.transfer[0] == pytest.approx(0.1 + 0.5 + 0.25)
    assert found.prefill_busy == pytest.approx(prefill / whole)
    assert found.link_busy == pytest.approx(0.1 / whole)
    assert found.decode_busy == pytest.approx((whole - prefill - found.transfer[0]) / whole)


def test_windows_and_states_are_moved_once() -> None:
    """Moves 100 bytes a token of the full layers, of 3 other layers the window, and the state."""
    window = KvLayers(3, 100.0, 8, 512)
    link = NetworkLink("test", 1e6, 0.0)
    handoff = Handoff(link, 100.0, windows=(window,), state_bytes=5000.0)
    assert handoff.wire_seconds(4096) == pytest.approx((409_600 + 3 * 51_200 + 5000) / 1e6)
    assert handoff.wire_seconds(100) == pytest.approx((10_000 + 3 * 10_000 + 5000) / 1e6)


def test_d_reserves_kv_for_prompts_in_transfer() -> None:
    """D has room for one prompt: the second transfer waits for the first request's end."""
    sample = WorkloadSample([1000, 1000], [100, 100], [0.0, 0.001])
    handoff = Handoff(LINKS["ib-100"], 100_000, 32)
    narrow = Deployment(ReplicaPool(1, PLAIN, 60_000), ReplicaPool(1, PLAIN, 1_500), handoff)
    wide = Deployment(ReplicaPool(1, PLAIN, 60_000), ReplicaPool(1, PLAIN, 60_000), handoff)
    one = simulate(narrow, sample, 1.0)
    two = simulate(wide, sample, 1.0)
    assert one.ttft[1] > one.latency[0] > 1.0 > 2 * two.ttft[1]


def test_a_prompt_that_fits_nowhere_is_refused_and_missed() -> None:
    result = simulate(
        Deployment(ReplicaPool(1, PLAIN, 500)),
        WorkloadSample([1000, 100], [10, 10], [0.0, 1.0]),
        1.0,
    )
    assert result.ttft[0] == -1 and result.ttft[1] > 0
    assert result.attainment(Objective(1, 1, 0.9)) == 0.5


class ComparedChoices(Simulation):
    """Compares each choice of a decode or colocated replica with the one of the proxy's policy."""

    passed_over = 0  # choices that the least load alone would not have made
    turns = 0  # choices among replicas of equal loads

    def __init__(self, deployment: Deployment, sample: WorkloadSample, rate: float) -> None:
        super().__init__(deployment, sample, rate, None, 0)
        self._chosen_by_request: list[Replica | None] = [None] * len(sample)
        self._choose = self._chooser.choose_decode
        self._chooser.choose_decode = self._choose_and_compare  # type: ignore[method-assign]

    def _choose_and_compare(
        self, now: float, replicas: list[Replica], prefixes_of: int | None = None
    ) -> Replica:
        instances = [
            _decode_instance(self, replica, now, self._chosen_by_request) for replica in replicas
        ]
        prefixes = self._requests.prefixes
        cached = {}
        if prefixes and prefixes_of is not None:
            for instance, replica in zip(instances, replicas, strict=True):
                tokens = replica.cached_tokens(prefixes[prefixes_of])
                cached[instance.cache_identity] = BYTES_PER_TOKEN * tokens
        _, best = Policy("prefix_aware").best(instances, RoutingQuery(0), cached)
        chosen = self._choose(now, replicas, prefixes_of)
        assert instances[replicas.index(chosen)] is best
        type(self).passed_over += chosen.load > min(replica.load for replica in replicas)
        loads = sorted(replica.load for replica in replicas)
        type(self).turns += 0 < loads[0] == loads[1]
        return chosen

    def _count_whole(self, r: int, replica: Replica) -> None:
        super()._count_whole(r, replica)
        self._chosen_by_request[r] = replica


def _decode_instance(
    run: Simulation, replica: Replica, now: float, table: list[Replica | None]
) -> Instance:
    """Returns the proxy's view of a decode or colocated replica, by the requests that run there."""
    instance = Instance(f"http://d{replica.number}", "decode")
    running = [r for r, at in enumerate(table) if at is replica and run._finished_at[r] < 0]
    instance.in_flight = len(running)
    instance.context_bytes = BYTES_PER_TOKEN * sum(run._requests.prompts[r] for r in running)
    instance.aggregated_requests = sum(
        run._prefill_of[r] is None and run._requests.first_token_at[r] < 0 for r in running
    )
    instance.kv_cache_usage = replica.held_tokens(now) / replica.kv
    instance.last_choice = replica.last_choice
    return instance


def _mixed_lengths() -> WorkloadSample:
    """Contexts of 50 and 5,000 tokens."""
    prompts = [5_000 if n % 5 == 0 else 50 for n in range(300)]
    return WorkloadSample(prompts, [40] * 300, [0.0] + [1.0] * 299)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_decode_replica_is_chosen_as_the_proxy_does(overlap: bool) -> None:
    """KV caches hold few of the long contexts."""
    pool = ReplicaPool(4, PLAIN, LARGE)
    handoff = Handoff(LINKS["eth-10"], 200_000, 40, overlap)
    deployment = Deployment(pool, ReplicaPool(3, PLAIN, 12_000), handoff)
    ComparedChoices.passed_over = 0
    ComparedChoices(deployment, _mixed_lengths(), 20.0).run()
    assert ComparedChoices.passed_over > 20


def test_a_decode_replica_with_a_prefix_is_chosen_as_the_proxy_does() -> None:
    """Two conversations of 10 blocks, and short prompts of their own, which make loads differ."""
    blocks = [10 if n % 4 == 0 else 1 for n in range(300)]
    firsts = [n // 4 % 2 if n % 4 == 0 else n + 10 for n in range(300)]
    ids = [
        tuple(range(100 * first, 100 * first + count))
        for first, count in zip(firsts, blocks, strict=True)
    ]
    sample = WorkloadSample([512 * n for n in blocks], [40] * 300, [0.0] + [1.0] * 299, ids)
    pool = ReplicaPool(4, PLAIN, LARGE)
    deployment = Deployment(pool, ReplicaPool(3, PLAIN, 40_000), Handoff())
    ComparedChoices.passed_over = 0
    ComparedChoices(deployment, sample, 8.0).run()
    assert ComparedChoices.passed_over > 20


def test_a_colocated_replica_is_chosen_as_the_proxy_does() -> None:
    """The proxy takes it as a decode instance: each request costs, and full ones come last."""
    ComparedChoices.passed_over = ComparedChoices.turns = 0
    deployment = Deployment(ReplicaPool(3, PLAIN, 12_000))
    ComparedChoices(deployment, _mixed_lengths(), 20.0).run()
    assert ComparedChoices.passed_over > 20
    equal = WorkloadSample([500] * 300, [40] * 300, [0.0] + [1.0] * 299)
    ComparedChoices(Deployment(ReplicaPool(3, PLAIN, LARGE)), equal, 20.0).run()
    assert ComparedChoices.turns > 20


@pytest.mark.parametrize("policy", ["round_robin", "power_of_two"])
def test_decode_replicas_are_chosen_by_the_other_policies_too(policy: PolicyName) -> None:
    """Lengths differ: by load alone no replica would get just its third of the requests."""
    sample = SHAREGPT.sample(300, 1, Arrivals("poisson"))
    pool = ReplicaPool(3, PLAIN, LARGE)
    simulation = Simulation(Deployment(pool, pool, policy=policy), sample, 20.0, None, 0)
    simulation.run()
    counts = [simulation._decode_of.count(decode) for decode in simulation._decodes]
    assert counts == [100] * 3 if policy == "round_robin" else min(counts) > 60


class KnowingPolicy(Policy):
    """Knows the caches, as the simulated proxy does."""

    def __init__(self, cached: CachedBytes) -> None:
        super().__init__("prefix_aware")
        self.known = cached

    def cached_bytes(self, candidates: Iterable[Instance], query: RoutingQuery) -> CachedBytes:
        """Returns the bytes of the prompt at each instance."""
        return self.known


class ComparedRoutes(Simulation):
    """Compares the route of each request at its arrival with the proxy's."""

    def __init__(self, deployment: Deployment, sample: WorkloadSample, rate: float) -> None:
        super().__init__(deployment, sample, rate, None, 0)
        self.routes: list[str] = []
        self.spilled_by_prefix = 0  # to another D than by load alone

    def _decode_of_whole(self, now: float, r: int) -> Replica | None:
        prompt_bytes = BYTES_PER_TOKEN * self._requests.prompts[r]
        route, expected = self._of_proxy(now, r, RoutingQuery(prompt_bytes))
        self.routes.append(route)
        found = super()._decode_of_whole(now, r)
        assert (found.number if found else None) == expected
        if found and route == "spill":
            idle = [decode for decode in self._decodes if not decode.aggregated_requests]
            self.spilled_by_prefix += self._chooser.choose_decode(now, idle) is not found
        return found

    def _of_proxy(self, now: float, r: int, query: RoutingQuery) -> tuple[str, int | None]:
        """Returns the proxy's route, in the order of `AttemptPlans.first_plan`."""
        deployment = self._deployment
        fleet = Fleet()
        for p in self._prefills:
            instance = Instance(f"http://p{p.number}", "prefill")
            instance.prefill_legs = p.active_legs
            fleet.instances.append(instance)
        fleet.instances += [
            _decode_instance(self, decode, now, self._decode_of) for decode in self._decodes
        ]
        for instance in fleet.instances:
            worker = WorkerInfo(f"{instance.url}.0", "tcp://a:1", "tcp://a:2")
            instance.on_probe_answered("m", EngineInfo(instance.url, "both", [worker], {}))
        cached = {}
        if prefixes := self._requests.prefixes:
            replicas = (*self._prefills, *self._decodes)
            for instance, replica in zip(fleet.instances, replicas, strict=True):
                tokens = replica.cached_tokens(prefixes[r])
                cached[instance.cache_identity] = BYTES_PER_TOKEN * tokens
        policy = KnowingPolicy(cached)
        limit = deployment.handoff.concurrency
        decode: Instance | None = None
        route = "pair"
        if prefers_aggregated(fleet, policy, query, deployment.min_prompt_bytes):
            route = "short"
            decode = choose_decode(fleet, policy, now, query=query)
        elif deployment.spill and choose(fleet, policy, limit, query, now) == "busy":
            decode = choose_spill(fleet, policy, now, query)
            route = "spill" if decode else "wait"
        return route, int(decode.url.removeprefix("http://d")) if decode else None


@pytest.mark.parametrize("flags", [(0, False), (4 * 200, False), (0, True), (4 * 200, True)])
def test_whole_prompts_go_to_d_as_in_the_proxy(flags: tuple[int, bool]) -> None:
    """Prompts of 199, 200 and 3,000 tokens, more than two P can compute at their peaks."""
    prompts = [(199, 200, 3_000)[n % 3] for n in range(300)]
    sample = WorkloadSample(prompts, [20] * 300, [0.0] + [1.0] * 299)
    pool = ReplicaPool(2, PLAIN, LARGE, SchedulingRules(budget=2048))
    deployment = Deployment(
        pool,
        pool,
        Handoff(LINKS["eth-10"], 200_000, 40, concurrency=2),
        min_prompt_bytes=flags[0],
        spill=flags[1],
    )
    run = ComparedRoutes(deployment, sample, 18.0)
    result = run.run()
    counts = {route: run.routes.count(route) for route in ("short", "spill", "wait", "pair")}
    assert counts["short"] == (100 if flags[0] else 0), "200 tokens are not below 800 bytes"
    assert (counts["spill"] > 10) == (counts["wait"] > 10) == flags[1]
    assert result.aggregated == (counts["short"] + counts["spill"]) / 300
    assert min(result.latency) > 0


def test_a_prompt_is_spilled_to_the_d_that_has_its_prefix_as_in_the_proxy() -> None:
    """Turns of 12 conversations of 20 blocks, and short prompts of their own between them."""
    random = Random(1)
    ids = []
    for n in range(0, 300, 2):
        conversation = 100 * random.randrange(12)
        ids += [tuple(range(conversation, conversation + 20)), (10_000 + n,)]
    prompts = [512 * len(blocks) for blocks in ids]
    sample = WorkloadSample(prompts, [40] * 300, [0.0] + [1.0] * 299, ids)
    prefill = ReplicaPool(1, PLAIN, 22_000, SchedulingRules(budget=2048))
    decode = ReplicaPool(4, PLAIN, 60_000)
    deployment = Deployment(prefill, decode, Handoff(concurrency=2), spill=True)
    run = ComparedRoutes(deployment, sample, 4.0)
    run.run()
    assert run.routes.count("spill") > 50 and run.spilled_by_prefix > 10


def test_a_whole_prompt_at_d_is_charged_as_on_a_colocated_replica() -> None:
    sample = SHAREGPT.sample(150, 2, Arrivals("poisson"))
    pool = ReplicaPool(1, PLAIN, 60_000, SchedulingRules(budget=512))
    together = simulate(Deployment(pool), sample, 4.0, with_gaps=True)
    whole = simulate(
        Deployment(pool, pool, Handoff(LINKS["eth-10"], 200_000, 40), min_prompt_bytes=LARGE),
        sample,
        4.0,
        with_gaps=True,
    )
    assert (whole.ttft, whole.tpot, whole.itl) == (together.ttft, together.tpot, together.itl)
    assert whole.decode_busy == together.prefill_busy and whole.prefill_busy == 0
    assert whole.aggregated == 1 and together.aggregated == 0 and set(whole.transfer) == {0.0}


def test_kv_behind_a_whole_prompt_is_reserved_in_the_same_step() -> None:
    """D begins the prompt after its running step, and vLLM's scheduler goes on in its queue."""
    latency = LinearLatency(1, (0.0, 1e-3, 0.0), (0.5, 0.0, 0.0), (0.5, 0.0, 0.0))
    pool = ReplicaPool(1, latency, LARGE, SchedulingRules(budget=4096))
    deployment = Deployment(pool, pool, Handoff(overlap=True), min_prompt_bytes=4 * 3_000)
    # An answer of D, a whole prompt in its first step, and one that P computes in 3 s meanwhile.
    sample = WorkloadSample([4_000, 2_900, 3_000], [30, 2, 2], [0.0, 4.1, 0.1])
    run = Simulation(deployment, sample, 1.0, None, 0)
    run.run()
    assert run._reserved_at[2] == pytest.approx(4.5)


def test_shared_prefixes_save_prefill() -> None:
    prompts = [2048] * 40
    ids: list[tuple[int, ...]] = [(1, 2, 3, 100 + n) for n in range(40)]
    gaps = [0.0, *[1.0] * 39]
    deployment = Deployment(ReplicaPool(1, PLAIN, 60_000), ReplicaPool(1, PLAIN, 60_000))
    cold = simulate(deployment, WorkloadSample(prompts, [10] * 40, gaps), 0.5)
    warm = simulate(deployment, WorkloadSample(prompts, [10] * 40, gaps, ids), 0.5)
    assert warm.ttft[0] == cold.ttft[0]
    assert warm.ttft[1] < 0.5 * cold.ttft[1]


def test_prefix_aware_finds_the_instance_that_has_it() -> None:
    """Two conversations alternate in pairs: round robin mixes them, prefix awareness does not."""
    ids = [tuple(100 * (n % 4 // 2) + block for block in range(20)) for n in range(40)]
    sample = WorkloadSample([20 * 512] * 40, [4] * 40, [0.0, *[1.0] * 39], ids)

    def mean(policy: PolicyName) -> float:
        side = ReplicaPool(2, PLAIN, 13_000)
        result = simulate(
            Deployment(side, ReplicaPool(1, PLAIN, 60_000), policy=policy), sample, 0.1
        )
        return sum(result.ttft) / 40

    assert mean("prefix_aware") < 0.6 * mean("round_robin")


def test_chunks_let_decodes_go_on_and_prefill_first_does_not() -> None:
    """A long prompt arrives during a short answer.

    With chunks each token of the answer waits for a chunk. Else one token waits for the prompt.
    """
    sample = WorkloadSample([100, 8000], [10, 2], [0.0, 0.05])
    chunked = simulate(
        Deployment(ReplicaPool(1, PLAIN, 200_000, SchedulingRules(budget=512))), sample, 1.0
    )
    first = simulate(
        Deployment(ReplicaPool(1, PLAIN, 200_000, SchedulingRules(budget=512, chunked=False))),
        sample,
        1.0,
    )
    assert chunked.tpot[0] < 0.6 * first.tpot[0]
    assert chunked.ttft[1] > first.ttft[1]


def test_stopping_early_agrees_with_the_whole_simulation() -> None:
    sample = SHAREGPT.sample(200, 0, Arrivals("poisson"))
    deployment = _deployments()["P:D"]
    for joint, itl in product((True, False), (None, 0.013)):
        objective = Objective(0.3, 0.02, 0.9, joint, itl=itl)
        for rate in (1.0, 3.0, 6.0, 9.0, 12.0, 20.0, 40.0):
            whole = simulate(deployment, sample, rate, with_gaps=True)
            stopped = simulate(deployment, sample, rate, objective).stopped
            assert stopped == (whole.attainment(objective) < 0.9)


def test_a_quantile_counts_those_who_never_came() -> None:
    assert quantile([3.0, 1.0, 2.0, -1.0], 0.5) == 2.0
    assert quantile([3.0, 1.0, 2.0, -1.0], 0.9) == float("inf")
