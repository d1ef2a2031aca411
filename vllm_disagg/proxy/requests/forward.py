"""Requests that are passed on as they are: to one instance, to whoever knows an id, or to all."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from ..http.addresses import split_rank
from ..http.error_replies import RequestFailed
from ..http.headers import Headers, end_to_end
from ..http.server import JSON, Connection, HttpRequest, error_body
from ..http.upstream import ConnectionPool, Unreachable, UpstreamResponse, pool_of
from ..http.websocket import join
from ..routing.fleet import Fleet, Instance
from ..routing.pairing import chosen
from ..routing.policies import Policy, RoutingQuery
from .completeness import END_MARKS, CompletenessCheck, doubtful
from .streams import StreamRecorder, aborted

log = logging.getLogger(__name__)

MAX_RETRIES = 2


class _ServedModel(msgspec.Struct):
    id: str


class _ServedModels(msgspec.Struct):
    data: list[msgspec.Raw]


_model = msgspec.json.Decoder(_ServedModel).decode
_models = msgspec.json.Decoder(_ServedModels).decode


class Forwarder:
    """Passes requests on."""

    def __init__(
        self,
        fleet: Fleet,
        policy: Policy,
        pools: dict[str, ConnectionPool],
        vouching: CompletenessCheck,
    ) -> None:
        self.fleet = fleet
        self._policy = policy
        self._pools = pools
        self._vouching = vouching

    async def forward(
        self,
        request: HttpRequest,
        client: Connection,
        candidates: list[Instance],
        seek: bool = False,
    ) -> int:
        """Pass a request to the first of some instances that answers; its status. `seek`: to the
        first that does not say that it has no such thing.
        """
        error: Unreachable | None = None
        for at, instance in enumerate(candidates):
            chosen(self.fleet, self._policy, RoutingQuery(0), _now(), instance)
            with _counted(instance):
                answer: UpstreamResponse | None = None
                try:
                    answer = await pool_of(self._pools, instance.url).send(
                        request.method,
                        request.target,
                        request.headers,
                        request.body,
                        request.upgrade,
                    )
                    if answer.status == 101:
                        await join(client, answer)
                        return 101
                    missing = answer.status in (
                        (403, 404) if request.upgrade else (404,)
                    )  # 403: there is no such WebSocket
                    if seek and missing and (error or at + 1 < len(candidates)):
                        continue  # `error`: who failed may be the one who knew
                    if answer.status == 200 and answer.is_stream:
                        return await self._forward_stream(client, instance, answer)
                    content = await answer.read()
                    if answer.status == 200 and (
                        (
                            aborted(content) and not request.path.endswith("/derender")
                        )  # which answers what it was sent
                        or (
                            doubtful(request.path, content)
                            and not await self._vouching.works(instance)
                        )
                    ):
                        raise Unreachable("died", "it is being stopped")
                except Unreachable as failure:
                    log.warning(
                        "%s failed %s %s: %s", instance.url, request.method, request.path, failure
                    )
                    instance.leg_failed(failure.reason, _now())
                    error = failure
                    if client.started or at >= MAX_RETRIES:
                        break
                    continue
                finally:
                    if answer:
                        answer.close()
                client.answer(answer.status, end_to_end(answer.headers), content)
                await client.drained()
                return answer.status
        if not error:
            raise RequestFailed(503, "no instance can be used at the moment", retry_after=5)
        raise RequestFailed(502, f"the instance failed: {error}")

    async def _forward_stream(
        self, client: Connection, instance: Instance, answer: UpstreamResponse
    ) -> int:
        await answer.first_byte()
        client.start(answer.status, end_to_end(answer.headers))
        tape = StreamRecorder(client.write, keep=False, hold=END_MARKS.get(client.path, b""))
        client.on_pause = answer.pause_reading
        await answer.pipe(tape.source(answer.reject), paused=client.paused)
        if tape.held and not await self._vouching.works(instance):
            raise Unreachable("died", "it is being stopped")
        tape.flush()
        client.end()
        await client.drained()
        return answer.status

    async def models(
        self, request: HttpRequest, client: Connection, instances: list[Instance]
    ) -> int:
        """The models of instances that serve different ones, as one list."""
        answers = await asyncio.gather(*(self._told(request, instance) for instance in instances))
        known: dict[str, msgspec.Raw] = {}
        for status, headers, content in answers:
            if status != 200:
                client.answer(status, headers, content)
                return status
            for model in _models(content).data:
                known.setdefault(_model(model).id, model)
        client.answer(
            200, [JSON], msgspec.json.encode({"object": "list", "data": list(known.values())})
        )
        return 200

    async def everywhere(self, request: HttpRequest, client: Connection) -> int:
        """Pass a request to all instances; the worst answer is the answer."""
        instances = list(
            {split_rank(i.url)[0]: i for i in self.fleet.instances}.values()
        )  # ranks share an API server
        if not instances or not all(instance.up for instance in self.fleet.instances):
            raise RequestFailed(
                503,
                "not every instance can be reached at the moment, and all must do this",
                retry_after=5,
            )
        answers = await asyncio.gather(*(self._told(request, instance) for instance in instances))
        for instance in self.fleet.instances:
            instance.needs_probe = True  # it may serve other names now
        status, headers, content = max(answers, key=lambda answer: answer[0])
        client.answer(status, headers, content)
        await client.drained()
        return status

    async def _told(self, request: HttpRequest, instance: Instance) -> tuple[int, Headers, bytes]:
        answer: UpstreamResponse | None = None
        try:
            answer = await pool_of(self._pools, instance.url).send(
                request.method, request.target, request.headers, request.body
            )
            return answer.status, end_to_end(answer.headers), await answer.read()
        except Unreachable as error:
            instance.leg_failed(error.reason, _now())
            return 502, [JSON], error_body(502, "an instance failed, others may have done it")
        finally:
            if answer:
                answer.close()


@contextmanager
def _counted(instance: Instance) -> Iterator[None]:
    instance.in_flight += 1
    try:
        yield
    finally:
        instance.in_flight -= 1


def _now() -> float:
    return asyncio.get_running_loop().time()
