"""Tests of how an agent uses memory and NIXL, with a scripted library.

tests/transports/processes has the real one, in host memory and over a fake CUDA driver.
"""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_disagg.config import Config
from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.layout import RankLayout, RemoteLayout, uniform
from vllm_disagg.kv.memory import ByteBuffer, DirectMemory, HostBuffer, HostMemory, MemoryPlace
from vllm_disagg.kv.planes import Plane
from vllm_disagg.kv.runs import Runs, no_runs, runs_of
from vllm_disagg.transports.nixl import agent as nixl_agent
from vllm_disagg.transports.nixl.agent import Agent, Job, NixlError


class ScriptedMemory:
    """A KV cache on a device that records the calls."""

    place = MemoryPlace("VRAM", 1)

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls
        self.shape: RankLayout = uniform(1, 16, [8])
        self.prepared: set[int] = set()

    def prepare_thread(self) -> None:
        self.prepared.add(threading.get_ident())

    def note(self, call: str) -> None:
        assert threading.get_ident() in self.prepared, f"{call} in a thread without the device"
        self.calls.append(call)

    def read(self, extent: Extent, blocks: Sequence[int]) -> list[memoryview]:
        raise NotImplementedError

    def write(
        self,
        extent: Extent,
        blocks: Sequence[int],
        frames: Sequence[memoryview],
        remote_layout: RemoteLayout | None = None,
    ) -> bool:
        raise NotImplementedError

    def runs(self, extent: Extent, blocks: Sequence[int]) -> Runs:
        return no_runs()

    def plane_places(self) -> list[list[Plane]]:
        return []

    def regions(self) -> Runs:
        return runs_of([(4096, 100), (1000, 8), (1008, 8)])

    def new_buffer(self, size: int) -> ByteBuffer:
        self.note("new buffer")
        return HostBuffer(size)

    def write_buffer(
        self,
        extent: Extent,
        blocks: Sequence[int],
        buffer: ByteBuffer,
        size: int,
        remote_layout: RemoteLayout,
    ) -> bool:
        raise NotImplementedError

    def wait_for_device(self) -> None:
        self.note("wait for the device")


class ScriptedNixl:
    """The part of NIXL's agent that is used."""

    backends = ("UCX",)

    def __init__(self, memory: ScriptedMemory) -> None:
        self.memory = memory
        self.registered: list[tuple[Any, ...]] = []
        self.fails = False
        self.requested: list[Any] = []

    def register_memory(self, regions: list[tuple[int, int, int, str]], kind: str) -> None:
        if self.fails:
            raise ValueError("NIXL_ERR_BACKEND")
        self.memory.note("register")
        self.registered.append((kind, regions))

    def get_xfer_descs(self, rows: np.ndarray, kind: str) -> tuple[str, list[list[int]]]:
        return kind, rows.tolist()

    def initialize_xfer(self, *request: Any) -> str:
        self.requested.append(request)
        return "handle"


class Inner:
    """NIXL's own object, which must be gone after `close`."""


class Wrapper:
    """Python's object around it; the agent has the only reference."""

    def __init__(self, library: ScriptedNixl) -> None:
        self.agent = Inner()
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)


@pytest.fixture
def calls() -> list[str]:
    return []


@pytest.fixture
def memory(calls: list[str]) -> ScriptedMemory:
    return ScriptedMemory(calls)


@pytest.fixture
def library(memory: ScriptedMemory, monkeypatch: pytest.MonkeyPatch) -> ScriptedNixl:
    made = ScriptedNixl(memory)
    api = SimpleNamespace(nixl_agent=lambda *_: Wrapper(made), nixl_agent_config=lambda **_: None)
    monkeypatch.setattr(nixl_agent.importlib, "import_module", lambda _: api)
    return made


