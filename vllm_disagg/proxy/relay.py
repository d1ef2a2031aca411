"""One request's journey, told in one place.

  queue -> both legs at once -> the decode leg's answer, as it comes, to the client
  prefill leg: refused (4xx)  -> that answer goes to the client, the decode leg is cancelled
               failed         -> the decode instance serves the whole request alone
  decode leg:  failed, nothing sent yet -> another decode instance serves the whole request alone
               failed in a stream       -> an error event and [DONE]
  client left, or out of time: both legs are cancelled

A decode answer counts as begun when its body's first byte is here: vLLM sends a stream's head long before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..grants import Grant, mint, new_transfer
from .admission import Admission, QueueFull, QueueTimeout
from .bodies import Body
from .discovery import engine_in
from .fleet import Fleet, Instance
from .headers import Headers, end_to_end, find
from .metrics import Metrics
from .pairing import Pair, choose_decode
from .server import JSON, Connection, Request, error_body
from .settings import Settings
from .tracing import Tracing
from .upstream import Answer, Pool, Unreachable

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"


class Failed(Exception):
    """The request ends with this error of ours."""

    def __init__(self, status: int, message: str, retry_after: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


@dataclass(slots=True)
class Trip:
    """A request on its way."""

    request: Request
    client: Connection
    body: Body
    began: float
    place: Pair | None = None  # at a prefill instance, until that leg is over
    prefill: asyncio.Task[Answer | Unreachable] | None = None
    held: list[Instance] = field(default_factory=list)  # decode instances that count it as in flight
    tried: list[Instance] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)

    @property
    def chat(self) -> bool:
        return self.request.path.endswith("/chat/completions")


class Relay:
    """Runs requests on a fleet."""

    def __init__(
        self, fleet: Fleet, pools: dict[str, Pool], admission: Admission, metrics: Metrics, settings: Settings
    ) -> None:
        self.fleet = fleet
        self.metrics = metrics
        self.tracing = Tracing(settings.traces_endpoint)
        self._pools = pools
        self._admission = admission
        self._key = settings.key
        self._patience = settings.patience

    async def generate(self, trip: Trip) -> int:
        """The whole journey; the status it ended with.  Afterwards nothing of the request is left anywhere."""
        try:
            pair = None if trip.body.whole(trip.chat) else await self._queue(trip)
            if pair:
                answer = await self._both(trip, pair)
            else:
                answer = await self._alone(trip, self._other(trip))
            if _is_failure(answer) and trip.prefill:
                trip.prefill.cancel()
            if _is_failure(answer) and (other := choose_decode(self.fleet, _now(), trip.tried)):
                self.metrics.fell_back("decode_failed")
                answer = await self._alone(trip, other)
            return await self._deliver(trip, answer)
        finally:
            if trip.prefill:
                trip.prefill.cancel()
            self._release(trip)
            for begun in trip.answers:
                begun.close()
            for instance in trip.held:
                instance.in_flight -= 1

    async def _queue(self, trip: Trip) -> Pair | None:
        try:
            pair = await self._admission.acquire(trip.body.size, trip.request.priority)
        except QueueFull as error:
            raise Failed(429, str(error), retry_after=1) from None
        except QueueTimeout as error:
            raise Failed(503, str(error), retry_after=5) from None
        finally:
            self.metrics.queue.observe(waited := _now() - trip.began)
            if trip.client.meter:
                trip.client.meter.queue_seconds = waited
        if pair:
            trip.place = pair
            trip.held.append(pair.decode)
        elif self.fleet.of("prefill"):
            self.metrics.fell_back("no_pair")
        return pair

    def _release(self, trip: Trip) -> None:
        place, trip.place = trip.place, None
        if place:
            self._admission.release(place)

    async def _both(self, trip: Trip, pair: Pair) -> Answer | Unreachable:
        """Both legs at once; the answer to deliver, begun."""
        prefill_engine, decode_engine = pair.prefill.engine, pair.decode.engine
        if not prefill_engine or not decode_engine:  # no pair is made of such
            raise TypeError("a pair without engines")
        trip.request.mode = "disaggregated"
        if trip.client.meter:
            trip.client.meter.paired(pair.prefill.url, pair.decode.url)
        transfer = new_transfer()
        for_p = Grant(1, "prefill", transfer, prefill_engine.incarnation, [], self._patience)
        for_d = Grant(1, "decode", transfer, decode_engine.incarnation, prefill_engine.workers, self._patience)
        prefill_body = trip.body.prefill(trip.chat, mint(self._key, for_p))
        trip.prefill = prefill = asyncio.create_task(self._prefill(trip, pair, prefill_body))
        prefill.add_done_callback(lambda _: self._release(trip))
        decode = asyncio.create_task(self._ask(trip, pair.decode, trip.body.decode(mint(self._key, for_d))))
        try:
            await asyncio.wait((prefill, decode), return_when=asyncio.FIRST_COMPLETED)
            if not decode.done():
                outcome = prefill.result()
                if isinstance(outcome, Answer) and 400 <= outcome.status < 500:
                    return outcome
                if _is_failure(outcome):
                    self.metrics.fell_back(f"prefill_{_reason(outcome)}")
                    decode.cancel()
                    return await self._alone(trip, pair.decode)
            return await decode
        finally:
            decode.cancel()

    async def _prefill(self, trip: Trip, pair: Pair, body: bytes) -> Answer | Unreachable:
        """The prefill leg.  A success is an answer of the very process that the decode leg was told to read from."""
        began = _now()
        instance = pair.prefill
        answer = await self._ask(trip, instance, body)
        if _is_failure(answer):
            return answer
        if isinstance(answer, Answer) and answer.status == 200:
            self.metrics.prefill_leg.observe(seconds := _now() - began)
            self.tracing.prefilled(trip.request)
            if trip.client.meter:
                trip.client.meter.prefill_done(seconds)
            engine = engine_in(await answer.read())
            if engine is None or not instance.engine or engine.incarnation != instance.engine.incarnation:
                instance.needs_probe = True
                if engine:
                    instance.engine = engine
                return Unreachable("stale", "the prefill instance was restarted")
        return answer

    def _other(self, trip: Trip) -> Instance:
        decode = choose_decode(self.fleet, _now(), trip.tried)
        if not decode:
            raise Failed(503, "no decode instance can be used at the moment", retry_after=5)
        return decode

    async def _alone(self, trip: Trip, instance: Instance) -> Answer | Unreachable:
        """One instance serves all of it."""
        if instance not in trip.held:
            instance.in_flight += 1
            trip.held.append(instance)
        return await self._ask(trip, instance, trip.body.plain())

    async def _ask(self, trip: Trip, instance: Instance, body: bytes) -> Answer | Unreachable:
        """Send a leg; return when its answer's body begins (a stream) or is complete (all else)."""
        if instance.role == "decode" and instance not in trip.tried:
            trip.tried.append(instance)
        answer: Answer | None = None
        good = False
        try:
            headers = self.tracing.leg(trip.request, instance.role, instance.url)
            answer = await self._pools[instance.url].send("POST", trip.request.path, headers, body)
            if answer.status == 200 and answer.is_stream:
                await answer.first()
            else:
                await answer.read()
            good = True
        except Unreachable as error:
            log.warning("%s failed a %s request: %s", instance.url, trip.request.mode, error)
            instance.leg_failed(error.reason, _now())
            return error
        finally:
            if answer and not good:
                answer.close()
        trip.answers.append(answer)
        if answer.status >= 500:
            log.warning("%s failed a %s request: it answered %d", instance.url, trip.request.mode, answer.status)
            instance.leg_failed("5xx", _now())
        else:
            instance.leg_succeeded()
        return answer

    async def _deliver(self, trip: Trip, answer: Answer | Unreachable) -> int:
        """Give an answer to the client; its status."""
        if isinstance(answer, Unreachable):
            raise Failed(502, f"the decode instance failed: {answer}")
        headers = end_to_end(answer.headers)
        if answer.status == 200 and answer.is_stream:
            await self._stream(trip.client, headers, answer)
        else:
            trip.client.answer(answer.status, headers, await answer.read())
        await trip.client.drained()
        return answer.status

    async def _stream(self, client: Connection, headers: Headers, answer: Answer) -> None:
        client.start(answer.status, headers)
        events = Events(client.write)
        client.on_pause = answer.flow
        raw = bool(find(headers, b"content-encoding"))
        try:
            await answer.pipe(client.write if raw else events.feed, paused=client.paused)
        except Unreachable as error:
            if not events.done:
                end_stream(client, 502, f"the decode instance failed: {error}")
                raise Failed(502, str(error)) from None
        else:
            events.flush()
        client.end()

    async def forward(self, request: Request, client: Connection, instance: Instance) -> int:
        """Pass a small request to one instance; the status it answered."""
        with _counted(instance):
            answer: Answer | None = None
            try:
                answer = await self._pools[instance.url].send(
                    request.method, request.path, request.headers, request.body
                )
                content = await answer.read()
            except Unreachable as error:
                instance.leg_failed(error.reason, _now())
                raise Failed(502, f"{instance.url} failed: {error}") from None
            finally:
                if answer:
                    answer.close()
            client.answer(answer.status, end_to_end(answer.headers), content)
            await client.drained()
            return answer.status


