"""Provides scripted engines, a client that sees every byte, and a proxy between them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import time
import weakref
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, ClassVar, Literal, cast

import httptools
import msgspec
import pytest

from vllm_disagg.fleet.grants import MAX_VALIDITY_SECONDS, Grant, verify
from vllm_disagg.fleet.keys import FleetKey
from vllm_disagg.protocol.peers import EngineInfo, WorkerInfo
from vllm_disagg.proxy.http.bearer import AcceptedKeys
from vllm_disagg.proxy.http.cancel_scope import TimeLimit
from vllm_disagg.proxy.requests import api
from vllm_disagg.proxy.serving import serve
from vllm_disagg.proxy.settings import ProxySettings

KEY = FleetKey(b"k" * 32)
NO_KEYS = AcceptedKeys([], "")
LAYOUT = {"model": "m", "dtype": "bf16"}


class Call:
    """Holds one request as an engine received it, and answers it."""

    def __init__(
        self, engine: ScriptedEngine, method: str, path: str, headers: dict[str, str], raw: bytes
    ) -> None:
        self.engine, self.method, self.target, self.headers, self.raw = (
            engine,
            method,
            path,
            headers,
            raw,
        )
        self.path = path.partition("?")[0]
        self.body: dict[str, Any] = json.loads(raw) if raw[:1] == b"{" else {}
        token = (self.body.get("kv_transfer_params") or {}).get("disagg_grant")
        self.grant: Grant | None = verify(engine.key, token) if token else None
        self.gone = asyncio.Event()  # the proxy closed the connection
        self.rank = engine.rank_for(self)
        self.writer: asyncio.StreamWriter

    @property
    def leg(self) -> str:
        return self.grant.leg if self.grant else "whole"

    async def json(self, obj: object, status: int = 200, headers: str = "") -> None:
        data = json.dumps(obj).encode()
        self.raw_write(
            f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
            f"{headers}content-length: {len(data)}\r\n\r\n"
        )
        self.writer.write(data)
        await self.writer.drain()

    def raw_write(self, text: str) -> None:
        self.writer.write(text.encode())

    async def stream(self, more_headers: str = "") -> None:
        self.raw_write(
            "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
            f"{more_headers}transfer-encoding: chunked\r\n\r\n"
        )
        await self.writer.drain()

    async def chunk(self, data: bytes) -> None:
        self.writer.write(b"%x\r\n%b\r\n" % (len(data), data))
        await self.writer.drain()

    async def event(self, obj: object) -> None:
        await self.chunk(
            b"data: "
            + (obj.encode() if isinstance(obj, str) else json.dumps(obj).encode())
            + b"\n\n"
        )

    async def end(self) -> None:
        self.raw_write("0\r\n\r\n")
        await self.writer.drain()

    def reset(self) -> None:
        self.writer.transport.abort()

    async def forever(self) -> None:
        await self.gone.wait()


# By path: the event that ends a stream.
LAST_EVENTS = {
    **dict.fromkeys(
        ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate"), b"data: [DONE]\n\n"
    ),
    "/v1/responses": b'event: response.completed\ndata: {"type":"response.completed"}\n\n',
    "/v1/messages": b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
}
Script = Callable[[Call], Awaitable[None]]
EngineRole = Literal["prefill", "decode", "both"]


_prefilled: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)  # by transfer


async def answer(call: Call) -> None:
    """Answers as a healthy engine: D after P. The text names the leg and the engine."""
    if call.leg == "decode" and call.grant:
        await _prefilled[call.grant.transfer].wait()
        await asyncio.sleep(0.002)
    await answer_at_once(call)


async def answer_at_once(call: Call) -> None:
    """Answers as an engine that has the whole prompt in its prefix cache."""
    if call.leg == "prefill" and call.grant:
        params = {"disagg_engine": call.engine.facts(call.rank)}
        await call.json({"choices": [{"text": "x"}], "kv_transfer_params": params})
        _prefilled[call.grant.transfer].set()
    elif call.body.get("stream"):
        await call.stream()
        for word in ("a", "b", call.engine.name):
            await call.event({"text": word})
        await call.event("[DONE]")
        await call.end()
    else:
        await call.json({"text": call.engine.name, "leg": call.leg})


async def one_more_token(call: Call) -> None:
    await call.json({"choices": [{"text": "x", "finish_reason": "length"}]})


async def refuse_as_stopping(call: Call) -> None:
    """Answers as a vLLM that has got SIGTERM and drains: status 200, and an aborted answer.

    A stream for a body with `without_event` has no event for the abort.
    """
    answered = {"text": "", "finish_reason": "abort"}
    event = json.dumps({"choices": [answered]}, separators=(",", ":"))
    if not call.body.get("stream"):
        call.raw_write(
            "HTTP/1.1 200 X\r\ncontent-type: application/json\r\n"
            f"content-length: {len(event)}\r\n\r\n{event}"
        )
        return
    await call.stream()
    if not call.body.get("without_event"):
        await call.event(event)
    await call.event("[DONE]")
    await call.end()


def hold_port(owner: object) -> int:
    """Returns a port that the kernel chooses for no other socket while its owner lives."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = int(holder.getsockname()[1])
        weakref.finalize(owner, os.close, holder.detach())
    return port


