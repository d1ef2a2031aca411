"""The parts of the soak that judge: verdicts, slopes, the order of faults, the page."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import soak_faults
import soak_report
from chaos_client import CLEAN, Job, Result
from measures import KINDS, ProcessHistory, ProcessMeasures, ProcessReading, slope_per_hour
from memory import ending as ending_beside_plain
from slow_log import SlowLog
from soak_fleet import SoakEngine, on_own_machine
from soak_load import judge_left
from soak_report import verdict as report_verdict
from verdicts import WINDOW_REQUESTS, RequestEnding, Verdict, VerdictLedger, judge

from vllm_disagg.transports.machine_identity import machine_id

DEADLINE_SECONDS = 60.0


def ending(
    *, equal: bool = False, explicit: bool = False, broken: bool = False, seconds: float = 1.0
) -> RequestEnding:
    return RequestEnding(equal, explicit, broken, began_at=100.0, ended_at=100.0 + seconds)


@pytest.mark.parametrize(
    ("one", "kills", "expected"),
    [
        (ending(equal=True), [], Verdict.EXACT),
        (ending(equal=True, seconds=61), [], Verdict.HUNG),
        (ending(explicit=True), [], Verdict.CLEAN),
        (ending(explicit=True, seconds=61), [], Verdict.HUNG),
        (ending(), [100.5], Verdict.WRONG),
        (ending(broken=True), [], Verdict.WRONG),
        (ending(broken=True), [98.9, 101.1], Verdict.WRONG),
        (ending(broken=True), [99.1], Verdict.CUT),
        (ending(broken=True), [100.5], Verdict.CUT),
        (ending(broken=True, seconds=50), [100.5], Verdict.WRONG),  # long after the kill
        (ending(broken=True, seconds=50), [148.0], Verdict.CUT),
    ],
)
def test_verdicts(one: RequestEnding, kills: list[float], expected: Verdict) -> None:
    assert judge(one, kills, DEADLINE_SECONDS) is expected


def test_shares_are_of_fifty_answers_that_were_not_left() -> None:
    ledger = VerdictLedger()
    for _ in range(WINDOW_REQUESTS):
        ledger.note(Verdict.EXACT, "none", 1.0)
        ledger.note(Verdict.LEFT, "none", 9.0)
    for at in range(WINDOW_REQUESTS):
        ledger.note(Verdict.CLEAN if at % 2 else Verdict.EXACT, "kill", 2.0, "503")
    assert ledger.shares == [1.0, 0.5]
    assert ledger.is_good and ledger.slowest_seconds == 2.0
    assert ledger.by_fault["kill"][Verdict.CLEAN] == WINDOW_REQUESTS // 2
    ledger.note(Verdict.WRONG, "kill", 1.0, "other tokens")
    assert not ledger.is_good and "other tokens" in ledger.problems[-1]


def test_a_ledger_without_an_exact_answer_is_not_good() -> None:
    ledger = VerdictLedger()
    ledger.note(Verdict.CLEAN, "none", 1.0)
    assert not ledger.is_good


def test_the_slope_is_that_of_a_line() -> None:
    points = [(at * 10.0, 50.0 + at * 10.0 / 3600 * 7) for at in range(100)]
    assert slope_per_hour(points) == pytest.approx(7.0)
    assert slope_per_hour([(1.0, 5.0), (1.0, 6.0)]) is None


def test_the_first_minutes_of_a_process_are_no_leak() -> None:
    history = ProcessHistory("P1", "worker", 1)
    for minute in range(60):
        rss_mib = min(100.0 + minute, 110.0)
        history.readings.append(ProcessReading(60.0 * minute, rss_mib, 7, 3, None))
    summary = history.summary()
    assert summary["rss_mib_per_hour"] == 0.0
    assert summary["rss_mib"] == [110.0, 110.0]


@pytest.mark.parametrize(("minutes", "first"), [(5, 100.0), (15, 110.0)])
def test_a_young_process_shows_no_slope(minutes: int, first: float) -> None:
    """Neither the minutes in which allocators fill, nor a few behind them."""
    history = ProcessHistory("P1", "worker", 1)
    for minute in range(minutes):
        history.readings.append(ProcessReading(60.0 * minute, 100.0 + minute, 7, 3, None))
    summary = history.summary()
    assert summary["rss_mib_per_hour"] is None
    assert summary["rss_mib"] == [first, 99.0 + minutes]


def test_this_process_can_be_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "py", "test")
    (tmp_path / str(os.getpid())).write_text("5")
    (tmp_path / "heap").mkdir()
    (tmp_path / "heap" / str(os.getpid())).write_text('{"allocated_kib": 2048}')
    measures = ProcessMeasures(tmp_path, tmp_path / "heap")
    measures.read([("me", os.getpid())], 1.0)
    measures.read([("me", os.getpid())], 2.0)
    (found,) = [one for one in measures.summaries(1.0) if one["pid"] == os.getpid()]
    assert found["allocated_mib"] == [2.0, 2.0]
    assert found["tasks"] == [5, 5] and found["descriptors"][0] > 2  # type: ignore[index]
    assert measures.summaries(1.5) == []


def test_a_slow_log_delays_its_writers_and_loses_nothing(tmp_path: Path) -> None:
    log = SlowLog(tmp_path / "pipe", tmp_path / "log")
    text = b"x" * 9000  # more than the pipe holds
    began = time.monotonic()
    log.slow_down(0.3)
    with log.path.open("ab", buffering=0) as file:
        rest = text
        while rest:
            rest = rest[file.write(rest) :]
    assert time.monotonic() - began > 0.2
    until = time.monotonic() + 60
    while (tmp_path / "log").read_bytes() != text:
        assert time.monotonic() < until
        time.sleep(0.01)


def run_of(**more: object) -> dict[str, object]:
    return {
        "given": {"seconds": 7200.0, "aborts": 500},
        "seconds": 7261,
        "seed": 3,
        "requests": 1234,
        "verdicts": {"exact": 1200, "clean": 4, "left": 30},
        "by_fault": {"none": {"exact": 1000}, "slow log": {"exact": 200, "clean": 4}},
        "exact_share_per_50": [1.0, 0.96, 1.0],
        "compared_of_left": 17,
        "slowest_seconds": 8.2,
        "faults": {"slow log": 9},
        "failures": [],
        "problems": [],
        "processes": [
            {
                "name": "P1",
                "kind": "worker",
                "pid": 1,
                "seconds": 7000,
                "rss_mib": [900.5, 900.6],
                "rss_mib_per_hour": 0.1,
                "allocated_mib": [200.5, 201.0],
                "descriptors": [70, 70],
                "threads": [20, 20],
                "tasks": [None, None],
            }
        ],
        "series": [{"P1": 300}, {"P1": 301}],
        "plain": {"exact": 77, "left": 3},
        "pages": [
            {"at": 60, "series": {"P1": 300, "D1": 9}, "held_kv": {"P1": 0.25}},
            {"at": 120, "series": {"P1": 310}, "held_kv": {"P1": 0.0}},
        ],
        **more,
    }


def test_the_page_has_the_figures() -> None:
    text = soak_report.page(run_of(), "2026-11-23", 2, 3.0)
    assert "make soak SECONDS=7200 SEED=3 ABORTS=500" in text
    assert "| 1,234 | 1,200 | 4 | 0 | 30 | 0 | 0 |" in text
    assert "17 had\ngot a text" in text
    assert "first 100 %, last 100 %, least\n96 %" in text
    assert "| slow log | 9 | 200 | 4 | 0 | 0 | 0 | 0 |" in text
    assert (
        "| P1 | worker | 1.94 | 900.5, 900.6 | +0.1 | 200.5, 201.0 | 70, 70 | 20, 20 | -, - |"
        in text
    )
    assert "its memory: 77 exact, 3 left |" in text
    assert "between: D1 9 to 9, P1 300 to 310; KV blocks in use: P1 0 to 25 %." in text
    assert not re.search(r"\{\w+\}", text)


@pytest.mark.parametrize(
    ("seconds", "growth", "expected"),
    [
        (7000, 0.1, "memory of 0 of 1 processes grew"),
        (7000, 1.1, "memory of 1 of 1 processes grew"),
        (3000, 9.0, "no process lived for the hour"),
    ],
)
def test_the_verdict_names_growth(seconds: int, growth: float, expected: str) -> None:
    found = run_of(processes=[{"name": "P1", "seconds": seconds, "rss_mib_per_hour": growth}])
    assert expected in report_verdict(found)


def test_the_verdict_sets_a_plain_engines_growth_apart() -> None:
    one = {"name": "P1", "seconds": 7000, "rss_mib_per_hour": 0.5}
    plain = {"name": "plain", "seconds": 7000, "rss_mib_per_hour": 9.0}
    assert "of 0 of 1 processes grew by more than 1 MiB an hour, of a plain vLLM's 1 of 1" in (
        report_verdict(run_of(processes=[one, plain]))
    )


def test_the_page_hides_no_failure() -> None:
    aborts = {
        "left": 10_000,
        "before_first_byte": 6000,
        "in_answer": 4000,
        "compared": 3210,
        "transfers": {"D1 failed": 12.0, "P1 unclaimed": 0.0},
    }
    found = run_of(
        aborts=aborts, failures=["D1 died:\nmore"], problems=["none: wrong after 1.0 s: other"]
    )
    text = soak_report.page(found, "2026-11-23", 2, 3.0)
    assert "* D1 died:\n* none: wrong after 1.0 s: other" in text
    assert "1 failures" in text and "10,000 clients left" in text
    assert "3,210 texts were compared. What the engines counted meanwhile: `D1 failed` 12." in text


@pytest.mark.skipif(os.geteuid() != 0, reason="mount namespaces need root")
def test_engines_are_on_machines_of_their_own(tmp_path: Path) -> None:
    """Their workers would use UNIX sockets otherwise, which no route cuts off."""
    tell = "from vllm_disagg.transports.machine_identity import machine_id; print(machine_id())"
    command = [sys.executable, "-c", tell]
    machines = {machine_id()}
    for name in ("P0", "D0"):
        words = [*on_own_machine(tmp_path, name), *command]
        machines.add(subprocess.check_output(words, text=True).strip())
    assert len(machines) == 3
    engine = SoakEngine("P1", tmp_path, 3, role="kv_producer")
    assert engine.command[:2] == ["unshare", "--mount"]


class CutFleet:
    """A fleet whose D count this many unanswered loads with each look."""

    def __init__(self, step: int) -> None:
        self.engines = [CutEngine("P1", "kv_producer"), CutEngine("D1", "kv_consumer")]
        self.unanswered = 0
        self.step = step

    def unanswered_loads(self) -> int:
        self.unanswered += self.step
        return self.unanswered


@dataclass
class CutEngine:
    name: str
    role: str

    def cut_off(self) -> AbstractContextManager[None]:
        return nullcontext()


def test_a_long_cut_must_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_faults, "NOTICE_SECONDS", 0.2)
    monkeypatch.setattr(soak_faults.time, "sleep", lambda _: None)
    hits, failures = set(), set()
    for seed in range(30):
        source = random.Random(seed)
        hits.add(soak_faults.cut_network(CutFleet(1), source))  # type: ignore[arg-type]
        try:
            hits.add(soak_faults.cut_network(CutFleet(0), source))  # type: ignore[arg-type]
        except AssertionError as error:
            failures.add(str(error))
    assert hits == {
        f"P1 {hit}"
        for hit in (
            "1 s, 1 loads unanswered",
            "1 s, 0 loads unanswered",
            "4 s, 2 loads unanswered",
            "15 s, 2 loads unanswered",
        )
    }
    assert failures == {"not within 0.2 s: a D notices the cut"}


STREAM = Job("/v1/completions", {"stream": True})
WHOLE = Job("/v1/completions", {})
EVENTS = (
    b': waits\n\ndata: {"choices": [{"text": "one"}]}\n\ndata: {"choices": [{"text": " two"}]}\n\n'
)


@pytest.mark.parametrize(
    ("job", "status", "raw", "expected"),
    [
        (STREAM, 0, b"", (Verdict.LEFT, "")),
        (STREAM, 200, b"", (Verdict.LEFT, "")),
        (STREAM, 200, EVENTS, (Verdict.LEFT, "one two")),
        (STREAM, 200, EVENTS[:60], (Verdict.LEFT, "one")),
        (STREAM, 200, EVENTS + b"data: [DONE]\n\n", (Verdict.LEFT, "one two")),
        (STREAM, 200, EVENTS + b'data: {"error": {}}\n\n', (Verdict.LEFT, "one two")),
        (STREAM, 200, EVENTS.replace(b"two", b"ten"), (Verdict.WRONG, "one ten")),
        (STREAM, 200, b"data: garbage\n\n", (Verdict.WRONG, "")),
        (STREAM, 200, b'data: {"choices": [{}]}\n\n', (Verdict.WRONG, "")),
        (STREAM, 503, b'{"error": {"message": "no decode', (Verdict.LEFT, "")),
        (STREAM, 502, b"<html>", (Verdict.WRONG, "")),
        (WHOLE, 200, b'{"choices": [{"te', (Verdict.LEFT, "")),
        (WHOLE, 200, b"<html>", (Verdict.WRONG, "")),
        (WHOLE, 200, b"{}", (Verdict.WRONG, "")),
    ],
)
def test_a_client_that_left_had_the_begin_of_its_answer(
    job: Job, status: int, raw: bytes, expected: tuple[Verdict, str]
) -> None:
    assert judge_left(job, Result(text="one two three"), status, raw) == expected


@pytest.mark.parametrize(("text", "verdict"), [("one", Verdict.LEFT), ("ten", Verdict.WRONG)])
def test_a_whole_answer_before_the_client_left(text: str, verdict: Verdict) -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 1}
    answer = {"choices": [{"text": text, "finish_reason": "length"}], "usage": usage}
    raw = json.dumps(answer).encode()
    assert judge_left(WHOLE, Result(text="one two"), 200, raw) == (verdict, text)


NO_PROCESS = (1 << 22) + 1  # no id of a process is so large


class FaultFleet:
    """A fleet of one engine that does not end, is never drained, and answers as it is told."""

    def __init__(self, answer: tuple[int, str] = (404, "")) -> None:
        self.engines = self.mortal = [self]
        self.ended_by_us: set[str] = set()
        self.name, self.url, self.role = "P0", "http://p", "kv_producer"
        self.answer = answer

    def child(self, title: str) -> int:
        return NO_PROCESS

    def begin_stop(self) -> None: ...

    def runs(self) -> bool:
        return True

    def change(self, *words: str, **fields: str) -> None: ...

    def wait_used(self, engine: object) -> None: ...

    def start_again(self, engine: object) -> None: ...

    def in_flight(self, engine: object) -> int:
        return 1

    def send(self, path: str) -> tuple[int, str]:
        return self.answer


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("kill -9 of a part of an engine", "P0 ends without"),
        ("SIGTERM to an engine", "P0 ends by SIGTERM"),
        ("drain and re-add", "P0 is drained"),
        ("reset_prefix_cache", "P0.*: 404"),
    ],
)
def test_a_fault_that_does_not_do_what_it_should_fails(
    fault: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak_faults.os, "kill", lambda *_: None)
    for limit in ("END_SECONDS", "SHUTDOWN_SECONDS", "DRAIN_SECONDS"):
        monkeypatch.setattr(soak_faults, limit, 0.1)
    for seed in range(4):
        with pytest.raises((AssertionError, RuntimeError), match=words):
            soak_faults.FAULTS[fault](FaultFleet(), random.Random(seed))  # type: ignore[arg-type]


def test_a_reset_that_vllm_refuses_is_reported() -> None:
    """Without a preemption 500 is a failure, and so is an answer without a result."""
    outcomes = set()
    for answer in ((200, '{"success":false}'), (500, ""), (200, "")):
        for seed in range(8):
            fleet: Any = FaultFleet(answer)
            try:
                outcomes.add(soak_faults.reset_prefix_cache(fleet, random.Random(seed)))
            except RuntimeError as error:
                outcomes.add(f"fails: {error}")
    flag = "?reset_running_requests=true"
    assert outcomes == {
        'P0 200 {"success":false}',
        f'P0{flag} 200 {{"success":false}}',
        f"P0{flag} 500 ",
        "fails: P0: 500 ",
        "fails: P0: 200 ",
        f"fails: P0{flag}: 200 ",
    }


@pytest.mark.parametrize(
    ("ours", "plain", "ended"),
    [
        (Result("a"), Result("a"), "exact"),
        (Result("a"), Result("b"), "wrong"),
        (Result(error=f"{CLEAN}503"), Result("a"), "clean"),
        (Result(error="cut off"), Result("a"), "cut off"),
        (Result("a"), Result(error="TimeoutError: "), "plain vLLM: TimeoutError: "),
    ],
)
def test_how_a_request_beside_a_plain_engine_ended(ours: Result, plain: Result, ended: str) -> None:
    assert ending_beside_plain(ours, plain) == ended
