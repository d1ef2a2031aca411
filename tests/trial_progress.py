"""Notes when each test begins: a plugin of pytest in the trials of `warm_pytest.py`.

A test that hangs with a fault is known by its own limit, long before that of the whole run.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

VARIABLE = "TRIAL_PROGRESS"  # in the environment: the file for the notes


def pytest_runtest_logstart(nodeid: str) -> None:
    _note(nodeid)


def pytest_sessionfinish() -> None:
    _note("")


def _note(test: str) -> None:
    # By the clock that all processes of a machine share.
    with Path(os.environ[VARIABLE]).open("a") as notes:
        notes.write(f"{time.monotonic()} {test}\n")


def starts(notes: Path, began: float) -> list[tuple[float, str]]:
    """Returns when what has begun, in order; an empty name: no test, but what is around them."""
    found = [(began, "")]
    for line in notes.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            at, _, test = line[:-1].partition(" ")
            found.append((float(at), test))
    return found
