"""The faults of the soak. Each disturbs the fleet and returns when it is whole again.

A fault that kills hits `SoakFleet.mortal` only. Each takes the fleet and its own random numbers,
and returns a short description with what was hit.
"""

from __future__ import annotations

import http.client
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus

from asking import ask_and_leave, body, tokens
from engines import wait
from measures import descendants, kind_of
from soak_fleet import (
    PROXY_WORKERS,
    READY_SECONDS,
    SHUTDOWN_SECONDS,
    SoakEngine,
    SoakFleet,
    SoakProxy,
)
from verdicts import RESET_SECONDS

END_SECONDS = 60.0  # for the processes of an engine to end, beside load
DRAIN_SECONDS = 60.0  # for the requests of a drained engine to end
STORM_CLIENTS = 24
NOTICED_CUT_SECONDS = 4.0  # twice as long as D waits for P by default
NOTICE_SECONDS = 10.0
Fault = Callable[[SoakFleet, random.Random], str]


def kill_engine(fleet: SoakFleet, source: random.Random) -> str:
    """Kills all processes of an engine, and starts it again after some seconds."""
    engine = source.choice(fleet.mortal)
    fleet.ended_by_us.add(engine.name)
    engine.stop(gently=0.0)
    time.sleep(source.uniform(0, 10))
    fleet.start_again(engine)
    return engine.name


def kill_part_of_engine(fleet: SoakFleet, source: random.Random) -> str:
    """Kills vLLM's scheduler process or a worker; fails if the rest does not end."""
    engine = source.choice(fleet.mortal)
    title = source.choice(("EngineCore", "Worker"))
    fleet.ended_by_us.add(engine.name)
    os.kill(engine.child(title), signal.SIGKILL)
    wait(f"{engine.name} ends without {title}", lambda: not engine.runs(), END_SECONDS)
    fleet.start_again(engine)
    return f"{engine.name} {title}"


def terminate_engine(fleet: SoakFleet, source: random.Random) -> str:
    """Ends an engine by SIGTERM without a drain, and starts it again; fails if it does not end."""
    engine = source.choice(fleet.mortal)
    fleet.ended_by_us.add(engine.name)
    engine.begin_stop()
    patience = SHUTDOWN_SECONDS + END_SECONDS
    wait(f"{engine.name} ends by SIGTERM", lambda: not engine.runs(), patience)
    fleet.start_again(engine)
    return engine.name


def freeze_engine(fleet: SoakFleet, source: random.Random) -> str:
    """Freezes all processes of an engine."""
    engine = source.choice(fleet.engines)
    engine.signal(signal.SIGSTOP)
    try:
        time.sleep(source.uniform(0.5, 8))
    finally:
        engine.signal(signal.SIGCONT)
    fleet.wait_used(engine)
    return engine.name


def freeze_part_of_engine(fleet: SoakFleet, source: random.Random) -> str:
    """Freezes vLLM's scheduler process or a worker, while its HTTP server answers."""
    engine = source.choice(fleet.engines)
    title = source.choice(("EngineCore", "Worker"))
    process = engine.child(title)
    os.kill(process, signal.SIGSTOP)
    try:
        time.sleep(source.uniform(0.5, 8))
    finally:
        os.kill(process, signal.SIGCONT)
    fleet.wait_used(engine)
    return f"{engine.name} {title}"


def cut_network(fleet: SoakFleet, source: random.Random) -> str:
    """Drops all packets to the KV address of a P, which each D dials; its HTTP server is reached.

    Fails if no D has noticed a cut that is longer than D waits for an answer.
    """
    engine = source.choice([engine for engine in fleet.engines if engine.role == "kv_producer"])
    seconds = source.choice((1.0, 4.0, 15.0))
    before = fleet.unanswered_loads()
    with engine.cut_off():
        time.sleep(seconds)
    if seconds >= NOTICED_CUT_SECONDS:
        # D reports a failed load with its next step.
        wait("a D notices the cut", lambda: fleet.unanswered_loads() > before, NOTICE_SECONDS)
    return f"{engine.name} {seconds:g} s, {fleet.unanswered_loads() - before} loads unanswered"


