"""Probes an instance: learns its models, and the engine that answers there.

A probe is two completions of one token. The first brings the engine's card, with its incarnation
and its clock; by a grant for that incarnation the second brings its whole description. An engine
without this project's connector needs one completion, and a model that does not generate answers
none. Between the two another process may have taken the place: then the probe fails.
"""

from __future__ import annotations

import asyncio

import msgspec

from ...fleet.grants import OTHER_VERSION, REQUEST_KEY, VERSION, Grant, mint, new_transfer
from ...fleet.keys import FleetKey
from ...protocol.peers import EngineCard, EngineInfo
from ..http.connection_pool import FULL_STATUSES, ConnectionPool
from ..http.reasons import STOPPING_DETAIL
from ..http.upstream_response import UnknownName, Unreachable
from ..routing.fleet import NO_CONNECTION, OTHER_RELEASE, TRANSFERS_OFF, Instance
from .engine_answers import (
    DECODE_ERRORS,
    NIXL_PREFILL,
    card_in,
    decode_models,
    decode_probe,
    engine_in,
    params_in,
    refusal_in,
)
from .instance_client import NO_NAME, InstanceClient, UnexpectedAnswer, connection_refusal
from .state_changes import StateChanges

PROBE_TIMEOUT_SECONDS = 30.0  # a probe waits behind the engine's other work
CLOCK_REFRESH_SECONDS = 3600.0  # age at which the reading of an engine's clock is renewed
# Between two probes after ends of kept connections: some servers keep none for long.
RESTART_PROBE_SECONDS = 10.0
# Between two probes of an engine without /v1/completions: a gateway may lack it only for a moment.
GENERATION_PROBE_SECONDS = 5.0
NO_GENERATION = "its model does not generate, or its gateway has no /v1/completions"
HAS_GENERATED = "/v1/completions answers 404, and its model has generated"


class RestartSigns:
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


def is_probe_due(instance: Instance, since_probe: float) -> bool:
    """Returns whether an instance must be probed.  `since_probe`: seconds since the last one."""
    may_generate = not instance.generates and since_probe > GENERATION_PROBE_SECONDS
    return instance.needs_probe or may_generate or _is_clock_old(instance)


def _is_clock_old(instance: Instance) -> bool:
    """Returns whether the engine's clock must be read again; clocks drift."""
    now = asyncio.get_running_loop().time()
    return instance.connector == "disagg" and now - instance.clock_read_at > CLOCK_REFRESH_SECONDS


def _probe_failure(error: Exception) -> str:
    """Returns the reason for a failed probe; that of a dead engine is its health check's."""
    if isinstance(error, UnknownName):
        return NO_NAME
    if isinstance(error, Unreachable) and error.reason == "no_connection":
        return NO_CONNECTION
    if isinstance(error, Unreachable) and error.reason == "refused":
        return connection_refusal(error)
    return f"does not answer a probe: {error}"


class Prober:
    """Probes instances with grants of the fleet's key, and records what they are."""

    def __init__(self, client: InstanceClient, key: FleetKey, changes: StateChanges) -> None:
        self._client = client
        self._key = key
        self._changes = changes

    async def _request_facts(
        self, instance: Instance
    ) -> tuple[list[str], bytes, EngineCard | None]:
        """Returns the instance's models, a probe's answer and its engine's card.

        The answer is empty if the model does not generate.

        Raises UnexpectedAnswer, and the errors of `InstanceClient.request` and of decoders.
        """
        models = decode_models(
            await self._client.request(instance, "GET", "/v1/models", timeout=PROBE_TIMEOUT_SECONDS)
        )
        if not models.data:
            raise UnexpectedAnswer("it serves no model")
        names = [model.id for model in models.data]
        try:
            answer = await self._request_probe(instance, names[0])
        except UnexpectedAnswer as error:
            if error.status != 404:
                raise
            if instance.generates and instance.model == names[0]:
                raise UnexpectedAnswer(HAS_GENERATED) from None
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
                raise UnexpectedAnswer("it is another process than a moment ago")
        return names, answer, card

    async def probe(self, instance: Instance) -> None:
        """Probes an instance, and records what it is, or why it is down."""
        began = asyncio.get_running_loop().time()
        try:
            names, answer, card = await self._request_facts(instance)
        except TimeoutError:
            if not instance.up:  # else it is healthy and busy; the probe is repeated
                instance.mark_down("does not answer a probe in time")
        except (Unreachable, UnexpectedAnswer, *DECODE_ERRORS) as error:
            status = error.status if isinstance(error, UnexpectedAnswer) else 0
            is_local = isinstance(error, Unreachable) and error.reason == "local"
            shows_nothing = is_local or status in FULL_STATUSES
            if not (instance.up and shows_nothing):
                instance.mark_down(_probe_failure(error))
        else:
            self._take_facts(instance, names, answer, card, began)
        self._changes.report(instance)

    def _take_facts(
        self,
        instance: Instance,
        names: list[str],
        answer: bytes,
        card: EngineCard | None,
        began: float,
    ) -> None:
        """Records a probe's results; the instance is up afterwards."""
        now = asyncio.get_running_loop().time()
        instance.step_monitor.on_step_seen(now)
        engine = engine_in(answer)
        if card:
            instance.set_clock(engine.clock if engine else card.clock, began, now)
        if engine:
            # The clock differs in each answer, and would look like a change of the engine.
            engine = msgspec.structs.replace(engine, clock=0.0)
        elif card and card.rank != instance.rank:  # each time another rank may answer
            engine = EngineInfo(card.incarnation, instance.role, [], {}, card.rank)
        refusal = self._explain(refusal_in(answer)) if answer else NO_GENERATION
        if card and not engine and not refusal:
            refusal = f"its description cannot be read here: {OTHER_RELEASE}"
        instance.on_probe_answered(
            names[0],
            engine,
            names,
            nixl=params_in(answer) is not None,
            refusal=refusal,
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
                f"it refuses this proxy's grants ({refusal}): the keys are equal; {OTHER_RELEASE}"
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
        answer = await self._client.request(
            instance,
            "POST",
            "/v1/completions",
            body=msgspec.json.encode(body),
            timeout=PROBE_TIMEOUT_SECONDS,
        )
        # An engine that drains after SIGTERM still answers, but begins no request.
        if any(choice.finish_reason == "abort" for choice in decode_probe(answer).choices):
            raise UnexpectedAnswer(STOPPING_DETAIL)
        return answer
