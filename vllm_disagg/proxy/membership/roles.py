"""Lets the roles of instances follow the load: `--roles auto`.

Every OBSERVATION_SECONDS the controller (`fleet/role_control.py`) gets the instances that are up,
the load that their engines have measured, and the work that waits in this proxy. Only instances
whose engine takes both roles change theirs.

Of several proxy workers the first decides for all. After each observation it sends the others all
roles that differ from the named ones, not only the changes. So they agree, whatever they missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ...fleet.role_control import (
    ChangeRole,
    LoadObserved,
    ReportWanted,
    RoleAction,
    RoleController,
    RoleMember,
    RoleRules,
)
from ..routing.fleet import Fleet, Instance, Role
from .step_profiles import StepProfiles

log = logging.getLogger(__name__)

OBSERVATION_SECONDS = 2.0
# Before the first observation. A worker that was restarted knows the roles of instances that its
# sources, DNS for instance, name only later, and its first observation forgets all others.
START_SECONDS = 10.0


class RoleKeeper:
    """Observes the fleet and carries out the controller's actions."""

    def __init__(
        self,
        fleet: Fleet,
        rules: RoleRules,
        waiting_work: Callable[[], float],
        set_roles: Callable[[dict[str, Role]], None],
        wanted: dict[str, int],
    ) -> None:
        """`waiting_work`: seconds in which one instance computes the prompts that wait or run.

        `set_roles` applies the roles everywhere, by URL; all other instances have their named one.
        `wanted` gets the instances of each role that the load needs.
        """
        self._fleet = fleet
        self._controller = RoleController(rules)
        self._profiles = StepProfiles()
        self._waiting_work = waiting_work
        self._set_roles = set_roles
        self._wanted = wanted
        self._logged_obstacle = ""

    def on_metrics_read(self, instance: Instance, page: bytes, now: float) -> None:
        """Takes an engine's metrics page."""
        self._profiles.on_metrics_read(instance.url, instance.metrics_label, page, now)

    async def run(self) -> None:
        """Observes until cancelled."""
        await asyncio.sleep(START_SECONDS)
        while True:
            await asyncio.sleep(OBSERVATION_SECONDS)
            try:
                self.observe(asyncio.get_running_loop().time())
            except Exception:  # it must not end the proxy
                log.exception("roles: the load was not judged; all instances keep their roles")

    def observe(self, now: float) -> None:
        """Shows the controller the fleet and its load, and carries out its actions."""
        instances = (*self._fleet.instances, *self._fleet.leaving)
        roles = {i.url: i.role for i in instances if i.role != i.named_role}
        try:
            for action in self._actions(now):
                match action:
                    case ReportWanted():
                        self._wanted.update(prefill=action.prefill, decode=action.decode)
                    case ChangeRole():
                        log.info(
                            "roles: %s takes new requests as a %s instance; its running ones end"
                            " as they began",
                            action.name,
                            action.role,
                        )
                        roles[action.name] = action.role
        finally:
            self._set_roles(roles)

    def _actions(self, now: float) -> list[RoleAction]:
        up = [i for i in self._fleet.instances if i.up]
        obstacle = _obstacle(up)
        if obstacle and obstacle != self._logged_obstacle:
            log.warning(
                "roles: %s: roles stay as they are; give each model a proxy of its own", obstacle
            )
        self._logged_obstacle = obstacle
        return [] if obstacle else self._controller.handle(self._observed(up, now), now)

    def _observed(self, up: list[Instance], now: float) -> LoadObserved:
        """Returns the members and the load of the instances that are up."""
        keys = {i.compatibility_key for i in up if i.takes_both_roles}
        members = []
        fixed_prefill = 0
        fixed_decode = 0
        for instance in up:
            if instance.takes_both_roles and instance.can_transfer:
                members.append(RoleMember(instance.url, instance.role, instance.active_requests))
            elif instance.role == "decode":
                fixed_decode += 1
            elif instance.can_transfer and (not keys or instance.compatibility_key in keys):
                fixed_prefill += 1
        load = self._profiles.load((i.url for i in up), now)
        return LoadObserved(
            members=tuple(members),
            fixed_prefill=fixed_prefill,
            fixed_decode=fixed_decode,
            starting=frozenset(i.role for i in self._fleet.instances if not i.models),
            prefill_work=load.prefill_work,
            waiting_work=self._waiting_work(),
            sequences=load.sequences,
            contexts=load.contexts,
            kv_tokens=load.kv_tokens,
            steps=load.steps,
        )


def _obstacle(up: list[Instance]) -> str:
    """Returns why roles cannot follow the load of these instances; "" if they can."""
    members = [i for i in up if i.takes_both_roles]
    keys = {i.compatibility_key for i in members}
    if len(keys) > 1:
        return f"the instances of both roles have {len(keys)} kinds of KV cache"
    models = frozenset[str]().union(*(i.models for i in members))
    for instance in up:
        if members and instance.models.isdisjoint(models):
            return f"{instance.url} serves another model than the instances of both roles"
    return ""
