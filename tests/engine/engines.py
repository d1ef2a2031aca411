"""Runs real vLLM engines and a real proxy as processes: start, wait, inspect, freeze, kill."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vllm_disagg.fleet import keys

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
FLAGS = [
    "--enforce-eager",
    "--max-model-len",
    "2048",
    "--max-num-batched-tokens",
    "256",
    "--served-model-name",
    "tiny",
]
# Whether answers in bfloat16 are compared. Without instructions for it a plain vLLM itself gives
# other tokens to a request that runs beside others: on an AMD EPYC of 2019 to 1 or 2 of 16.
_HAS_BFLOAT16 = "avx512_bf16" in Path("/proc/cpuinfo").read_text()
# The dtype of all engines, unless a test chooses one; empty for the model's, which is bfloat16.
DTYPE = os.environ.get("ENGINE_DTYPE", "" if _HAS_BFLOAT16 else "float32")
FLAGS += ["--dtype", DTYPE] if DTYPE else []
ELEMENT_BYTES = 4 if DTYPE == "float32" else 2
# Of each worker, which writes to all of it; a dozen workers run at a time.
KV_CACHE_BYTES = 256 << 20
STEADY = Path(__file__).parent / "steady"  # on the PYTHONPATH of all engines
FLAGS += ["--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
TOOLS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
BLOCK, CHUNK, LIMIT = 128, 256, 2048  # tokens: of a KV block on CPU, of a step, of a request
# These limits end what hangs; they are no claims, and hold on a crowded machine too.
START = 600.0  # seconds; of a start
WAIT_SECONDS = 120.0  # until a condition holds that must come
PAGE_SECONDS = 60.0  # of an answer without a forward pass, such as the metrics
# Blocks of requests that have ended: P's lease of 10 s with a margin, and no other time limit.
HELD_SECONDS = 30.0
ADMIN = "root"  # the proxies' admin key


@dataclass(frozen=True)
class EngineRunner:
    """The way engines compute: its environment, and the lines of their logs that prove it."""

    env: dict[str, str]
    lines: tuple[str, ...] = ()  # of every engine
    connector_lines: tuple[str, ...] = ()  # of engines with our connector
    transport: str = ""  # of engines with our connector, unless a test chooses one
    flags: tuple[str, ...] = ()  # of every engine
    slowness: float = 1.0  # how much longer than usual the tests wait

    @property
    def is_interpreted(self) -> bool:
        """Whether vLLM's kernels run in Triton's interpreter."""
        return "TRITON_INTERPRET" in self.env

    @property
    def settings(self) -> dict[str, object]:
        """The settings of engines with our connector, unless a test chooses others."""
        found: dict[str, object] = {}
        if self.is_interpreted:
            found["peer_timeout"] = PEER_TIMEOUT_SECONDS
        if self.transport:
            found["transport"] = self.transport
        return found

    @property
    def patient_env(self) -> dict[str, str]:
        """The environment of an engine that takes no delay of a crowded machine for a failure."""
        return {"ENGINE_CHANGES": self.env.get("ENGINE_CHANGES", "patient")}


_V2_ENV = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
SLOWNESS = 6.0  # of Triton's interpreter
PEER_TIMEOUT_SECONDS = 10.0  # of patient engines, which share two cores with much else
_V2_CHANGES = "v2_runner async_steps patient"
_V2_LINES = ("Using V2 Model Runner", "asynchronous scheduling is True")
_DEVICE_LINES = (
    "the connector takes its path for GPUs",
    "are read and written in GPU memory as vLLM does",  # the proof at the start has passed
)
# By the value of ENGINE_RUNNER in the environment of these tests; the changes are in `steady`.
RUNNERS = {
    "": EngineRunner({}),
    "v2": EngineRunner({**_V2_ENV, "ENGINE_CHANGES": _V2_CHANGES}, _V2_LINES, slowness=SLOWNESS),
    "v2-device": EngineRunner(
        {**_V2_ENV, "ENGINE_CHANGES": f"{_V2_CHANGES} device_path"},
        _V2_LINES,
        _DEVICE_LINES,
        "zmq",  # the last choice on a GPU, through host memory
        slowness=SLOWNESS,
    ),
    "v2-nixl": EngineRunner(
        {**_V2_ENV, "ENGINE_CHANGES": f"{_V2_CHANGES} device_path host_nixl"},
        _V2_LINES,
        _DEVICE_LINES,
        "nixl",  # the first choice on a GPU
        slowness=SLOWNESS,
    ),
    # On one GPU, which all engines share. Needs ENGINE_DTYPE=bfloat16. Answers by FlashAttention 3
    # with heads of 32 depend on their batch (kv_connectors/gpu/batch_variance.py); with others give
    # ENGINE_MODEL=wide ENGINE_FLAGS="--attention-backend FLASH_ATTN".
    "gpu": EngineRunner(
        {"VLLM_BATCH_INVARIANT": "1"},  # else a plain vLLM's answers depend on its batches
        ("Using V2 Model Runner",),
        ("are read and written in GPU memory as vLLM does",),
        os.environ.get("ENGINE_TRANSPORT", "nixl"),
        (
            *("--block-size", str(BLOCK), "--gpu-memory-utilization", "0.05"),
            *("--attention-backend", "TRITON_ATTN"),
        ),
    ),
}
RUNNER = RUNNERS[os.environ.get("ENGINE_RUNNER", "")]
# Of engines for which a test names no model: a kind of scripts/tiny_model.py.
KIND = os.environ.get("ENGINE_MODEL", "dense")
MODEL = ROOT / ".cache/models" / KIND
MORE_FLAGS = shlex.split(os.environ.get("ENGINE_FLAGS", ""))  # of all engines
_PDEATHSIG = 1
_given_ports: set[int] = set()  # by `free_port`


def free_port() -> int:
    """Returns a free port outside the kernel's range for automatic ports, each port once.

    An engine binds its port half a minute later, so neither the kernel nor this may give it away.
    """
    for port in random.sample(range(20000, 29000), 100):  # torch and vLLM use 29500 and 29550
        if port in _given_ports:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given_ports.add(port)
        return port
    raise RuntimeError("100 ports are all in use")


def wait(
    what: str, done: Callable[[], bool], seconds: float = WAIT_SECONDS, every: float = 0.1
) -> None:
    """Returns as soon as `done` returns true; fails if that takes longer than these seconds.

    Give `seconds` only where the time is what the test claims.
    """
    seconds *= RUNNER.slowness
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(every)


def _command_line(pid: int) -> str:
    """Returns the command line of a process, which is its title; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGTERM)


