"""The line by which `up` explains the end of a child."""

from __future__ import annotations

import itertools
import signal

import pytest

from vllm_disagg.launcher.processes import ExitCause

# As vLLM 0.32 and the proxy print them; the last lines before D's EngineCore was killed.
ULIMIT = (
    "(EngineCore pid=7) WARNING 11-22 04:00:01 [serve.py:100] Found ulimit of 20000. This can"
    " cause errors like `OSError: [Errno 24] Too many open files`. Consider increasing"
)
PROXY = (
    "2026-11-22 04:00:02,123 WARNING instance http://h:1 (decode) is not used:"
    " its watch failed: UnicodeError: label too long"
)
INFO = "(APIServer pid=5) INFO 11-22 04:00:03 [launcher.py:80] Shutting down FastAPI HTTP server."
DEAD = (
    "(APIServer pid=5) ERROR 11-22 04:00:02 [core_client.py:600] Engine core proc EngineCore"
    " died unexpectedly, shutting down client."
)
ROOT = "(APIServer pid=5) EngineDeadError: EngineCore encountered an issue. See root cause above."
ACCESS = (
    '{"time":1763784002.1,"id":"a","client":"10.0.0.2","method":"POST","path":"/v1/completions",'
    '"status":400,"mode":"refused","outcome":"client_error"}'
)
HARMLESS = (ULIMIT, PROXY, INFO, ACCESS)


def explained(lines: tuple[str, ...], code: int) -> str:
    cause = ExitCause()
    for line in lines:
        cause.add(line)
    return cause.explain(code)


@pytest.mark.parametrize("order", list(itertools.permutations([*HARMLESS, DEAD, ROOT])))
def test_no_warning_is_the_cause_beside_an_error(order: tuple[str, ...]) -> None:
    assert explained(order, 0) == f"exited with code 0: {DEAD}"


@pytest.mark.parametrize("line", HARMLESS)
def test_a_signal_explains_an_end_without_an_error(line: str) -> None:
    killed = "was ended by SIGKILL, possibly because memory ran out"
    assert explained((line,), -signal.SIGKILL) == killed
    assert explained((line, DEAD), -signal.SIGKILL) == f"{killed}: {DEAD}"
    assert explained((line,), -signal.SIGSEGV) == "was ended by SIGSEGV"


def test_without_an_error_the_last_line_is_shown() -> None:
    assert explained((ULIMIT, INFO), 3) == f"exited with code 3: {INFO}"
    assert explained((), 3) == "exited with code 3: no output"
