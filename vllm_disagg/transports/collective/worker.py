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
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ...kv.memory import Memory, checksum
from ...protocol.events import PostRead, SendPiece
from .channel import SLOTS_PER_CHANNEL, LinkEvent, LinkFailed, SlotGathered

log = logging.getLogger("vllm_disagg.collective")

# Between checks of operations that do not signal their end. Only while one is under way: an idle
# worker sleeps until its next job.
POLL_SECONDS = 0.0002
CLOSE_SECONDS = 3.0  # that aborts and copies may take when the worker ends
JOIN_SECONDS = 5.0  # longer than CLOSE_SECONDS, so that the thread gives up first
# Open or being aborted, of a worker. Each has SLOTS_PER_CHANNEL slots, and NCCL takes memory of its
# own besides.
MAX_COMMUNICATORS = 32

Report = Callable[[LinkEvent], None]  # passes an event of a link to the driver's thread
Slot = Any  # memory of one piece, made by a Staging and used by its links
# Of a link: role of this worker, name of the other worker, epoch. The role, because two workers may
# read from each other at once; the epoch, because the link of the last one may still be closing.
Key = tuple[str, str, int]


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
        """Uses data of the other end's link."""

    def send(self, seq: int, slot: Slot, size: int) -> None:
        """Posts the seq-th send; its end is reported as SlotCompleted."""

    def receive(self, seq: int, slot: Slot, size: int) -> None:
        """Posts the seq-th receive; its end is reported as SlotCompleted."""

    def poll(self) -> bool:
        """Makes progress; returns whether to call again soon."""

    def close(self) -> None:
        """Aborts without waiting.

        Posted operations may write into this link's slots for a while, and into nothing else.
        """


Poll = Callable[[], Any]  # returns None until the operation has ended, then its result
# (rank, callback, epoch) -> link; rank 0 sends. May raise any exception: the link has then failed.
MakeLink = Callable[[int, Report, int], CollectiveLink]
WorkerJob = Callable[[], None]  # made by the driver's thread, called by the worker's
LinkSlot = tuple[Slot, CollectiveLink]  # a slot, and the link that it belongs to


class Staging(Protocol):
    """Copies between the blocks of a KV cache and slots.

    A method starts a copy; the Poll that it returns reports the end.
    """

    def slots(self, count: int, size: int) -> Sequence[Slot]:
        """Returns `count` new slots of `size` bytes."""

    def gather(
        self,
        piece: SendPiece,
        slot: Slot,
        link: CollectiveLink,
    ) -> tuple[int, Poll]:
        """Copies a piece's blocks into the slot; returns (bytes, poll for the checksum).

        A send that is posted on this link afterwards sends what was gathered. Raises ValueError if
        the piece does not fit.
        """

    def scatter(
        self,
        read: PostRead,
        slot: Slot,
        size: int,
        expected: int,
        link: CollectiveLink,
    ) -> Poll:
        """Copies the slot into the piece's blocks if size and checksum are right.

        The poll's result is whether they were; if not, nothing was written.
        """


class HostStaging:
    """Staging in host memory; every copy is done when the call returns. Slots are byte arrays."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def slots(self, count: int, size: int) -> Sequence[Slot]:
        """Returns new arrays of bytes."""
        # Not zeroed: a slot is sent or scattered only as far as it was filled before.
        return [np.empty(size, np.uint8) for _ in range(count)]

    def gather(
        self,
        piece: SendPiece,
        slot: Slot,
        link: CollectiveLink,
    ) -> tuple[int, Poll]:
        """Copies a piece's frames into the slot, one behind the other."""
        frames = self._memory.read(piece.extent, piece.blocks)
        size = sum(len(frame) for frame in frames)
        # The receiver chose the size of slots when it paired; an honest one asks for no larger
        # piece.
        if size > slot.size:
            raise ValueError(f"a piece of {size} bytes does not fit into a slot of {slot.size}")
        offset = 0
        for frame in frames:
            end = offset + len(frame)
            slot[offset:end] = np.frombuffer(frame, np.uint8)
            offset = end
        # Of the copy that is sent: vLLM may overwrite the blocks meanwhile. Where it did so before,
        # the checksum is right all the same, and Confirm rejects the bytes.
        sent = memoryview(slot[:size])
        digest = checksum(piece.transfer, [sent])
        return size, lambda: digest

    def scatter(
        self,
        read: PostRead,
        slot: Slot,
        size: int,
        expected: int,
        link: CollectiveLink,
    ) -> Poll:
        """Checks the slot's checksum, then writes the slot into the blocks."""
        frame = memoryview(slot[:size])
        # False becomes DAMAGED: the receiver then requests the piece again.
        ok = checksum(read.transfer, [frame]) == expected
        if ok:
            ok = self._memory.write(
                read.extent,
                read.blocks,
                [frame],
                read.remote_layout,
            )
        return lambda: ok


