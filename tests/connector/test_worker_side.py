"""The worker's half of the connector: the time at which KV is announced as final."""

from __future__ import annotations

from random import Random
from typing import Any, Literal

import pytest

pytest.importorskip("vllm")

from kv_connectors import prompt_digest
from kv_connectors import worker as worker_module
from kv_connectors.connector import DisaggConnector
from kv_connectors.layers import FinalLayers
from kv_connectors.metadata import StepMetadata, WorkerMetadata
from kv_connectors.worker import WorkerSide
from vllm_disagg.config import Config
from vllm_disagg.fleet import keys
from vllm_disagg.kv.layout import uniform
from vllm_disagg.protocol import events
from vllm_disagg.protocol.sender import Sender
from vllm_disagg.transports.base import Counters

Overlap = Literal["layer", "chunk", "off"]


class Recorder:
    """Replaces the driver and records its events."""

    def __init__(self) -> None:
        self.facts: list[Any] = []

        self.outcomes: list[Any] = []
        self.counters = Counters()

    def submit(self, facts: Any) -> None:
        self.facts += facts

    def take(self) -> list[Any]:
        taken, self.outcomes = self.outcomes, []
        return taken


def started(overlap: Overlap, layers: str = "ab") -> tuple[WorkerSide, Recorder]:
    worker = WorkerSide(
        Config(overlap=overlap), keys.FleetKey(b"k" * keys.KEY_BYTES), 0, None, None
    )
    driver = Recorder()
    worker._driver = driver  # type: ignore[assignment]
    worker._layers = FinalLayers(layers)
    worker._layout = uniform(
        len(layers), block_size=16, block_bytes=[4 << 20]
    )  # so large that each layer is worth an offer
    return worker, driver


def step(worker: WorkerSide, driver: Recorder, calls: str) -> list[tuple[int, Any]]:
    """Computes layers in this order; returns (calls so far, final layers or event's name)."""
    worker.begin_step(StepMetadata(sender_events=[events.BlocksScheduled("t", 16, [[1]])]))
    announced: list[tuple[int, Any]] = []
    for at, layer in enumerate([*calls, ""], 1):
        driver.facts.clear()
        if layer:
            worker.on_layer_computed(layer)
        else:
            worker.end_step()
        announced += [(at, getattr(fact, "layers", type(fact).__name__)) for fact in driver.facts]
    return announced


def event_names(driver: Recorder) -> list[str]:
    return [f"{type(f).__name__} {getattr(f, 'layers', '')}".strip() for f in driver.facts]


