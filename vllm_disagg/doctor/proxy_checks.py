"""Checks a proxy and, by its own reports, the fleet behind it. Sends no request to an instance."""

from __future__ import annotations

import msgspec
from packaging.version import InvalidVersion, Version

from ..fleet.conventions import NEWEST_VLLM, OLDEST_VLLM
from ..fleet.keys import ADMIN_KEY
from ..proxy.requests.admin import DRAIN_PATH, INSTANCES_PATH
from ..proxy.routing.instance_report import DRAINED, InstanceReport
from ..proxy.routing.readiness import Readiness
from . import remedies
from .findings import Report
from .metrics_page import MetricsPage
from .server_client import NoAnswer, ServerAnswer, ServerClient

FULL_KV_USAGE = 0.95
REQUESTS = "vllm_disagg_requests_total"
FALLBACKS = "vllm_disagg_fallbacks_total"
# Share and number of requests whose clients left, above which something cuts them.
MAX_LEFT_SHARE = 0.1
MIN_LEFT_REQUESTS = 10
GIVE_KEY = f"give --admin-key-file, or {ADMIN_KEY} in the environment"


async def examine(
    report: Report, url: str, client: ServerClient, *, has_key: bool
) -> list[InstanceReport]:
    """Adds all findings; returns the instances. `has_key`: the client sends a key."""
    exam = ProxyExam(report, url, client, has_key=has_key)
    try:
        if not await exam.check_server():
            return []
        rows = await exam.read_instances()
        await exam.check_readiness()
        await exam.check_metrics()
    except NoAnswer as error:
        report.fail(exam.name, str(error), remedies.RESTART)
        return []
    for row in rows:
        examine_instance(report, row)
    examine_fleet(report, exam.name, rows)
    return rows


class ProxyExam:
    """The checks of one proxy's own pages."""

    def __init__(self, report: Report, url: str, client: ServerClient, *, has_key: bool) -> None:
        self._report = report
        self._client = client
        self._has_key = has_key
        self.name = f"proxy {url}"

    async def check_server(self) -> bool:
        """Adds whether a server answers, and whether a router is in front of it."""
        try:
            answer = await self._client.get("/health")
        except NoAnswer as error:
            self._report.fail(self.name, str(error), remedies.of_silence(str(error)))
            return False
        if answer.is_of_idle_router:
            self._report.fail(
                self.name,
                f"GET /health answered {answer.described_status}: the router reaches no proxy",
                "start the proxy, and look at the router's address of it",
            )
            return False
        if answer.status != 200:
            self._report.fail(
                self.name,
                f"GET /health answered {answer.described_status}: no vllm-disagg proxy",
                "give its URL",
            )
            return False
        if answer.router:
            self._report.warn(
                self.name,
                f"a router is in front of it ({answer.router})",
                "its timeouts must exceed --request-timeout (1800 s), it must not buffer streams"
                " (nginx: proxy_read_timeout 1800s; proxy_buffering off), and not retry requests",
            )
        else:
            self._report.ok(self.name, f"answers in {answer.seconds * 1000:.0f} ms")
        return True

    async def read_instances(self) -> list[InstanceReport]:
        """Returns the proxy's instances; adds why it does not show them."""
        answer = await self._client.get(INSTANCES_PATH)
        if answer.status == 200 and _has_rows(answer):
            try:
                return msgspec.json.decode(answer.body, type=list[InstanceReport])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                problem = "its list of instances is of another version of vllm-disagg"
                self._report.fail(self.name, problem, "use the doctor of the proxy's version")
                return []
        if answer.status == 401 and self._has_key:
            problem = "it refuses this key"
            remedy = GIVE_KEY.replace("give", "give the key of its --admin-key-file by", 1)
        elif answer.status == 401:
            problem = "its instances are shown to holders of a key"
            remedy = GIVE_KEY
        elif answer.status == 403:
            problem = "it has no key, so only its own machine sees the instances"
            remedy = "run the doctor there with its loopback URL, or start it with --admin-key-file"
        else:
            problem = f"GET {INSTANCES_PATH} answered {answer.status}: no vllm-disagg proxy"
            remedy = f"give its URL; a router in front must pass {INSTANCES_PATH}"
        self._report.fail(self.name, problem, remedy)
        return []

    async def check_readiness(self) -> None:
        """Adds whether requests are served, and by pairs."""
        answer = await self._client.get("/readiness")
        found = _readiness(answer)
        if found is None:
            return  # no proxy: `read_instances` has added that
        if found.reason:
            self._report.fail("readiness", found.reason, "mend the instances below")
        elif found.degraded:
            self._report.warn("readiness", found.degraded, "mend the instances below")
        else:
            self._report.ok(
                "readiness", f"{found.prefill} prefill and {found.decode} decode instances"
            )

    async def check_metrics(self) -> None:
        """Adds what has cut answers since the proxy's start."""
        answer = await self._client.get("/metrics")
        if answer.status in (401, 403, 404):
            return
        try:
            page = MetricsPage(answer.body)
        except ValueError:
            self._report.warn(self.name, "its /metrics is no Prometheus text", remedies.RESTART)
            return
        examine_metrics(self._report, page)


