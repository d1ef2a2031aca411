"""`vllm-disagg proxy`: puts the parts together and runs them until a signal."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Callable

import uvloop

from ..errors import ConfigError
from .admission import Admission
from .api import Api
from .discovery import Discovery
from .fleet import Fleet, Instance, Role
from .metrics import Metrics
from .policies import Policy
from .relay import Relay
from .server import Server
from .settings import Settings, add_arguments, from_arguments
from .upstream import Pool

__all__ = ["add_arguments", "run", "serve"]


async def serve(
    settings: Settings,
    ready: Callable[[int], None] | None = None,
    stop: asyncio.Event | None = None,
    must_fit: bool = False,
) -> None:
    """Run a proxy until `stop` is set; `ready` is told the port once it listens.

    `must_fit`: ConfigError if, the first time that all instances answer, no two of them can work together.
    """
    roles: list[tuple[Role, list[str]]] = [("prefill", settings.prefill), ("decode", settings.decode)]
    fleet = Fleet([Instance(url, role) for role, urls in roles for url in urls], Policy(settings.policy))
    pools = {instance.url: Pool(instance.url) for instance in fleet.instances}
    admission = Admission(fleet, settings.prefill_concurrency, settings.queue_size, settings.queue_timeout)
    relay = Relay(fleet, pools, admission, Metrics(fleet), settings)
    server = Server(Api(relay, settings.api_keys, settings.request_timeout).handle, settings.limits)
    discovery = Discovery(fleet, pools, settings.key, admission.wake, next(iter(settings.api_keys), ""), settings.silence)
    port = await server.start(settings.host, settings.port)
    try:
        async with asyncio.TaskGroup() as tasks:
            watches = [tasks.create_task(discovery.watch(i, settings.probe_interval)) for i in fleet.instances]
            if must_fit:
                watches.append(tasks.create_task(_refuse_misfit(fleet, settings.probe_interval)))
            if ready:
                ready(port)
            await (stop or asyncio.Event()).wait()
            await server.stop(settings.grace)
            for watch in watches:
                watch.cancel()
    finally:
        for pool in pools.values():
            pool.abort()


async def _refuse_misfit(fleet: Fleet, interval: float) -> None:
    """A wrong key or a wrong model is the operator's slip: say so at start, instead of serving without transfers."""
    while not all(instance.up for instance in fleet.instances):
        await asyncio.sleep(interval)
    if words := fleet.misfit():
        raise ConfigError(words)


def run(args: argparse.Namespace) -> int:
    """The command; its exit status."""
    try:
        settings = from_arguments(args)
    except ConfigError as error:
        print(f"vllm-disagg proxy: {error}", file=sys.stderr)
        return 2
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    gc.set_threshold(50_000, 20, 100)  # a request makes few cycles; the default threshold looks for them all the time
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_until_signal(settings))
    except OSError as error:
        print(f"vllm-disagg proxy: cannot listen on {settings.host}:{settings.port}: {error.strerror}", file=sys.stderr)
        return 1
    except ExceptionGroup as errors:
        misfits, others = errors.split(ConfigError)
        if others or not misfits:
            raise
        print(f"vllm-disagg proxy: {misfits.exceptions[0]}", file=sys.stderr)
        return 1
    return 0


async def _until_signal(settings: Settings) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    await serve(settings, lambda port: print(f"listening on http://{host}:{port}", flush=True), stop, must_fit=True)
