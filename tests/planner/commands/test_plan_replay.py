"""`plan --replay`: fixed splits and roles that follow the load, on one trace."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from vllm_disagg import cli
from vllm_disagg.errors import ConfigError
from vllm_disagg.fleet.role_control import RoleRules
from vllm_disagg.planner.commands import replay
from vllm_disagg.planner.cost.latency import LinearLatency
from vllm_disagg.planner.simulation.deployment import Deployment, ReplicaPool
from vllm_disagg.planner.simulation.objective import Objective
from vllm_disagg.planner.simulation.role_simulation import RoleReplay, simulate_roles
from vllm_disagg.planner.simulation.simulator import simulate
from vllm_disagg.workloads.traces import Trace, TraceRequest

BASE = ["plan", "--gpu", "a100", "--model", "llama-3.1-8b", "--gpus", "4"]
# A prompt of 1,000 tokens takes 0.1 s, a step of n sequences 10 ms and n ms.
LATENCY = LinearLatency(1, (0.0, 1e-4, 0.0), (0.01, 0.0, 0.001), (0.01, 0.0, 0.001))
OBJECTIVE = Objective(1.0, 0.04)
RULES = RoleRules(OBJECTIVE.ttft, OBJECTIVE.tpot)


def write(path: Path, rate: float, seconds: float, prompt: int, answer: int) -> str:
    """Writes a trace of Poisson arrivals."""
    random = Random(0)
    now = 0.0
    lines = []
    while now < seconds:
        row = {"timestamp": 1000 * now, "input_length": prompt, "output_length": answer}
        lines.append(json.dumps(row))
        now += random.expovariate(rate)
    path.write_text("\n".join(lines))
    return str(path)


def turning(prompts: float, answers: float) -> Trace:
    """Returns 200 s of long prompts and 200 s of long answers, at these requests/s."""
    random = Random(1)
    parts = []
    for rate, prompt, answer in ((prompts, 1000, 5), (answers, 50, 200)):
        now = 0.0
        rows = []
        while now < 200:
            rows.append(TraceRequest(now, prompt, answer))
            now += random.expovariate(rate)
        parts.append(Trace(tuple(rows)))
    return replay.joined(parts)


def deployment(prefills: int, decodes: int) -> Deployment:
    return Deployment(
        ReplicaPool(prefills, LATENCY, 100_000), ReplicaPool(decodes, LATENCY, 100_000)
    )


def replayed(trace: Trace, start: int = 2, count: int = 4) -> RoleReplay:
    sample, rate = replay.sample_of(trace, None)
    return simulate_roles(deployment(start, count - start), sample, rate, RULES)


def test_roles_follow_a_mix_that_turns() -> None:
    trace = turning(24.0, 9.0)
    sample, rate = replay.sample_of(trace, None)
    fixed = [
        simulate(deployment(n, 4 - n), sample, rate).attainment(OBJECTIVE) for n in range(1, 4)
    ]
    found = replayed(trace)
    assert found.result.attainment(OBJECTIVE) > max(fixed) + 0.1
    roles = [role for _, _, role in found.changes]
    assert roles[0] == "prefill"
    assert roles[-1] == "decode"
    turned = min(at for at, _, role in found.changes if role == "decode")
    assert 200 < turned < 230


def test_no_two_changes_within_the_cooldown() -> None:
    found = replayed(turning(30.0, 25.0))
    times = [at for at, _, _ in found.changes]
    assert len(times) > 1
    assert all(b - a >= RULES.cooldown for a, b in pairwise(times))


def test_a_replay_is_deterministic_and_serves_all() -> None:
    trace = turning(24.0, 9.0)
    first = replayed(trace)
    assert first == replayed(trace)
    assert min(first.result.latency) > 0


def test_a_load_that_fits_changes_nothing() -> None:
    trace = Trace(tuple(TraceRequest(n / 4, 1000, 20) for n in range(400)))
    found = replayed(trace)
    assert found.changes == []
    sample, rate = replay.sample_of(trace, None)
    fixed = simulate(deployment(2, 2), sample, rate)
    assert found.result.ttft == fixed.ttft
    assert found.result.tpot == fixed.tpot


def test_the_command_compares_all_splits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = write(tmp_path / "prompts.jsonl", 4.0, 60.0, 4000, 10)
    answers = write(tmp_path / "answers.jsonl", 4.0, 60.0, 100, 300)
    assert cli.main([*BASE, "--replay", prompts, answers, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [row["split"] for row in found["splits"]] == ["1P3D", "2P2D", "3P1D"]
    assert found["traces"] == ["prompts.jsonl", "answers.jsonl"]
    assert found["auto"]["changes"] >= 0
    assert cli.main([*BASE, "--replay", prompts, "--rate", "1"]) == 0
    text = capsys.readouterr().out
    assert "roles auto" in text
    assert "at 1 req/s" in text


def test_a_replay_judges_the_longest_gaps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*BASE, "--replay", write(tmp_path / "t.jsonl", 4.0, 20.0, 1000, 10)]

    def replayed_rows(*more: str) -> list[dict[str, Any]]:
        assert cli.main([*words, *more, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        return [*found["splits"], found["auto"]]

    plain = replayed_rows()
    loose = replayed_rows("--itl", "1")
    limit = min(row["itl_p90"] for row in loose) * 0.999
    strict = replayed_rows("--itl", f"{limit}")
    for before, met, missed in zip(plain, loose, strict, strict=True):
        assert "itl_p90" not in before and before["attainment"] == met["attainment"]
        assert met["itl_p90"] >= met["tpot_p90"] and missed["itl_p90"] == met["itl_p90"]
        assert missed["attainment"] <= 0.9 < met["attainment"]
    assert cli.main([*words, "--itl", "1"]) == 0
    out = capsys.readouterr().out
    assert "    TPOT p90     ITL p90\n" in out and "and ITL 1 s (the longest gap" in out


def test_a_trace_without_a_rate_is_refused() -> None:
    part = Trace((TraceRequest(0.0, 512, 1), TraceRequest(0.0, 512, 1)))
    with pytest.raises(ConfigError, match="--replay: all requests of the trace arrive at once"):
        replay.sample_of(replay.joined([part]), 2.0)


def test_joined_traces_share_no_blocks() -> None:
    first = TraceRequest(0.0, 512, 1, (0,), (0,))
    part = Trace((first, TraceRequest(1.0, 512, 1, (0,))))
    found = replay.joined([part, part])
    assert [row.answer_ids for row in found.requests] == [(0,), (), (1,), ()]
    assert [row.hash_ids for row in found.requests] == [(0,), (0,), (1,), (1,)]
    assert [row.arrival for row in found.requests] == [0.0, 1.0, 2.0, 3.0]
    other = msgspec.structs.replace(part, block=16)
    with pytest.raises(ConfigError, match="different tokens"):
        replay.joined([part, other])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--replay", "TRACE", "--gpus", "1"], "less than two instances"),
        (["--replay", "TRACE", "--rate", "0"], "--rate: 0.0 is not a rate"),
        (["--replay", "TRACE", "--rate", "1e-6"], "at 1e-06 req/s take more than 30 days: give"),
        (["--replay", "TRACE", "--decode-gpu", "h100"], "alike"),
        (["--replay", "TRACE", "--gpus", "8", "--instance", "3x1"], "--instance: 3x1"),
        (["--replay", "nowhere"], "--replay nowhere"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write(tmp_path / "t.jsonl", 4.0, 5.0, 100, 10)
    assert cli.main([*BASE, *(trace if word == "TRACE" else word for word in words)]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert "Traceback" not in error
