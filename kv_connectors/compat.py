"""Every difference between the versions of vLLM that are supported, and only that."""

from __future__ import annotations

import logging
from typing import Any

from packaging.version import Version
from vllm.distributed.kv_transfer.kv_connector.v1 import base

OLDEST, NEWEST = Version("0.28"), Version("0.33")  # tried; what is newer may work

log = logging.getLogger("vllm_disagg")

# 0.32 and later: one snapshot of what has ended, with failures by request.  Before: get_finished, and failures by block.
Results: Any = getattr(base, "KVConnectorTransferResults", None)


def check(version: str) -> str:
    """What keeps this version of vLLM from being used, in one line; empty when nothing does."""
    try:
        found = Version(version)
    except ValueError:
        return ""  # a development build: the user knows what they do
    release = Version(f"{found.major}.{found.minor}")
    if release < OLDEST:
        return f"vLLM {version} is too old for DisaggConnector: install vLLM {OLDEST} to {NEWEST}"
    if release > NEWEST:
        log.warning("vLLM %s is newer than what DisaggConnector was tried with (%s to %s)", version, OLDEST, NEWEST)
    return ""
