"""The proxy's parsers between hostile clients and hostile engines, in one process.

`fuzz_sockets.py` has the whole proxy, over sockets.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Coroutine
from random import Random
from typing import Any

import msgspec
from fuzz_campaign import Leak, Unit, corpus
from fuzz_values import TEXTS, json_value, mutated, random_bytes, values_of

from vllm_disagg.errors import BadGrant, ConfigError
from vllm_disagg.fleet.keys import KEY_BYTES, FleetKey
from vllm_disagg.fleet.registration import RegistrationNote, sign
from vllm_disagg.protocol.peers import EngineInfo
from vllm_disagg.proxy.http.addresses import check_url
from vllm_disagg.proxy.http.connection import Connection
from vllm_disagg.proxy.http.endpoint_schema import SCHEMAS
from vllm_disagg.proxy.http.limits import Limits
from vllm_disagg.proxy.http.request import HttpRequest
from vllm_disagg.proxy.http.server import Server
from vllm_disagg.proxy.http.upstream import UpstreamConnection
from vllm_disagg.proxy.http.upstream_response import Unreachable
from vllm_disagg.proxy.http.websocket import FrameReader
from vllm_disagg.proxy.membership import engine_answers
from vllm_disagg.proxy.membership.registry import Registry
from vllm_disagg.proxy.requests import bodies
from vllm_disagg.proxy.requests.completeness import END_MARKS, doubtful
from vllm_disagg.proxy.requests.first_content import FirstContentDetector
from vllm_disagg.proxy.requests.streams import StreamRecorder, aborted, engine_failed

KEY = FleetKey(b"k" * KEY_BYTES)
STATUS_LINE = re.compile(rb"HTTP/1\.1 \d{3} [^\r\n]*\r\n")
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/other")
MAX_WAITING_TURNS = 5  # of the loop, until a handler has answered


class Transport(asyncio.Transport):
    """A connection without a socket: what is written is kept."""

    def __init__(self, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self._protocol_object = protocol
        self.written = bytearray()
        self.closed = False

    def write(self, data: Any) -> None:
        """Keeps the bytes."""
        self.written += data

    def is_closing(self) -> bool:
        """Returns whether the connection has ended."""
        return self.closed

    def close(self) -> None:
        """Ends the connection in the loop's next turn, as a socket does."""
        if not self.closed:
            self.closed = True
            asyncio.get_running_loop().call_soon(self._protocol_object.connection_lost, None)

    abort = close

    def can_write_eof(self) -> bool:
        """Returns that one direction can be closed alone."""
        return True

    def write_eof(self) -> None:
        """Closes the direction to the peer."""

    def pause_reading(self) -> None:
        """Ignores the pause: the test gives bytes all the same, as TLS may."""

    def resume_reading(self) -> None:
        """Ignores the end of a pause."""

    def get_write_buffer_size(self) -> int:
        """Returns that all is written."""
        return 0

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Returns the peer's address, and no socket."""
        return ("127.0.0.1", 1) if name == "peername" else default


