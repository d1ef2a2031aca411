"""Probes each instance, and notices within two seconds when its state changes.

One task per instance requests /health four times a second. States of an instance:

    not probed --(probe succeeds)--> up --(see below)--> down --(probe succeeds)--> up

An instance goes down when
  * it refuses connections, or DNS does not know its name,
  * the network brings no connection to it for CONNECT_SECONDS,
  * it is a proxy of vllm-disagg, which refuses requests of proxies (`http/headers.py`),
  * it twice answers anything but 200,
  * it is *silent*: no byte for `ProxySettings.liveness_timeout` seconds, on /health or any stream,
  * its API server answers, but its engine makes no steps (`engine_steps.py`) for
    `ProxySettings.prefill_timeout` / STEP_CHECK_RATIO seconds.

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
import contextlib
import logging
import math
from collections.abc import Callable

import msgspec

from ...fleet import dialling
from ...fleet.grants import (
    OTHER_VERSION,
    REQUEST_KEY,
    VERSION,
    WHOLE_KEY,
    Grant,
    mint,
    new_transfer,
)
from ...fleet.keys import FleetKey
from ...protocol.peers import EngineCard, EngineInfo
from ..http.connection_pool import FULL_STATUSES, ConnectionPool
from ..http.headers import LOOP_STATUS, Headers
from ..http.reasons import STOPPING_DETAIL
from ..http.stall_timer import patient
from ..http.upstream_response import UnknownName, Unreachable
from ..routing.engine_steps import LOOKS_PER_PATIENCE, StepVerdict, fingerprint
from ..routing.fleet import (
    MAX_SILENCE_SECONDS,
    NO_CONNECTION,
    NOT_PROBED,
    SILENT,
    TRANSFERS_OFF,
    Fleet,
    Instance,
    is_one_engine,
    mismatch,
)
from .engine_answers import (
    DECODE_ERRORS,
    KV_CACHE_USAGE,
    NIXL_PREFILL,
    WAITING,
    card_in,
    decode_models,
    decode_probe,
    engine_in,
    params_in,
    refusal_in,
    values,
)

log = logging.getLogger(__name__)

PROBE_TIMEOUT_SECONDS = 30.0  # a probe waits behind the engine's other work
CACHE_POLL_SECONDS = 2.0  # between two polls of a decode instance's metrics
REPORT_POLL_SECONDS = 10.0  # of one that can only prefill, whose figures only operators read
CLOCK_REFRESH_SECONDS = 3600.0  # age at which the reading of an engine's clock is renewed
# Between two probes after ends of kept connections: some servers keep none for long.
RESTART_PROBE_SECONDS = 10.0
# Between two probes of an engine without /v1/completions: a gateway may lack it only for a moment.
GENERATION_PROBE_SECONDS = 5.0
BUSY_HEALTH_SECONDS = 30.0  # for /health while streams show that the instance lives
STEP_CHECK_RATIO = 4  # an engine has prefill_timeout / this for a step while it owes an answer
NO_NAME = "DNS does not know its name"
CANNOT_CONNECT = "this proxy cannot connect"  # to any instance, so nothing was learnt of this one
UNCHECKED = (NO_NAME, NO_CONNECTION, CANNOT_CONNECT)  # open connections may go on
IS_PROXY = "a proxy of vllm-disagg answers there, this one or another: give the URLs of engines"
STALLED = "its engine makes no steps"
NO_GENERATION = "its model does not generate, or its gateway has no /v1/completions"
HAS_GENERATED = "/v1/completions answers 404, and its model has generated"
WATCH_RETRY_SECONDS = 5.0  # until a watch that failed begins anew


# Whether an instance is up, why it is not used, its engine.
_ReportedState = tuple[bool, str, EngineInfo | None]
_NEW_STATE: _ReportedState = (False, NOT_PROBED, None)


class _UnexpectedAnswer(Exception):
    """Reports an answer that vLLM does not give."""

    def __init__(self, message: str, status: int = 200) -> None:
        super().__init__(message)
        self.status = status


async def _oversleep(seconds: float) -> float:
    """Sleeps, and returns the time beyond `seconds`, in which this process did not run."""
    loop = asyncio.get_running_loop()
    began_at = loop.time()
    await asyncio.sleep(seconds)
    return max(0.0, loop.time() - began_at - seconds)


class _RestartSigns:
    """Decides when the end of a kept connection makes a probe necessary.

    Another process may answer at the instance's URL since then.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._ends_seen = 0
        self._needed_at = float("-inf")

    def is_probe_needed(self, now: float) -> bool:
        """Returns whether a connection has ended, at most once in RESTART_PROBE_SECONDS."""
        is_early = now - self._needed_at < RESTART_PROBE_SECONDS
        if is_early or self._pool.unused_ends == self._ends_seen:
            return False
        self._ends_seen = self._pool.unused_ends
        self._needed_at = now
        return True


