"""What a rank asks of its sources before vLLM can say what it wants: how many tokens do you have?

A TransferRequest asks, the first Progress of more than nothing answers. Pulls go on until the
transfer is wanted or cancelled, so that the sources do not forget the reader meanwhile. Nobody
waits for an answer here: how long to, vLLM's side decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import messages
from .events import ConnectPeer, LookupRequested, LookupResult, Reason, SendMessage


@dataclass
class Lookup:
    readers: dict[str, int]  # by source: how many of us will read from it
    address: str
    retry: float  # when to ask once more
    prompt: str
    said: dict[str, int]  # tokens, by source
    is_over: bool = False  # it has been answered


class Lookups:
    """All searches of one rank.  `retry`: seconds between questions."""

    def __init__(self, name: str, rank: int, retry: float) -> None:
        self.name = name
        self.rank = rank
        self.retry = retry
        self.open: dict[str, Lookup] = {}

    def next_deadline(self) -> float | None:
        return min((search.retry for search in self.open.values()), default=None)

    def sought(
        self, event: LookupRequested, address: str, now: float
    ) -> list[ConnectPeer | SendMessage]:
        assert event.transfer not in self.open, f"{event.transfer} is sought twice"
        ranks = sorted({share.source for share in event.plan.shares[self.rank]})
        workers = {event.sources[source].name: event.plan.readers[source] for source in ranks}
        search = self.open[event.transfer] = Lookup(
            workers, address, now + self.retry, event.prompt, {}
        )
        return [
            *(ConnectPeer(event.sources[source]) for source in ranks),
            *self._pulls(event.transfer, search),
        ]

    def heard(self, message: messages.Progress | messages.Abort) -> list[LookupResult]:
        """At most one answer for each search."""
        search = self.open.get(message.transfer)
        if (
            search is None
            or search.is_over
            or message.source not in search.readers
            or message.reader != self.name
        ):
            return []
        if isinstance(message, messages.Progress):
            if not message.tokens:
                return []
            search.said[message.source] = message.tokens
            if len(search.said) < len(search.readers):
                return []
        search.is_over = True
        return [
            LookupResult(
                message.transfer,
                min(search.said.values()) if isinstance(message, messages.Progress) else 0,
            )
        ]

    def wanted(self, transfer: str) -> None:
        """The transfer itself goes on from here."""
        self.open.pop(transfer, None)

    def cancelled(self, transfer: str) -> list[SendMessage]:
        search = self.open.pop(transfer, None)
        reason = Reason.CANCELLED.value
        return (
            [SendMessage(s, messages.Abort(transfer, s, self.name, reason)) for s in search.readers]
            if search
            else []
        )

    def tick(self, now: float) -> list[SendMessage]:
        actions: list[SendMessage] = []
        for transfer, search in self.open.items():
            if search.retry <= now:
                search.retry = now + self.retry
                actions += self._pulls(transfer, search)
        return actions

    def _pulls(self, transfer: str, search: Lookup) -> list[SendMessage]:
        return [
            SendMessage(
                s,
                messages.TransferRequest(transfer, s, self.name, search.address, n, search.prompt),
            )
            for s, n in search.readers.items()
        ]
