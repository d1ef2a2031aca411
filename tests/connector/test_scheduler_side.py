"""The scheduler's half of the connector: the events that follow from vLLM's calls."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from vllm_disagg.protocol import peers

pytest.importorskip("vllm")

import torch
import transformers
from adapters import adapter, engine_process
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

import vllm_disagg
from kv_connectors import prompt_digest, scheduler
from kv_connectors.data_parallel import SharedServerRank
from kv_connectors.metadata import Handshake
from kv_connectors.scheduler import SchedulerSide, TransferLimits
from vllm_disagg.fleet import grants, keys, used_grants
from vllm_disagg.kv import reshard
from vllm_disagg.kv.layout import uniform
from vllm_disagg.protocol import events, prefill_leg
from vllm_disagg.warning_limit import WARNING_INTERVAL_SECONDS

KEY = keys.FleetKey(b"k" * keys.KEY_BYTES)
BLOCK = 16
HOLDS = uniform(layers=2, block_size=BLOCK, block_bytes=[64])
P_WORKER = peers.WorkerInfo("p/0", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", holds=HOLDS)
BACK, T = "cd" * 16, "ab" * 16
NEAR = "tcp://127.0.0.1:1"
PLAN, NOBODY = reshard.plan([HOLDS], [HOLDS]), reshard.nothing(1, 1)
GROUPS: Any = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK))]


def side(role: str, groups: Any = GROUPS, key: keys.FleetKey = KEY, **more: Any) -> SchedulerSide:
    made = SchedulerSide(key, role, {"dtype": "bf16"}, groups, **more)
    made.set_workers(
        [
            Handshake(
                peers.WorkerInfo("me/0", "tcp://127.0.0.1:3", "tcp://127.0.0.1:4", holds=HOLDS),
                ["a", "b"],
            )
        ]
    )
    return made


def test_an_engine_states_the_releases_by_which_its_facts_were_made() -> None:
    engine = side("both").engine
    assert engine is not None and engine.release == vllm_disagg.__version__
    assert engine.transformers == transformers.__version__


def request(
    leg: str, engine: SchedulerSide | None, length: int = 40, name: str = "r1", **change: Any
) -> SimpleNamespace:
    incarnation = engine.engine.incarnation if engine and engine.engine else "nobody"
    values: dict[str, Any] = (
        {"sources": change.pop("sources", [P_WORKER])} if leg == "decode" else {}
    )
    if back := change.pop("back", None):
        values = {
            "sources": values.get("sources") or change.pop("sources", [P_WORKER]),
            "back": back,
        }
    values["until"] = change.pop("until", 60.0 + (engine.clock if engine else 0.0))
    incarnation = change.pop("incarnation", incarnation)
    grant = grants.Grant(2, leg, change.pop("transfer", "ab" * 16), incarnation, **values)  # type: ignore[arg-type]
    token = grants.mint(change.pop("key", KEY), grant)
    fields: dict[str, Any] = {
        "request_id": name,
        "kv_transfer_params": {grants.REQUEST_KEY: token},
        "num_prompt_tokens": length,
        "prompt_token_ids": [0] * length,
        "status": SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
        "prompt_embeds": None,
        "arrival_time": 0.0,
        "mm_features": [],
        "lora_request": None,
        "sampling_params": SimpleNamespace(n=1),
        "max_tokens": 1 if leg == "prefill" else 16,
    }
    return SimpleNamespace(**fields | change)


OF_40, OF_70 = (prompt_digest.digest_prompt(request("probe", None, length)) for length in (40, 70))  # type: ignore[arg-type]


def step(
    new: dict[str, tuple[int, int, list[int]]] | None = None,
    cached: Any = None,
    preempted: Any = None,
) -> SimpleNamespace:
    """Returns vLLM's output; `new`, `cached`: id -> (computed before, scheduled, block ids)."""
    new, cached = new or {}, cached or {}
    counts = {name: n for name, (_, n, _) in {**new, **cached}.items()}
    return SimpleNamespace(
        preempted_req_ids=preempted,
        scheduled_spec_decode_tokens={},
        num_scheduled_tokens=counts,
        total_num_scheduled_tokens=sum(counts.values()),
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=c, block_ids=(b,))
            for name, (c, _, b) in new.items()
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(cached),
            num_computed_tokens=[c for c, _, _ in cached.values()],
            new_block_ids=[(b,) if b else None for _, _, b in cached.values()],
        ),
    )


def test_a_prefill_leg_in_chunks() -> None:
    p = side("prefill")
    asked = request("prefill", p)
    assert p.tokens_to_load(asked, 0) == 0
    first = p.build_step_metadata(step(new={"r1": (0, 20, [7, 8])}))
    assert first.sender_events == [events.BlocksScheduled("ab" * 16, 20, [[7, 8]], prompt=OF_40)]
    assert first.serving_requests == {"ab" * 16: "r1"} and not first.loading_requests
    assert p.build_step_metadata(step(cached={"r1": (20, 20, [9])})).sender_events == [
        events.BlocksScheduled("ab" * 16, 40, [[9]], prompt=OF_40)
    ]
    assert p.build_step_metadata(step(cached={"r1": (40, 1, [])})).sender_events == [], (
        "what follows the prompt is no business of D"
    )
    keep, answer = p.on_request_finished(asked)
    assert keep and answer is not None and answer[grants.ANSWER_KEY]["role"] == "prefill"
    assert p.build_step_metadata(step()).sender_events == [events.PrefillFinished("ab" * 16)]


@pytest.mark.parametrize("end", ["abort", "preempt", "early"])
def test_a_prefill_leg_that_loses_its_blocks_keeps_nothing(end: str) -> None:
    p = side("prefill")
    asked = request("prefill", p)
    p.tokens_to_load(asked, 0)
    p.build_step_metadata(step(new={"r1": (0, 20 if end == "early" else 40, [7, 8, 9])}))
    if end == "preempt":
        assert p.build_step_metadata(step(preempted={"r1"})).sender_events == [
            events.BlocksRevoked("ab" * 16)
        ]
        assert p.build_step_metadata(step(cached={"r1": (0, 40, [1, 2, 3])})).sender_events == [], (
            "computed again, but not for D"
        )
    elif end == "abort":
        asked.status.name = "FINISHED_ABORTED"
    keep, _ = p.on_request_finished(asked)
    assert not keep
    assert p.build_step_metadata(step()).sender_events == (
        [] if end == "preempt" else [events.BlocksRevoked("ab" * 16)]
    )


