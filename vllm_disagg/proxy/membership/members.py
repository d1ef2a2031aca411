"""Carries out decisions of `reconcile`: instances join, leave and are removed while serving."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Literal

import msgspec

from ..http.addresses import split_rank
from ..http.connection_pool import ConnectionPool
from ..routing.fleet import Fleet, Instance, Role
from .reconcile import Member, MembershipChanges, reconcile

log = logging.getLogger(__name__)

SWEEP_SECONDS = 0.2  # between two checks of leaving instances

# The first decides when sources disagree.
SOURCE_ORDER = ("flags", "admin", "file", "registration", "dns", "kubernetes")


class MembershipChange(msgspec.Struct, frozen=True):
    """Describes one change by the admin API, or by one proxy worker for the others.

    `resume` ends a drain, and so does `add`, which also names the instance. `remove` drains an
    instance that another source still names. `left`: no source names the instance of a drained
    engine any more. `back`: that engine is there again.
    """

    kind: Literal["add", "remove", "drain", "resume", "cut", "left", "back"]
    url: str
    role: Role = "decode"  # of an added instance
    incarnation: str = ""  # of an engine that has left


class Members:
    """Keeps the fleet's members, as the sources name them.

    A drain is one of an engine, and outlives restarts of it. Once no source names its instance, and
    it is removed, the address may be another engine's: a pod gets the address of an earlier one.
    The drain ends when an engine of another incarnation answers at a URL that is named again. One
    that a source drops for a moment stays drained.
    """

    def __init__(
        self,
        fleet: Fleet,
        pools: dict[str, ConnectionPool],
        connect: Callable[[str, bool], ConnectionPool],
        watch: Callable[[Instance], Coroutine[None, None, None]],
        on_change: Callable[[], None],
    ) -> None:
        """`connect` makes the pool of a URL; its flag is True for a URL that the operator named.

        `watch` watches an instance until cancelled. `on_change` is called after each change.
        """
        self._fleet = fleet
        self._pools = pools
        self._connect = connect
        self._watch = watch
        self._on_change = on_change
        self._tasks: asyncio.TaskGroup | None = None
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._wanted: dict[str, list[Member]] = {name: [] for name in SOURCE_ORDER}
        self._last_set: dict[str, Iterable[Member]] = {}  # as each source named them
        self._drained: set[str] = set()
        # Of drained instances that no source named any more, by URL.
        self._left_incarnations: dict[str, str] = {}
        # Called with a change that was found here: a drained engine has left or is back, or its
        # drain has ended by itself. A worker that starts later has not seen that engine.
        self.on_own_change: Callable[[MembershipChange], None] = lambda change: None
        self._roles: dict[str, Role] = {}  # by URL: roles that follow the load
        self._logged_conflicts: set[str] = set()

    def start(self, tasks: asyncio.TaskGroup) -> asyncio.Task[None]:
        """Applies the members named so far, and watches them in `tasks`; returns the sweeper."""
        self._tasks = tasks
        self._settle()
        return tasks.create_task(self._sweep())

    def set(self, source: str, members: Iterable[Member]) -> None:
        """Takes all members that a source names; the order of a list is kept."""
        # Most registrations name no new one, and a fleet of 1,000 has 500 a second.
        if isinstance(members, frozenset) and members is self._last_set.get(source):
            return
        self._last_set[source] = members
        members = members if isinstance(members, list) else sorted(members)
        if members != self._wanted[source]:
            self._wanted[source] = members
            self._settle()

    def sources(self, url: str) -> list[str]:
        """Returns the sources that name this URL."""
        return [
            name for name, members in self._wanted.items() if any(m.url == url for m in members)
        ]

    def is_named(self, url: str) -> bool:
        """Returns whether the operator names this URL, in a flag or the fleet file."""
        return not {"flags", "file"}.isdisjoint(self.sources(url))

    def role(self, url: str) -> Role | None:
        """Returns the role that sources name for this URL, even while it leaves; else None."""
        for instance in (*self._fleet.instances, *self._fleet.leaving):
            if instance.url == url:
                return instance.named_role
        return None

    def apply(self, change: MembershipChange) -> None:
        """Applies a change by the admin API, or by another worker."""
        if change.kind not in ("cut", "left"):
            # A drain, if there is one, is now one of the engine that is there.
            self._left_incarnations.pop(change.url, None)
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
            case "resume":
                self._drained.discard(change.url)
            case "cut":
                for instance in [i for i in self._fleet.leaving if i.url == change.url]:
                    self._remove(instance)
            case "left":
                if change.url in self._drained:  # its drain may have ended meanwhile
                    self._left_incarnations[change.url] = change.incarnation
        self._settle()

    def set_roles(self, roles: Mapping[str, Role]) -> None:
        """Takes the roles that follow the load, by URL; all other instances have their named one.

        New requests have the new role; running legs end as they are.
        """
        self._roles = dict(roles)
        # A leaving instance may be named again.
        for instance in (*self._fleet.instances, *self._fleet.leaving):
            instance.take_role(roles.get(instance.url, instance.named_role))
        self._on_change()

    def is_drained(self, url: str) -> bool:
        """Returns whether the admin API has drained this URL."""
        return url in self._drained

    def instances_of(self, url: str) -> list[str]:
        """Returns the known instances of a URL: itself, or the data parallel ranks of a server.

        A drained URL stays known: what its instance left behind can be removed.
        """
        known = {member.url for members in self._wanted.values() for member in members}
        known.update(i.url for i in (*self._fleet.instances, *self._fleet.leaving))
        known.update(self._drained)
        return sorted(other for other in known if url in (other, split_rank(other)[0]))

    async def _sweep(self) -> None:
        """Removes leaving instances without requests, until cancelled.

        A drained instance stays while a source names it in its role.
        """
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            for instance in list(self._fleet.leaving):
                if self._has_outlived_drain(instance):
                    self._end_drain(instance)
                    continue
                is_listed = self._fleet.drained.get(instance.url) == instance.named_role
                if not instance.active_requests and not is_listed:
                    self._remove(instance)

    def _has_outlived_drain(self, instance: Instance) -> bool:
        """Returns whether another engine than the drained one has its address."""
        left = self._left_incarnations.get(instance.url)
        if left is None or not instance.up or not instance.engine:
            return False
        if instance.engine.incarnation != left:
            return True
        # A restart leaves it drained from now on.
        del self._left_incarnations[instance.url]
        self.on_own_change(MembershipChange("back", instance.url))
        return False

    def _end_drain(self, instance: Instance) -> None:
        log.info(
            "instance %s (%s) is drained no longer: another engine answers there",
            instance.url,
            instance.role,
        )
        change = MembershipChange("resume", instance.url)
        self.apply(change)
        self.on_own_change(change)

    def close(self) -> None:
        """Ends all watches and closes all connections."""
        for task in self._watches.values():
            task.cancel()
        for pool in self._pools.values():
            pool.close()

    def _settle(self) -> None:
        """Changes the fleet to the wanted one."""
        if not self._tasks:
            return
        here = {Member(i.url, i.named_role): i for i in self._fleet.instances}
        leaving = {Member(i.url, i.named_role): i for i in self._fleet.leaving}
        changes = reconcile(here.keys(), leaving.keys(), self._wanted, self._drained)
        self._log_conflicts(changes)
        self._fleet.drained = self._drained_roles()
        for member in changes.leave:
            self._begin_leaving(here[member])
        for member in changes.resume:
            self._fleet.leaving.remove(leaving[member])
            self._fleet.instances.append(leaving[member])
            log.info("instance %s (%s) stays: it is named again", member.url, member.role)
        for member in changes.add:
            self._add(member, self._fleet.instances, self._tasks)
        for member in changes.add_drained:
            self._add(member, self._fleet.leaving, self._tasks)
        self._on_change()

    def _drained_roles(self) -> dict[str, Role]:
        """Returns the drained URLs that a source still names, with the role by the first one."""
        roles: dict[str, Role] = {}
        for members in self._wanted.values():
            for member in members:
                if member.url in self._drained:
                    roles.setdefault(member.url, member.role)
        return roles

    def _log_conflicts(self, changes: MembershipChanges) -> None:
        for conflict in changes.conflicts:
            if conflict not in self._logged_conflicts:
                log.warning("%s", conflict)
        self._logged_conflicts = set(changes.conflicts)

    def _begin_leaving(self, instance: Instance) -> None:
        self._fleet.instances.remove(instance)
        self._fleet.leaving.append(instance)
        log.info(
            "instance %s (%s) leaves: no new requests, %d are running",
            instance.url,
            instance.role,
            instance.active_requests,
        )

    def _add(self, member: Member, place: list[Instance], tasks: asyncio.TaskGroup) -> None:
        """Adds an instance to `place`: the fleet's used or its leaving instances."""
        instance = Instance(member.url, member.role)
        # The first worker may have changed it before this one heard of it.
        instance.take_role(self._roles.get(member.url, member.role))
        self._pools[member.url] = self._connect(member.url, self.is_named(member.url))
        place.append(instance)
        self._watches[member.url] = tasks.create_task(self._watch(instance))
        sources = self.sources(member.url)
        if sources != ["flags"]:
            log.info(
                "instance %s (%s) joins, by %s", member.url, member.role, " and ".join(sources)
            )

    def _remove(self, instance: Instance) -> None:
        self._fleet.leaving.remove(instance)
        self._roles.pop(instance.url, None)
        self._watches.pop(instance.url).cancel()
        self._pools.pop(instance.url).close()
        if instance.url in self._drained and instance.engine and not self.sources(instance.url):
            incarnation = instance.engine.incarnation
            self._left_incarnations[instance.url] = incarnation
            self.on_own_change(MembershipChange("left", instance.url, incarnation=incarnation))
        log.info("instance %s (%s) has left", instance.url, instance.role)
        self._settle()  # it may be wanted in another role, or listed as drained
