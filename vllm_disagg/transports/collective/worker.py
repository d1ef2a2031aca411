"""Thread that makes every call of a collective library: gathers, sends, receives and scatters.

One thread serves all links of a worker. The driver's thread puts jobs in and never waits; results
go back through callbacks.

This thread does not wait for a peer either. A link posts an operation and returns, so that no peer
holds up another, and `close` aborts without waiting.
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
from ...protocol.events import PostRead, SendPiece
from .channel import SLOTS_PER_CHANNEL, LinkEvent, LinkFailed, SlotGathered

log = logging.getLogger("vllm_disagg.collective")

POLL_SECONDS = 0.0002  # between checks of operations that do not signal their end
CLOSE_SECONDS = 3.0  # that the aborts of a worker that ends may take
JOIN_SECONDS = 5.0
# Open or being aborted, of a worker. Each has SLOTS_PER_CHANNEL slots, and NCCL takes memory of its
# own besides.
MAX_COMMUNICATORS = 32

Slot = Any  # memory of one piece, made by a Staging and used by its links
Key = tuple[str, str, int]  # of a link: role of this worker, name of the other worker, epoch


class CollectiveLink(Protocol):
    """This worker's end of one communicator.

    Used by the collective worker's thread alone. No method waits for the other end. `is_polled`:
    the link makes progress only in `poll`.
    """

    is_polled: bool

    @property
    def is_gone(self) -> bool:
        """Whether a close has ended, so that nothing writes into the slots any more."""

    def on_blob(self, blob: bytes) -> None:
        """Use data of the other end's link."""

    def send(self, seq: int, slot: Slot, size: int) -> None:
        """Post the seq-th send; its end is reported as SlotCompleted."""

    def receive(self, seq: int, slot: Slot, size: int) -> None:
        """Post the seq-th receive; its end is reported as SlotCompleted."""

    def poll(self) -> bool:
        """Make progress; return whether to call again soon."""

    def close(self) -> None:
        """Abort without waiting.

        Posted operations may write into this link's slots for a while, and into nothing else.
        """


Poll = Callable[[], Any]  # returns None until the operation has ended, then its result
# (rank, callback, epoch) -> link; rank 0 sends. May raise any exception: the link has then failed.
MakeLink = Callable[[int, Callable[[LinkEvent], None], int], CollectiveLink]


class Staging(Protocol):
    """Copies between the blocks of a KV cache and slots.

    A method starts a copy; the Poll that it returns reports the end.
    """

    def slots(self, count: int, size: int) -> Sequence[Slot]:
        """Return `count` new slots of `size` bytes."""

    def gather(self, piece: SendPiece, slot: Slot, link: CollectiveLink) -> tuple[int, Poll]:
        """Copy a piece's blocks into the slot; return (bytes, poll for the checksum).

        A send that is posted on this link afterwards sends what was gathered. Raises ValueError if
        the piece does not fit.
        """

    def scatter(
        self, read: PostRead, slot: Slot, size: int, expected: int, link: CollectiveLink
    ) -> Poll:
        """Copy the slot into the piece's blocks if size and checksum are right.

        The poll's result is whether they were; if not, nothing was written.
        """


class HostStaging:
    """Staging in host memory; every copy is done when the call returns. Slots are byte arrays."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def slots(self, count: int, size: int) -> Sequence[Slot]:
        """Return new arrays of bytes."""
        return [np.empty(size, np.uint8) for _ in range(count)]

    def gather(self, piece: SendPiece, slot: Slot, link: CollectiveLink) -> tuple[int, Poll]:
        """Copy a piece's frames into the slot, one behind the other."""
        frames = self._memory.read(piece.extent, piece.blocks)
        size = sum(len(frame) for frame in frames)
        if size > slot.size:
            raise ValueError(f"a piece of {size} bytes does not fit into a slot of {slot.size}")
        offset = 0
        for frame in frames:
            slot[offset : offset + len(frame)] = np.frombuffer(frame, np.uint8)
            offset += len(frame)
        digest = checksum(piece.transfer, [memoryview(slot[:size])])
        return size, lambda: digest

    def scatter(
        self, read: PostRead, slot: Slot, size: int, expected: int, link: CollectiveLink
    ) -> Poll:
        """Check the slot's checksum, then write the slot into the blocks."""
        frame = memoryview(slot[:size])
        ok = checksum(read.transfer, [frame]) == expected
        ok = ok and self._memory.write(read.extent, read.blocks, [frame], read.remote_layout)
        return lambda: ok


