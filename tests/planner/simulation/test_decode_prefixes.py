"""Prefixes that decode replicas keep: not sent to them, and read back by prefill replicas."""

from __future__ import annotations

from itertools import count

import msgspec
import pytest

from vllm_disagg.planner.cost.hardware import NetworkLink
from vllm_disagg.planner.cost.latency import LinearLatency, unloaded_decode, unloaded_prefill
from vllm_disagg.planner.cost.sizes import KvLayers
from vllm_disagg.planner.simulation.deployment import Deployment, Handoff, ReplicaPool
from vllm_disagg.planner.simulation.simulator import LOOKUP_SECONDS, Simulation
from vllm_disagg.planner.simulation.workload import WorkloadSample
from vllm_disagg.protocol.prefill_leg import REUSE_LOOKUP_SECONDS

BLOCK = 512
LATENCY = LinearLatency(1, (0.02, 1e-4, 1e-8), (0.01, 1e-6, 1e-4), (0.01, 1e-6, 1e-4))
EVEN_STEPS = LinearLatency(1, (0.02, 1e-4, 1e-8), (1 / 64, 0.0, 0.0), (1 / 64, 0.0, 0.0))
POOL = ReplicaPool(1, LATENCY, 60_000)
HANDOFF = Handoff(NetworkLink("test", 1e9, 0.002), 100_000, 40, notice=0.003)
SPLIT = Deployment(POOL, POOL, HANDOFF)
ONE_WAY = msgspec.structs.replace(SPLIT, policy="least_loaded")


def _run(deployment: Deployment, sample: WorkloadSample) -> Simulation:
    run = Simulation(deployment, sample, 1.0, None, 0)
    run.run()
    return run


def _ids(blocks: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + blocks))


def _turns(gap: float = 90.0) -> WorkloadSample:
    """A prompt of 2 blocks with an answer to the end of the 4th, and the next turn of 6 blocks."""
    kept = [_ids(4), _ids(6)]
    return WorkloadSample([1024, 3072], [1025, 2], [0.0, gap], [_ids(2), _ids(6)], kept)


@pytest.mark.parametrize("blocks", [1, 4, 7])
def test_bytes_fall_by_the_share_of_the_prompt_that_d_has(blocks: int) -> None:
    """D has the first blocks of a prompt of eight."""
    prompts = [blocks * BLOCK, 8 * BLOCK]
    ids = [_ids(blocks), _ids(8)]
    new = _run(ONE_WAY, WorkloadSample(prompts, [2, 2], [0.0, 9.0]))
    known = _run(ONE_WAY, WorkloadSample(prompts, [2, 2], [0.0, 9.0], ids))
    whole = HANDOFF.wire_seconds(8 * BLOCK)
    assert new._link_busy == pytest.approx(HANDOFF.wire_seconds(blocks * BLOCK) + whole)
    assert new._link_busy - known._link_busy == pytest.approx(whole * blocks / 8)
    assert known._result().at_decode == pytest.approx(blocks / (8 + blocks))
    assert known._result().read_back == known._back_busy == 0


def test_d_has_the_prompt_of_a_request_that_it_answers() -> None:
    sample = WorkloadSample([2048] * 2, [500, 2], [0.0, 2.0], [_ids(4), _ids(4)])
    run = _run(ONE_WAY, sample)
    assert run._arrivals[1] < run._finished_at[0]
    assert run._requests.cached_at_decode == [0, 2047]
    assert run._link_busy == pytest.approx(HANDOFF.wire_seconds(2049))


def test_a_spilled_prompt_is_computed_from_what_d_has_of_it() -> None:
    """P has one place, which a long prompt takes; D received the first two blocks before."""
    sample = WorkloadSample(
        [1024, 40_000, 3072, 4096],
        [2] * 4,
        [0.0, 9.0, 0.001, 90.0],
        [_ids(2), _ids(78, 100), _ids(6), _ids(8)],
    )
    handoff = msgspec.structs.replace(HANDOFF, concurrency=1)
    run = _run(msgspec.structs.replace(SPLIT, handoff=handoff, spill=True), sample)
    result = run._result()
    assert result.aggregated == 1 / 4
    rest = LATENCY.mixed(2048, 2048 * (2 * 1024 + 2048), 0, 0, True)
    assert run._requests.first_token_at[2] - run._arrivals[2] == pytest.approx(rest)
    # P read back for the last one what D had computed; its first two blocks were its own.
    assert run._requests.cached_at_decode[3] == 3072 and run._read_back == [0, 0, 0, 2048]


