"""Checks the scripted instances of the proxy's cost measurement."""

import importlib.util
import json
from itertools import combinations
from pathlib import Path

import msgspec

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
