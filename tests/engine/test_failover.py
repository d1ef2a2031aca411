"""Faults of two prefill and two decode instances under steady load.

Each instance in turn is killed, started again, frozen, thawed, drained, and replaced by a new one
at another address. Every answer must be EXACT (text, usage and finish reason of an undisturbed
run) or CLEAN (an explicit error in time), and 99.9 % EXACT. `make chaos` runs it: it takes 5 to 20
minutes, and prints the cost of each fault.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import pytest
from asking import english, tally, tokens
from chaos_client import CLEAN, Job, Result, ask, running
from conftest import Machine
from engines import Engine, Proxy, get, wait

pytestmark = pytest.mark.chaos

CLIENTS = 3
PAUSE = 0.2  # seconds between a client's requests: an engine must be able to start beside this load
TIMEOUT = 30.0  # seconds; longer is a hang
FROZEN = 4.0
QUIET = 3.0  # of load after each fault
NICE = 10  # of engines that have started
PATIENCE = 400.0  # seconds for an engine to start beside this load on two cores


@dataclass
class Phase:
    """The requests from one fault to the next."""

    name: str
    counts: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0
    wrong: list[str] = field(default_factory=list)


def jobs() -> list[Job]:
    """Returns prompts and answers of many lengths, streamed and not."""
    made = []
    for at, length in enumerate((20, 130, 300, 520, 900, 1400)):
        more = {"model": "tiny", "temperature": 0, "max_tokens": 20 + 25 * at, "ignore_eos": True}
        for stream in (True, True, False):
            kind = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
            made.append(
                Job("/v1/completions", {"prompt": tokens(length, len(made)), **more, **kind})
            )
        messages = [{"role": "user", "content": english(3 * length, at)}]
        made.append(
            Job(
                "/v1/chat/completions",
                {
                    "messages": messages,
                    **more,
                    **kind,
                    "stream": True,
                    "stream_options": {"include_usage": True},
                },
            )
        )
    return made


class Load:
    """Clients that send requests without a break, and compare the answers."""

    def __init__(self, url: str, right: list[tuple[Job, Result]]) -> None:
        self._url, self._right = url, right
        self._stop = threading.Event()
        self.phases = [Phase("undisturbed")]

    def running(self) -> AbstractContextManager[None]:
        return running(self._client, CLIENTS, self._stop)

    def _client(self, at: int) -> None:
        while not self._stop.is_set():
            at += 1
            job, expected = self._right[at * 7 % len(self._right)]
            phase, began = self.phases[-1], time.monotonic()
            got = ask(self._url, job, TIMEOUT)
            how = (
                "exact" if got == expected else "clean" if got.error.startswith(CLEAN) else "wrong"
            )
            phase.counts[how] += 1
            phase.slowest = max(phase.slowest, time.monotonic() - began)
            tally[how] += 1
            self._stop.wait(PAUSE)
            if how != "exact":
                phase.wrong.append(got.error or f"{got!r:.300} instead of {expected!r:.300}")


def usable(proxy: Proxy, engine: Engine) -> bool:
    return proxy.members().get(engine.url, False)


def test_every_instance_dies_freezes_and_is_replaced(machine: Machine) -> None:
    prefills = [Engine(f"P{i}", machine.folder, role="kv_producer", cpu="0") for i in range(2)]
    decodes = [Engine(f"D{i}", machine.folder, role="kv_consumer", cpu="1") for i in range(2)]
    engines = [decodes[0], prefills[0], decodes[1], prefills[1]]
    proxy = Proxy(machine.folder, prefills, decodes, name="proxy4")
    start(machine, *engines)
    machine.start(proxy)
    try:
        # an engine that is asked itself, without a grant, serves as any vLLM does
        right = [(job, ask(decodes[0].url, job, TIMEOUT)) for job in jobs()]
        assert not any(result.error for _, result in right)
        load = Load(proxy.url, right)
        try:
            with load.running():
                time.sleep(QUIET)
                for at, engine in enumerate(engines):
                    disturb(machine, proxy, load, engine)
                    engines[at] = replace(machine, proxy, load, engine)
        finally:
            show(load, proxy)
        counts = sum((phase.counts for phase in load.phases), Counter[str]())
        assert not counts["wrong"], [words for phase in load.phases for words in phase.wrong]
        assert counts["exact"] >= 0.999 * counts.total(), [
            words for phase in load.phases for words in phase.wrong
        ]
        assert all(phase.counts["exact"] for phase in load.phases)
    finally:
        machine.stop(proxy, *engines)


def start(machine: Machine, *engines: Engine) -> None:
    for engine in engines:
        engine.patience = PATIENCE
    machine.start(*engines)
    for engine in engines:
        engine.lower(NICE)


def disturb(machine: Machine, proxy: Proxy, load: Load, engine: Engine) -> None:
    load.phases.append(Phase(f"{engine.name} killed"))
    engine.stop(gently=0.0)
    time.sleep(QUIET)
    load.phases.append(Phase(f"{engine.name} starts again"))
    machine.start_again(engine)
    engine.lower(NICE)
    wait(f"the proxy uses {engine.name}", lambda: usable(proxy, engine), 30)
    load.phases.append(Phase(f"{engine.name} frozen"))
    engine.signal(signal.SIGSTOP)
    began = time.monotonic()
    try:
        wait(
            f"the proxy knows that {engine.name} is frozen",
            lambda: not usable(proxy, engine),
            2.5,
            every=0.02,
        )
        print(f"{engine.name}: known to be frozen after {time.monotonic() - began:.2f} s")
        time.sleep(FROZEN - (time.monotonic() - began))
    finally:
        engine.signal(signal.SIGCONT)
    load.phases.append(Phase(f"{engine.name} thawed"))
    wait(f"the proxy uses {engine.name}", lambda: usable(proxy, engine), 30)
    time.sleep(QUIET)


def replace(machine: Machine, proxy: Proxy, load: Load, old: Engine) -> Engine:
    """Drains an instance by the admin API, stops it when it is idle, and adds a new one."""
    role = "kv_producer" if old.name.startswith("P") else "kv_consumer"
    new = Engine(
        f"{old.name}new", machine.folder, role=role, cpu=old.env["VLLM_CPU_OMP_THREADS_BIND"]
    )
    load.phases.append(Phase(f"{old.name} drained"))
    proxy.change("POST", "/disagg/instances/drain", url=old.url)
    wait(f"{old.name} is idle", lambda: proxy.is_drained(old.url), 60)
    machine.stop(old)
    time.sleep(QUIET)
    load.phases.append(Phase(f"{new.name} starts and joins"))
    start(machine, new)
    proxy.change(
        "POST",
        "/disagg/instances",
        url=new.url,
        role="prefill" if role == "kv_producer" else "decode",
    )
    wait(f"the proxy uses {new.name}", lambda: usable(proxy, new), 30)
    time.sleep(QUIET)
    return new


def show(load: Load, proxy: Proxy) -> None:
    """Prints the cost of each fault, and the proxy's reaction."""
    print(f"\n{'':22}{'exact':>7}{'clean':>7}{'wrong':>7}{'slowest':>9}")
    for phase in load.phases:
        exact, clean, wrong = (phase.counts[how] for how in ("exact", "clean", "wrong"))
        print(f"{phase.name:22}{exact:7}{clean:7}{wrong:7}{phase.slowest:8.1f}s")
    for line in get(proxy.url, "/metrics", 5.0)[1].splitlines():
        if line.startswith("vllm_disagg_fallbacks_total") and not line.endswith(" 0.0"):
            print(line)
