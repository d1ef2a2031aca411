"""`vllm-disagg proxy`: puts the parts together and runs them until a signal."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import resource
import signal
import ssl
import sys
from collections.abc import Callable, Coroutine, Iterator
from functools import partial

import uvloop

from ..errors import ConfigError
from .http.addresses import AllowedNetworks
from .http.server import Server
from .http.upstream import ConnectionPool
from .membership import kubernetes
from .membership.discovery import Discovery
from .membership.members import Members
from .membership.reconcile import Member
from .membership.registry import Registry
from .membership.sources import follow_file, follow_names, within
from .requests.admin import Admin
from .requests.api import Api
from .requests.relay import Relay
from .routing.concurrency_limit import ConcurrencyLimit
from .routing.fleet import Fleet, Role
from .routing.policies import Policy
from .routing.prefill_queue import PrefillQueue
from .settings import ProxySettings, add_arguments, from_arguments
from .telemetry.access_log import AccessLog
from .telemetry.metrics import Metrics
from .telemetry.record import RequestRecorder
from .workers import supervisor
from .workers.bus import WorkerBus

__all__ = ["add_arguments", "run", "serve"]


async def serve(
    settings: ProxySettings,
    ready: Callable[[int], None] | None = None,
    stop: asyncio.Event | None = None,
    must_fit: bool = False,
) -> None:
    """Run a proxy until `stop` is set; `ready` is told the port once it listens.

    `must_fit`: ConfigError if, the first time that all instances answer, no two of them can work
    together.
    """
    fleet, policy, pools = Fleet(), Policy(settings.policy), dict[str, ConnectionPool]()
    tls = ssl.create_default_context(cafile=settings.upstream_ca) if settings.upstream_ca else None
    networks = AllowedNetworks(settings.instance_networks)
    admission = PrefillQueue(
        fleet, policy, settings.prefill_concurrency, settings.queue_size, settings.queue_timeout
    )
    discovery = Discovery(
        fleet,
        pools,
        settings.key,
        admission.wake,
        next(iter(settings.api_keys), ""),
        settings.silence,
        settings.patience,
    )
    members = Members(
        fleet,
        pools,
        connect=lambda url, named: ConnectionPool(url, tls, None if named else networks),
        watch=lambda instance: discovery.watch(instance, settings.probe_interval),
        on_change=admission.wake,
    )
    metrics = Metrics(fleet, settings.objectives)
    place = settings.place
    registry = (
        Registry(settings.key, place.challenge if place else "", networks)
        if settings.registration
        else None
    )
    crew = WorkerBus(place, fleet, metrics.render, admission.wake) if place else None
    metrics.crew = crew.texts if crew else None
    admin = Admin(
        members,
        registry,
        crew.broadcast if crew else None,
        networks,
        settings.admin_key,
        settings.api_keys,
    )
    relay = Relay(fleet, policy, pools, admission, metrics, settings)
    gate = ConcurrencyLimit(settings.max_requests, settings.queue_size, settings.queue_timeout)
    metrics.waiting = {"work": lambda: len(gate), "prefill": lambda: len(admission)}
    books = RequestRecorder(metrics, relay.tracing, AccessLog(settings.access_log))
    api = Api(relay, admin, gate, books, settings)
    server = Server(api.handle, settings.limits, api.body_limit, api.refused)
    port = await server.start(
        settings.host, settings.port, _listener_tls(settings), shared=place is not None
    )
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(source)
                for source in _sources(settings, members, registry, networks)
            ]
            running.append(members.start(tasks))
            stop = stop or asyncio.Event()
            if crew:
                running += [
                    tasks.create_task(crew.sync()),
                    tasks.create_task(crew.listen(members, registry, stop.set)),
                ]
            if must_fit and settings.prefill and settings.decode:
                running.append(tasks.create_task(_refuse_misfit(fleet, settings.probe_interval)))
            if ready:
                ready(port)
            await stop.wait()
            await server.stop(settings.grace)
            for task in running:
                task.cancel()
            members.close()
    finally:
        members.close()
        await asyncio.to_thread(books.shut)  # may wait for a collector of spans


def _listener_tls(settings: ProxySettings) -> ssl.SSLContext | None:
    if not settings.certfile:
        return None
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(settings.certfile, settings.keyfile or None)
    return tls


def _sources(
    settings: ProxySettings, members: Members, registry: Registry | None, networks: AllowedNetworks
) -> Iterator[Coroutine[None, None, None]]:
    """What says which instances there are; the flags say it here and now."""
    given: list[tuple[Role, list[str]]] = [
        ("prefill", settings.prefill),
        ("decode", settings.decode),
    ]
    members.set("flags", [Member(url, role) for role, urls in given for url in urls])
    if settings.fleet_file:
        yield follow_file(settings.fleet_file, 1.0, partial(members.set, "file"))
    if settings.names:
        tell = within(networks, "dns", partial(members.set, "dns"))
        yield follow_names(settings.names, settings.lookup_interval, tell)
    if settings.selectors:
        yield kubernetes.follow(
            kubernetes.connect(settings.slices),
            kubernetes.endpoint_members if settings.slices else kubernetes.members,
            settings.namespace,
            settings.selectors,
            settings.pod_port,
            settings.lookup_interval,
            within(networks, "kubernetes", partial(members.set, "kubernetes")),
        )
    if registry:
        yield _expire(registry, members)


async def _expire(registry: Registry, members: Members) -> None:
    """Engines that have fallen silent are wanted no more."""
    while True:
        await asyncio.sleep(1.0)
        members.set("registration", registry.members(asyncio.get_running_loop().time()))


async def _refuse_misfit(fleet: Fleet, interval: float) -> None:
    """A wrong key or a wrong model is the operator's slip: say so at start, instead of serving
    without transfers.
    """
    while not all(instance.up for instance in fleet.instances):
        await asyncio.sleep(interval)
    if words := fleet.permanent_mismatch():
        raise ConfigError(words)


def run(args: argparse.Namespace) -> int:
    """The command; its exit status."""
    try:
        settings = from_arguments(args)
    except ConfigError as error:
        print(f"vllm-disagg proxy: {error}", file=sys.stderr)
        return 2
    refused = supervisor.REFUSED_EXIT_STATUS if settings.place else 1
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a stream is two connections
    gc.set_threshold(
        50_000, 20, 100
    )  # a request makes few cycles; the default threshold looks for them all the time
    try:
        if settings.workers > 1 and not settings.place:
            return supervisor.run(
                sys.argv[1:],
                settings.workers,
                settings.host,
                settings.port,
                partial(_listening, settings),
            )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_until_signal(settings))
    except (OSError, UnicodeError) as error:  # UnicodeError: no name that DNS can have
        why = getattr(error, "strerror", None) or "it is no host name"
        print(
            f"vllm-disagg proxy: cannot listen on {settings.host}:{settings.port}: {why}",
            file=sys.stderr,
        )
        return refused
    except ExceptionGroup as errors:
        misfits, others = errors.split(ConfigError)
        if others or not misfits:
            raise
        print(f"vllm-disagg proxy: {misfits.exceptions[0]}", file=sys.stderr)
        return refused
    return 0


async def _until_signal(settings: ProxySettings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    ready = None if settings.place else partial(_listening, settings)
    await serve(settings, ready, stop, must_fit=True)


def _listening(settings: ProxySettings, port: int) -> None:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    print(f"listening on {'https' if settings.certfile else 'http'}://{host}:{port}", flush=True)
