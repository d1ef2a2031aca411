"""Selection of the transport by which a worker takes the pieces of each source.  Pure.

ZMQ always works.  Another transport reports with TransportChanged that it works, or that it has
broken.  Pieces come by the preferred one of those that work, else by ZMQ:

    TransportChanged of one transport -> on_transport_changed -> TransportChanged for the receiver
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ..protocol.events import TransportChanged


class TransportSelection:
    """The transports that work, by source.

    `names` has all transports besides ZMQ, the preferred one first.  `fallback_address` is where
    ZMQ accepts this worker's pieces.
    """

    def __init__(self, names: Sequence[str], fallback_address: str) -> None:
        self._names = names
        self._fallback_address = fallback_address
        # By source and transport.  A source without a working transport has no entry.
        self._addresses: dict[str, dict[str, str]] = {}

    def on_transport_changed(self, name: str, event: TransportChanged) -> TransportChanged:
        """Returns the event of transport `name` with the address that the source is to use."""
        working = self._addresses.setdefault(event.source, {})
        if event.address == self._fallback_address:
            working.pop(name, None)
        else:
            working[name] = event.address
        if not working:
            del self._addresses[event.source]
        return msgspec.structs.replace(event, address=self.address(event.source))

    def address(self, source: str) -> str:
        """Returns where this worker takes the pieces of a source."""
        working = self._addresses.get(source, {})
        for name in self._names:
            if name in working:
                return working[name]
        return self._fallback_address
