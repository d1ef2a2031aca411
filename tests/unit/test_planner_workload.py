"""Lengths, arrivals and traces."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from vllm_disagg.errors import ConfigError
from vllm_disagg.planner import workload
from vllm_disagg.planner.workload import Arrivals


@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    [("sharegpt-like", 755.5, 200.3), ("humaneval-like", 171.3, 98.2), ("longbench-like", 1738.3, 90.7)],
)
def test_means_are_the_papers(name: str, prompt: float, output: float) -> None:
    sample = workload.load(name).sample(20_000, 0, Arrivals("poisson"))
    assert sum(sample.prompts) / 20_000 == pytest.approx(prompt, rel=0.02)
    assert sum(sample.outputs) / 20_000 == pytest.approx(output, rel=0.03)
    assert max(p + o for p, o in zip(sample.prompts, sample.outputs, strict=True)) < 2048


def test_a_seed_is_a_sample_and_rates_only_stretch_it() -> None:
    load = workload.load("sharegpt-like")
    one, same, other = (load.sample(100, seed, Arrivals("poisson")) for seed in (1, 1, 2))
    assert one == same and one != other
    assert one.arrivals(2.0) == pytest.approx([2 * t for t in one.arrivals(4.0)])


@pytest.mark.parametrize(("kind", "cv"), [("poisson", 1.0), ("gamma", 0.5), ("gamma", 3.0)])
def test_gaps_have_mean_1_and_the_variation_asked_for(kind: str, cv: float) -> None:
    gaps = workload.load("10:10").sample(40_000, 0, Arrivals(kind, cv)).gaps[1:]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((g - mean) ** 2 for g in gaps) / len(gaps)) ** 0.5
    assert mean == pytest.approx(1, rel=0.05)
    assert deviation / mean == pytest.approx(cv, rel=0.06)


TRACES = {
    "mooncake.jsonl": '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
    '{"timestamp": 2000, "input_length": 700, "output_length": 6, "hash_ids": [1, 3]}\n',
    "azure.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,600,5\n"
    "2023-11-16 18:17:05.9799600,700,6\n",
    "lengths.csv": "arrival_s,input_tokens,output_tokens\n0.5,600,5\n2.5,700,6\n",
    "distserve.json": '[{"start_time": 1, "prompt_len": 600, "output_len": 5},'
    ' {"start_time": 3, "prompt_len": 700, "output_len": 6}]',
}


@pytest.mark.parametrize("name", TRACES)
def test_traces_of_others_are_read(tmp_path: Path, name: str) -> None:
    for path, data in (
        (tmp_path / name, TRACES[name].encode()),
        (tmp_path / f"{name}.gz", gzip.compress(TRACES[name].encode())),
    ):
        path.write_bytes(data)
        load = workload.load(str(path))
        assert load.rows and [(r.prompt, r.output) for r in load.rows] == [(600, 5), (700, 6)]
        assert load.native_rate() == pytest.approx(0.5)
        assert workload.arrivals("", load).kind == "trace"
        assert load.sample(10, 0, Arrivals("trace")).gaps == pytest.approx([0, 1])


def test_lengths_without_times_arrive_at_random(tmp_path: Path) -> None:
    path = tmp_path / "vidur.csv"
    path.write_text("num_prefill_tokens,num_decode_tokens\n600,5\n700,6\n")
    load = workload.load(str(path))
    assert workload.arrivals("", load).kind == "poisson"
    with pytest.raises(ConfigError, match="no arrival times"):
        workload.arrivals("trace", load)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"timestamp": 0, "input_length": 600}\n', "line 1: output_length is missing"),
        ('{"timestamp": 0, "input_length": -6, "output_length": 1}\n', "line 1: input_length is -6"),
        ('{"timestamp": -1, "input_length": 6, "output_length": 1}\n', "line 1: timestamp is -1"),
        ('{"input_length": 6, "output_length": 1}\n', "line 1: timestamp is missing"),
        ('{"timestamp": 0, "input_length": 6, "output_length": "x"}\n', "output_length is 'x'"),
        ('{"timestamp": 0, "input_length": 6, "output_length": 1}\n', "1 requests; 2 or more"),
        ('{"a": 1}\n', "no fields that are known"),
        ("nonsense\n", "cannot be read"),
        ("", "0 requests"),
    ],
)
def test_a_trace_that_is_wrong_is_refused_by_line_and_field(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        workload.load(str(path))


@pytest.mark.parametrize("text", ["no-such", "10:0"])
def test_a_workload_that_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--workload"):
        workload.load(text)


@pytest.mark.parametrize("text", ["uniform", "gamma", "gamma:0", "gamma:x", "poisson:1"])
def test_arrivals_that_are_not_known_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--arrivals"):
        workload.arrivals(text, workload.load("10:10"))
