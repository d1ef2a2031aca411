"""Sizes, capacities, fits and closed forms, against published figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from vllm_disagg.errors import ConfigError
from vllm_disagg.planner.cost import (
    distserve,
    families,
    hardware,
    model,
    profile,
    queueing,
    sizes,
)
from vllm_disagg.planner.cost.latency import (
    LatencyModel,
    LinearLatency,
    unloaded_decode,
    unloaded_prefill,
)
from vllm_disagg.planner.cost.roofline import (
    FITTED,
    ExpertExchange,
    InstanceShape,
    RooflineLatency,
)
from vllm_disagg.planner.search.performance_source import PerformanceSource
from vllm_disagg.planner.search.placement import ReplicaGroup


@pytest.mark.parametrize(
    ("name", "tp", "pp", "tokens"),
    [
        ("opt-13b", 1, 1, 66_144),
        ("opt-13b", 2, 1, 163_008),
        ("opt-13b", 1, 2, 163_008),
        ("opt-13b", 4, 1, 356_736),
        ("opt-66b", 2, 1, 11_600),
        ("opt-66b", 4, 1, 78_496),
        ("opt-66b", 2, 2, 78_512),
        ("opt-66b", 8, 1, 212_304),
        ("opt-175b", 8, 1, 59_520),
        ("opt-175b", 3, 3, 76_192),
    ],
)
def test_kv_capacity_is_within_10_percent_of_distserves_table(
    name: str, tp: int, pp: int, tokens: int
) -> None:
    found = model.load(name).kv_capacity(
        distserve.GPU_MEMORY_BYTES, distserve.MEMORY_UTILIZATION, tp, pp
    )
    assert found == pytest.approx(tokens, rel=0.10)


LLAMA_2_7B = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32}
LLAMA_2_70B = {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64}
CODE_LLAMA_34B = {"num_hidden_layers": 48, "hidden_size": 8192, "num_attention_heads": 64}


@pytest.mark.parametrize(
    ("config", "kv_heads", "ffn", "tp", "tokens"),
    [
        (LLAMA_2_7B, 32, 11008, 1, 119_408),
        (LLAMA_2_70B, 8, 28672, 4, 501_712),
        (CODE_LLAMA_34B, 8, 22016, 2, 425_648),
    ],
)
def test_kv_capacity_is_within_2_percent_of_what_vllm_logged_on_h100(
    config: dict[str, Any], kv_heads: int, ffn: int, tp: int, tokens: int
) -> None:
    """Logs of vLLM on H100-SXM, 2026-02, at 0.9 of the memory (training runs of BLIS)."""
    fields = {"vocab_size": 32000, "tie_word_embeddings": False, "model_type": "llama", **config}
    found = families.parse(
        "m", {**fields, "num_key_value_heads": kv_heads, "intermediate_size": ffn}
    )
    assert found.kv_capacity(hardware.gpu("h100").memory, 0.9, tp, 1) == pytest.approx(
        tokens, rel=0.02
    )


def test_the_share_of_memory_is_vllms_and_distserves_for_its_own_coefficients() -> None:
    found = model.load("opt-13b")
    roofline = PerformanceSource("roofline", "a100", found, hardware.gpu("a100"))
    published = PerformanceSource("coefficients", "distserve-a100", found)
    assert roofline.memory_utilization == 0.92 and published.memory_utilization == 0.94
    assert roofline.kv(1, 1) == found.kv_capacity(79.1 * hardware.GIB, 0.92, 1, 1)
    assert published.kv(1, 1) == found.kv_capacity(80 * hardware.GIB, 0.94, 1, 1)


@pytest.mark.parametrize(
    ("name", "budget", "sequences"),
    [
        ("b200", 16_384, 1024),
        ("mi300x", 16_384, 1024),
        ("h200", 8192, 1024),
        ("h100", 8192, 1024),
        ("h20", 8192, 1024),
        ("a100", 2048, 256),
        ("a100-40", 2048, 256),
        ("l40s", 2048, 256),
        ("l4", 2048, 256),
    ],
)
def test_the_limits_of_a_step_are_vllms_by_gpu(name: str, budget: int, sequences: int) -> None:
    found = hardware.engine_defaults(hardware.gpu(name))
    assert (found.budget, found.sequences) == (budget, sequences)
    assert hardware.engine_defaults(None) == hardware.engine_defaults(hardware.gpu("l4"))


@pytest.mark.parametrize(("name", "tokens"), [("h200", 512), ("b300", 1024), ("mi355x", 512)])
def test_steps_beyond_the_largest_cuda_graph_take_their_launches(name: str, tokens: int) -> None:
    """An 8-way 70B computes so short a prompt before Python has launched all its kernels."""
    llama, gpu, shape = model.load("llama-3.1-70b"), hardware.gpu(name), InstanceShape(8)
    step = RooflineLatency(llama, gpu, shape)
    inside, beyond, with_decode = (
        step.mixed(tokens + more, 0.0, n, 0, True) for more, n in ((0, 0), (1, 0), (0, 1))
    )
    launches = FITTED.launch * 80 * 12
    assert beyond == with_decode == pytest.approx(launches)
    assert inside < launches / 1.3
    # A long prompt keeps the GPU busier than Python.
    squares = 8192.0**2
    free = RooflineLatency(llama, gpu, shape, msgspec.structs.replace(FITTED, launch=0.0))
    assert step.mixed(8192, squares, 0, 0, True) == free.mixed(8192, squares, 0, 0, True)
    # The bound of the search is that of the kernels: it holds in a graph too.
    assert step.least_prompt(tokens + 1) == free.least_prompt(tokens + 1)


def test_experts_and_ranks_launch_more_kernels() -> None:
    """10 of a dense layer, 16 with experts, and all-reduces or exchanges between ranks."""
    h100 = hardware.gpu("h100")
    shapes = (InstanceShape(1), InstanceShape(2), InstanceShape(1, dp=2), InstanceShape(2, dp=2))
    slow = msgspec.structs.replace(FITTED, launch=1.0)
    for name, counts in (("llama-3.1-70b", (10, 12)), ("deepseek-v3", (16, 18, 18, 19))):
        found = model.load(name)
        steps = [RooflineLatency(found, h100, shape, slow, 0) for shape in shapes]
        seconds = [step.mixed(1, 0.0, 0, 0, True) for step in steps[: len(counts)]]
        assert seconds == pytest.approx([count * found.layers for count in counts])


def test_a_model_that_does_not_fit_holds_nothing() -> None:
    assert model.load("opt-66b").kv_capacity(80 * hardware.GIB, 1.0, 1, 1) == 0


@pytest.mark.parametrize(
    ("name", "parameters", "kv"),
    [
        ("llama-3.1-8b", 8.03e9, 131_072),
        ("llama-3.1-70b", 70.6e9, 327_680),
        ("mixtral-8x7b", 46.7e9, 131_072),
        ("qwen3-30b-a3b", 30.5e9, 98_304),
        ("qwen3-32b", 32.8e9, 262_144),
        ("deepseek-v3", 671e9, 70_272),
        ("facebook/opt-66b", 65.7e9, 2_359_296),
    ],
)
def test_parameters_and_kv_bytes_of_known_models(name: str, parameters: float, kv: int) -> None:
    found = model.load(name)
    assert found.parameters == pytest.approx(parameters, rel=0.02)
    assert found.kv_per_token == kv


def test_kv_of_512_tokens_of_opt_66b_and_the_bandwidth_it_needs() -> None:
    per_token = model.load("opt-66b").kv_per_token
    assert per_token * 512 == 1_207_959_552
    assert queueing.handoff_bandwidth(per_token, 512, 10) * 8 == pytest.approx(96.6e9, rel=1e-3)
    assert queueing.handoff_seconds(per_token, 512, 25e9 / 8, 0) >= 0.386
    assert queueing.handoff_seconds(per_token, 512, 300e9, 0) <= 0.005


def test_an_mla_cache_is_not_split_by_tensor_parallelism() -> None:
    deepseek = model.load("deepseek-v3")
    per_rank = 300e9
    one, two = (deepseek.kv_capacity(per_rank, 0.92, tp, 1) for tp in (8, 16))
    assert two < 3 * one  # more weights leave, but each rank keeps all of the cache


def test_expert_parallelism_takes_a_buffer() -> None:
    """Without experts only DeepEP's buffer of 1 GiB tells one rank of two from one alone."""
    llama = model.load("llama-3.1-8b")
    alone, ranked = (llama.kv_capacity(80e9, 0.92, 1, 1, dp=dp) for dp in (1, 2))
    assert (alone - ranked) * llama.kv_per_token == pytest.approx(2**30, rel=0.002)


