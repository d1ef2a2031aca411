"""The standard handshake at the scheduler's half: P's answer, D's leg, and what both refuse."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from adapters import adapter, engine_process
from test_scheduler_side import BLOCK, GROUPS, HOLDS, KEY, step
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kv_connectors import prompt_digest, scheduler
from kv_connectors.metadata import Handshake
from kv_connectors.scheduler import SchedulerSide, TransferLimits
from vllm_disagg.fleet import grants, handovers, keys
from vllm_disagg.fleet.used_grants import RELEASED_SECONDS
from vllm_disagg.protocol import events, peers
from vllm_disagg.warning_limit import WARNING_INTERVAL_SECONDS, WarningLimit

Params = dict[str, Any]
PREFILL: Params = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replaces the time: the only number is now."""
    now = [100.0]
    fake = SimpleNamespace(monotonic=lambda: now[0], time=lambda: 0.0, sleep=lambda _: None)
    monkeypatch.setattr(scheduler, "time", fake)
    return now


def side(
    role: str, name: str, layout: dict[str, str] | None = None, **limits: Any
) -> SchedulerSide:
    made = SchedulerSide(
        KEY, role, layout or {"dtype": "bf16"}, GROUPS, limits=TransferLimits(**limits)
    )
    near = "tcp://127.0.0.1:1"
    made.set_workers(
        [Handshake(peers.WorkerInfo(f"{name}/0", near, near, holds=HOLDS), ["a", "b"])]
    )
    return made


def request(name: str, params: object, length: int = 40, first: int = 0, tokens: int = 16) -> Any:
    return SimpleNamespace(
        request_id=name,
        kv_transfer_params=params,
        num_prompt_tokens=length,
        prompt_token_ids=[first] * length,
        status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
        prompt_embeds=None,
        arrival_time=0.0,
        mm_features=[],
        lora_request=None,
        sampling_params=SimpleNamespace(n=1),
        max_tokens=tokens,
    )


def prefill(p: SchedulerSide, name: str = "r1", first_block: int = 7, **change: Any) -> Any:
    """Returns a router's prefill leg that P has computed in one step, but not ended."""
    asked = request(name, dict(PREFILL), tokens=1, **change)
    p.on_request_arrived(asked)
    assert p.tokens_to_load(asked, 0) == 0
    blocks = list(range(first_block, first_block + 3))
    p.build_step_metadata(step(new={name: (0, asked.num_prompt_tokens, blocks)}))
    return asked


def handed_over(p: SchedulerSide, **change: Any) -> Params:
    keeps_blocks, params = p.on_request_finished(prefill(p, **change))
    assert keeps_blocks and params is not None
    return params


def is_loaded(d: SchedulerSide, params: object, name: str = "r", **change: Any) -> bool:
    """Returns whether D loads the prompt of a new request; its load goes on."""
    asked = request(name, params, **change)
    d.on_request_arrived(asked)
    count = d.tokens_to_load(asked, 0)
    d.on_blocks_allocated(asked, ([4, 5, 6],), count or 0)
    return bool(count)


def test_both_legs() -> None:
    p, d = side("prefill", "p"), side("decode", "d")
    params = handed_over(p)
    (finished,) = p.build_step_metadata(step()).sender_events
    assert isinstance(finished, events.PrefillFinished)
    asked = request("r2", params)
    d.on_request_arrived(asked)
    assert d.tokens_to_load(asked, 16) == 24
    d.on_blocks_allocated(asked, ([4, 5, 6],), 24)
    (load,) = d.build_step_metadata(step()).receiver_events
    assert isinstance(load, events.LoadRequested) and load.transfer == finished.transfer
    assert [worker.name for worker in load.sources] == ["p/0"]
    assert load.blocks == [events.GroupBlocks(BLOCK, [5, 6])]
    d.on_load_finished("r2")
    assert d.on_request_finished(asked) == (False, None), "the client sees no parameters"


def test_the_workers_learn_of_which_adapter_a_prompt_is(tmp_path: Path) -> None:
    """They send no KV of an adapter that they have read with other files."""
    p = side("prefill", "p")
    with engine_process():
        asked = request("r1", dict(PREFILL), tokens=1)
        asked.lora_request = adapter(tmp_path / "a", b"a")
        p.on_request_arrived(asked)
        said = p.build_step_metadata(step(new={"r1": (0, 40, [7, 8, 9])}))
        (scheduled,) = said.sender_events
        assert isinstance(scheduled, events.BlocksScheduled)
        assert scheduled.adapter == prompt_digest.cache_name(asked.lora_request) != ""


