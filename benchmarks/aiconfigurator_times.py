"""Step times of aiconfigurator-core beside measured runs of vLLM, and beside the planner's.

    pip install aiconfigurator-core==0.12.0
    python benchmarks/aiconfigurator_times.py

Each 13th run of planner_accuracy.py, in the planner's own closed loop, with two sets of step times:
the package's (kernels of vLLM 0.24, its own reading of the models), as `plan --step-times
aiconfigurator` reads them off, and the planner's. The package has no path of a request outside the
engine: both have the planner's. The last line is JSON.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from statistics import mean, median
from typing import Any

import planner_accuracy as accuracy
from measured_runs import MeasuredRun, RunTimes, load

from vllm_disagg.planner.cost.aiconfigurator import tabulated
from vllm_disagg.planner.cost.roofline import FITTED, FITTED_PATH
from vllm_disagg.planner.cost.step_tables import StepTables

EVERY = 13
VLLM = "0.24.0"
NAMES = {
    "Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "Qwen3-32B": "Qwen/Qwen3-32B",
    "MiniMax-M2.5": "MiniMaxAI/MiniMax-M2.5",
}
NVFP4_MINIMAX = "nvidia/MiniMax-M2.5-NVFP4"
DENSE_TYPES = {"": "bfloat16", "bf16": "bfloat16", "fp8": "fp8", "fp4": "nvfp4"}


@cache
def tables(model: str, system: str, precision: str, tp: int, is_kv_fp8: bool) -> StepTables:
    """Reads the tables of a run's engine. Raises ValueError for one that it does not know."""
    from aiconfigurator_core.sdk.engine import EngineHandle  # noqa: PLC0415  an optional package

    name = NAMES[model]
    more: dict[str, Any] = {"kvcache_quant_mode": "fp8" if is_kv_fp8 else "bfloat16"}
    if model == "MiniMax-M2.5":
        name = NVFP4_MINIMAX if precision == "fp4" else name
        more |= {"moe_tp_size": tp, "moe_ep_size": 1}
    else:
        more["gemm_quant_mode"] = DENSE_TYPES[precision]
    engine: Any = EngineHandle.compile(
        name, system, "vllm", backend_version=VLLM, tp_size=tp, **more
    )
    return tabulated(engine)


def package_latency(run: MeasuredRun) -> StepTables:
    """Returns the package's step times of a run."""
    return tables(run.model, run.system, run.precision, run.tp, run.settings.is_kv_fp8)


def known(runs: dict[MeasuredRun, RunTimes]) -> list[MeasuredRun]:
    """Returns the runs whose engines the package knows; prints the others."""
    found = []
    for run in runs:
        try:
            package_latency(run)
        except ValueError as error:
            print(f"left out: {run.model} {run.precision} TP{run.tp} on {run.system}: {error}")
            continue
        found.append(run)
    return found


def main() -> int:
    runs = load()
    some = {run: times for run, times in runs.items() if not run.is_doubtful}
    some = dict(list(some.items())[::EVERY])
    some = {run: some[run] for run in known(some)}
    ours = {run: accuracy.simulated(run, accuracy.fitted(run, FITTED), FITTED_PATH) for run in some}
    theirs = {run: accuracy.simulated(run, package_latency(run), FITTED_PATH) for run in some}
    for model, precision in sorted({(run.model, run.precision) for run in some}):
        part = {r: t for r, t in some.items() if (r.model, r.precision) == (model, precision)}
        tpot = mean(theirs[run].tpot / times.tpot - 1 for run, times in part.items())
        print(f"{model} {precision or 'bf16'}: {len(part)} runs, TPOT {tpot:+.1%} in the mean")
    document: dict[str, Any] = {"runs": len(some)}
    for name, at in (("package", theirs), ("planner", ours)):
        found = accuracy.errors(some, at).values()
        for number, metric in enumerate(("ttft", "tpot")):
            values = [error[number] for error in found]
            document[f"{name}_{metric}_error"] = [round(mean(values), 3), round(median(values), 3)]
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
