"""The thread that owns every call of a two-sided library: gathers, sends, receives and scatters,
for all its pairs.

The driver's thread puts jobs in and never waits; what has come of them goes back with `tell`.
Nothing here waits for a peer either: a link posts and returns, so that no peer holds up another,
and `close` aborts without waiting.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ...kv.memory import Memory, checksum
from ...protocol.events import SendPiece, WritePiece
from .channel import SLOTS_PER_CHANNEL, LinkEvent, LinkFailed, SlotGathered

log = logging.getLogger("vllm_disagg.mover")

POLL_SECONDS = 0.0002  # seconds between looks at what does not say by itself when it has ended
CLOSE_SECONDS = 3.0  # seconds that the aborts of a worker that ends may take
MAX_COMMUNICATORS = (
    32  # open or being aborted, of a worker: each has SLOTS slots, and NCCL takes memory of its own
)

Slot = Any  # memory of one piece: what the staging makes and the link takes
Key = tuple[str, str, int]  # of a link: our role in it, the other worker, the epoch


class CollectiveLink(Protocol):
    """Our end of one communicator. Used by the mover's thread alone; no method waits for the other
    end.
    """

    is_polled: bool  # whether `poll` must be called for it to go on

    @property
    def is_gone(self) -> bool:
        """Whether a close has ended, so that nothing writes into its slots any more."""

    def hear(self, blob: bytes) -> None: ...
    def send(self, seq: int, slot: Slot, size: int) -> None: ...
    def receive(self, seq: int, slot: Slot, size: int) -> None: ...
    def poll(self) -> bool:
        """Whether it is to be called again soon."""

    def close(self) -> None:
        """Abort. What was posted may go on writing into our slots for a while, and into nothing
        else.
        """


Poll = Callable[[], Any]  # None while it is not over
MakeLink = Callable[
    [int, Callable[[LinkEvent], None], int], CollectiveLink
]  # rank (0 sends), tell, epoch


class Staging(Protocol):
    """Between the blocks of a KV cache and slots. Methods start something; the Poll they return
    says when it ended.
    """

    def slots(self, count: int, size: int) -> Sequence[Slot]: ...

    def gather(self, piece: SendPiece, slot: Slot, link: CollectiveLink) -> tuple[int, Poll]:
        """(bytes, what ends in a checksum); a send on this link after this sends what was gathered.

        ValueError if the piece does not fit."""

    def scatter(
        self, land: WritePiece, slot: Slot, size: int, expected: int, link: CollectiveLink
    ) -> Poll:
        """Ends in whether size and checksum were right; if not, nothing was written."""


class HostStaging:
    """In host memory, done when the call returns.  Slots are arrays of bytes."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def slots(self, count: int, size: int) -> Sequence[Slot]:
        return [np.empty(size, np.uint8) for _ in range(count)]

    def gather(self, piece: SendPiece, slot: Slot, link: CollectiveLink) -> tuple[int, Poll]:
        frames = self._memory.read(piece.extent, piece.blocks)
        size = sum(len(frame) for frame in frames)
        if size > slot.size:
            raise ValueError(f"{size} bytes, and a slot of {slot.size}")
        at = 0
        for frame in frames:
            slot[at : at + len(frame)] = np.frombuffer(frame, np.uint8)
            at += len(frame)
        found = checksum(piece.transfer, [memoryview(slot[:size])])
        return size, lambda: found

    def scatter(
        self, land: WritePiece, slot: Slot, size: int, expected: int, link: CollectiveLink
    ) -> Poll:
        frame = memoryview(slot[:size])
        ok = checksum(land.transfer, [frame]) == expected and self._memory.write(
            land.extent, land.blocks, [frame], land.remote_layout
        )
        return lambda: ok


@dataclass
class _LinkSlots:
    link: CollectiveLink
    slots: Sequence[Slot]
    tell: Callable[[LinkEvent], None]
    epoch: int


