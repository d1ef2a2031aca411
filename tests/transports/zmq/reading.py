"""A ZMQ transport that reads, beside a sender's ROUTER of the test."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import zmq

from vllm_disagg.config import Config
from vllm_disagg.fleet import keys
from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.memory import HostMemory
from vllm_disagg.protocol.events import PostRead
from vllm_disagg.transports.base import Counters, DriverPort, TransportEvent
from vllm_disagg.transports.zmq import control
from vllm_disagg.transports.zmq.transport import ZmqTransport

LIMIT_SECONDS = 60.0  # of each wait


def ignore(name: str, note: bytes) -> None:
    """Drops a note."""


class Reading:
    """A ZMQ transport that reads from `p/0`, whose ROUTER the test has; `ups` counts probes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sockets = control.Control(Config(transport="zmq"), keys.FleetKey(None), "d/0")
        memory = HostMemory([[np.zeros((8, 64), np.uint8)]], 16)
        port = DriverPort(
            "d/0",
            Config(transport="zmq"),
            memory,
            Counters(),
            self.sockets.poller,
            ignore,
            ignore,
            ignore,
        )
        self.transport = ZmqTransport(port, self.sockets)
        self.ups = 0
        on_link_up = ZmqTransport._on_link_up

        def counted(*args: Any) -> Iterator[TransportEvent]:
            self.ups += 1
            return on_link_up(*args)

        monkeypatch.setattr(ZmqTransport, "_on_link_up", counted)

    def until_up(self, router: zmq.Socket[bytes], ups: int) -> list[TransportEvent]:
        """Polls both ends until so many connections have come up; returns the events of that."""
        events: list[TransportEvent] = []
        end = time.monotonic() + LIMIT_SECONDS
        while self.ups < ups:
            assert time.monotonic() < end
            router.poll(0)
            ready = [found for found, _ in self.sockets.poller.poll(10)]
            events += self.transport.poll_events(ready)
        return events

    def post(self, number: int) -> None:
        address, extent = self.transport.address, Extent(0, 1, 0, 16)
        self.transport.post_read(PostRead("ab" * 16, number, "p/0", address, extent, [0]))

    def close(self) -> None:
        self.transport.close()
        self.sockets.close()


def listening_router(
    context: zmq.Context[zmq.Socket[bytes]], endpoint: str, *, handover: bool = False
) -> zmq.Socket[bytes]:
    """Returns a ROUTER as a sender has it, and waits for the endpoint if it is still in use."""
    router = context.socket(zmq.ROUTER)
    router.linger = 0
    router.rcvtimeo = round(1000 * LIMIT_SECONDS)
    router.probe_router = True
    router.router_handover = handover
    end = time.monotonic() + LIMIT_SECONDS
    while True:
        try:
            router.bind(endpoint)
            return router
        except zmq.ZMQError:
            assert time.monotonic() < end
            time.sleep(0.01)


def endpoint_of(router: zmq.Socket[bytes]) -> str:
    return router.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
