"""Requests of one rank to its sources outside a load: to keep a prompt, or to release it.  Pure.

    LoadExpected    the source ranks that this rank reads keep the prompt for a further lease
    LoadSkipped     they release it, if they were asked before
    each of both, and LoadRequested
                    source ranks that no rank reads release it; one rank of the engine informs each

Each is sent once.  If it is lost, the source's lease ends in its place: no bytes depend on it.
"""

from __future__ import annotations

from . import messages
from .events import (
    ConnectPeer,
    LoadExpected,
    LoadRequested,
    LoadSkipped,
    Reason,
    SendMessage,
)

Actions = list[ConnectPeer | SendMessage]


class SourceRequests:
    """Makes the requests of one rank.

    `name` is the worker's name, and `address` (<transport>:<address>) where pieces arrive by
    default.
    """

    def __init__(self, name: str, rank: int, address: str) -> None:
        self.name = name
        self.rank = rank
        self.address = address

    def keep(self, event: LoadExpected) -> Actions:
        """Asks the sources to keep the prompt; their answers have no effect before the load."""
        actions = self.release_idle(event)
        for rank in self._ranks_read(event):
            readers = event.plan.readers[rank]
            actions += self._transfer_request(event, rank, readers, event.prompt)
        return actions

    def release(self, event: LoadSkipped) -> Actions:
        """Has all sources release the prompt that they hold for this rank."""
        actions = self.release_idle(event)
        for rank in self._ranks_read(event):
            source = event.sources[rank].name
            abort = messages.Abort(event.transfer, source, self.name, Reason.CANCELLED.value)
            actions.append(SendMessage(source, abort))
        return actions

    def release_idle(self, event: LoadExpected | LoadRequested | LoadSkipped) -> Actions:
        """Has the sources release the prompt that no rank reads, and of which this rank informs."""
        actions: Actions = []
        for rank in event.plan.idle(self.rank):
            actions += self._transfer_request(event, rank, readers=0)
        return actions

    def _ranks_read(self, event: LoadExpected | LoadSkipped) -> list[int]:
        # Each once, however many shards are read from it.
        return sorted({shard.source for shard in event.plan.shards[self.rank]})

    def _transfer_request(
        self,
        event: LoadExpected | LoadRequested | LoadSkipped,
        rank: int,
        readers: int,
        prompt: str = "",
    ) -> Actions:
        worker = event.sources[rank]
        request = messages.TransferRequest(
            transfer=event.transfer,
            source=worker.name,
            reader=self.name,
            address=self.address,
            readers=readers,
            prompt=prompt,
        )
        # The connection first: without one the message would be dropped.
        return [ConnectPeer(worker), SendMessage(worker.name, request)]
