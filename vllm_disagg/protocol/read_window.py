"""ReadWindow: which queued piece is posted next.  Pure.

A posted piece holds a credit: at most `window_bytes` are in flight, however long the prompts are.
Each source has a queue.  Its pieces keep their order.  The sources have their turns:

    a turn               is for one piece, while there are credits
    one source           has at most half of the credits: if its bytes do not come, the others go
                         on
    a source without a   gets the next ones that become free: smaller pieces of others would take
    credit               each of them.  For a time only, see `_is_next`
    nothing in flight    the first piece passes, even if larger than the window

A load all of whose pieces wait for a credit is no stall while bytes of its sources arrive for the
loads before it: `count_turns`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping

from . import messages
from .incoming_transfer import IncomingTransfer, PieceState

# How often its patience a load may wait for its turn, while bytes of the loads before it arrive.
MAX_PATIENCES = 10


class ReadWindow:
    """Queues and credits of the pieces of one rank.

    `peer_timeout` in seconds: a source without a credit holds up the others no longer.
    """

    def __init__(self, window_bytes: int, peer_timeout: float) -> None:
        self.window_bytes = window_bytes
        self.peer_timeout = peer_timeout
        # By source: (transfer, number) of pieces that wait for a credit.
        self.queues: dict[str, deque[tuple[str, int]]] = {}
        # By source: posted and not yet written.
        self.credit_in_use: Counter[str] = Counter()
        # By source with queued pieces: when its bytes landed last, of any load.
        self.landed_at: dict[str, float] = {}
        # When a source without a credit was refused one first; see `_is_next`.
        self.refused_since: dict[str, float] = {}

    def credit(self, size: int) -> int:
        """Returns the bytes of the window that a piece of `size` bytes takes up."""
        # A small piece costs more than its bytes.  Half the window then has 32 pieces, far
        # below the sender's limit. That counts a piece until its transport reports the end.
        return max(size, self.window_bytes // messages.MAX_PIECES_PER_RECEIVER)

    def add(self, source: str, transfer: str, number: int) -> None:
        """Queues a piece behind the older ones of its source, even if there is a credit."""
        queue = self.queues.setdefault(source, deque())
        queue.append((transfer, number))

    def take(
        self, transfers: Mapping[str, IncomingTransfer], now: float
    ) -> Iterator[tuple[str, int]]:
        """Takes as many pieces as there are credits, from all sources in turn.

        Yields (transfer, number) of each. The caller posts its read before it asks for the next:
        a piece that stayed QUEUED could be taken twice.
        """
        # One piece a source and round, until no source has both a piece and a credit.
        sources = list(self.queues)
        while sources:
            remaining: list[str] = []
            for source in sources:
                piece = self._take_next(source, transfers, now)
                if piece is not None:
                    yield piece
                    remaining.append(source)
                    # To the end: the next free credit is for a source that has waited longer. Two
                    # sources that hold half the window each would starve a third one.
                    self.queues[source] = self.queues.pop(source)
                elif self._is_next(source, transfers, now):
                    # Smaller pieces of others would take each credit that becomes free.
                    return
            sources = remaining

    def _take_next(
        self, source: str, transfers: Mapping[str, IncomingTransfer], now: float
    ) -> tuple[str, int] | None:
        """Takes the source's next piece; None without a credit or without a queued piece."""
        queue = self.queues[source]
        while queue:
            name, number = queue[0]
            t = transfers.get(name)
            piece = t.pieces.get(number) if t else None
            if t is not None and piece is not None and piece.state is PieceState.QUEUED:
                # The piece stays in front: smaller ones behind it must not starve it.
                if not self._has_credit(source, piece.credit):
                    return None
                queue.popleft()
                self.refused_since.pop(source, None)
                # The bytes that made room for it end the wait for its turn.
                self.count_turns(t, now)
                self.credit_in_use[source] += piece.credit
                return name, number
            # Of a transfer that has failed: its entries are left here, as searching all queues
            # would cost more than this check.
            queue.popleft()
        # Names of sources hold their incarnation: entries of dead ones would pile up.
        del self.queues[source]
        self.landed_at.pop(source, None)
        self.refused_since.pop(source, None)
        self.credit_in_use += Counter()  # drops sources with nothing in flight
        return None

    def _is_next(self, source: str, transfers: Mapping[str, IncomingTransfer], now: float) -> bool:
        """Returns whether the source, which has no credit, must get the next ones that are free.

        A piece of more than half the window has no turn: it waits for all others.
        """
        if source not in self.queues or self.credit_in_use[source]:
            return False
        name, number = self.queues[source][0]
        if transfers[name].pieces[number].credit > self.window_bytes // 2:
            return False
        # For a time only: sources whose bytes do not come may hold the credits that it needs.
        since = self.refused_since.setdefault(source, now)
        return now - since < self.peer_timeout

    def _has_credit(self, source: str, size: int) -> bool:
        of_source = self.credit_in_use[source]
        of_all = self.credit_in_use.total()
        # With nothing in flight the first piece passes, even if larger than the window: a piece
        # has at least one block, and a large one would wait forever.
        if of_source and of_source + size > self.window_bytes // 2:
            return False
        return not of_all or of_all + size <= self.window_bytes

    def give_back(self, source: str, credit: int) -> None:
        """Frees the credit of a piece that was written, or whose transfer has failed."""
        self.credit_in_use[source] -= credit

    def note_landed(self, source: str, now: float) -> None:
        """Records that bytes of the source have landed, of any load."""
        if source in self.queues:
            self.landed_at[source] = now

    def count_turns(self, t: IncomingTransfer, now: float) -> None:
        """Counts bytes of its sources as progress of a load all of whose pieces wait for a credit.

        They are those of loads before it. Not for ever: a source may deliver a piece now and then.
        """
        is_waiting = all(piece.state is PieceState.QUEUED for piece in t.pieces.values())
        if is_waiting and now < t.started_at + MAX_PATIENCES * t.stall_timeout:
            landed = [self.landed_at.get(piece.source, 0.0) for piece in t.pieces.values()]
            t.last_progress = max([t.last_progress, *landed])

    def validate(self, transfers: Mapping[str, IncomingTransfer]) -> None:
        """Raises AssertionError if a credit is lost or counted twice.  Tests call it."""
        in_use: Counter[str] = Counter()
        for t in transfers.values():
            # A transfer that has failed has given its credits back.
            if t.failure is None:
                for piece in t.pieces.values():
                    in_use[piece.source] += piece.credit_in_use
        # Entries of dead sources would pile up.
        assert self.landed_at.keys() <= self.queues.keys()
        # A credit that is lost narrows the window forever; one that is given back twice widens it.
        assert in_use == self.credit_in_use, (in_use, self.credit_in_use)
