"""Data parallel ranks: how vLLM's API servers reach an engine, and whether it computes in step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kv_connectors import data_parallel
from kv_connectors.data_parallel import SharedServerRank


def config(engine_id: str, **changes: Any) -> Any:
    """Returns the configuration of rank 1 of independent ranks behind one API server."""
    parallel = {
        "data_parallel_index": 1,
        "data_parallel_rank_local": 1,
        "data_parallel_size": 1,
        "data_parallel_external_lb": False,
        "data_parallel_hybrid_lb": False,
        **changes,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        kv_transfer_config=SimpleNamespace(engine_id=engine_id),
    )


HYBRID = {
    "data_parallel_hybrid_lb": True,
    "data_parallel_index": 5,
    "data_parallel_rank_local": 1,
}


@pytest.mark.parametrize(
    ("engine_id", "changes", "rank"),
    [
        ("a1b2", {}, None),  # alone
        ("a1b2_dp1", {}, SharedServerRank(1, 1)),
        ("a1b2_dp0", {"data_parallel_index": 0}, SharedServerRank(0, 0)),
        ("a1b2_dp5", HYBRID, SharedServerRank(1, 5)),  # of the ranks on this machine
        ("a1b2_dp1", {"data_parallel_external_lb": True}, None),
        ("a1b2_dp1", {"data_parallel_size": 2}, SharedServerRank(1, 1)),
        ("a1b2", {"data_parallel_size": 2}, SharedServerRank(1, 1)),  # Ray adds no suffix
        ("a1b2_dp1", {"data_parallel_size": 2, "data_parallel_external_lb": True}, None),
    ],
)
def test_how_an_api_server_reaches_a_rank(
    engine_id: str, changes: dict[str, Any], rank: SharedServerRank | None
) -> None:
    assert data_parallel.shared_server_rank(config(engine_id, **changes)) == rank


@pytest.mark.parametrize(("size", "in_step"), [(1, False), (2, True)])
def test_ranks_of_experts_compute_in_step(size: int, in_step: bool) -> None:
    made = config("a1b2_dp1", data_parallel_size=size)
    assert data_parallel.computes_in_step(made) is in_step
