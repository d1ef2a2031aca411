"""vLLM's own scheduler with ours: loads that hold the pool, fail, or end.

And the step after a load, beside requests that decode speculatively.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import msgspec
import pytest

from vllm_disagg.protocol import peers

pytest.importorskip("vllm")

import torch
from vllm.config import KVTransferConfig
from vllm.config.lora import LoRAConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm_release import as_of_032, refused_before_032

import kv_connectors.connector  # noqa: F401 - vLLM finds it by its name; loaded here, before tests capture what is logged
from kv_connectors import compat
from kv_connectors import scheduler as ours
from kv_connectors.metadata import Handshake
from vllm_disagg.fleet import grants, keys
from vllm_disagg.kv.layout import LayerLayout, RankLayout, StridedRegion
from vllm_disagg.protocol import events

BLOCK, WINDOW, CHUNK = 16, 16, 128
NOBODY: set[str] = set()
LENGTH = 125  # tokens of a prompt
HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 32, "dtype": torch.bfloat16}
FP8: dict[str, Any] = {"head_size": 64, "dtype": torch.uint8}  # blocks of as many bytes
MODEL = {
    **{
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 64,
    },
    **{
        "vocab_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
    **{"max_position_embeddings": 2048, "torch_dtype": "bfloat16"},
}
KIND = LayerLayout(
    "kv", BLOCK, [32], [[StridedRegion(0, [("h", 1, 32), ("t", BLOCK, 2), ("c", 2, 1)])]], 1, 0, 1
)
WINDOW_KIND = msgspec.structs.replace(KIND, fingerprint="window", group=1, window=WINDOW)


class Decode:
    """A decode engine without workers; the test makes their answers."""

    def __init__(
        self,
        folder: Path,
        blocks: int,
        policy: str,
        monkeypatch: pytest.MonkeyPatch,
        speculative: dict[str, Any] | None = None,
        chunk: int = CHUNK,
        *,
        has_windows: bool = True,
        is_mixed: bool = False,
    ) -> None:
        """Creates the engine.

        `has_windows`: beside its layer of full attention it has one with a sliding window.
        `is_mixed`: only its layer of full attention keeps fp8 numbers.
        """
        (folder / "config.json").write_text(json.dumps(MODEL))
        keys.create(str(folder / "key"))
        self.key = keys.load(str(folder / "key"))
        transfer = KVTransferConfig(
            kv_connector="DisaggConnector",
            kv_role="kv_consumer",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"key_file": str(folder / "key")},
        )
        config = EngineArgs(
            model=str(folder),
            max_model_len=1024,
            max_num_batched_tokens=chunk,
            max_num_seqs=64,
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            scheduling_policy=policy,
            kv_transfer_config=transfer,
            speculative_config=speculative,
            enforce_eager=True,  # type: ignore
        ).create_engine_config()
        config.cache_config.num_gpu_blocks, config.cache_config.block_size = blocks, BLOCK
        full = FullAttentionSpec(block_size=BLOCK, **HEADS | (FP8 if is_mixed else {}))
        specs: list[Any] = [full]
        layers = [KIND]
        if has_windows:
            specs.append(SlidingWindowSpec(block_size=BLOCK, sliding_window=WINDOW, **HEADS))
            layers.append(WINDOW_KIND)
        groups = [
            KVCacheGroupSpec([f"model.layers.{at}.attn"], spec) for at, spec in enumerate(specs)
        ]
        self.vllm = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(blocks, [], groups),
            block_size=BLOCK,
            structured_output_manager=StructuredOutputManager(config),
        )
        monkeypatch.setattr(ours.time, "sleep", lambda _: None)
        shape = RankLayout(layers, list(range(len(layers))))
        self.workers = [
            peers.WorkerInfo("p/0", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2", holds=shape)
        ]
        mine = peers.WorkerInfo("d/0", "tcp://127.0.0.1:3", "tcp://127.0.0.1:4", holds=shape)
        connector: Any = self.vllm.connector
        names = [str(at) for at in range(len(layers))]
        connector.set_xfer_handshake_metadata_pp_aware({(0, 0): Handshake(mine, names)})
        self.side: ours.SchedulerSide = connector._scheduler
        self.answered: list[str] = []
        self._loads: dict[str, str] = {}  # transfers, by request
        self._loading_blocks: dict[str, set[int]] = {}  # by transfer
        self.prefill_stats: dict[str, Any] = {}  # of first tokens, by request
        init_none_hash(sha256)

    def ask(
        self,
        name: str,
        first: int,
        *,
        leg: bool = True,
        priority: int = 0,
        length: int = LENGTH,
        outputs: StructuredOutputsParams | None = None,
        adapter: LoRARequest | None = None,
        answer: int = 2,
    ) -> None:
        """Adds a request with a prompt of its own. `answer`: its tokens."""
        sampling = SamplingParams(
            max_tokens=answer, temperature=0, ignore_eos=True, structured_outputs=outputs
        )
        if leg:
            assert self.side.engine is not None
            grant = grants.Grant(
                2,
                "decode",
                grants.new_transfer(),
                self.side.engine.incarnation,
                self.workers,
                until=600.0,
            )
            sampling.extra_args = {
                "kv_transfer_params": {grants.REQUEST_KEY: grants.mint(self.key, grant)}
            }
        prompt = [first, *range(10, 9 + length)]
        hasher = get_request_block_hasher(BLOCK, sha256)
        request = Request(
            name,
            prompt,
            sampling,
            None,
            block_hasher=hasher,
            priority=priority,
            lora_request=adapter,
        )
        self.vllm.add_request(request)

    def step(self, *, failed: set[str] = NOBODY, loaded: set[str] = NOBODY) -> SchedulerOutput:
        output = self.vllm.schedule()
        names = list(output.num_scheduled_tokens)
        tokens = [[] if self.vllm.requests[name].is_prefill_chunk else [7] for name in names]
        said = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=tokens,
            kv_connector_output=self._report(output.kv_connector_metadata, failed, loaded),
        )
        for outputs in self.vllm.update_from_output(output, said).values():
            for one in outputs.outputs:
                if one.prefill_stats is not None:
                    self.prefill_stats[one.request_id] = one.prefill_stats
            self.answered += [
                one.request_id for one in outputs.outputs if one.finish_reason is not None
            ]
        return output

    def _report(self, metadata: Any, failed: set[str], loaded: set[str]) -> KVConnectorOutput:
        """Returns the workers' report of loads that ended."""
        self._loads |= {name: transfer for transfer, name in metadata.loading_requests.items()}
        for event in metadata.receiver_events:
            if isinstance(event, events.LoadRequested):
                blocks = {block for group in event.blocks for block in group.ids}
                self._loading_blocks[event.transfer] = blocks
        ended = {*failed, *loaded} or None
        if compat.Results is not None:
            return KVConnectorOutput(finished_recving=ended, failed_recving=set(failed))
        lost = set().union(*(self._loading_blocks[self._loads[name]] for name in failed))
        return KVConnectorOutput(finished_recving=ended, invalid_block_ids=lost)

    def cached_tokens(self, name: str) -> int:
        """Returns how many tokens of a prompt its prefix cache would give to another request."""
        return int(self.vllm.kv_cache_manager.get_computed_blocks(self.vllm.requests[name])[1])

    def loading(self) -> set[str]:
        return {name for name, leg in self.side._legs.legs.items() if leg.waits_for_kv}


