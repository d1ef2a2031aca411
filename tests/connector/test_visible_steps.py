"""Each step of vLLM's scheduler shows on its metrics page, as `engine_steps` assumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import prometheus_client
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from vllm_disagg.proxy.routing.engine_steps import fingerprint

BLOCK, CHUNK, PROMPT = 128, 256, 1900  # tokens
HEADS: dict[str, Any] = {
    "block_size": BLOCK,
    "num_kv_heads": 1,
    "head_size": 32,
    "dtype": torch.bfloat16,
}
SPECS = {
    "full": FullAttentionSpec(**HEADS),
    "window": SlidingWindowSpec(**HEADS, sliding_window=256),
}
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


class Engine:
    """vLLM's scheduler and its metrics page, with a model that always generates the same token."""

    def __init__(self, folder: Path, kind: str) -> None:
        (folder / "config.json").write_text(json.dumps(MODEL))
        args = EngineArgs(
            model=str(folder),
            skip_tokenizer_init=True,
            max_num_batched_tokens=CHUNK,
            max_model_len=2048,
            max_num_seqs=8,
            enable_prefix_caching=False,
        )
        config = args.create_engine_config()
        config.cache_config.num_gpu_blocks = 100
        cache = KVCacheConfig(
            num_blocks=100,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["l"], SPECS[kind])],
        )
        manager = StructuredOutputManager(config)
        sizes = {"block_size": BLOCK, "hash_block_size": BLOCK}
        known = Scheduler.__init__.__code__.co_varnames
        self.scheduler = Scheduler(
            config,
            cache,
            manager,
            log_stats=True,
            **{name: size for name, size in sizes.items() if name in known},
        )
        self.page = PrometheusStatLogger(config)

    def ask(self, name: str, tokens: int) -> None:
        given: dict[str, Any] = (
            {"eos_token_id": 1} if "eos_token_id" in Request.__init__.__code__.co_varnames else {}
        )
        params = SamplingParams(max_tokens=1)
        self.scheduler.add_request(
            Request(name, list(range(10, 10 + tokens)), params, pooling_params=None, **given)
        )

    def step(self) -> bytes:
        """Makes one step; returns the fingerprint of the page after it."""
        now = self.scheduler.schedule()
        names = list(now.num_scheduled_tokens)
        requests = self.scheduler.requests
        said = [
            [5] if requests[n].num_computed_tokens >= requests[n].num_tokens else [] for n in names
        ]
        places = {name: at for at, name in enumerate(names)}
        made = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index=places,
            sampled_token_ids=said,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )
        for outputs in self.scheduler.update_from_output(now, made).values():
            self.page.record(outputs.scheduler_stats, IterationStats() if outputs.outputs else None)
        return fingerprint(prometheus_client.generate_latest())


@pytest.mark.parametrize("kind", SPECS)
def test_each_step_shows(kind: str, tmp_path: Path) -> None:
    """The chunks of a long prompt give no output, but full attention changes the cache usage.

    With a sliding window the usage stays the same once the window is full. Then one more request,
    or one less, shows.
    """
    engine = Engine(tmp_path, kind)
    engine.ask("long", PROMPT)
    pages = [engine.step() for _ in range(3)]
    assert all(len(page.splitlines()) == 4 for page in pages)
    if kind == "full":
        assert len(set(pages)) == 3
    else:
        assert pages[1] == pages[2], "else nothing would have to be asked"
    engine.ask("nudge", 4)
    after = engine.step()
    assert after != pages[-1]
    assert engine.scheduler.requests["nudge"].num_computed_tokens == 0, "it waits behind the chunks"
    engine.scheduler.finish_requests("nudge", RequestStatus.FINISHED_ABORTED)
    assert engine.step() != after