def test_a_decode_leg_loads_what_its_own_cache_lacks() -> None:
    d = side("decode")
    asked = request("decode", d)
    assert d.tokens_to_load(asked, 16) == 24
    assert d.tokens_to_load(asked, 16) == 24, "asked again until there is room"
    d.on_blocks_allocated(asked, ([4, 5, 6],), 24)
    (wanted,) = d.build_step_metadata(step()).receiver_events
    assert wanted == events.LoadRequested(
        "ab" * 16, [P_WORKER], PLAN, [events.GroupBlocks(16, [5, 6])], 40, 60.0, OF_40
    )
    assert d.tokens_to_load(asked, 0) == 0, (
        "loaded once; after a failure or a preemption it is recomputed"
    )
    d.on_blocks_allocated(asked, ([4, 5, 6],), 0)
    d.on_load_finished("r1")
    assert d.on_request_finished(asked) == (False, None)
    assert d.build_step_metadata(step()).receiver_events == []


def test_a_request_without_room_yields_after_a_step_that_computes_nothing() -> None:
    d = side("decode")
    asked = request("decode", d)
    d.on_blocks_allocated(asked, ([4, 5, 6],), d.tokens_to_load(asked, 0) or 0)
    d.on_load_finished("r1")
    ordinary = request("decode", d, name="r2", kv_transfer_params=None)
    d.build_step_metadata(step(new={"r3": (0, 40, [7, 8, 9])}))
    assert d.tokens_to_load(ordinary, 0) == 0
    d.build_step_metadata(step())
    assert d.tokens_to_load(ordinary, 0) is None


def test_a_probe_gets_the_description_in_every_role() -> None:
    for role in ("prefill", "decode", "both"):
        engine = side(role)
        keep, answer = engine.on_request_finished(request("probe", engine))
        assert not keep and answer is not None
        layout = answer[grants.ANSWER_KEY]["layout"]
        assert (
            layout["dtype"] == "bf16" and layout["KV of a token"] == "2 layers of 1 heads of bytes"
        )
        said = engine.build_step_metadata(step())
        assert not said.serving_requests and not said.loading_requests


