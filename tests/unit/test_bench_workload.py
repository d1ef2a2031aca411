"""Traces and drawn lengths: what is read, what is refused, and when requests arrive."""

from __future__ import annotations

import json
import statistics
from itertools import pairwise
from pathlib import Path

import pytest

from vllm_disagg.bench import workload
from vllm_disagg.bench.workload import ALIBABA, MOONCAKE, Request, Workload
from vllm_disagg.errors import ConfigError


def write(folder: Path, *lines: str) -> str:
    path = folder / "trace"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def record(**changed: object) -> str:
    fields = {"timestamp": 1500, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]} | changed
    return json.dumps({name: value for name, value in fields.items() if value is not None})


def test_mooncake_is_in_milliseconds_with_512_tokens_to_an_id(tmp_path: Path) -> None:
    read = workload.read(write(tmp_path, record(timestamp=500), record(hash_ids=[7, 9]), ""))
    assert read == Workload((Request(0.0, 600, 5, (7, 8)), Request(1.0, 600, 5, (7, 9))), MOONCAKE)


def test_alibaba_is_in_seconds_with_16_tokens_to_an_id(tmp_path: Path) -> None:
    read = workload.read(write(tmp_path, record(timestamp=3, input_length=30), record(timestamp=4.5, input_length=20)))
    assert read.block == ALIBABA
    assert [request.arrival for request in read.requests] == [0.0, 1.5]


def test_azure_has_dates(tmp_path: Path) -> None:
    lines = ["2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:04.0319600,3180,8"]
    read = workload.read(write(tmp_path, "TIMESTAMP,ContextTokens,GeneratedTokens", *lines))
    assert [(r.prompt, r.answer) for r in read.requests] == [(4808, 10), (3180, 8)]
    assert read.requests[1].arrival == pytest.approx(0.052, abs=1e-6)


def test_lengths_are_sorted_by_arrival(tmp_path: Path) -> None:
    read = workload.read(write(tmp_path, "arrival_s,input_tokens,output_tokens", "2.5,10,1", "1.0,20,2"))
    assert [(r.arrival, r.prompt) for r in read.requests] == [(0.0, 20), (1.5, 10)]


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
LENGTHS = "arrival_s,input_tokens,output_tokens"


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([""], "it is empty"),
        (["when,what", "1,2"], "no format known here"),
        (["[1]"], "no format known here"),
        ([record(), "{]"], "line 2: it is not a JSON object"),
        ([record(input_length=None)], "line 1: input_length is missing"),
        ([record(output_length="many")], 'line 1: output_length is "many"'),
        ([record(timestamp=True)], "line 1: timestamp is true"),
        ([record(input_length=-3, hash_ids=[])], "line 1: input_length is -3: it must be 1 or more"),
        ([record(output_length=0)], "line 1: output_length is 0"),
        ([record(output_length=1.5)], "line 1: output_length is 1.5, which is not a whole number"),
        ([record(timestamp=-1)], "line 1: timestamp is -1"),
        ([record(hash_ids=[-1, 2])], "line 1: hash_ids"),
        ([record(hash_ids=[1, 2, 3])], "line 1: 3 hash_ids for 600 tokens"),
        ([AZURE, "2023-11-16 18:17:03,10"], "line 2: GeneratedTokens is missing"),
        ([AZURE, "yesterday,10,10"], "line 2: TIMESTAMP is yesterday"),
        ([LENGTHS, "1,2,3", "1,-2,3"], "line 3: input_tokens is -2"),
        ([LENGTHS, "1,nan,3"], "line 2: input_tokens is nan"),
        ([LENGTHS, "inf,2,3"], "line 2: arrival_s is inf"),
        ([LENGTHS], "it holds no requests"),
    ],
)
def test_what_is_wrong_with_a_trace_is_said_in_one_line(tmp_path: Path, lines: list[str], words: str) -> None:
    path = write(tmp_path, *lines)
    with pytest.raises(ConfigError) as error:
        workload.read(path)
    assert words in str(error.value) and path in str(error.value) and "\n" not in str(error.value)


def test_a_trace_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--trace nowhere: No such file"):
        workload.read("nowhere")


def test_poisson_arrivals_are_the_same_at_every_rate_but_for_the_scale() -> None:
    asked = workload.fixed(10, 2, 101)
    slow, fast = ([r.arrival for r in asked.at_rate(rate, seed=1).requests] for rate in (1.0, 4.0))
    assert slow[0] == 0 and slow[-1] == pytest.approx(100) and slow == sorted(slow)
    assert fast == pytest.approx([time / 4 for time in slow])
    assert slow != [r.arrival for r in asked.at_rate(1.0, seed=2).requests]
    gaps = [b - a for a, b in pairwise(slow)]
    assert 0.7 < statistics.pstdev(gaps) / statistics.mean(gaps) < 1.3


def test_a_traces_own_arrivals_are_only_scaled() -> None:
    asked = Workload(tuple(Request(time, 1, 1) for time in (0.0, 1.0, 9.0)))
    assert [r.arrival for r in asked.at_rate(2.0, seed=None).requests] == pytest.approx([0, 1 / 9, 1])


def test_every_prompt_is_whole_and_shares_only_what_its_trace_says() -> None:
    asked = Workload(
        (Request(0, 600, 5, (7, 8)), Request(1, 600, 5, (7, 9)), Request(2, 600, 5), Request(3, 90, 5)), 512
    )
    lines = [json.loads(line) for line in asked.lines()]
    assert [len(line["hash_ids"]) for line in lines] == [2, 2, 2, 1]
    assert len({i for line in lines for i in line["hash_ids"]}) == 6
    assert [line["input_length"] for line in lines] == [600, 600, 600, 90]


def test_what_is_longer_than_the_model_takes_is_left_out() -> None:
    asked = Workload((Request(0, 90, 10), Request(0, 90, 11)))
    assert asked.fitting(100).requests == asked.requests[:1]
    assert asked.fitting(None) == asked


def test_sharegpt_like_lengths_have_sharegpts_means() -> None:
    requests = workload.sharegpt_like(20_000, seed=3).requests
    assert statistics.mean(r.prompt for r in requests) == pytest.approx(755.5, rel=0.02)
    assert statistics.mean(r.answer for r in requests) == pytest.approx(200.3, rel=0.03)
    assert max(r.prompt + r.answer for r in requests) < 2048
    assert workload.sharegpt_like(5, seed=3).requests == requests[:5]
