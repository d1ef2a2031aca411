"""Instances that run as Kubernetes pods, found by their labels or by those of the EndpointSlices of
their Service.

Both are listed every few seconds instead of watched: a list is the truth, while a watch that
silently stops is an outage that nobody sees. A pod counts while it is ready and not being deleted,
so one that terminates is drained at once; an endpoint likewise, which says so itself. Needs the
official client (`pip install vllm-disagg[kubernetes]`), which is used from a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from ...errors import ConfigError
from ..routing.fleet import Role
from .reconcile import Member
from .sources import Tell

log = logging.getLogger(__name__)

Reader = Callable[[Any, Role, int], set[Member]]

LIST_TIMEOUT_SECONDS = 5.0  # seconds for one list


def connect(slices: bool) -> Any:
    """What lists pods or EndpointSlices, of the cluster we run in, or of the kubeconfig at hand; or
    ConfigError.
    """
    try:
        import kubernetes  # noqa: PLC0415  an extra
    except ImportError:
        raise ConfigError(
            "--service-discovery needs the client: pip install 'vllm-disagg[kubernetes]'"
        ) from None
    config: Any = kubernetes.config
    try:
        try:
            config.load_incluster_config()
        except config.ConfigException:
            config.load_kube_config()
    except (config.ConfigException, OSError) as error:
        raise ConfigError(f"--service-discovery: no cluster is configured: {error}") from None
    if slices:
        settings = kubernetes.client.Configuration.get_default_copy()
        settings.client_side_validation = (
            False  # a Service without pods has a slice with `endpoints: null`
        )
        return kubernetes.client.DiscoveryV1Api(
            kubernetes.client.ApiClient(settings)
        ).list_namespaced_endpoint_slice
    return kubernetes.client.CoreV1Api().list_namespaced_pod


def members(pods: Any, role: Role, port: int) -> set[Member]:
    """The instances among a list of pods."""
    found = set()
    for pod in pods.items:
        ready = any(c.type == "Ready" and c.status == "True" for c in pod.status.conditions or ())
        address = pod.status.pod_ip
        if ready and address and not pod.metadata.deletion_timestamp:
            found.add(_member(address, port, role))
    return found


def endpoint_members(slices: Any, role: Role, port: int) -> set[Member]:
    """The instances among a list of EndpointSlices: at the slice's only port, else at `port`. A pod
    with an IPv4 and an IPv6 address stands in two slices, and is one instance.
    """
    found: dict[str, Member] = {}
    for part in sorted(slices.items or (), key=lambda s: str(s.address_type)):
        ports = [p.port for p in part.ports or () if p.port]
        for endpoint in part.endpoints or ():
            state = endpoint.conditions
            ready = not state or (
                state.ready is not False and not state.terminating
            )  # unknown counts as ready
            if ready and endpoint.addresses and part.address_type != "FQDN":
                address = endpoint.addresses[0]  # the others are not to be used
                name = (
                    endpoint.target_ref.uid
                    if endpoint.target_ref and endpoint.target_ref.uid
                    else address
                )
                found.setdefault(
                    name, _member(address, ports[0] if len(ports) == 1 else port, role)
                )
    return set(found.values())


def _member(address: str, port: int, role: Role) -> Member:
    return Member(f"http://{f'[{address}]' if ':' in address else address}:{port}", role)


async def follow(
    lister: Any,
    read: Reader,
    namespace: str,
    selectors: dict[Role, str],
    port: int,
    interval: float,
    tell: Tell,
) -> None:
    """Tell all that are ready, again and again. While the API server does not answer, nothing
    changes.
    """
    failing = False
    while True:
        try:
            found: set[Member] = set()
            for role, selector in selectors.items():
                listed = await asyncio.to_thread(
                    lister,
                    namespace,
                    label_selector=selector,
                    _request_timeout=LIST_TIMEOUT_SECONDS,
                )
                found |= read(listed, role, port)
        except Exception as error:  # the client raises its own and its HTTP library's
            if not failing:
                log.warning(
                    "the Kubernetes API does not answer, the fleet stays as it is: %s",
                    str(error)[:300],
                )
            failing = True
        else:
            failing = False
            tell(found)
        await asyncio.sleep(interval)
