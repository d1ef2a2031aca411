"""Old names of flags and settings, which versions before `REFUSED_FROM` accept with a warning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

REFUSED_FROM = "0.2"


def warning(used: Iterable[str], new_names: Mapping[str, str]) -> str:
    """Returns one line with the old names in use and their new names; empty if none is in use."""
    renamed = [f"{old} is now {new_names[old]}" for old in used]
    if not renamed:
        return ""
    return f"{', '.join(renamed)}; version {REFUSED_FROM} refuses the old names"
