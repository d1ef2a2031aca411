"""Starts the engines of the tests once, for all modules, and kills them in any case at the end.

`main` is a prefill engine, a decode engine, a plain vLLM, whose answers are the reference, and the
proxy. Modules that need other engines start their own; they run last, one after the other, to save
memory.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from asking import Record, ask, at_once, body, expect_same, open_clients, tally, tokens
from direct import Legs
from engines import (
    ADMIN,
    KIND,
    MODEL,
    PAGE_SECONDS,
    PEER_TIMEOUT_SECONDS,
    ROOT,
    RUNNER,
    Engine,
    Process,
    Proxy,
    free_port,
    get,
    wait,
)

from vllm_disagg.fleet import keys

STALL_SECONDS = 12.0  # longer than any step here; the default is longer than any step at all
ORDER = [
    "test_exact",
    "test_prefixes",
    "test_api",
    "test_grants",
    "test_handovers",
    "test_cancel",
    "test_sensitive",
    "test_preempt",
]
ORDER += ["test_bench", "test_live"]
LAST = [
    "test_routers",
    "test_turns",
    "test_deaths",
    "test_tp2",
    "test_topologies",
    "test_ranks",
    "test_versions",
    "test_modes",
]
LAST += [
    "test_offloading",
    "test_models",
    "test_deadlock",
    "test_images",
    "test_audio",
    "test_video",
    "test_lora",
    "test_transports",
]
LAST += ["test_compress", "test_operators", "test_roles", "test_two_machines"]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    mine = {id(item) for item in ours}
    for item in ours:
        item.add_marker(pytest.mark.engine)
        # Real processes: a descriptor left open must not cost the minutes that an answer took.
        item.add_marker(pytest.mark.filterwarnings("default"))
    order = {name: at for at, name in enumerate([*ORDER, "", *LAST])}
    places = iter(sorted(ours, key=lambda item: order.get(item.path.stem, len(ORDER))))
    items[:] = [next(places) if id(item) in mine else item for item in items]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if tally:
        counts = ", ".join(f"{tally[how]} {how}" for how in ("exact", "clean", "wrong"))
        terminalreporter.write_line(
            f"answers compared: {counts}; clients that left: {tally['left']}"
        )


class Machine:
    """All processes of the session."""

    def __init__(self, folder: Path, say: pytest.TerminalReporter) -> None:
        self.folder = folder
        self._say = say
        self._running: list[Process] = []
        keys.create(str(folder / "key"))

    @property
    def key(self) -> str:
        return str(self.folder / "key")

    def start(self, *processes: Process) -> None:
        """Starts all processes at the same time; returns when all are ready."""
        self._tell(f"starting {', '.join(process.name for process in processes)} ...")
        began = time.monotonic()
        for process in processes:
            self._running.append(process)
            process.start()
        for process in processes:
            process.wait_ready()
        self._tell(f" {time.monotonic() - began:.0f} s\n")

    def start_again(self, process: Process) -> None:
        """Starts a stopped process again, at the same address."""
        self._running.remove(process)
        self.start(process)

    def stop(self, *processes: Process) -> None:
        stopping = processes or tuple(self._running[::-1])
        for process in stopping:
            process.begin_stop()
        for process in stopping:
            process.stop()
            if process in self._running:
                self._running.remove(process)

    def _tell(self, text: str) -> None:
        self._say.write(text if text.startswith(" ") else f"\n{text}", flush=True)


@pytest.fixture(autouse=True)
def closed_clients() -> Iterator[None]:
    """Closes the clients of API libraries that a test has opened."""
    yield
    while open_clients:
        open_clients.pop().close()


@pytest.fixture(scope="session")
def machine(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Machine]:
    # It does nothing for a whole model; one that was left half-written it writes again.
    command = [sys.executable, str(ROOT / "scripts/tiny_model.py"), KIND, str(MODEL)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    made = Machine(
        tmp_path_factory.mktemp("engines"), pytestconfig.pluginmanager.getplugin("terminalreporter")
    )
    try:
        yield made
    finally:
        made.stop()


class Main:
    """A prefill and a decode engine behind a proxy, and the plain vLLM that they must equal.

    All are patient: a delay on a crowded machine must not end a transfer that a test counts.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.meeting = free_port()  # of a later proxy, at which both engines register from now on
        register = f"http://127.0.0.1:{self.meeting}"
        self.prefill = Engine(
            "P",
            machine.folder,
            role="kv_producer",
            cpu="0",
            env=RUNNER.patient_env,
            register=register,
            settings={"peer_timeout": PEER_TIMEOUT_SECONDS},
        )
        self.decode = Engine(
            "D",
            machine.folder,
            role="kv_consumer",
            cpu="1",
            register=register,
            settings={
                "peer_timeout": PEER_TIMEOUT_SECONDS,
                "engine_stall_timeout": STALL_SECONDS,
            },
        )
        self.plain = Engine("plain", machine.folder, cpu="1")
        self.proxy = Proxy(machine.folder, self.prefill, self.decode, is_patient=True)
        machine.start(self.prefill, self.decode, self.plain)
        machine.start(self.proxy)
        self.legs = self.new_legs()

    def new_legs(self) -> Legs:
        return Legs(self.machine.key, self.prefill, self.decode)

    @contextmanager
    def other_proxy(self, name: str, *flags: str, is_patient: bool = True) -> Iterator[Proxy]:
        """Runs another proxy in front of both engines."""
        made = Proxy(
            self.machine.folder,
            self.prefill,
            self.decode,
            *flags,
            name=name,
            is_patient=is_patient or RUNNER.is_interpreted,
        )
        self.machine.start(made)
        yield made
        self.machine.stop(made)

    def stop(self) -> None:
        self.legs.close()
        self.machine.stop(self.proxy, self.plain, self.decode, self.prefill)

    def check(self, body: dict[str, object], path: str = "/v1/completions") -> Record:
        """Returns the proxy's answer, and fails unless it equals plain vLLM's."""
        plain, ours = at_once(lambda url: ask(url, body, path), (self.plain.url, self.proxy.url))
        # The log says why an instance was not used: without it a 503 cannot be explained later.
        log = "" if ours.status == plain.status else f"\n{self.proxy.tail()}\n"
        expect_same(ours, plain, f"{body!r:.200}{log}")
        return ours

    def ready(self) -> bool:
        """Returns whether the proxy pairs the two engines."""
        return get(self.proxy.url, "/readiness?mode=pair", PAGE_SECONDS)[0] == 200

    def exceptional_counts(self) -> str:
        """Returns the counters that explain requests without a transfer: all those above zero."""
        names = "disagg_(?:fallbacks|failovers|failed_loads|unclaimed_prefills)_total"
        found = []
        for server in (self.proxy, self.prefill, self.decode):
            text = get(server.url, "/metrics", PAGE_SECONDS, ADMIN)[1]
            for line in re.findall(rf"^\S*{names}.*$", text, re.MULTILINE):
                found.append(f"{server.name}: {line}")
        return "\n".join(line for line in found if not line.endswith(" 0.0"))

    def expect_well(self, count: int = 10) -> None:
        """Fails unless both engines run, hold no KV, and serve the next requests exactly.

        At least one of these requests must be served by a transfer.
        """
        for engine in (self.prefill, self.decode):
            engine.expect_alive()
            engine.wait_free()
        wait("the proxy uses both engines", self.ready)
        before = self.decode.received
        for at in range(count):
            self.check(body(tokens(100 + 60 * at, time.monotonic())))
        wait("KV is transferred again", lambda: self.decode.received > before)


@pytest.fixture(scope="session")
def main(machine: Machine) -> Main:
    return Main(machine)
