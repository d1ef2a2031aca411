"""Reads how much memory this process may still take: of the machine, and of its control groups.

Version 2 has one tree of groups, version 1 one for memory alone; a machine may have both. A group
is limited by its parents, too. A container may see its own group as the root of the tree, while
/proc/self/cgroup has the path outside: folders that are not there are skipped. Cached files that
were not used lately count as free, as they do in MemAvailable: a model's files stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

GIB = 1 << 30
ROOT = Path("/")


class FreeMemory(msgspec.Struct, frozen=True):
    """Free memory, and what limits it most."""

    gib: float
    limited_by: str  # "the machine", or a control group's folder


def find(root: Path = ROOT) -> FreeMemory:
    """Returns the least free memory of the machine and of this process's control groups."""
    found = FreeMemory(_of_machine(root) / GIB, "the machine")
    for folder, limit_name, used_name in _groups(root):
        try:
            limit = int((folder / limit_name).read_text())
            used = int((folder / used_name).read_text())
        except (OSError, ValueError):  # no such group, or no limit ("max")
            continue
        gib = max(0, limit - used + _unused_cache(folder)) / GIB
        if gib < found.gib:
            found = FreeMemory(gib, f"the control group {folder}")
    return found


def _of_machine(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _unused_cache(folder: Path) -> int:
    """Returns the bytes of cached files that a group would drop before it runs out."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    found = dict(line.split(" ", 1) for line in lines if " " in line)
    # In version 1 the name without `total_` leaves inner groups out.
    return int(found.get("total_inactive_file") or found.get("inactive_file") or 0)


def _groups(root: Path) -> Iterator[tuple[Path, str, str]]:
    """Yields folders of this process's groups, the inner ones first, and their files' names."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = ["0::/"]
    for line in lines:
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0":
            names = ("memory.max", "memory.current")
            top = mount
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
            top = mount / "memory"
        else:
            continue
        group = Path(path.lstrip("/"))
        for inner in (group, *group.parents):
            # "..": a group outside of the tree that this container sees
            if ".." not in inner.parts:
                yield (top / inner, *names)
