"""Pieces come by the preferred transport of those that work, else by ZMQ."""

from __future__ import annotations

import pytest

from vllm_disagg.protocol.events import TransportChanged
from vllm_disagg.transports.selection import TransportSelection

ZMQ = "zmq:1"


@pytest.fixture
def selection() -> TransportSelection:
    return TransportSelection(["fast", "slow"], ZMQ)


def test_the_preferred_transport_takes_the_pieces(selection: TransportSelection) -> None:
    def change(name: str, address: str) -> str:
        return selection.on_transport_changed(name, TransportChanged("p", address)).address

    assert change("slow", ZMQ) == ZMQ
    assert change("slow", "slow:1") == "slow:1"
    assert change("fast", "fast:1") == "fast:1"
    assert change("slow", ZMQ) == "fast:1"
    assert change("slow", "slow:2") == "fast:1"
    assert change("fast", ZMQ) == "slow:2"
    assert change("slow", "slow:3") == "slow:3"
    assert change("slow", ZMQ) == ZMQ
    assert change("slow", ZMQ) == ZMQ


def test_the_size_of_pieces_is_that_of_the_transport_in_use(
    selection: TransportSelection,
) -> None:
    fast = TransportChanged("p", "fast:1", piece_bytes=64)
    assert selection.on_transport_changed("fast", fast) == fast
    slow = TransportChanged("p", "slow:1")
    assert selection.on_transport_changed("slow", slow) == fast
    assert selection.on_transport_changed("fast", TransportChanged("p", ZMQ)) == slow


def test_a_source_does_not_change_the_address_of_another(selection: TransportSelection) -> None:
    fast = TransportChanged("p", "fast:1")
    slow = TransportChanged("q", "slow:1")
    assert selection.on_transport_changed("fast", fast) == fast
    assert selection.on_transport_changed("slow", slow) == slow
    broken = TransportChanged("r", ZMQ)
    assert selection.on_transport_changed("fast", broken) == broken
    assert selection.on_transport_changed("slow", TransportChanged("p", "slow:1")) == fast


def test_sources_without_a_transport_are_not_remembered(selection: TransportSelection) -> None:
    for number in range(3):
        source = f"p/{number}"
        selection.on_transport_changed("fast", TransportChanged(source, "fast:1"))
        selection.on_transport_changed("fast", TransportChanged(source, ZMQ))
        selection.on_transport_changed("slow", TransportChanged(source, ZMQ))
    assert not selection._changes
