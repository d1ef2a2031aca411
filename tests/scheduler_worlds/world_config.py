"""vLLM's configuration for the engines of a scheduler world.

vLLM makes one configuration in a process; each engine has a copy with its own numbers.
"""

from __future__ import annotations

import atexit
import copy
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from vllm.config import KVTransferConfig, LoRAConfig, SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.structured_output import StructuredOutputManager
from world_models import HEAD_SIZE, HEADS, MAX_MODEL_TOKENS

import kv_connectors.connector  # noqa: F401 - loaded before vLLM finds it by its name
from vllm_disagg.fleet import keys
from vllm_disagg.fleet.keys import FleetKey

MAX_REQUESTS = 6  # that run at a time
MODEL_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "vocab_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HEAD_SIZE,
    "max_position_embeddings": 2048,
    "torch_dtype": "bfloat16",
}


@dataclass(frozen=True)
class EngineSetup:
    """The settings of one engine."""

    kv_role: str = "kv_both"
    block_size: int = 4
    pool_factor: float = 2.0  # blocks, as a multiple of those of one longest request
    tensor_ranks: int = 1
    stages: int = 1  # of its pipeline
    prefix_cache: bool = True
    chunk_tokens: int = 32  # of one step
    is_async: bool = False
    has_new_runner: bool = False  # vLLM's model runner V2
    policy: str = "fcfs"
    overlap: str = "layer"
    has_layer_calls: bool = True  # not in full CUDA graphs
    draft_method: str = ""  # of speculative decoding: "ngram", or "mtp", whose draft has KV
    drafted_tokens: int = 0  # a step, of each request; 0: no speculative decoding
    adapter_places: int = 0  # LoRA adapters of one step; 0: no adapters
    other_adapter: int = 0  # the one whose files are others here; 0: none


@dataclass(frozen=True)
class WorldFolder:
    """A folder with a model's configuration and a fleet key."""

    path: Path
    key: FleetKey


@cache
def world_folder() -> WorldFolder:
    """Returns the folder of this process."""
    path = Path(tempfile.mkdtemp(prefix="scheduler-worlds-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    (path / "config.json").write_text(json.dumps(MODEL_CONFIG))
    key_file = str(path / "key")
    keys.create(key_file)
    return WorldFolder(path, keys.load(key_file))


@cache
def _base_config() -> Any:
    """Returns the configuration from which those of all engines are copied."""
    init_none_hash(sha256)
    folder = world_folder()
    transfer = KVTransferConfig(
        kv_connector="DisaggConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"key_file": str(folder.path / "key")},
    )
    arguments: Any = EngineArgs(
        model=str(folder.path),
        max_model_len=MAX_MODEL_TOKENS,
        max_num_batched_tokens=MAX_MODEL_TOKENS,
        max_num_seqs=MAX_REQUESTS,
        skip_tokenizer_init=True,
        enable_prefix_caching=True,
        kv_transfer_config=transfer,
        enforce_eager=True,
    )
    return arguments.create_engine_config()


@cache
def structured_outputs() -> StructuredOutputManager:
    """Returns vLLM's manager of grammars, which no request here uses."""
    return StructuredOutputManager(_base_config())


def engine_config(setup: EngineSetup, data_parallel_rank: int | None) -> Any:
    """Returns the configuration of one engine."""
    config = copy.copy(_base_config())
    cache_config = copy.copy(config.cache_config)
    cache_config.block_size = setup.block_size
    cache_config.kv_cache_layout = "LBHNC"  # of vLLM on CPUs
    cache_config.enable_prefix_caching = setup.prefix_cache
    config.cache_config = cache_config
    scheduling = copy.copy(config.scheduler_config)
    scheduling.async_scheduling = setup.is_async
    scheduling.policy = setup.policy
    scheduling.max_num_batched_tokens = setup.chunk_tokens
    scheduling.max_num_scheduled_tokens = setup.chunk_tokens
    config.scheduler_config = scheduling
    parallel = copy.copy(config.parallel_config)
    parallel.tensor_parallel_size = setup.tensor_ranks
    parallel.pipeline_parallel_size = setup.stages
    parallel.data_parallel_index = data_parallel_rank or 0
    config.parallel_config = parallel
    transfer = copy.copy(config.kv_transfer_config)
    transfer.kv_role = setup.kv_role
    transfer.engine_id = "engine"
    if data_parallel_rank is not None:
        transfer.engine_id = f"engine_dp{data_parallel_rank}"
    extra = dict(transfer.kv_connector_extra_config)
    extra["overlap"] = setup.overlap
    transfer.kv_connector_extra_config = extra
    config.kv_transfer_config = transfer
    if setup.adapter_places:
        config.lora_config = LoRAConfig(max_loras=setup.adapter_places)
    if setup.drafted_tokens:
        config.speculative_config = _speculative_config(setup)
    return config


def _speculative_config(setup: EngineSetup) -> Any:
    """Returns vLLM's settings of speculative decoding."""
    base = _base_config()
    speculative: Any = SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=setup.drafted_tokens,
        prompt_lookup_max=3,
        target_model_config=base.model_config,
        target_parallel_config=base.parallel_config,
    )
    # The scheduler asks for no more than the method. The draft's layers are the model's last ones.
    speculative.method = setup.draft_method
    speculative.draft_parallel_config = copy.copy(base.parallel_config)
    speculative.draft_parallel_config.tensor_parallel_size = setup.tensor_ranks
    return speculative


def worker_config(config: Any, rank: int) -> Any:
    """Returns the configuration in the process of one rank."""
    own = copy.copy(config)
    own.parallel_config = copy.copy(config.parallel_config)
    own.parallel_config.rank = rank
    return own


@contextmanager
def model_runner(setup: EngineSetup) -> Iterator[None]:
    """Selects vLLM's model runner, by which its scheduler chooses depth and messages."""
    flag = str(int(setup.has_new_runner))
    with mock.patch.dict(os.environ, {"VLLM_USE_V2_MODEL_RUNNER": flag}):
        yield