class ScriptedEngine:
    """Serves HTTP: answers probes as an engine, and other requests by `script`."""

    key = KEY
    version = ""  # of vLLM
    drains = False  # was started with --shutdown-timeout
    answer_settings = "the same"
    models_status = 200  # of /v1/models
    own_key = ""  # header of the last health check

    def __init__(self, name: str, role: EngineRole, script: Script = answer) -> None:
        self.name = name
        self.role = role
        self.script = script
        self.incarnation = f"{name}-1"
        self.layout = dict(LAYOUT)
        self.workers = 1
        self.ranks = 0  # data parallel ones behind this server
        self.names_ranks = True  # to the proxy
        self.first_rank = 0  # of the ranks here, by which metrics name them
        self.rankless: tuple[str, ...] = ()  # paths at which requests go to any rank
        self.turn = 0
        self.two_way = False
        self.plain_chat = False  # parses no reasoning
        self.computes_last_token = True  # has no sliding windows and no states
        self.began_at = random.uniform(0, 1e6)
        self.plain = False
        self.refusal: str | None = None  # of every grant, by the connector; "": transfers are off
        self.health = 200
        self.calls: list[Call] = []  # without probes
        self.one_more: Script = (
            one_more_token  # asked for after an answer, to know that it was whole
        )
        self.connections = 0
        self.frozen = False  # holds its connections and says nothing, as after SIGSTOP
        self.probe_hangs = False
        self.probe_status = 200
        self.is_stopping = False  # drains after SIGTERM: alive, but begins no request
        self.stuck = False  # its API server lives, and its engine makes no steps
        self.steps: int | None = 0  # that its metrics tell of; None: they tell nothing
        self.waiting = 0  # requests, as its last step saw
        self.kv_use = 0.0
        self.metric_lines: list[str] = []  # more lines of its metrics page
        self.models = ["m"]
        self.nixl = False
        self.close_after = (
            False  # close each connection after its answer, like a server whose patience is over
        )
        self.metrics_reads = 0
        self.probes = 0
        self.told = 0  # probes that were answered in full
        self.refused = 0  # prefill legs, and all requests while it is stopping
        self.port = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def urls(self) -> list[str]:
        """Returns the engine's instances."""
        return [f"{self.url}@{rank}" for rank in range(self.ranks) if self.names_ranks] or [
            self.url
        ]

    def rank_for(self, call: Call) -> int | None:
        """Returns the data parallel rank for a request: its header's, else ranks take turns."""
        if not self.ranks:
            return None
        if call.path not in self.rankless and (given := call.headers.get("x-data-parallel-rank")):
            return int(given)
        self.turn += 1
        return self.turn % self.ranks

    def facts(self, rank: int | None = None) -> dict[str, Any]:
        of = "" if rank is None else f"@{rank}"
        workers = [
            WorkerInfo(f"{self.name}-w{i}{of}", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
            for i in range(self.workers)
        ]
        engine = EngineInfo(
            self.incarnation + of,
            self.role,
            workers,
            self.layout,
            rank,
            two_way=self.two_way,
            plain_chat=self.plain_chat,
            answer_settings=self.answer_settings,
            computes_last_token=self.computes_last_token,
            version=self.version,
            drains=self.drains,
            label=None if rank is None else self.first_rank + rank,
        )
        return msgspec.to_builtins(engine) | {"clock": self.clock}

    def card(self, call: Call) -> dict[str, Any]:
        """Returns the answer to a refused grant."""
        return {
            what: said
            for what, said in self.facts(call.rank).items()
            if what in ("incarnation", "clock", "rank")
        }

    @property
    def clock(self) -> float:
        """Returns the engine's clock, which is independent of the proxy's."""
        return self.began_at + time.monotonic()

    def accepts(self, call: Call) -> bool:
        """Checks a grant as an engine does."""
        grant = call.grant
        if grant is None or (grant.leg == "probe" and not grant.engine):
            return True
        return self.clock <= grant.until < self.clock + MAX_VALIDITY_SECONDS

    async def start(self) -> None:
        self.port = self.port or hold_port(self)
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)

    async def stop(self) -> None:
        """Dies like a killed process."""
        if self._server:
            self._server.close()
        self.drop_connections()
        await asyncio.sleep(0)

    def drop_connections(self) -> None:
        """Ends all connections, and accepts new ones."""
        for writer in list(self._writers):
            writer.transport.abort()

    def legs(self, leg: str) -> list[Call]:
        return [call for call in self.calls if call.leg == leg]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while True:
                call = await self._read(reader)
                call.writer = writer
                working = asyncio.create_task(self._route(call))
                # asyncio has no public way to wait for bytes, or for the end, without taking them.
                private: Any = reader
                watching: asyncio.Task[None] | None = None
                if not private._buffer:
                    watching = asyncio.create_task(private._wait_for_data("watch"))
                try:
                    if watching:
                        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
                        if not working.done() and (reader.at_eof() or reader.exception()):
                            call.gone.set()
                    await working
                finally:
                    if watching:
                        watching.cancel()
                        await asyncio.gather(watching, return_exceptions=True)
                if self.close_after:
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            for call in self.calls:
                if call.writer is writer:
                    call.gone.set()
            self._writers.discard(writer)
            writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader) -> Call:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = dict(
            line.lower().split(": ", 1) for line in reversed(head[1:]) if line
        )  # vLLM takes a header's first value
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        return Call(self, method, path, headers, body)

    async def _step(self, call: Call) -> None:
        """Waits while the engine makes no steps."""
        while self.stuck and not call.gone.is_set():
            await asyncio.sleep(0.005)

    def _metrics(self) -> str:
        uses = [self.kv_use, *[0.0] * (self.ranks - 1)]
        lines = [
            f'vllm:kv_cache_usage_perc{{engine="{at}",model_name="m"}} {use}'
            for at, use in enumerate(uses, self.first_rank)
        ]
        if self.steps is not None:
            lines.append(
                f'vllm:iteration_tokens_total_count{{engine="0",model_name="m"}} {self.steps}'
            )
            lines.append(f'vllm:num_requests_waiting{{engine="0",model_name="m"}} {self.waiting}')
            for reason, count in (("capacity", self.waiting), ("deferred", 99)):
                lines.append(
                    "vllm:num_requests_waiting_by_reason"
                    f'{{engine="0",model_name="m",reason="{reason}"}} {count}'
                )
        return "\n".join(
            [
                "# TYPE x",
                *(lines if self.steps is not None or self.kv_use else []),
                *self.metric_lines,
                "vllm:other 7\n",
            ]
        )

    async def _probed(self, call: Call) -> None:
        assert call.grant
        self.probes += (
            not call.grant.engine
        )  # the second one names the engine that has answered the first
        if self.probe_hangs:
            await call.forever()
        if self.probe_status != 200:
            await call.json({}, self.probe_status)
            return
        facts = self.facts(call.rank)
        is_unlike_ours = self.plain or self.nixl or self.refusal is not None
        self.told += is_unlike_ours or call.grant.engine == facts["incarnation"]
        if call.grant.engine != facts["incarnation"] or not self.accepts(call):
            facts = self.card(call)
        params: dict[str, Any] | None = None if self.plain else {"disagg_engine": facts}
        if self.refusal is not None:
            params = {"disagg_engine": {"disagg_refused": self.refusal} if self.refusal else None}
        if self.nixl:
            params = {
                "remote_engine_id": self.incarnation,
                "remote_block_ids": [[1]],
                "do_remote_prefill": True,
            }
        await call.json({"choices": [], "kv_transfer_params": params})

    async def _route(self, call: Call) -> None:
        if call.method == "POST":
            await self._step(call)
        if self.frozen:
            await call.forever()
        elif call.path == "/health":
            self.own_key = call.headers.get("authorization", "")
            await call.json({}, self.health)
        elif call.path == "/v1/models":
            models = {"data": [{"id": model} for model in self.models]}
            await call.json(models, self.models_status)
        elif self.is_stopping and call.path in ("/v1/completions", "/v1/chat/completions"):
            self.refused += 1
            await refuse_as_stopping(call)
        elif call.leg == "probe":
            await self._probed(call)
        elif call.leg == "whole" and call.body.get("prompt") == "probe":
            await self.one_more(call)
        elif call.path == "/metrics":
            self.metrics_reads += 1
            text = self._metrics()
            call.raw_write(
                f"HTTP/1.1 200 X\r\ncontent-type: text/plain\r\n"
                f"content-length: {len(text)}\r\n\r\n{text}"
            )
        elif call.path.endswith("tokenize"):
            await call.json({"tokens": [1]})
        else:
            await self._leg(call)

    async def _leg(self, call: Call) -> None:
        if call.leg == "prefill" and not self.accepts(call):
            self.refused += 1
            await call.json(
                {
                    "choices": [{"text": "x"}],
                    "kv_transfer_params": {"disagg_engine": self.card(call)},
                }
            )
            return
        assert self.accepts(call), (call.grant, self.clock)
        self.calls.append(call)
        await self.script(call)


