"""Copies of the collective worker, with a scripted staging: they end when the test decides."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from vllm_disagg.kv.extents import Extent
from vllm_disagg.protocol.events import PostRead, SendPiece
from vllm_disagg.transports.collective import worker as module
from vllm_disagg.transports.collective.channel import LinkEvent, SlotGathered
from vllm_disagg.transports.collective.worker import (
    CollectiveLink,
    CollectiveWorker,
    LinkSlot,
    Poll,
    Report,
    Slot,
)

KEY = ("sends to", "d/0", 1)
EXTENT = Extent(0, 1, 0, 16)
SIZE = 10


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

    def _poll(self, number: int) -> Poll:
        def poll() -> int | bool | None:
            self.polls[number] += 1
            return self.ended.get(number)

        return poll


class ScriptedLink:
    """A link whose operations never end."""

    is_polled = False

    def __init__(self, rank: int, report: Report, epoch: int) -> None:
        self.is_gone = False

    def on_blob(self, blob: bytes) -> None: ...

    def send(self, seq: int, slot: Slot, size: int) -> None: ...

    def receive(self, seq: int, slot: Slot, size: int) -> None: ...

    def poll(self) -> bool:
        return False

    def close(self) -> None:
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


def test_close_waits_for_writes_into_blocks(working: Working) -> None:
    """vLLM uses the blocks for other requests as soon as `close` has returned."""
    working.scatter(0)
    wait(working.has_checked(0))
    link = working.worker._links[KEY].link
    closing = threading.Thread(target=working.worker.close)
    closing.start()
    wait(lambda: link.is_gone)
    is_checked = working.has_checked(0)
    wait(lambda: is_checked() or not closing.is_alive())
    assert closing.is_alive()
    working.staging.ended[0] = True
    closing.join(30)
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
