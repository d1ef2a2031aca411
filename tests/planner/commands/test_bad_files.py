"""Files and numbers that no plan can be made of: one line and exit status 2, no traceback."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_outcomes import refusal

from vllm_disagg.planner.cost.known_models import MODELS

DEEP = "[" * 200_000 + "]" * 200_000
HUGE = 10**400
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def _profile(**changed: Any) -> str:
    prefill = [{"tokens": [n], "seconds": 1e-4 * n} for n in (32, 128, 512)]
    decode = [{"contexts": [n], "seconds": 0.01} for n in (32, 128, 512)]
    points: dict[str, Any] = {
        "version": 2,
        "path": {"seconds": 0.0, "seconds_per_token": 0.0},
        "model": "org/m",
        "kv_tokens": 20000,
    }
    return json.dumps({**points, "prefill": prefill, "decode": decode, **changed})


def _config(**changed: Any) -> str:
    return json.dumps({**MODELS["llama-3.1-8b"], **changed})


TINY = [{"contexts": [n], "seconds": 1e-320} for n in (32, 128, 512)]
PROFILES = {
    "deep": _profile()[:-1] + f', "more": {DEEP}}}',
    "latin": _profile(machine="@").replace("@", "\xff"),
    "tiny times": _profile(decode=TINY),
    "huge KV": _profile(kv_tokens=HUGE),
    "huge prompts": _profile(prefill=[{"tokens": [HUGE], "seconds": 1.0}] * 3),
    "huge path": _profile(path={"seconds": 1e308, "seconds_per_token": 0.0}),
    "huge step": _profile(mixed=[{"tokens": [HUGE], "contexts": [1], "seconds": 1.0}] * 3),
}
CONFIGS = {
    "deep": f'{{"a": {DEEP}}}',
    "huge": _config(hidden_size=HUGE),
    "many digits": _config().replace("4096", "9" * 5000),
}
TRACES = {
    "deep lines": f'{{"num_prefill_tokens": {DEEP}}}',
    "deep array": DEEP,
    "huge prompt": f"{AZURE}0,1e200,1\n1,1,1\n",
    "huge answer": f"{AZURE}0,1,1e308\n1,1,1\n",
    "a long field": f"{AZURE}0,1,1\n{'7' * 200_000},1,1\n",
    "a long name": f"{'a' * 200_000},b\n1,1\n",
}
BASE = ["--coefficients", "distserve-a100", "--model", "opt-13b", "--requests", "20"]
DRAFTS = ["--gpu", "h100", "--model", "opt-13b", "--acceptance-length", "2"]
WORDS = {
    "400 digits": [*BASE, "--workload", f"{'9' * 400}:5"],
    "5000 digits": [*BASE, "--workload", f"5:{'9' * 5000}"],
    "a long name": ["--gpu", "h100", "--model", "m" * 5000],
    "a rate": [*BASE, "--rate", "1e308"],
    "drafts": [*DRAFTS, "--speculative-config", DEEP],
}


def _refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Returns the one line with which these words are refused."""
    line = refusal(capsys, "plan", *words, "--jobs", "1")
    assert len(line.splitlines()) == 1 and line.startswith("vllm-disagg plan: --")
    assert len(line) < 1000 or len(max(words, key=len)) > 1000, "a value is shortened"
    return line


@pytest.mark.parametrize("name", PROFILES)
def test_profiles(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "points.json"
    path.write_text(PROFILES[name], encoding="latin-1")
    _refused(capsys, "--profile", str(path), "--link", "none", "--requests", "20")


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.json"
    path.write_text(CONFIGS[name])
    _refused(capsys, "--gpu", "h100", "--model", str(path), "--requests", "20")


@pytest.mark.parametrize("name", TRACES)
def test_traces(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace"
    path.write_text(TRACES[name])
    _refused(capsys, *BASE, "--workload", str(path))


@pytest.mark.parametrize("name", WORDS)
def test_flags(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    _refused(capsys, *WORDS[name])


DEMAND = {  # by the flag of the file: its content and words of the refusal
    "a price's hole": ("--prices", '{"h100": null}', "has null for h100: give a price"),
    "a price too few": ("--prices", '{"a100": 1}', "has no price of h100"),
    "a gap in the file": ("--prices", '{"h100": }', "cannot be read as JSON"),
    "an arrival before 0": ("--workload", f"{AZURE}0,9,9\n-5,9,9\n", "line 3: TIMESTAMP is -5"),
    "an empty prompt": ("--workload", f"{AZURE}0,0,9\n", "line 2: ContextTokens is 0"),
    "half a token": ("--workload", f"{AZURE}0,9,9.5\n", "line 2: GeneratedTokens is 9.5"),
    "no answer": ("--workload", f"{AZURE}0,9\n", "line 2: GeneratedTokens is missing"),
    "no request": ("--workload", AZURE, "the file holds no requests"),
    "an unknown type": ("--model", '{"model_type": "nope"}', "model_type nope of "),
    "no type": ("--model", _config(model_type=None), "model_type without a name of "),
    "no layers": ("--model", '{"model_type": "llama"}', "has no num_hidden_layers"),
}


@pytest.mark.parametrize("with_report", [False, True])
@pytest.mark.parametrize("name", DEMAND)
def test_files_of_a_demand(
    name: str, with_report: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flag, content, words = DEMAND[name]
    path = tmp_path / "file"
    path.write_text(content)
    given = ["--gpu", "h100", "--model", "llama-3.1-8b", "--rate", "2", "--gpus", "2"]
    report = ["--report", str(tmp_path / "out")] if with_report else []
    line = _refused(capsys, *given, *report, flag, str(path))
    assert words in line and not list(tmp_path.glob("out/*"))
