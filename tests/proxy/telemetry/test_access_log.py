"""An access log that cannot be written loses lines, and nothing else: no request waits for it."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from narrow_pipe import NarrowPipe

from proxy_world import until as until_true
from proxy_world import world
from vllm_disagg.errors import ConfigError
from vllm_disagg.proxy.telemetry import access_log, line_writer, logs
from vllm_disagg.proxy.telemetry.access_log import AccessLog
from vllm_disagg.proxy.telemetry.line_writer import LineWriter

FULL = "/dev/full"


def losses(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    return [text for text in texts if text.startswith("access log: ")]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic_ns() + 50_000_000_000  # tests replace the other clock
    while not condition():
        assert time.monotonic_ns() < deadline
        time.sleep(0.001)


def write(log: AccessLog, *names: str) -> None:
    """Writes lines, and waits until the file has them or they are lost."""
    for name in names:
        log.write({"id": name})
    log.flush()
    until(lambda: log.is_idle)


async def test_lines_that_a_full_disk_refuses_are_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(access_log.time, "monotonic", lambda: now[0])
    log = AccessLog(FULL)
    for _ in range(3):
        write(log, "one")
        log.log_loss()
    said = f"access log: {FULL}: No space left on device"
    assert losses(caplog) == [f"{said}; 1 lines are lost"]
    now[0] += access_log.LOSS_PERIOD_SECONDS
    write(log, "two")
    log.log_loss()
    assert losses(caplog)[1:] == [f"{said}; 3 lines are lost"]
    log.write({"id": "three"})
    log.flush()
    log.close()
    assert losses(caplog)[2:] == [f"{said}; 1 lines are lost"]
    assert log.lost == 5


async def test_lost_lines_are_reported_without_further_ones(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_log, "FLUSH_SECONDS", 0.01)
    log = AccessLog(FULL)
    log.write({"id": "one"})
    async with asyncio.timeout(50):
        while not losses(caplog):
            await asyncio.sleep(0.01)
    log.flush()
    log.close()
    assert len(losses(caplog)) == 1


class FullDisk:
    """Stands for `os.write` on a disk that has room for some bytes."""

    def __init__(self, room: int) -> None:
        self.room = room

    def write(self, descriptor: int, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = os.write(descriptor, data[: self.room])
        self.room -= written
        return written


@pytest.mark.parametrize("room", range(26))
async def test_a_line_that_was_cut_spoils_no_other(
    room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "access.log"
    log = AccessLog(str(path))
    disk = FullDisk(room)
    proxied_os = SimpleNamespace(**{**vars(os), "write": disk.write})
    monkeypatch.setattr(line_writer, "os", proxied_os)
    write(log, "one", "two")  # of 13 bytes each, with the end of the line
    disk.room = 1000
    log.reopen()  # the same file
    log.write({"id": "three"})
    log.flush()
    log.close()
    found = [json.loads(line)["id"] for line in path.read_text().splitlines() if is_whole(line)]
    kept = ["one", "two"][: (room + 1) // 13]  # a line whose end alone was cut gets it later
    assert found == [*kept, "three"]
    lost = 2 - room // 13
    assert f"{lost} lines are lost" in caplog.text


def is_whole(line: str) -> bool:
    return line.startswith("{") and line.endswith("}")


async def test_a_new_file_begins_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "access.log"
    log = AccessLog(str(path))
    monkeypatch.setattr(
        line_writer, "os", SimpleNamespace(**{**vars(os), "write": FullDisk(5).write})
    )
    write(log, "one")
    monkeypatch.setattr(line_writer, "os", os)
    path.rename(tmp_path / "old")
    log.reopen()
    log.write({"id": "two"})
    log.flush()
    log.close()
    assert path.read_text() == '{"id":"two"}\n'


async def test_what_a_rotated_file_has_lost_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [100.0]
    monkeypatch.setattr(access_log.time, "monotonic", lambda: now[0])
    path = tmp_path / "access.log"
    path.symlink_to(FULL)
    log = AccessLog(str(path))
    write(log, "one")
    log.log_loss()
    write(log, "two", "three")
    path.unlink()
    log.reopen()
    assert len(losses(caplog)) == 1
    now[0] += access_log.LOSS_PERIOD_SECONDS
    write(log, "four")
    log.log_loss()
    assert losses(caplog)[1:] == [f"access log: {path}: No space left on device; 2 lines are lost"]
    assert log.lost == 3
    log.close()
    assert path.read_text() == '{"id":"four"}\n'


async def test_a_rotated_file_is_closed_and_its_room_is_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_writer, "MAX_WAITING_BYTES", 100)
    path = tmp_path / "access.log"
    log = AccessLog(str(path))
    for _ in range(10):  # two at a time have room
        write(log, "one", "one")
    path.rename(tmp_path / "old")
    log.reopen()
    async with asyncio.timeout(50):
        while str(tmp_path / "old") in open_files():
            await asyncio.sleep(0.01)
    assert str(path) in open_files()
    log.flush()
    log.close()
    assert (tmp_path / "old").read_text() == '{"id":"one"}\n' * 20


def open_files() -> list[str]:
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the folder itself
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found


async def test_refused_lines_are_not_written_later(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    path.symlink_to(FULL)
    log = AccessLog(str(path))
    log.write({"id": "one"})
    path.unlink()
    log.reopen()
    log.write({"id": "two"})
    log.flush()
    log.close()
    assert path.read_text() == '{"id":"two"}\n'


async def test_a_log_that_cannot_be_opened_anew_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()
    log = AccessLog(str(folder / "access.log"))
    log.write({"id": "one"})
    folder.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="No such file"):
        log.reopen()
    log.write({"id": "two"})
    log.flush()
    log.close()
    text = (tmp_path / "moved" / "access.log").read_text()
    assert text == '{"id":"one"}\n{"id":"two"}\n'


async def test_a_signal_and_a_stop_on_a_full_disk_are_whole(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(logs, "lost_lines", lambda: 7)
    async with world(prefill=0, access_log=FULL) as w:

        async def counted(log: str, count: int) -> bool:
            return await w.metric("vllm_disagg_lost_log_lines_total{", f'log="{log}"') == count

        assert (await w.post()).status == 200
        w.renew()
        assert "access log, certificates and keys are opened anew" in caplog.text
        assert await counted("standard_error", 7)
        await until_true(lambda: counted("access", 1))
        assert (await w.post()).status == 200
    assert losses(caplog) == [f"access log: {FULL}: No space left on device; 2 lines are lost"]


async def test_a_pipe_that_nobody_reads_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="a pipe or socket that no process reads"):
        AccessLog(str(path))
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        written = AccessLog(str(path))
        written.write({"status": 200})
        written.flush()
        written.close()
        assert json.loads(os.read(reader, 100)) == {"status": 200}
    finally:
        os.close(reader)


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[NarrowPipe]:
    made = NarrowPipe(tmp_path)
    yield made
    made.close()


async def test_no_request_waits_for_a_reader_that_stands_still(
    pipe: NarrowPipe, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(access_log, "FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(access_log, "LAST_SECONDS", 0.2)
    monkeypatch.setattr(line_writer, "MAX_WAITING_BYTES", 8000)
    async with world(prefill=0, access_log=str(pipe.path)) as w, asyncio.timeout(50):
        for _ in range(80):  # lines of some hundred bytes: more than fits
            assert (await w.post()).status == 200
            await asyncio.sleep(0.01)
        while not losses(caplog):
            await asyncio.sleep(0.01)
    assert all("it takes lines too slowly" in text for text in losses(caplog))


def test_lines_of_several_processes_cut_no_other(pipe: NarrowPipe) -> None:
    """Two writers stand for them. The pipe is full most of the time, and read in small steps."""
    writers = [LineWriter(pipe.path.open("w"), closes=True) for _ in "ab"]
    wanted = []
    for number, writer in enumerate(writers):
        lines = [b"%d " % number + b"x" * (50 + 7 * n % 900) for n in range(300)]
        writer.write(lines)
        writer.end()
        wanted += lines
    found = pipe.lines(lambda: all(writer.is_idle for writer in writers))
    assert sorted(found) == sorted([*wanted, b""])


def test_a_line_longer_than_a_pipe_takes_at_once_is_written(pipe: NarrowPipe) -> None:
    writer = LineWriter(pipe.path.open("w"), closes=True)
    long = b"y" * (3 * select.PIPE_BUF)
    writer.write([b"first", long, b"last"])
    writer.end()
    assert pipe.lines(lambda: writer.is_idle) == [b"first", long, b"last", b""]


def test_a_writer_ends_its_thread_and_closes_its_file(tmp_path: Path) -> None:
    file = (tmp_path / "file").open("w")
    writer = LineWriter(file, closes=True)
    writer.write([b"one", b"two"])
    writer.end()
    until(lambda: not writer.is_running)
    assert file.closed
    assert (tmp_path / "file").read_bytes() == b"one\ntwo\n"
    assert writer.take_loss() == (0, "")


def test_what_is_written_late_is_counted_as_lost_at_the_end(pipe: NarrowPipe) -> None:
    writer = LineWriter(pipe.path.open("w"), closes=True)
    writer.write([b"x" * 2000 for _ in range(8)])
    writer.end()
    until(lambda: writer._done > 0)
    writer.join(0.1)
    lost, reason = writer.take_loss()
    assert 1 <= lost <= 6 and reason == line_writer.NO_ROOM
    writer.write([b"later"])
    assert writer.take_loss() == (1, line_writer.ENDED)
    found = pipe.lines(lambda: not writer.is_running)
    assert len(found) - 1 <= 8 - lost + 2  # those of the batch that waited, too


@pytest.mark.parametrize(("standstills", "lost"), [(20, 0), (1000, 1)])
def test_standstills_of_ours_lose_no_last_line_and_end(
    standstills: int, lost: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that was stopped for a second at its end blamed the file, and lost lines."""
    now = 0.0
    waits = 0
    is_awake = threading.Event()

    def write(descriptor: int, data: bytes) -> int:
        is_awake.wait()
        return os.write(descriptor, data)

    def join_late(_: float) -> None:
        nonlocal now, waits
        now += 100.0
        waits += 1
        if waits == standstills:
            is_awake.set()
            thread.join()

    monkeypatch.setattr(line_writer, "os", SimpleNamespace(**{**vars(os), "write": write}))
    monkeypatch.setattr(line_writer, "time", SimpleNamespace(monotonic=lambda: now))
    writer = LineWriter((tmp_path / "file").open("w"), closes=True)
    thread = writer._thread
    writer._thread = SimpleNamespace(join=join_late, is_alive=thread.is_alive)  # type: ignore[assignment]
    writer.write([b"one"])
    writer.end()
    writer.join(1.0)
    assert writer.take_loss()[0] == lost and waits < 100
    is_awake.set()
    thread.join()
    assert (tmp_path / "file").read_bytes() == (b"" if lost else b"one\n")