def examine_metrics(report: Report, page: MetricsPage) -> None:
    """Adds which timeouts have cut answers, as the proxy has counted them."""
    if not page.has(REQUESTS) and not page.has("vllm_disagg_pairs"):
        return
    count = len(report.findings)
    if cut := page.total(REQUESTS, outcome="timeout"):
        report.warn(
            "timeouts",
            f"{cut:.0f} requests were ended by --request-timeout",
            "raise it, or limit max_tokens",
        )
    if late := page.total(FALLBACKS, reason="prefill_timeout"):
        report.warn(
            "timeouts",
            f"{late:.0f} prompts were not computed within --prefill-timeout",
            "raise it above the longest prompt's time with its queue",
        )
    total = page.total(REQUESTS)
    left = page.total(REQUESTS, outcome="cancelled")
    if left >= MIN_LEFT_REQUESTS and left > MAX_LEFT_SHARE * total:
        report.warn(
            "timeouts",
            f"the other side left before the end of {left:.0f} of {total:.0f} requests",
            "raise the timeouts of clients and of routers in front (nginx: proxy_read_timeout)",
        )
    if len(report.findings) == count:
        report.ok("timeouts", f"none has cut an answer, of {total:.0f} requests")


def examine_instance(report: Report, row: InstanceReport) -> None:
    """Adds the state of one instance, as its proxy reports it."""
    name = f"{row.role} {row.url}"
    count = len(report.findings)
    since = f" (since {row.state_since})"
    if row.why_not == DRAINED:
        body = f'{{"url": "{row.url}", "end": true}}'
        report.warn(name, "it is drained", f"end the drain: POST {body} to {DRAIN_PATH}")
    elif row.leaving:
        report.warn(name, f"it {row.why_not}", "name it again, or wait for its last request")
    elif row.why_not and "do not fit" not in row.why_not:
        report.fail(name, row.why_not + since, remedies.of_instance(row.why_not))
    if row.breaker != "closed" and "rests" not in row.why_not:
        failure = f", last: {row.last_failure.reason}" if row.last_failure else ""
        report.warn(name, f"its breaker is {row.breaker}{failure}", remedies.RESTART)
    if row.failure_policy not in ("", "recompute"):
        report.fail(
            name,
            f'kv_load_failure_policy is "{row.failure_policy}": a failed transfer fails the'
            " request",
            'set "kv_load_failure_policy": "recompute" in --kv-transfer-config',
        )
    if row.kv_cache_usage is not None and row.kv_cache_usage >= FULL_KV_USAGE:
        report.warn(
            name,
            f"its KV cache is full to {row.kv_cache_usage:.0%}",
            "add an instance of its role, or limit load (--max-concurrent-requests)",
        )
    _check_version(report, name, row.version)
    if len(report.findings) == count:
        report.ok(name, _describe(row))


def _check_version(report: Report, name: str, text: str) -> None:
    try:
        version = Version(text)
    except InvalidVersion:
        return  # not stated, or built from a working tree
    if not OLDEST_VLLM.release <= version.release[:2] <= NEWEST_VLLM.release:
        report.warn(
            name,
            f"vLLM {version} is not among the tested versions",
            f"install {OLDEST_VLLM} to {NEWEST_VLLM}",
        )


def _describe(row: InstanceReport) -> str:
    usage = "" if row.kv_cache_usage is None else f", KV use {row.kv_cache_usage:.0%}"
    version = f", vLLM {row.version}" if row.version else ""
    transports = f" ({', '.join(row.transports)})" if row.transports else ""
    pairs = f"pairs with {max(len(row.pairs_with), row.pair_count)}"  # older proxies count none
    connector = f"{row.connector}{transports}"
    return f"{row.model}{version}, {connector}, {pairs}, {row.in_flight} in flight{usage}"


def examine_fleet(report: Report, name: str, rows: list[InstanceReport]) -> None:
    """Adds which instances do not fit each other, and in what."""
    if not rows:
        return
    prefills = [row for row in rows if row.role == "prefill"]
    decodes = {row.url: row for row in rows if row.role == "decode"}
    if not prefills or not decodes:
        missing = "decode" if prefills else "prefill"
        report.fail(name, f"it has no {missing} instance", f"add one with --{missing} URL")
    for prefill in prefills:
        for misfit in prefill.misfits:
            # An instance that cannot take part has a line of its own.
            if not misfit.why.startswith(("http://", "https://")):
                pair = f"pair {prefill.url} + {misfit.url}"
                report.fail(pair, misfit.why, remedies.of_fact(misfit.why))
        for url in prefill.pairs_with:
            if url in decodes:
                _compare(report, prefill, decodes[url])


def _compare(report: Report, prefill: InstanceReport, decode: InstanceReport) -> None:
    """Adds differences of a pair that can work."""
    pair = f"pair {prefill.url} + {decode.url}"
    if prefill.version != decode.version:
        report.warn(
            pair,
            f"vLLM {prefill.version} at the prefill and {decode.version} at the decode instance",
            "finish the roll-out: answers were compared between equal versions only",
        )
    if prefill.model != decode.model:
        report.warn(
            pair,
            f"they serve one model as {prefill.model} and {decode.model}",
            "start both with the same --served-model-name: requests name one of them",
        )
    if prefill.transports != decode.transports:
        report.warn(
            pair,
            f"transports {', '.join(prefill.transports)} at P and"
            f" {', '.join(decode.transports)} at D",
            "set transport and encrypt_data alike, and install the same packages",
        )


def _has_rows(answer: ServerAnswer) -> bool:
    """Whether an answer is a list of objects: web servers answer any path with a page."""
    try:
        msgspec.json.decode(answer.body, type=list[dict[str, msgspec.Raw]])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _readiness(answer: ServerAnswer) -> Readiness | None:
    try:
        return msgspec.json.decode(answer.body, type=Readiness)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
