"""Streams that break off at one real engine and continue at another.

Their clients get one stream, with the exact answer.
"""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from asking import english
from conftest import Machine
from engines import Engine, Proxy, wait

from named_scripts import hear_message, hear_response

pytestmark = pytest.mark.wide

LENGTH = 900  # tokens of an answer: some seconds
BEGUN = 40  # events of a stream, after which its engine fails
CHAT = [{"role": "user", "content": english(300, "continued")}]
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": (
        "/v1/completions",
        {"prompt": english(300, "continued"), "max_tokens": LENGTH, "ignore_eos": True},
    ),
    "chat": ("/v1/chat/completions", {"messages": CHAT, "max_tokens": LENGTH, "ignore_eos": True}),
    "responses": (
        "/v1/responses",
        {"input": CHAT, "max_output_tokens": LENGTH, "ignore_eos": True},
    ),
    "messages": ("/v1/messages", {"messages": CHAT, "max_tokens": LENGTH}),
}


@dataclass
class Stream:
    """One answer, while it arrives."""

    url: str
    path: str
    body: dict[str, Any]
    got: bytearray = field(default_factory=bytearray)
    error: str = ""

    def run(self) -> None:
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=60)
        try:
            body = {"model": "tiny", "stream": True, "temperature": 0, **self.body}
            connection.request(
                "POST", self.path, json.dumps(body), {"content-type": "application/json"}
            )
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            while data := answer.read1():
                self.got += data
        except (OSError, http.client.HTTPException, AssertionError) as error:
            self.error = repr(error)
        finally:
            connection.close()

    @property
    def events(self) -> int:
        return self.got.count(b"\n\n")

    def heard(self) -> dict[str, Any]:
        """Returns the content of events, without ids and times."""
        assert not self.error, self.error
        if self.path == "/v1/responses":
            heard = hear_response(bytes(self.got))
        elif self.path == "/v1/messages":
            heard = hear_message(bytes(self.got))
        else:
            heard = hear_chunks(bytes(self.got))
        return {name: value for name, value in heard.items() if name not in ("head", "ids")}


def hear_chunks(data: bytes) -> dict[str, Any]:
    *raw, done, end = data.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    chunks = [json.loads(event.removeprefix(b"data: ")) for event in raw]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = [
        choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        for choice in choices
    ]
    roles = sum("role" in choice.get("delta", {}) for choice in choices)
    return {
        "said": "".join(texts),
        "roles": roles,
        "finish": [c["finish_reason"] for c in choices if c["finish_reason"]],
    }


class Fleet:
    def __init__(self, machine: Machine) -> None:
        self.engines = [Engine(f"whole{at}", machine.folder, cpu=str(at)) for at in range(2)]
        self.proxy = Proxy(machine.folder, [], self.engines, name="proxy6")
        machine.start(*self.engines)
        machine.start(self.proxy)
        self.right = {
            name: stream.heard() for name, stream in self.ask(self.engines[1].url).items()
        }

    def ask(self, url: str) -> dict[str, Stream]:
        """Runs all jobs at the same time, to their ends."""
        streams, threads = self.begin(url)
        for thread in threads:
            thread.join()
        return streams

    def begin(self, url: str) -> tuple[dict[str, Stream], list[threading.Thread]]:
        streams = {name: Stream(url, path, body) for name, (path, body) in JOBS.items()}
        threads = [threading.Thread(target=stream.run) for stream in streams.values()]
        for thread in threads:
            thread.start()
        return streams, threads

    def use(self, engine: Engine, usable: bool) -> None:
        engine.signal(signal.SIGCONT if usable else signal.SIGSTOP)
        wait(
            f"the proxy knows how {engine.name} is",
            lambda: self.proxy.members()[engine.url] == usable,
            20,
            every=0.02,
        )


@pytest.fixture(scope="module")
def fleet(machine: Machine) -> Iterator[Fleet]:
    made = Fleet(machine)
    yield made
    machine.stop(made.proxy, *made.engines)


@pytest.mark.parametrize(("at", "fault"), [(0, signal.SIGSTOP), (1, signal.SIGKILL)])
def test_all_streams_of_an_engine_go_on_at_another(
    fleet: Fleet, at: int, fault: signal.Signals
) -> None:
    victim, other = fleet.engines[at], fleet.engines[1 - at]
    fleet.use(other, False)  # so that all streams begin at the victim
    streams, threads = fleet.begin(fleet.proxy.url)
    wait(
        "all streams have begun",
        lambda: all(s.events >= BEGUN or s.error for s in streams.values()),
        90,
        every=0.01,
    )
    fleet.use(other, True)
    victim.signal(fault)
    sent = {name: (stream.events, bytes(stream.got)) for name, stream in streams.items()}
    began = time.monotonic()
    for thread in threads:
        thread.join()
    print(f"{fault.name}: {time.monotonic() - began:.1f} s until the last stream was complete")
    try:
        for name, stream in streams.items():
            events, before = sent[name]
            assert bytes(stream.got).startswith(before) and stream.events > events, (
                f"{name} was in mid-stream"
            )
            assert stream.heard() == fleet.right[name], name
            said = len(str(stream.heard()["said"]))
            print(
                f"{name:18} {said:5} characters, exact; {events:4} events of {stream.events}"
                " from the first engine"
            )
    finally:
        if fault is signal.SIGSTOP:
            fleet.use(victim, True)
