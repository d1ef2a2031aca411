"""Tests the parser of vllm bench's result file: good requests, and figures."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_disagg.bench import results
from vllm_disagg.bench.results import GoodputObjectives, wilson
from vllm_disagg.errors import DisaggError

OBJECTIVES = GoodputObjectives(ttft=0.2, tpot=0.05, attainment=0.5)


def detailed(**changed: Any) -> bytes:
    """Four requests for three tokens: good, late first token, slow tokens, good."""
    fields = {
        "duration": 2.0,
        "completed": 4,
        "input_lens": [10, 10, 10, 10],
        "output_lens": [3, 3, 3, 3],
        "ttfts": [0.1, 0.3, 0.1, 0.2],
        "itls": [[0.01, 0.03], [0.01, 0.01], [0.05, 0.06], [0.08, 0.02]],
        "start_times": [100.0, 100.5, 101.0, 101.5],
        "errors": ["", "", "", ""],
    }
    return json.dumps(fields | changed).encode()


def test_a_request_is_good_if_it_meets_both_objectives() -> None:
    run = results.parse(detailed(), 2.0, [3] * 4, OBJECTIVES)
    assert (run.good, run.failed, run.attainment) == (2, 0, 0.5)
    assert run.met(OBJECTIVES) and not run.met(GoodputObjectives(0.2, 0.05, 0.51))
    assert run.qps == 2.0 and run.output_tokens_per_s == 6.0 and run.prompt_tokens_per_s == 20.0
    assert run.ttft.median == pytest.approx(0.15) and run.tpot.median == pytest.approx(0.035)
    assert run.offered == 2.0 and not run.is_late()
    assert run.mean_latency == pytest.approx((0.14 + 0.32 + 0.21 + 0.30) / 4)


def test_an_answer_of_one_token_has_no_tpot() -> None:
    """An empty last chunk gives vLLM's client a gap all the same."""
    run = results.parse(detailed(output_lens=[1] * 4, ttfts=[0.1] * 4), 2.0, [1] * 4, OBJECTIVES)
    assert run.good == 4


@pytest.mark.parametrize(
    "changed",
    [
        {"errors": ["", "", "", "Traceback\nConnectionError: gone\n"], "output_lens": [3, 3, 3, 0]},
        {"output_lens": [3, 3, 3, 2]},  # vLLM calls that a success
        {"output_lens": [3, 3, 3, 7]},  # vLLM's guess at the length of what ended early
    ],
)
def test_an_answer_that_is_not_whole_is_missed_and_in_no_latency(changed: dict[str, Any]) -> None:
    run = results.parse(detailed(**changed), 2.0, [3] * 4, OBJECTIVES)
    assert (run.sent, run.good, run.failed) == (4, 1, 1)
    assert run.ttft.p99 is not None and run.qps == 1.5
    assert run.error in ("ConnectionError: gone", "an answer ended before its last token")


def test_nothing_but_failures() -> None:
    run = results.parse(detailed(errors=["no"] * 4, output_lens=[0] * 4), 2.0, [3] * 4, OBJECTIVES)
    assert (run.good, run.failed, run.ttft.median, run.mean_latency) == (0, 4, None, None)


def test_one_token_has_no_time_per_further_token() -> None:
    run = results.parse(detailed(output_lens=[1] * 4, itls=[[]] * 4), 2.0, [1] * 4, OBJECTIVES)
    assert run.good == 3 and run.tpot.median is None


def test_a_load_generator_that_cannot_keep_up_is_noticed() -> None:
    assert results.parse(detailed(), 4.0, [3] * 4, OBJECTIVES).is_late()


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", detailed(ttfts=[0.1]), detailed(itls="x")])
def test_what_is_not_a_result_is_an_error(content: bytes) -> None:
    with pytest.raises(DisaggError, match="vllm bench serve"):
        results.parse(content, 1.0, [3] * 4, OBJECTIVES)


def test_wilsons_interval() -> None:
    assert wilson(90, 100) == pytest.approx((0.8256, 0.9448), abs=1e-4)
    assert wilson(0, 20)[0] == 0 and wilson(20, 20)[1] == 1
