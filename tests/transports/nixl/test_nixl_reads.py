"""Tests of reads that hang, and of closing agents, with scripted ones.

tests/transports/processes/test_nixl.py has the real ones.
"""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_disagg.kv.extents import Extent
from vllm_disagg.protocol.events import PostRead
from vllm_disagg.transports.nixl import reads as nixl_reads
from vllm_disagg.transports.nixl.agent import Job, NixlError, Read
from vllm_disagg.transports.nixl.reads import Closings, OpenRead, ReadFailed, Reads

POSTED = PostRead("t", 0, "p", "nixl:p#1", Extent(0, 1, 0, 16), [0])


def reads(close: Any, posted: PostRead | None = POSTED) -> Any:
    opened = SimpleNamespace(posted=posted)
    return SimpleNamespace(agent=SimpleNamespace(close=close), open=[opened])


def fails() -> None:
    raise NixlError("still in use")


def test_a_read_that_hangs_ends_its_agent() -> None:
    opened = Reads(SimpleNamespace(is_done=lambda read: False), 2.0)  # type: ignore[arg-type]
    opened.open.append(OpenRead("p", 64, 0.0, 2.0, None, None, Read(None)))
    for tenths in range(20):
        assert not list(opened.ended(tenths / 10))
    with pytest.raises(ReadFailed, match="a read from p does not end"):
        list(opened.ended(2.0))


def test_finish_waits_for_agents() -> None:
    closed, closings = [], Closings()
    closings.give_up(reads(lambda: (time.sleep(0.05), closed.append(1))))
    closings.finish()
    assert closed == [1]


def test_finish_waits_for_all_other_work_within_ucx() -> None:
    ended: list[str] = []
    closings = Closings()
    closings.give_up(reads(lambda: (time.sleep(0.05), ended.append("closed")), None))
    closings.finish([Job(lambda: (time.sleep(0.1), ended.append("made")))])
    assert sorted(ended) == ["closed", "made"]


def test_reads_end_when_their_agent_is_gone() -> None:
    closings = Closings()
    may_end = threading.Event()
    closings.give_up(reads(may_end.wait))
    assert list(closings.ended_reads()) == [], "it is being closed"
    may_end.set()
    end = time.monotonic() + 60
    while not (ended := list(closings.ended_reads())):
        assert time.monotonic() < end
    assert ended == [POSTED]


@pytest.mark.parametrize("looked", [True, False])
def test_finish_reports_an_agent_that_does_not_go(looked: bool) -> None:
    closings = Closings()
    closings.give_up(reads(fails))
    end = time.monotonic() + (0.2 if looked else 0)
    while time.monotonic() < end:
        assert list(closings.ended_reads()) == [], "its pieces never end"
    with pytest.raises(NixlError, match="1 reads may still write"):
        closings.finish()


def test_finish_waits_for_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_reads, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(nixl_reads, "JOBS_SECONDS", 0.05)
    closings = Closings()
    closings.give_up(
        reads(lambda: time.sleep(30), None)
    )  # of a test region: nothing of vLLM's is written
    closings.finish()
    closings.give_up(reads(lambda: time.sleep(30)))
    began = time.monotonic()
    with pytest.raises(NixlError):
        closings.finish()
    assert time.monotonic() - began < 20


def lack(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_an_agent_is_closed_once_there_is_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The requests of its reads waited for ever."""
    monkeypatch.setattr(nixl_reads, "THREAD_RETRY_SECONDS", 0.1)
    closings = Closings()
    closings.give_up(reads(lambda: None))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", lack)
        assert list(closings.ended_reads()) == []
    now = time.monotonic()
    (retry_at,) = closings.next_deadline(now)
    assert 0 < retry_at - now <= 0.1
    end = now + 60
    while not (ended := list(closings.ended_reads())):
        assert time.monotonic() < end
    assert ended == [POSTED] and not closings.next_deadline(now)


def test_finish_reports_reads_whose_agent_got_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    closings = Closings()
    closings.give_up(reads(lambda: None))
    monkeypatch.setattr(threading.Thread, "start", lack)
    with pytest.raises(NixlError, match="1 reads may still write"):
        closings.finish()


def test_a_job_without_a_thread_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the thread of all transfers."""
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", lack)
        job = Job(lambda: 1)
    assert job.is_over and not job.ends(60.0)
    assert (job.result, job.error) == (None, "can't start new thread")