def test_a_moe_reads_more_experts_with_more_tokens() -> None:
    mixtral = model.load("mixtral-8x7b")
    assert sizes.touched(mixtral, 1) == pytest.approx(2)
    assert 2 < sizes.touched(mixtral, 4) < sizes.touched(mixtral, 64) <= 8


def test_prompts_beside_decodes_read_the_experts_of_all_their_tokens() -> None:
    deepseek, gpu = model.load("deepseek-v3"), hardware.gpu("h100")
    all_experts = deepseek.expert * deepseek.experts * deepseek.expert_bytes / gpu.bandwidth
    step = RooflineLatency(deepseek, gpu, InstanceShape(1))
    assert step.mixed(256, 0.0, 1, 0, True) > all_experts > 4 * step.decode(1, True)[0]


@pytest.mark.parametrize("name", ["llama-3.1-8b", "mixtral-8x7b", "deepseek-v3"])
def test_a_roofline_gets_slower_with_work_and_faster_with_ranks(name: str) -> None:
    found = model.load(name)
    gpu = hardware.gpu("H100")
    one, four = (RooflineLatency(found, gpu, InstanceShape(tp)) for tp in (1, 4))
    assert (
        unloaded_prefill(one, 4096) > unloaded_prefill(one, 1024) > unloaded_decode(one, 1024) > 0
    )
    assert unloaded_prefill(four, 4096) < unloaded_prefill(one, 4096)
    assert one.decode(64, True)[0] > one.decode(1, True)[0]
    halves = one.mixed(2048, 2048.0**2, 0, 0, True) + one.mixed(
        2048, 4096.0**2 - 2048.0**2, 0, 0, True
    )
    assert halves >= one.mixed(4096, 4096.0**2, 0, 0, True)


