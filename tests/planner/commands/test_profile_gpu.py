"""`--gpu` beside `--profile`: the GPU that a file must have measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_outcomes import json_answer, refusal
from profile_files import profile_file

from vllm_disagg.planner.cost import hardware

A100 = "NVIDIA A100-SXM4-80GB"
QUICK = ["--workload", "100:10", "--requests", "60", "--seeds", "1"]
QUICK += ["--ttft", "1", "--tpot", "0.1"]
COMMANDS = {
    "plan": ["plan", "--link", "none", "--gpus", "2", "--jobs", "1"],
    "simulate": ["simulate", "--colocated", "1x1", "--rate", "1"],
}


def _refusal(capsys: pytest.CaptureFixture[str], command: str, *words: str) -> str:
    return refusal(capsys, *COMMANDS[command], *words, *QUICK)


def _answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    return json_answer(capsys, *COMMANDS["plan"], *words, *QUICK)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        (A100, "a100"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        # Other boards and chips, whose names hold that of a type.
        ("NVIDIA L40", ""),
        ("NVIDIA A10G", ""),
        ("NVIDIA H100 PCIe", ""),
        ("NVIDIA H100 NVL", ""),
        ("NVIDIA H20-3e", ""),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", ""),
        ("NVIDIA A100-PCIE-40GB", ""),
        ("NVIDIA GH200 480GB", ""),
        ("", ""),
    ],
)
def test_a_drivers_name_is_that_of_one_type(name: str, key: str) -> None:
    assert hardware.type_of(name) == key


def test_each_type_is_known_by_its_own_name() -> None:
    assert all(hardware.type_of(key) == key for key in hardware.GPUS)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"gpu": A100}, f"measured {A100}, not h100: give --gpu a100, or give a profile of h100"),
        ({"gpu": "NVIDIA H100 PCIe"}, "measured NVIDIA H100 PCIe, not h100: leave --gpu out, or"),
        ({"machine": "EPYC, 2 logical CPUs"}, "names no GPU (EPYC, 2 logical CPUs), so it is not"),
        ({}, "names no GPU, so it is not known to be of h100: run vllm-disagg profile on the"),
    ],
)
def test_a_profile_of_another_gpu_is_refused(
    command: str,
    fields: dict[str, str],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = profile_file(tmp_path / "p.json", **fields)
    line = _refusal(capsys, command, "--profile", path, "--gpu", "h100")
    assert line.startswith(f"vllm-disagg {command}: --profile: {path} ") and expected in line


def test_the_decode_side_has_a_gpu_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prefill = profile_file(tmp_path / "p.json", gpu="NVIDIA H100 80GB HBM3")
    decode = profile_file(tmp_path / "d.json", gpu="NVIDIA H20")
    words = ["--profile", prefill, "--gpu", "h100", "--decode-profile", decode]
    line = _refusal(capsys, "plan", *words)
    assert f"--decode-profile: {decode} measured NVIDIA H20, not h100: give --decode-gpu" in line
    line = _refusal(capsys, "plan", *words, "--decode-gpu", "l4")
    assert "measured NVIDIA H20, not l4: give --decode-gpu h20, or give a profile of l4" in line
    found = _answer(capsys, *words, "--decode-gpu", "h20")["best"]
    assert (found["prefill"]["gpu"], found["decode"]["gpu"]) == ("h100", "h20")
    line = _refusal(capsys, "plan", "--profile", prefill, "--gpu", "h100", "--decode-gpu", "h20")
    assert line.endswith("--decode-gpu goes with --gpu, or with --decode-profile")


def test_another_model_or_flag_beside_the_gpu_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = profile_file(tmp_path / "p.json", gpu=A100)
    words = ["plan", "--profile", path, "--gpu", "a100"]
    line = _refusal(capsys, *words, "--model", "qwen3-32b")
    assert "measured meta-llama/Llama-3.1-8B, not qwen3-32b" in line
    for flag, value in (("--node-gpus", "8"), ("--node-links", "1")):
        line = _refusal(capsys, *words, flag, value)
        assert line.endswith(f"{flag} goes with --gpu, without --profile")
    line = _refusal(capsys, *words, "--coefficients", "distserve-a100")
    assert "give one of --gpu, --profile and --coefficients" in line
    assert "gtx is not a known GPU" in _refusal(capsys, *words, "--gpu", "gtx")


def test_a_profile_of_a_named_gpu_has_its_price_power_and_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = profile_file(tmp_path / "p.json", gpu=A100)
    prices = tmp_path / "prices.json"
    prices.write_text('{"a100": 2.5}')
    rate = ["--profile", path, "--rate", "1", "--prices", str(prices)]
    line = _refusal(capsys, "plan", *rate)
    assert "--prices goes with --gpu, also beside --profile" in line
    line = _refusal(capsys, "plan", *rate[:4], "--by", "power")
    assert "--by power needs --gpu, also beside --profile" in line
    found = _answer(capsys, *rate, "--gpu", "a100")
    row = found["disaggregated"]
    assert (row["gpus"], row["cost_per_hour"], row["kilowatts"]) == (2, 5.0, 0.8)
    assert found["setting"]["latency"]["prefill"].startswith("fitted to the measured points")
    without = _answer(capsys, "--profile", path)
    assert "cost_per_hour" not in without["best"] and "kilowatts" not in without["best"]
