"""Checks one instance from outside: its API server, its connector, its ports, its past failures."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec
from packaging.version import InvalidVersion, Version

from ..fleet import dialling
from ..fleet.conventions import NEWEST_VLLM, OLDEST_VLLM
from ..fleet.grants import REQUEST_KEY, VERSION, Grant, mint, new_transfer
from ..fleet.keys import FleetKey
from ..protocol.peers import EngineCard, EngineInfo, WorkerInfo
from ..protocol.reasons import Reason
from ..proxy.http.stall_timer import patient
from ..proxy.membership.engine_answers import NIXL_PREFILL, card_in, engine_in, params_in
from ..proxy.routing.fleet import Instance
from ..transports.machine_identity import machine_id
from . import remedies
from .findings import Report
from .metrics_page import MetricsPage
from .server_client import NoAnswer, ServerAnswer, ServerClient

PROBE_SECONDS = 10.0
CLOCK_SECONDS = 60.0  # validity of a probe's grant
CONNECT_SECONDS = 2.0
MAX_PORTS_AT_A_TIME = 64
MAX_PORTS = 256  # tried of one instance, which describes itself
PROMPT_TOKENS = 1000
# Each number is a token or more, in every vocabulary. No user's text.
PROMPT_TEXT = " ".join(str(number * 7919 % 1000) for number in range(PROMPT_TOKENS))
CONNECTOR_SERIES = "vllm:disagg_received_bytes_total"
FAILED_LOADS = "vllm:disagg_failed_loads_total"
# Reasons that neither a restart nor a client explains.
GRAVE_REASONS = (
    Reason.KV_MISMATCH,
    Reason.PROMPT_MISMATCH,
    Reason.INTERNAL_ERROR,
    Reason.CORRUPT,
)
OWN_URL = "give an engine's own URL"
KEY_NAMES = "VLLM_API_KEY or OPENAI_API_KEY"


_Page = TypeVar("_Page", bound=msgspec.Struct)


class _ModelRow(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _ModelPage(msgspec.Struct):
    data: list[_ModelRow]


class _VersionPage(msgspec.Struct):
    version: str


class _TokenList(msgspec.Struct):
    tokens: list[int]


class _SideChannel(msgspec.Struct):
    remote_host: str = ""
    remote_port: int = 0


@dataclass
class ExaminedInstance:
    """An instance with the facts that its checks have found."""

    instance: Instance
    client: ServerClient
    version: str = ""  # of vLLM
    max_model_tokens: int = 0  # 0 if it is not known
    tokens: tuple[int, ...] = ()  # of PROMPT_TEXT
    page: MetricsPage | None = None
    side_channel: str = ""  # HOST:PORT of NixlConnector
    is_ready: bool = False  # it can be part of a pair

    @property
    def name(self) -> str:
        """The name of its findings."""
        return f"{self.instance.role} {self.instance.url}"


class InstanceExam:
    """The checks of one instance, in the order in which each needs the one before."""

    def __init__(self, examined: ExaminedInstance, key: FleetKey, report: Report) -> None:
        """`report`: gets the findings of this instance."""
        self._examined = examined
        self._instance = examined.instance
        self._client = examined.client
        self._key = key
        self._report = report

    async def run(self) -> None:
        """Adds all findings; `is_ready` is set if the instance can be part of a pair."""
        try:
            if not (await self._check_health() and await self._check_api()):
                return
            await self._read_pages()
            if not await self._check_connector():
                return
        except NoAnswer as error:
            self._fail(str(error), remedies.RESTART)
            return
        engine = self._instance.engine
        if engine and not await self._check_engine(engine):
            return
        await self._tokenize()

    def _fail(self, problem: str, remedy: str) -> None:
        self._report.fail(self._examined.name, problem, remedy)

    def _warn(self, problem: str, remedy: str) -> None:
        self._report.warn(self._examined.name, problem, remedy)

    # The API server -------------------------------------------------------------------------------
    async def _check_health(self) -> bool:
        try:
            answer = await self._client.get("/health")
        except NoAnswer as error:
            self._fail(str(error), remedies.of_silence(str(error)))
            return False
        if answer.status != 200:
            problem = "no running engine"  # of vLLM, which answers 503 then
            remedy = remedies.RESTART
            if answer.is_of_idle_router:
                problem = "the router reaches no engine"
                remedy = OWN_URL
            elif answer.status < 500:
                problem = "no vLLM"
                remedy = OWN_URL
            self._fail(f"GET /health answered {answer.described_status}: {problem}", remedy)
            return False
        if answer.router:
            self._warn(
                f"a router is in front of it ({answer.router})",
                "give the engine's own URL: both legs of a request must reach one engine",
            )
        return True

    async def _check_api(self) -> bool:
        """Adds whether this is a vLLM whose key is known; learns its model."""
        answer = await self._client.get("/v1/models")
        if answer.status in (401, 403):
            self._fail(
                f"GET /v1/models answered {answer.status}: it needs a key, or another one",
                f"put its --api-key into the environment as {KEY_NAMES}",
            )
            return False
        models = _read(answer, _ModelPage)
        if models is None or not models.data:
            self._fail(f"GET /v1/models answered {answer.status}: no vLLM", remedies.START)
            return False
        own_page = await self._client.get("/disagg/instances")
        if own_page.status in (200, 401, 403):
            self._fail("this is a vllm-disagg proxy", "give its instances, or doctor --proxy URL")
            return False
        self._instance.model = models.data[0].id
        self._examined.max_model_tokens = models.data[0].max_model_len or 0
        return True

    async def _read_pages(self) -> None:
        """Reads the version and the metrics; adds what they show."""
        found = _read(await self._client.get("/version"), _VersionPage)
        if found:
            self._examined.version = found.version
            self._check_version(found.version)
        answer = await self._client.get("/metrics")
        try:
            self._examined.page = MetricsPage(answer.body)
        except ValueError:  # UnicodeDecodeError is one
            self._warn("its /metrics is no Prometheus text", "figures of transfers are not seen")
            return
        failed = self._examined.page.by_label(FAILED_LOADS, "reason")
        for reason in GRAVE_REASONS:
            if count := failed.get(reason.value):
                self._warn(
                    f"{count:.0f} loads of KV have failed since its start: {reason.value}",
                    remedies.of_load(reason.value),
                )

    def _check_version(self, text: str) -> None:
        try:
            version = Version(text)
        except InvalidVersion:
            return  # built from a working tree
        if version.release[:2] < OLDEST_VLLM.release:
            self._fail(f"vLLM {version} is too old", f"install {OLDEST_VLLM} to {NEWEST_VLLM}")
        elif version.release[:2] > NEWEST_VLLM.release:
            tested = f"the tested versions ({OLDEST_VLLM} to {NEWEST_VLLM})"
            self._warn(f"vLLM {version} is newer than {tested}", f"install {NEWEST_VLLM}")

    async def _tokenize(self) -> None:
        body = {"model": self._instance.model, "prompt": PROMPT_TEXT}
        try:
            answer = await self._client.post("/tokenize", body)
        except NoAnswer as error:
            self._fail(str(error), remedies.RESTART)
            return
        found = _read(answer, _TokenList)
        if found is None:
            self._fail(
                f"POST /tokenize answered {answer.status}: nothing can be proved",
                "start it with its tokenizer",
            )
            return
        self._examined.tokens = tuple(found.tokens)
        self._examined.is_ready = True

    # The connector --------------------------------------------------------------------------------
    async def _check_connector(self) -> bool:
        """Probes the engine as the proxy does; adds whether it can take part."""
        began = asyncio.get_running_loop().time()
        answer = await self._probe(None)
        card = card_in(answer)
        if card and card.rank == self._instance.rank:
            answer = await self._probe(card)
            second = card_in(answer)
            if second is None or second.incarnation != card.incarnation:
                self._fail(
                    "two requests reached two processes",
                    "give each engine's own URL, not that of a load balancer",
                )
                return False
        engine = engine_in(answer)
        if card:
            now = asyncio.get_running_loop().time()
            self._instance.set_clock(engine.clock if engine else card.clock, began, now)
        if card and engine is None:  # another data parallel rank has answered
            engine = EngineInfo(card.incarnation, self._instance.role, [], {}, card.rank)
        params = params_in(answer)
        models = self._instance.model
        self._instance.on_probe_answered(models, engine, nixl=params is not None)
        if self._instance.can_transfer:
            self._note_nixl(params)
            return True
        self._add_problem()
        return False

    async def _probe(self, card: EngineCard | None) -> bytes:
        """Returns a probe's answer; without an engine's card it has only the card."""
        incarnation = card.incarnation if card else ""
        until = card.clock + CLOCK_SECONDS if card else 0.0
        grant = Grant(VERSION, "probe", new_transfer(), incarnation, until=until)
        body = {
            "model": self._instance.model,
            "prompt": "probe",
            "max_tokens": 1,
            "temperature": 0,
            "kv_transfer_params": {**NIXL_PREFILL, REQUEST_KEY: mint(self._key, grant)},
        }
        answer = await self._client.post("/v1/completions", body, PROBE_SECONDS)
        if answer.status != 200:
            raise NoAnswer(f"POST /v1/completions answered {answer.status} to one token")
        return answer.body

    def _add_problem(self) -> None:
        """Adds why the instance cannot take part although it is up."""
        if self._instance.engine:
            self._fail(
                self._instance.unavailable_reason,
                remedies.of_instance(self._instance.unavailable_reason),
            )
            return
        page = self._examined.page
        if page is None or not page.has(CONNECTOR_SERIES):
            self._fail("its vLLM runs without DisaggConnector", remedies.KEY_OR_CONNECTOR)
        elif not self._key.is_set:
            self._fail("it has DisaggConnector, and no key was given", "give --key-file")
        else:
            self._fail(
                f"its DisaggConnector refuses the key {self._key.fingerprint}: it has another"
                " fleet key or version, or no transfers",
                remedies.KEY_OR_CONNECTOR,
            )

    def _note_nixl(self, params: dict[str, msgspec.Raw] | None) -> None:
        """Adds a line on NixlConnector, which shows little."""
        if self._instance.connector != "nixl" or params is None:
            return
        channel = msgspec.convert(_known(params), _SideChannel)
        self._examined.side_channel = f"{channel.remote_host}:{channel.remote_port}"
        self._report.ok(
            self._examined.name,
            f"{self._describe_server()}, NixlConnector, side channel"
            f" {self._examined.side_channel}; stock vLLM shows neither its kv_role, layout,"
            " transports nor kv_load_failure_policy",
        )

    def _describe_server(self) -> str:
        return f"{self._instance.model}, vLLM {self._examined.version or 'of unknown version'}"

    async def _check_engine(self, engine: EngineInfo) -> bool:
        """Adds the settings that its description shows, and whether its ports accept.

        Returns whether other engines may dial it.
        """
        if not engine.workers:
            self._fail("it describes no workers", remedies.RESTART)
            return False
        count = len(self._report.findings)
        if engine.failure_policy not in ("", "recompute"):
            self._fail(
                f'kv_load_failure_policy is "{engine.failure_policy}": a failed transfer fails'
                " the request",
                'set "kv_load_failure_policy": "recompute" in --kv-transfer-config',
            )
        if refusal := dialling.refusal(engine.workers, loopback_only=False):
            self._fail(f"no engine dials it: {refusal}", "set host in kv_connector_extra_config")
            return False
        closed = await _closed_ports(engine.workers)
        is_here = any(worker.host == machine_id() for worker in engine.workers)
        for port, problem in closed:
            remedy = "open it for the other instances"
            if is_here:
                self._fail(f"{port} accepts no connection: {problem}", remedy)
            else:
                self._warn(f"{port} accepts no connection from this machine: {problem}", remedy)
        if len(self._report.findings) > count:
            return True
        workers = f"{len(engine.workers)} worker{'s' if len(engine.workers) > 1 else ''}"
        ports = "control and data ports accept connections"
        if any(is_elsewhere(worker) for worker in engine.workers):
            ports = "its ports are on the loopback of another machine, and were not tried"
        self._report.ok(
            self._examined.name,
            f"{self._describe_server()}, DisaggConnector with {workers},"
            f" {', '.join(engine.transports)}; {ports}",
        )
        return True


def is_elsewhere(worker: WorkerInfo) -> bool:
    """Returns whether a worker's ports cannot be tried: the loopback of another machine."""
    host = urlsplit(worker.control).hostname or ""
    return dialling.is_loopback(host) and worker.host not in ("", machine_id())


