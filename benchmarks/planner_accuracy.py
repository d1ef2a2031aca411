"""Compares the planner's step times with measured runs of vLLM, and fits their coefficients.

    python benchmarks/planner_accuracy.py [--save FILE]

Each row is a closed loop, simulated by the planner's own engine with three sets of step times: the
roofline of 2026-11-22 (before), the coefficients fitted to all rows (after), and coefficients
fitted to the rows of the other models (left out). Times of kernels are fitted to no row here. The
last line is JSON.

Each run (`measured_runs.py`) is simulated as its published script served it: KV's data type, share
of memory, tokens of a step.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import NamedTuple

import msgspec
import numpy as np
from least_errors import absolute_least
from measured_runs import (
    CONFIGS,
    GPUS,
    LEAST_LENGTH_SHARE,
    MeasuredRun,
    RunTimes,
    costs_of,
    load,
    mean_lengths,
)

from vllm_disagg.planner.cost import hardware
from vllm_disagg.planner.cost.latency import LatencyModel, PathDelay
from vllm_disagg.planner.cost.roofline import InstanceShape, RooflineLatency, StepCoefficients
from vllm_disagg.planner.cost.sizes import ModelCosts, touched
from vllm_disagg.planner.simulation.deployment import Deployment, ReplicaPool
from vllm_disagg.planner.simulation.replica import SchedulingRules
from vllm_disagg.planner.simulation.simulator import simulate_closed
from vllm_disagg.planner.simulation.workload import WorkloadSample

TPOT_TARGET = 0.10  # mean error on models left out
TTFT_TARGET = 0.20
# Both sources send 10 requests for each client, the first of all clients at once.
CYCLES = 10
# NVIDIA's runner gives all prompts and all answers their nominal length (`genai_perf_runner.py` of
# ai-dynamo/aiconfigurator). Answers of exactly equal length would keep all simulated clients in
# phase for ever, which measured TTFT shows that they were not: answers differ by up to a tenth.
ANSWER_SPREAD = 0.1
MAX_QUEUE_SECONDS = 4.0  # TTFT beyond it: more clients than the KV cache holds
RESIDUAL_GROUPS = 12

# --- the fit ---

NOTHING_BESIDE = StepCoefficients(0.0, 0.0, 0.0)
FIRST_GUESS = (1.5e-3, 2e-5, 5e-5)  # of StepCoefficients
FIT_ROUNDS = 6
ONE_SECOND_A_LAUNCH = StepCoefficients(0.0, 0.0, 1.0)


class StepShares(NamedTuple):
    """Steps in the TPOT of a run.

    A token takes a decode step of all clients. In the time of an answer each other client has its
    next prompt computed, in a step with the decodes.
    """

    clients: int
    prompts: float  # for each token of an answer: the share of steps with a prompt
    decode: float  # seconds of the kernels of a decode step
    mixed: float  # and of a step with a prompt
    launches: float  # of a step with a prompt; 0 in a CUDA graph

    def terms(self, coefficients: np.ndarray) -> tuple[float, list[float]]:
        """Returns the seconds of kernels in TPOT, and what each coefficient multiplies."""
        step, sequence, launch = coefficients
        plain = 1 - self.prompts
        beside = step + sequence * (self.clients + 1)
        if launch * self.launches > self.mixed + beside:
            launches = self.prompts * self.launches
            return plain * self.decode, [plain, plain * self.clients, launches]
        kernels = plain * self.decode + self.prompts * self.mixed
        return kernels, [1.0, self.clients + self.prompts, 0.0]


def step_shares(run: MeasuredRun) -> StepShares:
    """Returns the steps in the TPOT of a run."""
    steps = fitted(run, NOTHING_BESIDE)
    prompt, answer = mean_lengths(run)
    contexts = round(run.clients * (prompt + answer / 2))
    base, slope = steps.decode(run.clients, True)
    at = (prompt, float(prompt) ** 2, run.clients, contexts, True)
    mixed = steps.mixed(*at)
    # A second for each launch is longer than all kernels.
    launches = fitted(run, ONE_SECOND_A_LAUNCH).mixed(*at)
    prompts = (run.clients - 1) / answer
    in_graph = prompt + run.clients <= run.graph_tokens
    decode = base + slope * contexts
    return StepShares(run.clients, prompts, decode, mixed, 0.0 if in_graph else launches)


def fit(runs: dict[MeasuredRun, RunTimes]) -> StepCoefficients:
    """Fits the coefficients: the least sum of absolute relative errors of TPOT.

    None is negative. Runs with more clients than the KV cache holds do not count. A step with a
    prompt is as long as its kernels or as its launches: which of both depends on the coefficients,
    so the fit is repeated with those that it found.
    """
    used = [run for run, times in runs.items() if times.ttft < MAX_QUEUE_SECONDS]
    shares = [(runs[run].tpot, step_shares(run)) for run in used if not run.is_doubtful]
    found = np.array(FIRST_GUESS)
    for _ in range(FIT_ROUNDS):
        rows = []
        lacking = []
        for tpot, steps in shares:
            kernels, terms = steps.terms(found)
            rows.append([term / tpot for term in terms])
            lacking.append(1 - kernels / tpot)
        found = absolute_least(np.array(rows), np.array(lacking))
    return StepCoefficients(*(float(value) for value in found))


def fit_path(runs: dict[MeasuredRun, RunTimes], at: Sequence[RunTimes]) -> PathDelay:
    """Fits the path of a request to what the simulated TTFT lacks, by the length of the prompt.

    It has the least sum of absolute relative errors of TTFT.
    """
    rows = []
    lacking = []
    for (run, times), found in zip(runs.items(), at, strict=True):
        if max(times.ttft, found.ttft) < MAX_QUEUE_SECONDS and not run.is_doubtful:
            rows.append([1 / times.ttft, mean_lengths(run)[0] / times.ttft])
            lacking.append(1 - found.ttft / times.ttft)
    fixed, per_token = absolute_least(np.array(rows), np.array(lacking))
    return PathDelay(float(fixed), float(per_token))


# --- the closed loop ---


class RooflineBefore:
    """Step times of the planner until 2026-11-22: the larger of bytes and BF16 FLOPs."""

    pp = 1

    def __init__(self, model: ModelCosts, gpu: hardware.GpuType, tp: int) -> None:
        self._model = model
        flops = gpu.flops * 0.55 * tp
        speed = gpu.bandwidth * 0.60 * tp
        weights = model.dense_bytes + model.head * model.head_bytes
        self._weights = weights / speed
        self._expert = model.expert * model.expert_bytes / speed
        self._token = 2 * (model.dense + model.expert * model.active) / flops
        self._sequence = 2 * model.head / flops
        self._square = model.attention / 2 / flops
        kv = sum(g.layers * g.token_bytes / min(tp, g.heads) for g in model.kv)
        self._slope = max(kv / (gpu.bandwidth * 0.60), model.latent / flops)
        reduces = 2 * model.layers * (tp > 1)
        self._fixed = 1e-3 + reduces * 10e-6
        self._wire = reduces * model.hidden * 2 / gpu.peer * 2 * (tp - 1) / tp

    def _linear(self, tokens: int, sequences: int) -> float:
        memory = self._weights + self._expert * touched(self._model, tokens)
        compute = self._token * tokens + self._sequence * sequences
        return max(memory, compute) + self._fixed + self._wire * tokens

    def decode(self, n: int, first: bool) -> tuple[float, float]:
        """Returns base and slope of a decode step, in seconds."""
        return self._linear(n, n) + self._slope * n, self._slope

    def mixed(self, tokens: int, squares: float, n: int, contexts: int, first: bool) -> float:
        """Returns the seconds of a step with prompt tokens."""
        attention = self._square * squares + self._slope * (contexts + n)
        return self._linear(tokens + n, n + 1) + attention

    def least_prompt(self, tokens: int) -> tuple[float, float]:
        """Returns no bound: no placement is searched by these times."""
        return 0.0, 0.0

    def least_added_prompt(self) -> tuple[float, float]:
        """Returns no bound either."""
        return 0.0, 0.0


def simulated(run: MeasuredRun, steps: LatencyModel, path: PathDelay) -> RunTimes:
    """Simulates the closed loop of a run; returns the mean TTFT and TPOT."""
    random = Random(f"{run}")
    count = CYCLES * run.clients
    prompt_shares = answer_shares = (LEAST_LENGTH_SHARE, 1.0)
    if run.is_nvidias:
        prompt_shares = (1.0, 1.0)
        answer_shares = (1 - ANSWER_SPREAD, 1 + ANSWER_SPREAD)
    prompts = [round(run.prompt * random.uniform(*prompt_shares)) for _ in range(count)]
    answers = [round(run.answer * random.uniform(*answer_shares)) for _ in range(count)]
    sample = WorkloadSample(prompts, answers, [0.0] * count)
    gpu = hardware.gpu(GPUS[run.system])
    served = run.settings
    context = run.prompt + run.answer
    kv = costs_of(run).kv_capacity(gpu.memory, served.utilization, run.tp, 1, context)
    limits = hardware.engine_defaults(gpu)
    pool = ReplicaPool(1, steps, kv, SchedulingRules(served.budget, limits.sequences))
    found = simulate_closed(Deployment(pool, path=path), sample, run.clients)
    return RunTimes(mean(found.ttft), mean(found.tpot))


def fitted(run: MeasuredRun, coefficients: StepCoefficients) -> RooflineLatency:
    """Returns the step times of a run's instance."""
    gpu = hardware.gpu(GPUS[run.system])
    shape = InstanceShape(run.tp)
    return RooflineLatency(costs_of(run), gpu, shape, coefficients, run.graph_tokens)


