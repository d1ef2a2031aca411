"""Step times against measured runs of vLLM: the reached errors are kept."""

from __future__ import annotations

import csv
from fractions import Fraction
from pathlib import Path
from statistics import mean

import msgspec
import pytest

from vllm_disagg.planner.cost import kernels
from vllm_disagg.planner.cost.latency import PathDelay
from vllm_disagg.planner.cost.roofline import FITTED, FITTED_GPUS, FITTED_PATH, FITTED_VLLM
from vllm_disagg.planner.search.performance_source import PerformanceSource

# Scripts of benchmarks/ import each other as neighbours.
with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    import measured_runs
    import planner_accuracy as accuracy
    from measured_runs import MeasuredRun, RunTimes, ServingSettings

EVERY = 13  # of the runs that are simulated here; `make planner-accuracy` simulates all


@pytest.fixture(scope="module")
def runs() -> dict[MeasuredRun, RunTimes]:
    return measured_runs.load()


def predictable(
    runs: dict[MeasuredRun, RunTimes],
) -> list[tuple[MeasuredRun, RunTimes]]:
    """Returns the runs that are not set apart."""
    return [(run, times) for run, times in runs.items() if not run.is_doubtful]


def test_all_runs_are_read(runs: dict[MeasuredRun, RunTimes]) -> None:
    assert len(runs) == 539
    assert {measured_runs.GPUS[run.system] for run in runs} == set(FITTED_GPUS)
    assert all(0 < times.tpot < 1 and 0 < times.ttft < 120 for times in runs.values())


def test_the_versions_named_are_those_of_the_runs() -> None:
    """One image is a nightly; the runs of Llama 70B record no version, but all have one day."""
    with measured_runs.DATA.open(newline="") as file:
        rows = list(csv.DictReader(file))
    released = [row["backend_version"] for row in rows if row["backend_version"][:1] == "0"]
    versions = sorted(tuple(map(int, version.split(".")[:2])) for version in released)
    least, most = (".".join(map(str, version)) for version in (versions[0], versions[-1]))
    days = {row["silicon_data_source"] for row in rows if not row["backend_version"]}
    assert days and all("measured=2025-10-29" in source for source in days)
    assert f"{least} to {most}, and of 2025-10 with no version recorded" == FITTED_VLLM


def test_the_coefficients_are_those_of_the_fit(
    runs: dict[MeasuredRun, RunTimes],
) -> None:
    found = msgspec.structs.asdict(accuracy.fit(runs))
    assert found == pytest.approx(msgspec.structs.asdict(FITTED), rel=0.02)


def test_no_coefficient_is_negative(
    runs: dict[MeasuredRun, RunTimes],
) -> None:
    """Runs that are faster than the kernels leave nothing beside them."""
    quick = {run: times._replace(tpot=times.tpot / 100) for run, times in runs.items()}
    assert set(msgspec.structs.astuple(accuracy.fit(quick))) == {0.0}


def test_no_kernel_is_faster_than_the_data_sheet() -> None:
    for times in kernels.MEASURED.values():
        for product in times.products.values():
            assert min(product.weights, product.flops) >= 1
        for expert in times.experts.values():
            assert min(expert.weights, expert.flops) >= 1
        attention = times.attention
        assert min(attention.kv, attention.kv_fp8, attention.prompt_flops) >= 1


def test_runs_set_apart_are_few_and_named(
    runs: dict[MeasuredRun, RunTimes],
) -> None:
    apart = [run for run in runs if run.is_doubtful]
    assert len(apart) == 23
    assert {(run.model, run.precision) for run in apart} == {
        (measured_runs.LLAMA_8B, "fp8"),
        ("Qwen3-32B", "fp8"),
    }
    listed = accuracy.doubtful_table(runs, FITTED)
    assert listed.count("\n") == 24
    page = Path("docs/benchmarks/planner_accuracy.md").read_text()
    assert all(line.split(" |")[0] in page for line in listed.splitlines()[2:])


