"""Probes each instance, and notices within two seconds when its state changes.

One task per instance requests /health four times a second, and starts probes (`probe.py`) and polls
of metrics (`metrics_poll.py`) when they are due. States of an instance:

    not probed --(probe succeeds)--> up --(see below)--> down --(probe succeeds)--> up

An instance goes down when
  * it refuses connections, or DNS does not know its name,
  * the network brings no connection to it for CONNECT_SECONDS,
  * it is a proxy of vllm-disagg, which refuses requests of proxies (`http/headers.py`),
  * it twice answers anything but 200,
  * it is *silent*: no byte for `ProxySettings.liveness_timeout` seconds, on /health or any stream,
  * its API server answers, but its engine makes no steps (`engine_steps.py`) for
    `ProxySettings.prefill_timeout` / `metrics_poll.STEP_CHECK_RATIO` seconds.

A busy API server may be late with /health; bytes of any stream show that the instance lives. With
the defaults a frozen instance is down 1.25 to 1.75 s after its last byte. Its requests then fail
over at once if another decode instance is up. Else they wait, for MAX_SILENCE_SECONDS at most, and
new ones with them (`decode_wait.py`).

An instance that is down gets no request until a probe succeeds, since another process may answer at
its URL. The end of a kept connection is followed by a probe for the same reason: a process may take
another's place without a refused connection between them.

If DNS has lost its name, open connections go on while they bring bytes: Kubernetes takes
away the name of a pod that still ends its requests. So they do while the network brings no new
connection to it. Without a byte they end after MAX_SILENCE_SECONDS. While this proxy lacks what a
connection takes, such as a port, an instance stays up, and goes down after
`ProxySettings.prefill_timeout` seconds without a byte.

A network that is gone at this proxy silences all instances at once. So a silent one's requests fail
over only to one that has shown life since.

Time in which this process itself did not run counts against no instance.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

from ...fleet.keys import FleetKey
from ..http.bearer import AcceptedKeys
from ..http.connection_pool import ConnectionPool
from ..http.headers import LOOP_STATUS
from ..http.upstream_response import UnknownName, Unreachable
from ..routing.fleet import (
    MAX_SILENCE_SECONDS,
    NO_CONNECTION,
    SILENT,
    Fleet,
    Instance,
    is_one_engine,
)
from .instance_client import NO_NAME, InstanceClient, UnexpectedAnswer, connection_refusal
from .metrics_poll import MetricsPoller
from .probe import Prober, RestartSigns, is_probe_due
from .state_changes import StateChanges

log = logging.getLogger(__name__)

BUSY_HEALTH_SECONDS = 30.0  # for /health while streams show that the instance lives
CANNOT_CONNECT = "this proxy cannot connect"  # to any instance, so nothing was learnt of this one
UNCHECKED = (NO_NAME, NO_CONNECTION, CANNOT_CONNECT)  # open connections may go on
IS_PROXY = "a proxy of vllm-disagg answers there, this one or another: give the URLs of engines"
STALLED = "its engine makes no steps"
WATCH_RETRY_SECONDS = 5.0  # until a watch that failed begins anew


async def _oversleep(seconds: float) -> float:
    """Sleeps, and returns the time beyond `seconds`, in which this process did not run."""
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    await asyncio.sleep(seconds)
    return max(0.0, loop.time() - began_at - seconds)


class Discovery:
    """Keeps the state of the fleet's instances current."""

    def __init__(
        self,
        fleet: Fleet,
        pools: dict[str, ConnectionPool],
        key: FleetKey,
        on_change: Callable[[], None],
        api_keys: AcceptedKeys,
        liveness_timeout: float,
        prefill_timeout: float,
    ) -> None:
        """`on_change` is called after each change of an instance's state.

        `liveness_timeout`, `prefill_timeout`: seconds, as in `ProxySettings`.
        """
        self._fleet = fleet
        self._pools = pools
        self._liveness_timeout = liveness_timeout
        self._prefill_timeout = prefill_timeout
        self._client = InstanceClient(pools, api_keys)
        self.changes = StateChanges(fleet, on_change)
        self.prober = Prober(self._client, key, self.changes)
        self.poller = MetricsPoller(self._client, prefill_timeout)

    async def watch(self, instance: Instance, interval: float) -> None:
        """Watches one instance until cancelled. An unexpected error restarts only this watch.

        `interval`: seconds between two health checks.
        """
        while True:
            try:
                await self._follow(instance, interval)
            except Exception as error:
                log.exception(
                    "discovery: watch of instance %s failed; the instance is down for %g s",
                    instance.url,
                    WATCH_RETRY_SECONDS,
                )
                instance.mark_down(f"its watch failed: {type(error).__name__}: {error}")
            await asyncio.sleep(WATCH_RETRY_SECONDS)

    async def _follow(self, instance: Instance, interval: float) -> None:
        loop = asyncio.get_running_loop()
        self.changes.begin(instance)
        probe: asyncio.Task[None] | None = None
        poll: asyncio.Task[None] | None = None
        last_well = loop.time()
        last_poll = loop.time()
        last_probe = loop.time()
        pool = self._pools[instance.url]
        restart_signs = RestartSigns(pool)
        chunks_seen = 0
        try:
            while True:
                trouble = await self._check_health(instance, interval)
                _raise_failures(probe, poll)
                chunks_before = chunks_seen
                chunks_seen = pool.chunks_received
                if restart_signs.is_probe_needed(loop.time()):
                    instance.needs_probe = True
                shows_life = trouble in UNCHECKED and chunks_seen != chunks_before
                if self._judge(instance, trouble) or shows_life:
                    last_well = loop.time()
                else:
                    self._end_requests(instance, trouble, loop.time() - last_well)
                if not instance.up and trouble not in ("", CANNOT_CONNECT):
                    if probe:
                        probe.cancel()
                elif is_probe_due(instance, loop.time() - last_probe) and _is_over(probe):
                    last_probe = loop.time()
                    probe = asyncio.create_task(self.prober.probe(instance))
                elif self.poller.is_due(instance, loop.time() - last_poll) and _is_over(poll):
                    last_poll = loop.time()
                    poll = asyncio.create_task(self.poller.poll(instance))
                self.changes.report(instance)
                last_well += await _oversleep(interval)
        finally:
            for task in (probe, poll):
                if task:
                    task.cancel()
            self.poller.forget(instance)
            # Pods come and go for months, each with its own address.
            self.changes.forget(instance.url)

    def _judge(self, instance: Instance, trouble: str) -> bool:
        """Returns whether the instance is well now; else records the reason.

        `trouble`: the result of the health check.
        """
        if trouble not in ("", CANNOT_CONNECT):
            instance.on_probe_failed(trouble)
        elif instance.step_monitor.stalled:
            instance.mark_down(STALLED)
        elif not trouble:
            instance.failed_probes = 0
            return True
        return False

    def _end_requests(self, instance: Instance, trouble: str, seconds: float) -> None:
        """Ends the requests of an instance that is not well, once others can serve them or in time.

        `seconds`: since it was well, or showed life.
        """
        if instance.up:
            # No check can tell a long step from a death that no connection reports.
            if trouble == CANNOT_CONNECT and self._is_lost("", seconds):
                instance.mark_down(SILENT)
                self._abandon(instance)
            return
        is_silent = trouble == SILENT
        has_alternative = trouble not in UNCHECKED and self._has_alternative(instance, is_silent)
        if has_alternative or self._is_lost(trouble, seconds):
            self._abandon(instance)

    def _is_lost(self, trouble: str, seconds: float) -> bool:
        """Returns whether the requests of an instance without alternative fail now.

        An engine in a very long step, such as a compilation, may still answer.
        """
        return seconds > (MAX_SILENCE_SECONDS if trouble else self._prefill_timeout)

    def _abandon(self, instance: Instance) -> None:
        """Ends the requests at the instance; the relay sends them elsewhere."""
        if instance.step_monitor.stalled:
            self._pools[instance.url].abort("stalled", STALLED)
            # From now on a probe decides, as for any instance that is down.
            instance.step_monitor.stalled = False
        else:
            self._pools[instance.url].abort()

    def _has_alternative(self, instance: Instance, is_silent: bool = False) -> bool:
        """Returns whether another decode engine can take the requests.

        `is_silent`: the instance is; another one may be as silent, and not be judged yet.
        """
        # Half of that time: signs of two healthy instances do not come at the same moment.
        alive_at = instance.last_sign_at + self._liveness_timeout / 2 if is_silent else -math.inf
        return any(
            other.up
            and other is not instance
            and other.last_sign_at >= alive_at
            and not is_one_engine(other, instance)
            for other in self._fleet.with_role("decode")
        )

    async def _check_health(self, instance: Instance, interval: float) -> str:
        """Requests /health; returns why the instance is not known to be well, or an empty text."""
        loop = asyncio.get_running_loop()
        pool = self._pools[instance.url]
        last_sign = loop.time()
        chunks_seen = pool.chunks_received
        health = asyncio.create_task(
            self._client.request(instance, "GET", "/health", timeout=BUSY_HEALTH_SECONDS)
        )
        try:
            while not health.done():
                slept_at = loop.time()
                await asyncio.wait({health}, timeout=interval)
                # If this process did not run, received bytes were not read: that is not silence.
                overslept = loop.time() - slept_at - interval
                last_sign += max(0.0, overslept)
                if pool.chunks_received != chunks_seen:
                    last_sign = instance.last_sign_at = loop.time()
                    chunks_seen = pool.chunks_received
                elif loop.time() - last_sign > self._liveness_timeout:
                    instance.mark_down(SILENT)
                    return SILENT
            health.result()
        except UnknownName:
            instance.mark_down(NO_NAME)
            return NO_NAME
        except Unreachable as error:
            if error.reason == "local":
                return CANNOT_CONNECT
            trouble = f"does not answer /health: {error}"
            if error.reason == "no_connection":
                trouble = NO_CONNECTION
                instance.mark_down(trouble)
            if error.reason == "refused":
                instance.mark_down(connection_refusal(error))
                pool.abort()
            return trouble
        except (TimeoutError, UnexpectedAnswer) as error:
            trouble = f"does not answer /health: {error or 'timeout'}"
            if isinstance(error, UnexpectedAnswer) and error.status == LOOP_STATUS:
                trouble = IS_PROXY
                instance.mark_down(trouble)
            return trouble
        finally:
            health.cancel()
        instance.last_sign_at = loop.time()
        return ""


def _is_over(task: asyncio.Task[None] | None) -> bool:
    return not task or task.done()


def _raise_failures(*tasks: asyncio.Task[None] | None) -> None:
    """Raises the unexpected error of a task that failed."""
    for task in tasks:
        if task and task.done() and not task.cancelled():
            task.result()