@pytest.mark.parametrize("error", [ValueError("closed"), MemoryError(), OSError(errno.EIO, "I/O")])
def test_no_error_ends_the_thread_that_writes(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(descriptor: int, data: bytes) -> int:
        raise error

    writer = LineWriter((tmp_path / "file").open("w"), closes=True)
    monkeypatch.setattr(line_writer, "os", SimpleNamespace(**{**vars(os), "write": fail}))
    writer.write([b"one", b"two"])
    until(lambda: writer.is_idle)
    assert writer.take_loss()[0] == 2
    monkeypatch.setattr(line_writer, "os", os)
    writer.write([b"three"])
    writer.end()
    writer.join(50)
    assert (tmp_path / "file").read_bytes() == b"three\n"


def test_a_pipe_that_does_not_block_is_waited_for(pipe: NarrowPipe) -> None:
    file = pipe.path.open("w")
    os.set_blocking(file.fileno(), False)  # as another process with the same terminal may do
    writer = LineWriter(file, closes=True)
    lines = [b"z" * 900 for _ in range(40)]
    writer.write(lines)
    writer.end()
    assert pipe.lines(lambda: writer.is_idle) == [*lines, b""]
    assert writer.take_loss()[0] == 0


def test_a_log_without_a_thread_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(ConfigError, match="a log needs a thread: can't start new thread"):
        AccessLog(str(tmp_path / "access.log"))
