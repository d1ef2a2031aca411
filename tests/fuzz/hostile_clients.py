"""Hostile clients of one HTTP port, in a process of their own.

    python hostile_clients.py PORT SEED CONNECTIONS PATHS...

Prints one line of JSON every second: the frames and bodies that were sent so far.
"""

from __future__ import annotations

import asyncio
import json
import sys
from random import Random

from fuzz_campaign import corpus
from fuzz_proxy import BodyTarget
from fuzz_values import mutated, random_bytes

ANSWER_SECONDS = 0.5  # that a client waits; hostile requests may have no answer
REQUESTS_PER_CONNECTION = 20
MAX_ANSWER_BYTES = 65536


class Clients:
    """Connections that send good and bad requests, and whatever else."""

    def __init__(self, port: int, seed: int, paths: list[str]) -> None:
        self._port = port
        self._seed = seed
        self._paths = paths
        self._bodies = BodyTarget(Random(seed))
        self._requests = corpus("http_requests")
        self._parts = corpus("http_parts")
        self.frames = 0
        self.bodies = 0

    async def run(self, number: int) -> None:
        """Makes one connection after the other, for ever."""
        random = Random(f"{self._seed}/{number}")
        while True:
            try:
                reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            except OSError:
                await asyncio.sleep(0.1)
                continue
            try:
                await self._use(random, reader, writer)
            except (OSError, TimeoutError):
                pass
            finally:
                writer.transport.abort()

    async def _use(
        self, random: Random, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        for _ in range(random.randrange(1, REQUESTS_PER_CONNECTION)):
            if random.random() < 0.8:
                writer.write(self._post(random))
                self.bodies += 1
            else:
                writer.write(self._raw(random))
                self.frames += 1
            if random.random() < 0.1:
                return  # gone before the answer
            async with asyncio.timeout(ANSWER_SECONDS):
                await writer.drain()
                if not await reader.read(MAX_ANSWER_BYTES):
                    return

    def _post(self, random: Random) -> bytes:
        body = self._bodies._body(random)
        path = random.choice(self._paths)
        length = len(body) if random.random() < 0.98 else random.randrange(1 << 20)
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        extra = random.choice(self._parts) if random.random() < 0.03 else b""
        if b"\r\n" not in extra:
            extra = b""
        return head.encode() + extra + b"content-length: %d\r\n\r\n" % length + body

    def _raw(self, random: Random) -> bytes:
        if random.random() < 0.1:
            return random_bytes(random, 2000)
        return mutated(random, random.choice(self._requests), self._parts)

    async def report(self) -> None:
        """Prints the counts every second."""
        while True:
            print(json.dumps({"frames": self.frames, "bodies": self.bodies}), flush=True)
            await asyncio.sleep(1.0)


async def main() -> None:
    """Runs all connections until the process is killed."""
    port, seed, connections = map(int, sys.argv[1:4])
    clients = Clients(port, seed, sys.argv[4:])
    await asyncio.gather(clients.report(), *(clients.run(n) for n in range(connections)))


if __name__ == "__main__":
    asyncio.run(main())
