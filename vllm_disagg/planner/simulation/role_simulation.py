"""Simulates a deployment whose roles follow the load, by the controller that the proxy runs.

All replicas are alike. A change concerns new requests: a replica that prefilled computes its
prompts to the end beside the answers that now come to it, and one that decoded keeps its answers.
"""

from __future__ import annotations

import math
from heapq import heappush

import msgspec

from ...fleet.role_control import (
    ChangeRole,
    LoadObserved,
    Role,
    RoleController,
    RoleMember,
    RoleRules,
)
from ..cost.latency import LatencyModel, unloaded_prefill
from .deployment import Deployment
from .objective import SimulationResult
from .replica import Replica
from .simulator import ARRIVAL_RANK, Simulation
from .workload import WorkloadSample

OBSERVATION_SECONDS = 2.0  # between two observations, as the proxy's
_TICK = -1  # takes the place of a request number


class RoleReplay(msgspec.Struct, frozen=True):
    """Result of a simulation with changing roles."""

    result: SimulationResult
    changes: list[tuple[float, str, Role]]  # seconds, replica, its new role
    mean_prefill: float  # instances that prefill, over the time


class ModelledSteps(msgspec.Struct, frozen=True):
    """Step times of a latency model, as the controller asks for them."""

    latency: LatencyModel

    def decode_step(self, sequences: float, contexts: float) -> float:
        """Returns the seconds of a step through all stages."""
        n = max(1, math.ceil(sequences))
        pp = self.latency.pp
        first_base, first_slope = self.latency.decode(n, True)
        base, slope = self.latency.decode(n, False)
        return first_base + first_slope * contexts + (pp - 1) * (base + slope * contexts)


def simulate_roles(
    deployment: Deployment,
    sample: WorkloadSample,
    rate: float,
    rules: RoleRules,
    with_gaps: bool = False,
) -> RoleReplay:
    """Simulates all requests of `sample` at `rate` requests/s, from the deployment's split.

    Both pools have equal replicas, of which there are two or more. Gaps are as of `simulate`.
    """
    simulation = RoleSimulation(deployment, sample, rate, rules, with_gaps)
    result = simulation.run()
    return RoleReplay(result, simulation.changes, simulation.mean_prefill())


class RoleSimulation(Simulation):
    """Simulation whose replicas change roles."""

    def __init__(
        self,
        deployment: Deployment,
        sample: WorkloadSample,
        rate: float,
        rules: RoleRules,
        with_gaps: bool,
    ) -> None:
        super().__init__(deployment, sample, rate, None, 0, with_gaps)
        self._controller = RoleController(rules)
        self._steps = ModelledSteps(deployment.prefill.latency)
        self._work = [0.0] * self._count  # seconds, by request
        self._arrived_work = 0.0  # since the last observation
        self._waiting_work = 0.0  # of prompts that are not computed
        self._kv_tokens = deployment.prefill.kv
        self.changes: list[tuple[float, str, Role]] = []
        self._prefill_sum = 0  # of prefill replicas over the observations
        self._observations = 0
        self._schedule_observation(0.0)

    def mean_prefill(self) -> float:
        """Returns the mean number of prefill replicas."""
        return self._prefill_sum / self._observations if self._observations else 0.0

    def _schedule_observation(self, now: float) -> None:
        self._event_order += 1
        at = now + OBSERVATION_SECONDS
        heappush(self._events, (at, ARRIVAL_RANK, self._event_order, _TICK, None, None))

    def _on_arrival(self, now: float, r: int) -> None:
        if r == _TICK:
            self._on_observation(now)
            return
        self._work[r] = self._work_of(r)
        self._arrived_work += self._work[r]
        self._waiting_work += self._work[r]
        super()._on_arrival(now, r)

    def _work_of(self, r: int) -> float:
        """Returns the seconds of a prompt without what the replica with most of it has cached."""
        tokens = self._requests.prompts[r]
        whole = unloaded_prefill(self._deployment.prefill.latency, tokens)
        if not self._requests.prefixes:
            return whole
        ids = self._requests.prefixes[r]
        cached = max(replica.cached_tokens(ids) for replica in self._prefills)
        return whole * max(0.0, 1 - cached / tokens)

    def on_prefill_complete(self, replica: Replica, now: float, r: int) -> None:
        """Ends the wait of a prompt's work."""
        self._waiting_work -= self._work[r]
        self._work[r] = 0.0  # a prompt that is computed again after a preemption ends once
        super().on_prefill_complete(replica, now, r)

    def _dispatch(self, now: float) -> None:
        # Legs end at replicas that no longer prefill, too.
        self._active_legs = sum(p.active_legs for p in self._prefills)
        super()._dispatch(now)

    def _on_observation(self, now: float) -> None:
        """Shows the controller the load, and carries out its changes."""
        self._observations += 1
        self._prefill_sum += len(self._prefills)
        for action in self._controller.handle(self._observed(), now):
            if isinstance(action, ChangeRole):
                self._change(now, action)
        if any(replica.waiting or replica.running for replica in self._replicas_of_both()) or (
            now < self._arrivals[-1]
        ):
            self._schedule_observation(now)

    def _replicas_of_both(self) -> list[Replica]:
        return [*self._prefills, *self._decodes]

    def _observed(self) -> LoadObserved:
        """Returns the load since the last observation."""
        members = []
        sequences = 0
        contexts = 0
        sides: list[tuple[Role, list[Replica]]] = [
            ("prefill", self._prefills),
            ("decode", self._decodes),
        ]
        for role, replicas in sides:
            for replica in replicas:
                active = replica.running + len(replica.waiting)
                members.append(RoleMember(str(replica.number), role, active))
                for group in replica.groups():
                    sequences += group.n
                    contexts += group.contexts
        arrived = self._arrived_work
        self._arrived_work = 0.0
        return LoadObserved(
            members=tuple(members),
            prefill_work=arrived / OBSERVATION_SECONDS,
            waiting_work=max(0.0, self._waiting_work),
            sequences=sequences,
            contexts=contexts,
            kv_tokens=self._kv_tokens,
            steps=self._steps,
        )

    def _change(self, now: float, change: ChangeRole) -> None:
        """Moves a replica to the other role."""
        gives, takes = self._prefills, self._decodes
        if change.role == "prefill":
            gives, takes = self._decodes, self._prefills
        replica = next(one for one in gives if str(one.number) == change.name)
        gives.remove(replica)
        takes.append(replica)
        self.changes.append((now, change.name, change.role))
        self._dispatch(now)
