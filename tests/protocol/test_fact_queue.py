"""Facts that wait for a GPU: which go when, and what a revocation takes along."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_disagg.kv.reshard import ReshardPlan
from vllm_disagg.protocol import events, fact_queue
from vllm_disagg.protocol.events import Fact
from vllm_disagg.protocol.fact_queue import FactQueue, claims_work

EMPTY_PLAN = ReshardPlan([], [])


def requested(transfer: str) -> events.LoadRequested:
    return events.LoadRequested(transfer, [], EMPTY_PLAN, [], 8, stall_timeout=1.0)


def scheduled(transfer: str, tokens: int) -> events.BlocksScheduled:
    return events.BlocksScheduled(transfer, tokens, [[tokens]])


def skipped(transfer: str) -> events.LoadSkipped:
    return events.LoadSkipped(transfer, [], EMPTY_PLAN)


class Queue:
    """A queue whose events are numbers, in the order of `add`."""

    def __init__(self) -> None:
        self.queue: FactQueue[int] = FactQueue()
        self.recorded = 0

    def add(self, *facts: Fact) -> list[Fact]:
        event = None
        if claims_work(facts):
            self.recorded += 1
            event = self.recorded
        return self.queue.add(facts, event)

    def reach(self) -> list[Fact]:
        event = self.queue.next_event()
        assert event is not None
        return self.queue.take_reached(event)

    @property
    def is_empty(self) -> bool:
        return self.queue.next_event() is None


@pytest.fixture
def queue() -> Queue:
    return Queue()


def test_a_prompt_that_is_scheduled_again_has_finished_before(queue: Queue) -> None:
    """Found by Hypothesis. vLLM gives the name of a transfer to one prompt only."""
    finished = events.PrefillFinished("t")
    again = scheduled("t", 8)
    recomputed = events.LayersRecomputed("t")
    added = queue.add(events.LayersComputed("t", 1), finished, again, recomputed)
    assert added == [recomputed, finished, again]


def test_what_claims_nothing_goes_at_once(queue: Queue) -> None:
    for fact in (
        scheduled("t", 8),
        events.PrefillFinished("t"),
        events.LookupRequested("t", [], EMPTY_PLAN),
        events.LoadExpected("t", [], EMPTY_PLAN),
        skipped("t"),
        events.BlocksRevoked("t"),
        events.LayersRecomputed("t"),
        events.LoadCancelled("t"),
    ):
        assert not claims_work([fact])
        assert queue.add(fact) == [fact]
    assert queue.is_empty


def test_what_claims_work_waits_for_its_own_event(queue: Queue) -> None:
    first = events.LayersComputed("t", 1)
    second = events.LayersComputed("t", 2)
    load = requested("u")
    assert queue.add(first) == []
    assert queue.add(second, load) == []
    assert queue.reach() == [first]
    assert queue.reach() == [second, load]
    assert queue.is_empty


def test_later_facts_of_a_transfer_wait_behind_its_claims(queue: Queue) -> None:
    """The next step may be launched before this one has ended: its tokens are not final."""
    layers = events.LayersComputed("t", 2)
    next_step = scheduled("t", 16)
    finished = events.PrefillFinished("t")
    queue.add(layers)
    assert queue.add(next_step, scheduled("u", 8)) == [scheduled("u", 8)]
    assert queue.add(finished) == []
    assert queue.reach() == [layers, next_step, finished]


def test_a_fact_goes_with_the_event_of_its_own_transfer(queue: Queue) -> None:
    queue.add(events.LayersComputed("t", 2))
    queue.add(events.LayersComputed("u", 2))
    queue.add(events.PrefillFinished("t"))
    assert queue.reach() == [events.LayersComputed("t", 2), events.PrefillFinished("t")]


def test_both_legs_of_a_transfer_do_not_wait_for_each_other(queue: Queue) -> None:
    queue.add(requested("t"))
    assert queue.add(scheduled("t", 8)) == [scheduled("t", 8)]
    assert queue.add(events.BlocksRevoked("t")) == [events.BlocksRevoked("t")]
    assert queue.reach() == [requested("t")], "the other leg was not revoked"


def test_sums_of_blocks_wait_for_their_event(queue: Queue) -> None:
    """The GPU writes them into host memory before that."""
    sums = events.BlocksSummed("t", 8, [])
    layers = events.LayersComputed("t", 2)
    assert claims_work([sums])
    assert queue.add(sums) == [] and queue.add(layers) == []
    assert queue.reach() == [sums]
    assert queue.reach() == [layers]


def test_sums_of_blocks_are_dropped_with_the_layers(queue: Queue) -> None:
    sums = events.BlocksSummed("t", 8, [])
    layers = events.LayersComputed("t", 2)
    recomputed = events.LayersRecomputed("t")
    queue.add(sums, layers)
    assert queue.add(recomputed) == [recomputed]
    assert queue.reach() == []
    queue.add(sums, layers)
    assert queue.queue.fail() == [recomputed], "they are not in host memory"


def test_revoked_blocks_drop_what_waits(queue: Queue) -> None:
    queue.add(events.LayersComputed("t", 2))
    queue.add(scheduled("t", 16), events.LayersComputed("t", 1), events.LayersComputed("u", 1))
    assert queue.add(events.BlocksRevoked("t")) == [events.BlocksRevoked("t")]
    assert queue.reach() == [], "the thread may be waiting for this event"
    assert queue.reach() == [events.LayersComputed("u", 1)]
    assert queue.is_empty


def test_a_revocation_drops_claims_of_its_own_batch(queue: Queue) -> None:
    revoked = events.BlocksRevoked("t")
    assert queue.add(events.LayersComputed("t", 2), revoked) == [revoked]
    assert queue.is_empty, "no thread wakes for it"


def test_a_finished_prompt_is_released_though_its_blocks_are_revoked(queue: Queue) -> None:
    queue.add(events.LayersComputed("t", 2), events.PrefillFinished("t"))
    revoked = events.BlocksRevoked("t")
    assert queue.add(revoked) == [revoked, events.PrefillFinished("t")]


def test_recomputed_layers_find_a_transfer_to_mark(queue: Queue) -> None:
    """Its first BlocksScheduled may still wait: without one the sender would forget the mark."""
    queue.add(events.LayersComputed("t", 2))
    queue.add(scheduled("t", 16), events.LayersComputed("t", 1))
    recomputed = events.LayersRecomputed("t")
    assert queue.add(recomputed) == [scheduled("t", 16), recomputed]
    assert queue.reach() == [] and queue.reach() == []


def test_a_fact_goes_at_once_when_nothing_of_its_transfer_waits_any_more(queue: Queue) -> None:
    next_step = scheduled("t", 16)
    queue.add(events.LayersComputed("t", 2))
    queue.add(events.LayersComputed("t", 3))
    queue.reach()
    assert queue.add(next_step) == []
    assert queue.reach() == [events.LayersComputed("t", 3), next_step]
    assert queue.add(next_step) == [next_step]
    queue.add(events.LayersComputed("t", 1), events.LayersComputed("u", 1))
    queue.add(events.BlocksRevoked("t"))
    assert queue.add(next_step) == [next_step]


def test_vllms_thread_does_not_search_what_waits(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would for each fact of a step, through thousands of facts behind a busy GPU."""
    for layer in range(100):
        queue.add(*[events.LayersComputed(f"t{number}", layer) for number in range(10)])
    looked: list[Fact] = []

    def key(fact: Fact) -> fact_queue.Key:
        looked.append(fact)
        return original(fact)

    original = fact_queue._key
    monkeypatch.setattr(fact_queue, "_key", key)
    step: list[Fact] = [scheduled("new", 8), scheduled("t3", 8), events.BlocksRevoked("t4")]
    queue.add(*step)
    assert {id(fact) for fact in looked} <= {id(fact) for fact in step}