def test_a_probe_without_an_engine_gets_a_card_without_addresses(
    clock: list[float],
) -> None:
    engine = side("decode")
    assert engine.engine is not None
    clock[0] += 7
    expected = {"incarnation": engine.engine.incarnation, "clock": 7.0, "rank": None}
    asked = request("probe", None, incarnation="", until=0.0)
    assert engine.on_request_finished(asked) == (False, {grants.ANSWER_KEY: expected})
    assert engine.on_request_finished(asked) == (False, {grants.ANSWER_KEY: expected}), (
        "it has no end"
    )
    named = request("probe", engine)
    answer = engine.on_request_finished(named)[1]
    assert (
        answer
        and answer[grants.ANSWER_KEY]["clock"] == 7.0
        and answer[grants.ANSWER_KEY]["workers"]
    )
    for again in (
        request("probe", engine, until=6.9),
        request("probe", None),
        request("probe", engine, until=1e6),
    ):
        assert engine.on_request_finished(again) == (False, {grants.ANSWER_KEY: expected}), (
            "ended, another engine's, never to end"
        )


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_grant_expires_by_the_engines_clock_and_works_once(
    leg: str, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = side(leg)
    names = iter(range(1000))

    def accepted(**change: Any) -> bool:
        name = f"r{next(names)}"
        engine.tokens_to_load(request(leg, engine, name=name, **change), 0)
        return not engine._admitted[name].is_refused

    clock[0] += 100
    first = {"transfer": "01" * 16, "until": 130.0}
    assert accepted(**first) and not accepted(**first)
    for at in range(200):
        assert accepted(transfer=f"{at:032x}", until=110.0)
    assert not accepted(**first), "whatever has come since"
    clock[0] += 29.9
    assert not accepted(**first)
    clock[0] += 0.2
    assert not accepted(**first), "ended"
    assert not accepted(transfer="02" * 16, until=130.0) and accepted(
        transfer="02" * 16, until=131.0
    )
    assert not accepted(transfer="03" * 16, until=130.1 + grants.MAX_VALIDITY_SECONDS + 1), (
        "it would have to be remembered so long"
    )
    monkeypatch.setattr(used_grants, "MAX_USED_GRANTS", 2)
    assert accepted(transfer="04" * 16, until=131.0) and not accepted(
        transfer="05" * 16, until=131.0
    ), "no room"
    assert not accepted(transfer="02" * 16, until=131.0), "none is forgotten to make room"
    clock[0] += 1
    assert accepted(transfer="05" * 16, until=140.0)


def test_a_prefill_leg_with_an_invalid_grant_gets_a_card(clock: list[float]) -> None:
    """The answer carries the engine's clock, so that the next grant is valid."""
    p = side("prefill")
    clock[0] += 100
    for name, change in (("r1", {"until": 99.0}), ("r2", {"incarnation": "of before"})):
        asked = request("prefill", p, name=name, **change)
        p.on_request_arrived(asked)
        assert p.tokens_to_load(asked, 0) == 0
        p.on_blocks_allocated(asked, ([1, 2, 3],), 0)
        assert p.build_step_metadata(step(new={name: (0, 40, [7, 8, 9])})).sender_events == []
        assert p.engine is not None
        expected = {
            grants.ANSWER_KEY: {"incarnation": p.engine.incarnation, "clock": 100.0, "rank": None}
        }
        assert p.on_request_finished(asked) == (False, expected) and not p._admitted


def refused() -> list[tuple[str, Any]]:
    d = side("decode")
    good = request("decode", d).kv_transfer_params[grants.REQUEST_KEY]
    shapes: list[Any] = [
        None,
        [],
        "x",
        5,
        {},
        {"do_remote_prefill": True},
        {grants.REQUEST_KEY: None},
    ]
    shapes += [
        {grants.REQUEST_KEY: x} for x in (5, [], {}, "", ".", "a.b", good[:-2], good + "x", "é")
    ]
    return [(repr(shape)[:40], shape) for shape in shapes]


@pytest.mark.parametrize(("_", "params"), refused())
def test_other_kv_transfer_params_are_ignored(_: str, params: Any) -> None:
    d = side("decode")
    asked = request("decode", d, kv_transfer_params=params)
    assert d.tokens_to_load(asked, 0) == 0
    d.on_blocks_allocated(asked, ([1, 2, 3],), 0)
    keeps_blocks, answer = d.on_request_finished(asked)
    assert not keeps_blocks
    assert answer is None or answer[grants.ANSWER_KEY].keys() == {grants.REFUSED_KEY}
    metadata = d.build_step_metadata(step())
    assert (
        not metadata.sender_events
        and not metadata.receiver_events
        and not metadata.serving_requests
        and not metadata.loading_requests
    )


OTHER_BLOCKS = peers.WorkerInfo(
    "p/1", NEAR, NEAR, holds=uniform(layers=2, block_size=2 * BLOCK, block_bytes=[128])
)


FAR = {
    "tcp://198.51.100.7:9999": "not loopback",
    "tcp://169.254.169.254:80": "link-local",
    "tcp://metadata:80": "IP address",
}


@pytest.mark.parametrize("leg", ["decode", "prefill"])
def test_forbidden_addresses_are_not_dialled(leg: str) -> None:
    """A prefill leg only loses bidirectional KV reuse from these addresses; it serves D."""
    for to in FAR:
        engine = side(leg)
        grant = grants.Grant(
            2,
            leg,
            T,
            engine.engine.incarnation,
            [peers.WorkerInfo("p/0", NEAR, to, holds=HOLDS)],  # type: ignore
            back=BACK,
            until=60.0,
        )
        asked = request(
            leg, engine, length=70, kv_transfer_params={grants.REQUEST_KEY: grants.mint(KEY, grant)}
        )
        engine.on_request_arrived(asked)
        assert engine.tokens_to_load(asked, 0) == 0
        engine.on_blocks_allocated(asked, ([4, 5, 6],), 0)
        said = engine.build_step_metadata(step())
        assert not said.receiver_events and not said.loading_requests and not said.sender_events
        assert list(said.serving_requests) == ([T] if leg == "prefill" else [])


def test_one_engine_is_not_both_engines_of_a_request() -> None:
    """An engine does not read back from itself either.

    D's leg is an ordinary request, separate from P's.
    """
    both = side("both")
    me = peers.WorkerInfo("me/0", NEAR, NEAR, holds=HOLDS)
    p, d = request("prefill", both, name="p"), request("decode", both, name="d", sources=[me])
    assert both.tokens_to_load(p, 0) == both.tokens_to_load(d, 0) == 0
    said = both.build_step_metadata(step(new={"p": (0, 40, [4, 5, 6])}))
    assert (
        said.serving_requests == {T: "p"} and not said.loading_requests and not said.receiver_events
    )
    back = request("prefill", both, name="b", transfer="ef" * 16, back=BACK, sources=[me])
    both.on_request_arrived(back)
    said = both.build_step_metadata(step())
    assert (
        not said.receiver_events
        and not said.serving_requests
        and said.sender_events == [events.BlocksRevoked("ef" * 16)]
    )


def test_an_engine_on_a_public_address_dials_other_machines() -> None:
    far = peers.WorkerInfo("p/0", "tcp://10.0.0.1:1", "tcp://10.0.0.1:2", holds=HOLDS)
    made = SchedulerSide(KEY, "decode", {}, GROUPS, host="10.0.0.2")
    made.set_workers([Handshake(peers.WorkerInfo("me/0", "", "", holds=HOLDS), ["a", "b"])])
    assert made.tokens_to_load(request("decode", made, sources=[far]), 0) == 40
    assert side("decode").tokens_to_load(request("decode", side("decode"), sources=[far]), 0) == 0


@pytest.mark.parametrize("insecure", [False, True])
def test_without_a_key_grants_are_valid_only_if_insecure(
    insecure: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)  # after the first refusal the others are no warnings
    nobody = keys.FleetKey(None)
    made = SchedulerSide(
        keys.FleetKey(None, insecure=insecure), "decode", {}, GROUPS, host="10.0.0.2"
    )
    made.set_workers([Handshake(peers.WorkerInfo("me/0", "", "", holds=HOLDS), ["a", "b"])])
    logging.getLogger("vllm_disagg").propagate = True
    assert made.tokens_to_load(request("decode", made, key=nobody), 0) == (40 if insecure else 0)
    answer = made.on_request_finished(request("probe", None, name="r2", key=nobody))[1]
    assert answer is not None
    assert (grants.REFUSED_KEY in answer[grants.ANSWER_KEY]) == (not insecure)
    far = peers.WorkerInfo("p/0", "tcp://10.0.0.1:1", NEAR, holds=HOLDS)
    assert (
        made.tokens_to_load(
            request("decode", made, key=nobody, name="r3", transfer=BACK, sources=[far]), 0
        )
        == 0
    )
    assert ("not loopback" if insecure else "no fleet key") in caplog.text


def test_stages_of_a_pipeline_are_numbered_on() -> None:
    """Two ranks hold the first layers, two others the rest."""
    made = SchedulerSide(KEY, "prefill", {}, GROUPS)
    worker = peers.WorkerInfo("w", "", "", holds=HOLDS)
    made.set_workers(
        [Handshake(worker, names) for names in (["a", "b"], ["a", "b"], ["c", "d"], ["c", "d"])]
    )
    assert made.engine is not None
    assert [w.holds.first for w in made.engine.workers] == [0, 0, 2, 2]
    assert made.engine.layout["KV of a token"].startswith("4 layers of")


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ([OTHER_BLOCKS], "blocks of 32 tokens, 128 bytes at P and of 16 tokens, 64 bytes at D"),
        ([P_WORKER, P_WORKER], "names one worker twice"),
        ([peers.WorkerInfo("me/0", NEAR, NEAR, holds=HOLDS)], "own workers"),
        ([P_WORKER, peers.WorkerInfo("me/0", NEAR, NEAR, holds=HOLDS)], "own workers"),
        *[([peers.WorkerInfo("p/0", to, to, holds=HOLDS)], words) for to, words in FAR.items()],
        *[([peers.WorkerInfo("p/0", NEAR, to, holds=HOLDS)], words) for to, words in FAR.items()],
        (
            [peers.WorkerInfo("p/0", NEAR, NEAR, "ipc:///run/docker.sock", holds=HOLDS)],
            "local address",
        ),
    ],
)
def test_unreadable_sources_are_refused_with_a_reason(
    sources: list[peers.WorkerInfo], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    d = side("decode")
    grant = grants.Grant(2, "decode", "cd" * 16, d.engine.incarnation, sources, until=60.0)  # type: ignore[union-attr]
    asked = request("decode", d, kv_transfer_params={grants.REQUEST_KEY: grants.mint(KEY, grant)})
    logging.getLogger("vllm_disagg").propagate = True
    assert d.tokens_to_load(asked, 0) == 0
    assert words in caplog.text


def test_grants_of_others_are_refused() -> None:
    d = side("decode")
    two = request("decode", d)
    two.kv_transfer_params = {
        grants.REQUEST_KEY: grants.mint(
            KEY,
            grants.Grant(2, "decode", "cd" * 16, d.engine.incarnation, [OTHER_BLOCKS], until=60.0),  # type: ignore
        )
    }
    for asked in (
        request("decode", None),
        request("decode", d, incarnation=""),
        request("prefill", d),
        request("decode", d, key=keys.FleetKey(b"x" * keys.KEY_BYTES)),
        request("decode", d, prompt_token_ids=None),
        two,
    ):
        asked.request_id = f"r{len(d._admitted)}"  # not one that is known as refused
        assert d.tokens_to_load(asked, 0) == 0


def test_each_request_has_a_line_when_it_arrives(caplog: pytest.LogCaptureFixture) -> None:
    """An engine that dies a moment later has named it already."""
    d = side("decode")
    with caplog.at_level(logging.INFO, "vllm_disagg.scheduler"):
        d.on_request_arrived(request("decode", d, name="cmpl-one"))
        d.on_request_arrived(request("decode", d, name="cmpl-two", kv_transfer_params=None))
    transfer = "ab" * 16
    assert f"request cmpl-one: decode leg of transfer {transfer}\n" in caplog.text
    assert "request cmpl-two: no grant; this engine computes it alone" in caplog.text


def test_a_token_that_is_no_grant_is_answered_with_the_reason() -> None:
    """So the proxy can tell an engine with another key from one without the connector."""
    d = side("decode")
    asked = request("decode", d, key=keys.FleetKey(b"x" * keys.KEY_BYTES))
    assert d.tokens_to_load(asked, 0) == d.tokens_to_load(asked, 0) == 0
    expected = {grants.ANSWER_KEY: {grants.REFUSED_KEY: "minted with another key"}}
    assert d.on_request_finished(asked) == (False, expected)
    plain = request("decode", d, name="r2", kv_transfer_params={"do_remote_prefill": True})
    assert d.on_request_finished(plain) == (False, None)


def test_a_grant_works_once() -> None:
    d = side("decode")
    assert d.tokens_to_load(request("decode", d), 0) == 40
    assert d.tokens_to_load(request("decode", d, name="r2"), 0) == 0
    assert d.tokens_to_load(request("decode", d, name="r3", transfer="cd" * 16), 0) == 40


def test_a_second_handshake_forgets_no_used_grant() -> None:
    d = side("decode")
    assert d.tokens_to_load(request("decode", d), 0) == 40
    before = d.engine
    d.set_workers([Handshake(msgspec.structs.replace(P_WORKER, name="me/0"), ["a", "b"])])
    assert before and d.engine and d.engine.incarnation == before.incarnation
    assert d.tokens_to_load(request("decode", d, name="r2"), 0) == 0


# Several KV-cache groups --------------------------------------------------------------------------
HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.bfloat16}
FULL = SimpleNamespace(kv_cache_spec=FullAttentionSpec(block_size=BLOCK, **HEADS))
WINDOW = SimpleNamespace(
    kv_cache_spec=SlidingWindowSpec(block_size=BLOCK, sliding_window=20, **HEADS)
)
STATE = SimpleNamespace(
    kv_cache_spec=MambaSpec(block_size=2048, shapes=((4,),), dtypes=(torch.float32,))
)