def test_nixl_connector_reads_nothing_in_the_parameters() -> None:
    """A router may send them to a D of NixlConnector, which computes the prompt itself."""
    params = handed_over(side("prefill", "p"))
    assert params.keys() == {handovers.TOKEN_KEY}
    module = pytest.importorskip(f"{base.__package__}.nixl.pull_scheduler")
    nixl = object.__new__(module.NixlPullConnectorScheduler)
    nixl.use_host_buffer = nixl.is_bidirectional_kv_xfer_enabled = False
    nixl._heartbeat_req_engine = {}
    asked = request("r2", params)
    nixl.on_new_request(asked)
    assert nixl.get_num_new_matched_tokens(asked, 0) == (0, False)
    nixl.update_state_after_alloc(asked, None, 0)
    assert asked.kv_transfer_params == params, "nothing is noted as done"
    assert nixl.request_finished(asked, ([4, 5],)) == (False, None)


def test_each_prompt_has_a_transfer_and_the_time_of_the_lease() -> None:
    p = side("prefill", "p", handover_patience=7.0)
    first, second = (
        handovers.verify(KEY, handed_over(p, name=name)[handovers.TOKEN_KEY])
        for name in ("r1", "r2")
    )
    assert first.transfer != second.transfer and first.patience == 7.0
    assert first.prompt == second.prompt and first.layout["dtype"] == "bf16"


@pytest.mark.parametrize("end", ["aborted", "half a prompt"])
def test_an_answer_without_kv_has_no_parameters(end: str) -> None:
    p = side("prefill", "p")
    asked = request("r1", dict(PREFILL), tokens=1)
    p.on_request_arrived(asked)
    p.build_step_metadata(step(new={"r1": (0, 20 if end != "aborted" else 40, [7, 8, 9])}))
    if end == "aborted":
        asked.status.name = "FINISHED_ABORTED"
    assert p.on_request_finished(asked) == (False, None)
    assert isinstance(p.build_step_metadata(step()).sender_events[0], events.BlocksRevoked)


def test_a_prompt_that_cannot_be_compared_is_withheld() -> None:
    p = side("prefill", "p")
    asked = request("r1", dict(PREFILL), tokens=1)
    asked.prompt_embeds = object()
    p.on_request_arrived(asked)
    p.build_step_metadata(step(new={"r1": (0, 40, [7, 8, 9])}))
    assert p.on_request_finished(asked) == (False, None)
    assert p.stats.data["withheld_handovers"] == 0, "that is for a lack of room"


def test_a_prefill_leg_that_goes_on_keeps_no_blocks() -> None:
    """vLLM would keep the blocks of all its tokens, at any client's request."""
    p = side("prefill", "p")
    asked = request("r1", dict(PREFILL), tokens=500)
    p.on_request_arrived(asked)
    p.build_step_metadata(step(new={"r1": (0, 40, [7, 8, 9])}))
    assert p.on_request_finished(asked) == (False, None)


@pytest.mark.parametrize("needs_prompt", [True, False])
def test_a_request_about_its_prompt_is_computed_at_d(needs_prompt: bool) -> None:
    """With `prompt_logprobs` vLLM before 0.32 would answer with numbers that it never computed."""
    p, d = side("prefill", "p"), side("decode", "d")
    asked = request("r", handed_over(p))
    asked.skip_reading_prefix_cache = needs_prompt
    d.on_request_arrived(asked)
    assert bool(d.tokens_to_load(asked, 0)) is not needs_prompt


def test_a_preempted_prompt_gets_a_new_transfer() -> None:
    """The workers remember the revoked one as ended."""
    p = side("prefill", "p")
    asked = prefill(p)
    preempted = p.build_step_metadata(step(preempted={"r1"}))
    (revoked,) = preempted.sender_events
    assert isinstance(revoked, events.BlocksRevoked)
    (scheduled,) = p.build_step_metadata(step(cached={"r1": (0, 40, [1, 2, 3])})).sender_events
    assert isinstance(scheduled, events.BlocksScheduled) and scheduled.blocks == [[1, 2, 3]]
    assert scheduled.transfer != revoked.transfer
    assert preempted.serving_requests == {scheduled.transfer: "r1"}
    keeps_blocks, params = p.on_request_finished(asked)
    assert keeps_blocks and params is not None
    token = handovers.verify(KEY, params[handovers.TOKEN_KEY])
    assert token.transfer == scheduled.transfer


def test_unclaimed_prompts_do_not_fill_p() -> None:
    p = side("prefill", "p", handover_blocks=5)
    handed_over(p, name="r1")
    assert p.on_request_finished(prefill(p, "r2", first_block=10)) == (False, None)
    assert p.stats.data["withheld_handovers"] == 1
    p.on_released(["r1"])
    handed_over(p, name="r3")