def test_d_keeps_its_answers() -> None:
    """P has the first prompt only, and sends what D lacks behind the first answer."""
    run = _run(ONE_WAY, _turns())
    assert run._link_busy == pytest.approx(HANDOFF.wire_seconds(1024) + HANDOFF.wire_seconds(1024))
    rest = LATENCY.mixed(2048, 2048 * (2 * 1024 + 2048), 0, 0, True)
    assert run._prefills[0].busy == pytest.approx(unloaded_prefill(LATENCY, 1024) + rest)


def test_a_colocated_replica_keeps_its_answers_too() -> None:
    run = _run(Deployment(POOL), _turns())
    rest = LATENCY.mixed(1024, 1024 * (2 * 2048 + 1024), 0, 0, True)
    first_token = run._requests.first_token_at[1]
    assert first_token - run._arrivals[1] == pytest.approx(rest)


def test_p_reads_back_what_d_has_more() -> None:
    """Engines are busy with their steps, the link with bytes in each direction; the rest delays."""
    run = _run(SPLIT, _turns())
    wire = HANDOFF.wire_seconds(1024)
    delay = HANDOFF.link.latency + HANDOFF.notice
    rest = LATENCY.mixed(1024, 1024 * (2 * 2048 + 1024), 0, 0, True)
    assert run._read_back == [0, 1024] and run._requests.cached_at_decode == [0, 2048]
    assert run._back_busy == pytest.approx(wire)
    assert run._link_busy == pytest.approx(2 * wire)
    assert run._prefills[0].busy == pytest.approx(unloaded_prefill(LATENCY, 1024) + rest)
    last_layer = wire / HANDOFF.layers
    whole = wire + delay + rest + last_layer + delay + unloaded_decode(LATENCY, 3072)
    result = run._result()
    assert result.ttft[1] == pytest.approx(whole)
    assert (result.at_decode, result.read_back) == (2048 / 4096, 1024 / 4096)
    seconds = max(run._finished_at)
    assert result.back_busy == pytest.approx(wire / seconds)
    assert result.link_busy == pytest.approx(2 * wire / seconds)


def test_both_directions_of_a_link_are_apart_and_one_sends_one_prompt_at_a_time() -> None:
    run = _run(SPLIT, _turns())
    p, d = run._prefills[0], run._decodes[0]
    assert run._occupy_link(200.0, 5.0, p, d) == 200.0
    assert run._occupy_link(200.0, 5.0, d, p) == 200.0
    assert run._occupy_link(201.0, 5.0, p, d) == 205.0
    assert run._occupy_link(201.0, 5.0, d, p) == 205.0


def _beside_an_answer(latency: LinearLatency, first_answer: float, kv: int = 60_000) -> Simulation:
    """Runs the two turns; the second comes 45 s after a prompt whose answer D still computes.

    `first_answer`: seconds until that prompt comes.
    """
    turns = _turns()
    sample = WorkloadSample(
        [turns.prompts[0], 1000, turns.prompts[1]],
        [turns.outputs[0], 3000, turns.outputs[1]],
        [0.0, first_answer, 45.0],
        [_ids(2), _ids(2, 100), _ids(6)],
        [_ids(4), _ids(2, 100), _ids(6)],
    )
    decode = ReplicaPool(1, latency, kv)
    return _run(msgspec.structs.replace(SPLIT, decode=decode), sample)


def test_a_lookup_ends_with_the_step_of_d_behind_the_running_one() -> None:
    run = _beside_an_answer(EVEN_STEPS, 45.0)
    step = 1 / 64
    began = run._requests.first_token_at[1] - step
    answered = next(end + step for n in count() if (end := began + n * step) >= run._arrivals[2])
    read = HANDOFF.wire_seconds(1024) + HANDOFF.link.latency + HANDOFF.notice
    assert run._read_back[2] == 1024
    assert run._requests.prefill_started_at[2] == pytest.approx(answered + read)


