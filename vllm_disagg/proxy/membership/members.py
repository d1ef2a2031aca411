"""Carries out what `reconcile` decides: instances join, leave and are forgotten, while requests
run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Literal

import msgspec

from ..http.upstream import ConnectionPool
from ..routing.fleet import Fleet, Instance, Role
from .reconcile import Member, reconcile

log = logging.getLogger(__name__)

SWEEP_SECONDS = 0.2  # seconds between looks at instances that leave
SOURCE_ORDER = (
    "flags",
    "admin",
    "file",
    "registration",
    "dns",
    "kubernetes",
)  # who is believed when sources disagree


class MembershipChange(msgspec.Struct, frozen=True):
    """What somebody wants changed by hand."""

    kind: Literal[
        "add", "remove", "drain", "cut"
    ]  # add: and end a drain; remove: drain where others name it still
    url: str
    role: Role = "decode"  # of what is added


class Members:
    """The fleet's population. `connect` makes the pool of a URL that the operator has named or not,
    `watch` follows an instance for ever, `on_change` is told when somebody came or left.
    """

    def __init__(
        self,
        fleet: Fleet,
        pools: dict[str, ConnectionPool],
        connect: Callable[[str, bool], ConnectionPool],
        watch: Callable[[Instance], Coroutine[None, None, None]],
        on_change: Callable[[], None],
    ) -> None:
        self._fleet = fleet
        self._pools = pools
        self._connect = connect
        self._watch = watch
        self._on_change = on_change
        self._tasks: asyncio.TaskGroup | None = None
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._wanted: dict[str, list[Member]] = {name: [] for name in SOURCE_ORDER}
        self._drained: set[str] = set()
        self._told: set[str] = set()

    def start(self, tasks: asyncio.TaskGroup) -> asyncio.Task[None]:
        """Begin; what is followed is followed in `tasks`. Before this, sources are only listened
        to.
        """
        self._tasks = tasks
        self._settle()
        return tasks.create_task(self._sweep())

    def set(self, source: str, members: Iterable[Member]) -> None:
        """A source's whole answer; the order of a list is kept."""
        members = members if isinstance(members, list) else sorted(members)
        if members != self._wanted[source]:
            self._wanted[source] = members
            self._settle()

    def sources(self, url: str) -> list[str]:
        """Who names this URL."""
        return [
            name for name, members in self._wanted.items() if any(m.url == url for m in members)
        ]

    def is_named(self, url: str) -> bool:
        """Whether the operator names this URL, in a flag or the fleet file."""
        return not {"flags", "file"}.isdisjoint(self.sources(url))

    def role(self, url: str) -> Role | None:
        """The role that this URL has in the fleet now, even while it leaves."""
        return next(
            (i.role for i in (*self._fleet.instances, *self._fleet.leaving) if i.url == url), None
        )

    def apply(self, change: MembershipChange) -> None:
        """Change the fleet by hand."""
        admin = [member for member in self._wanted["admin"] if member.url != change.url]
        match change.kind:
            case "add":
                self._drained.discard(change.url)
                self._wanted["admin"] = [*admin, Member(change.url, change.role)]
            case "remove":
                self._wanted["admin"] = admin
                if self.sources(change.url):
                    self._drained.add(change.url)
                else:
                    self._drained.discard(change.url)
            case "drain":
                self._drained.add(change.url)
            case "cut":
                for instance in [i for i in self._fleet.leaving if i.url == change.url]:
                    self._remove(instance)
        self._settle()

    def is_drained(self, url: str) -> bool:
        return url in self._drained

    async def _sweep(self) -> None:
        """Forget instances that have left, for ever."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            for instance in list(self._fleet.leaving):
                if not instance.active_requests:
                    self._remove(instance)

    def close(self) -> None:
        for task in self._watches.values():
            task.cancel()
        for pool in self._pools.values():
            pool.close()

    def _settle(self) -> None:
        fleet, tasks = self._fleet, self._tasks
        if not tasks:
            return
        here = {Member(i.url, i.role): i for i in fleet.instances}
        leaving = {Member(i.url, i.role): i for i in fleet.leaving}
        changes = reconcile(here.keys(), leaving.keys(), self._wanted, self._drained)
        for conflict in changes.conflicts:
            if conflict not in self._told:
                log.warning("%s", conflict)
        self._told = set(changes.conflicts)
        for member in changes.leave:
            instance = here[member]
            fleet.instances.remove(instance)
            fleet.leaving.append(instance)
            log.info(
                "%s (%s) leaves: %d requests are to end",
                member.url,
                member.role,
                instance.active_requests,
            )
        for member in changes.resume:
            fleet.leaving.remove(leaving[member])
            fleet.instances.append(leaving[member])
            log.info("%s (%s) stays", member.url, member.role)
        for member in changes.add:
            instance = Instance(member.url, member.role)
            self._pools[member.url] = self._connect(member.url, self.is_named(member.url))
            fleet.instances.append(instance)
            self._watches[member.url] = tasks.create_task(self._watch(instance))
            if (by := self.sources(member.url)) != ["flags"]:
                log.info("%s (%s) joins, by %s", member.url, member.role, " and ".join(by))
        self._on_change()

    def _remove(self, instance: Instance) -> None:
        self._fleet.leaving.remove(instance)
        self._watches.pop(instance.url).cancel()
        self._pools.pop(instance.url).close()
        log.info("%s (%s) has left", instance.url, instance.role)
        self._settle()  # it may be wanted in another role