@dataclass
class _OpenLink:
    """A link with its slots; `report` passes its events to the driver's thread."""

    link: CollectiveLink
    slots: Sequence[Slot]
    report: Callable[[LinkEvent], None]
    epoch: int


@dataclass
class _Pending:
    """A copy under way; `done` gets its result, or `if_failed` if its poll raises."""

    poll: Poll
    done: Callable[[Any], None]
    if_failed: Any


class CollectiveWorker:
    """Owner of all links of one transport.

    Methods of the upper half are called by the driver's thread and return at once; callbacks run
    in the worker's thread. If `make_link` raises anything, the link has failed.
    """

    def __init__(self, staging: Staging, make_link: MakeLink) -> None:
        self._staging = staging
        self._make_link = make_link
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._links: dict[Key, _OpenLink] = {}
        self._closing: list[_OpenLink] = []
        self._pending: list[_Pending] = []
        self._thread = threading.Thread(
            target=self._run, name="vllm-disagg-collective", daemon=True
        )
        self._thread.start()

    # Called by the driver's thread ----------------------------------------------------------------
    def open(self, key: Key, slot: int, rank: int, report: Callable[[LinkEvent], None]) -> None:
        """Make a link with slots of `slot` bytes; rank 0 sends."""
        self._jobs.put(lambda: self._open(key, slot, rank, report))

    def on_blob(self, key: Key, blob: bytes) -> None:
        """Give a link data of the other end's link."""
        self._jobs.put(lambda: self._use(key, lambda opened: opened.link.on_blob(blob)))

    def transmit(
        self, key: Key, seq: int, slot: int, piece: SendPiece, report: Callable[[LinkEvent], None]
    ) -> None:
        """Gather a piece into a slot and post its send.

        Always reports SlotGathered; reports SlotCompleted unless the link fails or closes.
        """
        self._jobs.put(lambda: self._transmit(key, seq, slot, piece, report))

    def receive(self, key: Key, seq: int, slot: int, size: int) -> None:
        """Post a receive into a slot; reports SlotCompleted unless the link fails or closes."""

        def post(opened: _OpenLink) -> None:
            opened.link.receive(seq, opened.slots[slot], size)

        self._jobs.put(lambda: self._use(key, post))

    def slot(self, key: Key, slot: int) -> tuple[Slot, CollectiveLink]:
        """Return a slot and the link of an open key.

        Only `close_link` removes the key, and the returned slot stays valid after that.
        """
        opened = self._links[key]
        return opened.slots[slot], opened.link

    def scatter(
        self,
        read: PostRead,
        source: tuple[Slot, CollectiveLink],
        size: int,
        expected: int,
        report: Callable[[bool], None],
    ) -> None:
        """Write a slot into blocks; always reports whether that succeeded."""
        self._jobs.put(lambda: self._scatter(read, source, size, expected, report))

    def close_link(self, key: Key) -> None:
        """Abort a link."""
        self._jobs.put(lambda: self._close_link(key))

    def close(self) -> None:
        """Abort all links and end the thread. Raises TimeoutError if the thread does not end."""
        self._jobs.put(None)
        self._thread.join(timeout=JOIN_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError(f"the collective worker did not end within {JOIN_SECONDS:g} s")

    # The worker's thread --------------------------------------------------------------------------
    def _run(self) -> None:
        is_busy = False
        is_open = True
        while is_open:
            try:
                job = self._jobs.get(timeout=POLL_SECONDS if is_busy else None)
                is_open = job is not None
                if job is not None:
                    job()
            except queue.Empty:
                pass
            except Exception as error:
                # A bug of this project: the link concerned has its deadline, the others go on.
                log.critical("collective worker: a job failed", exc_info=error)
            is_busy = self._poll()
        # A library's thread that runs on when Python ends may take the process down.
        for key in list(self._links):
            self._close_link(key)
        end = time.monotonic() + CLOSE_SECONDS
        while any(not opened.link.is_gone for opened in self._closing) and time.monotonic() < end:
            self._poll()
            time.sleep(POLL_SECONDS)

    def _poll(self) -> bool:
        """Check everything under way; return whether to check again soon."""
        # `_finish` puts copies that have not ended into the new list.
        pending = self._pending
        self._pending = []
        for copy in pending:
            self._finish(copy)
        is_busy = False
        for opened in [*self._links.values(), *self._closing]:
            if opened.link.is_polled and self._poll_link(opened):
                is_busy = True
        self._forget_gone()
        return bool(self._pending) or is_busy

    def _poll_link(self, opened: _OpenLink) -> bool:
        try:
            return opened.link.poll()
        except Exception as error:
            log.warning("collective worker: a communicator failed: %r", error)
            opened.report(LinkFailed(opened.epoch, str(error)))
            return False

    def _forget_gone(self) -> None:
        self._closing = [opened for opened in self._closing if not opened.link.is_gone]

    def _open(self, key: Key, slot: int, rank: int, report: Callable[[LinkEvent], None]) -> None:
        epoch = key[2]
        self._forget_gone()
        if len(self._links) + len(self._closing) >= MAX_COMMUNICATORS:
            report(LinkFailed(epoch, f"{MAX_COMMUNICATORS} communicators are open"))
            return
        try:
            slots = self._staging.slots(SLOTS_PER_CHANNEL, slot)
            link = self._make_link(rank, report, epoch)
        except Exception as error:  # libraries raise exceptions of their own kinds
            log.warning("collective worker: no communicator with %s: %r", key[1], error)
            report(LinkFailed(epoch, f"no communicator: {error}"))
            return
        self._links[key] = _OpenLink(link, slots, report, epoch)

    def _use(self, key: Key, do: Callable[[_OpenLink], None]) -> None:
        """Call `do` with an open link; if it raises, the link has failed."""
        opened = self._links.get(key)
        if opened is None:
            return
        try:
            do(opened)
        except Exception as error:
            log.warning("collective worker: the communicator with %s failed: %r", key[1], error)
            opened.report(LinkFailed(key[2], str(error)))

    def _transmit(
        self, key: Key, seq: int, slot: int, piece: SendPiece, report: Callable[[LinkEvent], None]
    ) -> None:
        epoch = key[2]
        opened = self._links.get(key)
        if opened is None:
            report(SlotGathered(epoch, seq, -1, 0))
            return
        try:
            size, poll = self._staging.gather(piece, opened.slots[slot], opened.link)
        except Exception as error:
            log.warning("collective worker: a piece for %s was not sent: %r", key[1], error)
            report(SlotGathered(epoch, seq, -1, 0))
            return

        def gathered(digest: int | None) -> None:
            if digest is None:
                report(SlotGathered(epoch, seq, -1, 0))
            else:
                report(SlotGathered(epoch, seq, size, digest))

        # The send may be posted at once: the link orders it behind the gather.
        self._finish(_Pending(poll, gathered, None))
        self._use(key, lambda opened: opened.link.send(seq, opened.slots[slot], size))

    def _scatter(
        self,
        read: PostRead,
        source: tuple[Slot, CollectiveLink],
        size: int,
        expected: int,
        report: Callable[[bool], None],
    ) -> None:
        slot, link = source
        try:
            poll = self._staging.scatter(read, slot, size, expected, link)
        except Exception as error:
            message = "collective worker: a piece of transfer %s was not written: %r"
            log.warning(message, read.transfer, error)
            report(False)
            return
        self._finish(_Pending(poll, report, False))

    def _finish(self, copy: _Pending) -> None:
        """Pass on the result of a copy, or keep the copy for the next `_poll`."""
        try:
            result = copy.poll()
        except Exception as error:
            log.warning("collective worker: a copy failed: %r", error)
            copy.done(copy.if_failed)
            return
        if result is None:
            self._pending.append(copy)
        else:
            copy.done(result)

    def _close_link(self, key: Key) -> None:
        opened = self._links.pop(key, None)
        if opened is None:
            return
        # The slots stay referenced until the abort has ended, because the library may write there.
        self._closing.append(opened)
        try:
            opened.link.close()
        except Exception as error:
            message = "collective worker: aborting the communicator with %s failed: %r"
            log.warning(message, key[1], error)
