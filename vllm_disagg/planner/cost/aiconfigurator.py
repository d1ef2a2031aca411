"""Step times of NVIDIA's aiconfigurator-core, an optional package with tables of measured kernels.

The package adds up kernels that were measured with one release of vLLM on one GPU type. It takes
GPUs and models by names of its own. Names that it does not have it would look up on the Hugging
Face hub: none is given to it.
"""

from __future__ import annotations

import logging
import os.path
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any, NamedTuple, Protocol

from ...errors import ConfigError
from .hardware import GpuType
from .known_models import key_of
from .step_tables import StepTables, step_tables

PACKAGE = "aiconfigurator-core"
VERSIONS = "0.12."  # of the package: its Python API changes from one to the next
INSTALL = "pip install 'vllm-disagg[aiconfigurator]'"
BACKEND = "vllm"
SYSTEMS = {
    "a100": "a100_sxm",
    "h100": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "l40s": "l40s",
    "rtx-pro-6000": "rtx_pro_6000_server",
}
# Known models of which the package has a config.json.
MODELS = {
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
}
# Mean errors of `python benchmarks/aiconfigurator_times.py`.
ERROR_WORDS = "off in the mean, on 39 measured runs, TPOT by 29% and TTFT by 19%"
SECONDS = 1e-3  # of a millisecond
# Tokens of the entries: two for each doubling from 32 on, where kernels change.
TOKENS = (1, 2, 4, 8, 16, *(half << n for n in range(4, 13) for half in (2, 3)), 16_384)
CONTEXTS = (512, 8192)  # tokens, of the two decode steps through which a line goes
LONG_PROMPT = 8192  # tokens, of the prompts that show the time of a square
SHORTER = 4  # so many more prompts have as many tokens


class StepEngine(Protocol):
    """Engine of the package, as far as it is used; times are in milliseconds."""

    def mixed_step_breakdown(
        self, ctx_tokens: int, gen_tokens: int, isl: int, osl: int
    ) -> tuple[float, float, float, float]:
        """Returns a step's time, without attention, of prompts' attention, and of decodes'."""

    def decode_step_latency(self, gen_tokens: int, isl: int, osl: int) -> float:
        """Returns the time of a step of `gen_tokens` sequences with `isl` tokens each."""


class PackageTables(NamedTuple):
    """Step times by tensor parallel size, and of what they are."""

    by_degree: dict[int, StepTables]  # those degrees that the package has kernels of
    origin: str  # the package and the vLLM whose kernels it has


def package_tables(
    model: str, gpu: GpuType, degrees: list[int], *, is_kv_fp8: bool
) -> PackageTables:
    """Returns the step times of a model on a GPU for each of some tensor parallel sizes.

    `model` is a folder, the path of its config.json, or a known name. Raises ConfigError if the
    package is missing, is of another release, or has no times of any degree.
    """
    installed = _installed()
    if gpu.name not in SYSTEMS:
        raise ConfigError(
            f"--step-times: {PACKAGE} has no tables of {gpu.name} for vLLM: give a --gpu of"
            f" {', '.join(SYSTEMS)}"
        )
    # It warns of rows of other engines while it loads them, also where none of them is used.
    logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
    from aiconfigurator_core.sdk import EngineHandle, perf_database  # noqa: PLC0415  (seconds)

    system = SYSTEMS[gpu.name]
    release = perf_database.resolve_query_version(system, BACKEND, "current")
    kv_type = "fp8" if is_kv_fp8 else "bfloat16"
    found = {}
    reason = "it has no pipelines, and needs one"
    name = _name_of(model)
    for degree in degrees:
        try:
            engine: Any = EngineHandle.compile(
                name,
                system,
                BACKEND,
                tp_size=degree,
                moe_tp_size=degree,
                moe_ep_size=1,
                kvcache_quant_mode=kv_type,
            )
            found[degree] = tabulated(engine)
        # Whatever it raises at a config.json that it cannot read: it checks no field.
        except (
            ValueError,
            RuntimeError,
            AssertionError,
            LookupError,
            TypeError,
            AttributeError,
        ) as error:
            first_line = str(error).strip().partition("\n")[0]
            reason = f"{type(error).__name__}: {first_line}"
    if not found:
        raise ConfigError(f"--step-times: {PACKAGE} has no times of {model} there: {reason}")
    return PackageTables(found, f"{PACKAGE} {installed}, kernels of vLLM {release}")


def _installed() -> str:
    """Returns the package's release. Raises ConfigError without it, or for an unknown one."""
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        raise ConfigError(
            f"--step-times aiconfigurator needs {PACKAGE}, which is not installed: {INSTALL}"
        ) from None
    if not found.startswith(VERSIONS):
        raise ConfigError(
            f"--step-times aiconfigurator: {PACKAGE} {found} is installed, and this release reads"
            f" {VERSIONS}x: {INSTALL}"
        )
    return found


def _name_of(model: str) -> str:
    """Returns the folder of a model, or the package's name of a known one.

    Raises ConfigError for a known model of which the package has no config.json.
    """
    if key := key_of(model):
        if key not in MODELS:
            raise ConfigError(
                f"--step-times: {PACKAGE} has no config.json of {key}: give --model a folder with"
                f" its config.json, or one of {', '.join(MODELS)}"
            )
        return MODELS[key]
    return model if os.path.isdir(model) else os.path.dirname(model) or "."


def tabulated(engine: StepEngine) -> StepTables:
    """Reads the tables of an engine of the package.

    Raises ValueError if its prompts have no time of attention by itself, as with MLA: then no
    time of a square is known.
    """
    tokens = TOKENS
    alone = [engine.mixed_step_breakdown(size, 0, size, 2) for size in tokens]
    one = engine.mixed_step_breakdown(LONG_PROMPT, 0, LONG_PROMPT, 2)[2]
    several = engine.mixed_step_breakdown(LONG_PROMPT, 0, LONG_PROMPT // SHORTER, 2)[2]
    if not one:
        raise ValueError("it has no time of this model's attention by itself")
    square = max(0.0, one - several) / (LONG_PROMPT**2 * (1 - 1 / SHORTER))
    decodes = [[engine.decode_step_latency(n, size, 2) for size in CONTEXTS] for n in tokens]
    wide = CONTEXTS[1] - CONTEXTS[0]
    slope = max(
        0.0,
        median((long - short) / wide / n for n, (short, long) in zip(tokens, decodes, strict=True)),
    )
    rows = list(zip(tokens, alone, decodes, strict=True))
    return step_tables(
        tokens,
        [SECONDS * shared for _, shared, _, _ in alone],
        [SECONDS * (attention - square * size**2) for size, (_, _, attention, _), _ in rows],
        [
            SECONDS * (sum(times) / 2 - slope * n * sum(CONTEXTS) / 2 - shared)
            for n, (_, shared, _, _), times in rows
        ],
        SECONDS * square,
        SECONDS * slope,
    )
