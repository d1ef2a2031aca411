"""Runs `vllm-disagg proxy`: a process, or the supervisor of several, until a signal."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from functools import partial

import uvloop

from .. import descriptor_table
from ..errors import ConfigError
from ..fleet import keys
from .flags import add_arguments, old_names_warning
from .membership import kubernetes
from .requests import bodies
from .serving import serve
from .settings import ProxySettings, from_arguments
from .telemetry import logs
from .telemetry.access_log import AccessLog
from .telemetry.tracing import Tracing
from .workers import supervisor
from .workers.bus import parse_place

log = logging.getLogger(__name__)

__all__ = ["add_arguments", "run"]

# Python's default looks for cycles very often, and a request makes few.
_GC_THRESHOLDS = (50_000, 20, 100)
_RESERVED_DESCRIPTORS = 65536  # half a MiB of the kernel's memory


def run(args: argparse.Namespace) -> int:
    """Runs the command; returns its exit status."""
    if args.worker:  # the supervisor has warned of the same key files
        keys.log.setLevel(logging.ERROR)
    try:
        worker = parse_place(args.worker).index if args.worker else None
        logs.set_up(args.log_level, args.log_format, worker)
        settings = from_arguments(args)
        if not settings.place and settings.selectors:
            kubernetes.connect(settings.slices)  # a mistake is found before each worker finds it
    except ConfigError as error:
        print(f"vllm-disagg proxy: {error}", file=sys.stderr)
        return 2
    refused_status = supervisor.REFUSED_EXIT_STATUS if settings.place else 1
    # The supervisor's workers have the same flags; only the supervisor warns.
    if (warning := old_names_warning(args)) and not settings.place:
        log.warning(warning)
    _, max_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max_files, max_files))  # a stream takes two
    descriptor_table.reserve(_RESERVED_DESCRIPTORS)
    gc.set_threshold(*_GC_THRESHOLDS)
    # A rotation of logs while the proxy starts must not end it; it opens new files anyway.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})  # see `supervisor.start_worker`
    try:
        if settings.workers > 1 and not settings.place:
            # A mistake is found here, before each worker finds it.
            AccessLog(settings.access_log).close()
            Tracing(settings.traces_endpoint).close()
            return supervisor.run(
                sys.argv[1:],
                settings.workers,
                settings.host,
                settings.port,
                partial(_print_address, settings),
            )
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_until_signal(settings))
    except (OSError, UnicodeError) as error:  # UnicodeError: no name that DNS can have
        reason = _reason(error)
        address = f"{settings.host}:{settings.port}"
        print(f"vllm-disagg proxy: cannot listen on {address}: {reason}", file=sys.stderr)
        return refused_status
    except ExceptionGroup as errors:
        misfits, others = errors.split(ConfigError)
        if others or not misfits:
            raise
        print(f"vllm-disagg proxy: {misfits.exceptions[0]}", file=sys.stderr)
        return refused_status
    return 0


def _reason(error: OSError | UnicodeError) -> str:
    """Returns why an address cannot be listened on, in the system's words alone."""
    if isinstance(error, UnicodeError):
        return "it is no host name"
    if isinstance(error, socket.gaierror):  # its numbers are not those of `os.strerror`
        return error.strerror or "it is no host name"
    return os.strerror(error.errno) if error.errno else str(error)


async def _start_threads() -> None:
    """Starts the threads of look-ups and of large bodies.

    Later the system may give no more: libuv would abort the process then, in its first look-up of
    a name, and large bodies would be answered with 500.
    """
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(bodies.parser_thread, int)
    with suppress(OSError):  # such a look-up asks no server, and fails
        await loop.getaddrinfo("localhost", None, flags=socket.AI_NUMERICHOST)


async def _until_signal(settings: ProxySettings) -> None:
    await _start_threads()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    ready = None if settings.place else partial(_print_address, settings)
    on_renewal = partial(loop.add_signal_handler, signal.SIGHUP)
    # All workers see the same fleet: one of them reports the mistake, in its first process.
    place = settings.place
    must_fit = place is None or (place.index == 0 and not place.restarted)
    await serve(settings, ready, stop, must_fit=must_fit, on_renewal=on_renewal)


def _print_address(settings: ProxySettings, port: int) -> None:
    scheme = "https" if settings.certfile else "http"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    try:
        print(f"listening on {scheme}://{host}:{port}", flush=True)
    except OSError as error:  # a full disk, or a reader that has left
        log.warning("proxy: cannot write to standard output: %s; it serves", error.strerror)
