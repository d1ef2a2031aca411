"""Scripts of benchmarks/ run as their heads say, `python benchmarks/NAME.py`, from any folder."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("script", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.name)
def test_scripts_import_each_other_as_neighbours(script: Path) -> None:
    """Python looks for modules in a script's folder, and not in the one above."""
    names = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    assert "benchmarks" not in {name.partition(".")[0] for name in names}
