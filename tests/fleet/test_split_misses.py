"""Misses that another split would have had."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from vllm_disagg.fleet.split_misses import InstanceLimits, Moment, SplitMisses

LIMITS = InstanceLimits(ttft=2.0, tpot=0.02)


class Steps(msgspec.Struct, frozen=True):
    """Scripted step times: a constant, and seconds of each sequence."""

    base: float = 0.01
    sequence: float = 0.001

    def decode_step(self, sequences: float, contexts: float) -> float:
        return self.base + self.sequence * sequences


def moment(at: float, **load: Any) -> Moment:
    calm = {"prefills": 2, "decodes": 2, "prefill_work": 0.5, "waiting_work": 0.0}
    return Moment(at=at, **{"sequences": 4.0, "contexts": 0.0, **calm, **load})


def misses(*moments: Moment) -> SplitMisses:
    found = SplitMisses()
    for one in moments:
        found.add(one)
    return found


def test_half_of_the_requests_at_an_objective_miss_it() -> None:
    # Two instances: 4 s of work wait, and a step of 10 sequences takes 0.02 s.
    late = misses(moment(0, waiting_work=4.0))
    slow = misses(moment(0, sequences=20.0))
    assert late.share(Steps(), LIMITS, 2, 2) == pytest.approx(0.5, abs=0.01)
    assert slow.share(Steps(), LIMITS, 2, 2) == pytest.approx(0.5, abs=0.01)
    both = misses(moment(0, waiting_work=4.0, sequences=20.0))
    assert both.share(Steps(), LIMITS, 2, 2) == pytest.approx(0.75, abs=0.01)


def test_a_hopeless_load_misses_and_an_empty_one_does_not() -> None:
    nothing = misses(moment(0, prefill_work=0.0, sequences=0.0))
    assert nothing.share(Steps(0.0, 0.0), LIMITS, 2, 2) == 0.0
    assert misses(moment(0, waiting_work=1e300)).share(Steps(), LIMITS, 2, 2) == 1.0


def test_old_moments_are_forgotten() -> None:
    heavy = [moment(at, waiting_work=99.0) for at in range(600)]
    calm = [moment(600 + at) for at in range(61)]
    assert misses(*heavy, *calm).share(Steps(), LIMITS, 2, 2) < 0.02
    assert 0.05 < misses(*heavy, *calm[:50]).share(Steps(), LIMITS, 2, 2) < 0.2


def test_a_queue_follows_the_number_of_instances() -> None:
    # 3 s of work a second for two instances: one more would have had no queue.
    grown = misses(*(moment(at, prefill_work=3.0, waiting_work=at) for at in range(30)))
    assert grown.share(Steps(), LIMITS, 2, 2) > 0.9
    assert grown.share(Steps(), LIMITS, 3, 2) < 0.02
    # One instance is too few for 1.2, two are enough.
    calm = misses(*(moment(at, prefill_work=1.2) for at in range(60)))
    assert calm.share(Steps(), LIMITS, 2, 2) < 0.02
    assert calm.share(Steps(), LIMITS, 1, 2) == 1.0


def test_a_queue_of_too_few_instances_is_soon_gone() -> None:
    # One instance would have had a queue of 21 s of the first moments that count.
    heavy = [moment(at, prefill_work=1.7) for at in range(60)]
    calm = [moment(60 + at, prefill_work=0.1) for at in range(30)]
    found = misses(*heavy, *calm).share(Steps(), LIMITS, 1, 2)
    # All of the heavy moments, and about 4 s of the others.
    assert 0.15 < found < 0.3


def test_shorter_steps_hold_fewer_sequences() -> None:
    # One instance's step of 60 sequences takes 0.07 s. Three begin as many answers a second as it
    # ends: each has 4 in 0.014 s.
    piled = misses(moment(0, decodes=1, sequences=60.0))
    assert piled.share(Steps(), LIMITS, 2, 1) > 0.99
    assert piled.share(Steps(), LIMITS, 2, 3) < 0.15


def test_a_cache_counts_where_its_size_is_known() -> None:
    full = misses(moment(0, contexts=2000.0))
    assert full.share(Steps(), LIMITS, 2, 2) < 0.05
    assert full.share(Steps(), InstanceLimits(2.0, 0.02, 1000), 2, 2) == pytest.approx(
        0.5, abs=0.02
    )
