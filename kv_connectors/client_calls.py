"""Refuses, in words, calls of vLLM's clients that change what other engines rely on.

vLLM reports a refusal to the client, and goes on. Connectors have no hook for this, so methods of
`EngineCore` are wrapped, once.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from vllm_disagg.errors import ConfigError

KV_STAYS_MAPPED = (
    "DisaggConnector keeps the KV cache in memory, because other engines may still read it"
)
# The methods of vLLM's workers that a client may call by name: they change neither weights nor KV.
# All others are refused, those of later versions too. Some load or zero weights, some compute into
# blocks that other requests hold (`compile_or_warm_up_model`), some unmap or replace the KV cache.
PERMITTED_METHODS = frozenset(
    (
        "check_health",
        "compute_weight_checksums",
        "get_compilation_match_table",
        "get_encoder_timing_stats",
        "get_model_inspection",
        "get_supported_tasks",
        "list_loras",
        "profile",
        "release_late_interaction_query_cache",
        "save_sharded_state",
        "save_tensorized_model",
        "synchronize_device",
    )
)
# vLLM's own, before an engine has its scheduler.
METHODS_AT_START = frozenset(("update_max_model_len",))


def keep_kv_mapped() -> None:
    """Makes vLLM refuse to unmap its KV cache while it runs: a receiver may still read it."""
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415 - it imports connectors

    sleep = EngineCore.sleep
    if getattr(sleep, "keeps_kv_mapped", False):
        return

    # vLLM converts a client's arguments by the signature, which `wraps` keeps.
    @wraps(sleep)
    def pause_only(self: Any, level: int = 1, *args: Any, **keywords: Any) -> Any:
        if level > 0:  # 0 pauses the scheduler, and unmaps nothing
            raise ConfigError(f"{KV_STAYS_MAPPED}: use level 0, or stop this engine")
        return sleep(self, level, *args, **keywords)

    pause_only.keeps_kv_mapped = True  # type: ignore[attr-defined]
    EngineCore.sleep = pause_only  # type: ignore[method-assign]
    if not hasattr(EngineCore, "release_kv_cache_memory"):  # before vLLM 0.32
        return

    def release_kv_cache_memory(self: Any) -> None:
        raise ConfigError(f"{KV_STAYS_MAPPED}: stop this engine")

    EngineCore.release_kv_cache_memory = release_kv_cache_memory  # type: ignore[method-assign]


def refuse_worker_methods() -> None:
    """Makes vLLM refuse methods of its workers that may change weights or KV.

    `/collective_rpc` runs any method by its name, and `/weight_checker` zeroes the weights.
    Functions, which vLLM takes only with VLLM_ALLOW_INSECURE_SERIALIZATION, are not looked at.
    """
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415 - it imports connectors

    call = EngineCore.collective_rpc
    if getattr(call, "refuses_worker_methods", False):
        return

    # vLLM converts a client's arguments by the signature, which `wraps` keeps.
    @wraps(call)
    def collective_rpc(self: Any, method: Any, *args: Any, **keywords: Any) -> Any:
        starts = not hasattr(self, "scheduler")
        permitted = PERMITTED_METHODS | METHODS_AT_START if starts else PERMITTED_METHODS
        if isinstance(method, str) and method not in permitted:
            raise ConfigError(
                "DisaggConnector permits only methods of workers that change neither weights nor"
                f" KV ({method} may): stop this engine, and start it as it is to be"
            )
        return call(self, method, *args, **keywords)

    collective_rpc.refuses_worker_methods = True  # type: ignore[attr-defined]
    EngineCore.collective_rpc = collective_rpc  # type: ignore[method-assign]