def test_with_a_window_the_last_token_and_the_blocks_before_the_window_are_left_out() -> None:
    d = side("decode", [FULL, WINDOW])
    asked = request("decode", d, length=70)
    assert d.tokens_to_load(asked, 16) == 53
    d.on_blocks_allocated(asked, ([4, 5, 6, 7, 8], [0, 0, 0, 9, 10]), 53)
    (wanted,) = d.build_step_metadata(step()).receiver_events
    assert wanted.token_end == 69
    assert wanted.blocks == [events.GroupBlocks(16, [5, 6, 7, 8]), events.GroupBlocks(48, [9, 10])]


MORE: list[dict[str, Any]] = [
    {"max_tokens": 3},
    {"sampling_params": None},
    {"sampling_params": SimpleNamespace(n=2)},
]


@pytest.mark.parametrize("more", [*MORE, {"resumable": True}], ids=str)
@pytest.mark.parametrize("groups", [[FULL, WINDOW], [STATE]], ids=["window", "state"])
def test_with_windows_or_states_a_longer_prefill_leg_is_not_transferred(
    groups: Any, more: dict[str, Any]
) -> None:
    """vLLM would compute a second token and cache it under the hash of the one left out.

    D is informed.
    """
    p = side("prefill", groups)
    asked = request("prefill", p, **more)
    asked._all_token_ids = list(asked.prompt_token_ids)
    p.on_request_arrived(asked)
    assert p.tokens_to_load(asked, 0) == 0
    assert asked.num_prompt_tokens == len(asked.prompt_token_ids) == len(asked._all_token_ids) == 40
    scheduled = step(new={"r1": (0, 40, [])})
    scheduled.scheduled_new_reqs[0].block_ids = tuple([4, 5, 6] for _ in groups)
    assert p.build_step_metadata(scheduled).sender_events == [events.BlocksRevoked(T)]
    assert not p.on_request_finished(asked)[0] and p.build_step_metadata(step()).sender_events == []


@pytest.mark.parametrize(
    ("drafts", "seed", "temperature", "loads"),
    [
        (True, 1, 1.0, False),
        (True, 1, 0.0, True),
        (True, None, 1.0, True),
        (False, 1, 1.0, True),
    ],
)
def test_a_seed_beside_drafts_is_computed_here(
    caplog: pytest.LogCaptureFixture,
    drafts: bool,
    seed: int | None,
    temperature: float,
    loads: bool,
) -> None:
    sampling = SimpleNamespace(n=1, seed=seed, temperature=temperature)
    d = side("decode")
    p = side("prefill")
    for engine in (d, p) if drafts else ():
        engine.compute_seeded_requests()
    asked = request("decode", d, sampling_params=sampling)
    assert bool(d.tokens_to_load(asked, 0)) is loads
    assert ("a seed has an effect only" in caplog.text) is not loads
    asked = request("prefill", p, sampling_params=sampling)
    p.tokens_to_load(asked, 0)
    p.build_step_metadata(step(new={"r1": (0, 40, [7, 8, 9])}))
    keeps, _ = p.on_request_finished(asked)
    assert keeps is loads


def test_without_windows_a_prefill_leg_may_go_on() -> None:
    p = side("prefill")
    asked = request("prefill", p, max_tokens=3)
    p.tokens_to_load(asked, 0)
    assert p.build_step_metadata(step(new={"r1": (0, 40, [7, 8, 9])})).sender_events == [
        events.BlocksScheduled(T, 40, [[7, 8, 9]], prompt=OF_40, writes_more=True)
    ]