@pytest.mark.parametrize(
    ("step", "kv"), [pytest.param(1 / 4, 60_000, id="slow"), pytest.param(1 / 64, 6_000, id="full")]
)
def test_p_computes_when_a_lookup_takes_too_long(step: float, kv: int) -> None:
    """D takes long steps, or has no room for the prompt while it answers another request."""
    latency = LinearLatency(1, LATENCY.prefill, (step, 0.0, 0.0), (step, 0.0, 0.0))
    run = _beside_an_answer(latency, 1100 * step, kv)
    assert run._finished_at[0] < run._arrivals[1] and run._finished_at[1] > run._arrivals[2]
    assert run._requests.prefill_started_at[2] == pytest.approx(run._arrivals[2] + 0.25)
    assert run._read_back[2] == 0 and run._back_busy == 0


def test_the_limit_of_a_lookup_is_that_of_the_protocol() -> None:
    assert LOOKUP_SECONDS == REUSE_LOOKUP_SECONDS


WINDOW = KvLayers(3, 100.0, 8, 512)


@pytest.mark.parametrize(
    "change",
    [
        {"policy": "least_loaded"},
        {"handoff": msgspec.structs.replace(HANDOFF, overlap=False)},
        {"handoff": msgspec.structs.replace(HANDOFF, windows=(WINDOW,))},
        {"handoff": msgspec.structs.replace(HANDOFF, state_bytes=9.0)},
    ],
)
def test_p_reads_nothing_back_where_the_connector_does_not(change: dict[str, object]) -> None:
    run = _run(msgspec.structs.replace(SPLIT, **change), _turns())
    assert run._read_back == [0, 0] and run._back_busy == 0
    with_states = run._deployment.handoff.state_bytes
    # With states engines cache no prefixes: P computes all, and sends all.
    assert run._requests.cached_at_decode == [0, 0 if with_states else 2048]
    prompts = (1024, 3072) if with_states else (1024, 2048)
    first = unloaded_prefill(LATENCY, 1024)
    assert run._prefills[0].busy > first + LATENCY.prefill[1] * prompts[1]


@pytest.mark.parametrize(("block", "read"), [(64, 128), (63, 0)])
def test_a_turn_with_little_beyond_the_last_prompt_is_not_looked_up(block: int, read: int) -> None:
    """The proxy asks from 1 KiB on: 256 tokens, here two blocks of answer and two of new text."""
    prompts = [2 * block, 6 * block]
    kept = [_ids(4), _ids(6)]
    ids = [_ids(2), _ids(6)]
    sample = WorkloadSample(prompts, [2 * block + 1, 2], [0.0, 9.0], ids, kept, block)
    assert _run(SPLIT, sample)._read_back == [0, read]


@pytest.mark.parametrize(("block", "read"), [(128, 256), (127, 0)])
def test_a_prompt_that_p_has_forgotten_is_read_back_if_it_is_long(block: int, read: int) -> None:
    ids = [_ids(2), _ids(20, 100), _ids(6)]
    sample = WorkloadSample(
        [2 * block, 20 * block, 6 * block], [2] * 3, [0.0, 9.0, 9.0], ids, block=block
    )
    prefill = ReplicaPool(1, LATENCY, 20 * block + 2)
    run = _run(msgspec.structs.replace(SPLIT, prefill=prefill), sample)
    assert run._read_back == [0, 0, read]


def test_the_end_of_the_prompt_that_was_used_longest_ago_is_evicted_first() -> None:
    """D has room for one prompt of four blocks and two blocks more."""
    ids = [_ids(4), _ids(4, 10), _ids(4)]
    sample = WorkloadSample([2048] * 3, [2] * 3, [0.0, 9.0, 9.0], ids)
    decode = ReplicaPool(1, LATENCY, 6 * BLOCK + 100)
    run = _run(msgspec.structs.replace(ONE_WAY, decode=decode), sample)
    assert run._requests.cached_at_decode == [0, 0, 2 * BLOCK]


def test_a_later_turn_goes_to_the_d_that_has_it() -> None:
    """Two conversations alternate in pairs, so that turns would mix them."""
    ids = [_ids(20, 100 * (n % 4 // 2)) for n in range(40)]
    sample = WorkloadSample([20 * BLOCK] * 40, [4] * 40, [0.0, *[9.0] * 39], ids)
    decode = ReplicaPool(2, LATENCY, 13_000)
    shares = {}
    for policy in ("prefix_aware", "least_loaded"):
        run = _run(msgspec.structs.replace(SPLIT, decode=decode, policy=policy), sample)
        shares[policy] = run._result().at_decode
    assert shares["prefix_aware"] > 0.9 and shares["least_loaded"] < 0.6