class LoopTarget:
    """A target whose code needs a loop; an exception that the loop gets ends the batch."""

    unit: Unit = "frames"
    batch = 1000

    def __init__(self, random: Random) -> None:
        self.loop = asyncio.new_event_loop()
        self._errors: list[BaseException] = []
        self.loop.set_exception_handler(self._on_error)

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._errors.append(context.get("exception") or RuntimeError(context["message"]))

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs one step of the target in the loop."""
        self.loop.run_until_complete(work)
        if self._errors:
            raise self._errors[0]

    def feed(self, random: Random) -> None:
        """Gives the code one input."""
        self.run(self.step(random))

    async def step(self, random: Random) -> None:
        """Gives the code one input, in the loop."""
        raise NotImplementedError

    def finish(self) -> None:
        """Ends all that began."""

    def close(self) -> None:
        """Closes the loop."""
        self.loop.run_until_complete(_turns(MAX_WAITING_TURNS))
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self.loop.close()


async def _turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class RequestTarget(LoopTarget):
    """Requests of HTTP at one connection after the other, cut anywhere."""

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self._requests = corpus("http_requests")
        self._parts = corpus("http_parts")
        limits = Limits(header_bytes=4096, body_bytes=20_000, all_bodies_bytes=60_000)
        self._server = Server(self._handle, limits)
        self._handled = 0

    async def _handle(self, request: HttpRequest, client: Connection) -> None:
        self._handled += 1
        is_path = request.path.startswith(("/", "*")) or request.method == "CONNECT"
        # A URL of another scheme is a path that no route has, so it is answered with 404.
        if not (request.method and (is_path or "://" in request.path)):
            # Not raised: the connection logs what a handler raises.
            self._errors.append(AssertionError(f"a handler got {request.method} {request.path!r}"))
        json.dumps([request.method, request.logged_path, request.request_id, request.target])
        if self._handled % 3:
            await asyncio.sleep(0)
        client.answer(200, [], b"answer")

    async def step(self, random: Random) -> None:
        connection = Connection(self._server)
        transport = Transport(connection)
        connection.connection_made(transport)
        data = b"".join(self._request(random) for _ in range(random.randrange(1, 4)))
        while data and not transport.closed:
            cut = random.choice((1, 7, 60, len(data), len(data)))
            connection.data_received(data[:cut])
            data = data[cut:]
            if random.random() < 0.3:
                await asyncio.sleep(0)
        await _turns(MAX_WAITING_TURNS)
        self._check(bytes(transport.written))
        if random.random() < 0.3:
            connection.eof_received()
        transport.close()
        await _turns(2)

    def _request(self, random: Random) -> bytes:
        data = random.choice(self._requests)
        if random.random() < 0.75:
            data = mutated(random, data, self._parts)
        return data if random.random() < 0.97 else random_bytes(random, 400)

    def _check(self, written: bytes) -> None:
        """Raises unless all that the client got are answers of HTTP."""
        while written:
            head, blank, rest = written.partition(b"\r\n\r\n")
            if not (STATUS_LINE.match(head + b"\r\n") and blank):
                raise AssertionError(f"not an answer: {written[:100]!r}")
            length = re.search(rb"content-length: (\d+)", head)
            written = rest[int(length[1]) if length else 0 :]
            if head.startswith(b"HTTP/1.1 101"):
                return

    def finish(self) -> None:
        """Checks that no byte and no connection is counted any more."""
        if self._server.budget.held_bytes or self._server.connections:
            raise Leak(f"{self._server.budget.held_bytes} bytes, {len(self._server.connections)}")


class BodyTarget(LoopTarget):
    """Bodies of generating endpoints: what passes must not set what only the proxy may set."""

    unit: Unit = "bodies"
    batch = 2000

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self._bodies = corpus("bodies")
        self._parts = corpus("body_parts")

    async def step(self, random: Random) -> None:
        raw = self._body(random)
        if random.random() < 0.05:
            kind = random.choice((b"multipart/form-data; boundary=b", b"x; charset=utf-16"))
            try:
                await bodies.check_form(kind, raw)
            except bodies.BadBody:
                return
        schema = random.choice(list(SCHEMAS.values()))
        try:
            body = await bodies.parse_async(raw, schema)
        except bodies.BadBody as error:
            str(error)
            return
        facts = (body.aggregated_reason, body.has_previous_response, body.one_token)
        more = (body.reproducible, body.model, body.priority)
        body.routing_query(b"s", True)
        json.dumps([facts, more])
        whole = body.aggregated_body()
        for sent, own in (
            (whole, None),
            (body.decode_body({"own": 1}), {"own": 1}),
            (body.prefill_body({"own": 1}), "any"),
        ):
            _expect_no_params(sent, own)
        if json.dumps(json.loads(raw)) != json.dumps(json.loads(whole)):
            raise AssertionError(f"another body than the client's: {raw!r}")

    def _body(self, random: Random) -> bytes:
        how = random.random()
        if how < 0.3:
            fields = {random.choice(TEXTS): json_value(random) for _ in range(5)}
            fields["prompt"] = json_value(random)
            for name in ("n", "stream", "temperature", "priority", "sampling_params", "model"):
                if random.random() < 0.3:
                    fields[name] = json_value(random)
            if random.random() < 0.5:
                fields[random.choice(bodies.FORBIDDEN)] = json_value(random)
            raw = json.dumps(fields).encode("utf-8", "surrogatepass")
        else:
            raw = random.choice(self._bodies)
        if how < 0.9:
            return mutated(random, raw, self._parts)
        return raw if how < 0.99 else raw + b" " * random.choice((10_000, 70_000))


def _expect_no_params(sent: bytes, own: object) -> None:
    """Raises if an engine's JSON parser finds parameters that the proxy has not set."""

    def check(pairs: list[tuple[str, object]]) -> dict[str, object]:
        for name, value in pairs:
            is_own = own == "any" or (own is not None and value == own)
            if name in bodies.FORBIDDEN and value is not None and not is_own:
                raise AssertionError(f"an engine would get {name}: {value!r}")
        return dict(pairs)

    json.loads(sent, object_pairs_hook=check)


class _Owner:
    """Keeps the connections to one hostile engine."""

    def __init__(self) -> None:
        self.connections: set[UpstreamConnection] = set()
        self.chunks_received = 0
        self.unused_ends = 0

    def release(self, connection: UpstreamConnection) -> None:
        """Closes a connection that could be used again."""
        connection.close()