def test_distserves_coefficients_give_its_times() -> None:
    """Computes milliseconds of 13B TP1 by hand.

    18.10 + 0.10191*512 + 7.12e-6*512^2 + 1 (stage) + 2 + 0.0001*512 (first stage).
    """
    latency: LatencyModel = distserve.latency("distserve-a100", "opt-13b", 1, 1)
    assert unloaded_prefill(latency, 512) == pytest.approx(0.0751999, rel=1e-4)
    base, slope = latency.decode(1, True)
    assert base + slope * 512 == pytest.approx(
        0.0223459, rel=1e-4
    )  # 19.935 + 0.000627*513 + 0.0385 + 2 + 0.0512
    with pytest.raises(ConfigError, match="no opt-175b: give --model opt-13b or opt-66b"):
        distserve.degrees("distserve-a100", "opt-175b")


def test_worked_example_of_distserve() -> None:
    best = queueing.best_ratio
    assert [
        (r.prefill, r.decode, round(r.rate_per_gpu, 3))
        for r in (best(5.6, 10, n) for n in (2, 4, 8, 14))
    ] == [
        (1, 1, 2.8),
        (2, 1, 3.333),
        (5, 3, 3.5),
        (9, 5, 3.571),
    ]
    assert queueing.rate_limit_per_gpu(5.6, 10) == pytest.approx(3.590, abs=1e-3)


def test_mean_ttft_is_distserves_formula() -> None:
    service = 0.1
    rate = 6.0
    assert queueing.mean_ttft(service, rate) == pytest.approx(
        service + rate * service**2 / (2 * (1 - rate * service))
    )
    assert queueing.mean_ttft(service, rate, 2) == pytest.approx(
        service + rate * service**2 / (4 * (2 - rate * service))
    )
    assert queueing.mean_ttft(service, 10.0) == float("inf")


# --- profiles ---


def _points(**changed: object) -> dict[str, object]:
    prefill = [
        {"tokens": [n] * k, "seconds": 0.02 + 1e-4 * n * k + 1e-8 * n * n * k}
        for n in (64, 512, 2048)
        for k in (1, 3)
    ]
    decode = [
        {"contexts": [n] * k, "seconds": 0.01 + 1e-6 * n * k + 1e-4 * k}
        for n in (64, 512, 2048)
        for k in (1, 8)
    ]
    return {
        "version": 2,
        "model": "m",
        "path": {"seconds": 0.002, "seconds_per_token": 1e-6},
        "kv_tokens": 9999,
        "prefill": prefill,
        "decode": decode,
        **changed,
    }


def test_a_fit_finds_the_coefficients_behind_exact_points() -> None:
    points = profile.ProfilePoints(
        version=2,
        model="m",
        path=profile.ProfilePath(0.002, 1e-6),
        kv_tokens=1,
        prefill=[
            profile.PrefillPoint([n] * k, 0.02 + 1e-4 * n * k + 1e-8 * n * n * k)
            for n in (64, 512, 2048)
            for k in (1, 3)
        ],
        decode=[
            profile.DecodePoint([n] * k, 0.01 + 1e-6 * (n + 1) * k + 1e-4 * k)
            for n in (64, 512, 2048)
            for k in (1, 8)
        ],
    )
    fit = profile.fit(points)
    assert fit.latency.prefill == pytest.approx((0.02, 1e-4, 1e-8), rel=1e-6)
    assert fit.latency.small == pytest.approx((0.01, 1e-6, 1e-4), rel=1e-6)
    assert fit.worst("prefill") < 1e-9