class Reply:
    """Holds an answer as a client received it."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.header_names: list[str] = []  # one that came twice is here twice
        self.parts: list[bytes] = []
        self.complete = False

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode()
        self.header_names.append(name.decode().lower())

    def on_body(self, body: bytes) -> None:
        self.parts.append(body)

    def on_message_complete(self) -> None:
        self.complete = True

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        texts = [part.removeprefix(b"data: ") for part in self.body.split(b"\n\n") if part]
        return [text.decode() if text == b"[DONE]" else json.loads(text) for text in texts]


class Client:
    """Connects to the proxy."""

    opened: ClassVar[list[Client]] = []  # in this test; `conftest` closes them

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self.opened.append(self)

    def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> None:
        headers.setdefault("host", "localhost")
        lines = [f"{method} {path} HTTP/1.1", f"content-length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        self.writer.write("\r\n".join([*lines, "", ""]).encode() + body)

    async def receive(self) -> Reply:
        """Returns one answer; `complete` is False when the connection ended early."""
        reply = Reply()
        parser = httptools.HttpResponseParser(reply)
        while not reply.complete:
            data = await self.reader.read(65536)
            if not data:
                break
            parser.feed_data(data)
            reply.status = parser.get_status_code()
        return reply

    def pause_reading(self) -> None:
        """Stops taking bytes from the proxy."""
        cast(asyncio.Transport, self.writer.transport).pause_reading()

    def resume_reading(self) -> None:
        """Takes bytes from the proxy again."""
        cast(asyncio.Transport, self.writer.transport).resume_reading()

    def close(self) -> None:
        self.writer.transport.abort()


class World:
    """Holds a proxy and its engines."""

    def __init__(self, prefills: list[ScriptedEngine], decodes: list[ScriptedEngine]) -> None:
        self.prefills, self.decodes = prefills, decodes
        self.clients: list[Client] = []
        self.port = 0
        self.admin_key = ""
        self.renew: Callable[[], None]  # what SIGHUP does

    @property
    def p(self) -> ScriptedEngine:
        return self.prefills[0]

    @property
    def d(self) -> ScriptedEngine:
        return self.decodes[0]

    async def connect(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self.clients.append(client)
        return client

    def close(self) -> None:
        for client in self.clients:
            client.close()

    async def raw(self, data: bytes) -> Reply:
        client = await self.connect()
        try:
            client.writer.write(data)
            return await client.receive()
        finally:
            client.close()

    async def get(self, path: str, **headers: str) -> Reply:
        return await self.ask("GET", path, b"", **headers)

    async def post(
        self, path: str = "/v1/completions", _body: object = None, **fields: Any
    ) -> Reply:
        body = (
            _body
            if isinstance(_body, bytes)
            else json.dumps({"model": "m", "prompt": "hi", **fields}).encode()
        )
        return await self.ask("POST", path, body)

    async def ask(self, method: str, path: str, body: bytes, **headers: str) -> Reply:
        client = await self.connect()
        try:
            client.send(method, path, body, **headers)
            return await client.receive()
        finally:
            client.close()

    async def start(self, **fields: Any) -> Client:
        """Sends a completion and does not wait for its answer."""
        client = await self.connect()
        client.send(
            "POST", "/v1/completions", json.dumps({"model": "m", "prompt": "hi", **fields}).encode()
        )
        return client

    async def metric(self, name: str, *labels: str) -> float:
        text = (await self.get("/metrics")).body.decode()
        lines = [
            line
            for line in text.splitlines()
            if line.startswith(name) and all(label in line for label in labels)
        ]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    async def until_ready(self) -> None:
        await until(self._ready)

    async def _ready(self) -> bool:
        return all(i["usable"] for i in await self.instances())

    async def until_probed(self, *engines: ScriptedEngine) -> None:
        """Waits until these engines, or all, have answered a full probe, even if not usable."""
        await until(lambda: all(engine.told for engine in engines or self.prefills + self.decodes))
        await asyncio.sleep(0.1)
        await settle()

    async def until_waiting(self, count: int) -> None:
        """Waits until this number of requests wait in the proxy's queues."""

        async def is_reached() -> bool:
            return await self.metric("vllm_disagg_waiting{") == count

        await until(is_reached)

    async def instances(self) -> list[dict[str, Any]]:
        """Returns the proxy's description of each instance."""
        key = {"authorization": f"Bearer {self.admin_key}"} if self.admin_key else {}
        reply = await self.get("/disagg/instances", **key)
        assert reply.status == 200, reply.body
        return reply.json()  # type: ignore[no-any-return]


