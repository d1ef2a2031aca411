"""`vllm-disagg plan` and `simulate` as a user types them."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from distserve_scenario import distserve_scenario
from model_configs import MODELS

from vllm_disagg import cli
from vllm_disagg.errors import ConfigError
from vllm_disagg.planner.commands import (
    documents,
    flags,
    launch_commands,
    plan,
    plan_inputs,
    report,
    step_sources,
)
from vllm_disagg.planner.cost import hardware, known_models, speculative
from vllm_disagg.planner.cost import model as known_model
from vllm_disagg.planner.cost.latency import unloaded_prefill
from vllm_disagg.planner.search import advice
from vllm_disagg.planner.search.performance_source import PerformanceSource
from vllm_disagg.planner.search.placement import Placement, ReplicaGroup
from vllm_disagg.planner.search.placement_score import PlacementScore
from vllm_disagg.planner.simulation.objective import Objective

PATH = {"seconds": 0.005, "seconds_per_token": 0.0}
BASE = ["--coefficients", "distserve-a100", "--model", "opt-13b", "--ttft", "0.2", "--tpot", "0.1"]
QUICK = [*BASE, "--requests", "60", "--seeds", "2"]
# Long enough for a verdict: answers are short, and prompts of equal length.
SURE = [*BASE, "--workload", "700:20", "--requests", "1200", "--seeds", "3"]


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def _points_file(path: Path, **fields: object) -> str:
    """Writes measured points with these fields. Returns the path."""
    prefill = [{"tokens": [n], "seconds": 1e-4 * n} for n in (32, 128, 512)]
    decode = [{"contexts": [n], "seconds": 0.01} for n in (32, 128, 512)]
    points = {"version": 2, "path": PATH, "model": "org/m", "kv_tokens": 20000}
    path.write_text(json.dumps({**points, "prefill": prefill, "decode": decode, **fields}))
    return str(path)


def _parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    return parser.parse_args(words)


def _planned(*words: str) -> plan_inputs.PlanInputs:
    return plan_inputs.read(_parsed(*words), 2, "--gpus")


def test_closed_form(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--capacity-prefill", "5.6", "--capacity-decode", "10", "--gpus"]
    four = _json(capsys, *words, "4")
    eight = _json(capsys, *words, "8")
    assert four["best"]["prefill"]["n"] == 2 and four["best"]["decode"]["n"] == 1
    assert four["best"]["goodput_per_gpu"] == pytest.approx(3.333, abs=1e-3)
    assert four["one_to_one"] == pytest.approx(2.8)
    assert four["limit"] == pytest.approx(3.590, abs=1e-3)
    assert (eight["best"]["prefill"]["n"], eight["best"]["decode"]["n"]) == (5, 3)
    assert eight["best"]["goodput_per_gpu"] == pytest.approx(3.5)
    assert four["ttft_mean"]["0.5"] == pytest.approx(
        (1 + 0.5 / (2 * 0.5)) / 5.6
    )  # D + R D^2 / (2 (1 - R D)), R D = 0.5
    assert four["bandwidth"] is None
    words = [*words, "4", "--model", "opt-66b", "--workload", "512:64"]
    assert _json(capsys, *words)["bandwidth"] == pytest.approx(
        10 * 1.208e9, rel=1e-3
    )  # 2P1D: 10 requests/s
    half = _json(capsys, *words, "--kv-cache-dtype", "fp8")["bandwidth"]
    assert half == pytest.approx(5 * 1.208e9, rel=1e-3)


def test_plan_says_all_that_is_promised(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = _json(
        capsys,
        "plan",
        *SURE,
        *("--seeds", "1", "--gpus", "3", "--jobs", "1"),
        *("--report", str(tmp_path / "report")),
    )
    for phase in ("prefill", "decode"):
        assert found["best"][phase].keys() == {"tp", "pp", "n", "gpu"}
    assert found["best"]["ci"] is None, "one sample shows no interval"
    assert found["ratio"] == pytest.approx(
        found["best"]["goodput_per_gpu"] / found["colocated"]["goodput_per_gpu"]
    )
    assert found["best"]["closed_form"]["rate_per_gpu"] > 0
    assert found["setting"]["attainment_of"] == "TTFT and TPOT separately"
    assert found["alternatives"] and found["flips"] and found["commands"]
    assert all(" opt-13b" not in line for line in found["commands"]), "no hub has that name"
    assert any(" facebook/opt-13b" in line for line in found["commands"])
    assert [Path(p).stat().st_size > 1000 for p in found["report"]] == [True] * 4
    assert found["largest"]["goodput"] >= 0.99 * found["best"]["goodput"]
    page = Path(found["report"][0]).read_text()
    assert found["made"]["model"] == "facebook/opt-13b"
    assert found["made"]["defaults_of"] is found["made"]["fitted_to"] is None
    assert f"<li>model: facebook/opt-13b; planned on {found['made']['date']} by vllm-dis" in page
    assert "white-space:pre-wrap" in page and page.count("<pre>") == 1
    assert page.count("<td>best P:D</td>") == 1 and page.count("<h2>Times by rate</h2>") == 1
    assert found["by_rate"] and all(
        row["itl_p90"] >= row["tpot_p90"] > 0 for row in found["by_rate"] if row["tpot_p90"]
    )
    assert page.count("data:image/png;base64,") == 3 and "http" not in page.replace(
        "http://127.0.0.1", ""
    )


BURST = ["--gpu", "h100", "--model", "llama-3.1-8b", "--workload", "500:100", "--gpus", "2"]
CLOSED = ["--capacity-prefill", "5", "--capacity-decode", "9"]
BURST += ["--requests", "200", "--seeds", "1", "--jobs", "1"]


def test_of_a_burst_no_verdict_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, "plan", *BURST)
    assert found["recommendation"] == "cannot tell" and found["requests_needed"] > 1000
    assert not found["commands"] and not found["flips"] and not found["remarks"]
    assert cli.main(["plan", *BURST]) == 0
    out = capsys.readouterr().out
    assert "\ncannot tell: 200 requests are a burst" in out and "run it" not in out
    assert "colocate:" not in out and "disaggregate:" not in out


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        ((1.15, 1.29), "disaggregate: "),
        ((0.95, 1.29), "cannot tell: the best disaggregated placement has 1.20 (0.95 to 1.29)"),
        ((0.95, 1.05), "colocate: "),
    ],
)
def test_a_ratio_on_both_sides_of_the_limit_cannot_tell(
    interval: tuple[float, float], expected: str
) -> None:
    scenario = distserve_scenario("opt-13b", 0.2, 2, 150, 2)
    one = ReplicaGroup(1, 1, 1)
    base = PlacementScore(Placement(one, None, 512), [1.0])
    ratio = 1.0 if interval[1] < 1.1 else 1.2
    best = PlacementScore(Placement(one, one), [ratio])
    found = advice.Advice(
        scenario=scenario,
        best=best,
        runner_up=None,
        alternatives=[],
        colocated=base,
        largest=None,
        ratio=ratio,
        ratio_ci=interval,
        curves=[],
        crossovers={},
        considered=2,
        missing=0,
    )
    words = report._verdict(found)
    assert words.startswith(expected) and f"({interval[0]:.2f} to {interval[1]:.2f})" in words
    document = documents.as_json(found, "m")
    assert document["recommendation"] == expected.partition(":")[0]
    assert bool(document["commands"]) == (document["recommendation"] != "cannot tell")


def test_one_sample_shows_no_interval(capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, "plan", *SURE, "--gpus", "2", "--seeds", "1")
    assert found["best"]["ci"] is None
    assert found["recommendation"] != "cannot tell"
    assert found["ratio"] and found["ratio_ci"] is None
    assert "one sample shows no interval" in found["remarks"][0]


def test_without_a_number_plan_takes_enough_requests(capsys: pytest.CaptureFixture[str]) -> None:
    slow = ["--gpu", "a100", "--model", "opt-13b", "--workload", "1500:50", "--gpus", "2"]
    found = _json(capsys, "plan", *slow, "--ttft", "4", "--seeds", "1", "--jobs", "1")
    assert found["recommendation"] in ("disaggregate", "colocate")
    assert found["requests_needed"] is None and found["setting"]["requests"] >= 1000
    simulated = ["--prefill", "1x1", "--decode", "1x1", "--rate", "30", "--seeds", "1"]
    found = _json(capsys, "simulate", *slow[:-2], *simulated)
    assert found["setting"]["requests"] == 30 * 60 / 0.8


def test_plan_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", *SURE, "--gpus", "2", "--jobs", "1"]) == 0
    out, err = capsys.readouterr()
    assert (
        out.startswith("model: facebook/opt-13b; planned on ")
        and "\ntimes: distserve-a100: fits to measurements" in out
        and "run it:" in out
        and "colocated" in out
    )
    assert "placements" in err


def test_simulate_says_all_that_is_promised(capsys: pytest.CaptureFixture[str]) -> None:
    found = _json(capsys, "simulate", *QUICK, "--prefill", "2x1", "--decode", "1x1", "--rate", "2")
    assert found["attainment"] > 0.9 and 0 < found["ttft_p90"] < 0.2 and 0 < found["tpot_p90"] < 0.1
    assert found["gpus"] == 3 and found["refused"] == 0
    both = _json(capsys, "simulate", *QUICK, "--colocated", "2x1x2", "--rate", "2")
    assert both["gpus"] == 4 and both["attainment"] > 0.9


def test_simulate_judges_the_longest_gap(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", *QUICK, "--colocated", "1x1", "--prefill-first", "--rate", "2"]
    plain = _json(capsys, *words)
    assert plain["itl_p90"] > plain["tpot_p90"] and "attainment_itl" not in plain
    limit = (plain["itl_p50"] + plain["tpot_p50"]) / 2
    found = _json(capsys, *words, "--itl", f"{limit}")
    assert found["attainment_itl"] < 0.6 and found["itl_p90"] == plain["itl_p90"]
    assert found["setting"]["itl"] == limit
    assert found["setting"]["attainment_of"] == "TTFT, TPOT and ITL separately"
    assert found["attainment"] <= found["attainment_itl"] + 1e-9


def test_prefill_first_is_refused_under_vllms_rules(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", *QUICK, "--rules", "vllm", "--colocated", "1x1", "--prefill-first"]
    assert cli.main([*words, "--rate", "2"]) == 2
    assert "--prefill-first goes with --rules distserve" in capsys.readouterr().err


def test_simulate_with_what_a_deployment_adds(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", *QUICK, "--prefill", "1x1", "--decode", "1x1", "--rate", "0.01"]
    plain = _json(capsys, *words)
    slow = _json(capsys, *words, "--scale", "2:3")
    assert slow["ttft_mean"] == pytest.approx(2 * plain["ttft_mean"], rel=0.01)  # nobody waits
    assert slow["setting"]["latency"]["prefill"].endswith(", times 2")
    assert slow["tpot_mean"] == pytest.approx(3 * plain["tpot_mean"], rel=0.05)


def test_simulate_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.main(["simulate", *QUICK, "--prefill", "1x1", "--decode", "1x1", "--rate", "0.1"]) == 0
    )
    out = capsys.readouterr().out
    assert (
        out.startswith("times: distserve-a100: fits to measurements")
        and " at 0.1 req/s on 2 GPUs\n" in out
    )
    assert "within TTFT 0.2 s and TPOT 0.1 s" in out


def test_simulate_sends_prompts_to_d_whole(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", *QUICK, "--rules", "vllm", "--prefill", "1x1", "--decode", "1x1"]
    words += ["--rate", "4", "--prefill-concurrency", "1"]
    plain = _json(capsys, *words)
    short = _json(capsys, *words, "--min-prompt-bytes", "2000")
    both = _json(capsys, *words, "--min-prompt-bytes", "2000", "--spill")
    assert plain["aggregated"] == 0 < short["aggregated"] < both["aggregated"] < 1
    assert both["setting"]["min_prompt_bytes"] == 2000 and both["setting"]["spill"]
    assert plain["transfer_mean"] < 2 * short["transfer_mean"] and short["link_busy"] > 0
    assert cli.main([*words, "--min-prompt-bytes", "2000", "--spill"]) == 0
    out = capsys.readouterr().out
    assert "decode 1 x TP1, --min-prompt-bytes 2000 --spill at 4 req/s" in out
    assert f"  aggregated     {both['aggregated']:.1%}" in out


def test_flags_are_planned_as_given_or_refused_in_words(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["plan", *QUICK, "--rules", "vllm", "--gpus", "2", "--jobs", "1"]
    found = _json(capsys, *words, "--spill", "--workload", "700:20", "--requests", "400")
    assert found["best"]["spill"] and found["best"]["min_prompt_bytes"] == 0
    assert found["proxy_flags"] == {"tried": [], "not_tried": None}
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000 * n, "input_length": 600, "output_length": 9, "hash_ids": [1, n + 2]}
        for n in range(60)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [*words, "--workload", str(path)]
    assert cli.main([*words, "--spill", "--min-prompt-bytes", "9"]) == 2
    error = capsys.readouterr().err
    assert "--min-prompt-bytes cannot be simulated: the trace has hash_ids" in error
    assert _json(capsys, *words, "--spill")["best"]["spill"]
    assert _planned(*words[1:-6], *words[-2:], "--min-prompt-bytes", "0")


def test_a_profile_is_planned_with(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "points.json"
    prefill = [
        {"tokens": [n] * k, "seconds": 0.01 + 1e-4 * n * k} for n in (32, 128, 512) for k in (1, 4)
    ]
    decode = [
        {"contexts": [n] * k, "seconds": 0.01 + 1e-5 * k + 1e-7 * n * k}
        for n in (32, 128, 512)
        for k in (1, 4)
    ]
    points = {
        "version": 2,
        "path": PATH,
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "kv_tokens": 20000,
        "max_num_batched_tokens": 2048,
    }
    path.write_text(json.dumps({**points, "prefill": prefill, "decode": decode}))
    words = ["--profile", str(path), "--workload", "200:50", "--requests", "300", "--seeds", "2"]
    assert cli.main(["plan", *words]) == 2
    assert "give --model: the bytes of a hand-off depend on it" in capsys.readouterr().err
    words += ["--model", "llama-3.1-8b"]
    found = _json(capsys, "plan", *words, "--gpus", "3", "--jobs", "1")
    assert found["best"]["prefill"]["tp"] == 1
    assert found["fits"][str(path)]["worst_error"]["prefill"] < 0.01
    assert found["colocated"]["budget"] == 2048
    one = ["--prefill", "1x1", "--decode", "1x1", "--rate", "1"]
    apart = _json(capsys, "simulate", *words, *one)
    assert apart["attainment"] == 1 and apart["path_mean"] == pytest.approx(0.005)
    last_layer = 200 * 131_072 / 32 / 3.125e9
    assert apart["transfer_mean"] == pytest.approx(last_layer + 0.0002 + 0.0037)
    assert 0 < apart["link_busy"] < apart["prefill_busy"] < apart["decode_busy"] < 1
    assert apart["setting"]["link"] == "eth-25"
    one = ["--colocated", "1x1", "--rate", "1"]
    together = _json(capsys, "simulate", *words[:-2], *one)
    assert together["transfer_mean"] == 0 and together["path_mean"] == pytest.approx(0.005)


def test_sizes_beyond_a_profile_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A fit is extrapolated there, and nothing measured says how well."""
    path = _points_file(tmp_path / "points.json")
    words = ["--profile", path, "--link", "none", "--requests", "100", "--seeds", "2"]
    words += ["--ttft", "2", "--workload"]
    one = ["--prefill", "1x1", "--decode", "1x1", "--rate"]
    assert _json(capsys, "simulate", *words, "500:12", *one, "0.01")["extrapolated"] == []
    long = _json(capsys, "simulate", *words, "600:50", *one, "0.01")["extrapolated"]
    assert [(row["quantity"], row["measured"], row["used"]) for row in long] == [
        ("tokens of a prompt", 512, 600),
        ("prompt tokens of a step", 512, 600),
        ("tokens of a context", 512, 650),
    ]
    assert all(row["profile"] == path for row in long)
    # Of two profiles each has its own range.
    other = _points_file(
        tmp_path / "d.json",
        decode=[{"contexts": [n] * 8, "seconds": 0.01} for n in (32, 128, 2048)],
    )
    apart = [*words, "400:300", "--decode-profile", other, *one]
    assert _json(capsys, "simulate", *apart, "1")["extrapolated"] == []
    many = _json(capsys, "simulate", *apart, "8")["extrapolated"]
    assert {(row["profile"], row["measured"]) for row in many} >= {(other, 8)}
    assert cli.main(["simulate", *words, "600:50", *one, "0.01"]) == 0
    beyond = f"\nbeyond {path}, where its fit is extrapolated: 600 tokens of a prompt (measured"
    assert f"{beyond} to 512), " in capsys.readouterr().out
    for question in ([], ["--rate", "2"]):
        plan = ["plan", *words, "600:50", "--gpus", "2", "--jobs", "1", *question]
        found = _json(capsys, *plan)["extrapolated"]
        assert ("tokens of a prompt", 600) in {(row["quantity"], row["used"]) for row in found}
        assert ("sequences of a step", 1) in {(row["quantity"], row["measured"]) for row in found}
        assert cli.main(plan) == 0
        assert beyond in capsys.readouterr().out


