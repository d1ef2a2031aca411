"""The demo keeps what its processes write while they stop off the terminal, and in a log file."""

from __future__ import annotations

import re
import sys
import time
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

STAND_IN = """
import signal, sys, time

def stop(*_):
    print("leaked function", file=sys.stderr, flush=True)
    sys.exit()

signal.signal(signal.SIGINT, stop)
print("loading", file=sys.stderr, flush=True)
print("ready: http://proxy", "--decode http://decode", sep="\\n", flush=True)
time.sleep(60)
"""


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("openai")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    return import_module("demo")


def test_noise_of_the_end_goes_to_the_log_alone(
    demo: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    with demo.started([sys.executable, "-c", STAND_IN]) as up:
        assert demo.addresses(up) == ("http://proxy", "http://decode")
        shown = ""
        deadline = time.monotonic() + 60
        while "loading" not in shown:  # the thread that copies has its own pace
            assert time.monotonic() < deadline
            shown += capfd.readouterr().err
    assert up.returncode == 0
    shown += capfd.readouterr().err
    log = re.search(r"their output is in (\S+)\n$", shown)
    assert log, shown
    assert "leaked function" not in shown
    path = Path(log[1])
    assert path.read_text() == "loading\nleaked function\n"
    path.unlink()


def test_processes_that_do_not_start_are_explained(
    demo: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    failing = [sys.executable, "-c", "import sys; sys.exit('no model')"]
    with pytest.raises(SystemExit, match="did not start"), demo.started(failing) as up:
        demo.addresses(up)
    shown = capfd.readouterr().err
    log = re.search(r"^no model\n.* their output is in (\S+)\n$", shown)
    assert log, shown
    path = Path(log[1])
    assert path.read_text() == "no model\n"
    path.unlink()
