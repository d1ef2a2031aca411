"""Requests of one rank to its sources outside a load: to keep a prompt, or to release it.  Pure.

    LoadExpected    the source ranks that this rank will read keep the prompt for a further lease
    each event      source ranks that no rank reads release it; one rank of the engine informs each

Each is sent once.  If it is lost, the source's lease ends in its place: no bytes depend on it.
"""

from __future__ import annotations

from . import messages
from .events import ConnectPeer, LoadExpected, LoadRequested, LoadSkipped, SendMessage

LoadEvent = LoadExpected | LoadRequested | LoadSkipped
SourceActions = list[ConnectPeer | SendMessage]


class SourceRequests:
    """Makes the requests of one rank.

    `name` is the worker's name, and `address` (<transport>:<address>) where pieces arrive by
    default.
    """

    def __init__(self, name: str, rank: int, address: str) -> None:
        self.name = name
        self.rank = rank
        self.address = address

    def keep_prompt(self, event: LoadExpected) -> SourceActions:
        """Has the sources of an expected load keep the prompt."""
        actions = self.release_idle(event)
        for rank in event.plan.sources(self.rank):
            actions += self._transfer_request(event, rank, event.prompt)
        return actions

    def release_idle(self, event: LoadEvent) -> SourceActions:
        """Has the sources that no rank reads release the prompt, of those this rank informs."""
        actions: SourceActions = []
        for rank in event.plan.idle(self.rank):
            actions += self._transfer_request(event, rank)
        return actions

    def _transfer_request(
        self, event: LoadEvent, rank: int, prompt: str | None = None
    ) -> SourceActions:
        """Returns the request, which is queued if the prompt is to be kept."""
        worker = event.sources[rank]
        request = messages.TransferRequest(
            transfer=event.transfer,
            source=worker.name,
            reader=self.name,
            address=self.address,
            readers=event.plan.readers[rank],
            # Without it a sender of an earlier release, which takes this for the load's own
            # request, would refuse the load.
            prompt=prompt or "",
            is_queued=prompt is not None,
        )
        # The connection first: without one the message would be dropped.
        return [ConnectPeer(worker), SendMessage(worker.name, request)]
