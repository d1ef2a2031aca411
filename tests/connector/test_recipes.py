"""Counts the published recipes, as `scripts/recipes.py` does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
from vllm_release import as_of_032

pytestmark = as_of_032("is refused models of most recipes")
SCRIPT = Path(__file__).parents[2] / "scripts/recipes.py"


@pytest.fixture(scope="module")
def recipes() -> ModuleType:
    spec = importlib.util.spec_from_file_location("recipes", SCRIPT)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nine_of_ten_published_recipes_would_start(recipes: ModuleType) -> None:
    rows = recipes.read_table()
    found = recipes.count(rows)
    assert found["of"] == len(rows) / 2 == 160
    assert found["start"] >= 0.9 * found["of"]
    assert found["start"] == found["pair"]
    assert found["start"] + sum(found["refused"].values()) == found["of"]


def test_recipes_with_synthetic_acceptance_are_refused(recipes: ModuleType) -> None:
    rows = recipes.read_table()
    synthetic = [row for row in rows if row["verification"] == "synthetic"]
    assert len(synthetic) == 2 * 5
    for row in synthetic:
        assert "rejection_sample_method synthetic" in recipes.refusal_of(row)
        assert not recipes.refusal_of({**row, "verification": "standard"})
    flags = {
        "speculative-config": '{"method": "mtp", "rejection_sample_method": "synthetic"}',
        "kv-transfer-config": '{"kv_connector": "NixlConnector"}',
    }
    assert recipes.row_of(flags)["verification"] == "synthetic"


@pytest.mark.parametrize("column", ["dbo", "elastic_experts"])
def test_a_flag_that_is_refused_is_counted(recipes: ModuleType, column: str) -> None:
    row = next(row for row in recipes.read_table() if not recipes.refusal_of(row))
    assert "was never tried" in recipes.refusal_of({**row, column: "True"})


def test_a_pair_needs_the_kv_of_each_rank(recipes: ModuleType) -> None:
    rows = recipes.read_table()
    decode = next(row for row in rows if "MiniMax-M3" in row["model"] and row["tp"] == "8")
    at = rows.index(decode)
    prefill = rows[at - 1]
    assert prefill["tp"] == "1"  # and so D has replicated heads
    assert not recipes.misfit_of(prefill, decode)
    assert recipes.misfit_of(prefill, {**decode, "tp": "3"})
    other = {**decode, "kv_cache_dtype": "fp8_e5m2"}
    assert "kv_cache_dtype is" in recipes.misfit_of(prefill, other)
    rows[at] = {**decode, "tp": "3"}
    found = recipes.count(rows)
    assert found["pair"] == found["start"] - 1
