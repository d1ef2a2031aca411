"""LoadEnds: how a load ends, with its one report.

settled   every source has confirmed its blocks                           LoadResult
failed    every open source gets an Abort, and posted reads are cancelled
          when none of them is posted any more                            LoadResult(reason)

Rules 1 to 3 of `receiver.py` are kept here.
"""

from __future__ import annotations

from . import messages
from .events import CancelReads, LoadResult, ReceiverAction, SendMessage
from .incoming_transfer import IncomingTransfer, PieceState
from .read_window import ReadWindow
from .reasons import Reason
from .repeated_aborts import RepeatedAborts


class LoadEnds:
    """Ends the loads of one rank, and forgets them when they are reported.

    `transfers`: those of its receiver.  `sums_blocks`: this rank can sum blocks.
    """

    def __init__(
        self,
        name: str,
        transfers: dict[str, IncomingTransfer],
        window: ReadWindow,
        repeated_aborts: RepeatedAborts,
        *,
        sums_blocks: bool,
    ) -> None:
        self._name = name
        self._transfers = transfers
        self._window = window
        self._repeated_aborts = repeated_aborts
        self._sums_blocks = sums_blocks

    def fail(
        self, transfer: str, reason: Reason, now: float, *, informed: str
    ) -> list[ReceiverAction]:
        """Ends the whole transfer and aborts it at every open source but `informed`.

        Empty if it has failed before, and only then.
        """
        t = self._transfers[transfer]
        # The first reason counts: later ones often follow from it.
        if t.failure is not None:
            return []
        # Before `failure` is set, which closes all sources.
        actions: list[ReceiverAction] = []
        for source in t.open_sources:
            if source.name != informed:
                abort = messages.Abort(transfer, source.name, self._name, reason.value)
                actions.append(SendMessage(source.name, abort))
        if reason is Reason.PEER_TIMEOUT and actions:
            # The connection may be broken, and these Aborts be lost with it.  For other reasons
            # once is enough: no sender is known to be silent, and a lost Abort costs one lease.
            self._repeated_aborts.add(actions, now)
        t.failure = reason
        # At once and not with each ReadCompleted: other transfers need not wait for the DRAINING.
        for piece in t.pieces.values():
            self._window.give_back(piece.source, piece.credit_in_use)
        # Pieces without a posted read are dropped; the others keep the transfer in DRAINING.
        t.pieces = {n: p for n, p in t.pieces.items() if p.state is PieceState.POSTED}
        if t.pieces:
            actions.append(CancelReads(transfer, list(t.pieces)))
        return actions + self.report_if_drained(transfer, t, now)

    def report_if_drained(
        self, transfer: str, t: IncomingTransfer, now: float
    ) -> list[ReceiverAction]:
        """Reports a failed load into whose blocks nothing is written any more."""
        # After the report vLLM gives the blocks to other requests.
        if t.pieces:
            return []
        return [self._report(transfer, t.failure, now)]

    def report_if_settled(
        self, transfer: str, t: IncomingTransfer, now: float
    ) -> list[ReceiverAction]:
        """Reports a load that every source has confirmed."""
        # No caller has a failed transfer, which would have no open source either.
        if t.open_sources:
            return []
        return [self._report(transfer, None, now)]

    def _report(self, transfer: str, reason: Reason | None, now: float) -> LoadResult:
        # Once: late messages and completions find no transfer any more.
        t = self._transfers.pop(transfer)
        return t.result(transfer, reason, now, sums_blocks=self._sums_blocks)