def test_a_load_that_is_cancelled_while_it_waits_ends_once(queue: Queue) -> None:
    queue.add(requested("t"))
    cancelled = events.LoadCancelled("t")
    assert queue.add(cancelled) == [requested("t"), cancelled]
    assert queue.reach() == []


def test_after_a_failure_no_claim_is_believed(queue: Queue) -> None:
    queue.add(scheduled("t", 8), events.LayersComputed("t", 2), requested("l"))
    queue.add(events.PrefillFinished("t"))
    assert queue.queue.fail() == [
        events.LayersRecomputed("t"),
        events.PrefillFinished("t"),
        requested("l"),
        events.LoadCancelled("l"),
    ]
    assert queue.is_empty and queue.queue.fail() == []
    late: list[Fact] = [scheduled("u", 8), events.LayersComputed("u", 2), requested("m")]
    assert queue.queue.add(late, None) == [
        scheduled("u", 8),
        events.LayersRecomputed("u"),
        requested("m"),
        events.LoadCancelled("m"),
    ]
    assert queue.queue.take_reached(1) == [], "the thread waited while the other one failed"


# Any facts in any order ---------------------------------------------------------------------------
KINDS = (
    "scheduled",
    "computed",
    "computed",
    "finished",
    "revoked",
    "recomputed",
    "requested",
    "cancelled",
    "skipped",
)
STEPS = st.lists(
    st.one_of(
        st.lists(st.tuples(st.sampled_from(KINDS), st.sampled_from("tu")), max_size=4),
        st.sampled_from(["reach", "reach", "reach", "fail"]),
    ),
    max_size=30,
)
REVOCATIONS = (events.BlocksRevoked, events.LayersRecomputed, events.LoadCancelled)
CLAIMS = (events.LayersComputed, events.LoadRequested)


