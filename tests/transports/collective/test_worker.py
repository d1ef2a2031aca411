"""Copies of the collective worker, with a scripted staging: they end when the test decides."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from vllm_disagg.kv.extents import Extent
from vllm_disagg.protocol.events import PostRead, SendPiece
from vllm_disagg.transports.collective import worker as module
from vllm_disagg.transports.collective.channel import (
    PROOF_SEQ,
    LinkEvent,
    LinkFailed,
    SlotGathered,
)
from vllm_disagg.transports.collective.link import CollectiveLink, Report, Slot
from vllm_disagg.transports.collective.staging import Poll
from vllm_disagg.transports.collective.worker import CollectiveWorker, LinkSlot

KEY = ("sends to", "d/0", 1)
EXTENT = Extent(0, 1, 0, 16)
SIZE = 10
PROOF = 9  # in place of a copy's number


class ScriptedStaging:
    """Staging on a device: `ended` holds the results of the copies that have ended, by number.

    `polls` counts how often each copy was checked.
    """

    def __init__(self) -> None:
        self.ended: dict[int, int | bool] = {}
        self.polls: Counter[int] = Counter()

    def slots(self, count: int, size: int) -> Sequence[Slot]:
        return [np.zeros(size, np.uint8) for _ in range(count)]

    def gather(self, piece: SendPiece, slot: Slot, link: CollectiveLink) -> tuple[int, Poll]:
        return SIZE, self._poll(piece.number)

    def scatter(
        self, read: PostRead, slot: Slot, size: int, expected: int, link: CollectiveLink
    ) -> Poll:
        return self._poll(read.number)

    def fill(self, slot: Slot, content: NDArray[np.uint8], link: CollectiveLink) -> None:
        slot[: content.size] = content

    def compare(self, slot: Slot, content: NDArray[np.uint8]) -> Poll:
        self.is_equal = np.array_equal(slot[: content.size], content)
        return self._poll(PROOF)

    def _poll(self, number: int) -> Poll:
        def poll() -> int | bool | None:
            self.polls[number] += 1
            return self.ended.get(number)

        return poll


class ScriptedLink:
    """A link whose operations never end."""

    def __init__(self, rank: int, report: Report, epoch: int) -> None:
        self.is_gone = False
        self.closes = 0
        self.sent: list[tuple[int, int]] = []

    def on_blob(self, blob: bytes) -> None: ...

    def send(self, seq: int, slot: Slot, size: int) -> None:
        self.sent.append((seq, size))

    def receive(self, seq: int, slot: Slot, size: int) -> None: ...

    def close(self) -> None:
        self.closes += 1
        self.is_gone = True


class Working:
    """A worker with one open link, and its reports."""

    def __init__(self) -> None:
        self.staging = ScriptedStaging()
        self.worker = CollectiveWorker(self.staging, ScriptedLink)
        self.gathered: list[int] = []
        self.written: list[bool] = []
        self.worker.open(KEY, SIZE, 0, self.report)
        wait(lambda: KEY in self.worker._links)

    def report(self, event: LinkEvent) -> None:
        assert isinstance(event, SlotGathered)
        self.gathered.append(event.seq)

    def transmit(self, number: int) -> None:
        piece = SendPiece("ab" * 16, "d/0", "nccl:1", number, EXTENT, [0])
        self.worker.transmit(KEY, number, number, piece, self.report)

    def scatter(self, number: int) -> None:
        slot: LinkSlot = self.worker.slot(KEY, 0)
        read = PostRead("ab" * 16, number, "p/0", "nccl:1", EXTENT, [0])
        self.worker.scatter(read, slot, SIZE, 0, self.written.append)

    def has_checked(self, number: int) -> Callable[[], bool]:
        """Returns whether a copy has been checked a few times more."""
        enough = self.staging.polls[number] + 3
        return lambda: self.staging.polls[number] >= enough


def wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def working() -> Iterator[Working]:
    made = Working()
    yield made
    made.staging.ended.update(dict.fromkeys(range(4), 1))
    made.worker.close()


def test_gathers_are_reported_in_the_order_of_their_sends(working: Working) -> None:
    """The receiver's end breaks the epoch if it learns of a later piece first."""
    working.staging.ended[1] = 7
    for number in range(3):
        working.transmit(number)
    wait(working.has_checked(0))
    assert working.gathered == []
    working.staging.ended[0] = 5
    wait(lambda: len(working.gathered) >= 2)
    assert working.gathered == [0, 1]
    working.staging.ended[2] = 6
    wait(lambda: working.gathered == [0, 1, 2])


