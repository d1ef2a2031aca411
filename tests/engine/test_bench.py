"""`vllm-disagg bench` and `profile` on real engines, with the real `vllm bench serve`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Main
from engines import ADMIN, CHUNK

from vllm_disagg import cli
from vllm_disagg.fleet.keys import ADMIN_KEY

SENT = 10


def test_bench_compares_the_pair_with_a_plain_vllm(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Objectives that nothing meets need one run of each target only."""
    trace = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 100 * at,
            "input_length": 600,
            "output_length": 8,
            "hash_ids": [2 * at, 2 * at + 1],
        }
        for at in range(SENT)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = main.decode.received
    targets = ["--target", f"pair={main.proxy.url}", "--target", f"plain={main.plain.url}"]
    words = ["--trace", str(trace), "--ttft", "0.0001", "--tpot", "0.0001", "--json"]
    assert cli.main(["bench", *targets, *words]) == 0
    for found in json.loads(capsys.readouterr().out)["targets"].values():
        assert found["goodput"] == 0 and not found["runs"]
        alone = found["alone"]
        assert (alone["sent"], alone["failed"], alone["good"]) == (SENT, 0, 0)
        assert 0 < alone["ttft"]["median"] <= alone["ttft"]["p99"] and alone["tpot"]["median"] > 0
        assert alone["prompt_tokens_per_s"] == pytest.approx(600 / 8 * alone["output_tokens_per_s"])
    assert (
        main.decode.received > before
    )  # prompts share nothing: one that D recomputes is no prefix of another


@pytest.mark.wide
def test_bench_finds_a_goodput(main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    """A wide bracket of one target: a handful of runs."""
    lengths = ["--input-len", "300", "--output-len", "8", "--requests", "30"]
    words = [
        "--target",
        f"pair={main.proxy.url}",
        *lengths,
        "--ttft",
        "1",
        "--tpot",
        "0.2",
        "--precision",
        "1",
    ]
    assert cli.main(["bench", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["targets"]["pair"]
    assert found["goodput"] > 0
    assert all(run["failed"] == 0 for run in found["runs"] if run["attainment"] >= 0.9)


@pytest.mark.wide
def test_profile_measures_a_plain_engine_and_one_of_ours(main: Main, tmp_path: Path) -> None:
    for engine in (main.plain, main.prefill):
        path = tmp_path / f"{engine.name}.json"
        words = ["--output", str(path), "--seconds", "15", "--max-num-batched-tokens", str(CHUNK)]
        assert cli.main(["profile", engine.url, *words]) == 0
        points = json.loads(path.read_text())
        assert points["model"] == "tiny" and points["kv_tokens"] > 10_000
        assert {len(point["tokens"]) for point in points["prefill"]} > {1}, (
            "no prompts were computed together"
        )
        assert {len(point["contexts"]) for point in points["decode"]} >= {1, 2, 4}


def test_profile_measures_the_handoff_of_a_fleet(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the hand-off `plan` needs no assumed link."""
    monkeypatch.setenv(ADMIN_KEY, ADMIN)
    path = str(tmp_path / "points.json")
    words = ["--output", path, "--seconds", "15", "--max-num-batched-tokens", str(CHUNK)]
    assert cli.main(["profile", main.prefill.url, *words, "--handoff", main.proxy.url]) == 0
    handoff = json.loads(Path(path).read_text())["handoff"]
    assert 0 < handoff["mean"] < 5
    capsys.readouterr()
    words = ["--profile", path, "--workload", "500:20", "--rate", "1", "--json"]
    assert cli.main(["simulate", *words, "--prefill", "1x1", "--decode", "1x1"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["setting"]["link"] == "as measured" and found["transfer_mean"] > 0


def test_profile_refuses_a_proxy(
    main: Main, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["profile", main.proxy.url, "--output", str(tmp_path / "x")]) == 2
    assert "not of a proxy" in capsys.readouterr().err
