"""Lets a fleet change, and reads the events."""

import msgspec

from vllm_disagg.protocol.peers import EngineInfo
from vllm_disagg.proxy.routing.fleet import Fleet, Instance
from vllm_disagg.proxy.routing.instance_report import Clock
from vllm_disagg.proxy.telemetry.journal import MAX_EVENTS, EventJournal


class Watched:
    """A fleet of one P and one D, with its journal and a clock that each look moves on."""

    def __init__(self) -> None:
        self.p = Instance("http://p", "prefill")
        self.d = Instance("http://d", "decode")
        self.fleet = Fleet([self.p, self.d])
        self.journal = EventJournal()
        self.fallbacks: dict[str, int] = {}
        self.now = 100.0
        self.come_up(self.p)
        self.come_up(self.d)
        self.look()

    def come_up(self, instance: Instance, **layout: str) -> None:
        engine = EngineInfo(instance.url, instance.role, [], layout or {"dtype": "bf16"})
        instance.on_probe_answered("m", engine)

    def look(self, seconds: float = 1.0) -> list[tuple[str, str, str, int]]:
        """Returns the events since the last look."""
        before = [msgspec.structs.replace(event) for event in self.journal.events]
        self.now += seconds
        self.journal.observe(self.fleet, self.fallbacks, Clock(self.now, 1e9 + self.now))
        new = [event for event in self.journal.events if event not in before]
        return [(event.kind, event.url, event.detail, event.count) for event in new]


def test_an_instance_dies_and_returns() -> None:
    w = Watched()
    assert w.look() == [], "what is there at the start is no event"
    w.d.mark_down("refuses connections")
    assert w.look() == [("down", "http://d", "refuses connections", 1)]
    w.d.mark_down("does not answer /health")
    assert w.look() == [], "a death is one event, however the health checks word it"
    w.come_up(w.d)
    assert w.look() == [("up", "http://d", "", 1)]
    assert [event.at for event in w.journal.events] == [1e9 + 103, 1e9 + 105]


def test_a_misfit_is_named_with_its_field() -> None:
    w = Watched()
    w.come_up(w.d, dtype="fp16")
    events = w.look()
    assert {(kind, url) for kind, url, _, _ in events} == {
        ("limited", "http://p"),
        ("limited", "http://d"),
    }
    assert all("dtype is" in detail for _, _, detail, _ in events)
    w.come_up(w.d)
    assert {kind for kind, *_ in w.look()} == {"up"}


def test_a_breaker_opens_and_closes() -> None:
    w = Watched()
    for _ in range(2):
        w.d.on_leg_failed("reset", w.now, w.now)
    assert w.look(0.5) == [("breaker", "http://d", "open", 1)]
    assert w.look(30.0) == [], "it is half-open: the next request decides"
    w.d.on_leg_succeeded(w.now)
    assert w.look() == [("breaker", "http://d", "closed", 1)]


def test_members_join_drain_and_leave() -> None:
    w = Watched()
    new = Instance("http://e", "decode")
    w.fleet.instances.append(new)
    assert w.look() == [("joined", "http://e", "", 1)]
    new.mark_down("refuses connections")
    assert w.look() == [("down", "http://e", "refuses connections", 1)], "the first failure counts"
    w.fleet.instances.remove(w.d)
    w.fleet.leaving.append(w.d)
    assert w.look() == [("draining", "http://d", "", 1)]
    w.fleet.leaving.remove(w.d)
    w.fleet.instances.append(w.d)
    assert w.look() == [("resumed", "http://d", "", 1)]
    w.fleet.instances.remove(new)
    assert w.look() == [("left", "http://e", "", 1)]


def test_failovers_of_one_reason_are_one_event() -> None:
    w = Watched()
    w.fallbacks = {"decode_failed": 3}
    assert w.look() == [("failover", "", "decode_failed", 3)]
    w.fallbacks = {"decode_failed": 1000, "prefill_reset": 1}
    assert w.look(20.0) == [
        ("failover", "", "decode_failed", 1000),
        ("failover", "", "prefill_reset", 1),
    ]
    assert len(w.journal.events) == 2
    assert w.look(60.0) == []
    w.fallbacks = {"decode_failed": 1001, "prefill_reset": 1}
    w.look()
    assert [event.count for event in w.journal.events] == [1000, 1, 1], "a later one is its own"


def test_the_journal_has_a_fixed_size() -> None:
    w = Watched()
    for _ in range(MAX_EVENTS):
        w.d.mark_down("refuses connections")
        w.look()
        w.come_up(w.d)
        w.look()
    assert len(w.journal.events) == MAX_EVENTS
