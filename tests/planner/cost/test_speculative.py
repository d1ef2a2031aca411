"""Step times with speculative decoding."""

from __future__ import annotations

import json

import msgspec
import pytest

from vllm_disagg.errors import ConfigError
from vllm_disagg.planner.cost import hardware, model, speculative
from vllm_disagg.planner.cost.roofline import InstanceShape, RooflineLatency
from vllm_disagg.planner.cost.speculative import SpeculativeDecoding, SpeculativeLatency
from vllm_disagg.planner.search.performance_source import PerformanceSource
from vllm_disagg.planner.search.placement import Placement, ReplicaGroup
from vllm_disagg.planner.search.scenario import Scenario
from vllm_disagg.planner.simulation import workload
from vllm_disagg.planner.simulation.objective import Objective
from vllm_disagg.planner.simulation.workload import Arrivals

CONFIG = '{"method": "mtp", "num_speculative_tokens": 3}'


def plain() -> RooflineLatency:
    return RooflineLatency(
        model.load("deepseek-v3"),
        hardware.gpu("h200"),
        InstanceShape(8),
    )


def drafting(tokens: int, length: float, method: str = "mtp") -> SpeculativeLatency:
    return SpeculativeLatency(plain(), SpeculativeDecoding("{}", method, tokens, length))


def test_drafts_without_success_only_cost() -> None:
    """One token a step: verified tokens and runs of the draft layer are lost time."""
    base, slope = plain().decode(8, True)
    drafted, drafted_slope = drafting(3, 1.0).decode(8, True)
    verified, _ = drafting(3, 1.0, "ngram").decode(8, True)
    assert base < verified < drafted
    # Three runs of one layer of 61, with the head and its bytes: no tenth of a step each.
    assert verified < drafted < verified + 0.3 * base
    assert drafted_slope == pytest.approx(slope * (1 + 3 / 61))


def test_accepted_drafts_divide_the_time_of_a_step() -> None:
    whole = drafting(3, 1.0).decode(8, True)
    divided = drafting(3, 2.5).decode(8, True)
    assert divided == pytest.approx(tuple(value / 2.5 for value in whole))


def test_a_draft_of_a_dense_model_pays_at_few_sequences_and_not_where_flops_bind() -> None:
    dense = RooflineLatency(model.load("llama-3.1-70b"), hardware.gpu("h100"), InstanceShape(4))
    drafts = SpeculativeLatency(dense, SpeculativeDecoding("{}", "eagle3", 3, 2.0))
    assert drafts.decode(1, True)[0] < 0.6 * dense.decode(1, True)[0]
    assert drafts.decode(1024, True)[0] > dense.decode(1024, True)[0]


def test_prompts_beside_decodes_take_their_whole_time() -> None:
    steps = drafting(3, 2.5)
    one, slope = steps.decode(8, True)
    plain_one, plain_slope = plain().decode(8, True)
    added = steps.mixed(512, 512.0**2, 8, 4000, True) - one - slope * 4000
    assert added == pytest.approx(
        plain().mixed(512, 512.0**2, 8, 4000, True) - plain_one - plain_slope * 4000
    )
    assert steps.mixed(512, 512.0**2, 0, 0, True) == plain().mixed(512, 512.0**2, 0, 0, True)


def test_a_config_is_read_as_vllm_reads_it() -> None:
    found = speculative.parse(CONFIG, 2.4)
    assert (found.method, found.tokens, found.acceptance_length) == ("mtp", 3, 2.4)
    assert speculative.parse(CONFIG.replace("mtp", "deepseek_mtp"), 2.4).method == "mtp"
    assert found.words() == "3 by mtp, 2.4 tokens a step"


@pytest.mark.parametrize(
    ("config", "length", "words"),
    [
        ("{", 2.0, "is not JSON"),
        ("[]", 2.0, "is not a JSON object"),
        ('{"method": "medusa", "num_speculative_tokens": 3}', 2.0, 'method "medusa" is not known'),
        ('{"num_speculative_tokens": 3}', 2.0, "method null is not known"),
        ('{"method": "mtp"}', 2.0, "num_speculative_tokens is null, not 1 or more"),
        ('{"method": "mtp", "num_speculative_tokens": true}', 2.0, "is true, not 1 or more"),
        ('{"method": "mtp", "num_speculative_tokens": 1025}', 2.0, "is 1025, not 1 or more, up to"),
        (CONFIG, None, "goes with --acceptance-length"),
        (CONFIG, 0.9, "0.9 is not from 1 to 4"),
        (CONFIG, 4.1, "4.1 is not from 1 to 4"),
        (CONFIG, float("nan"), "nan is not from 1 to 4"),
    ],
)
def test_a_wrong_config_is_refused_by_its_field(
    config: str, length: float | None, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        speculative.parse(config, length)
    assert "\n" not in str(error.value)


def test_the_config_stays_as_it_was_given() -> None:
    assert json.loads(speculative.parse(CONFIG, 2.0).config) == json.loads(CONFIG)


@pytest.mark.parametrize(("method", "layers"), [("mtp", 1), ("ngram", 0)])
def test_a_draft_layer_takes_memory_like_one_of_the_model(method: str, layers: int) -> None:
    """Llama 3.1 8B has 32 layers: with a draft layer, fewer tokens fit that take more each."""
    sizes = model.load("llama-3.1-8b")
    gpu = hardware.gpu("h100")
    without = PerformanceSource("roofline", "h100", sizes, gpu)
    drafts = SpeculativeDecoding("{}", method, 3, 2.0)
    found = msgspec.structs.replace(without, drafts=drafts).kv(1, 1)
    token = sizes.kv_per_token
    layer = sizes.dense_bytes / 32
    expected = (without.kv(1, 1) * token - layers * layer) / (token * (32 + layers) / 32)
    assert found == pytest.approx(expected, abs=32)
    assert (found < without.kv(1, 1)) == bool(layers)


def test_the_kv_of_a_draft_layer_travels() -> None:
    source = PerformanceSource("roofline", "h100", model.load("llama-3.1-8b"), hardware.gpu("h100"))
    drafting_source = msgspec.structs.replace(
        source, drafts=SpeculativeDecoding("{}", "eagle3", 3, 2.0)
    )
    placement = Placement(ReplicaGroup(1, 1, 1), ReplicaGroup(1, 1, 1))
    plain_bytes, drafting_bytes = (
        scenario_of(one).deployment(placement).handoff.bytes_per_token
        for one in (source, drafting_source)
    )
    assert drafting_bytes == pytest.approx(plain_bytes * 33 / 32)


def scenario_of(source: PerformanceSource) -> Scenario:
    return Scenario(
        prefill=source,
        decode=source,
        workload=workload.load("2000:20"),
        arrivals=Arrivals("poisson"),
        objective=Objective(1.5, 0.05),
        link=hardware.link("ib-400"),
    )
