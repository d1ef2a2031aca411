"""The application of Ray Serve: a proxy in front of P and of D, which are scaled apart.

    Serve's controller -- health, number --> replicas of Prefill and Decode: `vllm serve` each
      replicas -- join, leave, signals --> replica of Proxy: `vllm-disagg proxy` on the head node
        clients -- HTTP --> the proxy's own port -- HTTP --> engines

Requests go to the proxy's own port. Serve's ingress would copy each token once more, and has
timeouts of its own; Serve is the control plane only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable
from typing import Any, TypeVar

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus, LoggingConfig

import fleet_commands
import fleet_scaling
import fleet_settings
from fleet_members import EXPIRY_SECONDS, FleetMembers
from fleet_process import ProcessFailed, ReplicaProcess, start_failure
from fleet_settings import FleetSettings
from vllm_disagg.errors import ConfigError
from vllm_disagg.fleet.keys import ADMIN_KEY
from vllm_disagg.launcher import machine

APPLICATION = "vllm-disagg"
HEAD_NODE = "node:__internal_head__"  # a resource that Ray gives its head node
# A setting of Ray, whose default of 15 lets any other process of a node precede an engine.
NICENESS = "RAY_worker_niceness"
HEALTH_SECONDS = 5.0  # between two checks; Serve replaces a replica after three failures
HEALTH_TIMEOUT_SECONDS = 30.0
POLL_SECONDS = 0.5
WATCH_SECONDS = 2.0  # between two looks at the application that this command serves
ANSWER_SECONDS = 60.0  # for calls that are repeated
PROXY_SECONDS = 10.0  # for an answer of the proxy's replica
DRAIN_SECONDS = 600.0  # for the requests that an engine or the proxy has
END_SECONDS = 45.0  # for a process to end by SIGTERM; the proxy then cuts requests after 30 s
STOP_SECONDS = DRAIN_SECONDS + END_SECONDS + 30.0  # for a replica, with what lies between
DELETE_SECONDS = STOP_SECONDS + 60.0  # for the application, with its engines' requests
MAX_STARTS = 2
UPSCALE_SECONDS = 5.0
# As KEDA's scalers: a D ends only when its streams have ended, so it is kept for longer.
DOWNSCALE_SECONDS = {"prefill": 300.0, "decode": 900.0}
POLICIES = {"prefill": fleet_scaling.prefill_replicas, "decode": fleet_scaling.decode_replicas}
REPLICA_ERRORS = (RayError, RayServeException, TimeoutError)

log = logging.getLogger("ray.serve")

_Result = TypeVar("_Result")


class Proxy:
    """Runs the proxy, and keeps its list of instances."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: FleetSettings, *_engines: DeploymentHandle
    ) -> None:
        """Starts the proxy. The handles make the engines a part of the application."""
        self._runs = False
        host = fleet_commands.host(settings, ray.util.get_node_ip_address())
        fleet_settings.check_port(settings, host)
        admin_key = os.environ.get(ADMIN_KEY) or secrets.token_hex(24)
        command = fleet_commands.proxy(settings, host, admin_key)
        self._members = FleetMembers(command.url, admin_key)
        self._process = await ReplicaProcess.start(command)
        self._runs = True

    async def check_health(self) -> None:
        """Raises unless the proxy answers; removes instances whose replicas are silent."""
        if self._runs:
            await asyncio.to_thread(self._process.check)
            await asyncio.to_thread(self._members.expire, time.monotonic())

    def place(self) -> tuple[str, str]:
        """Returns the address for clients, and the id of the node."""
        return self._process.command.url, ray.get_runtime_context().get_node_id()

    async def join(self, role: str, url: str) -> None:
        """Adds an instance, or keeps it."""
        await asyncio.to_thread(self._members.join, role, url, time.monotonic())

    async def leave(self, url: str) -> None:
        """Removes an instance behind its last request."""
        if self._runs:
            await asyncio.to_thread(self._members.leave, url)

    async def signals(self, role: str, url: str) -> dict[str, float]:
        """Returns the metrics by which an instance's role is scaled."""
        return await asyncio.to_thread(self._members.signals, role, url)

    async def stop(self) -> None:
        """Ends the proxy once it has no request, or when the time for that is over."""
        if self._runs:
            self._runs = False
            await asyncio.to_thread(self._process.wait_idle, DRAIN_SECONDS)
            await asyncio.to_thread(self._process.end, END_SECONDS)

    async def __del__(self) -> None:
        """Ends the proxy when Serve ends the replica."""
        await self.stop()