@pytest.mark.parametrize("has_hook", [True, False])
def test_blocks_are_compared_only_if_p_computes_no_token_that_d_leaves_out(has_hook: bool) -> None:
    """Without vLLM's hook before the lookup, P computes the whole prompt.

    A step may end before its last token: D reads the last block then, and P writes into it later.
    """
    p = side("prefill", [FULL, WINDOW])
    asked = request("prefill", p)
    asked._all_token_ids = list(asked.prompt_token_ids)
    if has_hook:
        p.on_request_arrived(asked)
    p.tokens_to_load(asked, 0)
    scheduled = step(new={"r1": (0, 30, [])})
    scheduled.scheduled_new_reqs[0].block_ids = ([4, 5], [6, 7])
    (event,) = p.build_step_metadata(scheduled).sender_events
    assert isinstance(event, events.BlocksScheduled)
    assert asked.num_prompt_tokens == (39 if has_hook else 40)
    assert event.writes_more == (not has_hook)


def test_with_a_window_a_load_takes_the_block_in_which_the_last_token_is_first() -> None:
    d = side("decode", [FULL, WINDOW])
    assert d.tokens_to_load(request("decode", d, length=4 * BLOCK + 1), 0) == 4 * BLOCK + 1


def test_with_a_window_a_prompt_of_one_token_is_not_loaded() -> None:
    d = side("decode", [FULL, WINDOW])
    asked = request("decode", d, length=1)
    assert d.tokens_to_load(asked, 0) == 0
    d.on_blocks_allocated(asked, ([4], [5]), 0)
    assert isinstance(d.build_step_metadata(step()).receiver_events[0], events.LoadSkipped)


def test_with_a_state_p_computes_all_tokens_but_the_last() -> None:
    p, d = side("prefill", [STATE]), side("decode", [STATE])
    asked = request("prefill", p, length=40)
    asked._all_token_ids = list(asked.prompt_token_ids)
    p.tokens_to_load(asked, 0)
    p.tokens_to_load(asked, 0)  # asked again until there is room
    assert asked.num_prompt_tokens == len(asked.prompt_token_ids) == len(asked._all_token_ids) == 39
    p.build_step_metadata(step(new={"r1": (0, 39, [7])}))
    assert p.on_request_finished(asked)[0], "kept for D"
    other = request("decode", d, length=40)
    assert d.tokens_to_load(other, 0) == 39
    d.on_blocks_allocated(other, ([3],), 39)
    (wanted,) = d.build_step_metadata(step()).receiver_events
    assert (wanted.token_end, wanted.blocks) == (39, [events.GroupBlocks(0, [3])])


def test_the_description_has_the_data_parallel_rank() -> None:
    made = SchedulerSide(KEY, "decode", {}, GROUPS, rank=SharedServerRank(1, 5))
    made.set_workers([Handshake(P_WORKER, ["a", "b"])])
    assert made.engine is not None and (made.engine.rank, made.engine.label) == (1, 5)
    alone = side("decode").engine
    assert alone is not None and (alone.rank, alone.label) == (None, None)


# Bidirectional reuse ------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replaces the time: the first number is now; each sleep appends its seconds."""
    now = [100.0]
    monkeypatch.setattr(
        scheduler,
        "time",
        SimpleNamespace(monotonic=lambda: now[0], time=lambda: 0.0, sleep=now.append),
    )
    return now


def test_a_step_sleeps_only_if_it_computes_nothing_and_a_leg_waits(clock: list[float]) -> None:
    d = side("decode")
    asked = request("decode", d)
    d.on_blocks_allocated(asked, ([4, 5, 6],), d.tokens_to_load(asked, 0) or 0)
    d.build_step_metadata(step(new={"another": (0, 16, [7])}))
    assert clock[1:] == []
    d.build_step_metadata(step())
    assert clock[1:] == [scheduler.IDLE_STEP_SLEEP_SECONDS]
    d.on_load_finished("r1")
    d.build_step_metadata(step())
    assert clock[1:] == [scheduler.IDLE_STEP_SLEEP_SECONDS]


def test_p_is_asked_to_keep_a_prompt_while_d_has_no_room(clock: list[float]) -> None:
    d = side("decode")
    d.on_request_arrived(request("decode", d))
    found = []
    for clock[0] in (100.0, 102.0, 104.0, 106.0, 108.0):
        busy = d.build_step_metadata(step(new={"another": (0, 16, [7])}))
        found.append([type(event) for event in busy.receiver_events])
    assert found == [[events.LoadExpected], [], [events.LoadExpected], [], [events.LoadExpected]]


def test_a_rank_that_waits_for_kv_keeps_no_other_rank_waiting(clock: list[float]) -> None:
    """Ranks in step wait for its dummy batch, which comes after this step."""
    d = side("decode", limits=TransferLimits(may_sleep=False))
    asked = request("decode", d)
    d.on_blocks_allocated(asked, ([4, 5, 6],), d.tokens_to_load(asked, 0) or 0)
    d.build_step_metadata(step())
    assert d._legs.waits_for_kv and clock[1:] == []


def arrived(p: SchedulerSide) -> Any:
    """Returns a prefill leg that may reuse KV, after its arrival."""
    asked = request("prefill", p, length=70, back=BACK)
    p.on_request_arrived(asked)
    return asked


def test_a_prefill_leg_looks_up_reads_back_and_computes_the_rest(clock: list[float]) -> None:
    p = side("prefill")
    asked = arrived(p)
    assert p.tokens_to_load(asked, 16) is None, "ask again"
    assert p.build_step_metadata(step()).receiver_events == [
        events.LookupRequested(BACK, [P_WORKER], PLAN, OF_70)
    ]
    assert (
        p.tokens_to_load(asked, 16) is None and p.build_step_metadata(step()).receiver_events == []
    ), "asked once"
    p.on_lookup_counts({BACK: [64], "of another": [16]})
    assert p.tokens_to_load(asked, 16) == 48
    assert p.tokens_to_load(asked, 32) == 32, "no room yet, and more is cached here by now"
    p.on_blocks_allocated(asked, ([4, 5, 6, 7],), 32)
    metadata = p.build_step_metadata(step())
    assert metadata.receiver_events == [
        events.LoadRequested(
            BACK,
            [P_WORKER],
            PLAN,
            [events.GroupBlocks(32, [6, 7])],
            64,
            prefill_leg.REUSE_STALL_SECONDS,
            OF_70,
        )
    ]
    assert metadata.loading_requests == {BACK: "r1"}
    p.on_load_finished("r1")
    first = p.build_step_metadata(step(new={"r1": (64, 6, [4, 5, 6, 7, 8])}))
    assert (
        first.sender_events == [events.BlocksScheduled(T, 70, [[4, 5, 6, 7, 8]], prompt=OF_70)]
        and not first.receiver_events
    )
    assert p.on_request_finished(asked)[0] and not p.build_step_metadata(step()).receiver_events, (
        "nothing is open any more that could be cancelled"
    )


