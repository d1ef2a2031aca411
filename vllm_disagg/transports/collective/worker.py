"""Thread that makes every copy of a collective transport: gathers, scatters and proofs.

One thread serves all links of a worker. The driver's thread puts jobs in and never waits; results
go back through callbacks.

This thread does not wait for a peer. A link posts an operation and returns, so that no peer holds
up another. It may wait for a GPU, as any call that takes memory there may. A peer that does not
answer can hold up that GPU, since its link's kernel runs until the abort. So an abort never queues
behind this thread's jobs: the driver's thread starts it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ...protocol.events import PostRead, SendPiece
from .channel import PROOF_SEQ, SLOTS_PER_CHANNEL, LinkFailed, SlotGathered
from .link import CollectiveLink, MakeLink, Report, Slot
from .proof import proof_content
from .staging import Poll, Staging

log = logging.getLogger("vllm_disagg.collective")

# Between checks of operations that do not signal their end. Only while one is under way: an idle
# worker sleeps until its next job.
POLL_SECONDS = 0.0002
CLOSE_SECONDS = 3.0  # that aborts and copies may take when the worker ends
JOIN_SECONDS = 5.0  # longer than CLOSE_SECONDS, so that the thread gives up first
# Open or being aborted, of a worker. Each has SLOTS_PER_CHANNEL slots, and NCCL takes memory of its
# own besides.
MAX_COMMUNICATORS = 32
# Of all slots of a worker, also while their links are being aborted: a peer chooses their size.
MAX_SLOTS_BYTES = 2 << 30

# Of a link: role of this worker, name of the other worker, epoch. The role, because two workers may
# read from each other at once; the epoch, because the link of the last one may still be closing.
Key = tuple[str, str, int]
WorkerJob = Callable[[], None]  # made by the driver's thread, called by the worker's
LinkSlot = tuple[Slot, CollectiveLink]  # a slot, and the link that it belongs to


@dataclass
class _OpenLink:
    """A link with its slots; `report` passes its events to the driver's thread.

    `slots_bytes` is the size of all slots. `is_closing`: its `close` has been called.
    """

    link: CollectiveLink
    slots: Sequence[Slot]
    slots_bytes: int
    report: Report
    epoch: int
    is_closing: bool = False


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
        self._proofs: list[_Pending] = []
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

    def transmit_proof(self, key: Key, slot: int, size: int, seed: int) -> None:
        """Fills a slot with the proof piece and posts its send, the first of the link."""

        def post(opened: _OpenLink) -> None:
            memory = opened.slots[slot]
            self._staging.fill(memory, proof_content(seed, size), opened.link)
            opened.link.send(PROOF_SEQ, memory, size)

        self._jobs.put(lambda: self._use(key, post))

    def check_proof(
        self,
        source: LinkSlot,
        size: int,
        seed: int,
        report: Callable[[bool], None],
    ) -> None:
        """Compares a slot with the proof piece; always reports whether it is right."""
        self._jobs.put(lambda: self._check_proof(source, size, seed, report))

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
        """Aborts a link, at once if it has been made."""
        # From this thread: the worker's may be waiting for a GPU that waits for this link's peer.
        opened = self._links.get(key)
        if opened is not None:
            _close(opened, key)
        # One that is being made is closed by this job. The driver closes each link once, so the two
        # threads do not close it at the same time.
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
        is_copying = bool(self._gathers or self._scatters or self._proofs)
        return is_copying or any(not opened.link.is_gone for opened in self._closing)

    def _poll(self) -> bool:
        """Checks everything under way; returns whether to check again soon."""
        self._end_gathers()
        self._scatters = self._still_running(self._scatters)
        self._proofs = self._still_running(self._proofs)
        self._forget_gone()
        return bool(self._gathers or self._scatters or self._proofs)

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
        slots_bytes = SLOTS_PER_CHANNEL * slot
        used_bytes = sum(opened.slots_bytes for opened in [*self._links.values(), *self._closing])
        if used_bytes + slots_bytes > MAX_SLOTS_BYTES:
            reason = f"{used_bytes >> 20} MiB of {MAX_SLOTS_BYTES >> 20} MiB for slots are in use"
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
        self._links[key] = _OpenLink(link, slots, slots_bytes, report, epoch)

    def _use(self, key: Key, do: Callable[[_OpenLink], None]) -> None:
        """Calls `do` with an open link; if it raises, the link has failed."""
        opened = self._links.get(key)
        # Closed since by the driver itself, or never made, which was reported as LinkFailed.
        if opened is None or opened.is_closing:
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
        if opened is None or opened.is_closing:
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
        self._scatters = self._still_running(self._scatters)

    def _check_proof(
        self,
        source: LinkSlot,
        size: int,
        seed: int,
        report: Callable[[bool], None],
    ) -> None:
        slot, _ = source
        try:
            poll = self._staging.compare(slot, proof_content(seed, size))
        except Exception as error:
            log.warning("collective worker: a proof piece was not compared: %r", error)
            report(False)
            return
        self._proofs.append(_Pending(poll, report, False))
        self._proofs = self._still_running(self._proofs)

    def _end_gathers(self) -> None:
        """Passes on the results of the gathers that have ended, in order."""
        # A later one may have ended since the oldest was checked: it waits for the next check.
        while self._gathers and self._has_ended(self._gathers[0]):
            self._gathers.popleft()

    def _still_running(self, copies: Sequence[_Pending]) -> list[_Pending]:
        """Passes on the results of the copies that have ended; returns the others."""
        remaining = []
        for copy in copies:
            if not self._has_ended(copy):
                remaining.append(copy)
        return remaining

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
        if not opened.is_closing:
            _close(opened, key)


def _close(opened: _OpenLink, key: Key) -> None:
    """Starts to abort a link."""
    opened.is_closing = True
    try:
        opened.link.close()
    except Exception as error:
        message = "collective worker: aborting the communicator with %s failed: %r"
        log.warning(message, key[1], error)
