"""The binding of NCCL without a GPU, and its link over a scripted library.

With NCCL's library at hand (VLLM_NCCL_SO_PATH, or torch's own) its symbols and version are real.
"""

from __future__ import annotations

import ctypes
import os
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_disagg.transports.collective import channel

nccl = pytest.importorskip("kv_connectors.gpu.nccl", reason="there is no Triton here")


def test_the_layout_is_the_headers() -> None:
    """nccl.h of 2.17 to 2.32: size_t, two unsigned ints, four ints, a pointer."""
    config = nccl.CommConfig
    offsets = {name: getattr(config, name).offset for name, *_ in config._fields_}
    assert offsets == {
        "size": 0,
        "magic": 8,
        "version": 12,
        "blocking": 16,
        "cgaClusterSize": 20,
        "minCTAs": 24,
        "maxCTAs": 28,
        "netName": 32,
    }
    made = nccl.comm_config()
    assert (made.size, made.magic, made.blocking, made.minCTAs, made.maxCTAs) == (
        40,
        0xCAFEBEEF,
        0,
        1,
        4,
    )
    assert made.cgaClusterSize == -(2**31) and made.netName is None
    assert ctypes.sizeof(nccl.UniqueId) == nccl.UNIQUE_ID_BYTES


def find() -> str:
    if path := os.environ.get("VLLM_NCCL_SO_PATH"):
        return path
    found = sorted(Path(torch.__file__).parents[1].glob("nvidia/nccl/lib/libnccl.so.2"))
    return str(found[0]) if found else ""


@pytest.mark.skipif(not find(), reason="no libnccl.so.2 here; name one with VLLM_NCCL_SO_PATH")
def test_the_library_has_what_is_bound() -> None:
    library = nccl.NcclLibrary(find())
    major, minor, _ = map(int, library.version().split("."))
    assert (major, minor) >= (2, 17)
    with pytest.raises(nccl.NcclError, match="ncclCommGetAsyncError: invalid argument"):
        library.state(ctypes.c_void_p())


class Scripted:
    """Replaces the library of both ranks: each call is IN_PROGRESS at two queries."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.states: deque[int] = deque()
        self.fails = ""

    def unique_id(self) -> bytes:
        return b"i" * nccl.UNIQUE_ID_BYTES

    def call(self, name: str, *arguments: object) -> int:
        self.calls.append(name)
        if name == "ncclCommInitRankConfig":
            ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_void_p))[0] = 1  # type: ignore[arg-type]
        self.states += [nccl.IN_PROGRESS] * 2
        return int(nccl.IN_PROGRESS)

    def state(self, comm: object) -> int:
        if self.fails:
            raise nccl.NcclError(self.fails)
        return self.states.popleft() if self.states else int(nccl.SUCCESS)


class Stream:
    """Replaces a CUDA stream; the test ends its events."""

    cuda_stream = 0

    def __init__(self, *_: object, **__: object) -> None:
        self.ended = 0
        self.events = 0

    def record_event(self) -> SimpleNamespace:
        number, self.events = self.events, self.events + 1
        return SimpleNamespace(query=lambda: number < self.ended)

    def synchronize(self) -> None: ...


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Scripted:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    return Scripted()


def link(library: Scripted, rank: int) -> tuple[object, list[object]]:
    reported: list[object] = []
    return nccl.NcclLink(library, torch.device("cpu"), rank, reported.append, 3), reported


def slot() -> torch.Tensor:
    return torch.empty(8, dtype=torch.uint8)


def test_a_link_opens_sends_in_order_and_reports_each_end(library: Scripted) -> None:
    made, reported = link(library, 0)
    assert reported == [channel.LinkBlob(3, library.unique_id())]
    assert made.poll() and made.poll()  # type: ignore[attr-defined]
    assert made.poll() is False and reported[1:] == [channel.LinkUp(3)]  # type: ignore[attr-defined]
    for seq in range(2):
        made.send(seq, slot(), 8)  # type: ignore[attr-defined]
    assert library.calls.count("ncclSend") == 1, "two calls at a time on one communicator"
    for _ in range(4):
        assert made.poll()  # type: ignore[attr-defined]
    assert library.calls.count("ncclSend") == 2
    assert reported[2:] == []
    made.stream.ended = 1  # type: ignore[attr-defined]
    assert made.poll() and reported[2:] == [channel.SlotCompleted(3, 0)]  # type: ignore[attr-defined]
    made.stream.ended = 2  # type: ignore[attr-defined]
    assert not made.poll() and reported[3:] == [channel.SlotCompleted(3, 1)]  # type: ignore[attr-defined]


def test_the_receiving_end_opens_at_the_first_blob_only(library: Scripted) -> None:
    made, reported = link(library, 1)
    assert not made.poll() and not library.calls  # type: ignore[attr-defined]
    made.on_blob(b"i" * nccl.UNIQUE_ID_BYTES), made.on_blob(b"i" * nccl.UNIQUE_ID_BYTES)  # type: ignore[attr-defined]
    assert library.calls == ["ncclCommInitRankConfig"]
    made.poll(), made.poll(), made.poll()  # type: ignore[attr-defined]
    assert reported == [channel.LinkUp(3)]
    with pytest.raises(nccl.NcclError, match="5 bytes"):
        link(library, 1)[0].on_blob(b"short")  # type: ignore[attr-defined]


def test_an_error_is_reported_once_and_close_aborts(library: Scripted) -> None:
    made, reported = link(library, 0)
    made.poll(), made.poll(), made.poll()  # type: ignore[attr-defined]
    made.send(0, slot(), 8)  # type: ignore[attr-defined]
    library.fails = "communicator: remote process exited"
    assert not made.poll() and not made.poll()  # type: ignore[attr-defined]
    assert reported[2:] == [channel.LinkFailed(3, "communicator: remote process exited")]
    made.close()  # type: ignore[attr-defined]
    while not made.is_gone:  # type: ignore[attr-defined]
        pass
    assert library.calls[-1] == "ncclCommAbort"
