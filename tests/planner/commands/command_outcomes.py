"""Runs commands of the planner in this process, as a terminal sees them."""

import json
from typing import Any

import pytest

from vllm_disagg import cli


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Returns the line that a command ends with; there is no other, and its status is 2."""
    assert cli.main([*words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "Traceback" not in err
    return err.rstrip("\n")


def json_answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Returns what a command prints with --json; its status is 0."""
    status = cli.main([*words, "--json"])
    out, err = capsys.readouterr()
    assert status == 0, err
    found: dict[str, Any] = json.loads(out)
    return found
