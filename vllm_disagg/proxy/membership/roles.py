"""Lets the roles of instances follow the load: `--roles auto`.

Every OBSERVATION_SECONDS the controller (`fleet/role_control.py`) gets the instances that are up,
the load that their engines have measured, and the work that waits in this proxy. Only instances
whose engine takes both roles change theirs. Of several proxy workers the first decides for all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ...fleet.role_control import (
    ChangeRole,
    LoadObserved,
    ReportWanted,
    RoleController,
    RoleMember,
    RoleRules,
)
from ..routing.fleet import Fleet, Instance
from .members import MembershipChange
from .step_profiles import StepProfiles

log = logging.getLogger(__name__)

OBSERVATION_SECONDS = 2.0


class RoleKeeper:
    """Observes the fleet and carries out the controller's actions."""

    def __init__(
        self,
        fleet: Fleet,
        rules: RoleRules,
        waiting_work: Callable[[], float],
        change: Callable[[MembershipChange], None],
        wanted: dict[str, int],
    ) -> None:
        """`waiting_work`: seconds in which one instance computes the prompts that wait or run.

        `change` applies a change of a role everywhere. `wanted` gets the instances of each role
        that the load needs.
        """
        self._fleet = fleet
        self._controller = RoleController(rules)
        self._profiles = StepProfiles()
        self._waiting_work = waiting_work
        self._change = change
        self._wanted = wanted
        self._has_warned = False

    def on_metrics_read(self, instance: Instance, page: bytes, now: float) -> None:
        """Takes an engine's metrics page."""
        self._profiles.on_metrics_read(instance.url, instance.metrics_label, page, now)

    async def run(self) -> None:
        """Observes until cancelled."""
        while True:
            await asyncio.sleep(OBSERVATION_SECONDS)
            self.observe(asyncio.get_running_loop().time())

    def observe(self, now: float) -> None:
        """Shows the controller the fleet and its load, and carries out its actions."""
        up = [i for i in self._fleet.instances if i.up]
        if self._has_several_models(up):
            return
        for action in self._controller.handle(self._observed(up), now):
            match action:
                case ReportWanted():
                    self._wanted.update(prefill=action.prefill, decode=action.decode)
                case ChangeRole():
                    log.info(
                        "roles: %s takes new requests as a %s instance; its running ones end as"
                        " they began",
                        action.name,
                        action.role,
                    )
                    self._change(MembershipChange("role", action.name, action.role))

    def _has_several_models(self, up: list[Instance]) -> bool:
        """Whether instances that can change roles do not fit each other; logs it once."""
        keys = {i.compatibility_key for i in up if i.takes_both_roles}
        if len(keys) > 1 and not self._has_warned:
            log.warning(
                "roles: the instances of both roles have %d kinds of KV cache: their roles stay as"
                " they are; give each model a proxy of its own",
                len(keys),
            )
        self._has_warned = len(keys) > 1
        return self._has_warned

    def _observed(self, up: list[Instance]) -> LoadObserved:
        """Returns the members and the load of the instances that are up."""
        members = []
        fixed_prefill = 0
        fixed_decode = 0
        for instance in up:
            if instance.takes_both_roles and instance.can_transfer:
                members.append(RoleMember(instance.url, instance.role, instance.active_requests))
            elif instance.role == "decode":
                fixed_decode += 1
            elif instance.can_transfer:
                fixed_prefill += 1
        load = self._profiles.load(i.url for i in up)
        return LoadObserved(
            members=tuple(members),
            fixed_prefill=fixed_prefill,
            fixed_decode=fixed_decode,
            prefill_work=load.prefill_work,
            waiting_work=self._waiting_work(),
            sequences=load.sequences,
            contexts=load.contexts,
            kv_tokens=load.kv_tokens,
            steps=load.steps,
        )
