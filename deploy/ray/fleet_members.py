"""The instances of a proxy, as replicas join and leave it by its admin API.

A replica repeats `join` at each health check. An instance whose replica has not done so for
EXPIRY_SECONDS leaves: its node or its replica was killed.
"""

from __future__ import annotations

import fleet_scaling
from vllm_disagg import http_client
from vllm_disagg.doctor.metrics_page import MetricsPage
from vllm_disagg.drain import INSTANCES_PATH

EXPIRY_SECONDS = 60.0


class FleetMembers:
    """Joins and removes instances at one proxy. Times are seconds of the caller's clock."""

    def __init__(self, proxy: str, admin_key: str) -> None:
        self._proxy = proxy
        self._admin_key = admin_key
        self._joined: dict[str, float] = {}  # time of the last `join`, by URL

    def join(self, role: str, url: str, now: float) -> None:
        """Adds an instance, or keeps it. Raises ConfigError if the proxy refuses it."""
        if url not in self._joined:
            self._change("POST", {"url": url, "role": role}, f"the join of {url}")
        self._joined[url] = now

    def leave(self, url: str) -> None:
        """Has the proxy send an instance no new requests, and remove it behind the last one."""
        if self._joined.pop(url, None) is not None:
            self._change("DELETE", {"url": url}, f"the removal of {url}")

    def expire(self, now: float) -> None:
        """Removes instances whose replicas are silent."""
        for url, joined in list(self._joined.items()):
            if now - joined > EXPIRY_SECONDS:
                self.leave(url)

    def signals(self, role: str, url: str) -> dict[str, float]:
        """Returns what `fleet_scaling` needs of an instance; of a P, the fleet's backlog."""
        page = MetricsPage(http_client.get(self._proxy, "/metrics", "the proxy"))
        if role == "prefill":
            backlog = page.total("vllm_disagg_prefill_backlog_seconds")
            return {fleet_scaling.BACKLOG: backlog}
        return {
            fleet_scaling.KV_USAGE: page.total("vllm_disagg_kv_cache_usage", url=url),
            fleet_scaling.WAITING: page.total("vllm_disagg_engine_waiting", url=url),
        }

    def _change(self, method: str, body: dict[str, str], name: str) -> None:
        http_client.send(self._proxy, (method, INSTANCES_PATH), body, self._admin_key, name)