def before(run: MeasuredRun) -> RooflineBefore:
    """Returns the step times of a run's instance as the planner had them."""
    gpu = hardware.gpu(GPUS[run.system])
    return RooflineBefore(costs_of(run), gpu, run.tp)


def fit_both(
    runs: dict[MeasuredRun, RunTimes],
) -> tuple[StepCoefficients, PathDelay]:
    """Fits coefficients and path."""
    coefficients = fit(runs)
    bare = [simulated(run, fitted(run, coefficients), PathDelay()) for run in runs]
    return coefficients, fit_path(runs, bare)


def error(found: float, measured: float) -> float:
    """Returns the absolute relative error."""
    return abs(found / measured - 1)


# --- the report ---

Errors = dict[MeasuredRun, tuple[float, float]]  # of TTFT and of TPOT


def errors(runs: dict[MeasuredRun, RunTimes], at: dict[MeasuredRun, RunTimes]) -> Errors:
    """Returns the errors of each run."""
    return {
        run: (error(at[run].ttft, times.ttft), error(at[run].tpot, times.tpot))
        for run, times in runs.items()
    }


def left_out(runs: dict[MeasuredRun, RunTimes]) -> dict[MeasuredRun, RunTimes]:
    """Simulates the runs of each model with a fit to the runs of all others."""
    found = {}
    for model in CONFIGS:
        others = {run: times for run, times in runs.items() if run.model != model}
        coefficients, path = fit_both(others)
        for run in runs:
            if run.model == model:
                found[run] = simulated(run, fitted(run, coefficients), path)
    return found


