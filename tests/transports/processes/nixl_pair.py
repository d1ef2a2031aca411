"""A sender in another process and a receiver in this one, both with NIXL, for tests."""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fake_gpu
import pytest
from peer import BLOCK_SIZE, Peer, driver, memory, want

from vllm_disagg.kv.memory import HostMemory
from vllm_disagg.protocol import events
from vllm_disagg.transports.nixl import agent as nixl_agent
from vllm_disagg.transports.nixl import path as nixl_path
from vllm_disagg.transports.nixl.pairing import Pairing
from vllm_disagg.transports.nixl.paths import NixlSource, Paths, PathState
from vllm_disagg.transports.nixl.transport import NixlTransport

real = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")
HOST_MEMORY_ONLY = "of KV in host memory"
WITHOUT_NVLINK = "test_device.py runs it without NVLink"
in_host_memory = pytest.mark.skipif(fake_gpu.IS_ON_GPU, reason=HOST_MEMORY_ONLY)
in_device_memory = pytest.mark.skipif(
    not fake_gpu.IS_ON_GPU, reason="test_device.py runs it with a fake CUDA driver"
)
# So that a busy machine does not look like a silent peer.
PATIENT = {"transport": "nixl", "peer_timeout": 30.0, "lease": 120.0}
QUICK = {"peer_timeout": 8.0, "keepalive_interval": 0.5}


def has_two_libnls() -> bool:
    """Returns whether NIXL's copy of libnl-route and the system's are both in this process.

    The system's comes with ibverbs-providers. A process that ends by exit() then dies by SIGSEGV in
    NIXL's copy, also one that has only made a bare nixl_agent (NIXL 1.5.1).
    """
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    return sum("/libnl-route-3" in path for path in mapped) > 1


def Source(
    row: int = 4096, lie: str = "", env: dict[str, str] | None = None, **settings: object
) -> Peer:
    return Peer(row, settings={**PATIENT, **settings}, lie=lie, env=env)


class Sink:
    """The driver of a receiving worker, in this process."""

    def __init__(self, row: int = 4096, **settings: object) -> None:
        self.memory = memory(row, None)
        self.driver = driver(self.memory, **{**PATIENT, **settings})

    def want(self, source: Peer, count: int = 5, *, prefill: bool = True) -> str:
        transfer, tokens = secrets.token_hex(16), count * BLOCK_SIZE - 5
        if prefill:
            source(f"prefill {transfer} {tokens}")
        want(self.driver, transfer, tokens, source.worker, first=count)
        return transfer

    def outcome(self, seconds: float = 150.0) -> events.LoadResult:
        # A load that moves nothing ends after 60 s, and a read that it has posted 30 s later.
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if taken := self.driver.take():
                assert len(taken) == 1 and isinstance(taken[0], events.LoadResult)
                return taken[0]
            time.sleep(0.001)
        raise AssertionError("nothing came")

    def expect_exact(self, source: Peer, count: int = 5) -> str:
        """Load some blocks, check them, and return the transports that moved them."""
        for planes in self.memory.planes:
            for plane in planes:
                plane[:] = 0
        before = dict(self.driver.counters.received)
        self.want(source, count)
        report = self.outcome()
        assert report.reason is None, report
        expected: HostMemory = memory(source.row, 1)
        for ours, theirs in zip(self.memory.planes, expected.planes, strict=True):
            for plane, reference in zip(ours, theirs, strict=True):
                assert (plane[count : 2 * count] == reference[:count]).all()
                assert not plane[:count].any() and not plane[2 * count :].any(), (
                    "wrote into blocks of somebody else"
                )
        after = self.driver.counters.received
        return " ".join(sorted(name for name in after if after[name] > before.get(name, 0)))

    @property
    def transport(self) -> NixlTransport:
        return self.driver._transports["nixl"]  # type: ignore[return-value]

    @property
    def paths(self) -> Paths:
        return self.transport._paths

    def path_state(self, source: Peer) -> PathState:
        return self.paths.sources[source.worker.name].state

    def pair(self, source: Peer, wanted: PathState = PathState.UP) -> None:
        """Load, probably by ZMQ, then wait for the state of the NIXL path.

        A path that is down is tried again only with the next load.
        """
        self.expect_exact(source)
        end = time.monotonic() + 150.0
        while (state := self.path_state(source)) is not wanted:
            assert time.monotonic() < end, f"not {wanted.name} in time, but {state.name}"
            if state is PathState.DOWN:
                self.expect_exact(source)
            time.sleep(0.002)


def wait(done: Callable[[], bool], seconds: float = 150.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.002)


def freeze_at_second_read(source: Peer, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Freezes a sender before a second read of it is posted, which then cannot end.

    The event is set after that. Reads are too short to be met in the middle by looking for them.
    """
    read = nixl_agent.Agent.read
    names: list[str] = []
    is_frozen = threading.Event()

    def freezing_read(agent: nixl_agent.Agent, peer: str, *runs: Any) -> nixl_agent.Read | None:
        names.append(peer)
        if len(names) == 2:
            os.kill(source.process.pid, signal.SIGSTOP)
        posted = read(agent, peer, *runs)
        if len(names) == 2:
            is_frozen.set()
        return posted

    monkeypatch.setattr(nixl_agent.Agent, "read", freezing_read)
    return is_frozen


def lenient(
    pairing: Pairing,
    source: NixlSource,
    probe: nixl_path.OneSidedProbe,
    original: Any = Pairing._decide,
) -> None:
    probe.step = nixl_path.ProbeStep.PROVED
    original(pairing, source, probe)


def broken_read(*_: object) -> None:
    raise nixl_agent.NixlError("a scripted failure")
