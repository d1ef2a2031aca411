"""Reads the metrics pages of engines: use of the KV cache, waiting requests, and proofs of steps.

An engine that owes an answer is read often; `engine_steps.py` judges by the pages whether it makes
steps. Where they leave that open, a nudge causes a change that the next step shows.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import msgspec

from ...fleet.grants import WHOLE_KEY
from ..http.upstream_response import Unreachable
from ..routing.engine_steps import LOOKS_PER_PATIENCE, StepVerdict, fingerprint
from ..routing.fleet import Instance
from .engine_answers import KV_CACHE_USAGE, WAITING, values
from .instance_client import InstanceClient, UnexpectedAnswer

POLL_TIMEOUT_SECONDS = 30.0  # an engine's other work may come first
CACHE_POLL_SECONDS = 2.0  # between two polls of a decode instance's metrics
REPORT_POLL_SECONDS = 10.0  # of one that can only prefill, whose figures only operators read
STEP_CHECK_RATIO = 4  # an engine has prefill_timeout / this for a step while it owes an answer


class MetricsPoller:
    """Reads the metrics pages of instances, each when it is due."""

    def __init__(self, client: InstanceClient, prefill_timeout: float) -> None:
        """`prefill_timeout`: seconds, as in `ProxySettings`."""
        self._client = client
        # Called with each metrics page that was read, and the time; raises ValueError for one that
        # cannot be parsed.
        self.on_metrics_read: Callable[[Instance, bytes, float], None] = lambda *_: None
        # Seconds between two polls of an engine that owes an answer.
        self._step_poll_seconds = prefill_timeout / STEP_CHECK_RATIO / (LOOKS_PER_PATIENCE + 1)
        self._nudges: dict[Instance, asyncio.Task[None]] = {}

    def forget(self, instance: Instance) -> None:
        """Cancels the nudge of an instance that is no longer watched."""
        if nudge := self._nudges.pop(instance, None):
            nudge.cancel()

    def is_due(self, instance: Instance, since_poll: float) -> bool:
        """Returns whether to read the page again.  `since_poll`: seconds since the last read."""
        now = asyncio.get_running_loop().time()
        is_busy = instance.active_requests > 0
        if instance.up and instance.step_monitor.is_read_due(now, is_busy, self._step_poll_seconds):
            return True
        # Roles follow the load by what these engines report.
        is_frequent = instance.role == "decode" or instance.takes_both_roles
        return since_poll > (CACHE_POLL_SECONDS if is_frequent else REPORT_POLL_SECONDS)

    async def poll(self, instance: Instance) -> None:
        """Reads the use of the KV cache, and whether the engine makes steps.

        Requests of other proxies use that cache too.
        """
        now = asyncio.get_running_loop().time
        step_due = instance.step_monitor.is_read_due(
            now(), instance.active_requests > 0, self._step_poll_seconds
        )
        try:
            page = await self._client.request(
                instance, "GET", "/metrics", timeout=POLL_TIMEOUT_SECONDS
            )
            usages = values(KV_CACHE_USAGE, page, instance.metrics_label)
            instance.kv_cache_usage = max(usages, default=0.0)
            instance.is_usage_known = bool(usages)
            self.on_metrics_read(instance, page, now())
            waiting = values(WAITING, page, instance.metrics_label)
            instance.waiting_in_engine = sum(waiting) if waiting else None
        except (Unreachable, TimeoutError, UnexpectedAnswer, ValueError):
            instance.kv_cache_usage = (
                0.0  # unknown; the health check decides whether the instance lives
            )
            instance.is_usage_known = False
            instance.waiting_in_engine = None
            return
        if step_due:
            numbers = fingerprint(page, instance.metrics_label)
            verdict = instance.step_monitor.on_metrics_read(numbers, now())
            if verdict is StepVerdict.NUDGE:
                self._nudge(instance)

    def _nudge(self, instance: Instance) -> None:
        """Causes a change that the engine's next step shows.

        That is a request for one token; if one is waiting already, its cancellation.
        """
        nudge = self._nudges.get(instance)
        if nudge and not nudge.done():
            nudge.cancel()
        else:
            self._nudges[instance] = asyncio.create_task(self._request_one_token(instance))

    async def _request_one_token(self, instance: Instance) -> None:
        fields = {"model": instance.model, "prompt": "probe", "max_tokens": 1, "temperature": 0}
        # A connector warns of requests without parameters.
        params = {"kv_transfer_params": {WHOLE_KEY: True}} if instance.engine else {}
        body = msgspec.json.encode({**fields, **params})
        # A failure shows nothing about the engine.
        with contextlib.suppress(Unreachable, TimeoutError, UnexpectedAnswer):
            await self._client.request(
                instance, "POST", "/v1/completions", body=body, timeout=POLL_TIMEOUT_SECONDS
            )
            instance.step_monitor.on_step_seen(asyncio.get_running_loop().time())
