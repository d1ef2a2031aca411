"""Selection of the transport by which a worker takes the pieces of each source.  Pure.

ZMQ always works.  Another transport reports with TransportChanged that it works, or that it has
broken.  Pieces come by the preferred one of those that work, else by ZMQ:

    TransportChanged of one transport -> on_transport_changed -> TransportChanged for the receiver
"""

from __future__ import annotations

from collections.abc import Sequence

from ..protocol.events import TransportChanged


class TransportSelection:
    """The transports that work, by source.

    `names` has all transports except ZMQ, the preferred one first.  `fallback_address` is where
    ZMQ accepts this worker's pieces.
    """

    def __init__(
        self,
        names: Sequence[str],
        fallback_address: str,
    ) -> None:
        self._names = names
        self._fallback_address = fallback_address
        # By source and transport: all that work, also those not in use now, so that the next one
        # takes over at once when the preferred one breaks.
        self._changes: dict[str, dict[str, TransportChanged]] = {}

    def on_transport_changed(self, name: str, event: TransportChanged) -> TransportChanged:
        """Returns the event of transport `name` with the address that the source is to use."""
        working = self._changes.setdefault(event.source, {})
        # A transport reports its break as the address of ZMQ: it does not know what else works.
        if event.address == self._fallback_address:
            # Without an entry too: a break that is reported twice gets the same answer.
            working.pop(name, None)
        else:
            working[name] = event
        # Peers come and go for months: without this each would leave an entry.
        if not working:
            del self._changes[event.source]
        # Returned even if the address is the same as before: the receiver posts the reads that the
        # break has cancelled when it gets this event.
        return self._preferred(event.source)

    def _preferred(self, source: str) -> TransportChanged:
        working = self._changes.get(source, {})
        # In the order of the settings, not in that of connecting: NIXL connects more slowly than
        # TCP, and still is preferred where it works.
        for name in self._names:
            if name in working:
                return working[name]
        return TransportChanged(source, self._fallback_address)
