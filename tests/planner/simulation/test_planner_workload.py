"""Lengths, arrivals and traces."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_disagg.errors import ConfigError
from vllm_disagg.planner.simulation import workload
from vllm_disagg.planner.simulation.workload import Arrivals


@pytest.mark.parametrize(
    ("name", "prompt", "output"),
    [
        ("sharegpt-like", 755.5, 200.3),
        ("humaneval-like", 171.3, 98.2),
        ("longbench-like", 1738.3, 90.7),
    ],
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


def test_a_trace_keeps_its_times(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0.5,600,5\n2.5,700,6\n3.5,800,7\n")
    load = workload.load(str(path))
    assert workload.arrivals("", load).kind == "trace"
    sample = load.sample(10, 0, Arrivals("trace"))
    assert (sample.prompts, sample.outputs, sample.prefixes) == ([600, 700, 800], [5, 6, 7], None)
    assert sample.gaps == pytest.approx([0, 2 / 1.5, 1 / 1.5])


def test_a_trace_is_no_more_samples_than_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(
        "arrival_s,input_tokens,output_tokens\n" + "".join(f"{n},600,5\n" for n in range(50))
    )
    load = workload.load(str(path))
    assert workload.extent(load, Arrivals("trace"), 20, 5) == (20, 2)
    assert workload.extent(load, Arrivals("trace"), 1000, 5) == (50, 1)
    assert workload.extent(load, Arrivals("poisson"), 1000, 5) == (
        50,
        5,
    )  # the same lengths, other arrivals
    assert workload.extent(workload.load("600:5"), Arrivals("poisson"), 1000, 5) == (1000, 5)


def test_alibabas_blocks_have_16_tokens(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    row = '{"timestamp": %d, "input_length": 32, "output_length": 5, "hash_ids": [1, %d]}\n'
    path.write_text(row % (0, 2) + row % (1, 3))
    sample = workload.load(str(path)).sample(2, 0, Arrivals("trace"))
    assert (sample.prefixes, sample.block) == ([(1, 2), (1, 3)], 16)


def test_a_request_keeps_its_whole_blocks_and_those_of_its_answer(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    row = '{"timestamp": %d, "input_length": %d, "output_length": 14, "hash_ids": %s, %s}\n'
    first = row % (0, 24, "[1, 2]", '"chat_id": 5')
    path.write_text(first + row % (1, 64, "[1, 3, 4, 6]", '"chat_id": 6, "parent_chat_id": 5'))
    sample = workload.load(str(path)).sample(2, 0, Arrivals("trace"))
    assert sample.prefixes == [(1, 2), (1, 3, 4, 6)]
    assert sample.kept == [(1, 3), (1, 3, 4, 6)]


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
        ('{"timestamp": 0, "input_length": 6, "output_length": 1}\n', "1 request; 2 or more"),
    ],
)
def test_a_trace_that_is_wrong_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"--workload .*{words}"):
        workload.load(str(path))


@pytest.mark.parametrize("text", ["no-such", "10:0"])
def test_a_workload_that_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--workload"):
        workload.load(text)


@pytest.mark.parametrize("text", ["uniform", "gamma", "gamma:0", "gamma:x", "poisson:1"])
def test_arrivals_that_are_not_known_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--arrivals"):
        workload.arrivals(text, workload.load("10:10"))


@pytest.mark.parametrize(("name", "tokens"), [("longbench-like", 256), ("sharegpt-like", 2)])
def test_lengths_that_hardly_any_draw_has_are_refused(name: str, tokens: int) -> None:
    short = workload.limited(workload.load(name), tokens)
    with pytest.raises(ConfigError, match=f"--max-model-len: hardly any .* at most {tokens} tok"):
        short.sample(10, 0, Arrivals("poisson"))