def test_a_fit_has_no_negative_coefficient() -> None:
    """Points that bend down: the free fit has c < 0, the best of the others has c = 0."""
    rows = [[1, n, n * n] for n in (100, 200, 400, 800)]
    a, b, c = profile.non_negative(
        rows, [0.01 + 1e-4 * n - 2e-8 * n * n for n in (100, 200, 400, 800)]
    )
    assert a >= 0 and b > 0 and c == 0


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"version": 1}, "version is 1; this release reads 2: run vllm-disagg profile again"),
        ({"path": {"seconds": -1, "seconds_per_token": 0}}, "path.seconds"),
        ({"kv_tokens": 0}, "kv_tokens is 0"),
        ({"prefill": []}, "prefill has 0 points"),
        ({"decode": [{"contexts": [], "seconds": 1.0}] * 3}, r"decode\[0\].contexts"),
        ({"decode": [{"contexts": [5], "seconds": -1.0}] * 3}, r"decode\[0\].seconds is -1"),
        ({"prefill": [{"tokens": [0], "seconds": 1.0}] * 3}, r"prefill\[0\].tokens"),
        ({"prefill": [{"seconds": 1.0}] * 3}, "tokens"),
        ({"kv_tokens": "many"}, "kv_tokens"),
    ],
)
def test_a_points_file_that_is_wrong_is_refused_by_field(tmp_path, changed, words) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "points.json"
    path.write_text(json.dumps(_points(**changed)))
    with pytest.raises(ConfigError, match=words):
        profile.load(str(path))


