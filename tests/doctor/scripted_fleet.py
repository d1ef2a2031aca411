"""Scripted instances for the doctor: ports, metrics and answers like those of real engines."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import msgspec
import uvloop

from proxy_world import Call, EngineRole, ScriptedEngine, hold_port
from vllm_disagg.doctor import main
from vllm_disagg.doctor.fleet_checks import FleetReport
from vllm_disagg.kv.layout import uniform
from vllm_disagg.protocol.peers import EngineInfo, WorkerInfo
from vllm_disagg.transports.machine_identity import machine_id

KEY_TEXT = (b"k" * 32).hex()  # of proxy_world.KEY
HOLDS = uniform(layers=2, block_size=16, block_bytes=[64])
KV_BYTES = 100_000  # of a transfer
TEST_SECONDS = 240.0  # only ends a test that hangs
T = TypeVar("T")


class DoctorEngine(ScriptedEngine):
    """An engine that a doctor examines; each attribute is a fault that a test may plant."""

    def __init__(self, name: str, role: EngineRole) -> None:
        super().__init__(name, role, answer_exactly)
        self.version = "0.32.0"
        self.release = ""
        self.failure_policy = "recompute"
        self.two_way = True
        self.carriers = ["tcp"]
        self.host = machine_id()
        self.address = "127.0.0.1"
        self.api_key = ""
        self.server_field = "uvicorn"
        self.tokens_added = 0  # other tokens than those of the fleet
        self.failure = ""  # reason of each load's failure
        self.transfers = True
        self.is_wrong = False  # in answers by transfers
        self.is_random = False  # in answers of its own
        self.has_metrics = True
        self.side_channel = ("10.0.0.1", 5600)
        self.counters: defaultdict[str, float] = defaultdict(float)
        self.salts: set[str] = set()  # under which its prefix cache has the prompt
        self.prefilled: asyncio.Event  # of the fleet's last prefill leg
        self._ports: list[asyncio.Server] = []
        self.endpoints = ["", ""]

    async def start(self) -> None:
        await super().start()
        for at in range(2):
            port = hold_port(self)
            server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", port)
            self._ports.append(server)
            self.endpoints[at] = f"tcp://{{}}:{port}"

    async def stop(self) -> None:
        await super().stop()
        for at in range(2):
            self.close_port(at)

    def close_port(self, at: int) -> None:
        """Closes the control port (0) or the data port (1)."""
        self._ports[at].close()

    def facts(self, rank: int | None = None) -> dict[str, Any]:
        control, data = (endpoint.format(self.address) for endpoint in self.endpoints)
        name = f"{self.name}-w"
        worker = WorkerInfo(name, control, data, "", self.host, self.carriers, HOLDS)
        engine = EngineInfo(self.incarnation, self.role, [worker], self.layout, rank, self.two_way)
        engine = msgspec.structs.replace(
            engine,
            version=self.version,
            release=self.release,
            failure_policy=self.failure_policy,
        )
        return msgspec.to_builtins(engine) | {"clock": self.clock}

    def nixl_params(self) -> dict[str, Any]:
        """Returns the parameters by which NixlConnector's D reads from this engine."""
        host, port = self.side_channel
        return {
            "remote_engine_id": self.incarnation,
            "remote_block_ids": [[1]],
            "do_remote_prefill": True,
            "remote_host": host,
            "remote_port": port,
        }

    async def _probed(self, call: Call) -> None:
        if self.nixl:
            await call.json({"choices": [], "kv_transfer_params": self.nixl_params()})
        else:
            await super()._probed(call)

    def count_load(self) -> None:
        """Counts a transfer to this engine."""
        if self.failure:
            self.counters[f'disagg_failed_loads_total{{reason="{self.failure}"}}'] += 1
        elif self.nixl:
            self.counters["nixl_bytes_transferred_sum"] += KV_BYTES
            self.counters["nixl_xfer_time_seconds_sum"] += 0.01
        elif self.transfers:
            self.counters["disagg_received_bytes_total"] += KV_BYTES
            self.counters["disagg_overlapped_bytes_total"] += KV_BYTES * 0.75
            self.counters['disagg_received_wire_bytes_total{transport="tcp"}'] += KV_BYTES
            self.counters["disagg_load_seconds_sum"] += 0.01

    def _metrics(self) -> str:
        if not self.has_metrics:
            return "vllm:other 7\n"
        series = dict(self.counters)
        if not self.nixl:
            series.setdefault("disagg_received_bytes_total", 0.0)
        return "".join(f"vllm:{name} {value}\n" for name, value in series.items())

    async def _route(self, call: Call) -> None:
        given = call.headers.get("authorization", "")
        if self.frozen or (call.method == "POST" and call.leg == "probe"):
            await super()._route(call)
        elif self.api_key and call.path.startswith("/v1") and given != f"bearer {self.api_key}":
            await call.json({"error": "Unauthorized"}, 401)
        elif call.path == "/health":
            await call.json({}, self.health, f"server: {self.server_field}\r\n")
        elif call.path == "/v1/models":
            models = [{"id": name, "max_model_len": 4096} for name in self.models]
            await call.json({"data": models})
        elif call.path == "/version":
            await call.json({"version": self.version})
        elif call.path == "/tokenize":
            await call.json({"tokens": list(range(1200 + self.tokens_added))})
        elif call.path.startswith("/disagg"):
            await call.json({"detail": "Not Found"}, 404)
        else:
            await super()._route(call)


