"""`--step-times aiconfigurator`: tables of a package that may be missing."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from command_outcomes import json_answer, refusal

from vllm_disagg.errors import ConfigError
from vllm_disagg.planner.commands import flags, live, plan_inputs
from vllm_disagg.planner.cost import aiconfigurator, hardware
from vllm_disagg.planner.cost.known_models import MODELS

WORDS = ["--gpu", "h100", "--model", "llama-3.1-8b", "--workload", "500:20", "--ttft", "1"]
WORDS += ["--requests", "60", "--seeds", "1", "--gpus", "2", "--jobs", "1"]
TABLES = ["--step-times", "aiconfigurator"]
SHARED, TOKEN, ATTENTION, SQUARE = 5.0, 0.02, 0.8, 4e-7  # milliseconds, as the others
SEQUENCE, CONTEXT = 0.001, 4e-5


class Engine:
    """Engine of the package, by arithmetic; TP halves its times, and TP4 has no kernels."""

    def __init__(self, degree: int = 1, has_attention: bool = True) -> None:
        self._degree = degree
        self._has_attention = has_attention

    def mixed_step_breakdown(
        self, ctx_tokens: int, gen_tokens: int, isl: int, osl: int
    ) -> tuple[float, float, float, float]:
        shared = SHARED + TOKEN * (ctx_tokens + gen_tokens)
        prompts = (ATTENTION + SQUARE * ctx_tokens * isl) * self._has_attention
        found = [part / self._degree for part in (shared, prompts, 0.0)]
        return sum(found), found[0], found[1], found[2]

    def decode_step_latency(self, gen_tokens: int, isl: int, osl: int) -> float:
        attention = 0.4 + SEQUENCE * gen_tokens + CONTEXT * gen_tokens * isl
        return (SHARED + TOKEN * gen_tokens + attention) / self._degree


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Puts a package with `Engine` in place. Returns what is asked of it."""
    found: list[dict[str, Any]] = []

    def compile(name: str, system: str, backend: str, **more: Any) -> Engine:
        found.append({"name": name, "system": system, "backend": backend, **more})
        if more["tp_size"] == 4:
            raise RuntimeError("no kernels\nof TP4")
        return Engine(more["tp_size"], has_attention="DeepSeek" not in name)

    package = ModuleType("aiconfigurator_core")
    sdk = ModuleType("aiconfigurator_core.sdk")
    sdk.EngineHandle = SimpleNamespace(compile=compile)  # type: ignore[attr-defined]
    sdk.perf_database = SimpleNamespace(  # type: ignore[attr-defined]
        resolve_query_version=lambda system, backend, slot: f"0.24.0 of {system}"
    )
    for module in (package, sdk):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(aiconfigurator, "version", lambda name: "0.12.0")
    monkeypatch.setattr(logging.getLogger("aiconfigurator_core"), "level", logging.NOTSET)
    return found


def _refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    return refusal(capsys, "plan", *words).removeprefix("vllm-disagg plan: ")


def _answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    return json_answer(capsys, "plan", *words)


def test_without_the_package_the_command_that_installs_it_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(aiconfigurator, "version", missing)
    line = _refusal(capsys, *WORDS, *TABLES)
    assert line.endswith("is not installed: pip install 'vllm-disagg[aiconfigurator]'")
    assert _answer(capsys, *WORDS)["best"], "nothing else needs it"
    assert _answer(capsys, *WORDS, "--step-times", "roofline")["best"]


