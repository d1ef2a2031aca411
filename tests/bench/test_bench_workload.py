"""Tests request schedules: arrivals, shared prefixes, the model's limit."""

from __future__ import annotations

import json
import random
import statistics
from itertools import pairwise
from typing import Any

import pytest

from vllm_disagg.bench import workload
from vllm_disagg.bench.workload import RequestSchedule, TraceRequest
from vllm_disagg.workloads.lengths import NAMED_DISTRIBUTIONS
from vllm_disagg.workloads.traces import Trace


def test_poisson_arrivals_are_the_same_at_every_rate_but_for_the_scale() -> None:
    asked = workload.fixed(10, 2, 101)
    slow, fast = ([r.arrival for r in asked.at_rate(rate, seed=1).requests] for rate in (1.0, 4.0))
    assert slow[0] == 0 and slow[-1] == pytest.approx(100) and slow == sorted(slow)
    assert fast == pytest.approx([time / 4 for time in slow])
    assert slow != [r.arrival for r in asked.at_rate(1.0, seed=2).requests]
    gaps = [b - a for a, b in pairwise(slow)]
    assert 0.7 < statistics.pstdev(gaps) / statistics.mean(gaps) < 1.3


def test_arrivals_and_lengths_of_a_seed_are_drawn_from_different_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The gaps before the first requests would follow from the length of the first one."""
    seeds: list[object] = []

    class Noted(random.Random):
        def __init__(self, seed: Any) -> None:
            seeds.append(seed)
            super().__init__(seed)

    monkeypatch.setattr(random, "Random", Noted)
    workload.drawn(NAMED_DISTRIBUTIONS["sharegpt-like"], 10, seed=3).at_rate(1.0, seed=3)
    assert len(set(seeds)) == len(seeds) == 2


def test_a_traces_own_arrivals_are_only_scaled() -> None:
    asked = RequestSchedule(tuple(TraceRequest(time, 1, 1) for time in (0.0, 1.0, 9.0)))
    assert [r.arrival for r in asked.at_rate(2.0, seed=None).requests] == pytest.approx(
        [0, 1 / 9, 1]
    )


def test_every_prompt_is_whole_and_shares_only_what_its_trace_says() -> None:
    asked = RequestSchedule(
        (
            TraceRequest(0, 600, 5, (7, 8)),
            TraceRequest(1, 600, 5, (7, 9)),
            TraceRequest(2, 600, 5),
            TraceRequest(3, 90, 5),
        ),
        512,
    )
    lines = [json.loads(line) for line in asked.lines()]
    assert [len(line["hash_ids"]) for line in lines] == [2, 2, 2, 1]
    assert len({i for line in lines for i in line["hash_ids"]}) == 6
    assert [line["input_length"] for line in lines] == [600, 600, 600, 90]


def test_what_is_longer_than_the_model_takes_is_left_out() -> None:
    asked = RequestSchedule((TraceRequest(0, 90, 10), TraceRequest(0, 90, 11)))
    assert asked.fitting(100).requests == asked.requests[:1]
    assert asked.fitting(None) == asked


def test_sharegpt_like_lengths_have_sharegpts_means() -> None:
    requests = workload.drawn(NAMED_DISTRIBUTIONS["sharegpt-like"], 20_000, seed=3).requests
    assert statistics.mean(r.prompt for r in requests) == pytest.approx(755.5, rel=0.02)
    assert statistics.mean(r.answer for r in requests) == pytest.approx(200.3, rel=0.03)
    assert max(r.prompt + r.answer for r in requests) < 2048
    assert workload.drawn(NAMED_DISTRIBUTIONS["sharegpt-like"], 5, seed=3).requests == requests[:5]


def test_a_trace_without_hash_ids_has_prompts_of_one_piece() -> None:
    assert workload.from_trace(Trace((TraceRequest(0, 2000, 5),))).block > 2000
    assert workload.from_trace(Trace((TraceRequest(0, 20, 5, (1, 2)),), 16)).block == 16