@pytest.mark.parametrize("groups", [[FULL, WINDOW], [STATE]])
def test_windows_and_states_have_no_bidirectional_reuse(groups: Any) -> None:
    p, d = side("prefill", groups), side("decode", groups)
    assert p.engine and not p.engine.two_way
    asked = request("prefill", p, back=BACK)
    asked._all_token_ids = list(asked.prompt_token_ids)
    p.on_request_arrived(asked)
    assert p.tokens_to_load(asked, 0) == 0
    other = request("decode", d, length=70, back=BACK)
    d.tokens_to_load(other, 16)
    d.on_blocks_allocated(other, tuple([4, 5, 6, 7, 8] for _ in groups), 53)
    assert (
        not p.build_step_metadata(step()).receiver_events
        and not d.build_step_metadata(step()).sender_events
    )


@pytest.mark.parametrize("sources", [[], [OTHER_BLOCKS]])
def test_a_prefill_leg_with_unreadable_sources_runs_without_reuse(sources: Any) -> None:
    p = side("prefill")
    asked = request("prefill", p, back=BACK, sources=sources)
    p.on_request_arrived(asked)
    assert p.tokens_to_load(asked, 0) == 0
    p.on_blocks_allocated(asked, ([4, 5, 6],), 0)
    metadata = p.build_step_metadata(step(new={"r1": (0, 40, [4, 5, 6])}))
    assert not metadata.receiver_events and metadata.sender_events == [
        events.BlocksScheduled(T, 40, [[4, 5, 6]], prompt=OF_40)
    ]


def test_refused_reuse_is_a_warning_a_minute_and_lines_below_it(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """A pair whose KV does not fit refuses it in each later turn."""
    caplog.set_level(logging.INFO)
    p = side("prefill")

    def arrive(turn: int) -> None:
        transfer, back = f"{turn:032x}", f"{turn + 16:032x}"
        change = {"name": f"r{turn}", "transfer": transfer, "sources": [OTHER_BLOCKS]}
        p.on_request_arrived(request("prefill", p, back=back, **change))

    p.on_request_arrived(request("prefill", p, name="r0", incarnation="b"))  # its own warning
    for turn in (1, 2, 3):
        arrive(turn)
    clock[0] += WARNING_INTERVAL_SECONDS
    arrive(4)
    lines = [record for record in caplog.records if "is not reused" in record.getMessage()]
    levels = [logging.WARNING, logging.INFO, logging.INFO, logging.WARNING]
    assert [record.levelno for record in lines] == levels
    texts = [record.getMessage() for record in lines]
    assert all(f"transfer {turn:032x}: " in text for turn, text in enumerate(texts, 1))
    assert texts[3].endswith("(2 more since the last warning)") and "more" not in texts[0]


def test_the_description_has_bidirectional_reuse() -> None:
    made = SchedulerSide(
        KEY, "decode", {}, GROUPS, limits=TransferLimits(bidirectional_reuse=False)
    )
    made.set_workers([Handshake(peers.WorkerInfo("me/0", "", "", holds=HOLDS), ["a", "b"])])
    assert made.engine and not made.engine.two_way and side("decode").engine.two_way  # type: ignore[union-attr]


def test_the_description_has_the_failure_policy() -> None:
    made = SchedulerSide(KEY, "decode", {}, GROUPS)
    worker = peers.WorkerInfo("me/0", "", "", holds=HOLDS)
    made.set_workers([Handshake(worker, ["a", "b"])], "fail")
    assert made.engine and made.engine.failure_policy == "fail"


@pytest.mark.parametrize("computes_last_token", [True, False])
def test_the_description_says_whether_prefills_compute_the_last_token(
    computes_last_token: bool,
) -> None:
    groups = GROUPS if computes_last_token else [FULL, WINDOW]
    made = SchedulerSide(KEY, "prefill", {}, groups)
    worker = peers.WorkerInfo("me/0", "", "", holds=HOLDS)
    made.set_workers([Handshake(worker, ["a", "b"])])
    assert made.engine and made.engine.computes_last_token is computes_last_token


def test_a_description_of_an_older_engine_is_of_one_that_may_leave_it_out() -> None:
    known = {"incarnation": "i", "role": "prefill", "workers": [], "layout": {}}
    assert not msgspec.convert(known, peers.EngineInfo).computes_last_token


@pytest.mark.parametrize("plain_chat", [True, False])
def test_the_description_says_whether_chats_are_plain(plain_chat: bool) -> None:
    made = SchedulerSide(KEY, "decode", {}, GROUPS)
    worker = peers.WorkerInfo("me/0", "", "", holds=HOLDS)
    made.set_workers([Handshake(worker, ["a", "b"])], plain_chat=plain_chat)
    assert made.engine and made.engine.plain_chat is plain_chat


@pytest.mark.parametrize("drains", [True, False])
def test_the_description_says_whether_running_requests_finish(drains: bool) -> None:
    made = SchedulerSide(KEY, "decode", {}, GROUPS)
    worker = peers.WorkerInfo("me/0", "", "", holds=HOLDS)
    made.set_workers([Handshake(worker, ["a", "b"])], drains=drains)
    assert made.engine and made.engine.drains is drains


def test_a_lookup_starts_at_arrival_and_its_limit_at_the_first_turn(
    clock: list[float],
) -> None:
    p = side("prefill")
    asked = arrived(p)
    assert p.build_step_metadata(step()).receiver_events == [
        events.LookupRequested(BACK, [P_WORKER], PLAN, OF_70)
    ]
    clock[0] += 10  # in the queue
    assert p.tokens_to_load(asked, 0) is None
    clock[0] += prefill_leg.REUSE_LOOKUP_SECONDS / 2
    assert p.tokens_to_load(asked, 0) is None
    p.on_lookup_counts({BACK: [64]})
    assert p.tokens_to_load(asked, 0) == 64 and p.build_step_metadata(step()).receiver_events == []


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_reuse_transfer_is_used_once_and_differs_from_the_main_one(role: str) -> None:
    engine = side(role)
    for name, transfer, back in (
        ("r1", "01" * 16, BACK),
        ("r2", "02" * 16, BACK),
        ("r3", "03" * 16, "03" * 16),
    ):
        asked = request(role, engine, length=70, name=name, transfer=transfer, back=back)
        engine.on_request_arrived(asked)
        engine.tokens_to_load(asked, 32)
        engine.on_blocks_allocated(asked, ([4, 5, 6, 7, 8],), 0)
    metadata = engine.build_step_metadata(step())
    said = [
        e
        for e in [*metadata.sender_events, *metadata.receiver_events]
        if isinstance(e, events.LookupRequested | events.BlocksScheduled)
    ]
    assert [e.transfer for e in said] == [BACK]


def test_states_beside_attention() -> None:
    p, d = side("prefill", [STATE, FULL]), side("decode", [STATE, FULL])
    asked = request("prefill", p, length=40)
    asked._all_token_ids = list(asked.prompt_token_ids)
    p.tokens_to_load(asked, 0)
    assert asked.num_prompt_tokens == 39
    other = request("decode", d, length=40)
    assert d.tokens_to_load(other, 0) == 39
    d.on_blocks_allocated(other, ([3], [4, 5, 6]), 39)
    (wanted,) = d.build_step_metadata(step()).receiver_events
    assert wanted.blocks == [events.GroupBlocks(0, [3]), events.GroupBlocks(0, [4, 5, 6])]


# Of which prompt ----------------------------------------------------------------------------------
def image(identifier: str, offset: int = 4) -> SimpleNamespace:
    return SimpleNamespace(
        modality="image",
        identifier=identifier,
        mm_position=SimpleNamespace(offset=offset, length=8),
    )


def sent_digest(role: str, **change: Any) -> str:
    """Returns the digest that goes to the workers with a leg."""
    engine = side(role)
    asked = request(role, engine, **change)
    engine.on_blocks_allocated(asked, ([4, 5, 6],), engine.tokens_to_load(asked, 0) or 0)
    said = engine.build_step_metadata(step(new={"r1": (0, 40, [7, 8, 9])}))
    (event,) = said.sender_events if role == "prefill" else said.receiver_events
    return event.prompt


def test_both_legs_of_one_prompt_have_one_digest() -> None:
    assert sent_digest("prefill") == sent_digest("decode") != ""


def test_every_token_and_image_changes_the_digest() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"prompt_token_ids": [0] * 39 + [1]},
        {"prompt_token_ids": [1] + [0] * 39},
        *(
            {"mm_features": features}
            for features in (
                [image("a")],
                [image("b")],
                [image("a", 5)],
                [image("a"), image("a", 20)],
            )
        ),
    ]
    assert len({sent_digest("decode", **change) for change in changes}) == len(changes)