def test_a_measured_handoff_is_the_link(tmp_path: Path) -> None:
    """With the model each rank reads its bytes at a rate; without one all of it is a delay."""
    handoff = {"mean": 0.004, "seconds": 0.001, "seconds_per_byte": 2.0**-30}
    facts = {"model": "meta-llama/Llama-3.1-8B", "handoff": handoff}
    path = _points_file(tmp_path / "points.json", **facts, tensor_parallel_size=2)
    link = _planned("--profile", path, "--model", "llama-3.1-8b").scenario.link
    assert (link.name, link.bandwidth, link.latency) == ("as measured", 2.0**31, 0.001)
    link = _planned("--profile", path).scenario.link
    assert (link.bandwidth, link.latency) == (float("inf"), 0.004)
    words = ("--model", "llama-3.1-8b", "--link", "eth-10")
    assert _planned("--profile", path, *words).scenario.link.name == "eth-10"
    handoff["seconds_per_byte"] = 0.0
    path = _points_file(tmp_path / "flat.json", **facts)
    link = _planned("--profile", path, "--model", "llama-3.1-8b").scenario.link
    assert (link.bandwidth, link.latency) == (float("inf"), 0.004)
    path = _points_file(tmp_path / "wrong.json", handoff=handoff | {"mean": -1.0})
    with pytest.raises(ConfigError, match=r"handoff\.mean"):
        _planned("--profile", path)