class Process:
    """A server in a separate process group.

    Start it from the main thread: the process dies with the thread that started it.
    """

    def __init__(
        self, name: str, command: list[str], folder: Path, port: int, env: dict[str, str]
    ) -> None:
        self.name, self.command, self.env = name, command, env
        self.port = port
        self.log = folder / f"{name}.log"
        self.output = self.log  # where it writes; perhaps a pipe whose reader writes `log`
        self.began = 0.0
        self.patience = START
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ending = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The id of its first process; 0 if it is not started."""
        return self._process.pid if self._process else 0

    def start(self) -> None:
        self.began = time.monotonic()
        self._is_ending = False
        with self.output.open("ab") as log:
            self._process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self.env},
                cwd=self.log.parent,
                # not a session, which would share a core as one party (launcher/processes.py)
                process_group=0,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - no threads run yet that could hold a lock
            )

    def wait_ready(self) -> float:
        """Waits until the server is ready; returns the seconds since its start."""
        while not self.is_ready():
            died = self._process is None or self._process.poll() is not None
            if died or time.monotonic() - self.began > self.patience:
                state = "ended" if died else "is not ready"
                raise RuntimeError(f"{self.name} {state}; the end of its log:\n{self.tail()}")
            time.sleep(0.2)
        return time.monotonic() - self.began

    def is_ready(self) -> bool:
        try:
            return get(self.url, "/health", 2.0)[0] == 200
        except (OSError, http.client.HTTPException):
            return False

    def is_alive(self) -> bool:
        return self.runs() and self.is_ready()

    def expect_alive(self) -> None:
        """Fails if the process has ended, or does not become ready."""
        wait(f"{self.name} is ready", lambda: self.is_ready() or not self.runs())
        assert self.runs(), f"{self.name} died:\n{self.tail()}"

    def runs(self) -> bool:
        """Returns whether the process exists, ready or not."""
        return self._process is not None and self._process.poll() is None

    def signal(self, number: int) -> None:
        if self._process is not None:
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                pass

    def child(self, title: str) -> int:
        """Returns the process id of a descendant, by a part of its title."""
        assert self._process is not None
        parents = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended
                parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        ours = [self._process.pid]
        for parent in ours:
            ours += [pid for pid, its in parents.items() if its == parent]
        return next(pid for pid in ours if title in _command_line(pid))

    def lower(self, nice: int) -> None:
        """Lowers the priority, so that processes started later get the core.

        Idle workers of vLLM spin, and an engine that starts needs the core.
        """
        if self._process is not None:
            os.setpriority(os.PRIO_PGRP, self._process.pid, nice)

    def begin_stop(self) -> None:
        """Sends SIGTERM, so that several processes end at the same time; `stop` must follow."""
        if self._process is None or self._is_ending:
            return
        self.signal(signal.SIGCONT)
        self._process.terminate()
        self._is_ending = True

    def stop(self, gently: float = 8.0) -> None:
        """Ends the process and all its children; `gently`: seconds before it is killed."""
        if self._process is None:
            return
        self.signal(signal.SIGCONT)
        if gently:
            self.begin_stop()
            try:
                self._process.wait(gently)
            except subprocess.TimeoutExpired:
                pass
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._process = None

    def tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])


class Engine(Process):
    """`vllm serve`: plain for an empty `role`, else with our connector."""

    def __init__(
        self,
        name: str,
        folder: Path,
        *flags: str,
        role: str = "",
        cpu: str = "0",
        env: dict[str, str] | None = None,
        settings: dict[str, object] | None = None,
        register: str = "",
        model: str = "",
        home: Path = BIN,
        ranks: int = 0,
    ) -> None:
        """Prepares the command.

        `home`: the folder of `vllm`, perhaps of another environment. `ranks`: data parallel ranks.
        """
        port = free_port()
        self.ranks = ranks
        self.role = role
        if ranks:
            flags = (*flags, "--data-parallel-size", str(ranks))
        if register:
            settings = {
                "register": register,
                "advertise": f"http://127.0.0.1:{port}",
                **(settings or {}),
            }
        command = [
            str(home / "vllm"),
            "serve",
            model or str(MODEL),
            "--host",
            "127.0.0.1",
        ]
        command += [
            "--port",
            str(port),
            *FLAGS,
            *RUNNER.flags,
            *MORE_FLAGS,
            *([] if model else TOOLS),
            "--chat-template",
            CHAT,
            *flags,
        ]
        if role:
            settings = {**RUNNER.settings, **(settings or {})}
            transfer = {
                "kv_connector": "DisaggConnector",
                "kv_role": role,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"key_file": str(folder / "key"), **settings},
            }
            command += ["--kv-transfer-config", json.dumps(transfer)]
        fixed = {
            "VLLM_CPU_OMP_THREADS_BIND": cpu,
            "VLLM_CPU_CI_ENV": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **RUNNER.env,
        }
        # Other environments run the same code of ours.
        inherited = os.environ.get("PYTHONPATH", "") if home == BIN else str(ROOT)
        fixed.update(env or {})
        paths = [fixed.get("PYTHONPATH", ""), str(STEADY), inherited]
        fixed["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        super().__init__(name, command, folder, port, fixed)

    def wait_ready(self) -> float:
        """Waits until the engine is ready, and fails if it computes otherwise than `RUNNER`."""
        seconds = super().wait_ready()
        log = self.log.read_text(errors="replace")
        for line in RUNNER.lines + (RUNNER.connector_lines if self.role else ()):
            assert line in log, f"{self.name} runs without {line!r}, which ENGINE_RUNNER demands"
        return seconds

    @property
    def urls(self) -> list[str]:
        """The instances of this engine, one for each data parallel rank."""
        return [f"{self.url}@{rank}" for rank in range(self.ranks)] or [self.url]

    def metric(self, name: str, label: str = "") -> float:
        """Returns the sum of a metric over all its lines, or those with a label; 0 without any."""
        text = get(self.url, "/metrics", PAGE_SECONDS)[1]
        found = re.findall(rf"^{re.escape(name)}(\{{.*\}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for labels, value in found if label in labels)

    @property
    def usage(self) -> float:
        return self.metric("vllm:kv_cache_usage_perc")

    def wait_free(self) -> None:
        """Waits until no request holds KV blocks."""
        wait(f"{self.name} gives all its blocks back", lambda: self.usage == 0, HELD_SECONDS)

    @property
    def received(self) -> int:
        """KV bytes that arrived by transfers.

        They are counted before the answer of the request that needs them.
        """
        return int(self.metric("vllm:disagg_received_bytes_total"))


def beside(other: dict[str, object], role: str, key: str) -> list[str]:
    """Returns the flags of an engine with another connector beside ours, in a MultiConnector."""
    ours = {
        "kv_connector": "DisaggConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"key_file": key},
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ours, {**other, "kv_role": "kv_both"}]},
    }
    return ["--kv-transfer-config", json.dumps(both)]


class Proxy(Process):
    """The proxy, as users start it unless it is patient."""

    def __init__(
        self,
        folder: Path,
        prefill: Engine | list[Engine],
        decode: Engine | list[Engine],
        *flags: str,
        name: str = "proxy",
        port: int = 0,
        is_patient: bool = RUNNER.is_interpreted,
    ) -> None:
        """Prepares the command.

        `is_patient`: it takes no delay of a crowded machine for the death of an engine.
        """
        port = port or free_port()
        command = [
            sys.executable,
            "-m",
            "vllm_disagg.cli",
            "proxy",
            "--port",
            str(port),
            "--key-file",
            str(folder / "key"),
            *flags,
        ]
        for flag, engines in (("--prefill", prefill), ("--decode", decode)):
            for engine in engines if isinstance(engines, list) else [engines]:
                for url in engine.urls:
                    command += [flag, url]
        env = {keys.ADMIN_KEY: ADMIN}
        if is_patient:
            paths = filter(None, [str(STEADY), os.environ.get("PYTHONPATH", "")])
            env |= {"PYTHONPATH": os.pathsep.join(paths), "ENGINE_CHANGES": "patient"}
        super().__init__(name, command, folder, port, env)

    def members(self) -> dict[str, bool]:
        """Returns by URL whether each instance can be used."""
        return {
            row["url"]: row["usable"]
            for row in json.loads(get(self.url, "/disagg/instances", PAGE_SECONDS, ADMIN)[1])
        }

    def is_drained(self, url: str) -> bool:
        """Returns whether an instance has left, or is drained and has no request."""
        rows = json.loads(get(self.url, "/disagg/instances", PAGE_SECONDS, ADMIN)[1])
        found = [row for row in rows if row["url"] == url]
        return all(row["leaving"] and not row["in_flight"] for row in found)

    def change(self, method: str, path: str, **fields: str) -> None:
        """Changes the fleet by the admin API."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PAGE_SECONDS)
        try:
            headers = {"content-type": "application/json", "authorization": f"Bearer {ADMIN}"}
            connection.request(method, path, json.dumps(fields), headers)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
        finally:
            connection.close()

    def is_ready(self) -> bool:
        try:
            return get(self.url, "/readiness?mode=pair", 2.0)[0] == 200
        except (OSError, http.client.HTTPException):
            return False


def get(url: str, path: str, timeout: float, key: str = "") -> tuple[int, str]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=timeout)
    try:
        connection.request("GET", path, headers={"authorization": f"Bearer {key}"} if key else {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()
