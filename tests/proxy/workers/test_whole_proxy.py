"""Tests a proxy whose processes all die or freeze at once, with requests in each of their states."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from whole_proxy import engines, whole_proxy

from proxy_world import Call, Client, Reply, ScriptedEngine, World, answer, until

STREAMS = 16  # in flight at the fault
WAITING = 8  # the same, in a prefill or in its queue
PAUSED_SECONDS = 5.0  # more than an instance may be silent
# Less than the pause.
LIMITS = ("--prefill-timeout", "4", "--queue-timeout", "4")
LIMIT_SECONDS = 30.0  # of each end: far less than a request may take
EVENTS = 40  # of a stream, which goes on until long after the pause
EVENT_SECONDS = 0.2
HEALTH_SECONDS = 0.5


class BusyEngine(ScriptedEngine):
    """An engine with a busy API server: a health check is on its way most of the time."""

    async def _route(self, call: Call) -> None:
        if call.path == "/health":
            await asyncio.sleep(HEALTH_SECONDS)
        await super()._route(call)


class SlowEngines:
    """P and two D, whose answers take their time."""

    def __init__(self) -> None:
        self.running: set[Call] = set()
        self.goes_on = asyncio.Event()  # the prefill of those that wait
        self.streams = 0  # that have begun at any D
        self.prefills = 0  # answers of P
        self.whole = 0  # requests that a D computed alone
        names = ("p", "d", "e")
        self.engines = [
            BusyEngine(name, "prefill" if name == "p" else "decode", self._serve) for name in names
        ]

    @property
    def prefilling(self) -> list[Call]:
        """The prefill legs that run."""
        return [call for call in self.running if call.leg == "prefill"]

    async def _serve(self, call: Call) -> None:
        """Answers, or aborts when the connection has ended."""
        self.running.add(call)
        answering = asyncio.create_task(self._answer(call))
        leaving = asyncio.create_task(call.gone.wait())
        await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        for task in (answering, leaving):
            task.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)
        self.running.discard(call)

    async def _answer(self, call: Call) -> None:
        self.prefills += call.leg == "prefill"
        self.whole += call.leg == "whole"
        if call.leg == "prefill" and call.body["prompt"] == "waiting":
            await self.goes_on.wait()
        if call.leg != "prefill" and call.body.get("stream"):
            await self._stream(call)
        else:
            await answer(call)

    async def _stream(self, call: Call) -> None:
        self.streams += 1
        await call.stream()
        for text in texts(call.body["prompt"]):
            choices = [{"index": 0, "text": text}]
            await call.event({"id": "c-1", "created": 7, "model": "m", "choices": choices})
            await asyncio.sleep(EVENT_SECONDS)
        await call.event("[DONE]")
        await call.end()


def texts(prompt: str) -> list[str]:
    """Returns the texts of the answer to a prompt, event by event."""
    return [f"{prompt} {number}" for number in range(EVENTS)]


async def in_flight(slow: SlowEngines, world: World) -> tuple[list[Client], list[Client]]:
    """Returns clients whose answers have begun, and those who wait for a prefill, or in its queue.

    P takes few prompts at a time.
    """
    streaming = [await world.start(prompt=f"stream{at}", stream=True) for at in range(STREAMS)]
    await until(lambda: slow.streams == STREAMS and not slow.prefilling)
    waiting = [await world.start(prompt="waiting") for _ in range(WAITING)]
    await until(lambda: slow.prefilling)
    return streaming, waiting


async def all_answer(world: World) -> None:
    replies = await asyncio.gather(*(world.post(prompt="short") for _ in range(STREAMS)))
    assert [reply.status for reply in replies] == [200] * STREAMS


async def test_a_killed_proxy_breaks_its_connections_and_leaves_nothing_at_the_engines(
    tmp_path: Path,
) -> None:
    slow = SlowEngines()
    async with engines(*slow.engines) as world:
        async with whole_proxy(tmp_path, world) as proxy:
            streaming, waiting = await in_flight(slow, world)
            proxy.signal(signal.SIGKILL)
            ending = [client.receive() for client in (*streaming, *waiting)]
            async with asyncio.timeout(LIMIT_SECONDS):
                # A reset is as explicit as an end within an answer.
                for end in await asyncio.gather(*ending, return_exceptions=True):
                    is_cut = isinstance(end, Reply) and not end.complete
                    assert is_cut or isinstance(end, ConnectionError), end
                while slow.running:
                    await asyncio.sleep(0.01)
        async with whole_proxy(tmp_path, world):
            await all_answer(world)
        assert not slow.running


async def test_a_frozen_proxy_goes_on_where_it_was(tmp_path: Path) -> None:
    """It was silent for longer than a leg or an instance may be, and no engine was late."""
    slow = SlowEngines()
    async with engines(*slow.engines) as world, whole_proxy(tmp_path, world, *LIMITS) as proxy:
        streaming, waiting = await in_flight(slow, world)
        proxy.signal(signal.SIGSTOP)
        asked = [await world.start(prompt="short") for _ in range(STREAMS)]
        slow.goes_on.set()  # P answers now, and is read later
        await asyncio.sleep(PAUSED_SECONDS)
        proxy.signal(signal.SIGCONT)
        async with asyncio.timeout(LIMIT_SECONDS + EVENTS * EVENT_SECONDS):
            for client in (*asked, *waiting):
                assert (await client.receive()).status == 200
            for at, client in enumerate(streaming):
                *events, last = (await client.receive()).events()
                assert [event["choices"][0]["text"] for event in events] == texts(f"stream{at}")
                assert last == "[DONE]"
        assert slow.streams == STREAMS, "none had to move"
        assert slow.prefills == STREAMS + WAITING + len(asked), "each is computed once"
        assert not slow.whole
        await all_answer(world)
