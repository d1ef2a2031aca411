"""Records and logs each change of an instance's state.

An instance that is up is logged with each other one that it cannot be paired with.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from ...fleet import dialling
from ...protocol.peers import EngineInfo
from ..routing.fleet import NOT_PROBED, Fleet, Instance, mismatch

log = logging.getLogger(__name__)

# Whether an instance is up, why it is not used, its engine.
_ReportedState = tuple[bool, str, EngineInfo | None]
_NEW_STATE: _ReportedState = (False, NOT_PROBED, None)


class StateChanges:
    """Compares the states of instances with those that were logged last."""

    def __init__(self, fleet: Fleet, on_change: Callable[[], None]) -> None:
        """`on_change` is called after each change of an instance's state."""
        self._fleet = fleet
        self._on_change = on_change
        # With `--first-token prefill`: engines that have no such token are logged.
        self.wants_prefill_tokens = False
        self._reported: dict[str, _ReportedState] = {}  # the state that was logged last, by URL

    def begin(self, instance: Instance) -> None:
        """Begins with the state of an instance, whatever an earlier one at its URL had."""
        self.forget(instance.url)
        instance.state_since = asyncio.get_running_loop().time()

    def forget(self, url: str) -> None:
        """Forgets the state of the instance at a URL."""
        self._reported.pop(url, None)

    def report(self, instance: Instance) -> None:
        """Logs a change of state once, and calls `on_change`."""
        state = (instance.up, instance.unavailable_reason, instance.engine)
        before = self._reported.get(instance.url, _NEW_STATE)
        if before != state:
            now = asyncio.get_running_loop().time()
            if before[0] != instance.up:
                instance.state_since = now
            if not instance.up:
                instance.last_failure = instance.unavailable_reason
                instance.last_failure_at = now
            self._reported[instance.url] = state
            self._log_state(instance)
            self._on_change()

    def _log_state(self, instance: Instance) -> None:
        """Logs an instance's state, and each instance that it cannot be paired with."""
        if not instance.up:
            log.warning(
                "instance %s (%s) is not used: %s",
                instance.url,
                instance.role,
                instance.unavailable_reason,
            )
            return
        if instance.unavailable_reason:
            use = "serves whole requests only" if instance.role == "decode" else "is not used"
            log.warning(
                "instance %s (%s) %s: it %s",
                instance.url,
                instance.role,
                use,
                instance.unavailable_reason,
            )
            return
        connector = "NixlConnector"
        if instance.engine:
            connector = f"{len(instance.engine.workers)} workers"
        log.info(
            "instance %s (%s) is ready: %s, %s",
            instance.url,
            instance.role,
            instance.model,
            connector,
        )
        can_prefill = instance.role == "prefill" or instance.takes_both_roles
        if self.wants_prefill_tokens and can_prefill and instance.engine:
            _log_missing_tokens(instance.url, instance.engine)
        for other in self._fleet.instances:
            if other.role != instance.role and other.up and other.can_transfer:
                log_mismatch(instance, other)


def log_mismatch(instance: Instance, other: Instance) -> None:
    """Logs why two instances are never paired, or that KV cannot pass between them."""
    prefill = instance if instance.role == "prefill" else other
    decode = other if instance.role == "prefill" else instance
    if reason := mismatch(prefill, decode):
        log.warning("instances %s and %s are never paired: %s", prefill.url, decode.url, reason)
        return
    if not (prefill.engine and decode.engine):
        return
    # The boot ids of containers may differ on one machine, so this is no reason to part the two.
    if obstacle := dialling.obstacle(prefill.engine, decode.engine):
        log.warning(
            "instances %s and %s: %s; set host in their kv_connector_extra_config to addresses"
            " that the other one reaches, else D computes the prompts",
            prefill.url,
            decode.url,
            obstacle,
        )


def _log_missing_tokens(url: str, engine: EngineInfo) -> None:
    """Logs an engine whose prefill legs sample no token of an answer."""
    if not engine.computes_last_token:
        log.warning(
            "instance %s computes prompts without their last token: its model has sliding windows"
            " or SSM states, or its version is older; --first-token prefill has no effect there",
            url,
        )