def test_adapters_of_one_name_differ_by_their_files(tmp_path: Path) -> None:
    def digest(role: str, lora: Any) -> str:
        with engine_process():
            return sent_digest(role, lora_request=lora)

    ours, same, other = (adapter(tmp_path / name, name[:1].encode()) for name in ("a", "also", "b"))
    assert digest("prefill", ours) == digest("decode", same)
    assert len({digest("decode", lora) for lora in (None, same, other)}) == 3


def test_an_adapter_that_was_loaded_anew_is_read_anew(tmp_path: Path) -> None:
    """Under a new name: under the same one it has no digest (`test_adapters.py`)."""
    with engine_process():
        before = sent_digest("decode", lora_request=adapter(tmp_path / "a", b"a"))
        other = adapter(tmp_path / "a", b"b", number=2, name="another")
        assert before != sent_digest("decode", lora_request=other)


@pytest.mark.parametrize("change", [True, False])
def test_an_adapter_that_changes_while_its_request_waits_has_no_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: bool
) -> None:
    """D reads it again when the request's turn comes, if it has left the workers' memory."""
    d = side("decode")
    with engine_process(), caplog.at_level("INFO", "vllm_disagg"):
        asked = request("decode", d, lora_request=adapter(tmp_path / "a", b"a"))
        d.on_request_arrived(asked)
        if change:
            adapter(tmp_path / "a", b"b")
        loaded = d.tokens_to_load(asked, 0)
        assert bool(loaded) is not change
        if change:  # P is informed at once, although the request may go on waiting for blocks
            (skipped,) = d.build_step_metadata(step()).receiver_events
            assert isinstance(skipped, events.LoadSkipped)
            assert d.tokens_to_load(asked, 0) == 0
        d.on_blocks_allocated(asked, ([4, 5, 6],), loaded or 0)
        said = d.build_step_metadata(step()).receiver_events
        assert [type(each) for each in said] == ([] if change else [events.LoadRequested])
        assert not d.on_request_finished(asked)[0]
    line = "request r1: its adapter's files have changed since it came"
    assert caplog.text.count(line) == int(change)


def test_the_workers_learn_of_which_adapter_blocks_are(tmp_path: Path) -> None:
    """Also of those that D has cached, and P reads back."""
    with engine_process():
        lora = adapter(tmp_path / "a", b"a")
        p, d = side("prefill"), side("decode")
        for engine, role in ((p, "prefill"), (d, "decode")):
            asked = request(role, engine, length=70, back=BACK, lora_request=lora)
            engine.on_request_arrived(asked)
            if engine is d:
                loaded = engine.tokens_to_load(asked, 32) or 0
                engine.on_blocks_allocated(asked, ([4, 5, 6, 7, 8],), loaded)
            said = engine.build_step_metadata(step(new={"r1": (0, 70, [4, 5, 6, 7, 8])}))
            (scheduled,) = said.sender_events
            assert isinstance(scheduled, events.BlocksScheduled)
            assert scheduled.adapter == prompt_digest.cache_name(lora) != ""


def test_an_adapter_on_a_hub_has_no_transfer(caplog: pytest.LogCaptureFixture) -> None:
    """Its digest was that of its name, which two engines may have looked up at two times."""
    adapter_there = SimpleNamespace(lora_name="one", lora_path="org/adapter", lora_int_id=77)
    for name in ("r1", "r2"):
        transfer = {"r1": "ab", "r2": "cd"}[name] * 16
        assert not load_starts(
            side("decode"), name=name, transfer=transfer, lora_request=adapter_there
        )
    assert caplog.text.count("LoRA adapter org/adapter: it is no folder here") == 1


def load_starts(engine: SchedulerSide, **change: Any) -> bool:
    """Returns whether a decode leg loads KV; its prompt has 40 tokens."""
    asked = request("decode", engine, **change)
    engine.on_request_arrived(asked)
    return bool(engine.tokens_to_load(asked, 0))


