"""Records and logs each change of an instance's state.

An instance that is up is logged with the other ones that it cannot be paired with.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable

from ...fleet import dialling
from ...protocol.peers import EngineInfo
from ..routing.fleet import NOT_PROBED, Fleet, Instance, in_order, is_one_engine, kind, mismatch

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
        """Logs an instance's state, and with which instances it cannot be paired."""
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
        others = [i for i in self._fleet.instances if i.role != instance.role]
        log_mismatches(instance, [other for other in others if other.up and other.can_transfer])


def log_mismatches(instance: Instance, others: Iterable[Instance]) -> None:
    """Logs why an instance is never paired with others, or that KV cannot pass between them.

    That is a line for each kind of theirs, with one of them. A proxy of 500 and 500
    that starts amid a roll-out would write 125,000.
    """
    misfits: defaultdict[tuple[str, str, str], list[Instance]] = defaultdict(list)
    unreachable: list[Instance] = []
    for other in others:
        fits = other.compatibility_key == instance.compatibility_key
        if not fits or is_one_engine(instance, other):
            misfits[kind(other)].append(other)
        elif _obstacle(*in_order(instance, other)):
            unreachable.append(other)
    for alike in misfits.values():
        prefill, decode = in_order(instance, alike[0])
        log.warning(
            "instances %s and %s are never paired: %s%s",
            prefill.url,
            decode.url,
            mismatch(prefill, decode),
            _and_more(alike),
        )
    if unreachable:
        prefill, decode = in_order(instance, unreachable[0])
        # The boot ids of containers may differ on one machine, so this is no reason to part them.
        log.warning(
            "instances %s and %s: %s; set host in their kv_connector_extra_config to addresses"
            " that the other one reaches, else D computes the prompts%s",
            prefill.url,
            decode.url,
            _obstacle(prefill, decode),
            _and_more(unreachable),
        )


def _obstacle(prefill: Instance, decode: Instance) -> str:
    if not (prefill.reach and decode.reach):
        return ""
    return dialling.obstacle(prefill.reach, decode.reach)


def _and_more(alike: list[Instance]) -> str:
    more = len(alike) - 1
    return f"; the same holds for {more} more ({alike[0].role})" if more else ""


def _log_missing_tokens(url: str, engine: EngineInfo) -> None:
    """Logs an engine whose prefill legs sample no token of an answer."""
    if not engine.computes_last_token:
        log.warning(
            "instance %s computes prompts without their last token: its model has sliding windows"
            " or SSM states, or its version is older; --first-token prefill has no effect there",
            url,
        )