def _connection_refusal(error: Unreachable) -> str:
    return f"refuses connections: {error.detail}"


def _probe_failure(error: Exception) -> str:
    """Returns the reason for a failed probe; that of a dead engine is its health check's."""
    if isinstance(error, UnknownName):
        return NO_NAME
    if isinstance(error, Unreachable) and error.reason == "no_connection":
        return NO_CONNECTION
    if isinstance(error, Unreachable) and error.reason == "refused":
        return _connection_refusal(error)
    return f"does not answer a probe: {error}"


class Discovery:
    """Keeps the state of the fleet's instances current."""

    def __init__(
        self,
        fleet: Fleet,
        pools: dict[str, ConnectionPool],
        key: FleetKey,
        on_change: Callable[[], None],
        api_key: str,
        liveness_timeout: float,
        prefill_timeout: float,
    ) -> None:
        """`on_change` is called after each change of an instance's state.

        `liveness_timeout`, `prefill_timeout`: seconds, as in `ProxySettings`.
        """
        self._fleet = fleet
        self._pools = pools
        self._key = key
        self._headers: Headers = [(b"content-type", b"application/json")]
        if api_key:
            self._headers.append((b"authorization", b"Bearer " + api_key.encode()))
        self._on_change = on_change
        # Called with each metrics page that was read, and the time; raises ValueError for one that
        # cannot be parsed.
        self.on_metrics_read: Callable[[Instance, bytes, float], None] = lambda *_: None
        self._liveness_timeout = liveness_timeout
        self._prefill_timeout = prefill_timeout
        # With `--first-token prefill`: engines that have no such token are logged.
        self.wants_prefill_tokens = False
        # Seconds between two polls of an engine that owes an answer.
        self._step_poll_seconds = prefill_timeout / STEP_CHECK_RATIO / (LOOKS_PER_PATIENCE + 1)
        self._reported: dict[str, _ReportedState] = {}  # the state that was logged last, by URL
        self._nudges: dict[Instance, asyncio.Task[None]] = {}

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
        self._reported.pop(instance.url, None)  # of an earlier instance at this URL
        instance.state_since = loop.time()
        probe: asyncio.Task[None] | None = None
        poll: asyncio.Task[None] | None = None
        last_well = loop.time()
        last_poll = loop.time()
        last_probe = loop.time()
        pool = self._pools[instance.url]
        restart_signs = _RestartSigns(pool)
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
                elif self._is_probe_due(instance, loop.time() - last_probe) and _is_over(probe):
                    last_probe = loop.time()
                    probe = asyncio.create_task(self._probe(instance))
                elif self._is_poll_due(instance, loop.time() - last_poll) and _is_over(poll):
                    last_poll = loop.time()
                    poll = asyncio.create_task(self._poll_metrics(instance))
                self._report_change(instance)
                last_well += await _oversleep(interval)
        finally:
            for task in (probe, poll, self._nudges.pop(instance, None)):
                if task:
                    task.cancel()
            # Pods come and go for months, each with its own address.
            self._reported.pop(instance.url, None)

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

    def _is_poll_due(self, instance: Instance, since_poll: float) -> bool:
        now = asyncio.get_running_loop().time()
        is_busy = instance.active_requests > 0
        if instance.up and instance.step_monitor.is_read_due(now, is_busy, self._step_poll_seconds):
            return True
        # Roles follow the load by what these engines report.
        is_frequent = instance.role == "decode" or instance.takes_both_roles
        return since_poll > (CACHE_POLL_SECONDS if is_frequent else REPORT_POLL_SECONDS)

    def _is_probe_due(self, instance: Instance, since_probe: float) -> bool:
        may_generate = not instance.generates and since_probe > GENERATION_PROBE_SECONDS
        return instance.needs_probe or may_generate or self._is_clock_old(instance)

    def _is_clock_old(self, instance: Instance) -> bool:
        """Returns whether the engine's clock must be read again; clocks drift."""
        now = asyncio.get_running_loop().time()
        return (
            instance.connector == "disagg" and now - instance.clock_read_at > CLOCK_REFRESH_SECONDS
        )

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
            self._request(instance, "GET", "/health", timeout=BUSY_HEALTH_SECONDS)
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
                instance.mark_down(_connection_refusal(error))
                pool.abort()
            return trouble
        except (TimeoutError, _UnexpectedAnswer) as error:
            trouble = f"does not answer /health: {error or 'timeout'}"
            if isinstance(error, _UnexpectedAnswer) and error.status == LOOP_STATUS:
                trouble = IS_PROXY
                instance.mark_down(trouble)
            return trouble
        finally:
            health.cancel()
        instance.last_sign_at = loop.time()
        return ""

    def _report_change(self, instance: Instance) -> None:
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

    async def _request_facts(
        self, instance: Instance
    ) -> tuple[list[str], bytes, EngineCard | None]:
        """Returns the instance's models, a probe's answer and its engine's card.

        The answer is empty if the model does not generate.

        Raises _UnexpectedAnswer, and the errors of `_request` and of decoders.
        """
        models = decode_models(
            await self._request(instance, "GET", "/v1/models", timeout=PROBE_TIMEOUT_SECONDS)
        )
        if not models.data:
            raise _UnexpectedAnswer("it serves no model")
        names = [model.id for model in models.data]
        try:
            answer = await self._request_probe(instance, names[0])
        except _UnexpectedAnswer as error:
            if error.status != 404:
                raise
            if instance.generates and instance.model == names[0]:
                raise _UnexpectedAnswer(HAS_GENERATED) from None
            # vLLM has no /v1/completions for a model that does not generate. /health decides
            # whether it lives: such an engine has 503 there after the first request that it refuses
            # while it stops.
            return names, b"", None
        card = card_in(answer)
        if card and card.rank == instance.rank:
            # A grant for this incarnation gets the full description.
            answer = await self._request_probe(instance, names[0], card)
            second_card = card_in(answer)
            if second_card is None or second_card.incarnation != card.incarnation:
                raise _UnexpectedAnswer("it is another process than a moment ago")
        return names, answer, card

    async def _probe(self, instance: Instance) -> None:
        try:
            names, answer, card = await self._request_facts(instance)
        except TimeoutError:
            if not instance.up:  # else it is healthy and busy; the probe is repeated
                instance.mark_down("does not answer a probe in time")
        except (Unreachable, _UnexpectedAnswer, *DECODE_ERRORS) as error:
            status = error.status if isinstance(error, _UnexpectedAnswer) else 0
            is_local = isinstance(error, Unreachable) and error.reason == "local"
            shows_nothing = is_local or status in FULL_STATUSES
            if not (instance.up and shows_nothing):
                instance.mark_down(_probe_failure(error))
        else:
            self._take_facts(instance, names, answer, card)
        self._report_change(instance)

    def _take_facts(
        self, instance: Instance, names: list[str], answer: bytes, card: EngineCard | None
    ) -> None:
        """Records a probe's results; the instance is up afterwards."""
        now = asyncio.get_running_loop().time()
        instance.step_monitor.on_step_seen(now)
        engine = engine_in(answer)
        if card:
            instance.set_clock(engine.clock if engine else card.clock, now)
        if engine:
            # The clock differs in each answer, and would look like a change of the engine.
            engine = msgspec.structs.replace(engine, clock=0.0)
        elif card and card.rank != instance.rank:  # each time another rank may answer
            engine = EngineInfo(card.incarnation, instance.role, [], {}, card.rank)
        instance.on_probe_answered(
            names[0],
            engine,
            names,
            nixl=params_in(answer) is not None,
            refusal=self._explain(refusal_in(answer)) if answer else NO_GENERATION,
        )
        instance.generates = bool(answer)

    def _explain(self, refusal: str) -> str:
        """Returns a connector's refusal of a probe's grant with what to do."""
        if not refusal or refusal == TRANSFERS_OFF:
            return refusal
        if not self._key.is_set:
            return "this proxy has no fleet key; give it that of the instance with --key-file"
        if refusal.startswith(OTHER_VERSION):
            return (
                f"it refuses this proxy's grants ({refusal}): the keys are equal; install the same"
                " release of vllm-disagg for both"
            )
        return (
            f"it refuses this proxy's grants ({refusal}): give --key-file and the instance's"
            " key_file the same key"
        )

    async def _request_probe(
        self, instance: Instance, model: str, card: EngineCard | None = None
    ) -> bytes:
        """Returns a probe's answer. Without an engine's card the answer has only the card."""
        incarnation = ""
        until = 0.0
        if card:
            incarnation = card.incarnation
            until = card.clock + 2 * PROBE_TIMEOUT_SECONDS
        grant = mint(self._key, Grant(VERSION, "probe", new_transfer(), incarnation, until=until))
        body = {
            "model": model,
            "prompt": "probe",
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": {**NIXL_PREFILL, REQUEST_KEY: grant},
        }
        answer = await self._request(
            instance,
            "POST",
            "/v1/completions",
            body=msgspec.json.encode(body),
            timeout=PROBE_TIMEOUT_SECONDS,
        )
        # An engine that drains after SIGTERM still answers, but begins no request.
        if any(choice.finish_reason == "abort" for choice in decode_probe(answer).choices):
            raise _UnexpectedAnswer(STOPPING_DETAIL)
        return answer

    async def _poll_metrics(self, instance: Instance) -> None:
        """Reads the use of the KV cache, and whether the engine makes steps.

        Requests of other proxies use that cache too.
        """
        now = asyncio.get_running_loop().time
        step_due = instance.step_monitor.is_read_due(
            now(), instance.active_requests > 0, self._step_poll_seconds
        )
        try:
            page = await self._request(instance, "GET", "/metrics", timeout=PROBE_TIMEOUT_SECONDS)
            usages = values(KV_CACHE_USAGE, page, instance.metrics_label)
            instance.kv_cache_usage = max(usages, default=0.0)
            instance.is_usage_known = bool(usages)
            self.on_metrics_read(instance, page, now())
            waiting = values(WAITING, page, instance.metrics_label)
            instance.waiting_in_engine = sum(waiting) if waiting else None
        except (Unreachable, TimeoutError, _UnexpectedAnswer, ValueError):
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
        with contextlib.suppress(Unreachable, TimeoutError, _UnexpectedAnswer):
            await self._request(
                instance, "POST", "/v1/completions", body=body, timeout=PROBE_TIMEOUT_SECONDS
            )
            instance.step_monitor.on_step_seen(asyncio.get_running_loop().time())

    async def _request(
        self, instance: Instance, method: str, path: str, *, body: bytes = b"", timeout: float
    ) -> bytes:
        """Returns the body of an answer with status 200.

        Raises Unreachable, TimeoutError, or _UnexpectedAnswer for another status.
        """
        async with patient(timeout):
            answer = await self._pools[instance.url].send(method, path, self._headers, body)
            try:
                content = await answer.read()
            finally:
                answer.close()
        if answer.status != 200:
            raise _UnexpectedAnswer(f"{method} {path} answered {answer.status}", answer.status)
        return content

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
                _log_mismatch(instance, other)


def _log_mismatch(instance: Instance, other: Instance) -> None:
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


def _is_over(task: asyncio.Task[None] | None) -> bool:
    return not task or task.done()


def _raise_failures(*tasks: asyncio.Task[None] | None) -> None:
    """Raises the unexpected error of a task that failed."""
    for task in tasks:
        if task and task.done() and not task.cancelled():
            task.result()
