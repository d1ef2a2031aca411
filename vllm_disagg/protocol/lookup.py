"""Lookups of one rank: how many tokens of a transfer do its sources have?

A lookup precedes a load, while vLLM has allocated no blocks yet:

    LookupRequested --> TransferRequest to each source, repeated as the keep-alive
    Progress with tokens from every source --> LookupResult(least of them)
    Abort from any source                  --> LookupResult(0)
    LoadRequested, LoadCancelled           --> the lookup ends

The keep-alives go on after the answer: otherwise the sources would forget the receiver before the
load begins.  There is no timeout here; the connector's scheduler decides how long to wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from . import messages
from .events import ConnectPeer, LookupRequested, LookupResult, Reason, SendMessage


@dataclass
class Lookup:
    """One open lookup."""

    # By source: the number of ranks of this engine that read from it.  Must be that of the later
    # load, because a sender keeps the number of the first request.
    readers: dict[str, int]
    address: str  # <transport>:<address> of this rank
    retry_at: float  # time of the next keep-alive
    prompt: str  # digest of the whole prompt
    tokens_by_source: dict[str, int]
    # An answered lookup stays open, for its keep-alives; it only gives no second result.
    is_answered: bool = False


class Lookups:
    """All lookups of one rank.  `keepalive_interval` is in seconds."""

    def __init__(self, name: str, rank: int, keepalive_interval: float) -> None:
        self.name = name
        self.rank = rank
        self.keepalive_interval = keepalive_interval
        self.open: dict[str, Lookup] = {}

    def next_deadline(self) -> float | None:
        """Returns the time at which the next `tick` is due; None without lookups."""
        deadlines = [lookup.retry_at for lookup in self.open.values()]
        return min(deadlines, default=None)

    def start(
        self,
        event: LookupRequested,
        address: str,
        now: float,
    ) -> list[ConnectPeer | SendMessage]:
        """Sends a TransferRequest to all sources from which this rank would read."""
        assert event.transfer not in self.open, f"{event.transfer}: two lookups at a time"
        ranks = event.plan.sources(self.rank)
        readers: dict[str, int] = {}
        # Connections first: a message to a source without one would be lost, and come half a
        # second later with the next keep-alive.
        actions: list[ConnectPeer | SendMessage] = []
        for rank in ranks:
            source = event.sources[rank]
            readers[source.name] = event.plan.readers[rank]
            actions.append(ConnectPeer(source))
        lookup = Lookup(
            readers=readers,
            address=address,
            retry_at=now + self.keepalive_interval,
            prompt=event.prompt,
            tokens_by_source={},
        )
        self.open[event.transfer] = lookup
        actions += self._transfer_requests(event.transfer, lookup)
        return actions

    def on_message(self, message: messages.Progress | messages.Abort) -> list[LookupResult]:
        """Applies a source's answer; returns at most one result for each lookup."""
        lookup = self.open.get(message.transfer)
        if lookup is None or lookup.is_answered:
            return []
        if message.source not in lookup.readers or message.reader != self.name:
            return []  # of another incarnation of one of the two workers
        tokens = 0
        if isinstance(message, messages.Progress):
            # Nothing is final yet: the answer comes with a later Progress.  Partial layers do not
            # count, since vLLM allocates blocks for whole tokens only.
            if not message.tokens_final:
                return []
            lookup.tokens_by_source[message.source] = message.tokens_final
            if len(lookup.tokens_by_source) < len(lookup.readers):
                return []
            # A token that one source lacks would have no KV in that source's layers or heads.
            tokens = min(lookup.tokens_by_source.values())
        # One refusal is enough: without all sources no token can be loaded.
        lookup.is_answered = True
        return [LookupResult(message.transfer, tokens)]

    def end(self, transfer: str) -> None:
        """Forgets a lookup whose load begins: the receiver sends the keep-alives from now on."""
        self.open.pop(transfer, None)

    def cancel(self, transfer: str) -> list[SendMessage]:
        """Forgets a lookup and informs its sources, which else would keep this receiver."""
        lookup = self.open.pop(transfer, None)
        if lookup is None:
            return []
        reason = Reason.CANCELLED.value
        actions: list[SendMessage] = []
        for source in lookup.readers:
            abort = messages.Abort(transfer, source, self.name, reason)
            actions.append(SendMessage(source, abort))
        return actions

    def tick(self, now: float) -> list[SendMessage]:
        """Returns the keep-alives that are due."""
        actions: list[SendMessage] = []
        for transfer, lookup in self.open.items():
            if lookup.retry_at <= now:
                # From `now` on, not from the old time: after a pause there is no burst of repeats.
                lookup.retry_at = now + self.keepalive_interval
                actions += self._transfer_requests(transfer, lookup)
        return actions

    def _transfer_requests(self, transfer: str, lookup: Lookup) -> list[SendMessage]:
        actions: list[SendMessage] = []
        for source, readers in lookup.readers.items():
            request = messages.TransferRequest(
                transfer=transfer,
                source=source,
                reader=self.name,
                address=lookup.address,
                readers=readers,
                prompt=lookup.prompt,
            )
            actions.append(SendMessage(source, request))
        return actions
