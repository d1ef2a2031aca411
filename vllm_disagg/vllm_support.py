"""Supported versions of vLLM, and its names for the roles of instances.

The launcher, the planner and the connector share them. This module imports neither vLLM nor any
other module of this project.
"""

from __future__ import annotations

from packaging.version import Version

# Tested versions, first and last; a newer one may work, an older one does not.
OLDEST_VLLM = Version("0.28")
NEWEST_VLLM = Version("0.33")

KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}  # vLLM's kv_role