def changed(params: Params, **change: object) -> Params:
    return {**params, **change}


def spoiled(params: Params) -> dict[str, object]:
    """Returns by name what D must refuse."""
    token = str(params[handovers.TOKEN_KEY])
    handover = handovers.verify(KEY, token)
    key = handovers.TOKEN_KEY
    return {
        "edited": changed(params, **{key: "A" + token[1:]}),
        "cut": changed(params, **{key: token[:-3]}),
        "no text": changed(params, **{key: [token]}),
        "null": changed(params, **{key: None}),
        "another fleet's": changed(
            params, **{key: handovers.mint(keys.FleetKey(b"x" * keys.KEY_BYTES), handover)}
        ),
        "without a key": changed(params, **{key: handovers.mint(keys.FleetKey(None), handover)}),
        "as a grant": {grants.REQUEST_KEY: token},
        "NixlConnector's": {
            "do_remote_prefill": True,
            "remote_engine_id": "x",
            "remote_block_ids": [[1, 2]],
            "remote_host": "198.51.100.7",
            "remote_port": 1,
        },
        "a prefill leg": dict(PREFILL),
    }


@pytest.mark.parametrize("name", list(spoiled(handed_over(side("prefill", "p")))))
def test_spoiled_parameters_make_an_ordinary_request(name: str) -> None:
    p, d = side("prefill", "p"), side("decode", "d")
    params = handed_over(p)
    asked = request("r", spoiled(params)[name])
    d.on_request_arrived(asked)
    assert d.tokens_to_load(asked, 0) == 0
    d.on_blocks_allocated(asked, ([4, 5, 6],), 0)
    metadata = d.build_step_metadata(step(new={"r": (0, 40, [4, 5, 6])}))
    assert not metadata.receiver_events and not metadata.sender_events
    _, answer = d.on_request_finished(asked)
    # A token of the wrong kind is answered with the reason, and with nothing else.
    assert answer in (None, {grants.ANSWER_KEY: {grants.REFUSED_KEY: "minted with another key"}})
    assert d.stats.data["refused_parameters"] == 1
    assert d.stats.data["requests_without_parameters"] == 0
    assert is_loaded(d, params, "owner"), "the owner's are as good as before"


def test_another_prompt_gets_no_kv_and_takes_none_away() -> None:
    p, d = side("prefill", "p"), side("decode", "d")
    params = handed_over(p)
    assert not is_loaded(d, params, "thief", first=1)
    assert not is_loaded(d, params, "longer", length=41)
    assert d.stats.data["refused_parameters"] == 2
    assert is_loaded(d, params, "owner")


def test_parameters_work_once() -> None:
    p, d = side("prefill", "p"), side("decode", "d")
    params = handed_over(p)
    assert is_loaded(d, params, "r1") and not is_loaded(d, params, "r2")


@pytest.mark.parametrize("is_aborted", [False, True])
def test_parameters_stay_used_until_the_workers_have_ended_the_load(
    clock: list[float], is_aborted: bool
) -> None:
    """vLLM asserts that it awaits each load that ends."""
    p, d = side("prefill", "p"), side("decode", "d")
    params = handed_over(p)
    asked = request("r1", params)
    d.on_request_arrived(asked)
    d.on_blocks_allocated(asked, ([4, 5, 6],), d.tokens_to_load(asked, 0) or 0)
    clock[0] += 10 * RELEASED_SECONDS
    assert not is_loaded(d, params, "r2")
    if not is_aborted:
        d.on_load_finished("r1")
    d.on_request_finished(asked)
    clock[0] += 10 * RELEASED_SECONDS
    if is_aborted:
        assert not is_loaded(d, params, "r3")
        d.on_load_finished("r1")
        clock[0] += RELEASED_SECONDS
        assert not is_loaded(d, params, "r4")
        clock[0] += 1
    assert is_loaded(d, params, "r5"), "P has forgotten it by now, and refuses"
    assert not d._aborted_loads


def test_a_decode_leg_that_ends_early_releases_ps_blocks() -> None:
    p, d = side("prefill", "p"), side("decode", "d")
    asked = request("r1", handed_over(p))
    asked.status.name = "FINISHED_ABORTED"
    d.on_request_arrived(asked)
    assert d.on_request_finished(asked) == (False, None)
    assert isinstance(d.build_step_metadata(step()).receiver_events[0], events.LoadSkipped)


def test_an_engine_of_another_model_computes(caplog: pytest.LogCaptureFixture) -> None:
    p, d = side("prefill", "p"), side("decode", "d", {"dtype": "fp8"})
    logging.getLogger("vllm_disagg").propagate = True
    assert not is_loaded(d, handed_over(p))
    assert "dtype is fp8 on one side and bf16 on the other" in caplog.text