class HeldTimeLimits:
    """Makes time limits whose time is over when a test says so, however slow the machine is."""

    def __init__(self) -> None:
        self._made: list[tuple[float, TimeLimit]] = []

    def make(self, seconds: float) -> TimeLimit:
        """Replaces the class of time limits."""
        made = TimeLimit(3600.0)
        self._made.append((seconds, made))
        return made

    def expire(self, seconds: float) -> None:
        """Ends the blocks that run within limits of this length."""
        for length, limit in self._made:
            for scope in list(limit._deadlines) if length == seconds else ():
                limit.remove(scope)
                scope.cancel()


def hold_time_limit(monkeypatch: pytest.MonkeyPatch) -> HeldTimeLimits:
    """Holds the time limits of requests in proxies that start from now on."""
    held = HeldTimeLimits()
    monkeypatch.setattr(api, "TimeLimit", held.make)
    return held


async def settle() -> None:
    """Lets what has been written be read, however late the timers of a slow machine are.

    A reset would discard bytes that its receiver has not read yet.
    """
    for _ in range(20):
        await asyncio.sleep(0)


def stand_still(seconds: float, on_arrival: Callable[[], None]) -> None:
    """Blocks the loop, as a pause of the process; calls `on_arrival` for what came in it."""
    here, there = socket.socketpair()

    def read() -> None:
        loop.remove_reader(here)
        here.close()
        on_arrival()

    loop = asyncio.get_running_loop()
    loop.add_reader(here, read)
    there.close()
    time.sleep(seconds)