class AnswerTarget(LoopTarget):
    """Answers of hostile engines: heads, bodies, streams, probes and metrics pages."""

    batch = 1500

    def __init__(self, random: Random) -> None:
        super().__init__(random)
        self._answers = corpus("answers")
        self._events = corpus("events")
        self._parts = [*corpus("http_parts"), *corpus("body_parts"), *self._events]
        self._reports = corpus("reports")
        self._owner = _Owner()
        self._engine = values_of(EngineInfo)

    async def step(self, random: Random) -> None:
        kind = random.choice((self._answer, self._stream, self._stream, self._report))
        await kind(random)

    async def _answer(self, random: Random) -> None:
        connection = UpstreamConnection(self._owner)
        transport = Transport(connection)
        connection.connection_made(transport)
        upgrade = random.choice((b"", b"", b"websocket"))
        answer = connection.send_request(b"GET / HTTP/1.1\r\n\r\n", b"", upgrade)
        taken: list[bytes] = []
        frames = FrameReader()

        def take(data: bytes) -> None:
            taken.append(data)
            frames.feed(data)

        async def read() -> None:
            await answer.head()
            if random.random() < 0.5:
                await answer.pipe(take)
            else:
                await answer.read()

        reading = self.loop.create_task(read())
        data = mutated(random, random.choice(self._answers), self._parts)
        data += b"".join(random.choices(self._events, k=2)) if random.random() < 0.3 else b""
        while data and not transport.closed:
            cut = random.choice((1, 9, len(data), len(data)))
            connection.data_received(data[:cut])
            data = data[cut:]
            if random.random() < 0.2:
                await asyncio.sleep(0)
        transport.close()
        await _turns(MAX_WAITING_TURNS)
        frames.close(502, random.choice(TEXTS))
        if not reading.done():
            raise Leak("a task waits for an answer whose connection has ended")
        if (error := reading.exception()) and not isinstance(error, Unreachable):
            raise error

    async def _stream(self, random: Random) -> None:
        path = random.choice(PATHS)
        sent: list[bytes] = []
        end_mark = END_MARKS.get(path) if random.random() < 0.5 else None
        recorder = StreamRecorder(sent.append, random.random() < 0.8, end_mark, path)
        events = random.choices(self._events, k=random.randrange(1, 12))
        for _ in range(random.randrange(1, 4)):
            stopped: list[str] = []

            def stop(reason: str, detail: str, reasons: list[str] = stopped) -> None:
                reasons.append(reason)

            feed = recorder.start_answer(stop)
            detector = FirstContentDetector(path)
            for event in events:
                if random.random() < 0.15:
                    event = mutated(random, event, self._parts)
                cut = random.randrange(len(event) + 1) if random.random() < 0.2 else len(event)
                for part in (event[:cut], event[cut:]):
                    detector.feed(part)
                    if not stopped:
                        feed(part)
                engine_failed(event)
                aborted(event)
                doubtful(path, event)
            if not stopped and recorder.finish():
                break
        bytes(recorder.resumable)
        b"".join(sent)

    async def _report(self, random: Random) -> None:
        if random.random() < 0.4:
            engine = msgspec.to_builtins(self._engine(random))
            raw = msgspec.json.encode({"kv_transfer_params": {"disagg_engine": engine}})
        else:
            raw = random.choice(self._reports)
        raw = mutated(random, raw, self._parts) if random.random() < 0.7 else raw
        for read in (engine_answers.engine_in, engine_answers.card_in, engine_answers.report_in):
            read(raw)
        engine_answers.params_in(raw)
        engine_answers.refusal_in(raw)
        for series in (engine_answers.KV_CACHE_USAGE, engine_answers.WAITING):
            try:
                engine_answers.values(series, raw, random.choice((None, 0)))
            except ValueError:  # which its caller expects
                pass

    def finish(self) -> None:
        """Checks that no connection is left."""
        self.loop.run_until_complete(_turns(2))
        if self._owner.connections:
            raise Leak(f"{len(self._owner.connections)} connections")


class RegistrationTarget:
    """Registrations and addresses: from strangers, and from members with any content."""

    unit: Unit = "bodies"
    batch = 2000

    def __init__(self, random: Random) -> None:
        self._registry = Registry(KEY)
        self._note = values_of(RegistrationNote, wrong=0.05)
        self._texts = corpus("files")
        self._parts = corpus("file_parts")
        self._now = 0.0

    def feed(self, random: Random) -> None:
        """Gives the registry one note."""
        self._now += random.choice((0.0, 0.1, 1.0))
        note = self._note(random)
        text = mutated(random, random.choice(self._texts), self._parts).decode("latin-1")
        if random.random() < 0.5:
            text = f"http://10.0.0.{random.randrange(300)}:{random.randrange(70000)}"
        challenge = self._registry.challenge if random.random() < 0.8 else "x"
        note = msgspec.structs.replace(note, challenge=challenge, url=text)
        data = sign(KEY, note)
        if random.random() < 0.3:
            data = mutated(random, data)
        try:
            self._registry.register(data, self._now)
        except BadGrant as error:
            str(error)
        try:
            check_url(text, "url")
        except ConfigError as error:
            str(error)

    def finish(self) -> None:
        """Checks that all registrations expire."""
        self._registry.expire(self._now + 1000.0)
        if self._registry.members:
            raise Leak("registrations that do not expire")

    def close(self) -> None:
        """Holds nothing."""
