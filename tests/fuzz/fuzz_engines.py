"""Real vLLM engines and their proxy under hostile bytes at every port: `make fuzz-engines`.

    python tests/fuzz/fuzz_engines.py [--seconds SECONDS] [--flood FRAMES] [--seed SEED]

Strangers send bytes to every port of P, D and the proxy, the listener of P's TCP transport among
them, but none to those of vLLM's process groups (Gloo, on the loopback): by such bytes a plain vLLM
dies, too (docs/benchmarks/fuzzing.md). Members of the
fleet send messages of any content to the workers of P and D. In between, and beside them, good
requests go through the proxy; each answer must be that of a plain vLLM. The last line is JSON.
Fails after a death, a leak, another answer, or a median of good answers under fire above twice
that without. A flood at the end sends FRAMES more, as fast as they are taken, in windows of its
own; good answers beside it are judged in the same way.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from signal import Signals

from asking import ask, body, difference, tokens
from direct import probe
from engines import Engine, Process, Proxy, get, wait
from fuzz_campaign import PortTally
from fuzz_ports import HostileProcess, Watched, Windows
from hostile_peers import expect_frames, ports_to_fire_at
from listening import listening, tree

from vllm_disagg.fleet import keys
from vllm_disagg.fleet.keys import KEY_BYTES

WINDOW_SECONDS = 10.0
PROMPT_TOKENS = 300
LOG_LINES = 40
FLOOD_PAUSE_SECONDS = 2.0  # between two good answers
LAST_ANSWERS = 20  # when the fire is over
KEY = (b"k" * KEY_BYTES).hex()  # of the hostile members


class Fleet:
    """P, D, a proxy before them, and the plain vLLM whose answers are right."""

    def __init__(self, stack: ExitStack) -> None:
        """Starts all; `stack` ends them."""
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        key = self._folder / "key"
        key.write_text(KEY)
        key.chmod(0o600)
        self.prefill = Engine("P", self._folder, role="kv_producer", cpu="0")
        self.decode = Engine("D", self._folder, role="kv_consumer", cpu="1")
        self.plain = Engine("plain", self._folder, cpu="1")
        engines = (self.prefill, self.decode, self.plain)
        self._start(stack, *engines)
        self.proxy = Proxy(self._folder, self.prefill, self.decode)
        self._start(stack, self.proxy)
        self.key = keys.load(str(key))
        self._answers = 0

    @staticmethod
    def _start(stack: ExitStack, *processes: Process) -> None:
        for process in processes:
            stack.callback(process.stop)
            process.start()
        for process in processes:
            process.wait_ready()

    @property
    def under_fire(self) -> tuple[Process, ...]:
        """The processes whose ports are fired at."""
        return (self.prefill, self.decode, self.proxy)

    def good_answer(self) -> float:
        """Returns the seconds of a good answer, which must be that of plain vLLM."""
        self._answers += 1
        asked = body(tokens(PROMPT_TOKENS, f"good {self._answers}"))
        began = time.monotonic()
        ours = ask(self.proxy.url, asked)
        seconds = time.monotonic() - began
        found = difference(ours, ask(self.plain.url, asked))
        if found:
            raise AssertionError(f"good request {self._answers}: {found}\n{self._log_ends()}")
        return seconds

    def _log_ends(self) -> str:
        """Returns what the processes under fire have logged last that is no access."""
        found = []
        for server in self.under_fire:
            lines = server.log.read_text(errors="replace").splitlines()
            told = [line for line in lines if "HTTP/1.1" not in line]
            found += [f"{server.name}: runs: {server.runs()}", *told[-LOG_LINES:]]
        return "\n".join(found)

    def watched(self) -> Iterator[Watched]:
        """Yields each process of the fleet."""
        for server in self.under_fire:
            for pid in sorted(tree(_pid(server))):
                name = Path(f"/proc/{pid}/comm").read_text().strip()
                path = Path(f"/proc/{pid}")
                yield Watched(f"{server.name} {name}", pid, path.exists)

    def listening(self) -> dict[str, set[int]]:
        """Returns all ports that listen now, by process."""
        found: dict[str, set[int]] = {}
        for server in self.under_fire:
            for pid, held in listening(_pid(server)).items():
                name = f"{server.name} {Path(f'/proc/{pid}/comm').read_text().strip()}"
                found.setdefault(name, set()).update(port for _, port in held)
        return found

    def own_ports(self) -> set[int]:
        """Returns the ports of HTTP servers, and those that the workers of P and D tell."""
        told = {server.port for server in self.under_fire}
        for engine in (self.prefill, self.decode):
            for worker in probe(self.key, engine.url).workers:
                for endpoint in (worker.control, worker.data):
                    told.add(int(endpoint.rpartition(":")[2]))
        return told


def _pid(server: Process) -> int:
    assert server._process is not None
    return server._process.pid


def hostile_processes(
    fleet: Fleet, ports: Mapping[str, list[int]], seed: int, *how: str
) -> list[HostileProcess]:
    """Starts strangers at these ports, and members at the workers of P and of D."""
    print(f"fuzz: {json.dumps(ports)}", flush=True)
    listed = ",".join(str(port) for held in ports.values() for port in held)
    made = []
    for number, engine in enumerate((fleet.prefill, fleet.decode)):
        (worker,) = probe(fleet.key, engine.url).workers
        endpoints = f"{worker.control},{worker.data}"
        words = (listed, endpoints, worker.name, seed + number, *how)
        made.append(HostileProcess("hostile_peers.py", *words))
    return made


class AllHostile:
    """Several processes of hostile clients as one."""

    def __init__(self, parts: list[HostileProcess]) -> None:
        """Takes started processes."""
        self._parts = parts

    def signal(self, number: Signals) -> None:
        """Stops or continues all."""
        for part in self._parts:
            part.signal(number)

    @property
    def is_alive(self) -> bool:
        """Whether all go on."""
        return all(part.is_alive for part in self._parts)

    @property
    def frames(self) -> int:
        """How many were sent."""
        return sum(int(part.counts.get("frames", 0)) for part in self._parts)

    @property
    def by_port(self) -> dict[str, int]:
        """How many frames of strangers went to each port."""
        found: Counter[str] = Counter()
        for part in self._parts:
            found.update(part.counts.get("by_port", {}))
        return dict(found)

    def kill(self) -> None:
        """Ends all."""
        for part in self._parts:
            part.kill()


def fire(seconds: float, flood_frames: int, seed: int) -> PortTally:
    """Runs the campaign, and a flood of so many frames behind it."""
    tally = PortTally()
    with ExitStack() as stack:
        fleet = Fleet(stack)
        at_start = fleet.listening()
        for _ in range(3):
            fleet.good_answer()
        watched = list(fleet.watched())
        for one in watched:
            one.look(is_warm=False)
        received = fleet.decode.received
        ports = ports_to_fire_at(at_start, fleet.listening(), fleet.own_ports())
        hostile = AllHostile(hostile_processes(fleet, ports, seed))
        stack.callback(hostile.kill)
        windows = Windows(hostile, seconds, tally, WINDOW_SECONDS)
        while windows.go_on():
            is_under_fire = windows.is_under_fire
            tally.seconds[is_under_fire].append(fleet.good_answer())
            tally.good += 1
            for one in watched:
                one.look(is_warm=windows.is_warm)
        tally.frames = hostile.frames
        hostile.kill()
        print(f"fuzz: {tally.frames} frames were sent", flush=True)
        print(f"fuzz: by port, of strangers: {json.dumps(hostile.by_port)}", flush=True)
        expect_frames(hostile.by_port, {port for held in ports.values() for port in held})
        if flood_frames:
            _flood(fleet, ports, flood_frames, seed, tally)
        _judge(fleet, watched, received, tally)
    return tally


def _flood(
    fleet: Fleet, ports: Mapping[str, list[int]], frames: int, seed: int, tally: PortTally
) -> None:
    """Sends frames as fast as they are taken, in every other window; good answers are timed."""
    hostile = AllHostile(hostile_processes(fleet, ports, seed + 1000, "flood"))
    with ExitStack() as stack:
        stack.callback(hostile.kill)
        windows = Windows(hostile, math.inf, tally, WINDOW_SECONDS)
        while hostile.frames < frames:
            windows.go_on()
            tally.flood_seconds[windows.is_under_fire].append(fleet.good_answer())
            tally.good += 1
            print(f"fuzz: flood: {hostile.frames} of {frames} frames", flush=True)
            time.sleep(FLOOD_PAUSE_SECONDS)
        tally.frames += hostile.frames
    fleet.good_answer()


def _has_no_blocks(engine: Engine) -> bool:
    return engine.usage == 0


def _judge(fleet: Fleet, watched: list[Watched], received: int, tally: PortTally) -> None:
    """Adds what is left, and asks once more."""
    for one in watched:
        one.judge(tally)
    if tally.deaths:
        return
    for engine in (fleet.prefill, fleet.decode):
        wait(f"{engine.name} gives all its blocks back", partial(_has_no_blocks, engine), 60)
    wait("the proxy uses both engines", fleet.proxy.is_ready, 60)
    if fleet.decode.received <= received:
        tally.leaks.append("no KV was transferred under fire")
    received = fleet.decode.received
    for _ in range(LAST_ANSWERS):
        fleet.good_answer()
    if fleet.decode.received <= received:
        tally.leaks.append("no KV is transferred after the fire")
    for server in (fleet.prefill, fleet.decode):
        assert get(server.url, "/health", 10.0)[0] == 200


def main() -> int:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description="fires at the ports of real engines")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--flood", type=int, default=0, help="frames of a flood at the end")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    print(f"fuzz: seed {args.seed}", flush=True)
    tally = fire(args.seconds, args.flood, args.seed)
    failures = tally.failures()
    for text in failures:
        print(f"fuzz: {text}")
    calm, hot = (statistics.median(tally.seconds[is_hot]) for is_hot in (False, True))
    result = {
        "frames": tally.frames,
        "good": tally.good,
        "deaths": len(tally.deaths),
        "leaks": len(tally.leaks),
        "median_ms": round(1000 * calm),
        "median_under_fire_ms": round(1000 * hot),
        "slowdown": round(tally.slowdown, 2),
        "flood_slowdown": round(tally.flood_slowdown, 2),
    }
    print(json.dumps(result))
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