def test_a_profile_without_a_model_names_the_one_it_measured(tmp_path: Path) -> None:
    path = _points_file(tmp_path / "points.json", vllm="0.33.0", machine="a script")
    planned = _planned("--profile", path, "--link", "none")
    assert planned.model == "org/m"
    assert f"points of {path} (org/m, vLLM 0.33.0, a script), " in planned.scenario.words()[0]


@pytest.mark.parametrize("key", known_models.MODELS)
def test_a_known_model_is_known_and_served_by_each_of_its_names(key: str) -> None:
    hub_name = known_models.HUB_NAMES.get(key, key)
    for name in (key, key.upper(), hub_name, hub_name.rpartition("/")[2]):
        assert known_model.load(name) == known_model.load(key)
        assert known_models.servable_name(name) == hub_name


def test_a_config_is_served_by_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert known_models.servable_name(str(tmp_path / "config.json")) == str(tmp_path)
    assert known_models.servable_name(str(tmp_path)) == str(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert known_models.servable_name("config.json") == "."
    assert known_models.servable_name("org/m") == "org/m"


def test_no_default_is_a_free_handoff() -> None:
    measured = {"live"}  # by the engines themselves
    assert {kind for kind, link in step_sources.DEFAULT_LINKS.items() if link == "none"} == measured
    alone = PerformanceSource("profile", "points.json")
    assert step_sources.default_link("profile", alone, alone).name == "eth-25"
    beside = msgspec.structs.replace(alone, beside=1)
    assert step_sources.default_link("profile", beside, beside).name == "loopback"
    elsewhere = msgspec.structs.replace(beside, machine="another")
    assert step_sources.default_link("profile", beside, elsewhere).name == "eth-25"


def test_a_profile_of_another_model_or_version_is_refused(tmp_path: Path) -> None:
    path = _points_file(tmp_path / "p.json")
    with pytest.raises(ConfigError, match=r"measured org/m, not llama-3\.1-8b"):
        _planned("--profile", path, "--model", "llama-3.1-8b")
    other = _points_file(tmp_path / "d.json", model="org/n")
    words = ("--profile", path, "--link", "none", "--decode-profile")
    with pytest.raises(ConfigError, match="--decode-profile: it measured org/n, and --profile org"):
        _planned(*words, other)
    assert _planned(*words, _points_file(tmp_path / "d.json", model="/local/M"))
    with pytest.raises(ConfigError, match="--decode-gpu goes with --gpu"):
        _planned("--profile", path, "--link", "none", "--decode-gpu", "h100")
    old = _points_file(tmp_path / "old.json", vllm="0.27.1+cpu")
    with pytest.raises(ConfigError, match=r"vllm is 0\.27\.1\+cpu; this release works with 0\.28"):
        _planned("--profile", old, "--link", "none")
    for fine in ("0.28.0", "0.40.0rc1.dev3+gabc", "a build of mine"):
        _planned("--profile", _points_file(tmp_path / "p.json", vllm=fine), "--link", "none")


def test_a_local_folder_is_another_model_only_by_a_known_name(tmp_path: Path) -> None:
    """A folder may have any name; profiles of vLLM with an alias have any name, too."""
    for name in ("model", "Llama-3.1-8B", "Qwen3-32B"):
        (tmp_path / name).mkdir()
        config = known_models.MODELS["llama-3.1-8b"]
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    path = _points_file(tmp_path / "p.json", model="meta-llama/Llama-3.1-8B-Instruct")
    words = ("--profile", path, "--model")
    for fine in ("model", "model/config.json", "Llama-3.1-8B"):
        assert _planned(*words, str(tmp_path / fine))
    with pytest.raises(ConfigError, match=r"not .*Qwen3-32B/config\.json: give the --model"):
        _planned(*words, str(tmp_path / "Qwen3-32B" / "config.json"))
    _points_file(tmp_path / "p.json", model="alias")
    assert _planned(*words, str(tmp_path / "Qwen3-32B"))


@pytest.mark.parametrize(("gpu", "sequences"), [("", 128), ("NVIDIA H100 80GB HBM3", 256)])
def test_a_profile_of_no_gpu_has_vllms_limits_on_a_cpu(
    gpu: str, sequences: int, tmp_path: Path
) -> None:
    path = _points_file(tmp_path / "p.json", gpu=gpu)
    scenario = _planned("--profile", path, "--link", "none").scenario
    limits = scenario.limits(scenario.prefill)
    assert (limits.budget, limits.sequences) == (2048, sequences)


def test_coefficients_have_vllms_limits_on_an_a100() -> None:
    scenario = _planned(*BASE, "--rules", "vllm").scenario
    assert scenario.limits(scenario.prefill).sequences == 256


@pytest.mark.parametrize(
    ("words", "made"),
    [
        (
            ["--gpu", "h100", "--model", "llama-3.1-8b"],
            "; defaults of vLLM 0.28 to 0.33; step times fitted to runs of vLLM 0.12 to 0.19, and",
        ),
        (["--profile", "p.json", "--link", "none"], "; step times fitted to vLLM 0.32.0"),
        (["--gpu", "l4", "--model", "llama-3.1-8b", "--rules", "distserve"], "to 0.19, and of "),
    ],
)
def test_an_answer_names_the_versions_that_it_is_of(
    words: list[str], made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _points_file(tmp_path / "p.json", vllm="0.32.0")
    scenario = _planned(*words).scenario
    document = {"made": documents.made(scenario, "m")}
    line = documents.made_line(document)
    assert made in line and ("defaults of" in line) == (not scenario.distserve)


def test_what_a_split_is_not_simulated_with_is_said(tmp_path: Path) -> None:
    scenario = _planned("--gpu", "h100", "--model", "llama-3.1-8b").scenario
    one = ReplicaGroup(1, 1, 1)
    found = launch_commands.remarks(scenario, Placement(one, one))
    assert any("not simulated" in note and "--max-concurrent-requests" in note for note in found)
    assert any("no hash_ids" in note for note in found)
    assert launch_commands.NO_COMPRESSION_ON_GPUS in found
    of_one = launch_commands.remarks(scenario, Placement(one))
    assert not any(word in note for note in of_one for word in ("simulated", "compress"))
    path = _points_file(tmp_path / "p.json")
    on_cpus = _planned("--profile", path, "--link", "none").scenario
    found = launch_commands.remarks(on_cpus, Placement(one, one))
    assert launch_commands.NO_COMPRESSION_ON_CPUS in found


@pytest.mark.parametrize(
    ("parent", "words", "end"),
    [
        (
            -1,
            [],
            "P reads from D what D has more; of the answers that D keeps the trace tells none",
        ),
        (1, [], "P reads from D what D has more"),
        (1, ["--policy", "round_robin"], "only what it lacks"),
        (1, ["--no-overlap"], "only what it lacks"),
    ],
)
def test_what_is_simulated_of_cached_prefixes_is_said(
    parent: int, words: list[str], end: str, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 600, "output_length": 500, "hash_ids": [1, 2]}
    later = row | {"timestamp": 9, "input_length": 1200, "hash_ids": [1, 3, 4]}
    turns = [row | {"chat_id": 1}, later | {"chat_id": 2, "parent_chat_id": parent}]
    path.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    words = ["--gpu", "h100", "--model", "llama-3.1-8b", "--workload", str(path), *words]
    one = ReplicaGroup(1, 1, 1)
    remarks = launch_commands.remarks(_planned(*words).scenario, Placement(one, one))
    (found,) = (note for note in remarks if note.startswith("simulated: prefixes"))
    assert found.removesuffix(" (parent_chat_id)").endswith(end)


def test_a_profile_of_several_gpus_is_served_with_as_many(tmp_path: Path) -> None:
    path = _points_file(tmp_path / "p.json", tensor_parallel_size=2, gpu="NVIDIA H100")
    planned = _planned("--profile", path, "--link", "none")
    one = ReplicaGroup(2, 1, 1)
    lines = launch_commands.commands(planned.scenario, Placement(one, one), "org/m")
    served = [line for line in lines if "serve" in line or " up " in line]
    assert len(served) == 3 and all("--tensor-parallel-size 2" in line for line in served)


def test_requests_that_the_model_does_not_take_are_left_out_or_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """OPT takes 2,048 tokens: vLLM answers longer requests with an error."""
    words = ["--gpu", "h100", "--model", "opt-13b", "--requests", "20", "--seeds", "1"]
    simulated = ["simulate", *words, "--colocated", "1x1", "--rate", "1", "--workload"]
    assert cli.main([*simulated, "2000:100"]) == 2
    refusal = "--model: the length of opt-13b: fewer than 2 requests of 2000:100 have at most 2048"
    assert refusal in capsys.readouterr().err
    assert cli.main([*simulated, "500:20", "--max-model-len", "4096"]) == 2
    assert "--max-model-len: opt-13b takes at most 2048 tokens" in capsys.readouterr().err
    path = tmp_path / "t.jsonl"
    rows = [(0, 1500), (1000, 2040), (2000, 600)]
    path.write_text(
        "".join(f'{{"timestamp":{t},"input_length":{n},"output_length":10}}\n' for t, n in rows)
    )
    found = _json(capsys, *simulated, str(path))
    assert (found["setting"]["requests"], found["setting"]["left_out"]) == (2, 1)
    assert cli.main([*simulated, str(path)]) == 0
    assert "1 of the trace left out: vLLM refuses their length" in capsys.readouterr().out
    assert cli.main(["plan", *words[:4], "--gpus", "2", "--replay", str(path)]) == 0
    assert "2 requests at 0.5 req/s, 1 left out" in capsys.readouterr().out


def test_kv_that_d_stores_in_another_form_is_refused(tmp_path: Path) -> None:
    """vLLM's default for GLM-5 is BF16 on H200 and FP8 on B200."""
    glm = next(one for one in MODELS if one.name == "GLM-5").config
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**glm, "quantization_config": {"quant_method": "fp8"}}))
    words = ("--model", str(path), "--requests", "20", "--decode-gpu", "b200", "--gpu")
    with pytest.raises(ConfigError, match=r"--decode-gpu: .* in another form on b200 than on h200"):
        plan_inputs.read(_parsed(*words, "h200"), 32, "--gpus")
    planned = plan_inputs.read(_parsed(*words, "b200"), 32, "--gpus")
    assert planned.scenario.prefill.model and planned.scenario.prefill.model.is_kv_fp8