class CollectiveWorker:
    """`make_link` may raise what it likes: then the pair has Failed."""

    def __init__(self, staging: Staging, make_link: MakeLink) -> None:
        self._staging, self._make_link = staging, make_link
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pairs: dict[Key, _LinkSlots] = {}
        self._closing: list[_LinkSlots] = []
        self._polls: list[
            tuple[Poll, Callable[[Any], None], Any]
        ] = []  # the last: what a failure gives
        self._thread = threading.Thread(target=self._run, name="vllm-disagg-mover", daemon=True)
        self._thread.start()

    # The driver's thread --------------------------------------------------------------------------
    def open(self, key: Key, slot: int, rank: int, tell: Callable[[LinkEvent], None]) -> None:
        self._jobs.put(lambda: self._open(key, slot, rank, tell))

    def hear(self, key: Key, blob: bytes) -> None:
        self._jobs.put(lambda: self._with(key, lambda pair: pair.link.hear(blob)))

    def transmit(
        self, key: Key, seq: int, slot: int, piece: SendPiece, tell: Callable[[LinkEvent], None]
    ) -> None:
        """Ends in SlotGathered, always; in SlotCompleted, perhaps."""
        self._jobs.put(lambda: self._transmit(key, seq, slot, piece, tell))

    def receive(self, key: Key, seq: int, slot: int, size: int) -> None:
        self._jobs.put(
            lambda: self._with(key, lambda pair: pair.link.receive(seq, pair.slots[slot], size))
        )

    def slot(self, key: Key, slot: int) -> tuple[Slot, CollectiveLink]:
        """Of a pair that is open: only a `close_pair` takes it away, and what was found here stays
        what it is.
        """
        pair = self._pairs[key]
        return pair.slots[slot], pair.link

    def scatter(
        self,
        land: WritePiece,
        found: tuple[Slot, CollectiveLink],
        size: int,
        expected: int,
        tell: Callable[[bool], None],
    ) -> None:
        """Ends in `tell`, always."""
        self._jobs.put(lambda: self._scatter(land, found, size, expected, tell))

    def close_pair(self, key: Key) -> None:
        self._jobs.put(lambda: self._close_pair(key))

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join(timeout=5)
        if self._thread.is_alive():
            raise TimeoutError("the mover's thread does not end")

    # The mover's thread ---------------------------------------------------------------------------
    def _run(self) -> None:
        looking, is_open = False, True
        while is_open:
            try:
                job = self._jobs.get(timeout=POLL_SECONDS if looking else None)
                is_open = job is not None
                if job is not None:
                    job()
            except queue.Empty:
                pass
            except (
                Exception
            ) as error:  # a fault of ours: the pair it was for has its deadline, the others go on
                log.critical("the mover of KV failed in a job", exc_info=error)
            looking = self._look()
        for key in list(self._pairs):
            self._close_pair(key)
        end = time.monotonic() + CLOSE_SECONDS
        while any(not pair.link.is_gone for pair in self._closing) and time.monotonic() < end:
            self._look()
            time.sleep(POLL_SECONDS)

    def _look(self) -> bool:
        """At what goes on; whether to look again soon."""
        polls, self._polls = self._polls, []
        for poll, then, failed in polls:
            self._when(poll, then, failed)
        busy = [
            self._look_at(pair)
            for pair in [*self._pairs.values(), *self._closing]
            if pair.link.is_polled
        ]
        self._closing = [pair for pair in self._closing if not pair.link.is_gone]
        return bool(self._polls) or any(busy)

    def _look_at(self, pair: _LinkSlots) -> bool:
        try:
            return pair.link.poll()
        except Exception as error:
            log.warning("a communicator has failed: %r", error)
            pair.tell(LinkFailed(pair.epoch, str(error)))
            return False

    def _open(self, key: Key, slot: int, rank: int, tell: Callable[[LinkEvent], None]) -> None:
        epoch = key[2]
        self._closing = [pair for pair in self._closing if not pair.link.is_gone]
        if len(self._pairs) + len(self._closing) >= MAX_COMMUNICATORS:
            tell(LinkFailed(epoch, f"{MAX_COMMUNICATORS} communicators are open"))
            return
        try:
            slots = self._staging.slots(SLOTS_PER_CHANNEL, slot)
            self._pairs[key] = _LinkSlots(self._make_link(rank, tell, epoch), slots, tell, epoch)
        except Exception as error:  # of a library, in words of its own
            log.warning("no communicator with %s: %r", key[1], error)
            tell(LinkFailed(epoch, f"no communicator: {error}"))

    def _with(self, key: Key, do: Callable[[_LinkSlots], None]) -> None:
        """What a link raises is the end of its pair."""
        pair = self._pairs.get(key)
        if pair is None:
            return
        try:
            do(pair)
        except Exception as error:
            log.warning("the communicator with %s has failed: %r", key[1], error)
            pair.tell(LinkFailed(key[2], str(error)))

    def _transmit(
        self, key: Key, seq: int, slot: int, piece: SendPiece, tell: Callable[[LinkEvent], None]
    ) -> None:
        epoch, pair = key[2], self._pairs.get(key)
        if pair is None:
            tell(SlotGathered(epoch, seq, -1, 0))
            return
        try:
            size, poll = self._staging.gather(piece, pair.slots[slot], pair.link)
        except Exception as error:
            log.warning("a piece for %s cannot be sent: %r", key[1], error)
            tell(SlotGathered(epoch, seq, -1, 0))
            return
        self._when(
            poll,
            lambda found: tell(SlotGathered(epoch, seq, -1 if found is None else size, found or 0)),
            None,
        )
        self._with(key, lambda pair: pair.link.send(seq, pair.slots[slot], size))

    def _scatter(
        self,
        land: WritePiece,
        found: tuple[Slot, CollectiveLink],
        size: int,
        expected: int,
        tell: Callable[[bool], None],
    ) -> None:
        try:
            poll = self._staging.scatter(land, found[0], size, expected, found[1])
        except Exception as error:
            log.warning("a piece of %s cannot be put into its blocks: %r", land.transfer, error)
            tell(False)
            return
        self._when(poll, tell, False)

    def _when(self, poll: Poll, then: Callable[[Any], None], failed: Any) -> None:
        """`then` with what the poll ends in, now or when `_look` finds it over."""
        try:
            result = poll()
        except Exception as error:
            log.warning("a copy has failed: %r", error)
            then(failed)
            return
        if result is None:
            self._polls.append((poll, then, failed))
        else:
            then(result)

    def _close_pair(self, key: Key) -> None:
        pair = self._pairs.pop(key, None)
        if pair is None:
            return
        self._closing.append(pair)
        try:
            pair.link.close()
        except Exception as error:
            log.warning("aborting the communicator with %s: %r", key[1], error)