def test_a_points_file_is_read(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "points.json"
    path.write_text(json.dumps(_points(max_num_batched_tokens=2048)))
    assert isinstance(profile.fit(profile.load(str(path))).latency, LinearLatency)


def test_a_config_json_that_lacks_a_field_is_refused() -> None:
    with pytest.raises(ConfigError, match="no hidden_size"):
        families.parse("m", {"model_type": "llama", "num_hidden_layers": 2})
    with pytest.raises(ConfigError, match="num_hidden_layers of m is -2"):
        families.parse("m", {"model_type": "llama", "num_hidden_layers": -2, "hidden_size": 64})
    with pytest.raises(ConfigError, match="neither a folder"):
        model.load("no-such-model")


@pytest.mark.parametrize(
    ("members", "measured"), [(16, 313), (32, 428), (64, 487), (128, 561), (256, 554)]
)
def test_all_to_alls_are_those_that_deepep_measured(members: int, measured: float) -> None:
    """Dispatch and combine of 128 tokens a GPU in microseconds, by its table of H800."""
    deepseek = model.load("deepseek-v3")
    exchange = ExpertExchange(deepseek, hardware.gpu("h800"), InstanceShape(1, 1, members))
    seconds = exchange.seconds(0, 128) / deepseek.layers
    assert seconds == pytest.approx(measured * 1e-6, rel=0.1)


def test_prompts_send_a_token_once_to_each_node() -> None:
    shape = InstanceShape(1, 1, 64)
    exchange = ExpertExchange(model.load("deepseek-v3"), hardware.gpu("h100"), shape)
    assert exchange.seconds(1000, 0) < 0.8 * exchange.seconds(0, 1000)


def test_experts_are_shared_among_data_parallel_ranks() -> None:
    source = PerformanceSource(
        "roofline", "h100", model.load("deepseek-v3"), hardware.gpu("h100"), expert_parallel=True
    )
    parallel = [shape for shape in source.layouts(32) if shape.dp > 1]
    assert parallel[0] == ReplicaGroup(1, 1, 1, 16) and parallel[0].gpus == 16
    assert str(parallel[0]) == "1 x TP1 DP16 EP16"
    assert source.kv(1, 1, 32) > 2 * source.kv(1, 1, 16) > 0 == source.kv(1, 1, 8)
    few, many = (source.latency(1, 1, dp).decode(8, True)[0] for dp in (16, 64))
    assert few > many, "each rank reads fewer experts"
    plain = PerformanceSource("roofline", "h100", source.model, source.gpu)
    assert all(shape.dp == 1 for shape in plain.layouts(64))


def test_pipelines_may_be_uneven() -> None:
    """DeepSeek-V3 has 61 layers; two nodes of 8 H100 serve it with 31 and 30."""
    deepseek = model.load("deepseek-v3")
    source = PerformanceSource("roofline", "h100", deepseek, hardware.gpu("h100"))
    assert (8, 2) in source.shapes(16) and (8, 1) not in source.shapes(16)
    assert deepseek.stage_share(2) == pytest.approx(31 / 61)
    halves = source.latency(8, 2).decode(8, True)[0] - 20e-6
    assert halves > 31 / 61 * source.latency(8, 1).decode(8, True)[0] * 0.99


def test_kv_may_be_fp8_by_flag() -> None:
    plain = model.load("llama-3.1-8b")
    narrow = model.load("llama-3.1-8b", "fp8")
    assert narrow.is_kv_fp8 and narrow.kv_per_token == plain.kv_per_token / 2
    assert narrow.parameters == plain.parameters


def _mixed_points(longer: float) -> list[dict[str, object]]:
    """Steps of one prompt beside decodes that take `longer` seconds than both apart."""
    return [
        {
            "tokens": [n],
            "contexts": [100] * k,
            # The constant of a decode, 0.01, is within the prompt's, 0.02.
            "seconds": 0.02 + 1e-4 * n + 1e-8 * n * n + 1e-6 * 100 * k + 1e-4 * k + longer,
        }
        for n in (64, 512, 2048)
        for k in (1, 8)
    ]


@pytest.mark.parametrize("longer", [0.015, 0.0, -0.015])
def test_prompts_beside_decodes_take_as_long_as_was_measured(longer: float, tmp_path: Path) -> None:
    """The fit adds what was measured longer; it takes nothing away, so that bounds hold."""
    path = tmp_path / "points.json"
    path.write_text(json.dumps(_points(mixed=_mixed_points(longer))))
    fit = profile.fit(profile.load(str(path)))
    fixed, per_token, per_sequence = fit.latency.beside
    assert fixed == pytest.approx(max(0.0, longer), rel=1e-3, abs=1e-6)
    assert per_token == pytest.approx(0.0, abs=1e-8) and per_sequence == pytest.approx(0, abs=1e-6)
    alone = profile.fit(profile.load(str(_without_mixed(tmp_path))))
    assert fit.latency.mixed(512, 512.0**2, 8, 800, True) == pytest.approx(
        alone.latency.mixed(512, 512.0**2, 8, 800, True) + fixed
    )
    assert fit.latency.mixed(512, 512.0**2, 0, 0, True) == pytest.approx(
        alone.latency.mixed(512, 512.0**2, 0, 0, True)
    )
    assert fit.phases() == ["prefill", "decode", "mixed"] and alone.phases() == fit.phases()[:2]
    if longer >= 0:
        assert fit.worst("mixed") < 1e-3


def _without_mixed(folder: Path) -> Path:
    path = folder / "without.json"
    path.write_text(json.dumps(_points()))
    return path


@pytest.mark.parametrize(
    ("point", "words"),
    [
        ({"tokens": [], "contexts": [1], "seconds": 1.0}, r"mixed\[0\] has no prompt"),
        ({"tokens": [1], "contexts": [], "seconds": 1.0}, r"mixed\[0\] has no prompt"),
        ({"tokens": [1], "contexts": [0], "seconds": 1.0}, r"mixed\[0\] has no prompt"),
        ({"tokens": [1], "contexts": [1], "seconds": 0.0}, r"mixed\[0\].seconds is 0.0"),
    ],
)
def test_a_wrong_mixed_point_is_refused(
    point: dict[str, object], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "points.json"
    path.write_text(json.dumps(_points(mixed=[point])))
    with pytest.raises(ConfigError, match=words):
        profile.load(str(path))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "degrees"),
    [(40, 10, {1, 2}), (32, 8, {1, 2, 4, 8}), (32, 2, {1, 2, 4, 8}), (40, 40, {1, 2, 4, 8})],
)
def test_tensor_parallel_sizes_split_heads_and_kv_heads(
    heads: int, kv_heads: int, degrees: set[int]
) -> None:
    """As vLLM asserts; Phi-4 has 40 heads and 10 KV heads."""
    config = {**model.MODELS["llama-3.1-8b"], "num_attention_heads": heads, "head_dim": 128}
    found = families.parse("m", {**config, "num_key_value_heads": kv_heads})
    source = PerformanceSource("roofline", "h100", found, hardware.gpu("h100"))
    assert {tp for tp, _ in source.shapes(8)} == degrees


def test_latent_attention_has_no_kv_heads_to_split() -> None:
    source = PerformanceSource("roofline", "h200", model.load("deepseek-v3"), hardware.gpu("h200"))
    assert {tp for tp, _ in source.shapes(16)} == {1, 2, 4, 8}