def test_a_profiled_instance_has_the_gpus_of_the_measured_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A budget holds so many fewer, and each counts as its GPUs beside another's."""
    single = _points_file(tmp_path / "single.json")
    pair = _points_file(tmp_path / "pair.json", tensor_parallel_size=2)
    # Of 60 requests one more or less in time decides, and so does a CPU's order of sums.
    words = ["plan", "--link", "none", "--workload", "100:10", "--requests", "400", "--seeds", "1"]
    words += ["--jobs", "1", "--profile"]
    one, two = _json(capsys, *words, single), _json(capsys, *words, pair)
    assert two["colocated"]["n"] == one["colocated"]["n"] / 2
    assert two["colocated"]["gpus"] == one["colocated"]["gpus"] == 4
    per_gpu = one["colocated"]["goodput_per_gpu"] / 2
    assert two["colocated"]["goodput_per_gpu"] == pytest.approx(per_gpu, rel=0.2)
    mixed = _json(capsys, *words, single, "--decode-profile", pair)["best"]
    assert mixed["decode"]["tp"] == 2 and mixed["gpus"] <= 4
    assert cli.main([*words, pair, "--gpus", "2", "--rate", "1"]) == 0
    assert "2 GPUs for 1 req/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["plan", "--gpu", "gtx", "--model", "opt-13b"],
            "gtx is not a known GPU: give one of a100",
        ),
        (
            ["plan", "--gpu", "a100", "--model", "nope"],
            "nope is neither a folder with a config.json nor a known name",
        ),
        (["plan", "--gpu", "a100"], "give --model"),
        (["plan", "--model", "opt-13b"], "give one of --gpu, --profile and --coefficients"),
        (
            ["plan", *BASE, "--kv-cache-dtype", "nvfp4"],
            "--kv-cache-dtype: DisaggConnector serves no KV in nvfp4: give auto or fp8",
        ),
        (
            ["plan", "--coefficients", "x", "--model", "opt-13b"],
            "x is not known: give one of distserve-a100",
        ),
        (["plan", "--coefficients", "distserve-a100", "--model", "opt-175b"], "has no opt-175b"),
        (["plan", *QUICK, "--gpus", "0"], "--gpus: 0 is too few"),
        (["plan", *QUICK, "--report", ""], "--report: an empty text names no folder"),
        (["plan", *BASE, "--live", ""], "argument --live: an empty text names nothing"),
        (["plan", *BASE, "--prices", ""], "argument --prices: an empty text names nothing"),
        (["plan", *BASE, "--link", ""], "argument --link: an empty text names nothing"),
        (
            ["plan", *QUICK, "--jobs", "1025"],
            "--jobs: 1025 is not a number of processes, up to 1024",
        ),
        (["plan", *QUICK, "--kv-limit", "9" * 400], "9 is not a number of tokens: give at most"),
        (["plan", *BASE, "--node-links", "9" * 400], "9 is too many: give 1000000 or fewer"),
        (["plan", *QUICK, "--gpus", "513"], "--gpus: 513 is too many: give 512 or fewer"),
        (["plan", "--live", "http://h:1", "--report", "d"], "--report goes without --live"),
        (["plan", *QUICK, "--ttft-p99", "1e-3"], "nothing meets --ttft-p99 0.001: alone on the"),
        (["plan", "--live", "http://h:1", "--gpus", "8"], "--gpus goes without --live"),
        (
            ["plan", "--capacity-prefill", "5", "--capacity-decode", "9", "--rate", "4"],
            "--rate goes without --capacity-prefill",
        ),
        (
            ["plan", "--capacity-prefill", "5", "--capacity-decode", "9", "--gpus", "513"],
            "--gpus: 513 is too many: give 512 or fewer",
        ),
        (["plan", "--live", "http://h:1", "--instance", "9" * 5000 + "x1"], "is not TPxPP, as 2x1"),
        (["plan", *BASE, "--arrivals", "gamma:1e-320"], "gamma:CV with CV from 0.001 to 100"),
        (["plan", *BASE, "--rate", "1e-320"], "give requests/s, from 1e-09 to 1e+09"),
        (
            ["simulate", *BASE, "--rate", "1", "--colocated", "1x1", "--scale", "1e308:1"],
            "two factors from 1e-06 to 1e+06",
        ),
        (["plan", "--live", "http://h:1", "--by", "gpus"], "--by goes without --live"),
        (["plan", "--live", "http://h:1", "--prices", "f"], "--prices goes without --live"),
        (["plan", "--live", "http://h:1", "--rate", "1"], "--rate goes without --live"),
        (["plan", "--live", "http://h:1", "--replay", "t"], "--replay goes without --live"),
        (["plan", "--replay", "t", "--report", "d"], "--report goes without --replay"),
        (["plan", "--replay", "t", "--by", "gpus"], "--by goes without --replay"),
        (["plan", "--replay", "t", "--prices", "f"], "--prices goes without --replay"),
        (["plan", "--live", "http://h:1", "--spill"], "--spill goes without --live"),
        (
            ["plan", "--replay", "t", "--min-prompt-bytes", "9"],
            "--min-prompt-bytes goes without --replay",
        ),
        (["plan", *QUICK, "--min-prompt-bytes", "-1"], "--min-prompt-bytes: -1 is too few"),
        (["plan", *QUICK, "--spill"], "cannot be simulated: DistServe's rules have no such proxy"),
        (
            ["simulate", *QUICK, "--colocated", "1x1", "--rate", "1", "--spill"],
            "--spill goes with --prefill and --decode",
        ),
        *(
            (
                ["simulate", *BASE, "--colocated", "1x1", "--rate", "1", *flag],
                f"{flag[0]} goes with --prefill and --decode",
            )
            for flag in (
                ["--decode-gpu", "h200"],
                ["--decode-profile", "f"],
                ["--link", "none"],
                ["--overlap"],
                ["--prefill-concurrency", "9"],
                ["--min-prompt-bytes", "0"],
            )
        ),
        *(
            (["plan", "--replay", "t", *flag], f"{flag[0]} goes without --replay")
            for flag in (
                ["--requests", "20"],
                ["--seeds", "1"],
                ["--arrivals", "poisson"],
                ["--expert-parallel"],
            )
        ),
        *(
            (["plan", *question, *flag], f"{flag[0]} goes with {mode}")
            for question in (BASE, [*BASE, "--rate", "2"])
            for flag, mode in (
                (["--window", "60"], "--live"),
                (["--instance", "1x1"], "--live or --replay"),
            )
        ),
        (["plan", "--replay", "t", "--window", "9"], "--window goes with --live"),
        (["plan", "--live", "http://h:1", "--expert-parallel"], "--expert-parallel goes without"),
        (["plan", "--live", "http://h:1", "--window", "0"], "--window: 0 s is not between"),
        *(
            (["plan", *CLOSED, *flag], f"{flag[0]} goes without --capacity-prefill")
            for flag in (["--window", "9"], ["--ttft", "1"], ["--jobs", "2"], ["--spill"])
        ),
        (["plan", *CLOSED, "--workload", "9:9"], "--workload goes with --model"),
        (["plan", *CLOSED, "--kv-cache-dtype", "fp8"], "--kv-cache-dtype goes with --model"),
        (["plan", "--profile", "p", "--kv-cache-dtype", "fp8"], "goes with --model"),
        (
            ["plan", *QUICK, "--prefill-concurrency", "9"],
            "--prefill-concurrency goes without --rules distserve",
        ),
        (["plan", *QUICK, "--gpus", "1"], "--gpus: 1 is too few"),
        (
            ["simulate", *QUICK, "--colocated", "1x1", "--rate", "1", "--seeds", "1001"],
            "--seeds: 1001 is too many: give 1000 or fewer",
        ),
        (["plan", *QUICK, "--requests", "10000001"], "--requests: 10000001 is too many"),
        (["plan", *QUICK, "--ttft", "0.001"], "nothing meets --ttft 0.001"),
        (["plan", *QUICK, "--tpot", "0.001"], "nothing meets --tpot 0.001"),
        (["plan", *QUICK, "--itl", "0.001"], "nothing meets --itl 0.001"),
        (["plan", *QUICK, "--itl", "0"], "--itl: 0.0 is not a time"),
        (["plan", *QUICK, "--ttft", "nan"], "--ttft: nan is not a time"),
        (["plan", *QUICK, "--attainment", "90"], "--attainment: 90.0 is not a share"),
        (["plan", *QUICK, "--workload", "nope"], "--workload: nope is neither a file nor known"),
        (
            ["plan", *QUICK, "--link", "string"],
            "--link: string is not known: give one of none, loopback",
        ),
        (["plan", *QUICK, "--link", "0"], "--link: 0 GB/s is not a speed"),
        (
            ["plan", "--gpu", "l4", "--model", "llama-3.1-70b", "--gpus", "2"],
            "llama-3.1-70b fits nowhere on 2 GPUs of l4",
        ),
        (["plan", "--capacity-prefill", "5.6"], "go together: give --capacity-decode"),
        (["plan", *QUICK, "--gpus", "many"], "argument --gpus: invalid int value: 'many'"),
        (
            ["plan", "--capacity-prefill", "-1", "--capacity-decode", "1"],
            "--capacity-prefill: -1.0 is not a rate",
        ),
        (["plan", "--profile", "nope.json"], "--profile: nope.json cannot be read"),
        (
            ["simulate", *QUICK, "--prefill", "2x1", "--decode", "0x1", "--rate", "1"],
            "--decode: 0x1 is not TPxPP",
        ),
        (
            ["simulate", *QUICK, "--prefill", "3x1", "--decode", "1x1", "--rate", "1"],
            "--prefill: 3x1 cannot be simulated",
        ),
        (
            ["simulate", *QUICK, "--prefill", "2x1", "--decode", "1x1", "--rate", "0"],
            "--rate: 0.0 is not a rate",
        ),
        (
            [
                "simulate",
                *QUICK,
                "--prefill",
                "2x1",
                "--decode",
                "1x1",
                "--rate",
                "1",
                "--scale",
                "2",
            ],
            "--scale: 2 is not P:D",
        ),
        (
            ["simulate", *QUICK, "--prefill", "2x1", "--rate", "1"],
            "give --prefill and --decode, or --colocated",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    try:
        status: str | int | None = cli.main(words)
    except SystemExit as exit:  # argparse's
        status = exit.code
    assert status == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("plan: ")]
    assert out == "" and len(lines) == 1
    assert lines[0].startswith(f"vllm-disagg {words[0]}: ") and expected in lines[0]


