"""Counts the published recipes, as `scripts/recipes.py` does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

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
    assert found["start"] + sum(found["refused"].values()) == found["of"]


@pytest.mark.parametrize("column", ["dbo", "elastic_experts"])
def test_a_flag_that_is_refused_is_counted(recipes: ModuleType, column: str) -> None:
    row = next(row for row in recipes.read_table() if not recipes.refusal_of(row))
    assert "was never tried" in recipes.refusal_of({**row, column: "True"})