def test_scatters_need_no_order(working: Working) -> None:
    """Those of another peer must not wait behind a slow one."""
    working.scatter(0)
    working.scatter(1)
    working.staging.ended[1] = True
    wait(lambda: working.written == [True])
    working.staging.ended[0] = False
    wait(lambda: working.written == [True, False])


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_proof_is_the_first_send_and_its_bytes_are_compared(
    working: Working, is_damaged: bool
) -> None:
    link = working.worker._links[KEY].link
    source: LinkSlot = working.worker.slot(KEY, 1)
    reported: list[bool] = []
    working.staging.ended[PROOF] = True
    working.worker.transmit_proof(KEY, 1, SIZE, 5)
    wait(lambda: link.sent == [(PROOF_SEQ, SIZE)])  # type: ignore[attr-defined]
    source[0][SIZE - 1] ^= is_damaged
    working.worker.check_proof(source, SIZE, 5, reported.append)
    wait(lambda: bool(reported))
    assert working.staging.is_equal is not is_damaged


def test_a_proof_that_cannot_be_compared_is_wrong(
    working: Working, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(*_: object) -> Poll:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(working.staging, "compare", compare)
    reported: list[bool] = []
    working.worker.check_proof(working.worker.slot(KEY, 1), SIZE, 5, reported.append)
    wait(lambda: reported == [False])


def test_an_abort_does_not_queue_behind_a_thread_that_waits_for_the_gpu(working: Working) -> None:
    """The GPU may be waiting for just this link's peer."""
    is_free = threading.Event()

    def wait_for_gpu() -> None:
        is_free.wait(30)

    working.worker._jobs.put(wait_for_gpu)
    link = working.worker._links[KEY].link
    working.worker.close_link(KEY)
    assert link.is_gone
    is_free.set()
    wait(lambda: KEY not in working.worker._links)
    assert link.closes == 1  # type: ignore[attr-defined]


def test_slots_have_a_bound(working: Working, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_SLOTS_BYTES", 7 * SIZE)
    failed: list[LinkEvent] = []
    working.worker.open(("reads from", "p/0", 1), SIZE, 1, failed.append)
    wait(lambda: bool(failed))
    assert isinstance(failed[0], LinkFailed) and "for slots are in use" in failed[0].why


def test_close_waits_for_writes_into_blocks(working: Working) -> None:
    """vLLM uses the blocks for other requests as soon as `close` has returned."""
    working.scatter(0)
    wait(working.has_checked(0))
    link = working.worker._links[KEY].link
    # A pool keeps what `close` raises: a thread's exception may reach pytest behind its last test.
    with ThreadPoolExecutor() as pool:
        closing = pool.submit(working.worker.close)
        wait(lambda: link.is_gone)
        is_checked = working.has_checked(0)
        wait(lambda: is_checked() or closing.done())
        assert not closing.done()
        working.staging.ended[0] = True
        closing.result(30)
    assert working.written == [True]


def test_close_reports_a_write_that_does_not_end(
    working: Working, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.05)
    working.scatter(0)
    wait(working.has_checked(0))
    with pytest.raises(TimeoutError, match="1 writes into blocks have not ended"):
        working.worker.close()
    working.worker._scatters.clear()