def test_what_nothing_meets_is_told_with_the_fastest_instance() -> None:
    deepseek = known_model.load("deepseek-v3")
    wide = PerformanceSource(
        "roofline", "h100", deepseek, hardware.gpu("h100"), expert_parallel=True
    )
    scenario = msgspec.structs.replace(
        distserve_scenario("opt-13b", 0.01, 16, 20, 1), prefill=wide, decode=wide
    )
    prompts = scenario.samples()[0].prompts
    eight = unloaded_prefill(wide.latency(8, 1, 2), sorted(prompts)[17])
    assert f"take {eight:.3g} s; give more" in plan._nothing(scenario), "of TP8 DP2"
    # One head and 61 layers: only instances with data parallelism hold the weights.
    odd = msgspec.structs.replace(wide, model=msgspec.structs.replace(deepseek, heads=1))
    assert not odd.shapes(16) and odd.layouts(16)
    only = msgspec.structs.replace(scenario, prefill=odd, decode=odd)
    assert plan._nothing(only).startswith("nothing meets --ttft 0.01: alone on the fastest")


def test_what_nothing_meets_may_run_on_either_gpu_type() -> None:
    found = known_model.load("llama-3.1-8b")
    slow, fast = (
        PerformanceSource("roofline", name, found, hardware.gpu(name)) for name in ("l4", "h100")
    )
    objective = Objective(1e-4, 1e-4, itl=1e-4)
    scenario = msgspec.structs.replace(
        distserve_scenario("opt-13b", 0.2, 1, 20, 1), objective=objective
    )
    expected = plan._nothing(msgspec.structs.replace(scenario, prefill=fast, decode=fast))
    for prefill, decode in ((slow, fast), (fast, slow)):
        two = msgspec.structs.replace(scenario, prefill=prefill, decode=decode)
        assert plan._nothing(two) == expected
    loose = msgspec.structs.replace(objective, ttft=10.0, tpot=10.0)
    said = plan._nothing(msgspec.structs.replace(two, objective=loose))
    assert said.startswith("nothing meets --itl 0.0001: ")
    said = plan._nothing(
        msgspec.structs.replace(two, objective=msgspec.structs.replace(loose, itl=10.0))
    )
    assert said.startswith("nothing meets --ttft 10, --tpot 10 and --itl 10 together on 1 GPUs")
    assert " and --itl 0." in said


