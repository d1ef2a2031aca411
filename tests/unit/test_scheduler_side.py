"""The scheduler's half of the connector: which events follow from which of vLLM's calls."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

from kv_connectors.messages import Handshake
from kv_connectors.scheduler import SchedulerSide
from vllm_disagg import events, grants, keys, mapping
from vllm_disagg.shape import uniform

KEY = keys.FleetKey(b"k" * keys.SIZE)
BLOCK = 16
HOLDS = uniform(layers=2, block_size=BLOCK, rows=[64])
P_WORKER = grants.Worker("p/0", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", holds=HOLDS)
PLAN, NOBODY = mapping.plan([HOLDS], [HOLDS]), mapping.nothing(1, 1)
GROUPS: Any = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK))]


def side(role: str, groups: Any = GROUPS) -> SchedulerSide:
    made = SchedulerSide(KEY, role, {"dtype": "bf16"}, groups)
    made.set_workers([Handshake(grants.Worker("me/0", "tcp://127.0.0.1:3", "tcp://127.0.0.1:4", holds=HOLDS), ["a", "b"])])
    return made


def request(leg: str, engine: SchedulerSide | None, length: int = 40, name: str = "r1", **change: Any) -> SimpleNamespace:
    incarnation = engine.engine.incarnation if engine and engine.engine else "nobody"
    values = {"sources": [P_WORKER]} if leg == "decode" else {}
    grant = grants.Grant(1, leg, change.pop("transfer", "ab" * 16), incarnation, **values)  # type: ignore[arg-type]
    token = grants.mint(change.pop("key", KEY), grant)
    fields = {
        "request_id": name,
        "kv_transfer_params": {grants.REQUEST_KEY: token},
        "num_prompt_tokens": length,
        "prompt_token_ids": [0] * length,
        "status": SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
        "lora_request": None,
    }
    return SimpleNamespace(**fields | change)


def step(new: dict[str, tuple[int, int, list[int]]] | None = None, cached: Any = None, preempted: Any = None) -> SimpleNamespace:
    """`new` and `cached`: id -> (computed before, scheduled, block ids)."""
    new, cached = new or {}, cached or {}
    return SimpleNamespace(
        preempted_req_ids=preempted,
        num_scheduled_tokens={name: n for name, (_, n, _) in {**new, **cached}.items()},
        scheduled_new_reqs=[
            SimpleNamespace(req_id=name, num_computed_tokens=c, block_ids=(b,)) for name, (c, _, b) in new.items()
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
    first = p.step(step(new={"r1": (0, 20, [7, 8])}))
    assert first.prefill == [events.Scheduled("ab" * 16, 20, [[7, 8]])] and first.requests == {"ab" * 16: "r1"}
    assert p.step(step(cached={"r1": (20, 20, [9])})).prefill == [events.Scheduled("ab" * 16, 40, [[9]])]
    assert p.step(step(cached={"r1": (40, 1, [])})).prefill == [], "what follows the prompt is no business of D"
    keep, answer = p.finished(asked)
    assert keep and answer is not None and answer[grants.ANSWER_KEY]["role"] == "prefill"
    assert p.step(step()).prefill == [events.Pinned("ab" * 16)]


@pytest.mark.parametrize("end", ["abort", "preempt", "early"])
def test_a_prefill_leg_that_loses_its_blocks_keeps_nothing(end: str) -> None:
    p = side("prefill")
    asked = request("prefill", p)
    p.tokens_to_load(asked, 0)
    p.step(step(new={"r1": (0, 20 if end == "early" else 40, [7, 8, 9])}))
    if end == "preempt":
        assert p.step(step(preempted={"r1"})).prefill == [events.Withdrawn("ab" * 16)]
        assert p.step(step(cached={"r1": (0, 40, [1, 2, 3])})).prefill == [], "computed again, but not for D"
    elif end == "abort":
        asked.status.name = "FINISHED_ABORTED"
    keep, _ = p.finished(asked)
    assert not keep
    assert p.step(step()).prefill == ([] if end == "preempt" else [events.Withdrawn("ab" * 16)])


def test_a_decode_leg_loads_what_its_own_cache_lacks() -> None:
    d = side("decode")
    asked = request("decode", d)
    assert d.tokens_to_load(asked, 16) == 24
    assert d.tokens_to_load(asked, 16) == 24, "asked again until there is room"
    d.allocated(asked, ([4, 5, 6],), 24)
    (wanted,) = d.step(step()).decode
    assert wanted == events.Wanted("ab" * 16, [P_WORKER], PLAN, [events.Blocks(16, [5, 6])], 40, 60.0)
    assert d.tokens_to_load(asked, 0) == 0, "loaded once; after a failure or a preemption it is recomputed"
    d.allocated(asked, ([4, 5, 6],), 0)
    d.loaded("r1")
    assert d.finished(asked) == (False, None)
    assert d.step(step()).decode == []


def test_a_prompt_that_is_all_but_cached_is_not_fetched_and_p_is_told() -> None:
    d = side("decode")
    asked = request("decode", d)
    assert d.tokens_to_load(asked, 32) == 0
    d.allocated(asked, ([4, 5, 6],), 0)
    assert d.step(step()).decode == [events.Unneeded("ab" * 16, [P_WORKER], NOBODY)]


@pytest.mark.parametrize(("when", "event"), [("waiting", events.Unneeded), ("loading", events.Cancelled)])
def test_a_decode_leg_that_is_aborted_says_so_once(when: str, event: type) -> None:
    d = side("decode")
    asked = request("decode", d)
    if when == "loading":
        d.tokens_to_load(asked, 0)
        d.allocated(asked, ([4, 5, 6],), 40)
        d.step(step())
    d.finished(asked)
    assert [type(e) for e in d.step(step()).decode] == [event]
    d.finished(asked)
    assert d.step(step()).decode == []


def test_a_probe_learns_who_we_are_whatever_our_role() -> None:
    for role in ("prefill", "decode", "both"):
        engine = side(role)
        keep, answer = engine.finished(request("probe", None))
        assert not keep and answer is not None
        layout = answer[grants.ANSWER_KEY]["layout"]
        assert layout["dtype"] == "bf16" and layout["KV of a token"] == "2 layers of 1 heads of bytes"
        assert engine.step(step()).requests == {}


def refused() -> list[tuple[str, Any]]:
    d = side("decode")
    good = request("decode", d).kv_transfer_params[grants.REQUEST_KEY]
    shapes: list[Any] = [None, [], "x", 5, {}, {"do_remote_prefill": True}, {grants.REQUEST_KEY: None}]
    shapes += [{grants.REQUEST_KEY: x} for x in (5, [], {}, "", ".", "a.b", good[:-2], good + "x", "é")]
    return [(repr(shape)[:40], shape) for shape in shapes]


@pytest.mark.parametrize(("_", "params"), refused())
def test_whatever_else_a_client_writes_is_an_ordinary_request(_: str, params: Any) -> None:
    d = side("decode")
    asked = request("decode", d, kv_transfer_params=params)
    assert d.tokens_to_load(asked, 0) == 0
    d.allocated(asked, ([1, 2, 3],), 0)
    assert d.finished(asked) == (False, None)
    metadata = d.step(step())
    assert not metadata.prefill and not metadata.decode and not metadata.requests


OTHER_BLOCKS = grants.Worker("p/1", "", "", holds=uniform(layers=2, block_size=2 * BLOCK, rows=[128]))


def test_stages_of_a_pipeline_are_numbered_on() -> None:
    """Two ranks hold the first layers, two the others."""
    made = SchedulerSide(KEY, "prefill", {}, GROUPS)
    worker = grants.Worker("w", "", "", holds=HOLDS)
    made.set_workers([Handshake(worker, names) for names in (["a", "b"], ["a", "b"], ["c", "d"], ["c", "d"])])
    assert made.engine is not None
    assert [w.holds.first for w in made.engine.workers] == [0, 0, 2, 2]
    assert made.engine.layout["KV of a token"].startswith("4 layers of")


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ([OTHER_BLOCKS], "blocks of 32 tokens, 128 bytes at P and of 16 tokens, 64 bytes at D"),
        ([P_WORKER, P_WORKER], "names one worker twice"),
    ],
)
def test_sources_that_cannot_be_read_are_refused_in_words(
    sources: list[grants.Worker], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    d = side("decode")
    grant = grants.Grant(1, "decode", "cd" * 16, d.engine.incarnation, sources)  # type: ignore[union-attr]
    asked = request("decode", d, kv_transfer_params={grants.REQUEST_KEY: grants.mint(KEY, grant)})
    logging.getLogger("vllm_disagg").propagate = True
    assert d.tokens_to_load(asked, 0) == 0
    assert words in caplog.text


def test_grants_of_others_are_refused() -> None:
    d = side("decode")
    two = request("decode", d)
    two.kv_transfer_params = {
        grants.REQUEST_KEY: grants.mint(
            KEY, grants.Grant(1, "decode", "cd" * 16, d.engine.incarnation, [OTHER_BLOCKS])  # type: ignore[union-attr]
        )
    }
    for asked in (
        request("decode", None),
        request("prefill", d),
        request("decode", d, key=keys.FleetKey(b"x" * keys.SIZE)),
        request("decode", d, prompt_token_ids=None),
        two,
    ):
        assert d.tokens_to_load(asked, 0) == 0


def test_a_grant_works_once() -> None:
    d = side("decode")
    assert d.tokens_to_load(request("decode", d), 0) == 40
    assert d.tokens_to_load(request("decode", d, name="r2"), 0) == 0
    assert d.tokens_to_load(request("decode", d, name="r3", transfer="cd" * 16), 0) == 40


# Several KV-cache groups -------------------------------------------------------------------------------------
HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.bfloat16}
FULL = SimpleNamespace(kv_cache_spec=FullAttentionSpec(block_size=BLOCK, **HEADS))
WINDOW = SimpleNamespace(kv_cache_spec=SlidingWindowSpec(block_size=BLOCK, sliding_window=20, **HEADS))
STATE = SimpleNamespace(kv_cache_spec=MambaSpec(block_size=2048, shapes=((4,),), dtypes=(torch.float32,)))


def test_with_a_window_the_last_token_and_the_blocks_before_the_window_are_left_out() -> None:
    d = side("decode", [FULL, WINDOW])
    asked = request("decode", d, length=70)
    assert d.tokens_to_load(asked, 16) == 53
    d.allocated(asked, ([4, 5, 6, 7, 8], [0, 0, 0, 9, 10]), 53)
    (wanted,) = d.step(step()).decode
    assert wanted.token_end == 69
    assert wanted.blocks == [events.Blocks(16, [5, 6, 7, 8]), events.Blocks(48, [9, 10])]


def test_of_one_token_nothing_is_left_to_load() -> None:
    d = side("decode", [FULL, WINDOW])
    asked = request("decode", d, length=1)
    assert d.tokens_to_load(asked, 0) == 0
    d.allocated(asked, ([4], [5]), 0)
    assert isinstance(d.step(step()).decode[0], events.Unneeded)


def test_with_a_state_p_computes_all_tokens_but_the_last() -> None:
    p, d = side("prefill", [STATE]), side("decode", [STATE])
    asked = request("prefill", p, length=40)
    asked._all_token_ids = list(asked.prompt_token_ids)
    p.tokens_to_load(asked, 0)
    p.tokens_to_load(asked, 0)  # asked again until there is room
    assert asked.num_prompt_tokens == len(asked.prompt_token_ids) == len(asked._all_token_ids) == 39
    p.step(step(new={"r1": (0, 39, [7])}))
    assert p.finished(asked)[0], "kept for D"
    other = request("decode", d, length=40)
    assert d.tokens_to_load(other, 0) == 39
    d.allocated(other, ([3],), 39)
    (wanted,) = d.step(step()).decode
    assert (wanted.token_end, wanted.blocks) == (39, [events.Blocks(0, [3])])


def test_states_beside_attention() -> None:
    p, d = side("prefill", [STATE, FULL]), side("decode", [STATE, FULL])
    asked = request("prefill", p, length=40)
    asked._all_token_ids = list(asked.prompt_token_ids)
    p.tokens_to_load(asked, 0)
    assert asked.num_prompt_tokens == 39
    other = request("decode", d, length=40)
    assert d.tokens_to_load(other, 0) == 39
    d.allocated(other, ([3], [4, 5, 6]), 39)
    (wanted,) = d.step(step()).decode
    assert wanted.blocks == [events.Blocks(0, [3]), events.Blocks(0, [4, 5, 6])]


# LoRA --------------------------------------------------------------------------------------------------------
def adapter(folder: Path, weights: bytes) -> SimpleNamespace:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return SimpleNamespace(lora_name="one", lora_path=str(folder))


def test_transfers_of_different_adapters_of_one_name_never_meet(tmp_path: Path) -> None:
    ours, same, other = (adapter(tmp_path / name, name[:1].encode()) for name in ("a", "also", "b"))
    names = []
    for role, lora in (("prefill", ours), ("decode", same), ("decode", other)):
        engine = side(role)
        engine.tokens_to_load(request(role, engine, lora_request=lora), 0)
        (name,) = engine.step(step()).requests
        names.append(name)
    assert names[0] == names[1] != names[2]
    assert "ab" * 16 not in names
    assert all(len(name) == 32 for name in names)


def test_an_adapter_that_cannot_be_read_is_served_here(tmp_path: Path) -> None:
    lora = adapter(tmp_path / "a", b"")
    (tmp_path / "a" / "odd.bin").mkdir()
    d = side("decode")
    assert d.tokens_to_load(request("decode", d, lora_request=lora), 0) == 0
