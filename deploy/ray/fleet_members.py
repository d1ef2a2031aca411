"""The instances of a proxy, as replicas join and leave it by its admin API.

A replica repeats `join` at each health check. An instance whose replica has not done so for
EXPIRY_SECONDS leaves: its node or its replica was killed.
"""

from __future__ import annotations

import logging
import math
from contextlib import suppress

import fleet_scaling
from vllm_disagg import http_client
from vllm_disagg.doctor.metrics_page import MetricsPage
from vllm_disagg.drain import INSTANCES_PATH
from vllm_disagg.errors import ConfigError

EXPIRY_SECONDS = 60.0
LEAVING = -math.inf  # as the time of a `join`: older than any

log = logging.getLogger("ray.serve")


class FleetMembers:
    """Joins and removes instances at one proxy. Times are seconds of the caller's clock."""

    def __init__(self, proxy: str, admin_key: str) -> None:
        self._proxy = proxy
        self._admin_key = admin_key
        self._joined: dict[str, float] = {}  # time of the last `join`, by URL

    def join(self, role: str, url: str, now: float) -> None:
        """Adds an instance, or keeps it. Raises ConfigError if the proxy refuses it."""
        if self._joined.get(url, LEAVING) == LEAVING:
            self._change("POST", {"url": url, "role": role}, f"the join of {url}")
        self._joined[url] = now

    def leave(self, url: str) -> None:
        """Has the proxy send an instance no new requests, and remove it behind the last one.

        Raises ConfigError if the proxy does not answer; `expire` then repeats it.
        """
        if url not in self._joined:
            return
        self._joined[url] = LEAVING
        with suppress(http_client.NotFound):  # an operator has removed it
            self._change("DELETE", {"url": url}, f"the removal of {url}")
        self._joined.pop(url, None)

    def expire(self, now: float) -> None:
        """Removes instances whose replicas are silent, and those whose removal has failed."""
        for url, joined in list(self._joined.items()):
            if now - joined <= EXPIRY_SECONDS:
                continue
            try:
                self.leave(url)
            except ConfigError as error:
                # No sign of a proxy that must be started again: it may be busy.
                log.warning("%s stays in the proxy's list for now: %s", url, error)

    def signals(self, role: str, url: str) -> dict[str, float]:
        """Returns what `fleet_scaling` needs of an instance; of a P, the fleet's backlog.

        What the proxy does not know is left out: it would read as an idle engine.
        """
        page = MetricsPage(http_client.get(self._proxy, "/metrics", "the proxy"))
        if role == "prefill":
            series = {fleet_scaling.BACKLOG: "vllm_disagg_prefill_backlog_seconds"}
            labels = {}
        else:
            series = {
                fleet_scaling.KV_USAGE: "vllm_disagg_kv_cache_usage",
                fleet_scaling.WAITING: "vllm_disagg_engine_waiting",
            }
            labels = {"url": url}
        return {
            key: page.total(name, **labels)
            for key, name in series.items()
            if page.has(name, **labels)
        }

    def _change(self, method: str, body: dict[str, str], name: str) -> None:
        http_client.send(self._proxy, (method, INSTANCES_PATH), body, self._admin_key, name)