async def until(condition: Callable[[], Any], limit: float = 200.0) -> None:
    """Waits for a condition, plain or a coroutine."""
    async with asyncio.timeout(limit):
        while True:
            value = condition()
            if await value if asyncio.iscoroutine(value) else value:
                return
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def world(
    prefill: int = 1,
    decode: int = 1,
    ready: bool = True,
    prepare: Callable[[World], None] | None = None,
    **settings: Any,
) -> AsyncIterator[World]:
    """Runs a proxy with scripted engines."""
    it = World(
        [ScriptedEngine(f"p{i}", "prefill") for i in range(prefill)],
        [ScriptedEngine(f"d{i}", "decode") for i in range(decode)],
    )
    if prepare:
        prepare(it)
    engines = it.prefills + it.decodes
    for engine in engines:
        await engine.start()
    it.admin_key = settings.get("admin_key", "")
    settings = {"probe_interval": 0.02, "shutdown_timeout": 2.0, "port": 0, "key": KEY, **settings}
    stop, listening = asyncio.Event(), asyncio.get_running_loop().create_future()
    named = {
        "prefill": [u for e in it.prefills for u in e.urls],
        "decode": [u for e in it.decodes for u in e.urls],
    }
    made = ProxySettings(**{**named, **settings})

    def on_renewal(renew: Callable[[], None]) -> None:
        it.renew = renew

    proxy = asyncio.create_task(serve(made, listening.set_result, stop, on_renewal=on_renewal))
    try:
        it.port = await listening
        if ready:
            await it.until_ready()
        yield it
    finally:
        it.close()
        stop.set()
        await proxy
        for engine in engines:
            await engine.stop()
