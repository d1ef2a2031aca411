"""Facts that instances, proxy, launcher, planner and bench of a fleet share.

Each fact stands here once: supported versions of vLLM, roles of instances, routing policies.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from packaging.version import Version

# First and last tested version. Older ones do not work, newer ones may. Of 0.33, which has no build
# for CPUs, the Python was tested, over the CPU kernels of 0.32.
OLDEST_VLLM = Version("0.28")
NEWEST_VLLM = Version("0.33")

# vLLM's `kv_role` by the role of an instance.
KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}

# A flag of each `vllm serve`: the proxy requests these paths four times a second.
QUIET_ACCESS_LOG_FLAG = "--disable-access-log-for-endpoints=/health,/metrics"

# Routing policies of the proxy and of the planner's simulation; `proxy/routing/policies.py`
# describes them.
PolicyName = Literal["prefix_aware", "least_loaded", "power_of_two", "round_robin"]
POLICY_NAMES: tuple[PolicyName, ...] = get_args(PolicyName)
DEFAULT_POLICY: Final = "prefix_aware"
# Load of a decode instance: its running requests' prompts, and this cost for each of them.
REQUEST_COST_BYTES = 2048
BYTES_PER_TOKEN = 4  # of English text, where a cost in bytes is taken in tokens
REUSE_POLICY: Final = "prefix_aware"  # the one with which a P reads KV from a D
# A P reads KV from a D that has at least so much more of the prompt: about 250 tokens.
MIN_REUSE_BYTES = 1024
# Share of its KV cache above which a decode instance comes after all others.
FULL_CACHE_RATIO = 0.9

# Legs that the proxy runs at one prefill instance at a time. More of them overlap tokenization and
# queueing; fewer keep P's blocks for running work.
DEFAULT_PREFILL_CONCURRENCY = 8
