"""Sources that have let a load time out and have never answered.  Pure.

Such an address may be one that this machine does not reach, as the loopback of another machine.
Each load would wait for `peer_timeout` in vain, so all but the first one fail at once.  Their
TransferRequests are sent all the same: a sender answers each of them, and any message ends this.
"""

from __future__ import annotations

# Names of sources hold their incarnation: entries of dead ones would pile up.
MAX_SOURCES = 4096


class UnreachedSources:
    """The sources of one rank that have answered, and those that were waited for in vain."""

    def __init__(self) -> None:
        # In the order of their first entry, which is the one that is forgotten.
        self._answered: dict[str, None] = {}
        self._unreached: dict[str, None] = {}

    def __contains__(self, source: str) -> bool:
        """Returns whether a load from a source fails at once."""
        return source in self._unreached

    def on_message(self, source: str) -> None:
        """Notes a message of a source: from now on its loads are waited for."""
        if source not in self._answered:
            self._unreached.pop(source, None)
            _add(self._answered, source)

    def on_timeout(self, source: str) -> None:
        """Notes that a load has waited for a source in vain."""
        if source not in self._answered:
            _add(self._unreached, source)


def _add(sources: dict[str, None], source: str) -> None:
    sources[source] = None
    if len(sources) > MAX_SOURCES:
        del sources[next(iter(sources))]
