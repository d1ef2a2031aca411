"""Posted reads: whatever order the calls come in, each read ends once and is written once."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from vllm_disagg.errors import CopyFailed
from vllm_disagg.kv.extents import Extent
from vllm_disagg.protocol.events import PostRead, ReadCompleted, ReadStatus
from vllm_disagg.transports.posted_reads import PostedReads, status_of_write

EXAMPLES = int(os.environ.get("EXAMPLES", "200"))
FAST = "fast:1"
WRITTEN, CANCELLED = ReadStatus.WRITTEN, ReadStatus.CANCELLED


def read(number: int = 0, source: str = "p", transfer: str = "t") -> PostRead:
    return PostRead(transfer, number, source, FAST, Extent(0, 1, 0, 16), [0])


def cancelled(posted: PostedReads) -> list[int]:
    """Return the numbers of the reads that have ended as CANCELLED since the last call."""
    completions = list(posted.take_cancelled())
    assert all(completed.status is CANCELLED for completed in completions)
    return [completed.number for completed in completions]


def test_bytes_are_written_once() -> None:
    posted = PostedReads()
    assert posted.begin("p", "t", 0) is None, "not posted"
    posted.post(read(), FAST)
    assert posted.begin("p", "t", 1) is None and posted.begin("p", "u", 0) is None
    assert posted.begin("p", "t", 0) == read()
    assert posted.begin("p", "t", 0) is None, "a duplicate comes while the piece is being written"
    assert posted.end(read(), WRITTEN) == ReadCompleted("t", 0, WRITTEN)
    assert posted.begin("p", "t", 0) is None, "a duplicate comes late"
    assert not posted.has_cancelled


def test_a_cancelled_read_takes_no_bytes() -> None:
    posted = PostedReads()
    for number in range(3):
        posted.post(read(number), FAST)
    posted.cancel("u", [0, 1, 2])
    assert not posted.has_cancelled
    posted.cancel("t", [0, 2, 7])
    assert posted.has_cancelled and cancelled(posted) == [0, 2] and not posted.has_cancelled
    assert posted.begin("p", "t", 0) is None and posted.begin("p", "t", 1) is not None


@pytest.mark.parametrize("how", ["cancel", "flush"])
def test_a_read_that_is_being_written_ends_with_the_write(how: str) -> None:
    posted = PostedReads()
    posted.post(read(0), FAST)
    posted.post(read(1), FAST)
    posted.begin("p", "t", 0)
    assert posted.transfers_being_written() == {"t"}
    if how == "cancel":
        posted.cancel("t", [0, 1])
    else:
        posted.flush("p")
    assert cancelled(posted) == [1]
    assert posted.transfers_being_written() == {"t"}
    posted.end(read(0), WRITTEN)
    assert not posted.transfers_being_written() and cancelled(posted) == []


def test_a_flush_ends_the_reads_of_one_source() -> None:
    posted = PostedReads()
    for number, source in enumerate("pqpq"):
        posted.post(read(number, source), FAST)
    posted.flush("p")
    assert cancelled(posted) == [0, 2]
    assert posted.begin("p", "t", 0) is None and posted.begin("q", "t", 1) is not None


def test_bytes_of_another_worker_than_the_source_are_dropped() -> None:
    """Its transfer may be known to other members, and not all transports have a checksum."""
    posted = PostedReads()
    posted.post(read(0, "p"), FAST)
    assert posted.begin("q", "t", 0) is None
    assert posted.transfers_being_written() == set()
    assert posted.begin("p", "t", 0) == read(0, "p")


@pytest.mark.parametrize("in_use", ["", "fast:2"])
def test_a_read_for_an_address_that_is_not_in_use_ends_at_once(in_use: str) -> None:
    posted = PostedReads()
    posted.post(read(3), in_use)
    assert cancelled(posted) == [3] and posted.begin("p", "t", 3) is None


class Reads(RuleBasedStateMachine):
    """Every read ends as often as it was posted, and none is written when it has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.posted = PostedReads()
        self.open: dict[tuple[str, int], PostRead] = {}
        self.writing: dict[tuple[str, int], PostRead] = {}
        self.starts: Counter[tuple[str, int]] = Counter()
        self.ends: Counter[tuple[str, int]] = Counter()

    keys = st.tuples(st.sampled_from("tu"), st.integers(0, 3))

    def took(self, completed: ReadCompleted) -> None:
        key = (completed.transfer, completed.number)
        assert key not in self.writing, "ended before its write"
        self.ends[key] += 1
        del self.open[key]

    @rule(key=keys, source=st.sampled_from("pq"), in_use=st.sampled_from([FAST, ""]))
    def post(self, key: tuple[str, int], source: str, in_use: str) -> None:
        if key in self.open:
            return
        self.open[key] = read(key[1], source, key[0])
        self.starts[key] += 1
        self.posted.post(self.open[key], in_use)

    @rule(key=keys, source=st.sampled_from("pq"))
    def arrive(self, key: tuple[str, int], source: str) -> None:
        found = self.posted.begin(source, *key)
        if found is not None:
            assert found == self.open[key] and key not in self.writing
            assert found.source == source
            self.writing[key] = found

    @rule(key=keys, status=st.sampled_from(ReadStatus))
    def end_write(self, key: tuple[str, int], status: ReadStatus) -> None:
        if key in self.writing:
            self.took(self.posted.end(self.writing.pop(key), status))

    @rule(transfer=st.sampled_from("tu"), numbers=st.sets(st.integers(0, 3)))
    def cancel(self, transfer: str, numbers: set[int]) -> None:
        self.posted.cancel(transfer, sorted(numbers))

    @rule(source=st.sampled_from("pq"))
    def flush(self, source: str) -> None:
        self.posted.flush(source)

    @rule()
    def take(self) -> None:
        for completed in self.posted.take_cancelled():
            self.took(completed)

    @invariant()
    def names_what_is_written(self) -> None:
        assert self.posted.transfers_being_written() == {key[0] for key in self.writing}

    def teardown(self) -> None:
        for key in list(self.writing):
            self.end_write(key, WRITTEN)
        for source in "pq":
            self.posted.flush(source)
        self.take()
        assert self.starts == self.ends and not self.open


TestReads = Reads.TestCase
TestReads.settings = settings(max_examples=EXAMPLES, stateful_step_count=30, deadline=None)


def test_a_lack_of_memory_for_a_write_is_no_damage() -> None:
    """Damage counts against the transport, which would be given up for a lack that may pass."""

    def write() -> bool:
        raise CopyFailed("no memory")

    assert status_of_write("t", write) is ReadStatus.CANCELLED
    assert status_of_write("t", lambda: False) is ReadStatus.DAMAGED
    assert status_of_write("t", lambda: True) is ReadStatus.WRITTEN