async def answer_exactly(call: Call) -> None:
    """Answers as a healthy engine, unless a fault is planted."""
    engine = call.engine
    assert isinstance(engine, DoctorEngine)
    params = call.body.get("kv_transfer_params") or {}
    if call.leg == "prefill" or params.get("do_remote_decode"):
        await answer_prefill(call, engine)
        return
    tokens = [sum(call.body["prompt"]) % 1000 + n for n in range(call.body["max_tokens"])]
    if call.leg == "decode" or params.get("remote_engine_id"):
        await engine.prefilled.wait()
        engine.prefilled.clear()
        if call.body["cache_salt"] not in engine.salts:
            engine.count_load()
        tokens[-1] += engine.is_wrong
    elif engine.is_random:
        tokens[-1] += 10 * len(engine.calls)
    engine.salts.add(call.body["cache_salt"])
    await call.json({"choices": [{"text": "text", "token_ids": tokens}]})


async def answer_prefill(call: Call, engine: DoctorEngine) -> None:
    params: dict[str, Any] = {"disagg_engine": engine.facts(call.rank)}
    if engine.nixl:
        params = engine.nixl_params()
    if call.grant and call.grant.back and engine.transfers:
        engine.counters["disagg_reused_bytes_total"] += KV_BYTES
    await call.json({"choices": [{"text": "x"}], "kv_transfer_params": params})
    engine.prefilled.set()


class ScriptedFleet:
    """Two prefill and two decode instances."""

    def __init__(self) -> None:
        self.p = DoctorEngine("p0", "prefill")
        self.p1 = DoctorEngine("p1", "prefill")
        self.d = DoctorEngine("d0", "decode")
        self.d1 = DoctorEngine("d1", "decode")
        prefilled = asyncio.Event()
        for engine in self.engines:
            engine.prefilled = prefilled

    @property
    def engines(self) -> list[DoctorEngine]:
        return [self.p, self.p1, self.d, self.d1]

    def flags(self) -> list[str]:
        """Returns the flags that name the instances."""
        found = []
        for engine in self.engines:
            found += [f"--{'prefill' if engine in (self.p, self.p1) else 'decode'}", engine.url]
        return found


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[ScriptedFleet]:
    fleet = ScriptedFleet()
    for engine in fleet.engines:
        await engine.start()
    try:
        yield fleet
    finally:
        for engine in fleet.engines:
            await engine.stop()


async def report_on(*words: str) -> FleetReport:
    """Returns the doctor's report for a command line."""
    parser = argparse.ArgumentParser()
    main.add_arguments(parser)
    return await main.examine_servers(parser.parse_args(list(words)))


def run(test: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on a loop of its own."""

    async def limited() -> T:
        async with asyncio.timeout(TEST_SECONDS):
            return await test

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(limited())
