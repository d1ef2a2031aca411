"""Commands of the processes that replicas start: `vllm serve` and `vllm-disagg proxy`.  Pure."""

from __future__ import annotations

import sys

import fleet_settings
from fleet_settings import FleetSettings
from vllm_disagg.fleet.keys import ADMIN_KEY
from vllm_disagg.launcher import plan
from vllm_disagg.launcher.plan import ChildCommand, UpOptions

LOOPBACK = "127.0.0.1"
# Requests that came behind the drain end as well.
SHUTDOWN_TIMEOUT = "--shutdown-timeout=30"


def host(settings: FleetSettings, node: str) -> str:
    """Returns the address for processes of a node: without a key of clients, the loopback."""
    return node if settings.api_key_file else LOOPBACK


def engine(settings: FleetSettings, role: str, vllm: str, address: tuple[str, int]) -> ChildCommand:
    """Returns the command of an engine, as `vllm-disagg up` makes it. `vllm`: command of vLLM."""
    options = UpOptions(
        model=settings.model,
        tensor_parallel=max(settings.gpus, 1),
        extra=[SHUTDOWN_TIMEOUT, *settings.args],
        role_extra={role: settings.role(role).args},
    )
    argv = plan.engine_argv(options, vllm, role, address, settings.key_file)
    env = {}
    if key := fleet_settings.api_key(settings):
        env["VLLM_API_KEY"] = key
    if not settings.gpus:
        # Ray gives each engine a number of threads, but no cores of its own.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return ChildCommand(role, argv, env, *address, "/health")


def proxy(settings: FleetSettings, address: str, admin_key: str) -> ChildCommand:
    """Returns the command of the proxy; instances join it by its admin API."""
    argv = [sys.executable, "-m", "vllm_disagg.cli", "proxy"]
    argv += ["--host", address, "--port", str(settings.port), "--key-file", settings.key_file]
    if settings.api_key_file:
        argv += ["--api-key-file", settings.api_key_file]
    argv += ["--access-log=-", *settings.proxy_args]  # each request with its id, beside the log
    return ChildCommand(plan.PROXY, argv, {ADMIN_KEY: admin_key}, address, settings.port, "/health")