@dataclass
class _OpenLink:
    """A link with its slots; `report` passes its events to the driver's thread."""

    link: CollectiveLink
    slots: Sequence[Slot]
    report: Report
    epoch: int


@dataclass
class _Pending:
    """A copy under way; `done` gets its result, or `if_failed` if its poll raises."""

    poll: Poll
    done: Callable[[Any], None]
    # None of a gather, which has no checksum then; False of a scatter.
    if_failed: Any


class CollectiveWorker:
    """Owner of all links of one transport.

    Methods of the upper half are called by the driver's thread and return at once.
    Callbacks run in the worker's thread. If `make_link` raises anything, the link has failed.
    """

    def __init__(self, staging: Staging, make_link: MakeLink) -> None:
        self._staging = staging
        self._make_link = make_link
        self._jobs: queue.SimpleQueue[WorkerJob | None] = queue.SimpleQueue()
        self._links: dict[Key, _OpenLink] = {}
        # Aborted links that have not ended. They count as communicators, and keep their slots.
        self._closing: list[_OpenLink] = []
        # In the order of their sends, in which they are reported: a receiver takes no other order.
        self._gathers: deque[_Pending] = deque()
        self._scatters: list[_Pending] = []
        # A daemon: a call into the library that hangs must not keep the process from ending.
        self._thread = threading.Thread(
            target=self._run,
            name="vllm-disagg-collective",
            daemon=True,
        )
        self._thread.start()

    # Called by the driver's thread ----------------------------------------------------------------
    def open(self, key: Key, slot: int, rank: int, report: Report) -> None:
        """Makes a link with slots of `slot` bytes; rank 0 sends."""
        self._jobs.put(lambda: self._open(key, slot, rank, report))

    def on_blob(self, key: Key, blob: bytes) -> None:
        """Gives a link data of the other end's link."""

        def pass_on(opened: _OpenLink) -> None:
            opened.link.on_blob(blob)

        self._jobs.put(lambda: self._use(key, pass_on))

    def transmit(
        self,
        key: Key,
        seq: int,
        slot: int,
        piece: SendPiece,
        report: Report,
    ) -> None:
        """Gathers a piece into a slot and posts its send.

        Always reports SlotGathered; reports SlotCompleted unless the link fails or closes.
        """
        self._jobs.put(lambda: self._transmit(key, seq, slot, piece, report))

    def receive(self, key: Key, seq: int, slot: int, size: int) -> None:
        """Posts a receive into a slot; reports SlotCompleted unless the link fails or closes."""

        def post(opened: _OpenLink) -> None:
            opened.link.receive(seq, opened.slots[slot], size)

        self._jobs.put(lambda: self._use(key, post))

    def slot(self, key: Key, slot: int) -> LinkSlot:
        """Returns a slot and the link of an open key.

        Only `close_link` removes the key, and the returned slot stays valid after that.
        """
        # The driver's thread reads a dict of the worker's thread. The key is there: the slot was
        # delivered, so its link is open, and only the driver's thread requests a close.
        opened = self._links[key]
        return opened.slots[slot], opened.link

    def scatter(
        self,
        read: PostRead,
        source: LinkSlot,
        size: int,
        expected: int,
        report: Callable[[bool], None],
    ) -> None:
        """Writes a slot into blocks; always reports whether that succeeded."""
        self._jobs.put(lambda: self._scatter(read, source, size, expected, report))

    def close_link(self, key: Key) -> None:
        """Aborts a link."""
        self._jobs.put(lambda: self._close_link(key))

    def close(self) -> None:
        """Aborts all links and ends the thread, after the copies that are under way.

        Raises TimeoutError if the thread or a write into blocks does not end.
        """
        # The last job: those before it still run.
        self._jobs.put(None)
        self._thread.join(timeout=JOIN_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError(f"the collective worker did not end within {JOIN_SECONDS:g} s")
        if self._scatters:
            raise TimeoutError(f"{len(self._scatters)} writes into blocks have not ended")

    # The worker's thread --------------------------------------------------------------------------
    def _run(self) -> None:
        is_busy = False
        is_open = True
        while is_open:
            try:
                # Without a timeout when nothing is under way: then a job is the only wake-up.
                timeout = POLL_SECONDS if is_busy else None
                job = self._jobs.get(timeout=timeout)
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
        while self._is_ending() and time.monotonic() < end:
            self._poll()
            time.sleep(POLL_SECONDS)

    def _is_ending(self) -> bool:
        """Returns whether a copy or an abort is under way."""
        is_copying = bool(self._gathers or self._scatters)
        return is_copying or any(not opened.link.is_gone for opened in self._closing)

    def _poll(self) -> bool:
        """Checks everything under way; returns whether to check again soon."""
        self._end_gathers()
        self._end_scatters()
        is_busy = False
        # Closing links too: their `poll` keeps this loop awake until they are gone.
        for opened in [*self._links.values(), *self._closing]:
            if opened.link.is_polled and self._poll_link(opened):
                is_busy = True
        self._forget_gone()
        return bool(self._gathers or self._scatters) or is_busy

    def _poll_link(self, opened: _OpenLink) -> bool:
        try:
            return opened.link.poll()
        except Exception as error:
            log.warning("collective worker: a communicator failed: %r", error)
            # Again at each poll, until the driver has closed the link. Only the first one has an
            # effect: the others are of a closed epoch.
            failure = LinkFailed(opened.epoch, str(error))
            opened.report(failure)
            return False

    def _forget_gone(self) -> None:
        remaining = [opened for opened in self._closing if not opened.link.is_gone]
        self._closing = remaining

    def _open(self, key: Key, slot: int, rank: int, report: Report) -> None:
        epoch = key[2]
        # First, so that a link that has just gone leaves its place to this one.
        self._forget_gone()
        # Closing ones count: their memory is not free yet, and a peer that fails again and again
        # could pile them up.
        count = len(self._links) + len(self._closing)
        if count >= MAX_COMMUNICATORS:
            reason = f"{MAX_COMMUNICATORS} communicators are open"
            report(LinkFailed(epoch, reason))
            return
        try:
            # Before the link: without memory for its slots no communicator is made.
            slots = self._staging.slots(SLOTS_PER_CHANNEL, slot)
            link = self._make_link(rank, report, epoch)
        except Exception as error:  # libraries raise exceptions of their own kinds
            message = "collective worker: no communicator with %s: %r"
            log.warning(message, key[1], error)
            report(LinkFailed(epoch, f"no communicator: {error}"))
            return
        self._links[key] = _OpenLink(link, slots, report, epoch)

    def _use(self, key: Key, do: Callable[[_OpenLink], None]) -> None:
        """Calls `do` with an open link; if it raises, the link has failed."""
        opened = self._links.get(key)
        # Closed since by the driver itself, or never made, which was reported as LinkFailed.
        if opened is None:
            return
        try:
            do(opened)
        except Exception as error:
            message = "collective worker: the communicator with %s failed: %r"
            log.warning(message, key[1], error)
            # The link stays: its channel decides, and closes both ends.
            failure = LinkFailed(key[2], str(error))
            opened.report(failure)

    def _transmit(
        self,
        key: Key,
        seq: int,
        slot: int,
        piece: SendPiece,
        report: Report,
    ) -> None:
        epoch = key[2]
        not_gathered = SlotGathered(epoch, seq, -1, 0)
        opened = self._links.get(key)
        # Reported even for a closed link, other than in `_use`: the sender's blocks are held until
        # SlotGathered.
        if opened is None:
            report(not_gathered)
            return
        try:
            memory = opened.slots[slot]
            size, poll = self._staging.gather(piece, memory, opened.link)
        except Exception as error:
            message = "collective worker: a piece for %s was not sent: %r"
            log.warning(message, key[1], error)
            report(not_gathered)
            return

        def gathered(digest: int | None) -> None:
            if digest is None:
                report(not_gathered)
            else:
                report(SlotGathered(epoch, seq, size, digest))

        # The send may be posted at once: the link orders it behind the gather.
        self._gathers.append(_Pending(poll, gathered, None))
        self._end_gathers()
        self._use(key, lambda opened: opened.link.send(seq, memory, size))

    def _scatter(
        self,
        read: PostRead,
        source: LinkSlot,
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
            # Always: the posted read ends only with this report, and the load waits for its end.
            report(False)
            return
        self._scatters.append(_Pending(poll, report, False))
        self._end_scatters()

    def _end_gathers(self) -> None:
        """Passes on the results of the gathers that have ended, in order."""
        # A later one may have ended since the oldest was checked: it waits for the next check.
        while self._gathers and self._has_ended(self._gathers[0]):
            self._gathers.popleft()

    def _end_scatters(self) -> None:
        """Passes on the results of the scatters that have ended."""
        remaining = []
        for copy in self._scatters:
            if not self._has_ended(copy):
                remaining.append(copy)
        self._scatters = remaining

    @staticmethod
    def _has_ended(copy: _Pending) -> bool:
        """Passes on the result of a copy if it has ended; returns whether it has."""
        try:
            result = copy.poll()
        except Exception as error:
            # `done` in any case: the blocks of a copy are held until its end is reported.
            log.warning("collective worker: a copy failed: %r", error)
            copy.done(copy.if_failed)
            return True
        if result is None:
            return False
        copy.done(result)
        return True

    def _close_link(self, key: Key) -> None:
        opened = self._links.pop(key, None)
        # A link that could not be made: its channel closes it all the same.
        if opened is None:
            return
        # The slots stay referenced until the abort has ended, because the library may write there.
        self._closing.append(opened)
        try:
            opened.link.close()
        except Exception as error:
            message = "collective worker: aborting the communicator with %s failed: %r"
            log.warning(message, key[1], error)