def test_another_release_of_the_package_is_refused(
    asked: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(aiconfigurator, "version", lambda name: "0.13.1")
    line = _refusal(capsys, *WORDS, *TABLES)
    assert "aiconfigurator-core 0.13.1 is installed, and this release reads 0.12.x: pip" in line
    assert not asked


def test_tables_have_the_times_of_the_package() -> None:
    tables = aiconfigurator.tabulated(Engine(2))
    for n, context in ((1, 100), (40, 3000), (700, 900)):
        base, slope = tables.decode(n, True)
        expected = 1e-3 * Engine(2).decode_step_latency(n, context, 2)
        assert base + slope * n * context == pytest.approx(expected, rel=1e-3)
    for tokens, prompt in ((100, 100), (3000, 1500), (20_000, 20_000)):
        expected = 1e-3 * Engine(2).mixed_step_breakdown(tokens, 0, prompt, 2)[0]
        assert tables.mixed(tokens, tokens * prompt, 0, 0, True) == pytest.approx(
            expected, rel=0.01
        )
    with pytest.raises(ValueError, match="no time of this model's attention by itself"):
        aiconfigurator.tabulated(Engine(has_attention=False))


def test_a_plan_names_the_tables_and_has_shapes_with_kernels_alone(
    asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    found = _answer(capsys, *WORDS, *TABLES, "--gpus", "4", "--kv-cache-dtype", "fp8")
    origin = "aiconfigurator-core 0.12.0, kernels of vLLM 0.24.0 of h100_sxm"
    assert found["made"]["fitted_to"] == origin
    words = found["setting"]["latency"]["prefill"]
    assert words == f"{origin} on h100, TP1, TP2 alone: {aiconfigurator.ERROR_WORDS}"
    for row in (found["best"], *found["alternatives"]):
        assert {row[side]["tp"] for side in ("prefill", "decode")} <= {1, 2}
        assert {row[side]["pp"] for side in ("prefill", "decode")} == {1}
    assert found["setting"]["link"] == "ib-400" and found["best"]["kilowatts"] > 0
    assert [one["tp_size"] for one in asked] == [1, 2, 4]
    for one in asked:
        # Any other name it would look up on a hub.
        assert one["name"] == "meta-llama/Meta-Llama-3.1-8B" and one["system"] == "h100_sxm"
        assert one["backend"] == "vllm" and one["kvcache_quant_mode"] == "fp8"
        assert (one["moe_tp_size"], one["moe_ep_size"]) == (one["tp_size"], 1)
    assert not logging.getLogger("aiconfigurator_core").isEnabledFor(logging.WARNING)


def test_a_folder_is_read_by_the_package_too_and_each_gpu_has_its_own_tables(
    asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama-3.1-8b"]))
    words = [*WORDS, *TABLES, "--decode-gpu", "b200", "--model"]
    for name in (tmp_path, tmp_path / "config.json"):
        found = _answer(capsys, *words, str(name))
        assert found["best"]["decode"]["gpu"] == "b200"
    assert {one["name"] for one in asked} == {str(tmp_path)}
    systems = [(one["system"], one["tp_size"]) for one in asked]
    assert systems == [("h100_sxm", 1), ("h100_sxm", 2), ("b200_sxm", 1), ("b200_sxm", 2)] * 2


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--gpu", "h20"], "has no tables of h20 for vLLM: give a --gpu of a100, h100, h200"),
        (["--decode-gpu", "l4"], "has no tables of l4 for vLLM"),
        (["--model", "opt-13b"], "has no config.json of opt-13b: give --model a folder with"),
        (["--model", "mixtral-8x7b", "--expert-parallel"], "--expert-parallel goes without --step"),
        (
            ["--speculative-config", '{"method":"mtp","num_speculative_tokens":1}'],
            "--speculative-config goes without --step-times aiconfigurator",
        ),
        (
            ["--gpu", "b300", "--model", "deepseek-v3", "--gpus", "8"],
            "no times of deepseek-v3 there: ValueError: it has no time of this model's attention",
        ),
        (["--gpu", "l40s", "--model", "llama-3.1-70b"], "it needs at least 4: give --gpus 4"),
        (["--profile", "p"], "--step-times goes with --gpu, without another source"),
    ],
)
def test_words_that_do_not_fit_are_one_line(
    asked: list[dict[str, Any]],
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    expected: str,
) -> None:
    assert expected in _refusal(capsys, *WORDS, *TABLES, *words)


def test_a_model_that_needs_a_pipeline_is_refused(
    asked: list[dict[str, Any]], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    odd = {"num_attention_heads": 33, "num_key_value_heads": 33, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps({**MODELS["llama-3.1-70b"], **odd}))
    line = _refusal(capsys, *WORDS, *TABLES, "--gpus", "4", "--model", str(tmp_path))
    assert line.endswith(f"no times of {tmp_path} there: it has no pipelines, and needs one")
    assert not asked


def test_running_engines_have_their_own_times() -> None:
    parser = argparse.ArgumentParser()
    flags.add_arguments(parser)
    for words in (TABLES, ["--node-gpus", "4"], ["--node-links", "2"]):
        with pytest.raises(ConfigError, match=f"{words[0]} goes with --gpu"):
            plan_inputs.read(parser.parse_args(words), 2, "--gpus", live.UNMEASURED)


@pytest.mark.skipif(not find_spec("aiconfigurator_core"), reason="aiconfigurator-core is missing")
def test_the_package_itself(capsys: pytest.CaptureFixture[str]) -> None:
    gpu = hardware.gpu("h100")
    found = aiconfigurator.package_tables("llama-3.1-8b", gpu, [1, 2], is_kv_fp8=False)
    assert sorted(found.by_degree) == [1, 2] and "kernels of vLLM 0." in found.origin
    from aiconfigurator_core.sdk import EngineHandle

    engine = EngineHandle.compile(
        aiconfigurator.MODELS["llama-3.1-8b"], "h100_sxm", "vllm", kvcache_quant_mode="bfloat16"
    )
    tables = found.by_degree[1]
    for n, context in ((1, 1000), (8, 4000), (50, 2000), (300, 700)):
        base, slope = tables.decode(n, True)
        expected = 1e-3 * engine.decode_step_latency(n, context, 2)
        assert base + slope * n * context == pytest.approx(expected, rel=0.1)
    for tokens, prompt in ((300, 300), (2000, 1000), (8000, 8000)):
        expected = 1e-3 * engine.mixed_step_latency(tokens, 0, prompt, 2)
        assert tables.mixed(tokens, tokens * prompt, 0, 0, True) == pytest.approx(expected, rel=0.2)
    answer = _answer(capsys, *WORDS, *TABLES)
    assert answer["best"]["goodput"] > 0 and found.origin in answer["setting"]["latency"]["decode"]
