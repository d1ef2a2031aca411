"""Engines and proxies that a benchmark starts and stops together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from processes import cpu_seconds, free_port

from vllm_disagg.launcher.machine import list_gpus

VLLM = str(Path(sys.executable).with_name("vllm"))
COMMAND = [sys.executable, "-m", "vllm_disagg.cli"]
KEY_FILE = "key"  # in the folder of the logs
KV_GIB = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "4")  # of each engine's KV cache
# Of each engine, where several start on one GPU at a time: what one measures as free is soon taken
# by another.
KV_BYTES_ON_ONE_GPU = 12 << 30


class StartFailed(SystemExit):
    """An engine or a proxy did not start; it ends a benchmark that does not catch it."""


@dataclass
class Stack:
    """Running processes; `front` is the address for clients."""

    name: str
    dtype: str
    gpu: bool = False
    transport: str = "auto"  # of ours
    front: str = ""
    # Of ours: proxies with other flags in front of the same engines, by name.
    other_fronts: dict[str, str] = field(default_factory=dict)
    decode: str = ""  # the address of D, if it is ours
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, log: Path, command: list[str], **env: str) -> None:
        with log.open("wb") as out:
            self.processes.append(
                subprocess.Popen(
                    command,
                    env={**os.environ, **env},
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
            )

    def engine(
        self, model: str, log: Path, core: int, config: dict[str, object] | None = None, **env: str
    ) -> str:
        """Starts an engine on that core, or on the GPU of that number if there are several."""
        port = free_port()
        command = [
            VLLM,
            "serve",
            model,
            "--served-model-name",
            "tiny",
            "--port",
            str(port),
            "--dtype",
            self.dtype,
        ]
        command += ["--max-model-len", "4096", "--no-enable-prefix-caching"]
        gpus = list_gpus() if self.gpu else ()
        if not self.gpu:
            command.append("--enforce-eager")  # on GPUs with CUDA graphs, as engines are served
        elif len(gpus) > 1:
            env["CUDA_VISIBLE_DEVICES"] = gpus[core % len(gpus)]
        else:
            command += ["--gpu-memory-utilization", "0.3"]
            command += ["--kv-cache-memory-bytes", str(KV_BYTES_ON_ONE_GPU)]
        if config:
            command += [
                "--kv-transfer-config",
                json.dumps({**config, "kv_load_failure_policy": "recompute"}),
            ]
        self.start(
            log, command, VLLM_CPU_OMP_THREADS_BIND=str(core), VLLM_CPU_KVCACHE_SPACE=KV_GIB, **env
        )
        return f"http://127.0.0.1:{port}"

    def wait(self, url: str, path: str) -> None:
        """Returns when the URL answers. Raises StartFailed: not in time, or a process has ended."""
        seconds = 900 if self.gpu else 180  # compiling, and capturing CUDA graphs
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if any(process.poll() is not None for process in self.processes):
                raise StartFailed(f"{self.name}: a process ended at start, see the logs")
            if (
                subprocess.run(
                    ["curl", "-sf", "-o", "/dev/null", url + path], check=False
                ).returncode
                == 0
            ):
                return
            time.sleep(0.5)
        raise StartFailed(f"{self.name}: {url} did not come up in {seconds:.0f} s")

    def cpu_seconds(self) -> float:
        return cpu_seconds({process.pid for process in self.processes})

    def stop(self) -> None:
        for sent in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes:
                try:
                    os.killpg(process.pid, sent)
                except ProcessLookupError:
                    continue
            time.sleep(3)


def start_pair(
    stack: Stack, model: str, logs: Path, settings: dict[str, object]
) -> tuple[str, str]:
    """Starts P on core 0 and D on core 1, with a new fleet key. Returns their URLs."""
    key = str(logs / KEY_FILE)
    subprocess.run([*COMMAND, "key", key], check=True)
    config = {
        "kv_connector": "DisaggConnector",
        "kv_connector_extra_config": {"key_file": key, **settings},
    }
    prefill = stack.engine(model, logs / "prefill.log", 0, {**config, "kv_role": "kv_producer"})
    decode = stack.engine(model, logs / "decode.log", 1, {**config, "kv_role": "kv_consumer"})
    return prefill, decode


def start_proxy(stack: Stack, logs: Path, prefill: str, decode: str, *more: str) -> str:
    """Starts a proxy of a pair that `start_pair` made. Returns its URL when it is ready."""
    port = str(free_port())
    flags = ["--port", port, "--key-file", str(logs / KEY_FILE), *more]
    instances = ["--prefill", prefill, "--decode", decode]
    stack.start(logs / f"proxy-{port}.log", [*COMMAND, "proxy", *flags, *instances])
    front = f"http://127.0.0.1:{port}"
    stack.wait(front, "/readiness?mode=pair")
    return front
