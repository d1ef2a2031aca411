"""Connects the parts of the proxy, and serves until it is stopped.

One function makes each part from the settings; `serve` hands the parts to each other and runs their
tasks. `main.py` has what belongs to the process: its signals, limits and exit status.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from functools import partial

from ..errors import ConfigError
from ..fleet.role_control import RoleRules
from .http import tls
from .http.addresses import AllowedNetworks
from .http.bearer import AcceptedKeys
from .http.connection_pool import ConnectionPool
from .http.server import Server
from .http.tls import UpstreamTrust
from .membership import kubernetes
from .membership.discovery import Discovery
from .membership.members import Members
from .membership.metrics_poll import MetricsPoller
from .membership.reconcile import Member
from .membership.registry import Registry
from .membership.roles import RoleKeeper
from .membership.sources import follow_file, follow_names, within
from .requests.admin import Admin
from .requests.api import Api
from .requests.failover import FALLBACK_REASONS, RUNGS
from .requests.relay import Relay
from .routing.concurrency_limit import ConcurrencyLimit
from .routing.decode_wait import DecodeWait
from .routing.fleet import Fleet, Instance, Role
from .routing.instance_report import Clock
from .routing.pairing_table import PairingTable
from .routing.policies import Policy
from .routing.prefill_queue import PrefillQueue
from .routing.queues import Queues
from .settings import ProxySettings
from .status.feed import StatusFeed
from .status.share import StatusBoard
from .telemetry import logs
from .telemetry.access_log import AccessLog
from .telemetry.file_metrics import FileMetrics
from .telemetry.kv_traffic import KvTraffic
from .telemetry.metrics import Metrics
from .telemetry.record import RequestRecorder
from .workers.bus import Topic, WorkerBus

log = logging.getLogger(__name__)

_FILE_CHECK_SECONDS = 1.0  # between two looks at the fleet file
_EXPIRY_CHECK_SECONDS = 1.0  # between two looks for expired registrations
_FILES_CHECK_SECONDS = 1.0  # between two tries to open a file
_MISFIT_SECONDS = 10.0  # after the start, in which instances that do not fit end the proxy


async def serve(
    settings: ProxySettings,
    ready: Callable[[int], None] | None = None,
    stop: asyncio.Event | None = None,
    must_fit: bool = False,
    on_renewal: Callable[[Callable[[], None]], None] = lambda renew: None,
) -> None:
    """Runs a proxy until `stop` is set; calls `ready` with the port when it listens.

    `on_renewal` gets the function that opens access log, certificates and keys anew.
    `must_fit`: raises ConfigError if all instances answer soon and a mistake keeps each two of them
    from being paired.
    """
    fleet = Fleet()
    metrics = Metrics(fleet, settings.objectives, FALLBACK_REASONS, RUNGS)
    files = _ServedFiles(settings, metrics.files)
    policy = Policy(settings.policy)
    pools: dict[str, ConnectionPool] = {}
    networks = AllowedNetworks(settings.instance_networks)
    queues = _queues(settings, fleet, policy)
    discovery = Discovery(
        fleet,
        pools,
        settings.key,
        queues.on_fleet_changed,
        files.keys,
        settings.liveness_timeout,
        settings.prefill_timeout,
    )
    discovery.changes.wants_prefill_tokens = settings.first_token == "prefill"
    members = Members(
        fleet,
        pools,
        connect=_connector(files.trust, networks),
        watch=lambda instance: discovery.watch(instance, settings.probe_interval),
        on_change=queues.on_fleet_changed,
    )
    registry = _registry(settings, networks)
    relay = Relay(fleet, policy, pools, queues, metrics, files.keys, settings)
    recorder = RequestRecorder(metrics, relay.tracing, files.access_log)
    feed = _status_feed(settings, fleet, metrics, recorder, discovery.poller)
    bus = _worker_bus(settings, fleet, metrics, feed, queues.prefill.wake)
    admin = Admin(
        members,
        registry,
        bus.broadcast if bus else None,
        networks,
        files.keys,
        roles_follow_load=settings.roles == "auto",
    )
    metrics.follow(queues)
    api = Api(relay, admin, queues.work, recorder, feed, files.keys, settings)
    server = Server(api.handle, settings.limits, api.body_limit, api.refused)
    port = await server.start(
        settings.host, settings.port, files.listener_tls, shared=settings.place is not None
    )
    files.follow_signal(on_renewal)
    try:
        async with asyncio.TaskGroup() as tasks, AsyncExitStack() as ends:
            running = [
                tasks.create_task(source)
                for source in (
                    *_sources(settings, members, registry, networks, metrics.files),
                    *_role_tasks(
                        settings, fleet, queues.prefill, metrics, members, bus, discovery.poller
                    ),
                    feed.run(),
                    _log_lack_of_files(),
                )
            ]
            running.append(members.start(tasks))
            ends.callback(_end, running, members)
            # First: a collector of spans may take 30 s, and the bus answers pings meanwhile.
            ends.push_async_callback(recorder.shut)
            stop = stop or asyncio.Event()
            if bus:
                running += _start_bus(tasks, bus, members, registry, stop)
            if must_fit and settings.prefill and settings.decode:
                running.append(tasks.create_task(_refuse_misfit(fleet, settings.probe_interval)))
            if ready:
                ready(port)
            await stop.wait()
            await _drain(server, feed, settings.shutdown_timeout)
    finally:
        members.close()


def _queues(settings: ProxySettings, fleet: Fleet, policy: Policy) -> Queues:
    size, patience = settings.queue_size, settings.queue_timeout
    return Queues(
        ConcurrencyLimit(settings.max_requests, size, patience),
        PrefillQueue(fleet, policy, settings.prefill_concurrency, size, patience),
        DecodeWait(fleet, size, patience),
    )


async def _drain(server: Server, feed: StatusFeed, grace: float) -> None:
    """Ends the running requests, within `grace` seconds."""
    feed.close()
    await asyncio.sleep(0)  # viewers leave: they are no running requests
    running = server.running_requests
    log.info("proxy: stopping: no new requests; %d are running and have %g s", running, grace)
    cut = await server.stop(grace)
    log.info("proxy: stopped: %d of %d requests ended, %d were cut", running - cut, running, cut)


def _status_feed(
    settings: ProxySettings,
    fleet: Fleet,
    metrics: Metrics,
    recorder: RequestRecorder,
    poller: MetricsPoller,
) -> StatusFeed:
    """Returns the feed of the status page, which sees what is read of the engines."""
    traffic = KvTraffic()

    def on_metrics_read(instance: Instance, page: bytes, now: float) -> None:
        traffic.on_metrics_read(instance.url, instance.metrics_label, page, now)

    def clock() -> Clock:
        return Clock(asyncio.get_running_loop().time(), time.time())

    poller.on_metrics_read = on_metrics_read
    place = settings.place
    board = StatusBoard(
        fleet, metrics, traffic, recorder.recent, clock, place.index if place else 0
    )
    workers = place.count if place else 1
    return StatusFeed(board, settings.objectives, clock, workers, bool(settings.admin_key))


def _role_tasks(
    settings: ProxySettings,
    fleet: Fleet,
    prefill_queue: PrefillQueue,
    metrics: Metrics,
    members: Members,
    bus: WorkerBus | None,
    poller: MetricsPoller,
) -> Iterator[Coroutine[None, None, None]]:
    """Yields the task that lets roles follow the load; none in all workers but the first."""
    if settings.roles == "fixed" or (settings.place and settings.place.index > 0):
        return

    def set_roles(roles: dict[str, Role]) -> None:
        members.set_roles(roles)
        if bus:
            bus.broadcast_roles(roles)

    rules = RoleRules(settings.objectives.ttft, settings.objectives.tpot)
    waiting = prefill_queue.backlog_seconds
    keeper = RoleKeeper(fleet, rules, waiting, set_roles, metrics.wanted_instances)
    show = poller.on_metrics_read

    def on_metrics_read(instance: Instance, page: bytes, now: float) -> None:
        show(instance, page, now)
        keeper.on_metrics_read(instance, page, now)

    poller.on_metrics_read = on_metrics_read
    yield keeper.run()


def _worker_bus(
    settings: ProxySettings,
    fleet: Fleet,
    metrics: Metrics,
    feed: StatusFeed,
    wake: Callable[[], None],
) -> WorkerBus | None:
    """Returns the connection with the other proxy workers; None for a single worker."""
    if not settings.place:
        return None
    texts: dict[Topic, Callable[[], bytes]] = {
        "metrics": metrics.render,
        "status": feed.share_text,
    }
    bus = WorkerBus(settings.place, fleet, texts, wake)
    metrics.all_workers = partial(bus.texts, "metrics")
    feed.all_shares = partial(bus.texts, "status")
    return bus


def _registry(settings: ProxySettings, networks: AllowedNetworks) -> Registry | None:
    """Returns the list of engines that register themselves; None if they may not."""
    if not settings.registration:
        return None
    challenge = settings.place.challenge if settings.place else ""
    return Registry(settings.key, challenge, networks)


def _end(tasks: list[asyncio.Task[None]], members: Members) -> None:
    for task in tasks:
        task.cancel()
    members.close()


def _connector(
    trust: UpstreamTrust | None, networks: AllowedNetworks
) -> Callable[[str, bool], ConnectionPool]:
    """Returns the function that makes the pool of a URL, which the operator has named or not."""
    return lambda url, named: ConnectionPool(url, trust, None if named else networks, of_proxy=True)


def _start_bus(
    tasks: asyncio.TaskGroup,
    bus: WorkerBus,
    members: Members,
    registry: Registry | None,
    stop: asyncio.Event,
) -> list[asyncio.Task[None]]:
    """Connects this worker with the others; `stop` is set when the supervisor ends."""
    return [
        tasks.create_task(bus.sync()),
        tasks.create_task(bus.listen(members, registry, stop.set)),
    ]


class _ServedFiles:
    """The files that SIGHUP announces as changed: access log, certificates and bearer keys."""

    def __init__(self, settings: ProxySettings, metrics: FileMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self.access_log = AccessLog(settings.access_log)
        self.listener_tls = tls.listener_context(settings.certfile, settings.keyfile)
        self.trust = UpstreamTrust(settings.upstream_ca) if settings.upstream_ca else None
        self.keys = AcceptedKeys(settings.api_keys, settings.admin_key)
        self._note_certificate()
        metrics.lost_lines["access"] = lambda: self.access_log.lost
        metrics.lost_lines["standard_error"] = logs.lost_lines

    def follow_signal(self, on_renewal: Callable[[Callable[[], None]], None]) -> None:
        """Opens the files anew at each SIGHUP from now on.

        Raises ConfigError for keys that cannot be used.
        """
        on_renewal(self.renew)
        # A SIGHUP was ignored until now, and they were read before.
        self._renew_keys()

    def renew(self) -> None:
        """Opens each file; one that cannot be used is logged, and its old content stays."""
        renewals: list[tuple[str, Callable[[], None], str]] = [
            ("access_log", self.access_log.reopen, "lines go to the old file"),
            ("certificate", self._renew_certificate, "the old certificate is used"),
            ("upstream_ca", self._renew_trust, "the old certificates are trusted"),
            ("keys", self._renew_keys, "the old keys are accepted"),
        ]
        failures = 0
        for file, renew, consequence in renewals:
            try:
                renew()
                self._metrics.on_read(file, is_ignored=False)
            except ConfigError as error:
                self._metrics.on_read(file, is_ignored=True)
                failures += 1
                log.error("proxy: SIGHUP: %s; %s", error, consequence)
        if not failures:
            log.info("proxy: SIGHUP: access log, certificates and keys are opened anew")

    def _renew_certificate(self) -> None:
        if self.listener_tls:
            settings = self._settings
            tls.load_chain(self.listener_tls, settings.certfile, settings.keyfile)
            self._note_certificate()

    def _note_certificate(self) -> None:
        if self.listener_tls:
            self._metrics.certificate_end = tls.end_of_validity(self._settings.certfile)

    def _renew_trust(self) -> None:
        if self.trust:
            self.trust.renew()

    def _renew_keys(self) -> None:
        if self._settings.read_keys:
            self.keys.replace(*self._settings.read_keys())


def _sources(
    settings: ProxySettings,
    members: Members,
    registry: Registry | None,
    networks: AllowedNetworks,
    metrics: FileMetrics,
) -> Iterator[Coroutine[None, None, None]]:
    """Sets the members that flags name, and yields a task for each other source."""
    flags: list[tuple[Role, list[str]]] = [
        ("prefill", settings.prefill),
        ("decode", settings.decode),
    ]
    members.set("flags", [Member(url, role) for role, urls in flags for url in urls])
    if settings.fleet_file:
        yield follow_file(
            settings.fleet_file,
            _FILE_CHECK_SECONDS,
            partial(members.set, "file"),
            partial(metrics.on_read, "fleet"),
        )
    if settings.names:
        on_members = within(networks, "dns", partial(members.set, "dns"))
        yield follow_names(settings.names, settings.lookup_interval, on_members)
    if settings.selectors:
        yield kubernetes.follow(
            partial(kubernetes.connect, settings.slices),
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
    """Drops engines whose registrations have expired, until cancelled.

    Time in which this process did not run does not count: it read no registration.
    """
    now = asyncio.get_running_loop().time
    while True:
        slept_at = now()
        await asyncio.sleep(_EXPIRY_CHECK_SECONDS)
        registry.forgive(max(0.0, now() - slept_at - _EXPIRY_CHECK_SECONDS), now())
        registry.expire(now())
        members.set("registration", registry.members)


async def _log_lack_of_files() -> None:
    """Logs when this process can open no more files, and when it can again, until cancelled.

    The event loop closes the connections of new clients then, and tells nobody.
    """
    is_lacking = False
    while True:
        await asyncio.sleep(_FILES_CHECK_SECONDS)
        try:
            os.close(os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            if not is_lacking:
                log.error(
                    "proxy: no file can be opened (%s): new clients are cut without an answer;"
                    " raise the limit of open files, or lower --max-connections",
                    error.strerror,
                )
            is_lacking = True
        else:
            if is_lacking:
                log.warning("proxy: files can be opened again")
            is_lacking = False


async def _refuse_misfit(fleet: Fleet, interval: float) -> None:
    """Raises ConfigError if all instances answer soon after the start and none can be paired.

    A wrong key or role is the operator's mistake. It is reported at start, instead of serving
    without transfers. Later, or once requests are served, it is one line of the log: an instance
    that comes must not end those that serve. So is a difference of versions, flags or weights: a
    proxy may be restarted amid a roll-out. So are transfers that an engine has turned off: a
    restart of it may help, and D serves all requests.
    """
    loop = asyncio.get_running_loop()
    refused_until = loop.time() + _MISFIT_SECONDS
    while not all(instance.up for instance in fleet.instances):
        await asyncio.sleep(interval)
    found = PairingTable(fleet).permanent_mismatch()
    if not found:
        return
    is_start = loop.time() <= refused_until and not fleet.has_served
    if is_start and not found.may_pass:
        raise ConfigError(found.reason)
    log.error(
        "proxy: no prefill and decode instance can be paired, decode instances compute all"
        " prompts: %s",
        found.reason,
    )