def slow_log(fleet: SoakFleet, source: random.Random) -> str:
    """Has an engine or the proxy wait for its log."""
    servers: list[SoakEngine | SoakProxy] = [*fleet.engines, fleet.proxy]
    server = source.choice(servers)
    seconds = source.uniform(4, 12)
    server.slow_log.slow_down(seconds)
    time.sleep(seconds)
    if isinstance(server, SoakEngine):
        fleet.wait_used(server)
    return server.name


def kill_proxy_worker(fleet: SoakFleet, source: random.Random) -> str:
    """Kills a worker of the proxy, whose clients lose their connections."""
    workers = [
        pid
        for pid in descendants(fleet.proxy.pid)
        if kind_of(pid) == "proxy" and pid != fleet.proxy.pid
    ]
    if not workers:
        raise RuntimeError("the proxy has no workers")
    fleet.proxy_kills.append(time.monotonic())
    os.kill(source.choice(workers), signal.SIGKILL)
    time.sleep(RESET_SECONDS)
    wait("all workers of the proxy run", lambda: count_workers(fleet) == PROXY_WORKERS, 60)
    wait("the proxy is ready", fleet.proxy.is_ready, READY_SECONDS)
    return "a worker"


def count_workers(fleet: SoakFleet) -> int:
    """Returns the number of the proxy's workers, without their supervisor."""
    pids = descendants(fleet.proxy.pid)
    return sum(kind_of(pid) == "proxy" and pid != fleet.proxy.pid for pid in pids)


def leave_at_once(fleet: SoakFleet, source: random.Random) -> str:
    """Clients leave at random moments, in fast succession."""
    for number in range(STORM_CLIENTS):
        asked = body(tokens(source.randrange(50, 1800), source.random()), 60, ignore_eos=True)
        with suppress(OSError, http.client.HTTPException):
            ask_and_leave(fleet.proxy.url, asked, source.expovariate(4))
        if number % 6 == 0:
            time.sleep(source.uniform(0, 0.5))
    return f"{STORM_CLIENTS} clients"


def drain_and_add(fleet: SoakFleet, source: random.Random) -> str:
    """Drains an engine at the proxy, waits for its requests, and adds it again."""
    engine = source.choice(fleet.engines)
    fleet.change("POST", "/disagg/instances/drain", url=engine.url)
    wait(f"{engine.name} is drained", lambda: fleet.in_flight(engine) == 0, DRAIN_SECONDS)
    role = "prefill" if engine.role == "kv_producer" else "decode"
    fleet.change("POST", "/disagg/instances", url=engine.url, role=role)
    fleet.wait_used(engine)
    return engine.name


def reset_prefix_cache(fleet: SoakFleet, source: random.Random) -> str:
    """Has an engine forget its prefix cache, perhaps with a preemption of all requests.

    vLLM answers `{"success":false}` while requests hold blocks. With a preemption its answer is 500
    if a request still waits for KV: "not supported yet", says its exception.
    """
    engine = source.choice(fleet.engines)
    flag = source.choice(("", "?reset_running_requests=true"))
    status, answer = engine.send(f"/reset_prefix_cache{flag}")
    is_answered = status == HTTPStatus.OK and "success" in answer
    if not is_answered and not (flag and status == HTTPStatus.INTERNAL_SERVER_ERROR):
        raise RuntimeError(f"{engine.name}{flag}: {status} {answer[:200]}")
    return f"{engine.name}{flag} {status} {answer[:200]}"


FAULTS: dict[str, Fault] = {
    "kill -9 of an engine": kill_engine,
    "kill -9 of a part of an engine": kill_part_of_engine,
    "SIGTERM to an engine": terminate_engine,
    "SIGSTOP of an engine": freeze_engine,
    "SIGSTOP of a part of an engine": freeze_part_of_engine,
    "network cut": cut_network,
    "slow log": slow_log,
    "kill -9 of a proxy worker": kill_proxy_worker,
    "clients leave": leave_at_once,
    "drain and re-add": drain_and_add,
    "reset_prefix_cache": reset_prefix_cache,
}


def schedule(seed: int) -> list[str]:
    """Returns the order of the first faults: shuffled rounds, so that each kind comes soon."""
    source = random.Random(f"faults {seed}")
    order: list[str] = []
    for _ in range(1000):
        names = list(FAULTS)
        source.shuffle(names)
        order += names
    return order
