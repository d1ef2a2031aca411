"""What a run of the tests says about a planted fault."""

from __future__ import annotations

import mutants
import pytest
from mutants import Outcome


@pytest.mark.parametrize(
    ("status", "output", "expected"),
    [
        (1, "1 failed, 2 passed in 0.10s\n", Outcome.CAUGHT),
        (0, "3 passed in 0.10s\n", Outcome.MISSED),
        (0, "3 passed, 2 skipped in 0.10s\n", Outcome.MISSED),
        (0, "s\n1 skipped in 0.10s\n", Outcome.SKIPPED),
        (5, "1 skipped in 0.10s\n", Outcome.SKIPPED),  # a whole module
    ],
)
def test_skipped_tests_neither_catch_nor_miss(status: int, output: str, expected: Outcome) -> None:
    assert mutants.outcome_from(status, output, []) is expected


def test_a_run_that_cannot_be_read_ends_all() -> None:
    for status, output in ((2, "error\n"), (4, "no tests\n"), (0, "")):
        with pytest.raises(SystemExit):
            mutants.outcome_from(status, output, ["pytest"])
