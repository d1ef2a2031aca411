"""Instances that run as Kubernetes pods, found by label.

Pods are listed every few seconds instead of watched: a list is the truth, while a watch that silently stops is an
outage that nobody sees.  A pod counts while it is ready and not being deleted, so one that terminates is drained at
once.  Needs the official client (`pip install vllm-disagg[kubernetes]`), which is used from a thread.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ..errors import ConfigError
from .fleet import Role
from .membership import Member
from .sources import Tell

log = logging.getLogger(__name__)

TIMEOUT = 5.0  # seconds for one list


def connect() -> Any:
    """The API of the cluster we run in, or of the kubeconfig at hand; or ConfigError."""
    try:
        import kubernetes  # noqa: PLC0415  an extra
    except ImportError:
        raise ConfigError("--service-discovery needs the client: pip install 'vllm-disagg[kubernetes]'") from None
    config: Any = kubernetes.config
    try:
        try:
            config.load_incluster_config()
        except config.ConfigException:
            config.load_kube_config()
    except (config.ConfigException, OSError) as error:
        raise ConfigError(f"--service-discovery: no cluster is configured: {error}") from None
    return kubernetes.client.CoreV1Api()


def members(pods: Any, role: Role, port: int) -> set[Member]:
    """The instances among a list of pods."""
    found = set()
    for pod in pods.items:
        ready = any(c.type == "Ready" and c.status == "True" for c in pod.status.conditions or ())
        address = pod.status.pod_ip
        if ready and address and not pod.metadata.deletion_timestamp:
            found.add(Member(f"http://{f'[{address}]' if ':' in address else address}:{port}", role))
    return found


async def follow_pods(
    api: Any, namespace: str, selectors: dict[Role, str], port: int, interval: float, tell: Tell
) -> None:
    """Tell all ready pods, again and again.  While the API server does not answer, nothing changes."""
    failing = False
    while True:
        try:
            found: set[Member] = set()
            for role, selector in selectors.items():
                pods = await asyncio.to_thread(
                    api.list_namespaced_pod, namespace, label_selector=selector, _request_timeout=TIMEOUT
                )
                found |= members(pods, role, port)
        except Exception as error:  # the client raises its own and its HTTP library's
            if not failing:
                log.warning("the Kubernetes API does not answer, the fleet stays as it is: %s", str(error)[:300])
            failing = True
        else:
            failing = False
            tell(found)
        await asyncio.sleep(interval)