def test_a_run_is_simulated_as_its_script_served_it(
    runs: dict[MeasuredRun, RunTimes],
) -> None:
    """InferenceX's scripts changed in April 2026: FP8 KV, and a step of two prompts."""
    served = {run.settings for run in runs if run.model == "MiniMax-M2.5" and run.prompt == 1024}
    assert served == {
        ServingSettings(False, 0.95, 8192),
        ServingSettings(True, 0.90, 2048),
    }


def test_steps_run_in_the_cuda_graphs_of_a_runs_script(
    runs: dict[MeasuredRun, RunTimes],
) -> None:
    """InferenceX's scripts of April 2026 capture graphs of up to 2,048 tokens."""
    graphs = {(run.model, run.settings.budget, run.graph_tokens) for run in runs}
    assert graphs == {
        ("Llama-3.1-70B", 8192, 512),
        (measured_runs.LLAMA_8B, 8192, 512),
        ("Qwen3-32B", 8192, 512),
        ("MiniMax-M2.5", 8192, 512),
        ("MiniMax-M2.5", 2048, 2048),
        ("MiniMax-M2.5", 16_384, 2048),
    }
    captured = next(run for run in runs if run.graph_tokens == 2048 and run.prompt == 1024)
    assert accuracy.step_shares(captured).launches == 0.0
    launched = captured._replace(settings=ServingSettings(False, 0.95, 8192))
    assert accuracy.step_shares(launched).launches > 0.0


def test_nvidias_prompts_are_whole_and_there_are_ten_for_each_client() -> None:
    """Its TTFTs are means of so many nanoseconds; the runner gives all prompts one length."""
    tens = []
    with measured_runs.DATA.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["model_path"].endswith("Qwen3-32B"):
                requests = accuracy.CYCLES * int(row["batch_size"])
                total = Fraction(row["silicon_ttft_ms"]) * 10**6 * requests
                tens.append(abs(total - round(total)) < Fraction(1, 100))
    assert len(tens) == 93 and sum(tens) == 92
    for run in measured_runs.load():
        prompt, answer = measured_runs.mean_lengths(run)
        share = 1.0 if run.is_nvidias else 0.9
        assert (prompt, answer) == (round(share * run.prompt), share * run.answer)


def test_errors_of_the_simulated_closed_loops_are_no_worse_than_they_were(
    runs: dict[MeasuredRun, RunTimes],
) -> None:
    """Every 13th run, in the closed loop: all of them have 7.8 % of TPOT, before 20.8 %."""
    some = dict(predictable(runs)[::EVERY])
    after = {
        run: accuracy.simulated(run, accuracy.fitted(run, FITTED), FITTED_PATH) for run in some
    }
    found = accuracy.errors(some, after).values()
    assert mean(tpot for _, tpot in found) < 0.085
    assert mean(ttft for ttft, _ in found) < 0.195


def test_errors_of_a_model_left_out_are_no_worse_than_they_were(
    runs: dict[MeasuredRun, RunTimes],
) -> None:
    """Coefficients are fitted to all runs of the other models, the path to every 13th of them."""
    some = [run for run, _ in predictable(runs)[::EVERY]]
    found = []
    for model in measured_runs.CONFIGS:
        others = {run: times for run, times in runs.items() if run.model != model}
        coefficients = accuracy.fit(others)
        part = dict(list(others.items())[::EVERY])
        bare = [
            accuracy.simulated(run, accuracy.fitted(run, coefficients), PathDelay()) for run in part
        ]
        path = accuracy.fit_path(part, bare)
        of_model = {run: runs[run] for run in some if run.model == model}
        at = {
            run: accuracy.simulated(run, accuracy.fitted(run, coefficients), path)
            for run in of_model
        }
        found += accuracy.errors(of_model, at).values()
    assert len(found) == len(some)
    assert mean(tpot for _, tpot in found) < 0.09
    assert mean(ttft for ttft, _ in found) < 0.195


def test_a_roofline_states_its_error() -> None:
    assert "TPOT by 9% and TTFT by 19%" in PerformanceSource("roofline", "h100").words()
    assert "on no l4: its error is not measured" in PerformanceSource("roofline", "l4").words()
