"""Disturbs 2 P + 2 D under load, one random fault a minute; the last line is JSON.

    python tests/soak/soak.py [--seconds S] [--seed N] [--aborts N] [--save NAME]

Each answer is compared with plain vLLM's, computed before. `--save docs/benchmarks/soak` writes the
JSON and the report page. The exit status is 1 if an answer was wrong or hung, an engine died
without a fault, a fault did not heal or had no effect, or KV blocks stayed in use. SIGTERM ends the
faults early, and the run still has its report.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/engine")]

import soak_faults  # noqa: E402
import soak_report  # noqa: E402
from aborts import LeavingClients  # noqa: E402
from chaos_client import Job, Result  # noqa: E402
from engines import Engine  # noqa: E402
from measures import ProcessMeasures  # noqa: E402
from soak_fleet import SoakFleet, wait_until  # noqa: E402
from soak_load import SoakLoad, answers_of, fill_shape_cache, jobs  # noqa: E402
from verdicts import VerdictLedger  # noqa: E402

MODEL = ROOT / ".cache/models/dense"
JOBS = 300
WARM_UP_JOBS = 16
FAULT_SECONDS = 60.0  # from the begin of one fault to that of the next
READING_SECONDS = 10.0
PAGES_SECONDS = 60.0  # from one reading of the metrics pages to the next
PLAIN_CLIENTS = 4  # of the plain engine beside: each engine of a pair serves half of all requests
REST_SECONDS = 60.0  # for all blocks to be given back behind the load
# Of the clients that leave: how far their transfers had come.
OF_LEAVERS = (
    r"vllm:disagg_load_seconds_count",
    r"vllm:disagg_(?:failed_loads|unclaimed_prefills|delivered_prefills)_total",
)
EXCEPTIONAL = (
    r"vllm_disagg_(?:fallbacks|failovers)_total",
    r"vllm:disagg_(?:failed_loads|unclaimed_prefills)_total",
)


class Soak:
    """One run and what it has found."""

    def __init__(self, folder: Path, seconds: float, seed: int, aborts: int) -> None:
        self._seconds = seconds
        self._seed = seed
        self._aborts = aborts
        self.fleet = SoakFleet(folder)
        self.measures = ProcessMeasures(folder / "tasks", folder / "heap")
        self.faults: list[dict[str, object]] = []
        self.failures: list[str] = []  # faults that did not heal, engines that died
        self.found: dict[str, object] = {}
        self.pages: list[dict[str, object]] = []  # of metrics, from time to time
        self.plain_ledger = VerdictLedger()
        self._began_at = time.monotonic()
        self._measured = threading.Event()
        self._is_ended = False  # by SIGTERM

    def end_early(self) -> None:
        """Has the run end behind the fault that goes on, without the clients that leave."""
        self._is_ended = True

    @property
    def now(self) -> float:
        """Seconds since the load began."""
        return time.monotonic() - self._began_at

    def run(self, right: Sequence[tuple[Job, Result]]) -> VerdictLedger:
        """Runs load and faults, then the clients that leave; returns the verdicts."""
        fleet = self.fleet
        fleet.start()
        for engine in (*fleet.survivors, fleet.plain):
            fill_shape_cache(engine.url)
        for server in (fleet.proxy, fleet.plain):
            answers_of(server.url, [job for job, _ in right[:WARM_UP_JOBS]])
        series = [fleet.series()]
        self._began_at = time.monotonic()
        readers = [threading.Thread(target=read) for read in (self._read, self._read_pages)]
        for reader in readers:
            reader.start()
        load = SoakLoad(fleet.proxy.url, right, self._seed, fleet.proxy_kills)
        plain = SoakLoad(fleet.plain.url, right, self._seed, clients=PLAIN_CLIENTS)
        self.plain_ledger = plain.ledger
        try:
            with load.running(), plain.running():
                self._disturb(load)
            self._expect_no_kv("behind the load")
            if self._aborts and not self.failures and not self._is_ended:
                self._leave(right, load.ledger)
        finally:
            self._measured.set()
            for reader in readers:
                reader.join()
        if not self.failures:
            series.append(fleet.series())
            self.found["counters"] = fleet.counters(*EXCEPTIONAL)
        self.found["series"] = series
        return load.ledger

    def _read(self) -> None:
        while not self._measured.wait(READING_SECONDS):
            self.measures.read(self.fleet.servers(), self.now)

    def _read_pages(self) -> None:
        while not self._measured.wait(PAGES_SECONDS):
            page = {"series": self.fleet.series(), "held_kv": self.fleet.held_kv_of_survivors()}
            self.pages.append({"at": round(self.now), **page})

    def _disturb(self, load: SoakLoad) -> None:
        order = iter(soak_faults.schedule(self._seed))
        source = random.Random(f"targets {self._seed}")
        while self._goes_on and not self.failures:
            due = self.now + FAULT_SECONDS
            self._run_fault(load, next(order), source)
            dead = self.fleet.dead_engines()
            self.failures += [f"{name} died:\n{self._tail(name)}" for name in dead]
            while self._goes_on and self.now < due:
                time.sleep(0.2)

    @property
    def _goes_on(self) -> bool:
        return self.now < self._seconds and not self._is_ended

    def _run_fault(self, load: SoakLoad, name: str, source: random.Random) -> None:
        at = self.now
        load.fault = name
        try:
            hit = soak_faults.FAULTS[name](self.fleet, source)
        except (AssertionError, RuntimeError, OSError, StopIteration) as error:
            hit = f"did not heal: {error}"
            self.failures.append(f"{name} {hit}")
        load.fault = "none"
        self.faults.append({"at": round(at), "fault": name, "hit": hit})
        verdicts = {verdict.value: count for verdict, count in load.ledger.counts.items()}
        print(f"soak: {at:.0f} s, {name}: {hit}; {verdicts}", flush=True)

    def _leave(self, right: Sequence[tuple[Job, Result]], ledger: VerdictLedger) -> None:
        """Clients leave the pair that was never killed; the other one is ended before."""
        for engine in self.fleet.mortal:
            self.fleet.change("POST", "/disagg/instances/drain", url=engine.url)
        self.fleet.ended_by_us |= {engine.name for engine in self.fleet.mortal}
        for engine in self.fleet.mortal:
            engine.begin_stop()
        for engine in self.fleet.mortal:
            engine.stop()
            self.fleet.engines.remove(engine)
        clients = LeavingClients(self.fleet.proxy.url, right, self._aborts, self._seed, ledger)
        before = self.fleet.counters(*OF_LEAVERS)
        clients.run()
        after = self.fleet.counters(*OF_LEAVERS)
        rises = {name: after[name] - before.get(name, 0.0) for name in after}
        self.found["aborts"] = clients.summary() | {"transfers": rises}
        print(f"soak: clients that left: {clients.summary()}", flush=True)
        self.failures += [f"{name} died" for name in self.fleet.dead_engines()]
        self._expect_no_kv("behind the clients that left")

    def _expect_no_kv(self, when: str) -> None:
        if self.failures:
            return
        if not wait_until(lambda: not any(self.fleet.held_kv().values()), REST_SECONDS):
            self.failures.append(f"{when} KV blocks are in use: {self.fleet.held_kv()}")

    def _tail(self, name: str) -> str:
        engine = next(engine for engine in self.fleet.engines if engine.name == name)
        return engine.tail()

    def summary(self, ledger: VerdictLedger) -> dict[str, object]:
        """Returns all that was found, for the JSON and the report."""
        counts: dict[str, int] = {}
        for one in self.faults:
            counts[str(one["fault"])] = counts.get(str(one["fault"]), 0) + 1
        verdicts = {verdict.value: count for verdict, count in ledger.counts.items()}
        return {
            "given": {"seconds": self._seconds, "aborts": self._aborts},
            "seconds": round(self.now),
            "seed": self._seed,
            "requests": sum(ledger.counts.values()),
            "verdicts": verdicts,
            "compared_of_left": ledger.compared_of_left,
            "plain": {verdict.value: count for verdict, count in self.plain_ledger.counts.items()},
            "pages": self.pages,
            "by_fault": {
                fault: {verdict.value: count for verdict, count in by.items()}
                for fault, by in sorted(ledger.by_fault.items())
            },
            "exact_share_per_50": ledger.shares,
            "slowest_seconds": round(ledger.slowest_seconds, 1),
            "faults": counts,
            "hits": self.faults,
            "failures": self.failures,
            "problems": ledger.problems,
            "processes": self.measures.summaries(self.now / 2),
            **self.found,
        }


def right_answers(folder: Path, seed: int) -> list[tuple[Job, Result]]:
    """Returns requests with the answers of one plain vLLM, which is ended afterwards."""
    asked = jobs(JOBS, seed)
    plain = Engine("plain", folder)
    plain.start()
    try:
        plain.wait_ready()
        return list(zip(asked, answers_of(plain.url, asked), strict=True))
    finally:
        plain.stop()


def main() -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=7200.0)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--aborts", type=int, default=10_000, help="clients that leave, at the end")
    parser.add_argument("--save", type=Path, help="writes NAME.json and NAME.md")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    print(f"soak: seed {seed}, {args.seconds:g} s", flush=True)
    if os.geteuid():
        parser.error("the fault `network cut` needs root: for routes, and boot ids of engines")
    if not (MODEL / "config.json").exists():
        tiny_model = [sys.executable, str(ROOT / "scripts/tiny_model.py"), "dense", str(MODEL)]
        subprocess.run(tiny_model, check=True)
    folder = Path(tempfile.mkdtemp(prefix="vllm-disagg-soak-"))
    print(f"soak: logs are in {folder}", flush=True)
    right = right_answers(folder, seed)
    soak = Soak(folder, args.seconds, seed, args.aborts)
    signal.signal(signal.SIGTERM, lambda *_: soak.end_early())
    try:
        ledger = soak.run(right)
    finally:
        soak.fleet.stop()
    found = soak.summary(ledger)
    if args.save:
        soak_report.save(args.save, found)
    print(json.dumps(found))
    return 0 if ledger.is_good and not soak.failures else 1


if __name__ == "__main__":
    sys.exit(main())
