"""Finds instances that run as Kubernetes pods, by labels of pods or of EndpointSlices.

Both are listed every few seconds instead of watched. A list is complete; a watch that stops without
an error would go unnoticed.

A pod counts while it is ready and not being deleted, so a pod that terminates is drained at once.
The same holds for an endpoint, whose conditions include both.

Needs the official client (`pip install vllm-disagg[kubernetes]`), which runs in a thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from ...errors import ConfigError
from ..routing.fleet import Role
from .reconcile import Member
from .sources import OnMembers

log = logging.getLogger(__name__)

Reader = Callable[[Any, Role, int], set[Member]]

LIST_TIMEOUT_SECONDS = 5.0  # for one list
MAX_LOGGED_CHARACTERS = 300  # of an error


def connect(slices: bool) -> Any:
    """Returns the function that lists pods, or EndpointSlices if `slices`; raises ConfigError.

    Uses the cluster that this process runs in, else the kubeconfig.
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
    except Exception as error:  # of a file that is no kubeconfig it raises whatever comes first
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"--service-discovery: no cluster is configured: {reason[:MAX_LOGGED_CHARACTERS]}"
        ) from None
    if not slices:
        return kubernetes.client.CoreV1Api().list_namespaced_pod
    settings = kubernetes.client.Configuration.get_default_copy()
    # A Service without pods has a slice with `endpoints: null`, which the client would reject.
    settings.client_side_validation = False
    client = kubernetes.client.ApiClient(settings)
    return kubernetes.client.DiscoveryV1Api(client).list_namespaced_endpoint_slice


def members(pods: Any, role: Role, port: int) -> set[Member]:
    """Returns the instances in a list of pods."""
    found = set()
    for pod in pods.items:
        conditions = pod.status.conditions or ()
        ready = any(c.type == "Ready" and c.status == "True" for c in conditions)
        address = pod.status.pod_ip
        if ready and address and not pod.metadata.deletion_timestamp:
            found.add(_member(address, port, role))
    return found


def endpoint_members(slices: Any, role: Role, port: int) -> set[Member]:
    """Returns the instances in a list of EndpointSlices.

    Uses the slice's port if it has exactly one, else `port`. A pod with an IPv4 and an IPv6 address
    is in two slices, and is one instance.
    """
    found: dict[str, Member] = {}
    for part in sorted(slices.items or (), key=lambda s: str(s.address_type)):
        ports = [p.port for p in part.ports or () if p.port]
        slice_port = ports[0] if len(ports) == 1 else port
        for endpoint in part.endpoints or ():
            if part.address_type == "FQDN" or not endpoint.addresses or not _is_ready(endpoint):
                continue
            address = endpoint.addresses[0]  # Kubernetes defines no use for the others
            pod = endpoint.target_ref
            name = pod.uid if pod and pod.uid else address
            found.setdefault(name, _member(address, slice_port, role))
    return set(found.values())


def _is_ready(endpoint: Any) -> bool:
    """Returns whether an endpoint takes requests; an unknown condition counts as ready."""
    conditions = endpoint.conditions
    return not conditions or (conditions.ready is not False and not conditions.terminating)


def _member(address: str, port: int, role: Role) -> Member:
    host = f"[{address}]" if ":" in address else address
    return Member(f"http://{host}:{port}", role)


async def follow(
    make_lister: Callable[[], Any],
    read: Reader,
    namespace: str,
    selectors: dict[Role, str],
    port: int,
    interval: float,
    on_members: OnMembers,
) -> None:
    """Calls `on_members` with all ready instances, every `interval` seconds.

    While the API server does not answer, the fleet does not change. `make_lister`: `connect`.
    """
    lister: Any = None
    failing = False
    while True:
        try:
            if lister is None:
                lister = await asyncio.to_thread(make_lister)  # a credential plugin may hang
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
                    "Kubernetes: the API does not answer, the fleet stays as it is: %s",
                    str(error)[:MAX_LOGGED_CHARACTERS],
                )
            failing = True
            # The client itself reads a replaced token once the clock of the day has gone on by a
            # minute. That takes hours behind a step back.
            if getattr(error, "status", 0) == HTTPStatus.UNAUTHORIZED:
                lister = None
        else:
            failing = False
            on_members(found)
        await asyncio.sleep(interval)