def in_thread(call: Any) -> Any:
    """Calls in a new thread, which has no device yet; returns the result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join(20)
    assert results, "it raised"
    return results[0]


def make(memory: ScriptedMemory) -> Agent:
    assert isinstance(memory, DirectMemory)
    return Agent("a", Config(transport="nixl"), memory)


def test_both_kinds_of_memory_can_be_read_by_address(memory: ScriptedMemory) -> None:
    assert isinstance(memory, DirectMemory)
    assert isinstance(HostMemory([[np.zeros((4, 8), np.uint8)]], 16), DirectMemory)


def test_memory_is_registered_once_at_its_device(
    library: ScriptedNixl, memory: ScriptedMemory
) -> None:
    agent = in_thread(lambda: make(memory))
    # Allocations that touch stay apart: CUDA maps each one by a key of its own.
    rows = [(4096, 100, 1, ""), (1000, 8, 1, ""), (1008, 8, 1, "")]
    assert library.registered == [("VRAM", rows)]
    buffer = in_thread(lambda: (memory.prepare_thread(), agent.buffer(64))[1])
    assert library.registered[1:] == [("VRAM", [(buffer.address, 64, 1, "")])]


def test_planes_of_host_memory_that_touch_are_registered_as_one(
    library: ScriptedNixl, memory: ScriptedMemory
) -> None:
    memory.prepare_thread()  # the scripted NIXL is one of GPUs
    planes = np.zeros((2, 4, 8), np.uint8)
    agent = Agent("a", Config(transport="nixl"), HostMemory([list(planes)], 16))
    assert library.registered == [("DRAM", [(planes.ctypes.data, planes.nbytes, 0, "")])]
    assert agent.regions.tolist() == [[planes.ctypes.data, planes.nbytes]]


def test_each_side_of_a_read_has_its_own_kind_and_device(
    library: ScriptedNixl, memory: ScriptedMemory
) -> None:
    agent = make(memory)
    local, remote = runs_of([(1000, 8), (1008, 4)]), runs_of([(70, 8), (90, 4)])
    handle = agent.request("p", local, remote, MemoryPlace("DRAM", 0))
    assert handle == "handle"
    ours, theirs = ("VRAM", [[1000, 8, 1], [1008, 4, 1]]), ("DRAM", [[70, 8, 0], [90, 4, 0]])
    assert library.requested == [("READ", ours, theirs, "p")]


def test_a_closed_agent_has_waited_for_the_device(
    library: ScriptedNixl, memory: ScriptedMemory, calls: list[str]
) -> None:
    """A GPU may go on with copies when UCX is gone."""
    agent = make(memory)
    calls.clear()
    in_thread(lambda: (agent.close(), True)[1])
    assert calls == ["wait for the device"]


def test_a_device_is_not_waited_for_while_the_agent_is_there(
    library: ScriptedNixl,
    memory: ScriptedMemory,
    calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """UCX could start further copies after that."""
    monkeypatch.setattr(nixl_agent, "AGENT_GONE_SECONDS", 0.05)
    agent = make(memory)
    inner = agent._agent.agent
    calls.clear()
    with pytest.raises(NixlError, match="still in use"):
        agent.close()
    assert inner is not None and calls == []


@pytest.mark.parametrize("is_referred_to", [True, False])
def test_memory_of_an_agent_that_may_still_write_is_never_freed(
    library: ScriptedNixl,
    memory: ScriptedMemory,
    monkeypatch: pytest.MonkeyPatch,
    is_referred_to: bool,
) -> None:
    """A GPU's would be taken for the next piece, behind the check of its bytes."""
    monkeypatch.setattr(nixl_agent, "AGENT_GONE_SECONDS", 0.05)
    monkeypatch.setattr(nixl_agent, "_not_gone", [])

    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    if not is_referred_to:
        monkeypatch.setattr(memory, "wait_for_device", fail)
    agent = make(memory)
    inner = agent._agent.agent if is_referred_to else None
    buffer = weakref.ref(agent.buffer(64))
    job = Job(agent.close)
    del agent
    assert not job.ends(60.0) and job.error
    gc.collect()
    assert buffer() is not None
    del inner


@pytest.mark.parametrize(("kind", "hint"), [("VRAM", True), ("DRAM", False)])
def test_memory_that_cannot_be_registered_is_named(
    library: ScriptedNixl, memory: ScriptedMemory, kind: Any, hint: bool
) -> None:
    library.fails = True
    memory.place = MemoryPlace(kind, 1)  # type: ignore[misc]
    with pytest.raises(NixlError, match=f"UCX does not register 116 bytes of {kind} 1") as caught:
        make(memory)
    assert ("UCX needs CUDA" in str(caught.value)) is hint
