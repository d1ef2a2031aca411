"""Free memory: the least of the machine and of all control groups around this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_disagg.launcher import free_memory

GIB = 1 << 30
UNLIMITED_IN_V1 = 9223372036854771712


def machine(root: Path, groups: str, files: dict[str, object]) -> Path:
    """Writes a machine with 64 GiB available; `files` are below /sys/fs/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {64 << 20} kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, value in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return root


@pytest.mark.parametrize(
    ("groups", "files", "gib", "limited_by"),
    [
        ("0::/\n", {}, 64, "the machine"),
        ("0::/\n", {"memory.max": 8 * GIB, "memory.current": GIB}, 7, ""),
        (
            "0::/system.slice/engine.service\n",
            {
                "system.slice/engine.service/memory.max": 6 * GIB,
                "system.slice/engine.service/memory.current": 2 * GIB,
                "system.slice/memory.max": "max",
                "system.slice/memory.current": 5 * GIB,
            },
            4,
            "system.slice/engine.service",
        ),
        (
            "0::/kubepods/pod/box\n",
            {
                "kubepods/pod/box/memory.max": "max",
                "kubepods/pod/box/memory.current": GIB,
                "kubepods/pod/memory.max": 4 * GIB,
                "kubepods/pod/memory.current": 5 * GIB,
            },
            0,
            "kubepods/pod",
        ),
        (
            "4:cpu,memory:/docker/box\n1:cpu:/\n0::/\n",
            {
                "memory/docker/box/memory.limit_in_bytes": 3 * GIB,
                "memory/docker/box/memory.usage_in_bytes": GIB,
                "memory/memory.limit_in_bytes": UNLIMITED_IN_V1,
                "memory/memory.usage_in_bytes": 9 * GIB,
            },
            2,
            "memory/docker/box",
        ),
        (
            "0::/\n",
            {
                "memory.max": 8 * GIB,
                "memory.current": 7 * GIB,
                "memory.stat": f"anon {GIB}\ninactive_file {5 * GIB}",
            },
            6,
            "",
        ),
        (
            "4:memory:/\n",
            {
                "memory/memory.limit_in_bytes": 8 * GIB,
                "memory/memory.usage_in_bytes": 7 * GIB,
                "memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {5 * GIB}",
            },
            6,
            "memory",
        ),
        (  # a container: the path is outside, and its group is the root that it sees
            "4:memory:/docker/box\n",
            {"memory/memory.limit_in_bytes": 3 * GIB, "memory/memory.usage_in_bytes": 0},
            3,
            "memory",
        ),
        ("0::/../other\n", {"memory.max": "max", "memory.current": 1}, 64, "the machine"),
    ],
)
def test_the_least_limit_counts(
    groups: str, files: dict[str, object], gib: float, limited_by: str, tmp_path: Path
) -> None:
    found = free_memory.find(machine(tmp_path, groups, files))
    assert found.gib == gib
    if limited_by != "the machine":
        folder = tmp_path / "sys/fs/cgroup" / limited_by
        assert found.limited_by == f"the control group {folder}"
    else:
        assert found.limited_by == limited_by


def test_this_machine_has_free_memory() -> None:
    assert free_memory.find().gib > 0
