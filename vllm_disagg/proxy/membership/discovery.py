"""Finding out what runs at each URL, and noticing within two seconds when that changes.

One task per instance asks /health four times a second. An instance is down when it refuses
connections, twice answers anything but 200, or is *silent* for `Settings.silence` seconds: a busy
API server may be late with /health, but an instance of which any stream still gets bytes lives.
With the defaults a frozen instance is down 1.25 to 1.75 s after its last byte. Its requests then
fail over at once, if there is somebody to go to; else they wait for it, for `LOST` seconds at most.
It is not used until a probe succeeds, since whoever comes back may be another process.

An instance whose API server lives and whose engine makes no steps (`engine_steps.py`) is down in
the same way, after `Settings.patience` / `STILL` seconds. A time in which this process itself stood
still counts for no instance.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Callable

import msgspec

from ...fleet.grants import ANSWER_KEY, REQUEST_KEY, VERSION, Grant, mint, new_transfer
from ...fleet.keys import FleetKey
from ...protocol.peers import EngineCard, EngineInfo
from ..http.headers import Headers
from ..http.stall_timer import patient
from ..http.upstream import FULL_STATUSES, ConnectionPool, Unreachable
from ..routing.engine_steps import LOOKS_PER_PATIENCE, StepVerdict, fingerprint
from ..routing.fleet import NOT_PROBED, Fleet, Instance, mismatch

log = logging.getLogger(__name__)

PROBE_TIMEOUT_SECONDS = 30.0  # seconds; a probe waits behind the engine's other work
MAX_SILENCE_SECONDS = (
    30.0  # seconds of silence after which answers that are still owed are given up
)
CACHE_POLL_SECONDS = 2.0  # seconds between two looks at a decode instance's KV cache
CLOCK_REFRESH_SECONDS = 3600.0  # seconds after which an engine's clock is asked for again
BUSY_HEALTH_SECONDS = (
    30.0  # seconds that /health may take while streams show that the instance lives
)
STEP_CHECK_RATIO = (
    4  # an engine that owes an answer and makes no steps is down after a patience divided by this
)
STALLED = "its engine makes no steps"
WATCH_RETRY_SECONDS = 5.0  # seconds after which a watch that failed begins anew


class _ListedModel(msgspec.Struct):
    id: str


class _ModelList(msgspec.Struct):
    data: list[_ListedModel]


class _Completion(msgspec.Struct):
    kv_transfer_params: dict[str, msgspec.Raw] | None = None


# What NixlConnector wants to be asked for a prompt's KV, and how its answer is known.
NIXL_PREFILL: dict[str, object] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_NIXL_KEY = "remote_engine_id"

_KV_USE = re.compile(rb"^vllm:kv_cache_usage_perc(\{[^\n]*\})? (\S+)$", re.MULTILINE)

_models = msgspec.json.Decoder(_ModelList).decode
_completion = msgspec.json.Decoder(_Completion).decode
_engine = msgspec.json.Decoder(EngineInfo).decode
_card = msgspec.json.Decoder(EngineCard).decode


def engine_in(answer: bytes) -> EngineInfo | None:
    """What an engine says of itself in a completion's answer; None when it says nothing that we
    understand.
    """
    try:
        return _engine((_completion(answer).kv_transfer_params or {})[ANSWER_KEY])
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def card_in(answer: bytes) -> EngineCard | None:
    """The least that an engine says there, also when it has refused a grant; None when it says
    nothing.
    """
    try:
        return _card((_completion(answer).kv_transfer_params or {})[ANSWER_KEY])
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def params_in(answer: bytes) -> dict[str, msgspec.Raw] | None:
    """What NixlConnector answered for the decode leg; None when it has nothing to fetch."""
    try:
        params = _completion(answer).kv_transfer_params
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return params if params and bytes(params.get(_NIXL_KEY, b"null")) != b"null" else None


class _UnexpectedAnswer(Exception):
    """An instance answered, but not as vLLM does."""

    def __init__(self, words: str, status: int = 200) -> None:
        super().__init__(words)
        self.status = status


class Discovery:
    """Keeps the fleet's state true."""

    def __init__(
        self,
        fleet: Fleet,
        pools: dict[str, ConnectionPool],
        key: FleetKey,
        on_change: Callable[[], None],
        api_key: str,
        silence: float,
        patience: float,
    ) -> None:
        self._fleet = fleet
        self._pools = pools
        self._key = key
        self._headers: Headers = [(b"content-type", b"application/json")]
        if api_key:
            self._headers.append((b"authorization", b"Bearer " + api_key.encode()))
        self._on_change = on_change
        self._silence = silence
        self._patience = patience
        self._look = (
            patience / STEP_CHECK_RATIO / (LOOKS_PER_PATIENCE + 1)
        )  # seconds between two looks at an engine that owes an answer
        self._known: dict[str, object] = {}  # what was reported last, by URL
        self._nudging: dict[Instance, asyncio.Task[None]] = {}

    async def watch(self, instance: Instance, interval: float) -> None:
        """Follow one instance for ever.  A mistake of ours ends neither this nor anything else."""
        while True:
            try:
                await self._follow(instance, interval)
            except Exception as error:
                log.exception(
                    "the watch of %s failed; it begins anew in %g s",
                    instance.url,
                    WATCH_RETRY_SECONDS,
                )
                instance.mark_down(f"its watch failed: {type(error).__name__}: {error}")
            await asyncio.sleep(WATCH_RETRY_SECONDS)

    async def _follow(self, instance: Instance, interval: float) -> None:
        loop = asyncio.get_running_loop()
        self._known.pop(instance.url, None)  # of who had this URL before
        probing: asyncio.Task[None] | None = None
        weighing: asyncio.Task[None] | None = None
        lived = weighed = loop.time()
        try:
            while True:
                trouble = await self._listen(instance, interval)
                _raise_of(probing, weighing)
                if self._is_well(instance, trouble):
                    lived = loop.time()
                elif not instance.up and (
                    self._replaceable(instance) or self._is_lost(trouble, loop.time() - lived)
                ):
                    self._abandon(instance)
                if not instance.up and trouble:
                    if probing:
                        probing.cancel()
                elif (instance.needs_probe or self._forgets(instance)) and (
                    not probing or probing.done()
                ):
                    probing = asyncio.create_task(self._probe(instance))
                elif self._is_to_weigh(instance, loop.time() - weighed) and (
                    not weighing or weighing.done()
                ):
                    weighed = loop.time()
                    weighing = asyncio.create_task(self._weigh(instance))
                self._note(instance)
                await asyncio.sleep(interval)
        finally:
            for task in (probing, weighing, self._nudging.pop(instance, None)):
                if task:
                    task.cancel()

    def _is_well(self, instance: Instance, trouble: str) -> bool:
        """Whether nothing is wrong with it at the moment; what is, is noted."""
        if trouble:
            instance.on_probe_failed(trouble)
        elif instance.step_monitor.stalled:
            instance.mark_down(STALLED)
        else:
            instance.failed_probes = 0
            return True
        return False

    def _is_lost(self, trouble: str, seconds: float) -> bool:
        """Whether nobody may wait longer for it. An engine in a very long step, as one that
        compiles, may yet answer.
        """
        return seconds > (MAX_SILENCE_SECONDS if trouble else self._patience)

    def _abandon(self, instance: Instance) -> None:
        """End the requests that it has: they go elsewhere."""
        if instance.step_monitor.stalled:
            self._pools[instance.url].abort("stalled", STALLED)
            instance.step_monitor.stalled = (
                False  # from now on it is an instance that has to answer a probe
            )
        else:
            self._pools[instance.url].abort()

    def _is_to_weigh(self, instance: Instance, since: float) -> bool:
        now = asyncio.get_running_loop().time()
        owes = instance.up and instance.step_monitor.is_read_due(
            now, instance.active_requests > 0, self._look
        )
        return owes or (instance.role == "decode" and since > CACHE_POLL_SECONDS)

    def _forgets(self, instance: Instance) -> bool:
        """Whether it is long ago that its engine said what its clock is; clocks drift."""
        return (
            instance.connector == "disagg"
            and asyncio.get_running_loop().time() - instance.clock_read_at > CLOCK_REFRESH_SECONDS
        )

    def _replaceable(self, instance: Instance) -> bool:
        """Whether its requests have somewhere to go."""
        return any(other.up and other is not instance for other in self._fleet.with_role("decode"))

    async def _listen(self, instance: Instance, interval: float) -> str:
        """What is wrong with it; empty when it lives."""
        loop, pool = asyncio.get_running_loop(), self._pools[instance.url]
        life, heard = loop.time(), pool.heard
        asking = asyncio.create_task(
            self._ask(instance, "GET", "/health", timeout=BUSY_HEALTH_SECONDS)
        )
        try:
            while not asking.done():
                looked = loop.time()
                await asyncio.wait({asking}, timeout=interval)
                life += max(
                    0.0, loop.time() - looked - interval
                )  # we stood still, and have not read what came
                if pool.heard != heard:
                    life, heard = loop.time(), pool.heard
                elif loop.time() - life > self._silence:
                    instance.mark_down("is silent")
                    return "is silent"
            asking.result()
        except Unreachable as error:
            if error.reason == "refused":
                instance.mark_down(f"refuses connections: {error.detail}")
                pool.abort()
            return f"does not answer /health: {error}"
        except (TimeoutError, _UnexpectedAnswer) as error:
            return f"does not answer /health: {error or 'timeout'}"
        finally:
            asking.cancel()
        return ""

    def _note(self, instance: Instance) -> None:
        """Tell of changes, once each."""
        now = (instance.up, instance.unavailable_reason, instance.engine)
        if self._known.get(instance.url, (False, NOT_PROBED, None)) != now:
            self._known[instance.url] = now
            self._report(instance)
            self._on_change()

    async def _ask_all(self, instance: Instance) -> tuple[list[str], bytes, EngineCard | None]:
        """(its models, a probe's answer, its engine's card); _Odd, and what `_ask` and decoders
        raise.
        """
        models = _models(
            await self._ask(instance, "GET", "/v1/models", timeout=PROBE_TIMEOUT_SECONDS)
        )
        if not models.data:
            raise _UnexpectedAnswer("it serves no model")
        names = [model.id for model in models.data]
        answer = await self._ask_who(instance, names[0])
        if (card := card_in(answer)) and card.rank == instance.rank:  # now it can be asked by name
            answer = await self._ask_who(instance, names[0], card)
            if (again := card_in(answer)) is None or again.incarnation != card.incarnation:
                raise _UnexpectedAnswer("it is another process than a moment ago")
        return names, answer, card

    async def _probe(self, instance: Instance) -> None:
        try:
            names, answer, card = await self._ask_all(instance)
        except TimeoutError:
            if not instance.up:  # else it is healthy and has much to do; it is asked again
                instance.mark_down("does not answer a probe in time")
        except (
            Unreachable,
            _UnexpectedAnswer,
            msgspec.DecodeError,
            UnicodeDecodeError,
            RecursionError,
        ) as error:
            if not (
                instance.up
                and isinstance(error, _UnexpectedAnswer)
                and error.status in FULL_STATUSES
            ):
                instance.mark_down(f"does not answer a probe: {error}")
        else:
            instance.step_monitor.on_step_seen(asyncio.get_running_loop().time())
            engine = engine_in(answer)
            if card:
                instance.set_clock(
                    engine.clock if engine else card.clock, asyncio.get_running_loop().time()
                )
            if engine:
                engine = msgspec.structs.replace(
                    engine, clock=0.0
                )  # no fact of it: it would always seem to have changed
            elif card and card.rank != instance.rank:  # each time another one may answer
                engine = EngineInfo(card.incarnation, instance.role, [], {}, card.rank)
            instance.on_probe_answered(names[0], engine, names, nixl=params_in(answer) is not None)
        self._note(instance)

    async def _ask_who(
        self, instance: Instance, model: str, card: EngineCard | None = None
    ) -> bytes:
        """A probe's answer.  Without an engine's card all we learn is the card."""
        name, until = (
            (card.incarnation, card.clock + 2 * PROBE_TIMEOUT_SECONDS) if card else ("", 0.0)
        )
        grant = mint(self._key, Grant(VERSION, "probe", new_transfer(), name, until=until))
        body = {
            "model": model,
            "prompt": "probe",
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": {**NIXL_PREFILL, REQUEST_KEY: grant},
        }
        return await self._ask(
            instance,
            "POST",
            "/v1/completions",
            body=msgspec.json.encode(body),
            timeout=PROBE_TIMEOUT_SECONDS,
        )

    async def _weigh(self, instance: Instance) -> None:
        """How full its KV cache is, which other proxies' requests count for too, and whether its
        engine makes steps.
        """
        now = asyncio.get_running_loop().time
        is_due = instance.step_monitor.is_read_due(now(), instance.active_requests > 0, self._look)
        try:
            page = await self._ask(instance, "GET", "/metrics", timeout=PROBE_TIMEOUT_SECONDS)
            label = b"" if instance.rank is None else b'engine="%d"' % instance.rank
            instance.kv_cache_usage = max(
                (float(value) for labels, value in _KV_USE.findall(page) if label in labels),
                default=0.0,
            )
        except (Unreachable, TimeoutError, _UnexpectedAnswer, ValueError):
            instance.kv_cache_usage = 0.0  # not known; whether it lives is found out elsewhere
            return
        if (
            is_due
            and instance.step_monitor.on_metrics_read(fingerprint(page, instance.rank), now())
            is StepVerdict.NUDGE
        ):
            self._nudge(instance)

    def _nudge(self, instance: Instance) -> None:
        """Do something that the engine's next step would show: ask for one more token, or take that
        back.
        """
        nudging = self._nudging.get(instance)
        if nudging and not nudging.done():
            nudging.cancel()
        else:
            self._nudging[instance] = asyncio.create_task(self._one_token(instance))

    async def _one_token(self, instance: Instance) -> None:
        body = msgspec.json.encode(
            {"model": instance.model, "prompt": "probe", "max_tokens": 1, "temperature": 0}
        )
        with contextlib.suppress(
            Unreachable, TimeoutError, _UnexpectedAnswer
        ):  # then nothing is known
            await self._ask(
                instance, "POST", "/v1/completions", body=body, timeout=PROBE_TIMEOUT_SECONDS
            )
            instance.step_monitor.on_step_seen(asyncio.get_running_loop().time())

    async def _ask(
        self, instance: Instance, method: str, path: str, *, body: bytes = b"", timeout: float
    ) -> bytes:
        async with patient(timeout):
            answer = await self._pools[instance.url].send(method, path, self._headers, body)
            try:
                content = await answer.read()
            finally:
                answer.close()
        if answer.status != 200:
            raise _UnexpectedAnswer(f"{method} {path} answered {answer.status}", answer.status)
        return content

    def _report(self, instance: Instance) -> None:
        """One line on what changed, and one for each partner that does not fit."""
        if not instance.up:
            log.warning(
                "%s (%s) is not used: %s", instance.url, instance.role, instance.unavailable_reason
            )
            return
        if instance.unavailable_reason:
            use = "serves whole requests only" if instance.role == "decode" else "is not used"
            log.warning(
                "%s (%s) %s: it %s", instance.url, instance.role, use, instance.unavailable_reason
            )
            return
        engine = instance.engine
        workers = len(engine.workers) if engine else 0
        what = f"{workers} workers" if engine else "NixlConnector"
        log.info("%s (%s) is ready: %s, %s", instance.url, instance.role, instance.model, what)
        for other in self._fleet.instances:
            if other.role != instance.role and other.up and other.can_transfer:
                prefill, decode = (
                    (instance, other) if instance.role == "prefill" else (other, instance)
                )
                if words := mismatch(prefill, decode):
                    log.warning("%s and %s are never paired: %s", prefill.url, decode.url, words)


def _raise_of(*tasks: asyncio.Task[None] | None) -> None:
    """Raise what one of them failed of, that it had not foreseen."""
    for task in tasks:
        if task and task.done() and not task.cancelled():
            task.result()