def test_a_seed_beside_drafts_is_computed_at_d() -> None:
    """P's blocks are released."""
    p, d = side("prefill", "p"), side("decode", "d")
    d.compute_seeded_requests()
    asked = request("r", handed_over(p))
    asked.sampling_params = SimpleNamespace(n=1, seed=1, temperature=1.0)
    d.on_request_arrived(asked)
    assert d.tokens_to_load(asked, 0) == 0
    assert isinstance(d.build_step_metadata(step()).receiver_events[0], events.LoadSkipped)


def test_an_engine_does_not_hand_over_to_itself() -> None:
    both = side("both", "b")
    assert not is_loaded(both, handed_over(both))


@pytest.mark.parametrize(("role", "params"), [("decode", PREFILL), ("prefill", None)])
def test_a_leg_fits_the_role(role: str, params: Params | None) -> None:
    engine = side(role, "e")
    asked = request("r", params or handed_over(side("prefill", "p")), tokens=1)
    engine.on_request_arrived(asked)
    engine.build_step_metadata(step(new={"r": (0, 40, [7, 8, 9])}))
    assert engine.on_request_finished(asked) == (False, None)
    assert engine.stats.data["refused_parameters"] == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_without_workers_computes(role: str) -> None:
    """Its start proof has failed, or it has not begun."""
    engine = SchedulerSide(KEY, role, {}, GROUPS)
    params = PREFILL if role == "prefill" else handed_over(side("prefill", "p"))
    asked = request("r", params, tokens=1)
    engine.on_request_arrived(asked)
    assert engine.tokens_to_load(asked, 0) == 0
    assert engine.on_request_finished(asked) == (False, None)


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": 1}, {"of another": 1}, [], "x"])
def test_requests_without_parameters_are_counted_and_warned_of(
    params: object, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("vllm_disagg").propagate = True
    caplog.set_level(logging.WARNING, "vllm_disagg")  # vLLM before 0.32 sets its level at import
    d = side("decode", "d")
    lines: list[str] = []
    for seconds in (0.0, 1.0, 1.0, WARNING_INTERVAL_SECONDS, 1.0):
        clock[0] += seconds
        asked = request("r", params)
        d.on_request_arrived(asked)
        d.tokens_to_load(asked, 0)
        assert d.on_request_finished(asked) == (False, None)
        lines += [record.getMessage() for record in caplog.records]
        caplog.clear()
    assert d.stats.data["requests_without_parameters"] == 5
    assert [line.partition(": ")[2].split(" ")[0] for line in lines] == ["1", "3"], lines
    assert "role decode" in lines[0] and "kv_transfer_params" in lines[0]


def test_a_request_that_the_proxy_meant_for_this_engine_is_not_warned_of() -> None:
    d = side("decode", "d")
    asked = request("r", {"disagg_whole": True})
    d.on_request_arrived(asked)
    assert d.tokens_to_load(asked, 0) == 0
    assert d.on_request_finished(asked) == (False, None)
    assert not d.stats.data["requests_without_parameters"]
    assert not d.stats.data["refused_parameters"]


def test_a_request_with_parameters_is_not_warned_of() -> None:
    p, d = side("prefill", "p"), side("decode", "d")
    params = handed_over(p)
    asked = request("r", params)
    d.on_request_arrived(asked)
    d.on_request_finished(asked)
    for engine in (p, d):
        assert engine.stats.is_empty(), engine.stats.data


def test_one_warning_a_minute() -> None:
    missing = WarningLimit()
    found = [missing.note(now) for now in (0.0, 1.0, 59.9, 60.0, 60.1, 200.0)]
    assert found == [1, 0, 0, 3, 0, 2]


def test_refused_parameters_are_a_warning_a_minute_and_lines_below_it(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    d = side("decode", "d")
    for name in ("r1", "r2", "r3"):
        d.on_request_arrived(request(name, {"do_remote_prefill": True}))
    clock[0] += WARNING_INTERVAL_SECONDS
    d.on_request_arrived(request("r4", {"do_remote_prefill": True}))
    refused = [record for record in caplog.records if "parameters refused" in record.getMessage()]
    levels = [logging.WARNING, logging.INFO, logging.INFO, logging.WARNING]
    assert [record.levelno for record in refused] == levels
    texts = [record.getMessage() for record in refused]
    assert all(f"request r{at}: " in text for at, text in enumerate(texts, 1))
    assert texts[3].endswith("(2 more since the last warning)") and "more" not in texts[0]