class Events:
    """Passes on whole SSE events only, so that a stream that breaks can still end in an error event."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write
        self._part = b""  # of an event that is not complete yet
        self.done = False  # the last event said [DONE]

    def feed(self, data: bytes) -> None:
        if self._part:
            data = self._part + data
            self._part = b""
        if not data.endswith(b"\n\n"):
            end = data.rfind(b"\n\n") + 2
            if end == 1:  # not found
                end = 0
            data, self._part = data[:end], data[end:]
        if data:
            self.done = data.endswith(DONE)
            self._write(data)

    def flush(self) -> None:
        """The stream ended as it should: what is left belongs to it."""
        if self._part:
            self._write(self._part)


def end_stream(client: Connection, status: int, message: str) -> None:
    """End a stream that has begun with an error that no client can miss."""
    client.write(b"data: " + error_body(status, message) + b"\n\n" + DONE)
    client.end()


def answer_error(client: Connection, status: int, message: str, param: str | None = None, retry_after: int = 0) -> None:
    """An error of ours, in the form that is still possible."""
    if client.ended:
        return
    if client.started:
        end_stream(client, status, message)
        return
    headers = [JSON]
    if retry_after:
        headers.append((b"retry-after", b"%d" % retry_after))
    client.answer(status, headers, error_body(status, message, param))


def _is_failure(outcome: Answer | Unreachable) -> bool:
    return isinstance(outcome, Unreachable) or not (outcome.status == 200 or 400 <= outcome.status < 500)


def _reason(outcome: Answer | Unreachable) -> str:
    return outcome.reason if isinstance(outcome, Unreachable) else "5xx"


@contextmanager
def _counted(instance: Instance) -> Iterator[None]:
    instance.in_flight += 1
    try:
        yield
    finally:
        instance.in_flight -= 1


def _now() -> float:
    return asyncio.get_running_loop().time()
