"""PieceReads: where and when the read of each piece is posted and requested.  Pure.

States of one piece:

    (cut) -> QUEUED         Progress: its bytes are final at the source
    QUEUED -> POSTED        there is a credit: PostRead, then ReadRequest.  No ReadRequest if
                            the transport reads by address and the source's block ids are known
    POSTED -> (forgotten)   ReadCompleted(WRITTEN)
    POSTED -> POSTED        ReadCompleted(DAMAGED): again, under a new number
    POSTED -> CANCELLED     ReadCompleted(CANCELLED)
    CANCELLED -> POSTED     when the source has another address, or at `retry_at`

A read is posted at the address of one transport, before the ReadRequest.  So the bytes find their
blocks whenever they arrive.  A repeated ReadRequest keeps the posted read.  If the address of
the source has changed meanwhile, the read is cancelled there first: bytes come to the new address.

Rules 4 and 5 of `receiver.py` are kept here; that a written piece is forgotten, there.
"""

from __future__ import annotations

from collections.abc import Mapping

from . import messages
from .events import (
    BlocksAtSource,
    CancelReads,
    PostRead,
    ReceiverAction,
    SendMessage,
    TransportChanged,
)
from .incoming_transfer import IncomingTransfer, PieceRecord, PieceState, SourceRecord
from .read_window import ReadWindow


