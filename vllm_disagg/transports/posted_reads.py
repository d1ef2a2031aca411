"""Posted reads of one transport: which pieces it may write into blocks, and where.

    post() ---> waiting -- begin(): bytes have arrived --> being written
      |            |                                            |
      | refused    | cancel(), flush()                          | end()
      v            v                                            v
    CANCELLED   CANCELLED                          WRITTEN, DAMAGED, CANCELLED

Rules:
  1. Each read that is posted ends in exactly one ReadCompleted.
  2. A read that is being written ends when the write has ended, also if it is cancelled meanwhile.
  3. Bytes for which `begin` returns None are dropped: the piece is late, repeated or cancelled, or
     comes from another worker than the read's source.

Used by the driver's thread alone.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from ..errors import CopyFailed
from ..protocol.events import (
    PostRead,
    ReadCompleted,
    ReadStatus,
)

log = logging.getLogger(__name__)

# Numbers are never reused within a transfer, so a late piece is not taken for another one.
ReadKey = tuple[str, int]  # transfer, number of the piece


def status_of_write(transfer: str, write: Callable[[], bool]) -> ReadStatus:
    """Writes a piece into its blocks by `write`; returns how its read ends.

    A lack of memory for a copy is no damage, which would count against the path: the read ends as
    CANCELLED, and the receiver posts it again with its next keep-alive.
    """
    try:
        return ReadStatus.WRITTEN if write() else ReadStatus.DAMAGED
    except CopyFailed as error:
        log.warning("a piece of transfer %s was not written: %s", transfer, error)
        return ReadStatus.CANCELLED


class PostedReads:
    """Posted reads of one transport that have not ended."""

    def __init__(self) -> None:
        # Two dicts, because only a waiting read may be cancelled: vLLM could give the blocks of one
        # that is being written to another request (rule 2).
        self._waiting: dict[ReadKey, PostRead] = {}
        self._being_written: dict[ReadKey, PostRead] = {}
        # Kept until the driver polls: it calls `post` and `cancel` while it carries out actions of
        # the receiver, which must not be called again from there.
        self._cancelled: deque[ReadCompleted] = deque()

    def post(self, read: PostRead, address_in_use: str) -> None:
        """Accepts a read: its piece may be written from now on.

        A read for another address than that in use ends at once: its path is down.
        """
        # The path broke after the receiver had chosen it, or has connected anew since. The sender
        # has the newer address by then, so no bytes would come to the old one.
        if read.address != address_in_use:
            self._complete_cancelled(read)
            return
        key = (read.transfer, read.number)
        # A second read would need a second completion (rule 1), which the receiver does not expect.
        is_posted = key in self._waiting or key in self._being_written
        assert not is_posted, f"{key} posted twice"
        self._waiting[key] = read

    def is_waiting(self, source: str, transfer: str, number: int) -> bool:
        """Returns whether a read is posted for this piece of this source, and has not begun."""
        read = self._waiting.get((transfer, number))
        # The source too: the Confirm of the right one would vouch for the bytes of another member.
        # A checksum does not prevent that, and NIXL has none.
        return read is not None and read.source == source

    @property
    def has_waiting(self) -> bool:
        """Whether a read is posted that has not begun."""
        return bool(self._waiting)

    def sources(self) -> set[str]:
        """Returns the sources of the reads that have not begun."""
        return {read.source for read in self._waiting.values()}

    def begin(self, source: str, transfer: str, number: int) -> PostRead | None:
        """Returns the read for bytes of a source, or None if they must be dropped.

        The read is being written until `end`.
        """
        if not self.is_waiting(source, transfer, number):
            return None
        # Taken out: a duplicate that comes while the piece is being written finds no read.
        key = (transfer, number)
        read = self._waiting[key]
        del self._waiting[key]
        self._being_written[key] = read
        return read

    def end(self, read: PostRead, status: ReadStatus) -> ReadCompleted:
        """Returns the completion of a read whose write has ended."""
        # KeyError for a read that has ended: two completions would be worse than a failed driver.
        del self._being_written[read.transfer, read.number]
        return ReadCompleted(
            transfer=read.transfer,
            number=read.number,
            status=status,
        )

    def cancel(self, transfer: str, numbers: Sequence[int]) -> None:
        """Ends those of these reads that wait."""
        # Numbers that are not posted here belong to other transports, or have ended meanwhile.
        for number in numbers:
            read = self._waiting.pop((transfer, number), None)
            if read is not None:
                self._complete_cancelled(read)

    def flush(self, source: str) -> None:
        """Ends all waiting reads from a source: its path has broken, so their bytes are lost."""
        # A copy, because the loop removes entries. Reads that are being written are left: only the
        # transport can stop their writes, and reports it with `end`.
        for key, read in list(self._waiting.items()):
            if read.source == source:
                del self._waiting[key]
                self._complete_cancelled(read)

    def _complete_cancelled(self, read: PostRead) -> None:
        completed = ReadCompleted(
            transfer=read.transfer,
            number=read.number,
            status=ReadStatus.CANCELLED,
        )
        self._cancelled.append(completed)

    @property
    def has_cancelled(self) -> bool:
        """Whether `take_cancelled` has completions to yield."""
        # No descriptor becomes ready for them: a transport with some has its deadline now.
        return bool(self._cancelled)

    def take_cancelled(self) -> Iterator[ReadCompleted]:
        """Yields the reads that ended as CANCELLED in `post`, `cancel` and `flush`, each once."""
        # Also takes those that are added between two yields, by the actions that follow from one.
        while self._cancelled:
            yield self._cancelled.popleft()

    def transfers_being_written(self) -> set[str]:
        """Returns the transfers into whose blocks a piece may be being written."""
        return {transfer for transfer, _ in self._being_written}