class Engine:
    """Runs one engine, and keeps it in the proxy's list while it is healthy."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: FleetSettings, role: str
    ) -> None:
        """Starts the engine, and waits until it can serve."""
        self._role = role
        self._runs = False
        self._is_healthy = False
        self._proxy = serve.get_app_handle(APPLICATION)
        _, proxy_node = await self._proxy.place.remote()
        if not settings.api_key_file and proxy_node != ray.get_runtime_context().get_node_id():
            raise ConfigError("an engine on another machine than the proxy needs api_key_file")
        machine.check_plugin()
        host = fleet_commands.host(settings, ray.util.get_node_ip_address())
        (port,) = machine.free_ports(1, host)
        vllm = machine.executable("vllm")
        command = fleet_commands.engine(settings, role, vllm, (host, port))
        self._url = command.url
        self._process = await ReplicaProcess.start(command)
        self._runs = True

    async def check_health(self) -> None:
        """Raises unless the engine answers; joins the proxy, or leaves it."""
        self._is_healthy = False
        try:
            await asyncio.to_thread(self._process.check)
        except ProcessFailed:
            await self._tell_proxy("leave", self._url)
            raise
        self._is_healthy = True
        await self._tell_proxy("join", self._role, self._url)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the metrics by which Serve's autoscaler calls the policy of this role."""
        return await self._proxy.signals.remote(self._role, self._url)

    async def __del__(self) -> None:
        """Drains and ends the engine when Serve ends the replica."""
        if self._is_healthy:
            await self._tell_proxy("leave", self._url)
            await asyncio.to_thread(self._process.wait_idle, DRAIN_SECONDS)
        if self._runs:
            await asyncio.to_thread(self._process.end, END_SECONDS)

    async def _tell_proxy(self, method: str, *args: str) -> None:
        """Calls the proxy's replica. The health of an engine does not depend on it."""
        call = getattr(self._proxy, method).remote(*args)
        try:
            await asyncio.wait_for(call, PROXY_SECONDS)
        except REPLICA_ERRORS as error:
            # A replica that ends makes no further check.
            text = "%s of %s failed; without a later check the proxy removes it after %.0f s: %s"
            log.warning(text, method, self._url, EXPIRY_SECONDS, error)


def build(settings: FleetSettings) -> Application:
    """Returns the application."""
    engines = [_engines(settings, role) for role in ("prefill", "decode")]
    proxy = serve.deployment(Proxy).options(
        name="proxy",
        # On the head node, so that its address stays; its process needs no core of its own.
        ray_actor_options={"num_cpus": 0, "resources": {HEAD_NODE: 0.001}},
        max_ongoing_requests=1000,
        **_lifecycle(),
    )
    return proxy.bind(settings, *engines)


def _engines(settings: FleetSettings, role: str) -> Application:
    """Returns the deployment of one role."""
    bounds = settings.role(role)
    scaling = AutoscalingConfig(
        min_replicas=bounds.min_replicas,
        max_replicas=bounds.max_replicas,
        upscale_delay_s=UPSCALE_SECONDS,
        downscale_delay_s=DOWNSCALE_SECONDS[role],
        policy=AutoscalingPolicy(policy_function=POLICIES[role]),
    )
    deployment = serve.deployment(Engine).options(
        name=role,
        autoscaling_config=scaling,
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        **_lifecycle(),
    )
    return deployment.bind(settings, role)


def _lifecycle() -> dict[str, Any]:
    """Returns the options of all deployments."""
    return {
        "health_check_period_s": HEALTH_SECONDS,
        "health_check_timeout_s": HEALTH_TIMEOUT_SECONDS,
        "graceful_shutdown_timeout_s": STOP_SECONDS,
        "max_constructor_retry_count": MAX_STARTS,
        "logging_config": LoggingConfig(enable_access_log=False),
    }


class FleetFailed(Exception):
    """The fleet could not be started, asked or ended; the text is the reason."""