@pytest.mark.parametrize("groups", ["windows", "states", "full"])
def test_a_prompt_that_ends_in_an_image_beside_windows_and_states(groups: str) -> None:
    """P leaves out the last token there, so the image would be cut."""
    groups_here = {"windows": [FULL, WINDOW], "states": [STATE], "full": [FULL]}[groups]
    ends = {"mm_features": [image("a"), image("b", 32)]}
    assert load_starts(side("decode", groups_here), **ends) == (groups == "full")
    p = side("prefill", groups_here)
    asked = request("prefill", p, **ends)
    asked._all_token_ids = list(asked.prompt_token_ids)
    p.on_request_arrived(asked)
    assert asked.num_prompt_tokens == 40
    before_the_end = {"mm_features": [image("a"), image("b", 31)]}
    assert load_starts(side("decode", groups_here), **before_the_end)


def test_images_whose_tokens_attend_to_later_ones_are_computed_here() -> None:
    d = side("decode")
    d.compute_image_requests()
    assert not load_starts(d, mm_features=[image("a")])
    assert load_starts(d, name="r2", transfer="cd" * 16)


def test_lookup_and_served_blocks_carry_one_digest() -> None:
    p, d = side("prefill"), side("decode")
    p.on_request_arrived(request("prefill", p, length=70, back=BACK))
    (sought,) = p.build_step_metadata(step()).receiver_events
    asked = request("decode", d, length=70, back=BACK)
    d.on_blocks_allocated(asked, ([4, 5, 6, 7, 8],), d.tokens_to_load(asked, 32) or 0)
    (served,) = d.build_step_metadata(step()).sender_events
    assert sought.transfer == served.transfer and sought.prompt == served.prompt != ""


@pytest.mark.parametrize(
    "change",
    [
        {"prompt_embeds": torch.zeros(1)},
        {"prompt_token_ids": None},
        {"lora_request": SimpleNamespace(lora_name="one", lora_path="/", load_inplace=True)},
    ],
)
def test_a_prompt_without_digest_is_computed_here_and_the_peer_is_informed(
    change: dict[str, Any],
) -> None:
    p, d = side("prefill"), side("decode")
    for engine, role in ((p, "prefill"), (d, "decode")):
        asked = request(role, engine, **change)
        engine.on_request_arrived(asked)
        assert engine.tokens_to_load(asked, 0) == 0
        engine.on_blocks_allocated(asked, ([4, 5, 6],), 0)
        said = engine.build_step_metadata(step(new={"r1": (0, 40, [4, 5, 6])}))
        assert said.sender_events == ([events.BlocksRevoked(T)] if role == "prefill" else [])
        assert said.receiver_events == (
            [] if role == "prefill" else [events.LoadSkipped(T, [P_WORKER], NOBODY)]
        )
        keep, answer = engine.on_request_finished(asked)
        assert not keep and bool(answer) == (role == "prefill"), (
            "P says who it is, so the proxy goes on using it"
        )
        said = engine.build_step_metadata(step())
        assert not said.sender_events and not said.receiver_events


@pytest.mark.parametrize("groups", ["windows", "states", "all"])
def test_the_last_token_is_left_out_before_the_prefix_lookup(groups: str) -> None:
    p = side("prefill", {"windows": [FULL, WINDOW], "states": [STATE], "all": GROUPS}[groups])
    asked = request("prefill", p)
    asked._all_token_ids = list(asked.prompt_token_ids)
    p.on_request_arrived(asked)
    assert (
        asked.num_prompt_tokens
        == len(asked.prompt_token_ids)
        == len(asked._all_token_ids)
        == (40 if groups == "all" else 39)
    )
    odd = request("prefill", p, name="r3", transfer="de" * 16, prompt_embeds=torch.zeros(40, 1))
    p.on_request_arrived(odd)  # ids and embeddings must stay of one length, or the engine dies
    assert odd.num_prompt_tokens == len(odd.prompt_token_ids) == 40
    late = request("prefill", p, name="r2", transfer="ef" * 16)
    late._all_token_ids = list(late.prompt_token_ids)
    p.tokens_to_load(
        late, 0
    )  # with windows too late: vLLM may have found all of the shorter prompt in its cache
    assert late.num_prompt_tokens == (39 if groups == "states" else 40)


def test_a_request_with_an_unreadable_adapter_is_computed_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(folder: Path) -> None:
        raise OSError("stale file handle")

    monkeypatch.setattr(prompt_digest, "sample_files", gone)
    d = side("decode")
    assert d.tokens_to_load(request("decode", d, lora_request=adapter(tmp_path / "a", b"")), 0) == 0


def test_each_step_is_measured_from_the_calls_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(scheduler.time, "monotonic", lambda: now)
    monkeypatch.setattr(scheduler.time, "time", lambda: 98.75)  # since `arrival_time`
    plain = side("both")
    asked = request("prefill", plain, kv_transfer_params=None)
    plain.on_request_arrived(asked)
    plain.build_step_metadata(step(new={"r1": (0, 40, [7, 8, 9])}))
    now = 100.5
    assert plain.on_step_ended() is not None
    plain.build_step_metadata(step(cached={"r1": (40, 1, [])}))
    plain.on_request_finished(asked)
    now = 102.0
    first = plain.on_step_ended()
    assert first is not None and first.data["step_sums"]["contexts*seconds"] == 41 * 1.5
    assert "tokens*tokens" not in first.data["step_sums"], "exported before"
    now = 200.0
    plain.on_request_arrived(asked)
    plain.build_step_metadata(step(new={"r1": (0, 40, [7, 8, 9])}))
    now = 201.25
    second = plain.on_step_ended()
    assert second is not None and second.data["step_sums"]["tokens*seconds"] == 40 * 1.25
    # The request came at 101.25, while the step that ended at 102 ran.
    assert second.data["arrival_sums"] == {
        "arrivals*arrivals": 1,
        "arrivals*seconds": 0.75,
        "seconds*seconds": 0.75**2,
    }


def test_the_wait_of_landed_kv_is_measured_at_the_last_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(scheduler.time, "monotonic", lambda: now)
    monkeypatch.setattr(scheduler.time, "time", lambda: now + 1000)
    d = side("decode")
    d.on_request_arrived(request("decode", d, kv_transfer_params=None))
    d.build_step_metadata(step(cached={"r1": (40, 1, [])}))
    d.on_kv_landed({"r2": 1100.25})
    now = 100.5
    d.on_step_ended()
    d.build_step_metadata(step(cached={"r1": (41, 1, [])}))
    d.on_kv_landed({"r2": 1100.625})
    d.on_load_finished("r2")
    d.on_load_finished("of a failed load")
    now = 102.0
    found = d.on_step_ended()
    assert found is not None
    assert found.data["landing_sums"] == {
        "landings*landings": 1,
        "landings*seconds": 1.375,
        "seconds*seconds": 1.375**2,
    }
