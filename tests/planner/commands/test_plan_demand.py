"""`plan --rate`, prices, power, limits of p99 and the longest request, as a user types them."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest
from distserve_scenario import distserve_scenario

from vllm_disagg import __version__, cli
from vllm_disagg.errors import ConfigError
from vllm_disagg.planner.commands import (
    criteria,
    documents,
    flags,
    launch_commands,
    plan_inputs,
    report,
)
from vllm_disagg.planner.cost import hardware, model
from vllm_disagg.planner.search import sample_size
from vllm_disagg.planner.search.performance_source import PerformanceSource
from vllm_disagg.planner.search.placement import Criterion, Placement, ReplicaGroup
from vllm_disagg.planner.search.scenario import Scenario
from vllm_disagg.planner.simulation import workload
from vllm_disagg.planner.simulation.objective import Objective
from vllm_disagg.planner.simulation.simulator import simulate

BASE = ["plan", "--coefficients", "distserve-a100", "--model", "opt-13b", "--ttft", "0.2"]
BASE += ["--tpot", "0.1", "--workload", "700:20", "--seeds", "1"]
LLAMA = ["plan", "--gpu", "h100", "--model", "llama-3.1-8b", "--workload", "500:20"]
ONE_EACH = Placement(ReplicaGroup(1, 1, 1), ReplicaGroup(1, 1, 1))


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_a_rate_gets_the_least_gpus_that_hold_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, *BASE, "--rate", "8", "--gpus", "6")
    assert found["counted"] == "GPU" and found["rate"] == 8
    for kind in ("disaggregated", "colocated"):
        row = found[kind]
        assert found["least_possible"] <= row["gpus"] <= 6
        assert row["attainment"] >= 0.9
        assert row["ttft_p50"] <= row["ttft_p90"] <= row["ttft_p99"]
        assert row["kilowatts"] == pytest.approx(0.4 * row["gpus"])
    assert found["disaggregated"]["gpus"] == 3 and found["colocated"]["gpus"] == 2
    assert found["recommendation"] == "colocate" and found["commands"]
    assert found["setting"]["requests"] >= 8 * 60


def test_a_sample_that_is_too_short_gets_no_verdict(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{at},700,20\n" for at in range(100))
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    words = [*BASE, "--workload", str(trace), "--arrivals", "poisson", "--rate", "8", "--gpus", "3"]
    found = _json(capsys, *words)
    assert found["recommendation"] == "cannot tell" and not found["commands"]
    assert found["requests_needed"] >= 8 * 60 > found["setting"]["requests"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "\ncannot tell: 100 requests are a burst" in out and "run it:" not in out
    assert "are needed: give a longer trace\n" in out
    assert "of the trace's" not in out, "one sample shares nothing"
    assert cli.main([*words, "--seeds", "2"]) == 0
    assert "2 x 100 requests of the trace's 100, which the samples share" in capsys.readouterr().out


def test_a_rate_that_takes_too_many_requests_is_planned_in_equal_parts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_size, "MAX_REQUESTS", 1000)
    words = [*BASE, "--rate", "16", "--gpus", "6"]
    found = _json(capsys, *words)
    assert (found["rate"], found["parts"], found["setting"]["gpus"]) == (16, 2, 3)
    assert found["recommendation"] == "colocate" and found["colocated"]["gpus"] == 2
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "planned as 2 equal parts of up to 3 GPUs" in out and "for 8 req/s\n" in out
    assert cli.main([*BASE, "--rate", "1000", "--gpus", "4"]) == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.endswith("give more --gpus (in one of 2 equal parts)")
    # Requests that the user gives are taken.
    many = _json(capsys, *words, "--requests", "2000")
    assert (many["parts"], many["setting"]["requests"]) == (1, 2000)


def test_the_answer_for_people_has_gpus_power_and_the_bound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([*BASE, "--rate", "8", "--gpus", "3"]) == 0
    out = capsys.readouterr().out
    made = f"planned on {datetime.now(UTC).date()} by vllm-disagg {__version__}"
    assert out.startswith(f"model: facebook/opt-13b; {made}\n")
    assert "\ncolocate: " in out and "2 GPUs, 0.8 kW for 8 req/s\n" in out
    assert "\nby capacity alone no placement needs less than 1 GPU\n" in out
    assert "run it:" in out and "TTFT p90" in out


def test_flags_of_the_proxy_that_are_not_tried_are_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [*LLAMA, "--rate", "2", "--gpus", "2", "--requests", "150", "--seeds", "1"]
    found = _json(capsys, *words)
    line = found["proxy_flags"]["not_tried"]
    assert line.startswith("--min-prompt-bytes and --spill were not tried: with --rate they are")
    assert found["disaggregated"] and line.endswith("try --spill")
    assert cli.main(words) == 0
    assert f"\n{line}\n" in capsys.readouterr().out
    given = _json(capsys, *words, "--spill")
    assert given["disaggregated"]["spill"] and not given["proxy_flags"]["not_tried"]
    assert not _json(capsys, *BASE, "--rate", "2", "--gpus", "2")["proxy_flags"]["not_tried"]


def test_a_limit_of_gaps_changes_what_holds_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    """Chunks of 512 tokens beside decodes take longer than it allows, and TP4 is needed."""
    words = [*BASE, "--rate", "8", "--gpus", "6", "--itl", "0.05"]
    found = _json(capsys, *words)
    assert found["recommendation"] == "disaggregate" and found["setting"]["itl"] == 0.05
    assert found["disaggregated"]["gpus"] == 3 and found["colocated"]["gpus"] == 4
    for kind in ("disaggregated", "colocated"):
        row = found[kind]
        assert row["tpot_p90"] < row["itl_p90"] <= 0.05 and row["itl_p50"] <= row["itl_p99"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "     ITL p90     ITL p99  placement\n" in out
    assert cli.main([*words, "--itl", "0.01"]) == 2
    refusal = "nothing on 6 GPUs holds a rate within --ttft 0.2, --tpot 0.1 and --itl 0.01: too"
    assert refusal in capsys.readouterr().err


def _two_types(prices: dict[str, object], tmp_path: Path, by: str | None = None) -> Scenario:
    """Returns a scenario of H100 for prefill and L4 for decode with the flags applied."""
    found = model.load("llama-3.1-8b")
    sources = [
        PerformanceSource("roofline", name, found, hardware.gpu(name)) for name in ("h100", "l4")
    ]
    scenario = msgspec.structs.replace(
        distserve_scenario("opt-13b", 0.2, 2, 10, 1), prefill=sources[0], decode=sources[1]
    )
    path = tmp_path / "prices.json"
    path.write_text(json.dumps(prices))
    args = argparse.Namespace(by=by, prices=str(path) if prices else None)
    return criteria.counted(scenario, args)


def test_prices_that_are_too_deep(tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    path.write_text("[" * 100_000)
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        criteria.read_prices(str(path))


@pytest.mark.parametrize("name", ["h100", "H100"])
def test_a_price_that_stands_twice(name: str, tmp_path: Path) -> None:
    path = tmp_path / "prices.json"
    path.write_text(f'{{"h100": 1, "{name}": 2}}')
    with pytest.raises(ConfigError, match="h100 stands twice"):
        criteria.read_prices(str(path))


def test_prices_and_power_are_those_of_each_sides_gpus(tmp_path: Path) -> None:
    scenario = _two_types({"h100": 2.5, "L4": 0.5}, tmp_path)
    assert scenario.criterion == Criterion("$/h", 2.5, 0.5) == scenario.price
    pair = Placement(ReplicaGroup(2, 1, 1), ReplicaGroup(1, 1, 3))
    assert scenario.criterion.units(pair) == pytest.approx(2 * 2.5 + 3 * 0.5)
    together = Placement(ReplicaGroup(1, 1, 4), None, 2048, True, True)
    assert scenario.criterion.units(together) == pytest.approx(4 * 0.5)
    powered = _two_types({"h100": 2.5, "l4": 0.5}, tmp_path, "power")
    assert powered.criterion.units(pair) == pytest.approx((2 * 700 + 3 * 72) / 1000)
    document = documents.placement_document(scenario, pair)
    assert document["cost_per_hour"] == pytest.approx(6.5)
    assert document["kilowatts"] == pytest.approx(1.616)
    assert (document["prefill"]["gpu"], document["decode"]["gpu"]) == ("h100", "l4")
    assert scenario.words_of(pair) == "prefill 1 x TP2 on h100, decode 3 x TP1 on l4"
    assert scenario.words_of(together).endswith(" on l4")


@pytest.mark.parametrize(
    ("prices", "expected"),
    [
        ({"h100": 2.5}, "has no price of l4"),
        ({"h100": 2.5, "l4": None}, "has null for l4: give a price"),
        ({"h100": 2.5, "l4": 0}, "has 0 for l4"),
        ({"h100": "2.5", "l4": 1}, 'has "2.5" for h100'),
        ({"h100": True, "l4": 1}, "has true for h100"),
        ({"h10O": 2.5, "l4": 1}, "has h10O, not a known GPU: give one of a100"),
        ([2.5], "holds no prices by GPU type"),
        ({"h100": 10**400}, "give a price of a GPU and hour"),
    ],
)
def test_a_price_file_with_a_hole_is_one_line(
    prices: dict[str, object], expected: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="--prices: ") as caught:
        _two_types(prices, tmp_path)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([*BASE, "--rate", "0"], "--rate: 0.0 is not a rate"),
        ([*BASE, "--rate", "nan"], "--rate: nan is not a rate"),
        ([*BASE, "--rate", "100", "--gpus", "2"], "no schedule exceeds"),
        ([*BASE, "--rate", "12", "--gpus", "2"], "nothing on 2 GPUs holds --rate 12"),
        ([*BASE, "--rate", "1", "--report", ""], "--report: an empty text names no folder"),
        ([*BASE, "--rate", "1", "--report", "/dev/null/x"], "--report: /dev/null/x cannot be made"),
        ([*BASE, "--rate", "1", "--prices", "nope.json"], "--prices: nope.json cannot be read"),
        ([*BASE, "--by", "cost"], "--by cost needs --prices"),
        ([*BASE, "--expert-parallel"], "--expert-parallel goes with --gpu and a model"),
        ([*LLAMA, "--expert-parallel"], "--expert-parallel goes with --gpu and a model"),
        ([*LLAMA, "--max-model-len", "100"], "have at most 100 tokens"),
        ([*LLAMA, "--max-model-len", "1"], "--max-model-len: 1 is too few"),
        ([*LLAMA, "--node-links", "0"], "--node-links: 0 is too few"),
        ([*BASE, "--node-gpus", "4"], "--node-gpus goes with --gpu"),
        ([*LLAMA, "--ttft-p99", "0"], "--ttft-p99: 0.0 is not a time"),
        ([*LLAMA, "--tpot-p99", "nan"], "--tpot-p99: nan is not a time"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("plan: ")]
    assert out == "" and len(lines) == 1
    assert lines[0].startswith("vllm-disagg plan: ") and expected in lines[0]


def test_limits_of_p99_end_a_simulation_that_the_share_admits() -> None:
    scenario = distserve_scenario("opt-13b", 0.2, 2, 200, 1)
    deployment = scenario.deployment(ONE_EACH)
    sample = scenario.samples()[0]
    loose = Objective(10.0, 10.0)
    result = simulate(deployment, sample, 1.0, loose)
    assert not result.stopped and not loose.has_tails
    for name, values in (("ttft_p99", result.ttft), ("tpot_p99", result.tpot)):
        third = sorted(values)[-3]  # two of 200 may be above
        limit = msgspec.structs.replace(loose, **{name: third})
        assert not simulate(deployment, sample, 1.0, limit).stopped
        below = msgspec.structs.replace(loose, **{name: third * 0.999})
        assert simulate(deployment, sample, 1.0, below).stopped
        assert below.has_tails and f"p99 of {name[:4].upper()}" in below.words()


def test_requests_above_the_longest_are_left_out(tmp_path: Path) -> None:
    scenario = distserve_scenario("opt-13b", 0.2, 2, 200, 1)
    short = workload.limited(scenario.workload, 500).sample(200, 0, scenario.arrivals)
    assert max(map(sum, zip(short.prompts, short.outputs, strict=True))) <= 500
    path = tmp_path / "lengths.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,90,10\n1,91,10\n2,50,10\n3,60,1\n")
    kept = workload.limited(workload.load(str(path)), 100)
    assert kept.trace and [row.prompt for row in kept.trace.requests] == [90, 50, 60]


def test_instances_hold_the_longest_request() -> None:
    """vLLM refuses to start without the KV of one."""
    source = PerformanceSource(
        "roofline", "h100", model.load("llama-3.1-70b"), hardware.gpu("h100")
    )
    assert (2, 1) in source.shapes(8)
    long = msgspec.structs.replace(source, max_model_len=source.kv(2, 1) + 1)
    assert (2, 1) not in long.shapes(8) and (4, 1) in long.shapes(8)


def test_an_instance_has_the_links_of_its_gpus() -> None:
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    words = ["--gpu", "h100", "--model", "llama-3.1-8b", "--link", "ib-400", "--requests", "10"]

    def planned(*more: str) -> Scenario:
        return plan_inputs.read(parser.parse_args([*words, *more]), 8, "--gpus").scenario

    def bandwidth(scenario: Scenario, prefill_tp: int, decode_tp: int) -> float:
        pair = Placement(ReplicaGroup(prefill_tp, 1, 1), ReplicaGroup(decode_tp, 1, 1))
        return scenario.deployment(pair).handoff.link.bandwidth

    each = planned()
    assert bandwidth(each, 8, 8) == bandwidth(each, 1, 1) == 50e9
    eight = planned("--node-links", "8")
    assert bandwidth(eight, 4, 4) == 4 * 50e9 and bandwidth(eight, 4, 1) == 50e9
    shared = planned("--node-links", "1")
    assert bandwidth(shared, 1, 1) == 50e9 / 8
    small = planned("--node-gpus", "4", "--node-links", "1")
    assert small.prefill.gpu and small.prefill.gpu.fabric == 50e9 / 4
    assert bandwidth(small, 1, 1) == 50e9 / 4
    # An H100 node has 8 GPUs, one of GB200 has 72.
    both = planned("--node-links", "72", "--decode-gpu", "gb200")
    assert bandwidth(both, 4, 4) == 4 * 50e9 and bandwidth(both, 4, 1) == 50e9
    assert max(tp for tp, _ in small.prefill.shapes(8)) == 4


def test_commands_of_parallel_experts_have_their_flags_and_a_warning(tmp_path: Path) -> None:
    scenario = msgspec.structs.replace(_two_types({}, tmp_path), distserve=False)
    wide = Placement(ReplicaGroup(1, 1, 1, 16), ReplicaGroup(1, 1, 1))
    lines = launch_commands.commands(scenario, wide, "m")
    assert "--data-parallel-size 16 --enable-expert-parallel" in lines[1]
    assert "--prefill-concurrency 8 " in lines[-1], "each rank is an instance with 8 legs"
    ranks = "".join(f" --prefill http://127.0.0.1:8100@{rank}" for rank in range(16))
    assert lines[-1].endswith(f"{ranks} --decode http://127.0.0.1:8200")
    assert (
        "experts with data parallelism on CPUs only" in launch_commands.remarks(scenario, wide)[0]
    )
    assert documents.placement_document(scenario, wide)["prefill"]["ep"] == 16
    narrow = launch_commands.remarks(scenario, ONE_EACH)
    assert not any("data parallelism" in remark for remark in narrow)


def test_no_legend_is_on_a_curve() -> None:
    figure, axes = report._axes("x", "y")
    for n in range(6):
        axes.plot([0, 1], [n, 1], label=f"prefill {n} x TP1 PP2, decode {n} x TP8 on a long name")
    report._label(figure, axes)
    figure.draw_without_rendering()
    legend = figure.legends[0].get_window_extent()
    assert not legend.overlaps(axes.get_window_extent())
    assert figure.bbox.x0 <= legend.x0 and legend.x1 <= figure.bbox.x1