def connect(folder: str) -> None:
    """Joins the Ray cluster of this machine, else starts one. Raises FleetFailed.

    `folder`: of these modules.
    """
    # Lines of all engines in one console help little; each node has them in files.
    options: dict[str, Any] = {"runtime_env": {"working_dir": folder}, "log_to_driver": False}
    try:
        ray.init(address="auto", **options)
    except ConnectionError:
        os.environ.setdefault(NICENESS, "0")
        try:
            ray.init(address="local", include_dashboard=False, **options)
        except Exception as error:  # Ray raises no narrower class here
            raise FleetFailed(f"Ray does not start: {_one_line(error)}") from None


def disconnect() -> None:
    """Leaves the cluster, and ends it if this process started it."""
    ray.shutdown()


def check(settings: FleetSettings) -> None:
    """Raises ConfigError if a fleet runs already, has no room, or its port is taken.

    Changes nothing in the cluster. Another start would replace each engine of a running fleet.
    """
    if status := _status():
        raise ConfigError(
            f"a fleet runs already on this cluster ({status}): end it with:"
            " python deploy/ray/fleet.py --end"
        )
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    fleet_settings.check_room(settings, nodes)
    host = fleet_commands.host(settings, ray.util.get_node_ip_address())
    fleet_settings.check_port(settings, host)


def start(settings: FleetSettings) -> str:
    """Starts the application; returns the address for clients. Raises FleetFailed."""
    serve.start(proxy_location="Disabled")
    try:
        serve.run(build(settings), name=APPLICATION, route_prefix=None)
    except RuntimeError as error:
        # Serve's own error names the deployment; the deployment's message has a traceback.
        application = serve.status().applications.get(APPLICATION)
        deployments = application.deployments.values() if application else ()
        messages = [each.message for each in deployments]
        raise FleetFailed(start_failure("\n".join([str(error), *messages]))) from None
    # The proxy's replica may be replaced right now.
    return _repeat(_address, "the proxy's replica")


def wait_until_gone() -> None:
    """Returns once the application has been ended by another command. Raises FleetFailed."""
    while _status():
        time.sleep(WATCH_SECONDS)


def end() -> bool:
    """Ends the application that runs on this machine's cluster; returns whether there was one.

    Raises FleetFailed if it does not end in time.
    """
    try:
        ray.init(address="auto", log_to_driver=False)
    except ConnectionError:
        return False
    is_present = bool(_status())
    if is_present:
        stop()
    return is_present


def stop() -> None:
    """Ends the proxy once it has no request, then the engines. Raises FleetFailed."""
    if not _status():
        return
    try:
        _address()  # a proxy that cannot answer has no requests to wait for
        ending = serve.get_app_handle(APPLICATION).stop.remote()
        ending.result(timeout_s=STOP_SECONDS)
    except REPLICA_ERRORS as error:
        log.warning("the proxy is ended without a drain: %s", _one_line(error))
    serve.delete(APPLICATION, _blocking=False)
    deadline = time.monotonic() + DELETE_SECONDS
    was_deleting = False  # Serve begins a moment after the call
    while status := _status():
        if was_deleting and status != ApplicationStatus.DELETING.value:
            return  # another command has started an application meanwhile
        if time.monotonic() > deadline:
            raise FleetFailed(f"the fleet has not ended within {DELETE_SECONDS:.0f} s: {status}")
        was_deleting = status == ApplicationStatus.DELETING.value
        time.sleep(POLL_SECONDS)


def _address() -> str:
    """Returns the address for clients, as the proxy's replica states it."""
    url, _ = serve.get_app_handle(APPLICATION).place.remote().result(timeout_s=PROXY_SECONDS)
    return str(url)


def _status() -> str:
    """Returns Serve's status of the application; empty without one. Raises FleetFailed."""
    applications = _repeat(serve.status, "Ray Serve").applications
    return applications[APPLICATION].status.value if APPLICATION in applications else ""


def _repeat(call: Callable[[], _Result], name: str) -> _Result:
    """Repeats a call while it fails, within ANSWER_SECONDS. Raises FleetFailed.

    `name`: of the component that is called.
    """
    deadline = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            return call()
        except REPLICA_ERRORS as error:
            if time.monotonic() > deadline:
                raise FleetFailed(f"{name} does not answer: {_one_line(error)}") from None
        time.sleep(POLL_SECONDS)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