class PieceReads:
    """Addresses of one rank's sources, and the reads of its pieces there.

    `name` is the worker's name, `address` (<transport>:<address>) is where pieces arrive by
    default.  `piece_bytes` limits one piece, `window` decides which is posted next.
    `peer_timeout` is in seconds.
    """

    def __init__(
        self,
        name: str,
        address: str,
        piece_bytes: int,
        peer_timeout: float,
        window: ReadWindow,
    ) -> None:
        self.name = name
        self.address = address
        self.piece_bytes = piece_bytes
        self.peer_timeout = peer_timeout
        self.window = window
        # By source: where its pieces arrive, if not at `address`.
        self.addresses: dict[str, str] = {}
        # By source: the limit of one piece, if not `piece_bytes`.
        self.piece_limits: dict[str, int] = {}
        # Sources of which pieces are read by address at present.
        self.read_by_address: set[str] = set()

    def on_transport_changed(self, event: TransportChanged) -> None:
        """Changes where and how the pieces of a source arrive from now on."""
        # Our own address is the default, and needs no entry.
        if event.address == self.address:
            self.addresses.pop(event.source, None)
        else:
            self.addresses[event.source] = event.address
        # Of pieces that are cut from now on.  Each transport carries the others too.
        if event.piece_bytes:
            self.piece_limits[event.source] = event.piece_bytes
        else:
            self.piece_limits.pop(event.source, None)
        self.read_by_address.discard(event.source)
        if event.reads_by_address:
            self.read_by_address.add(event.source)

    def address_for(self, source: str) -> str:
        """Returns where the pieces of this source arrive."""
        return self.addresses.get(source, self.address)

    def transfer_request(self, name: str, t: IncomingTransfer, source: SourceRecord) -> SendMessage:
        """Returns the keep-alive of a source, which has the address of its pieces."""
        request = messages.TransferRequest(
            transfer=name,
            source=source.name,
            reader=self.name,
            # Each keep-alive has the present address, so a lost one delays a change of transport
            # by one interval only.
            address=self.address_for(source.name),
            readers=source.readers,
            # In each one: the sender may have forgotten this receiver, and compares it anew.
            prompt=t.prompt,
            reads_by_address=source.name in self.read_by_address,
        )
        return SendMessage(source.name, request)

    def cut(self, name: str, t: IncomingTransfer, source: SourceRecord) -> None:
        """Cuts and queues all pieces of a source that became final since the last call."""
        limit = self.piece_limits.get(source.name, self.piece_bytes)
        # Of more than half the window, a piece would wait until no other source reads anything.
        limit = min(limit, max(self.piece_bytes, self.window.window_bytes // 2))
        progress = (source.tokens_final, source.tokens_partial, source.layers_partial)
        for read_plan in source.read_plans:
            # A transport reads these pieces into a buffer of its own, which has to be small.
            is_rearranged = read_plan.piece_kind is not None
            piece_bytes = min(limit, self.piece_bytes) if is_rearranged else limit
            for extent, size in read_plan.cut(*progress, t.token_end, piece_bytes):
                # Numbers are not reused: a late piece is never taken for another one.
                number = t.pieces_created
                t.pieces_created += 1
                credit = self.window.credit(size)
                t.pieces[number] = PieceRecord(source.name, read_plan, extent, size, credit)
                self.window.add(source.name, name, number)

    def post_queued(
        self, transfers: Mapping[str, IncomingTransfer], now: float
    ) -> list[ReceiverAction]:
        """Posts and requests as many queued pieces as there are credits."""
        actions: list[ReceiverAction] = []
        for name, number in self.window.take(transfers, now):
            actions += self._post(name, transfers[name], number, now)
        return actions

    def _post(
        self, name: str, t: IncomingTransfer, number: int, now: float
    ) -> list[ReceiverAction]:
        """Posts the read of a piece where its source sends to, then requests the piece."""
        piece = t.pieces[number]
        piece.state = PieceState.POSTED
        piece.address = self.address_for(piece.source)
        piece.is_requested = False
        at_source: BlocksAtSource | None = None
        if piece.source in self.read_by_address:
            known = t.sources[piece.source].blocks
            at_source = piece.read_plan.at_source(piece.extent, known)
        extent, blocks, remote_layout = piece.read_plan.target(piece.extent)
        read = PostRead(
            transfer=name,
            number=number,
            source=piece.source,
            address=piece.address,
            extent=extent,
            blocks=blocks,
            remote_layout=remote_layout,
            at_source=at_source,
        )
        if at_source is not None:
            # Requested only if its end is late: the transport may have lost its way to the source.
            piece.retry_at = now + self.peer_timeout
            return [read]
        # Rule 5.  A transport drops bytes that find no posted read: a quick sender's piece would
        # come again only after `peer_timeout`.
        return [read, self._read_request(name, piece, number, now)]

    def post_again(
        self, name: str, t: IncomingTransfer, number: int, now: float
    ) -> list[ReceiverAction]:
        """Posts the read of a piece anew, under a new number.

        The sender ignores a number that it still sends, and it may learn later than this receiver
        that a send has ended.
        """
        t.pieces[t.pieces_created] = t.pieces.pop(number)
        t.pieces_created += 1
        return self._post(name, t, t.pieces_created - 1, now)

    def post_cancelled(
        self, name: str, t: IncomingTransfer, source: str, now: float
    ) -> list[ReceiverAction]:
        """Posts all cancelled reads of a source anew, where it sends to now."""
        actions: list[ReceiverAction] = []
        # A copy: posting again renumbers.
        for number, piece in list(t.pieces.items()):
            if piece.source == source and piece.state is PieceState.CANCELLED:
                actions += self.post_again(name, t, number, now)
        return actions

    def request_late(
        self, name: str, t: IncomingTransfer, source: str, now: float
    ) -> list[ReceiverAction]:
        """Requests all pieces of a source whose bytes are late."""
        actions: list[ReceiverAction] = []
        # A copy: posting again renumbers.
        for number, piece in list(t.pieces.items()):
            is_requested = piece.state is not PieceState.QUEUED
            if is_requested and piece.source == source and piece.retry_at <= now:
                actions += self._request_again(name, t, number, now)
        return actions

    def _request_again(
        self, name: str, t: IncomingTransfer, number: int, now: float
    ) -> list[ReceiverAction]:
        """Requests a piece of which the ReadRequest or the bytes were lost, or are late.

        A duplicate of the bytes finds no posted read and is dropped.
        """
        piece = t.pieces[number]
        if piece.state is PieceState.CANCELLED:
            return self.post_again(name, t, number, now)
        if piece.address == self.address_for(piece.source):
            return [self._read_request(name, piece, number, now)]
        # Bytes will come to another address than that of the posted read.  It is cancelled first
        # (rule 4): with a read at both addresses the piece might be written twice at the same
        # time.  Its ReadCompleted leads to the new read, or reports that the bytes came after all.
        piece.retry_at = now + self.peer_timeout
        return [CancelReads(name, [number])]

    def on_cancelled(
        self, name: str, t: IncomingTransfer, number: int, now: float
    ) -> list[ReceiverAction]:
        """Posts a cancelled read at the source's new address, if it has one by now."""
        piece = t.pieces[number]
        # A piece without a posted read keeps its credit, too: it is posted again without
        # another look at the window.
        piece.state = PieceState.CANCELLED
        # At the same address it would be cancelled again, until TransportChanged comes.
        if piece.address == self.address_for(piece.source):
            # Or until the path is up again at this address, of which nothing tells.
            piece.retry_at = now
            return []
        return self.post_again(name, t, number, now)

    def _read_request(self, name: str, piece: PieceRecord, number: int, now: float) -> SendMessage:
        # Long, because a piece may wait at the sender behind others: each early repeat would make
        # it send the bytes once more.
        piece.retry_at = now + self.peer_timeout
        piece.is_requested = True
        request = messages.ReadRequest(
            transfer=name,
            source=piece.source,
            reader=self.name,
            number=number,
            extent=piece.extent,
        )
        return SendMessage(piece.source, request)