def table(kinds: dict[str, Errors]) -> str:
    """Formats mean errors by model, GPU, tensor parallelism, and prompt length."""
    runs = list(next(iter(kinds.values())))
    groups: dict[str, list[MeasuredRun]] = {}
    for name_of in (
        lambda run: run.model,
        lambda run: f"{GPUS[run.system]} {run.precision or 'bf16'}",
        lambda run: f"TP{run.tp}",
        lambda run: f"prompts to {2000 if run.prompt <= 2000 else 8192}",
    ):
        for run in runs:
            groups.setdefault(name_of(run), []).append(run)
    groups["all"] = runs
    heads = [f"{phase}, {kind}" for phase in ("TPOT", "TTFT") for kind in kinds]
    lines = ["| runs of | n | " + " | ".join(heads) + " |", "|---|--:|" + "--:|" * len(heads)]
    for name, members in groups.items():
        cells = []
        for at in (1, 0):
            for found in kinds.values():
                values = [found[run][at] for run in members]
                cells.append(f"{mean(values):.0%} ({median(values):.0%})")
        lines.append(f"| {name} | {len(members)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def residual_table(runs: dict[MeasuredRun, RunTimes], at: dict[MeasuredRun, RunTimes]) -> str:
    """Formats the groups of runs that hold most of the error of TTFT, largest share first."""
    groups: dict[str, list[float]] = {}
    for run, times in runs.items():
        if not run.is_doubtful:
            kind = f"{run.model} {GPUS[run.system]} {run.precision or 'bf16'}"
            name = f"{kind} TP{run.tp}, prompts of {run.prompt}, {run.settings.budget} a step"
            groups.setdefault(name, []).append(at[run].ttft / times.ttft - 1)
    whole = sum(abs(value) for values in groups.values() for value in values)
    shares = {name: sum(map(abs, values)) / whole for name, values in groups.items()}
    lines = [
        "| TTFT of runs of | n | error, mean | with its sign | share of all error |",
        "|---|--:|--:|--:|--:|",
    ]
    for name in sorted(groups, key=lambda name: -shares[name])[:RESIDUAL_GROUPS]:
        values = groups[name]
        error_of = mean(map(abs, values))
        cells = f"{error_of:.0%} | {mean(values):+.0%} | {shares[name]:.1%}"
        lines.append(f"| {name} | {len(values)} | {cells} |")
    return "\n".join(lines)


def doubtful_table(runs: dict[MeasuredRun, RunTimes], coefficients: StepCoefficients) -> str:
    """Formats the runs that are set apart, with what TPOT they should have at the least."""
    lines = [
        "| set apart | TPOT, ms | data sheet's least | decodes alone | with prompts |",
        "|---|--:|--:|--:|--:|",
    ]
    for run, times in runs.items():
        if not run.is_doubtful:
            continue
        served = run._replace(settings=run.settings._replace(is_kv_fp8=True))
        steps = fitted(served, coefficients)
        prompt, answer = mean_lengths(run)
        contexts = round(run.clients * (prompt + answer / 2))
        base, slope = steps.decode(run.clients, True)
        alone = base + slope * contexts
        mixed = steps.mixed(prompt, float(prompt) ** 2, run.clients, contexts, True)
        both = alone + (run.clients - 1) / answer * (mixed - alone)
        kind = f"{run.model} {GPUS[run.system]} TP{run.tp} {run.prompt}:{run.answer}"
        found = (times.tpot, least_tpot(served), alone, both)
        cells = " | ".join(f"{1e3 * seconds:.1f}" for seconds in found)
        lines.append(f"| {kind}, {run.clients} clients | {cells} |")
    return "\n".join(lines)


def least_tpot(run: MeasuredRun) -> float:
    """Returns the TPOT of kernels that run one after another, each as fast as the data sheet."""
    model = costs_of(run)
    gpu = hardware.gpu(GPUS[run.system])
    prompt, answer = mean_lengths(run)
    prompts = (run.clients - 1) / answer
    contexts = run.clients * (prompt + answer / 2)
    read = sum(g.layers * g.token_bytes / min(run.tp, g.heads) for g in model.kv) * contexts
    weights = (model.dense_bytes + model.head * model.head_bytes) / run.tp
    attention = model.attention / 2 * prompt**2 / gpu.flops
    dense = sum(group.parameters / gpu.rate(group.dtype) for group in model.products)
    products = 2 * dense * (prompts * prompt + run.clients)
    # Matrix products read their weights while they compute.
    memory = weights / gpu.bandwidth
    return read / gpu.bandwidth + max(memory, products / run.tp) + prompts * attention / run.tp


def main() -> int:
    """Prints the fit, the table and the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", metavar="FILE", help="write the last line into this file too")
    args = parser.parse_args()
    runs = load()
    coefficients, path = fit_both(runs)
    for field, value in zip(
        coefficients.__struct_fields__, msgspec.structs.astuple(coefficients), strict=True
    ):
        print(f"{field:17} {value:.4g}")
    print(f"path of a request {1e3 * path.seconds:.3g} ms + {1e6 * path.seconds_per_token:.3g} us")
    kinds = {
        "before": {run: simulated(run, before(run), PathDelay()) for run in runs},
        "after": {run: simulated(run, fitted(run, coefficients), path) for run in runs},
        "left out": left_out(runs),
    }
    compared = {name: errors(runs, at) for name, at in kinds.items()}
    predicted = {
        name: {run: found for run, found in of.items() if not run.is_doubtful}
        for name, of in compared.items()
    }
    print("\n" + table(predicted) + "\n\n" + residual_table(runs, kinds["left out"]))
    print("\n" + doubtful_table(runs, coefficients))
    document: dict[str, float] = {}
    for name, found in predicted.items():
        key = name.replace(" ", "_")
        document[f"tpot_error_{key}"] = round(mean(e[1] for e in found.values()), 4)
        document[f"ttft_error_{key}"] = round(mean(e[0] for e in found.values()), 4)
        document[f"ttft_error_{key}_median"] = round(median(e[0] for e in found.values()), 4)
    document |= {"tpot_target": TPOT_TARGET, "ttft_target": TTFT_TARGET}
    document["rows"] = len(predicted["after"])
    for name, found in compared.items():
        key = name.replace(" ", "_")
        document[f"tpot_error_{key}_all_rows"] = round(mean(e[1] for e in found.values()), 4)
        document[f"ttft_error_{key}_all_rows"] = round(mean(e[0] for e in found.values()), 4)
    document["all_rows"] = len(runs)
    if args.save:
        Path(args.save).write_text(json.dumps(document) + "\n")
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
