"""The binding of NCCL without a GPU, and its link over a scripted library.

With NCCL's library at hand (VLLM_NCCL_SO_PATH, or torch's own) its symbols and version are real.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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
    """Replaces the library of one rank: each call is IN_PROGRESS at two queries.

    `threads` are those that called. `is_stuck`: calls stay IN_PROGRESS until the abort.
    """

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.states: deque[int] = deque()
        self.fails = ""
        self.is_stuck = False
        self.threads: set[int] = set()
        self.is_aborted = False

    def unique_id(self) -> bytes:
        self.threads.add(threading.get_ident())
        return b"i" * nccl.UNIQUE_ID_BYTES

    def call(self, name: str, *arguments: Any) -> int:
        assert not self.is_aborted, f"{name} on a communicator that is gone"
        self.threads.add(threading.get_ident())
        is_abort = name == "ncclCommAbort"
        assert is_abort or not self.states, f"{name} while another call is in progress"
        self.calls.append(name)
        if name == "ncclCommInitRankConfig":
            ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_void_p))[0] = 1  # type: ignore[arg-type]
        self.is_aborted = is_abort
        if not is_abort:
            self.states += [nccl.IN_PROGRESS] * 2
        return int(nccl.IN_PROGRESS)

    def state(self, comm: object) -> int:
        assert not self.is_aborted, "a query of a communicator that is gone"
        self.threads.add(threading.get_ident())
        if self.fails:
            raise nccl.NcclError(self.fails)
        if self.is_stuck:
            return int(nccl.IN_PROGRESS)
        return self.states.popleft() if self.states else int(nccl.SUCCESS)


class ScriptedEvent:
    """An event that the test reaches."""

    def __init__(self, stream: ScriptedStream) -> None:
        self.stream = stream
        self.number = stream.events
        stream.events += 1

    def query(self) -> bool:
        return self.number < self.stream.ended

    def synchronize(self) -> None:
        wait(lambda: self.stream.can_end)


class ScriptedStream:
    """Replaces a CUDA stream; the test ends its events."""

    cuda_stream = 0

    def __init__(self) -> None:
        self.ended = 0
        self.events = 0
        self.can_end = True


class ScriptedRuntime:
    """The part of a runtime that a link uses; each thread must set its device first."""

    def __init__(self) -> None:
        self.threads = {threading.get_ident()}

    def use_device(self) -> None:
        self.threads.add(threading.get_ident())

    def new_stream(self) -> ScriptedStream:
        return ScriptedStream()

    def record_event(self, stream: ScriptedStream) -> ScriptedEvent:
        assert threading.get_ident() in self.threads, "this thread has set no device"
        return ScriptedEvent(stream)


def wait(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class LinkUnderTest:
    """A link over a scripted library, and what it has reported."""

    def __init__(self, rank: int, *, is_stuck: bool = False, streams: Any = None) -> None:
        self.library = Scripted()
        # Before the link: the thread of rank 0 waits for no blob.
        self.library.is_stuck = is_stuck
        self.reported: list[object] = []
        self.streams = streams or nccl.LinkStreams(ScriptedRuntime())
        self.link = nccl.NcclLink(self.library, self.streams, rank, self.reported.append, 3)

    def has_reported(self, *reports: object) -> Callable[[], bool]:
        return lambda: self.reported[-len(reports) :] == list(reports)

    def end(self) -> None:
        self.link.close()
        wait(lambda: self.link.is_gone)


@pytest.fixture
def make_link() -> Iterator[Callable[..., LinkUnderTest]]:
    made: list[LinkUnderTest] = []

    def make(rank: int, **how: Any) -> LinkUnderTest:
        made.append(LinkUnderTest(rank, **how))
        return made[-1]

    yield make
    for one in made:
        one.link.stream.can_end = True
        one.link.close()


def slot() -> torch.Tensor:
    return torch.empty(8, dtype=torch.uint8)


MakeLink = Callable[..., LinkUnderTest]


def test_a_link_opens_sends_in_order_and_reports_each_end(make_link: MakeLink) -> None:
    made = make_link(0)
    wait(made.has_reported(channel.LinkUp(3)))
    assert made.reported == [channel.LinkBlob(3, made.library.unique_id()), channel.LinkUp(3)]
    for seq in range(2):
        made.link.send(seq, slot(), 8)
    # The scripted library fails where a call is made while another one is in progress.
    wait(lambda: made.link.stream.events == 2)
    assert made.library.calls.count("ncclSend") == 2
    assert made.reported[2:] == []
    made.link.stream.ended = 1
    wait(made.has_reported(channel.SlotCompleted(3, 0)))
    made.link.stream.ended = 2
    wait(made.has_reported(channel.SlotCompleted(3, 0), channel.SlotCompleted(3, 1)))


def test_links_take_the_streams_of_those_that_are_gone(make_link: MakeLink) -> None:
    """torch has 32, which vLLM and our copies use as well."""
    streams = nccl.LinkStreams(ScriptedRuntime())
    hung = make_link(0, streams=streams)
    hung.link.stream.can_end = False
    hung.link.close()
    used = {make_link(0, streams=streams).link.stream for _ in range(nccl.LINK_STREAMS - 1)}
    assert hung.link.stream not in used and len(used) == nccl.LINK_STREAMS - 1
    with pytest.raises(nccl.NcclError, match="all 16 streams of links have work"):
        make_link(0, streams=streams)
    hung.link.stream.can_end = True
    wait(lambda: hung.link.is_gone)
    assert make_link(0, streams=streams).link.stream is hung.link.stream


def test_a_link_without_a_thread_takes_no_stream(
    make_link: MakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After 16 of them no link was made until a restart."""
    streams = nccl.LinkStreams(ScriptedRuntime())

    def lack(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", lack)
        for _ in range(nccl.LINK_STREAMS + 1):
            with pytest.raises(RuntimeError, match="can't start new thread"):
                make_link(0, streams=streams)
    made = make_link(0, streams=streams)
    made.link.stream.can_end = True


def test_an_end_is_reported_while_the_next_call_is_taken_up(make_link: MakeLink) -> None:
    made = make_link(1)
    made.link.on_blob(b"i" * nccl.UNIQUE_ID_BYTES)
    wait(made.has_reported(channel.LinkUp(3)))
    made.link.receive(0, slot(), 8)
    wait(lambda: made.link.stream.events == 1)
    made.library.is_stuck = True
    made.link.receive(1, slot(), 8)
    made.link.stream.ended = 1
    wait(made.has_reported(channel.SlotCompleted(3, 0)))
    assert made.link.stream.events == 1, "an event before the call was taken up shows nothing"


def test_the_receiving_end_opens_with_the_blob(make_link: MakeLink) -> None:
    made = make_link(1)
    assert not made.library.calls
    made.link.on_blob(b"i" * nccl.UNIQUE_ID_BYTES)
    wait(made.has_reported(channel.LinkUp(3)))
    made.link.on_blob(b"i" * nccl.UNIQUE_ID_BYTES)
    made.end()
    assert made.library.calls == ["ncclCommInitRankConfig", "ncclCommAbort"]
    short = make_link(1)
    short.link.on_blob(b"short")
    why = "the peer sent a unique id of 5 bytes"
    wait(short.has_reported(channel.LinkFailed(3, why)))


def test_all_calls_of_a_communicator_come_from_one_thread(make_link: MakeLink) -> None:
    """NCCL permits no other, and this one may wait in any of them: never the worker's."""
    made = make_link(0)
    wait(made.has_reported(channel.LinkUp(3)))
    made.link.send(0, slot(), 8)
    wait(lambda: made.link.stream.events == 1)
    made.end()
    assert len(made.library.threads) == 1
    assert threading.get_ident() not in made.library.threads


def test_an_error_is_reported_once_and_close_aborts(make_link: MakeLink) -> None:
    made = make_link(0)
    wait(made.has_reported(channel.LinkUp(3)))
    made.link.send(0, slot(), 8)
    wait(lambda: made.link.stream.events == 1)
    made.library.fails = "communicator: remote process exited"
    wait(made.has_reported(channel.LinkFailed(3, "communicator: remote process exited")))
    time.sleep(0.05)
    assert not made.link.is_gone, "its slots are in use until the channel closes it"
    made.end()
    assert len(made.reported) == 3
    assert made.library.calls[-1] == "ncclCommAbort"


@pytest.mark.parametrize("rank", [0, 1])
def test_close_aborts_a_link_that_never_connects(make_link: MakeLink, rank: int) -> None:
    made = make_link(rank, is_stuck=True)
    made.link.on_blob(b"i" * nccl.UNIQUE_ID_BYTES)
    wait(lambda: made.library.calls)
    made.end()
    assert made.library.calls[-1] == "ncclCommAbort"
    assert channel.LinkUp(3) not in made.reported


def test_a_link_without_a_blob_is_closed_without_an_abort(make_link: MakeLink) -> None:
    made = make_link(1)
    made.end()
    assert made.library.calls == []


def test_a_link_is_gone_only_when_its_kernels_have_ended(make_link: MakeLink) -> None:
    """They may write into the slots until then."""
    made = make_link(0)
    wait(made.has_reported(channel.LinkUp(3)))
    made.link.stream.can_end = False
    made.link.close()
    wait(lambda: made.library.is_aborted)
    time.sleep(0.05)
    assert not made.link.is_gone
    made.link.stream.can_end = True
    wait(lambda: made.link.is_gone)


def test_a_link_that_cannot_be_aborted_keeps_its_slots(
    make_link: MakeLink, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("vllm_disagg").propagate = True
    made = make_link(0)
    wait(made.has_reported(channel.LinkUp(3)))

    def fails(*_: object) -> int:
        raise nccl.NcclError("ncclCommAbort: unhandled cuda error")

    made.library.call = fails  # type: ignore[method-assign, assignment]
    made.link.close()
    wait(lambda: "stays in use" in caplog.text)
    assert not made.link.is_gone