def test_a_report_without_matplotlib_is_refused_in_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("vllm_disagg.planner.commands.report.find_spec", lambda name: None)
    assert cli.main(["plan", *QUICK, "--report", str(tmp_path)]) == 2
    assert "pip install 'vllm-disagg[plot]'" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_plan_leaves_no_process(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "vllm_disagg.cli", "plan", *BASE, "--gpus", "8", "--jobs", "2"]
    with subprocess.Popen(
        [*command, "--requests", "1000"], stderr=subprocess.PIPE, text=True
    ) as plan:
        assert plan.stderr is not None
        assert "placements" in plan.stderr.readline()  # workers have evaluated some
        workers = psutil.Process(plan.pid).children(recursive=True)
        assert len(workers) >= 2
        plan.send_signal(number)
        plan.wait(60)
        _, alive = psutil.wait_procs(workers, timeout=60)
        assert not alive


def test_other_commands_do_not_load_the_planner_and_the_planner_not_numpy() -> None:
    code = (
        "import sys, vllm_disagg.cli as c; assert not any('planner' in m for m in sys.modules)\n"
        "import vllm_disagg.planner.commands.plan; assert 'numpy' not in sys.modules\n"
        "assert 'matplotlib' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


DRAFTING = [
    *("--gpu", "h100", "--model", "llama-3.1-8b", "--workload", "700:40", "--ttft", "2"),
    *("--tpot", "0.05", "--gpus", "2", "--jobs", "1", "--requests", "60", "--seeds", "1"),
]
DRAFTS = '{"method":"eagle3","num_speculative_tokens":2}'


def test_plan_tells_what_drafts_do_to_tpot(capsys: pytest.CaptureFixture[str]) -> None:
    assert _json(capsys, "plan", *DRAFTING)["drafts"] is None
    drafted = [*DRAFTING, "--speculative-config", DRAFTS, "--acceptance-length", "2.2"]
    found = _json(capsys, "plan", *drafted)
    effect = found["drafts"]
    assert (effect["method"], effect["tokens"], effect["acceptance_length"]) == ("eagle3", 2, 2.2)
    assert 0.45 < effect["tpot_alone"] / effect["tpot_alone_without"] < 0.7
    assert "drafts: 2 by eagle3, 2.2 tokens a step" in found["setting"]["latency"]["decode"]
    assert cli.main(["plan", *drafted]) == 0
    printed = capsys.readouterr().out
    alone = f"{1e3 * effect['tpot_alone']:.3g} ms, {1e3 * effect['tpot_alone_without']:.3g} ms"
    assert f"drafts: 2 by eagle3, 2.2 a step: TPOT of a request alone {alone} without" in printed


def test_commands_start_engines_that_draft() -> None:
    source = PerformanceSource(
        "roofline",
        "h100",
        known_model.load("llama-3.1-8b"),
        hardware.gpu("h100"),
        drafts=speculative.parse(DRAFTS, 2.2),
    )
    scenario = distserve_scenario("opt-13b", 0.2, 2, 60, 1)
    scenario = msgspec.structs.replace(scenario, prefill=source, decode=source)
    scenario = msgspec.structs.replace(scenario, distserve=False)
    split = Placement(ReplicaGroup(1, 1, 1), ReplicaGroup(1, 1, 1))
    together = Placement(ReplicaGroup(1, 1, 1), budget=8192)
    for placement, engines in ((split, 2), (together, 1)):
        lines = launch_commands.commands(scenario, placement, "m")
        served = [line for line in lines if " vllm serve " in f" {line}"]
        assert len(served) == engines
        assert all(f"--speculative-config '{DRAFTS}'" in line for line in served)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--acceptance-length", "2"], "--acceptance-length goes with --speculative-config"),
        (["--speculative-config", DRAFTS], "goes with --acceptance-length"),
        (
            ["--speculative-config", DRAFTS, "--acceptance-length", "2", "--itl", "1"],
            "--itl goes without --speculative-config",
        ),
    ],
)
def test_flags_of_drafts_go_together(
    capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert cli.main(["plan", *DRAFTING, *words]) == 2
    printed = capsys.readouterr().err
    assert told in printed and printed.count("\n") == 1


def test_drafts_need_a_roofline(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--speculative-config", DRAFTS, "--acceptance-length", "2"]
    assert cli.main(["plan", *QUICK, *words]) == 2
    assert "--speculative-config goes with --gpu" in capsys.readouterr().err
