"""Posted reads of one transport: which pieces it may write into blocks, and where.

    post() ---> waiting -- begin(): bytes have arrived --> being written
      |            |                                            |
      | refused    | cancel(), flush()                          | end()
      v            v                                            v
    CANCELLED   CANCELLED                          WRITTEN, DAMAGED, CANCELLED

Rules:
  1. Each read that is posted ends in exactly one ReadCompleted.
  2. A read that is being written ends when the write has ended, whatever is cancelled meanwhile.
  3. Bytes for which `begin` returns None are dropped: the piece is late, repeated or cancelled.

Used by the driver's thread alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from ..protocol.events import PostRead, ReadCompleted, ReadStatus

ReadKey = tuple[str, int]  # transfer, number of the piece


class PostedReads:
    """Posted reads of one transport that have not ended."""

    def __init__(self) -> None:
        self._waiting: dict[ReadKey, PostRead] = {}
        self._being_written: dict[ReadKey, PostRead] = {}
        self._cancelled: deque[ReadCompleted] = deque()

    def post(self, read: PostRead, address_in_use: str) -> None:
        """Accept a read: its piece may be written from now on.

        A read for another address than that in use ends at once: its path is down.
        """
        if read.address != address_in_use:
            self._complete_cancelled(read)
            return
        key = (read.transfer, read.number)
        assert key not in self._waiting and key not in self._being_written, f"{key} posted twice"
        self._waiting[key] = read

    def begin(self, transfer: str, number: int) -> PostRead | None:
        """Return the read for bytes that have arrived, or None if they must be dropped.

        The read is being written until `end`.
        """
        key = (transfer, number)
        read = self._waiting.pop(key, None)
        if read is not None:
            self._being_written[key] = read
        return read

    def end(self, read: PostRead, status: ReadStatus) -> ReadCompleted:
        """Return the completion of a read whose write has ended."""
        del self._being_written[read.transfer, read.number]
        return ReadCompleted(read.transfer, read.number, status)

    def cancel(self, transfer: str, numbers: Sequence[int]) -> None:
        """End those of these reads that wait."""
        for number in numbers:
            read = self._waiting.pop((transfer, number), None)
            if read is not None:
                self._complete_cancelled(read)

    def flush(self, source: str) -> None:
        """End all waiting reads from a source: its path has broken, so their bytes are lost."""
        for key, read in list(self._waiting.items()):
            if read.source == source:
                del self._waiting[key]
                self._complete_cancelled(read)

    def _complete_cancelled(self, read: PostRead) -> None:
        completed = ReadCompleted(read.transfer, read.number, ReadStatus.CANCELLED)
        self._cancelled.append(completed)

    @property
    def has_cancelled(self) -> bool:
        """Whether `take_cancelled` has completions to yield."""
        return bool(self._cancelled)

    def take_cancelled(self) -> Iterator[ReadCompleted]:
        """Yield the reads that ended as CANCELLED in `post`, `cancel` and `flush`, each once."""
        while self._cancelled:
            yield self._cancelled.popleft()

    def transfers_being_written(self) -> set[str]:
        """Return the transfers into whose blocks a piece may be being written."""
        return {transfer for transfer, _ in self._being_written}
