"""The queues and credits of reads, without a receiver around them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_disagg.kv.extents import Extent
from vllm_disagg.protocol.incoming_transfer import PieceRecord, PieceState
from vllm_disagg.protocol.read_window import ReadWindow


def test_a_piece_that_is_queued_twice_is_taken_once() -> None:
    """A second read of one piece would end the driver. An entry of a failed load may be left."""
    plan: Any = None
    piece = PieceRecord("p", plan, Extent(0, 1, 0, 16), bytes=10, credit=10)
    transfer = SimpleNamespace(
        pieces={0: piece}, failure=None, started_at=0.0, stall_timeout=1.0, last_progress=0.0
    )
    transfers: Any = {"t": transfer}
    window = ReadWindow(100, 2.0)
    for _ in range(2):
        window.add("p", "t", 0)
    taken = []
    for name, number in window.take(transfers, 0.0):
        taken.append((name, number))
        piece.state = PieceState.POSTED
    assert taken == [("t", 0)]
    window.validate(transfers)