async def _closed_ports(workers: list[WorkerInfo]) -> list[tuple[str, str]]:
    """Returns the control and data ports that accept no connection from here, and why."""
    limit = asyncio.Semaphore(MAX_PORTS_AT_A_TIME)

    async def find_problem(endpoint: str) -> str:
        parts = urlsplit(endpoint)
        async with limit:
            try:
                async with patient(CONNECT_SECONDS):
                    _, writer = await asyncio.open_connection(parts.hostname, parts.port)
            except TimeoutError:
                return f"no answer within {CONNECT_SECONDS:g} s"
            except OSError as error:
                return error.strerror or str(error)
        writer.transport.abort()
        return ""

    named: dict[str, str] = {}  # the kind of port by endpoint
    for worker in workers:
        if not is_elsewhere(worker):
            named[worker.control] = "control port"
            named[worker.data] = "data port"
    named = dict(list(named.items())[:MAX_PORTS])
    problems = await asyncio.gather(*(find_problem(endpoint) for endpoint in named))
    found: list[tuple[str, str]] = []
    for (endpoint, kind), problem in zip(named.items(), problems, strict=True):
        if problem:
            found.append((f"its {kind} {endpoint}", problem))
    return found


def _known(params: dict[str, msgspec.Raw]) -> dict[str, object]:
    """Returns the parameters of a side channel that have the expected type."""
    found: dict[str, object] = {}
    for name, kind in (("remote_host", str), ("remote_port", int)):
        value = msgspec.json.decode(params.get(name, b"null"))
        if type(value) is kind:  # a bool is an int
            found[name] = value
    return found


def _read(answer: ServerAnswer, kind: type[_Page]) -> _Page | None:
    """Returns the decoded answer; None for another status or form."""
    if answer.status != 200:
        return None
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
