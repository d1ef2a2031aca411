"""What test_engines.py runs on GPUs, as far as that is seen without one: commands and results."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from gpu_runs import HANDOFF, ROOT, is_exact

Started = list[tuple[list[str], dict[str, str]]]


@pytest.fixture
def handoff(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("handoff")


@pytest.fixture
def started(handoff: Any, monkeypatch: pytest.MonkeyPatch) -> Started:
    """Returns the commands of engines, which are not started."""
    commands: Started = []

    def start(stack: Any, log: Path, command: list[str], **env: str) -> None:
        commands.append((command, env))

    monkeypatch.setattr(handoff.Stack, "start", start)
    return commands


def engines(handoff: Any, started: Started, gpu: bool) -> Started:
    stack = handoff.Stack("ours", "auto", gpu)
    for core in range(2):
        stack.engine("model", Path("log"), core, {"kv_connector": "DisaggConnector"})
    return started


def test_each_engine_has_a_gpu_and_cuda_graphs(
    handoff: Any, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    found = engines(handoff, started, gpu=True)
    assert [env["CUDA_VISIBLE_DEVICES"] for _, env in found] == ["3", "5"]
    for command, _ in found:
        assert "--enforce-eager" not in command
        assert "--gpu-memory-utilization" not in command


def test_engines_share_a_single_gpu(
    handoff: Any, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    for command, env in engines(handoff, started, gpu=True):
        assert "CUDA_VISIBLE_DEVICES" not in env
        assert command[command.index("--gpu-memory-utilization") + 1] == "0.3"
        assert "--kv-cache-memory-bytes" in command, "else it takes what the other has not yet"
        assert "--enforce-eager" not in command


def test_a_stream_that_ends_with_an_error_is_not_exact(handoff: Any) -> None:
    """As one that began with P's token where D made another."""
    events = [{"choices": [{"text": "a"}]}, {"error": {"message": "diverged"}}]

    async def answer(_: web.Request) -> web.Response:
        lines = [f"data: {json.dumps(event)}\n\n" for event in events]
        return web.Response(text="".join(lines), content_type="text/event-stream")

    async def run() -> tuple[float, str]:
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        async with TestServer(app) as server, aiohttp.ClientSession() as session:
            return await handoff.ask(session, str(server.make_url("")).rstrip("/"), [1])

    _, text = asyncio.run(run())
    assert text == "a{'message': 'diverged'}"


def test_a_cpu_has_no_graphs(handoff: Any, started: Started) -> None:
    for command, env in engines(handoff, started, gpu=False):
        assert "--enforce-eager" in command
        assert "CUDA_VISIBLE_DEVICES" not in env


@pytest.mark.parametrize("is_same", [True, False])
def test_the_flags_and_the_result_are_those_of_handoff(
    handoff: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_same: bool
) -> None:
    """Without NixlConnector, whose router need not be there."""
    monkeypatch.setattr(sys, "argv", ["handoff.py", "model", *HANDOFF, "--transport", "nccl"])
    names: list[str] = []

    @contextlib.contextmanager
    def running(name: str, logs: Path, args: Any) -> Iterator[Any]:
        assert args.gpu and args.transport == "nccl"
        names.append(name)
        yield handoff.Stack(name, args.dtype)

    async def measure(stack: Any, results: dict[str, Any], args: Any, turn: int) -> None:
        for name in ("ours", "first") if stack.name == "ours" else (stack.name,):
            texts = ["right", "right" if is_same or name != "ours" else "wrong"]
            cells = {(length, 1): handoff.Cell([1.0, 1.0], texts) for length in args.lengths}
            results[name] = cells

    monkeypatch.setattr(handoff, "running", running)
    monkeypatch.setattr(handoff, "measure", measure)
    monkeypatch.setattr(handoff.signal, "signal", lambda *_: None)
    handoff.main()
    assert names == ["plain", "ours"]
    assert is_exact(capsys.readouterr().out) == is_same