def parked(folder: Path, policy: str, monkeypatch: pytest.MonkeyPatch) -> Decode:
    """Returns an engine where nine of fourteen legs load and hold all but three of 93 blocks."""
    d = Decode(folder, 94, policy, monkeypatch)
    for at in range(14):
        d.ask(f"leg{at}", at)
    d.step()
    assert len(d.loading()) == 9 and d.vllm.kv_cache_manager.usage > 0.95
    return d


with_priorities = refused_before_032("at a decode instance for --scheduling-policy priority")
with_windows = refused_before_032("models with several KV-cache groups")
EACH_MODEL = pytest.mark.parametrize("has_windows", [False, pytest.param(True, marks=with_windows)])


@pytest.mark.parametrize(
    "policy",
    [pytest.param("fcfs", marks=with_windows), pytest.param("priority", marks=with_priorities)],
)
@pytest.mark.parametrize("first", [1, 3, 9])
def test_loads_that_fail_when_they_hold_the_pool(
    first: int, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Computing a prompt needs more blocks of the window's group than loading it.

    vLLM looks at requests with failed loads first.
    """
    d = parked(tmp_path, policy, monkeypatch)
    d.step(failed=set(sorted(d.loading())[:first]))
    for _ in range(3):
        d.step()
    d.step(loaded=set(sorted(d.loading())[:1]))  # one that succeeds behind them runs, and ends
    for _ in range(100):
        d.step(failed=d.loading())
    d.ask("plain", 99, leg=False)
    for _ in range(10):
        d.step()
    assert sorted(d.answered) == sorted([*(f"leg{at}" for at in range(14)), "plain"]), (
        d.vllm.kv_cache_manager.usage
    )


@with_windows
def test_a_failed_load_is_computed_beside_a_stream_of_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request yields its turn once: later loads find no room before it has some."""
    d = parked(tmp_path, "fcfs", monkeypatch)
    d.step(failed={"leg0"})
    for at in range(100, 200):
        d.ask(f"leg{at}", at)
        d.step(loaded=set(sorted(d.loading())[:1]))
        if "leg0" in d.answered:
            break
    assert "leg0" in d.answered and at < 120


@EACH_MODEL
def test_a_prompt_without_room_lets_loads_behind_it_run(
    has_windows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loads began while its grammar was compiled, and hold the blocks that it lacks."""
    d = Decode(tmp_path, 94, "fcfs", monkeypatch, has_windows=has_windows)
    monkeypatch.setattr(d.vllm.structured_output_manager, "grammar_init", lambda _: None)
    d.ask("first", 99, leg=False, length=6 * LENGTH, outputs=StructuredOutputsParams(regex="a"))
    for at in range(12):
        d.ask(f"leg{at}", at)
    d.step()
    assert len(d.loading()) > 5
    outputs: Any = d.vllm.requests["first"].structured_output_request
    outputs.grammar = create_autospec(StructuredOutputGrammar, instance=True)  # it is compiled
    for _ in range(3):
        d.step(loaded=set(sorted(d.loading())[:1]))
    for _ in range(30):
        d.step(loaded=d.loading())
    assert set(d.answered) == {"first", *(f"leg{at}" for at in range(12))}


def adapter(folder: Path, number: int) -> LoRARequest:
    """Makes the files of an adapter."""
    path = folder / f"adapter{number}"
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(bytes([number]))
    return LoRARequest(path.name, number, str(path))


@pytest.mark.parametrize("is_good", [True, False])
def test_loads_do_not_wait_for_one_whose_adapter_has_no_place(
    is_good: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM passes over its request for as long as others have all places of adapters."""
    d = Decode(tmp_path, 400, "fcfs", monkeypatch, has_windows=False)
    d.vllm.lora_config = LoRAConfig(max_loras=1)
    runs, waits = adapter(tmp_path, 1), adapter(tmp_path, 2)
    d.ask("runs", 1, adapter=runs, answer=100)
    d.ask("waits", 2, adapter=waits)
    d.step()
    d.step(loaded={"runs"})
    d.step(**{"loaded" if is_good else "failed": {"waits"}})
    d.ask("of the model", 3)
    d.ask("of the adapter that runs", 4, adapter=runs)
    for _ in range(20):
        d.step(loaded=d.loading())
    assert set(d.answered) == {"of the model", "of the adapter that runs"}
    for _ in range(100):
        d.step()
    assert d.answered[2:] == ["runs", "waits"]


@EACH_MODEL
@pytest.mark.parametrize("is_good", [True, False])
def test_only_a_good_load_enters_the_prefix_cache(
    is_good: bool, has_windows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed load's blocks hold other bytes than their hashes tell."""
    d = Decode(tmp_path, 94, "fcfs", monkeypatch, chunk=4 * BLOCK, has_windows=has_windows)
    d.ask("leg", 1)
    d.step()
    assert d.loading() == {"leg"} and d.cached_tokens("leg") == 0
    report = "loaded" if is_good else "failed"
    d.step(**{report: {"leg"}})
    assert d.cached_tokens("leg") == 0, "vLLM takes a report with its next step"
    d.step()
    # Whole blocks of all tokens but the last, or those that this step has computed.
    assert d.cached_tokens("leg") == (LENGTH - 1) // BLOCK * BLOCK if is_good else 4 * BLOCK


@EACH_MODEL
@pytest.mark.parametrize("is_good", [True, False])
def test_usage_counts_the_tokens_of_its_own_cache_alone(
    is_good: bool, has_windows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an engine that computes the prompt itself, after a failed load or without a P."""
    d = Decode(tmp_path, 94, "fcfs", monkeypatch, has_windows=has_windows)
    for name, length, cached in (("first", LENGTH, 0), ("second", 2 * LENGTH, 112)):
        d.ask(name, 1, length=length)
        d.step()
        assert d.loading() == {name}
        d.step(**{"loaded" if is_good else "failed": {name}})
        while name not in d.answered:
            d.step()
        stats = d.prefill_stats[name]
        assert (stats.num_prompt_tokens, stats.num_cached_tokens) == (length, cached)


@with_windows
@pytest.mark.parametrize("is_mixed", [True, False])
@pytest.mark.parametrize(("length", "unwritten"), [(124, 0), (128, 0), (129, 1), (130, 0)])
def test_blocks_that_a_load_does_not_write_are_cleared(
    length: int, unwritten: int, is_mixed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a cache of two formats their unused numbers may be NaN in the format of their layer."""
    d = Decode(tmp_path, 94, "fcfs", monkeypatch, is_mixed=is_mixed)
    d.ask("leg", 1, length=length)
    cleared = d.step().new_block_ids_to_zero or []
    assert d.loading() == {"leg"}
    groups = d.vllm.kv_cache_manager.get_block_ids("leg")
    last = [ids[-1] for ids in groups] if unwritten and is_mixed else []
    assert sorted(cleared) == sorted(last)
    d.step(loaded={"leg"})
    assert d.step().num_scheduled_tokens["leg"] == 1
    assert d.vllm.kv_cache_manager.get_block_ids("leg")[0][: len(groups[0])] == groups[0]


@with_priorities
def test_failed_loads_are_computed_beside_new_loads_of_higher_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM reserves blocks for the failed ones, and stops its scan at a load without room."""
    d = parked(tmp_path, "priority", monkeypatch)
    for at in range(20, 23):
        d.ask(f"leg{at}", at, priority=-1)
    for _ in range(150):
        d.step(failed=d.loading())
    assert len(d.answered) == 17, d.answered


@as_of_032("does not pad the step")
def test_the_step_after_a_load_is_as_wide_as_those_of_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the batch of all requests that decode would leave its CUDA graph for that step.

    A load leaves one token to compute, and vLLM 0.32 gives it places of drafts (-1).
    """
    drafted = 3
    ngram = {"method": "ngram", "num_speculative_tokens": drafted, "prompt_lookup_max": 2}
    d = Decode(tmp_path, 94, "fcfs", monkeypatch, ngram)
    d.ask("leg", 1)
    d.ask("decodes", 2, leg=False)
    assert "leg" not in d.step(loaded={"leg"}).num_scheduled_tokens
    d.vllm.update_draft_token_ids(DraftTokenIds(["decodes"], [[7] * drafted]))
    after_load = d.step()
    assert after_load.num_scheduled_tokens == {"leg": 1 + drafted, "decodes": 1 + drafted}
    assert after_load.scheduled_spec_decode_tokens == {
        "leg": [-1] * drafted,
        "decodes": [7] * drafted,
    }
