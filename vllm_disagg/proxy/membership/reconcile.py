"""Decides which instances join, leave or stay. Pure: no clock, no sockets.

Several *sources* name instances: flags, a file, the admin API, DNS, Kubernetes, and registration.
An instance is wanted while any source names it and the admin API has not drained it:

    wanted --> in the fleet --(not wanted)--> leaving --(no running request)--> removed
                    ^                            |
                    '------(wanted again)--------'

A leaving instance gets no new request; running ones end. A drained one that a source still names is
not removed: it stays among the leaving ones, so that operators see it, until its drain ends
(`Members` ends one whose address another engine has got).

A source that fails to answer keeps its last answer; only an answer takes instances away.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from ..routing.fleet import Role


class Member(msgspec.Struct, frozen=True, order=True):
    """Names an instance, as a source does."""

    url: str
    role: Role


class MembershipChanges(msgspec.Struct, frozen=True):
    """Lists the changes that turn the present fleet into the wanted one."""

    add: list[Member] = []
    add_drained: list[Member] = []  # named and drained: joins the leaving ones
    resume: list[Member] = []  # was leaving, is wanted again
    leave: list[Member] = []
    conflicts: list[str] = []  # messages for the log


def reconcile(
    here: Collection[Member],
    leaving: Collection[Member],
    wanted: Mapping[str, Iterable[Member]],
    drained: Collection[str],
) -> MembershipChanges:
    """Returns the changes of a fleet.

    `here`, `leaving`: its present and its leaving members. `wanted`: each source's members, sources
    in order of rank. `drained`: URLs that the admin API has drained.

    One URL has one role: of sources that disagree the first decides. An instance whose role changes
    leaves first, and joins again when it is removed.
    """
    chosen: dict[str, tuple[Member, str]] = {}
    conflicts = []
    for source, members in wanted.items():
        for member in members:
            first, first_source = chosen.setdefault(member.url, (member, source))
            if first.role != member.role:
                conflicts.append(
                    f"{member.url} is a {first.role} instance by {first_source} "
                    f"and a {member.role} instance by {source}"
                )
    right = [member for member, _ in chosen.values() if member.url not in drained]
    present_urls = {member.url for member in (*here, *leaving)}
    missing = [member for member, _ in chosen.values() if member.url not in present_urls]
    return MembershipChanges(
        add=[member for member in missing if member.url not in drained],
        add_drained=[member for member in missing if member.url in drained],
        resume=[member for member in right if member in leaving],
        leave=[member for member in here if member not in right],
        conflicts=conflicts,
    )
