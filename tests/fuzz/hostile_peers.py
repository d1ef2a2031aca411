"""Hostile peers of a worker's ports, in a process of their own: strangers and members.

    python hostile_peers.py STRANGERS_PORTS MEMBERS_ENDPOINTS WORKER SEED [flood]

Both lists are joined by commas. Strangers send bytes to any port. Members have the fleet's key and
send messages of any content to the worker of this name. Prints one line of JSON every second. In a
flood nothing pauses, and members send messages that they have made before, some of them changed.
"""

from __future__ import annotations

import json
import select
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from random import Random

import msgspec
import zmq
from fuzz_campaign import corpus
from fuzz_values import mutated, random_bytes, spoiled, values_of

from vllm_disagg.config import Config
from vllm_disagg.fleet.keys import KEY_BYTES, FleetKey
from vllm_disagg.protocol import messages
from vllm_disagg.transports.zmq import control as zmq_control

KEY = FleetKey(b"k" * KEY_BYTES)
CONNECTIONS = 24  # of strangers, at a time
MESSAGES_PER_ROUND = 8  # of members
FLOOD_MESSAGES = 4096  # different ones, at a time
MESSAGES_PER_FLOOD_ROUND = 16
ROUND_SECONDS = 0.004  # a member is limited by its network, too
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
CURVE = GREETING + b"CURVE".ljust(20, b"\0") + bytes(32)
HELLO = CURVE + b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + bytes(120)


def ports_to_fire_at(
    at_start: Mapping[str, set[int]], now: Mapping[str, set[int]], own: set[int]
) -> dict[str, list[int]]:
    """Returns all ports but those of vLLM's process groups, by process.

    A process group listens before the first request, and its ports are none of our `own`. A
    transport's listener opens with the first transfer, so it is among those of `now` only.
    """
    spared = set().union(*at_start.values()) - own
    found = {name: sorted(ports - spared) for name, ports in now.items()}
    if not set().union(*found.values()) - own:
        raise RuntimeError("no transport listens at a port of its own")
    return {name: ports for name, ports in found.items() if ports}


def expect_frames(by_port: Mapping[str, int], ports: Iterable[int]) -> None:
    """Raises RuntimeError if no frame has met one of these ports."""
    unmet = [port for port in sorted(ports) if not by_port.get(str(port))]
    if unmet:
        raise RuntimeError(f"no frame has met the ports {unmet}, which proves nothing of them")


class Strangers:
    """Connections without the key, at every port of a worker."""

    def __init__(self, ports: list[int], random: Random) -> None:
        self._ports = ports
        self._random = random
        self._openings = [HELLO, CURVE, GREETING, *corpus("http_requests")]
        self._open: dict[socket.socket, int] = {}  # to this port
        self.by_port: Counter[int] = Counter()  # frames

    @property
    def frames(self) -> int:
        """How many were sent."""
        return self.by_port.total()

    def step(self) -> None:
        """Makes, uses and leaves some connections."""
        random = self._random
        while len(self._open) < CONNECTIONS:
            made = socket.socket()
            made.setblocking(False)
            port = random.choice(self._ports)
            made.connect_ex(("127.0.0.1", port))
            self._open[made] = port
        _, writable, _ = select.select([], self._open, [], 0)
        for one in writable:
            frame = random.choice(self._openings)
            if random.random() < 0.7:
                frame = mutated(random, frame)
            if random.random() < 0.2:
                frame = random_bytes(random, 500)
            try:
                one.send(frame)
                self.by_port[self._open[one]] += 1
                is_gone = random.random() < 0.3
            except OSError:
                is_gone = True
            if is_gone:
                one.close()
                del self._open[one]

    def close(self) -> None:
        """Leaves."""
        for one in self._open:
            one.close()


class Members:
    """Connections with the key, and messages of any content."""

    def __init__(self, endpoints: list[str], worker: str, random: Random) -> None:
        self._random = random
        self._worker = worker
        control = zmq_control.Control(Config(transport="zmq"), KEY, "hostile/0")
        self._links = []
        for number, endpoint in enumerate(endpoints):
            name = f"hostile/{number}".encode()
            link = control.dial(endpoint, name, messages.MAX_FRAME_BYTES, encrypt=number == 0)
            assert link is not None
            self._links.append(link)
        self._control = control
        kinds = (*messages.AtSender.__args__, messages.PieceHeader)
        self._makers = [values_of(kind) for kind in kinds]
        self._made: list[bytes] = []  # for a flood
        self.frames = 0

    def step(self) -> None:
        """Sends some messages, and drops what comes."""
        for _ in range(MESSAGES_PER_ROUND):
            self._send(self._make())
        self._drop_answers()

    def flood(self) -> None:
        """Sends many messages, few of them new, and drops what comes."""
        random = self._random
        self._made = [*self._made[-FLOOD_MESSAGES:], self._make()]
        for _ in range(MESSAGES_PER_FLOOD_ROUND):
            frame = random.choice(self._made)
            self._send(mutated(random, frame) if random.random() < 0.1 else frame)
        self._drop_answers()

    def _make(self) -> bytes:
        random = self._random
        message = random.choice(self._makers)(random)
        changes = {}
        if hasattr(message, "source"):
            changes = {"source": self._worker, "reader": "hostile/0"}
        frame = messages.encode(msgspec.structs.replace(message, **changes))
        return spoiled(random, frame) if random.random() < 0.3 else frame

    def _send(self, frame: bytes) -> None:
        random = self._random
        link = random.choice(self._links)
        frames = [frame, *(random_bytes(random) for _ in range(random.choice((0, 0, 0, 2))))]
        try:
            link.send_multipart(frames, zmq.NOBLOCK)
            self.frames += 1
        except zmq.Again:
            pass

    def _drop_answers(self) -> None:
        for link in self._links:
            for _ in zmq_control.receive(link):
                pass


def main() -> None:
    """Goes on until the process is killed."""
    ports = [int(port) for port in sys.argv[1].split(",")]
    endpoints = sys.argv[2].split(",")
    random = Random(sys.argv[4])
    strangers = Strangers(ports, random)
    members = Members(endpoints, sys.argv[3], random)
    reported = 0.0
    is_flood = sys.argv[5:] == ["flood"]
    while True:
        strangers.step()
        if is_flood:
            members.flood()
        else:
            members.step()
            time.sleep(ROUND_SECONDS)
        if time.monotonic() > reported + 1.0:
            reported = time.monotonic()
            counts = {"frames": strangers.frames + members.frames, "by_port": strangers.by_port}
            print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main()
