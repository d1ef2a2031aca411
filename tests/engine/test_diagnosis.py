"""`vllm-disagg doctor` has no finding on real engines, and its figures are those of the pair."""

from __future__ import annotations

import json
import os
import subprocess
import time
from typing import Any

import pytest
from conftest import Main
from engines import ADMIN, BIN, ROOT, RUNNER
from test_exact import BLOCK_BYTES

from vllm_disagg.fleet.keys import ADMIN_KEY

pytestmark = pytest.mark.skipif(
    RUNNER.is_interpreted, reason="the doctor's limits are for engines that are not interpreted"
)
# Of a proof on an idle machine, and as a multiple of the command's start on a crowded one.
MAX_SECONDS = 10.0
MAX_STARTS = 25.0
# Other tests have made loads of these engines fail on purpose.
FAILED_LOADS = "have failed since its start"


def doctor(*words: str) -> dict[str, Any]:
    """Returns the doctor's document; fails if it has a finding, but for earlier failed loads."""
    done = subprocess.run(
        [str(BIN / "vllm-disagg"), "doctor", *words, "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, ADMIN_KEY: ADMIN},
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = dict(json.loads(done.stdout))
    findings = [check for check in found["checks"] if check["status"] != "OK"]
    assert all(FAILED_LOADS in check["text"] for check in findings), findings
    assert done.returncode == bool(findings)
    return found


def start_seconds() -> float:
    """Returns how long the command takes that does nothing."""
    began = time.monotonic()
    subprocess.run([str(BIN / "vllm-disagg"), "doctor", "--help"], check=True, capture_output=True)
    return time.monotonic() - began


def test_a_pair_is_proved(main: Main) -> None:
    limit = max(MAX_SECONDS, MAX_STARTS * start_seconds())
    began = time.monotonic()
    found = doctor(
        *("--prefill", main.prefill.url, "--decode", main.decode.url),
        *("--key-file", main.machine.key),
    )
    seconds = time.monotonic() - began
    print(json.dumps(found["pairs"]), f"{seconds:.1f} s")
    (pair,) = found["pairs"]
    assert pair["prompt_tokens"] == 1000 and pair["transports"] == ["tcp"]
    assert pair["kv_bytes"] == 8 * BLOCK_BYTES
    assert pair["reused_bytes"] == 7 * BLOCK_BYTES, "whole blocks that D has"
    assert 0 <= pair["early_share"] <= 1 and 0 < pair["load_seconds"] < pair["seconds"]
    assert seconds < limit


def test_a_proxy_and_its_pair(main: Main) -> None:
    found = doctor("--proxy", main.proxy.url, "--key-file", main.machine.key)
    names = [check["name"] for check in found["checks"]]
    assert f"proxy {main.proxy.url}" in names and "timeouts" in names
    assert len(found["pairs"]) == 1