def prompt(overlap: Overlap) -> list[str]:
    """Returns the events of a prompt of two chunks and two layers."""
    worker, driver = started(overlap)
    for tokens in (16, 32):
        worker.begin_step(
            StepMetadata(sender_events=[events.BlocksScheduled("t", tokens, [[tokens // 16]])])
        )
        for layer in ("a", "b"):
            worker.on_layer_computed(layer)
        worker.end_step()
    worker.begin_step(StepMetadata(sender_events=[events.PrefillFinished("t")]))
    return event_names(driver)


@pytest.mark.parametrize(
    ("overlap", "step", "end"),
    [
        ("layer", ["BlocksScheduled", "LayersComputed 1", "LayersComputed 2"], ["PrefillFinished"]),
        ("chunk", ["BlocksScheduled", "LayersComputed 2"], ["PrefillFinished"]),
        ("off", ["BlocksScheduled"], ["LayersComputed 2", "PrefillFinished"]),
    ],
)
def test_overlap(overlap: Overlap, step: list[str], end: list[str]) -> None:
    first = [
        one for one in step if one != "LayersComputed 1"
    ]  # how often a layer is computed in a step is not known yet
    assert prompt(overlap) == [*first, *step, *end]


@pytest.mark.parametrize(
    ("calls", "announced"),
    [
        ("abcd", [(1, 1), (2, 2), (3, 3), (5, 4)]),
        ("cabd", [(2, 1), (3, 3), (5, 4)]),  # Zamba2: blocks of attention in turn
        ("dcba", [(4, 3), (5, 4)]),
        ("bcd", [(4, 4)]),  # `a` is a state, computed without a call
        ("abd", [(1, 1), (2, 2), (4, 4)]),
        ("abxcd", [(1, 1), (2, 2), (4, 3), (6, 4)]),  # `x` uses another layer's KV
        ("abcdabcd", [(5, 1), (6, 2), (7, 3), (9, 4)]),  # a loop: the last one counts
        ("", [(1, 4)]),  # a CUDA graph
    ],
)
def test_layers_are_announced_when_all_before_them_are_final(
    calls: str, announced: list[tuple[int, Any]]
) -> None:
    worker, driver = started("layer", "abcd")
    assert step(worker, driver, calls) == [(len(calls) + 1, 4)], "the first step teaches"
    for _ in range(3):
        assert step(worker, driver, calls) == announced


def test_a_layer_computed_less_often_than_ever_waits_for_the_end() -> None:
    worker, driver = started("layer", "abcd")
    step(worker, driver, "aabbccdd")
    assert step(worker, driver, "abcd") == [(5, 4)]
    assert step(worker, driver, "aabbcd") == [(2, 1), (4, 2), (7, 4)]


def test_recomputed_layers_are_taken_back_once() -> None:
    worker, driver = started("layer", "abcd")
    step(worker, driver, "abcd")
    assert step(worker, driver, "abcabcd") == [
        (1, 1),
        (2, 2),
        (3, 3),
        (4, "LayersRecomputed"),
        (8, 4),
    ]
    assert step(worker, driver, "abcabcd") == [(4, 1), (5, 2), (6, 3), (8, 4)], "and learned from"


def test_no_order_of_layers_announces_a_layer_too_early() -> None:
    """Otherwise LayersRecomputed follows. No model has such orders, one after the other."""
    random, layers = Random(1), "abcdef"
    for _ in range(300):
        worker, driver = started("layer", layers)
        worker._layout = uniform(
            len(layers), block_size=16, block_bytes=[random.choice([1 << 20, 4 << 20])]
        )
        orders = [
            layers[: random.randint(0, 6)] + "".join(random.choices(layers, k=random.randint(0, 6)))
            for _ in range(2)
        ]
        for calls in random.choices(orders, k=6):
            announced = step(worker, driver, calls)
            assert announced[-1] == (len(calls) + 1, len(layers)), "at the end, all of it"
            taken_back = [at for at, what in announced if what == "LayersRecomputed"]
            said = [(at, what) for at, what in announced[:-1] if what != "LayersRecomputed"]
            assert [what for _, what in said] == sorted(what for _, what in said), "never back"
            changed = [at for at, what in said if set(layers[:what]) & set(calls[at:])]
            assert len(taken_back) == 1 or not (taken_back or changed), (calls, announced)
            assert all(at < taken_back[0] for at, _ in said if taken_back), (
                "nothing is offered after that"
            )


@pytest.mark.parametrize("overlap", ["layer", "chunk", "off"])
def test_cached_blocks_are_final_when_the_step_ends(overlap: Overlap) -> None:
    """Another request of the same step may compute the blocks of the hit."""
    worker, driver = started(overlap)
    worker.begin_step(
        StepMetadata(sender_events=[events.BlocksScheduled("back", 32, [[1, 2]], cached=True)])
    )
    for layer in ("a", "b"):
        worker.on_layer_computed(layer)
    worker.end_step()
    assert event_names(driver) == ["BlocksScheduled"]
    worker.take_results()
    assert event_names(driver) == ["BlocksScheduled", "LayersComputed 2"]
    worker.take_results()
    assert len(driver.facts) == 2, "said once"


@pytest.mark.parametrize("overlap", ["layer", "chunk"])
def test_take_results_ends_a_step_that_vllm_has_not_ended(
    overlap: Overlap,
) -> None:
    """As with speculative decoding, on all stages of a pipeline but the last."""
    worker, driver = started(overlap)
    worker.begin_step(StepMetadata(sender_events=[events.BlocksScheduled("t", 32, [[1, 2]])]))
    worker.on_layer_computed("a")
    worker.take_results()
    assert event_names(driver)[-1] == "LayersComputed 2"
    before = len(driver.facts)
    worker.take_results()
    assert len(driver.facts) == before, "said once"


def test_a_step_ends_after_the_layers_of_a_draft() -> None:
    """vLLM takes results between the model's layers and the draft's."""
    worker, driver = started("layer")
    worker._drafts_later = True
    worker.begin_step(StepMetadata(sender_events=[events.BlocksScheduled("t", 32, [[1, 2]])]))
    worker.on_layer_computed("a")
    worker.take_results()
    assert event_names(driver) == ["BlocksScheduled"]
    worker.on_layer_computed("b")
    worker.end_step()
    assert event_names(driver) == ["BlocksScheduled", "LayersComputed 2"]
    worker.take_results()
    assert len(driver.facts) == 2


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("overlap", ["layer", "chunk", "off"])
def test_prompts_of_an_adapter_that_was_read_with_other_files_are_taken_back(
    overlap: Overlap, cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reads it before the layers, and D may have read those of an earlier step."""
    worker, driver = started(overlap)
    monkeypatch.setattr(prompt_digest, "_replaced", set())
    files = ("/a", [("adapter_config.json", 2, 0, 0, 1)])
    monkeypatch.setattr(prompt_digest, "_first_files", dict.fromkeys(("one", "two"), files))
    step(worker, driver, "ab")  # teaches
    driver.facts.clear()
    seen = [
        events.BlocksScheduled(name, 32, [[number]], cached=cached, adapter=adapter)
        for number, (name, adapter) in enumerate({"t": "one", "u": "two", "v": ""}.items(), 1)
    ]
    worker.begin_step(StepMetadata(sender_events=[*seen]))
    prompt_digest._replaced.add("one")
    for layer in ("a", "b"):
        worker.on_layer_computed(layer)
    if not cached:  # some set-ups of vLLM leave it out
        worker.end_step()
    worker.take_results()
    worker.begin_step(StepMetadata(sender_events=[events.PrefillFinished("t")]))
    sender = Sender("p/0", worker._layout)
    for fact in driver.facts:
        sender.handle(fact, 0.0)
        taken_back = sender.transfers["t"].is_recomputed if "t" in sender.transfers else False
        assert taken_back or not sender.transfers["t"].tokens_final
    taken = [fact for fact in driver.facts if isinstance(fact, events.LayersRecomputed)]
    assert {fact.transfer for fact in taken} == {"t"}
    if overlap != "off" or cached:
        assert [sender.transfers[name].tokens_final for name in "uv"] == [32, 32]


def test_cached_blocks_wait_for_the_layers_of_a_draft() -> None:
    """Another request of the same step may compute the blocks of the hit, a draft's layers last."""
    worker, driver = started("layer")
    worker._drafts_later = True
    hit = events.BlocksScheduled("back", 32, [[1, 2]], cached=True)
    worker.begin_step(StepMetadata(sender_events=[hit]))
    worker.take_results()
    assert event_names(driver) == ["BlocksScheduled"]
    worker.end_step()
    assert event_names(driver) == ["BlocksScheduled", "LayersComputed 2"]
    worker.take_results()
    worker.end_step()
    assert len(driver.facts) == 2, "said once"


def test_layers_before_a_draft_are_taken_back_if_the_forward_pass_fails() -> None:
    worker, driver = started("layer")
    worker._drafts_later = True
    worker.begin_step(StepMetadata(sender_events=[events.BlocksScheduled("t", 32, [[2]])]))
    driver.facts.clear()
    with pytest.raises(MemoryError):
        try:
            raise MemoryError
        finally:
            worker.take_results()
    assert driver.facts == [events.LayersRecomputed("t")]
    worker.end_step()
    assert len(driver.facts) == 1


@pytest.mark.parametrize("saves", [True, False])  # with drafts vLLM asks for the results alone
def test_layers_of_a_failed_forward_pass_are_taken_back(saves: bool) -> None:
    """vLLM ends the step in a `finally`, and P runs on for some seconds."""
    worker, driver = started("layer")
    step(worker, driver, "ab")  # teaches
    seen: list[events.ForSender] = [
        events.BlocksScheduled("t", 32, [[2]]),
        events.BlocksScheduled("back", 16, [[3]], cached=True),
    ]
    worker.begin_step(StepMetadata(sender_events=seen))
    worker.on_layer_computed("a")
    driver.facts.clear()
    with pytest.raises(MemoryError):
        try:
            raise MemoryError
        finally:
            if saves:
                worker.end_step()
            worker.take_results()
    assert driver.facts == [events.LayersRecomputed("t"), events.LayersRecomputed("back")]
    driver.facts.clear()
    worker.take_results()
    assert not driver.facts


def test_revoked_blocks_are_submitted_before_the_step_begins() -> None:
    worker, driver = started("layer")
    metadata = StepMetadata(
        sender_events=[events.BlocksScheduled("t", 32, [[1, 2]]), events.BlocksRevoked("gone")]
    )
    worker.revoke_blocks(metadata)
    assert driver.facts == [events.BlocksRevoked("gone")]
    worker.begin_step(metadata)
    assert event_names(driver) == ["BlocksRevoked", "BlocksScheduled", "BlocksRevoked"]


def test_vllm_revokes_blocks_before_it_clears_them() -> None:
    """By `handle_preemptions`, the only hook before the step zeroes and copies blocks."""
    worker, driver = started("layer")
    connector = DisaggConnector.__new__(DisaggConnector)
    connector._worker = worker
    connector.handle_preemptions(
        StepMetadata(sender_events=[events.BlocksRevoked("gone"), events.PrefillFinished("over")])
    )
    assert driver.facts == [events.BlocksRevoked("gone")]


def test_lookup_results_go_to_the_scheduler() -> None:
    worker, driver = started("layer")
    assert worker.take_metadata() is None
    driver.outcomes = [events.LookupResult("x", 32), events.LookupResult("y", 0)]
    assert worker.take_results() == (set(), set(), set())
    ours, theirs = worker.take_metadata(), WorkerMetadata({"x": [16]})
    assert ours is not None and ours.aggregate(theirs).lookup_counts == {"x": [32, 16], "y": [0]}
    assert worker.take_metadata() is None


def test_the_scheduler_learns_when_kv_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock of the day, and neither of failed loads nor of reuse."""
    worker, driver = started("layer")
    monkeypatch.setattr(worker_module.time, "monotonic", lambda: 50.0)
    monkeypatch.setattr(worker_module.time, "time", lambda: 1050.0)
    loads = {"t": "good", "u": "bad", "v": "reused"}
    looked: list[events.ForReceiver] = [events.LookupRequested("v", [], None)]  # type: ignore[arg-type]
    worker.begin_step(StepMetadata(receiver_events=looked, loading_requests=loads))
    driver.outcomes = [
        events.LoadResult("t", None, ended_at=49.5),
        events.LoadResult("u", events.Reason.TRANSFER_STALLED, ended_at=49.5),
        events.LoadResult("v", None, ended_at=49.5),
    ]
    assert worker.take_results()[1] == {"good", "bad", "reused"}
    found = worker.take_metadata()
    assert found is not None and found.landed_at == {"good": 1049.5}
    other = WorkerMetadata({}, {"good": 1049.75, "other": 2.0})
    assert found.aggregate(other).landed_at == {"good": 1049.75, "other": 2.0}
    assert worker.take_metadata() is None


@pytest.mark.parametrize("ends", ["load first", "release first"])
def test_two_legs_of_one_transfer_on_one_engine_stay_separate(ends: str) -> None:
    """Their results belong to different requests, and each id is reported once."""
    worker, driver = started("layer")
    worker.begin_step(
        StepMetadata(
            sender_events=[events.BlocksScheduled("t", 16, [[1]])], serving_requests={"t": "p"}
        )
    )
    wanted = events.LoadRequested("t", [], None, [events.GroupBlocks(0, [2])], 16, 1.0)  # type: ignore[arg-type]
    worker.begin_step(
        StepMetadata(
            sender_events=[events.PrefillFinished("t")],
            receiver_events=[wanted],
            loading_requests={"t": "d"},
        )
    )
    outcomes = [
        events.LoadResult("t", events.Reason.TRANSFER_STALLED),
        events.ReleaseBlocks("t", delivered=False),
    ]
    driver.outcomes = outcomes if ends == "load first" else outcomes[::-1]
    assert worker.take_results() == ({"p"}, {"d"}, {"d"})
    assert worker.take_results() == (set(), set(), set())


@pytest.mark.parametrize("what", ["withdrawn", "unneeded"])
def test_the_end_of_one_leg_leaves_the_other(what: str) -> None:
    worker, driver = started("layer")
    worker.begin_step(StepMetadata(serving_requests={"t": "p"}, loading_requests={"t": "d"}))
    if what == "withdrawn":
        worker.begin_step(StepMetadata(sender_events=[events.BlocksRevoked("t")]))
        assert "t" not in worker._serving_requests, "nothing will end for it"
        driver.outcomes = [events.LoadResult("t", None)]
        assert worker.take_results() == (set(), {"d"}, set())
    else:
        worker.begin_step(StepMetadata(receiver_events=[events.LoadSkipped("t", [], None)]))  # type: ignore[arg-type]
        assert "t" not in worker._loading_requests
        driver.outcomes = [events.ReleaseBlocks("t", delivered=False)]
        assert worker.take_results() == ({"p"}, set(), set())


def test_reused_bytes_are_counted_separately() -> None:
    worker, driver = started("layer")
    for transfer in ("back", "other", "given up"):
        wanted = events.LoadRequested(transfer, [], None, [events.GroupBlocks(0, [1])], 16, 1.0)  # type: ignore[arg-type]
        sought: list[events.ForReceiver] = [events.LoadExpected(transfer, [], None)]  # type: ignore[arg-type]
        if transfer != "other":
            sought = [events.LookupRequested(transfer, [], None)]  # type: ignore[arg-type]
        worker.begin_step(StepMetadata(receiver_events=sought))
        end: Any = events.LoadCancelled(transfer) if transfer == "given up" else wanted
        worker.begin_step(
            StepMetadata(receiver_events=[end], loading_requests={transfer: transfer})
        )
    driver.outcomes = [
        events.LoadResult(transfer, None, bytes_landed=10) for transfer in ("back", "other")
    ]
    assert worker.take_results()[1] == {"back", "other"}
    assert (worker.stats.data["received_bytes"], worker.stats.data["reused_bytes"]) == (20, 10)
    assert not worker._reuse_transfers


class Sums:
    """Replaces `gpu.summing.ComputedSums`."""

    def __init__(self) -> None:
        self.noted: list[str] = []
        self.left_out: list[str] = []

    def note(self, event: events.ForSender) -> None:
        self.noted.append(type(event).__name__)

    def leave_out(self, transfer: str) -> None:
        self.left_out.append(transfer)

    def sum_step(self, transfers: list[str]) -> list[events.BlocksSummed]:
        return [events.BlocksSummed(transfer, 16, []) for transfer in transfers]


def summing(overlap: Overlap) -> tuple[WorkerSide, Recorder, Sums]:
    worker, driver = started(overlap)
    sums = Sums()
    worker._computed_sums = sums  # type: ignore[assignment]
    return worker, driver, sums


@pytest.mark.parametrize("overlap", ["layer", "chunk", "off"])
def test_blocks_are_summed_before_all_layers_are_announced(overlap: Overlap) -> None:
    worker, driver, sums = summing(overlap)
    scheduled = events.BlocksScheduled("t", 16, [[1]])
    worker.begin_step(StepMetadata(sender_events=[scheduled]))
    for layer in ("a", "b"):
        worker.on_layer_computed(layer)
    worker.end_step()
    worker.begin_step(StepMetadata(sender_events=[events.PrefillFinished("t")]))
    assert event_names(driver) == [
        "BlocksScheduled",
        "BlocksSummed []",
        "LayersComputed 2",
        "PrefillFinished",
    ]
    assert sums.noted == ["BlocksScheduled", "PrefillFinished"]


def test_blocks_of_a_prefix_hit_are_summed_when_the_step_ends() -> None:
    worker, driver, _ = summing("layer")
    cached = events.BlocksScheduled("t", 16, [[1]], cached=True)
    worker.begin_step(StepMetadata(sender_events=[cached]))
    worker.end_step()
    assert event_names(driver) == ["BlocksScheduled"]
    worker.take_results()
    assert event_names(driver) == ["BlocksScheduled", "BlocksSummed []", "LayersComputed 2"]


def test_a_prompt_of_a_failed_step_is_summed_no_more() -> None:
    worker, driver, sums = summing("layer")
    worker.begin_step(StepMetadata(sender_events=[events.BlocksScheduled("t", 16, [[1]])]))
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        worker.end_step()
    assert event_names(driver) == ["BlocksScheduled", "LayersRecomputed"]
    assert sums.left_out == ["t"]
