"""Scripted instances and scripted clients without a model, cheap enough to load a proxy.

    python benchmarks/scripted.py KEY_FILE

The command prints one JSON line with the URLs by role, and serves until its standard input ends.
There are two instances of each role. *P* answers every request at once. *D* answers after P (both
legs run together), and streams `max_tokens` tokens to all its streams in steps, as an engine does.
The field `seed` is the duration of a step in milliseconds. Both answer the proxy's probe, and have
the fields that vllm-router's `nixl` mode passes on.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop

from vllm_disagg.fleet.grants import verify
from vllm_disagg.fleet.keys import FleetKey, load
from vllm_disagg.protocol.peers import EngineInfo, WorkerInfo

LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
GRANT = re.compile(rb'"disagg_grant": *"([^"]+)"')
TOKENS = re.compile(rb'"max_tokens": *(\d+)')
STEP = re.compile(rb'"seed": *(\d+)')
JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
TOKEN = (
    b'data: {"id":"cmpl-0123456789abcdef","object":"text_completion","created":1763640000,'
    b'"model":"m","choices":[{"index":0,"text":" token","logprobs":null,"finish_reason":null,'
    b'"stop_reason":null}],"usage":null}\n\n'
)


def framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


CHUNK = framed(TOKEN)
LAST = framed(b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Stream:
    """One streamed answer of D."""

    def __init__(self, transport: asyncio.Transport, tokens_left: int) -> None:
        self.transport = transport
        self.tokens_left = tokens_left


class Engines:
    """Shared state of P and D.

    It holds the prefilled transfers, and the streams of D by the milliseconds of their step.
    """

    def __init__(self, key: FleetKey) -> None:
        self.key = key
        self.completions = {"prefill": 0, "decode": 0}
        self._waiting: dict[str, Callable[[], None]] = {}
        self._ready: set[str] = set()
        self._streams: defaultdict[int, set[Stream]] = defaultdict(set)

    def transfer(self, body: bytes) -> tuple[str, str]:
        """Returns leg and transfer of a request; empty texts without a grant."""
        found = GRANT.search(body)
        grant = verify(self.key, found[1].decode()) if found else None
        return (grant.leg, grant.transfer) if grant else ("", "")

    def prefilled(self, transfer: str) -> None:
        if waiting := self._waiting.pop(transfer, None):
            waiting()
        else:
            self._ready.add(transfer)

    def when_prefilled(self, transfer: str, do: Callable[[], None]) -> None:
        if transfer in self._ready:
            self._ready.discard(transfer)
            do()
        else:
            self._waiting[transfer] = do

    def stream(self, transport: asyncio.Transport, tokens: int, step: int) -> None:
        transport.write(STREAM_HEAD + CHUNK)
        if not self._streams[step]:
            asyncio.get_running_loop().call_later(step / 1000, self._step, step)
        self._streams[step].add(Stream(transport, tokens - 1))

    def _step(self, step: int) -> None:
        streams = self._streams[step]
        for stream in list(streams):
            if stream.tokens_left and not stream.transport.is_closing():
                stream.tokens_left -= 1
                stream.transport.write(CHUNK)
            else:
                streams.discard(stream)
                stream.transport.write(LAST)
        if streams:
            asyncio.get_running_loop().call_later(step / 1000, self._step, step)


class Instance(asyncio.Protocol):
    """One connection to P or D."""

    def __init__(self, engines: Engines, role: str, answer: bytes) -> None:
        self._engines = engines
        self._role = role
        self._answer = JSON_HEAD % len(answer) + answer
        self._parts: list[bytes] = []
        self._needed = 0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if not self._needed:
            data = b"".join([*self._parts, data])
            self._parts.clear()
            end = data.find(b"\r\n\r\n")
            if end >= 0:
                length = LENGTH.search(data, 0, end)
                self._needed = end + 4 + (int(length[1]) if length else 0)
        self._parts.append(data)
        if self._needed and sum(map(len, self._parts)) >= self._needed:
            whole = b"".join(self._parts)
            self._parts = []
            self._needed = 0
            self._on_request(whole)

    def _on_request(self, request: bytes) -> None:
        if request.startswith(b"GET /count "):
            counts = json.dumps(self._engines.completions).encode()
            self._transport.write(JSON_HEAD % len(counts) + counts)
            return
        self._engines.completions[self._role] += request.startswith(b"POST /v1/completions ")
        leg, transfer = self._engines.transfer(request)
        if leg == "prefill":
            self._transport.write(self._answer)
            self._engines.prefilled(transfer)
        elif leg == "decode":
            self._engines.when_prefilled(transfer, lambda: self._reply(request))
        else:
            self._reply(request)

    def _reply(self, request: bytes) -> None:
        body = request[request.find(b"\r\n\r\n") :]
        if b'"stream":true' in body.replace(b" ", b""):
            tokens = TOKENS.search(body)
            step = STEP.search(body)
            self._engines.stream(
                self._transport, int(tokens[1]) if tokens else 16, int(step[1]) if step else 10
            )
        else:
            self._transport.write(self._answer)


def answers(role: str, name: str) -> bytes:
    """Returns the JSON of all answers: to health, models, probes and completions."""
    worker = WorkerInfo(f"{name}-w0", "tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    engine = EngineInfo(name, role, [worker], {"model": "m"})  # type: ignore[arg-type]
    nixl = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [1],
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "tp_size": 1,
    }
    choice = {
        "index": 0,
        "text": " token",
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    answer = {
        "id": "cmpl-0",
        "object": "text_completion",
        "created": 1,
        "model": "m",
        "choices": [choice],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        "data": [{"id": "m", "object": "model", "created": 1, "owned_by": "vllm"}],
        "kv_transfer_params": {"disagg_engine": msgspec.to_builtins(engine), **nixl},
    }
    return json.dumps(answer).encode()


async def serve(key_file: str) -> None:
    loop = asyncio.get_running_loop()
    engines = Engines(load(key_file))
    urls: dict[str, list[str]] = {"prefill": [], "decode": []}
    for role, number in (("prefill", 0), ("prefill", 1), ("decode", 0), ("decode", 1)):
        answer = answers(role, f"scripted-{role}-{number}")
        server = await loop.create_server(
            lambda r=role, a=answer: Instance(engines, r, a), "127.0.0.1", 0, backlog=8192
        )
        urls[role].append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    print(json.dumps(urls), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


class Client(asyncio.Protocol):
    """Connection to a proxy that sends one request at a time, and counts events of the answer."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._done: asyncio.Future[bool]
        self._began: asyncio.Future[None] | None = None
        self._buffer = b""
        self._needed = -1  # bytes; 0: until the last chunk
        self.events = 0
        self.ok = False

    @classmethod
    async def connect(cls, host: str, port: int) -> Client:
        return (await asyncio.get_running_loop().create_connection(cls, host, port))[1]

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def ask(
        self, request: bytes, began: asyncio.Future[None] | None = None
    ) -> asyncio.Future[bool]:
        """Sends a request. The future becomes True after a whole answer with status 200.

        `began` is set at the first event of the answer.
        """
        self._buffer = b""
        self._needed = -1
        self.events = 0
        self._began = began
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._done

    def data_received(self, data: bytes) -> None:
        if self._needed == 0:
            self._streamed(data)
            return
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        if self._needed < 0:
            self.ok = self._buffer.startswith(b"HTTP/1.1 200")
            length = LENGTH.search(self._buffer, 0, end)
            if not length:
                self._needed = 0
                self._streamed(self._buffer[end + 4 :])
                return
            self._needed = end + 4 + int(length[1])
        if len(self._buffer) >= self._needed:
            self._end(self.ok)

    def _streamed(self, data: bytes) -> None:
        self.events += data.count(b"data: ")
        if self.events and self._began and not self._began.done():
            self._began.set_result(None)
        self._buffer = (self._buffer[-8:] + data)[-64:]
        if self._buffer.endswith(b"0\r\n\r\n"):
            self._end(self.ok)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(False)

    def _end(self, ok: bool) -> None:
        if hasattr(self, "_done") and not self._done.done():
            self._done.set_result(ok)

    def close(self) -> None:
        self._transport.abort()


def body(size: int, **fields: object) -> bytes:
    """Returns a completion's body of `size` bytes: words, with some escapes."""
    empty = json.dumps(
        {"model": "m", "prompt": "", "max_tokens": 16, "temperature": 0, **fields},
        separators=(",", ":"),
    )
    words = 'The quick brown fox jumps over the lazy dog, and says: \\"well\\".\\n'
    room = max(size - len(empty), 8)
    text = (words * (room // len(words) + 1))[:room].rstrip("\\")
    return empty.replace('"prompt":""', f'"prompt":"{text}"').encode()


def request(content: bytes) -> bytes:
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        "authorization: Bearer x\r\n"
    )
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


if __name__ == "__main__":
    if not Path(sys.argv[-1]).is_file():
        sys.exit(__doc__)
    uvloop.run(serve(sys.argv[1]))
