"""Which instances there should be, and what to do about it.  Pure: no clock, no sockets.

Several *sources* say which instances they know: flags, a file, the admin API, DNS, Kubernetes, the
instances themselves. An instance is wanted while any source names it and nobody has drained it by
hand:

    wanted -> in the fleet -> (no source names it, or drained) -> leaving: gets no new request,
    running ones end
                  ^                                                    |                         |
                  '------------------- wanted again ------------------'                    idle: removed

A source that fails to answer keeps what it last said; only an answer takes instances away.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from ..routing.fleet import Role


class Member(msgspec.Struct, frozen=True, order=True):
    """An instance as a source names it."""

    url: str
    role: Role


class MembershipChanges(msgspec.Struct, frozen=True):
    """What makes the fleet as it is wanted."""

    add: list[Member] = []
    resume: list[Member] = []  # was leaving, is wanted again
    leave: list[Member] = []
    conflicts: list[str] = []  # for people


def reconcile(
    here: Collection[Member],
    leaving: Collection[Member],
    wanted: Mapping[str, Iterable[Member]],
    drained: Collection[str],
) -> MembershipChanges:
    """What to change, given who is `here`, who is `leaving`, what each source wants, in order of
    rank, and which URLs are drained by hand.

    One URL has one role: of sources that disagree the first is believed. An instance that is to
    change its role leaves first, and joins again when it is gone.
    """
    chosen: dict[str, tuple[Member, str]] = {}
    conflicts = []
    for source, members in wanted.items():
        for member in members:
            first, by = chosen.setdefault(member.url, (member, source))
            if first.role != member.role:
                conflicts.append(
                    f"{member.url} is a {first.role} instance by {by} and a {member.role} instance by {source}"
                )
    right = [member for member, _ in chosen.values() if member.url not in drained]
    still_leaving = {member.url for member in leaving}
    return MembershipChanges(
        add=[
            m
            for m in right
            if m not in here and m.url not in still_leaving and not _holds(here, m.url)
        ],
        resume=[m for m in right if m in leaving],
        leave=[m for m in here if m not in right],
        conflicts=conflicts,
    )


def _holds(members: Collection[Member], url: str) -> bool:
    return any(member.url == url for member in members)