def made(kind: str, transfer: str, number: int) -> Fact:
    makers: dict[str, Callable[[], Fact]] = {
        "scheduled": lambda: scheduled(transfer, number),
        "computed": lambda: events.LayersComputed(transfer, number),
        "finished": lambda: events.PrefillFinished(transfer),
        "revoked": lambda: events.BlocksRevoked(transfer),
        "recomputed": lambda: events.LayersRecomputed(transfer),
        "requested": lambda: requested(transfer),
        "cancelled": lambda: events.LoadCancelled(transfer),
        "skipped": lambda: skipped(transfer),
    }
    return makers[kind]()


@dataclass
class Sent:
    """A fact that has gone, and how many events were reached by then."""

    fact: Fact
    reached: int


class Run:
    """Carries out steps, and remembers what was added and what has gone. Facts by identity."""

    def __init__(self) -> None:
        self.queue = Queue()
        self.added: list[Fact] = []
        self.events: dict[int, int] = {}  # by identity of a claim
        self.sent: list[Sent] = []
        self.reached = 0
        self.has_failed = False

    def add(self, kinds: list[tuple[str, str]]) -> None:
        facts = [
            made(kind, transfer, len(self.added) + at)
            for at, (kind, transfer) in enumerate(kinds, 1)
        ]
        self.added += facts
        gone = self.queue.add(*facts)
        for fact in facts:
            self.events[id(fact)] = self.queue.recorded
            if isinstance(fact, REVOCATIONS):
                assert any(fact is one for one in gone), "a revocation goes at once"
        self.go(gone)

    def reach(self) -> None:
        if not self.queue.is_empty:
            event = self.queue.queue.next_event()
            assert event is not None
            self.reached = max(self.reached, event)
            self.go(self.queue.reach())

    def fail(self) -> None:
        self.has_failed = True
        self.go(self.queue.queue.fail())

    def go(self, facts: list[Fact]) -> None:
        self.sent += [Sent(fact, self.reached) for fact in facts]


def key(fact: Fact) -> tuple[bool, str]:
    return isinstance(fact, events.ForReceiver), fact.transfer


@given(STEPS)
def test_the_rules_hold_whatever_is_added(steps: list[list[tuple[str, str]] | str]) -> None:
    run = Run()
    for step in steps:
        if step == "reach":
            run.reach()
        elif step == "fail":
            run.fail()
        else:
            assert isinstance(step, list)
            run.add(step)
    while not run.queue.is_empty:
        run.reach()
    check_claims(run)
    check_order(run)
    check_ends(run)


def check_claims(run: Run) -> None:
    """Rule 1."""
    for at, sent in enumerate(run.sent):
        if not isinstance(sent.fact, CLAIMS) or sent.reached >= run.events[id(sent.fact)]:
            continue
        following = [one.fact for one in run.sent[at + 1 :] if key(one.fact) == key(sent.fact)]
        assert isinstance(sent.fact, events.LoadRequested), "layers before their event"
        voids = (events.LoadCancelled, events.LoadRequested)
        assert following and isinstance(following[0], voids), "a load before its event"


def check_order(run: Run) -> None:
    """Rules 2 and 4."""
    for transfer in {key(fact) for fact in run.added}:
        rest = deque(fact for fact in run.added if key(fact) == transfer)
        gone = [sent.fact for sent in run.sent if key(sent.fact) == transfer]
        for fact in gone:
            if isinstance(fact, REVOCATIONS):
                continue
            while rest and rest[0] is not fact:
                rest.popleft()
            assert rest, f"{fact} out of order"
    for at, sent in enumerate(run.sent):
        if isinstance(sent.fact, events.BlocksRevoked | events.LayersRecomputed):
            later = [one.fact for one in run.sent[at:] if key(one.fact) == key(sent.fact)]
            added = [one for one in run.added if key(one) == key(sent.fact)]
            if not any(one is sent.fact for one in added):
                continue  # made by a failure
            before = added[: next(i for i, one in enumerate(added) if one is sent.fact)]
            stale = [one for one in later if any(one is old for old in before)]
            assert not [one for one in stale if isinstance(one, events.LayersComputed)]


def check_ends(run: Run) -> None:
    """Rule 3; and without revocation or failure nothing is lost."""
    gone = [id(sent.fact) for sent in run.sent]
    for fact in run.added:
        if isinstance(fact, events.PrefillFinished | events.LoadRequested):
            assert gone.count(id(fact)) == 1, fact
        assert gone.count(id(fact)) <= 1, fact
    if not run.has_failed and not any(isinstance(fact, REVOCATIONS) for fact in run.added):
        assert len(gone) == len(run.added)
