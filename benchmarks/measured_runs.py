"""Runs of vLLM that others have measured, and how their scripts served them.

Each run is a closed loop, recorded in silicon/measured_runs.csv. Runs recorded with expert
parallelism or data-parallel attention are left out. Runs of one configuration count once, with
their median.
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from vllm_disagg.planner.cost import families
from vllm_disagg.planner.cost.known_models import MODELS
from vllm_disagg.planner.cost.sizes import ModelCosts

DATA = Path(__file__).resolve().parent / "silicon" / "measured_runs.csv"
GPUS = {"h100_sxm": "h100", "h200_sxm": "h200", "b200_sxm": "b200", "b300_sxm": "b300"}
# InferenceX draws lengths between 0.8 of the nominal length and all of it (its
# `--random-range-ratio`).
LEAST_LENGTH_SHARE = 0.8
# Tokens of a step in the largest CUDA graph: vLLM 0.10 to 0.18 by default, and by the flag
# `--max-cudagraph-capture-size` of InferenceX's scripts since April 2026.
GRAPH_TOKENS = 512
FLAG_GRAPH_TOKENS = 2048
# Runs that cannot be what they are recorded as. Beside the decode steps, those of Llama 8B leave
# a median of 0.3 of the time that kernels need for the prompts, two of Qwen3 none at all: prompts
# were cached, computed elsewhere, or shorter. They are listed by name and not fitted. The last line
# has the means with them too.
LLAMA_8B = "Llama-3.1-8B-Instruct-FP8"
MINIMAX_M2 = {
    "model_type": "minimax_m2",
    "num_hidden_layers": 62,
    "hidden_size": 3072,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 1536,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "vocab_size": 200064,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama-3.1-70B": MODELS["llama-3.1-70b"],
    LLAMA_8B: MODELS["llama-3.1-8b"],
    "Qwen3-32B": MODELS["qwen3-32b"],
    "MiniMax-M2.5": MINIMAX_M2,
}
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8"},
    "fp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}
# As the config.json of nvidia/MiniMax-M2.5-NVFP4: aiconfigurator-core 0.12.0 has a copy.
MINIMAX_NVFP4 = {
    **QUANTIZATIONS["fp4"],
    "ignore": ["lm_head", "model.layers.*.block_sparse_moe.gate", "model.layers.*.self_attn*"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
}


class ServingSettings(NamedTuple):
    """What the script of a run gave to `vllm serve`."""

    is_kv_fp8: bool  # by a flag; a checkpoint may have it too
    utilization: float  # of a GPU's memory
    budget: int  # tokens of a step


class MeasuredRun(NamedTuple):
    """Configuration of a closed loop; equal ones are one run."""

    model: str
    system: str
    precision: str
    tp: int
    prompt: int
    answer: int
    clients: int
    settings: ServingSettings

    @property
    def is_nvidias(self) -> bool:
        """Whether NVIDIA measured the run; the others are InferenceX's."""
        return self.model in (LLAMA_8B, "Qwen3-32B")

    @property
    def graph_tokens(self) -> int:
        """Tokens of the largest CUDA graph of the run's engine."""
        has_flag = self.model == "MiniMax-M2.5" and self.settings.is_kv_fp8
        return FLAG_GRAPH_TOKENS if has_flag else GRAPH_TOKENS

    @property
    def is_doubtful(self) -> bool:
        """Whether the run cannot be what it is recorded as."""
        is_qwen = self.model == "Qwen3-32B" and self.precision == "fp8" and self.tp < 8
        return self.model == LLAMA_8B or is_qwen


class RunTimes(NamedTuple):
    """TTFT and TPOT of a run, in seconds."""

    ttft: float
    tpot: float


def settings(row: dict[str, str]) -> ServingSettings:
    """Returns how a row's engine was served.

    Source: InferenceX's scripts (SemiAnalysisAI/InferenceX, benchmarks/) at the date of the run.
    NVIDIA published none of its own: vLLM's defaults.
    """
    if row["model_path"].endswith("Llama-3.1-70B"):
        return ServingSettings(True, 0.90, 8192)
    if "MiniMax" not in row["model_path"]:
        return ServingSettings(False, 0.90, 8192)
    source = row["silicon_data_source"]
    if any(f"openai:v0.{minor}." in source for minor in (16, 17, 18)):
        return ServingSettings(False, 0.95, 8192)
    return ServingSettings(True, 0.90, 2 * int(row["isl"]))


def load() -> dict[MeasuredRun, RunTimes]:
    """Loads the runs with pure tensor parallelism, equal ones with their median."""
    found: dict[MeasuredRun, list[RunTimes]] = {}
    with DATA.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["attention_dp_size"] not in ("", "1") or row["moe_ep_size"] not in ("0", "1"):
                continue
            numbers = (row["tp_size"], row["isl"], row["osl"], row["batch_size"])
            tp, prompt, answer, clients = map(int, numbers)
            model = row["model_path"].rpartition("/")[2]
            kind = (model, row["system"], row["precision"], tp)
            run = MeasuredRun(*kind, prompt, answer, clients, settings(row))
            seconds = float(row["silicon_ttft_ms"]) / 1e3, float(row["silicon_tpot_ms"]) / 1e3
            found.setdefault(run, []).append(RunTimes(*seconds))
    return {
        run: RunTimes(median(t.ttft for t in times), median(t.tpot for t in times))
        for run, times in sorted(found.items())
    }


@cache
def costs(model: str, precision: str, is_kv_fp8: bool) -> ModelCosts:
    """Returns the sizes of a model at a precision."""
    config = {k: v for k, v in CONFIGS[model].items() if k != "quantization_config"}
    if (model, precision) == ("MiniMax-M2.5", "fp4"):
        config["quantization_config"] = MINIMAX_NVFP4
    elif precision:
        config["quantization_config"] = QUANTIZATIONS[precision]
    if is_kv_fp8:
        config["kv_cache_dtype"] = "fp8"
    return families.parse(model, config)


def costs_of(run: MeasuredRun) -> ModelCosts:
    """Returns the sizes of a run's model."""
    return costs(run.model, run.precision, run.settings.is_kv_fp8)


def mean_lengths(run: MeasuredRun) -> tuple[int, float]:
    """Returns the mean tokens of a prompt and of an answer."""
    share = 1.0 if run.is_nvidias else (1 + LEAST_LENGTH_SHARE) / 2
    return round(run.prompt * share), run.answer * share
