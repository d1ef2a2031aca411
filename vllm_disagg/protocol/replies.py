"""Replies: the messages of a sender to its receivers."""

from __future__ import annotations

from . import messages
from .events import SendMessage
from .outgoing_transfer import OutgoingTransfer
from .reasons import Reason
from .served_blocks import ServedBlocks


class Replies:
    """Makes the messages of one rank.  `name`: the sender's."""

    def __init__(self, name: str, served: ServedBlocks) -> None:
        self._name = name
        self._served = served

    def progress(
        self,
        transfer: str,
        t: OutgoingTransfer,
        receiver: str,
        seconds_without_step: float = 0.0,
    ) -> SendMessage:
        """Returns what is final of the prompt, with block ids that the receiver lacks."""
        progress = messages.Progress(
            transfer=transfer,
            source=self._name,
            reader=receiver,
            tokens_final=t.tokens_final,
            tokens_partial=t.tokens_partial,
            layers_partial=t.layers_partial,
            seconds_without_step=seconds_without_step,
            blocks=self._served.new_blocks(t, t.receivers[receiver]),
        )
        return SendMessage(receiver, progress)

    def confirm(
        self,
        complete: messages.ReadComplete,
        valid: bool,
        sums: list[int],
    ) -> SendMessage:
        """Returns the answer to a ReadComplete.  `sums`: of the blocks that were read."""
        confirm = messages.Confirm(
            transfer=complete.transfer,
            source=self._name,
            reader=complete.reader,
            valid=valid,
            sums=sums,
        )
        return SendMessage(complete.reader, confirm)

    def refuse(
        self,
        transfer: str,
        t: OutgoingTransfer,
        receiver: str,
        reason: Reason,
    ) -> SendMessage:
        """Ends the receiver's part in the transfer; returns the Abort for it."""
        # The receiver does not answer an Abort: without this its lease would hold the blocks.
        t.receivers[receiver].is_gone = True
        refusal = messages.Abort(transfer, self._name, receiver, reason.value)
        return SendMessage(receiver, refusal)


def abort(message: messages.ToSender) -> SendMessage:
    """Returns the Abort for a message about a transfer that is not, or no longer, served."""
    # `message.source` and not our own name: the receiver accepts answers of its source only.
    refusal = messages.Abort(
        transfer=message.transfer,
        source=message.source,
        reader=message.reader,
        reason=Reason.UNKNOWN_TRANSFER.value,
    )
    return SendMessage(message.reader, refusal)
