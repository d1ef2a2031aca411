"""Runs the fleet of deploy/ray with tiny engines of its own; the last line is JSON.

    PYTHONPATH=.:tests python tests/deploy/ray_fleet.py PYTHON [--keep FOLDER]

PYTHON has Ray Serve beside what this Python has. The fleet has one P and one D, whose answers must
be those of a vLLM without connector. Load then has Serve add a D; a D is killed under load, and
Serve must replace it. At the end no process may be left. `--keep` writes the logs there.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml
from listening import beyond_loopback, tree

from pods import ask
from replace_pods import MODEL, PROMPTS, ROOT, Load, body_of, disaggregated, text_in
from vllm_disagg.launcher.machine import free_ports

APP = ROOT / "deploy" / "ray"
CLIENTS = 16
LEAST_ANSWERS = 50
START_SECONDS = 900.0
CHANGE_SECONDS = 600.0  # for a replica to be added or replaced
STOP_SECONDS = 240.0
KILL_SECONDS = 10.0
# As on machines of tests: one thread for each engine, and no look-up in a hub.
ENGINE_ARGS = ["--served-model-name", "tiny", "--max-model-len", "2048", "--enforce-eager"]
ENVIRONMENT = {
    "PYTHONPATH": f"{ROOT}:{ROOT / 'tests/engine/steady'}",
    # vLLM's command, which the environment of Ray lacks.
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_CPU_CI_ENV": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class RayFleet:
    """The fleet as a process, and what its proxy states."""

    def __init__(self, python: str, folder: Path) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self.admin_key = secrets.token_hex(16)
        self.log = folder / "fleet.log"
        (folder / "fleet.key").write_text(secrets.token_hex(32))
        (folder / "fleet.key").chmod(0o600)
        settings = folder / "fleet.yaml"
        settings.write_text(yaml.safe_dump(settings_of(folder, port)))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [python, APP / "fleet.py", settings],
                env={**os.environ, **ENVIRONMENT, "DISAGG_ADMIN_KEY": self.admin_key},
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self.seen: dict[int, str] = {}  # start times of its processes, by id

    def wait_ready(self) -> None:
        """Waits until the command states that the fleet is ready."""
        self.wait("ready", lambda: f"ready: {self.url}" in self.log.read_text(), START_SECONDS)

    def wait(self, name: str, is_done: Callable[[], object], seconds: float) -> float:
        """Waits for a condition; returns the seconds. RuntimeError if it does not come true."""
        began = time.monotonic()
        while not is_done():
            if self.process.poll() is not None or time.monotonic() - began > seconds:
                raise RuntimeError(f"not {name}: {self.log.read_text()[-3000:]}")
            time.sleep(0.5)
        waited = time.monotonic() - began
        print(f"{name} after {waited:.0f} s", flush=True)
        return waited

    def usable(self, role: str) -> list[str]:
        """Returns the URLs of instances that the proxy can use."""
        found = json.loads(ask(self.url, "/disagg/instances", key=self.admin_key).body)
        return [each["url"] for each in found if each["role"] == role and each["usable"]]

    def look(self) -> None:
        """Remembers all processes that run now."""
        for pid in tree(self.process.pid):
            self.seen[pid] = started_at(pid)

    def left(self) -> list[str]:
        """Returns the commands of remembered processes that still run."""
        found = []
        for pid, started in self.seen.items():
            if started and started_at(pid) == started:
                found.append(command_of(pid))
        return found

    def stop(self) -> int:
        """Ends the command as Ctrl-C does; returns its exit status."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(STOP_SECONDS)

    def close(self) -> None:
        """Ends all that is left, after a failure."""
        self.look()
        if self.process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                self.stop()
        for pid, started in self.seen.items():
            if started and started_at(pid) == started:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        try:
            self.process.wait(KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def settings_of(folder: Path, port: int) -> dict[str, Any]:
    """Returns the settings: those of deploy/ray/fleet.yaml, for tiny engines on CPUs."""
    shipped = dict(yaml.safe_load((APP / "fleet.yaml").read_text()))
    # A D that runs one request at a time lets the others wait, by which it is scaled.
    decode = {"min_replicas": 1, "max_replicas": 2, "args": ["--max-num-seqs", "1"]}
    own = {
        "model": str(MODEL / "dense"),
        "key_file": str(folder / "fleet.key"),
        "port": port,
        "gpus": 0,
        "cpus": 0.5,
        "args": ENGINE_ARGS,
        "prefill": {**shipped["prefill"], "max_replicas": 1},
        "decode": decode,
    }
    return {**shipped, **own}


def started_at(pid: int) -> str:
    """Returns the start time of a living process; empty without one."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if state in "ZX" else fields[18]


def command_of(pid: int) -> str:
    """Returns the command line of a process; empty without one."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def pid_of(fleet: RayFleet, url: str) -> int:
    """Returns the process that serves a URL of the fleet: a `vllm serve`, or the proxy."""
    port = f"--port {url.rpartition(':')[2]} "
    return min(pid for pid in tree(fleet.process.pid) if port in command_of(pid))


def answered(url: str) -> float:
    """Returns how many requests an engine has completed; 0 if it cannot be asked."""
    try:
        page = ask(url, "/metrics").body.decode()
    except OSError:
        return 0.0
    lines = [line for line in page.splitlines() if line.startswith("vllm:request_success_total{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


@contextmanager
def plain_engine(folder: Path) -> Iterator[str]:
    """Starts a vLLM without connector, and yields its URL once it can serve."""
    (port,) = free_ports(1)
    command = [str(Path(sys.executable).parent / "vllm"), "serve", str(MODEL / "dense")]
    with (folder / "plain.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port), *ENGINE_ARGS],
            env={**os.environ, **ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "0"},
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        until = time.monotonic() + START_SECONDS
        while not listens(port):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"plain vLLM: {(folder / 'plain.log').read_text()[-2000:]}")
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def listens(port: int) -> bool:
    """Returns whether a process listens at a port of the loopback."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def right_answers(folder: Path) -> dict[str, str]:
    """Returns the answers of a plain vLLM, by prompt."""
    with plain_engine(folder) as url, ThreadPoolExecutor(8) as threads:
        answers = threads.map(lambda p: ask(url, "/v1/completions", body_of(p)).body, PROMPTS)
        return {prompt: text_in(body) for prompt, body in zip(PROMPTS, answers, strict=True)}


def prove(python: str, folder: Path) -> dict[str, object]:
    """Runs the whole; returns the counts."""
    began = time.monotonic()
    fleet = RayFleet(python, folder)
    try:
        expected = right_answers(folder)  # while the fleet starts
        fleet.wait_ready()
        found = under_load(fleet, expected)
        status = fleet.stop()
        # A guard ends what has outlived its replica.
        until = time.monotonic() + 30
        while fleet.left() and time.monotonic() < until:
            time.sleep(0.5)
        left = fleet.left()
    finally:
        fleet.close()
    print(*left, sep="\n")
    seconds = round(time.monotonic() - began)
    return {**found, "status": status, "left": len(left), "seconds": seconds}


def under_load(fleet: RayFleet, expected: dict[str, str]) -> dict[str, object]:
    """Compares answers while Serve adds a D, and while one is killed and replaced."""
    (first,) = fleet.usable("decode")
    load = Load(fleet.url, [""], expected, CLIENTS)
    try:
        fleet.wait("50 answers", lambda: load.requests >= LEAST_ANSWERS, CHANGE_SECONDS)
        before = dict(load.outcomes)
        added = fleet.wait("scaled", lambda: len(fleet.usable("decode")) == 2, CHANGE_SECONDS)
        second = next(url for url in fleet.usable("decode") if url != first)
        fleet.wait("used", lambda: answered(second) > 2, CHANGE_SECONDS)
        fleet.look()
        os.killpg(pid_of(fleet, first), signal.SIGKILL)

        def is_replaced() -> bool:
            urls = fleet.usable("decode")
            return len(urls) == 2 and first not in urls

        replaced = fleet.wait("replaced", is_replaced, CHANGE_SECONDS)
        third = next(url for url in fleet.usable("decode") if url != second)
        fleet.wait("used again", lambda: answered(third) > 2, CHANGE_SECONDS)
    finally:
        load.stop()
    fleet.look()
    print(*load.problems[:5], sep="\n")
    urls = [fleet.url, *fleet.usable("prefill"), *fleet.usable("decode")]
    page = ask(fleet.url, "/metrics").body.decode()
    return {
        "exact_before_faults": before.get("exact", 0),
        "requests": load.requests,
        **{name: load.outcomes[name] for name in ("exact", "clean", "lost", "wrong")},
        "disaggregated": disaggregated(page),
        "added_after_s": round(added),
        "replaced_after_s": round(replaced),
        "exposed_ports": sum(len(beyond_loopback(pid_of(fleet, url))) for url in urls),
    }


def is_good(found: dict[str, Any]) -> bool:
    """Returns whether the counts are those of a sound fleet."""
    nothing = ("lost", "wrong", "left", "status", "exposed_ports")
    is_split = found["disaggregated"] > found["requests"] / 2
    return (
        found["exact_before_faults"] >= LEAST_ANSWERS
        and is_split
        and not any(found[name] for name in nothing)
    )


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("python", help="Python with Ray Serve")
    parser.add_argument("--keep", type=Path, help="folder for the logs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="vllm-disagg-ray-") as name:
        folder = args.keep or Path(name)
        folder.mkdir(exist_ok=True)
        found = prove(args.python, folder)
    print(json.dumps(found))
    sys.exit(not is_good(found))


if __name__ == "__main__":
    main()
