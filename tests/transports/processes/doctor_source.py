"""The other process of the doctor's NIXL rates, on the first fake GPU."""

from __future__ import annotations

import sys
from typing import Any

from peer import memory

from kv_connectors.gpu import rates
from vllm_disagg.config import Config

SIZES_BYTES = (1 << 20, 4 << 20)

if __name__ == "__main__":
    rates.SIZES_BYTES = SIZES_BYTES
    if "--other-bytes" in sys.argv:
        rates.pattern = lambda: b"x" * rates.PATTERN_BYTES
    print("[0.0] [host:1] UCX  WARN  a line of UCX", flush=True)
    made: Any = memory(64, None)
    rates.serve(Config(insecure=True), made, sys.stdin)
