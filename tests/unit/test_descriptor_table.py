"""The table of descriptors has its size before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

RESERVE = """
import os, re, resource, sys
from pathlib import Path
from vllm_disagg import descriptor_table

limit, count = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
before = os.listdir("/proc/self/fd")
descriptor_table.reserve(count)
descriptor_table.reserve(count)
assert os.listdir("/proc/self/fd") == before, "a descriptor is left open"
print(re.search(r"FDSize:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.parametrize(("limit", "count", "size"), [(5000, 4096, 4096), (1000, 4096, 1024)])
def test_the_table_has_the_room_at_once(limit: int, count: int, size: int) -> None:
    """As much as asked for, or as the limit of open files allows."""
    command = [sys.executable, "-c", RESERVE, str(limit), str(count)]
    assert int(subprocess.run(command, check=True, capture_output=True).stdout) == size
