"""Checks scripted instances: those of the proxy's cost measurement, and those of tests."""

import importlib.util
import json
import socket
from itertools import combinations
from pathlib import Path

import msgspec
import pytest

from proxy_world import ScriptedEngine
from vllm_disagg.protocol.peers import EngineInfo

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "scripted.py"


def test_scripted_instances_are_different_engines() -> None:
    """The proxy pairs no two instances that share a worker's name."""
    spec = importlib.util.spec_from_file_location("scripted", SCRIPT)
    assert spec and spec.loader
    scripted = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(scripted)
    names: list[set[str]] = []
    for role, number in (("prefill", 0), ("prefill", 1), ("decode", 0), ("decode", 1)):
        answer = json.loads(scripted.answers(role, f"scripted-{role}-{number}"))
        engine = msgspec.convert(answer["kv_transfer_params"]["disagg_engine"], EngineInfo)
        names.append({worker.name for worker in engine.workers})
    assert all(a.isdisjoint(b) for a, b in combinations(names, 2))


async def test_a_stopped_instance_keeps_its_port() -> None:
    engine = ScriptedEngine("e", "decode")
    await engine.start()
    await engine.stop()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", engine.port))
    await engine.start()
    await engine.stop()
