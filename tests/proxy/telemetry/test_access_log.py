"""An access log that cannot be written loses lines, and nothing else."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from proxy_world import world
from vllm_disagg.errors import ConfigError
from vllm_disagg.proxy.telemetry import access_log
from vllm_disagg.proxy.telemetry.access_log import AccessLog

FULL = "/dev/full"


def losses(caplog: pytest.LogCaptureFixture) -> list[str]:
    texts = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    return [text for text in texts if text.startswith("access log: ")]


async def test_lines_that_a_full_disk_refuses_are_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(access_log.time, "monotonic", lambda: now[0])
    log = AccessLog(FULL)
    for _ in range(3):
        log.write({"id": "one"})
        log.flush()
    assert losses(caplog) == [f"access log: {FULL}: No space left on device; 1 lines are lost"]
    now[0] += access_log.LOSS_PERIOD_SECONDS
    log.write({"id": "two"})
    log.flush()
    assert losses(caplog)[1:] == [f"access log: {FULL}: No space left on device; 3 lines are lost"]
    log.write({"id": "three"})
    log.close()
    assert losses(caplog)[2:] == [
        f"access log: {FULL}: the file could not be written; 1 lines are lost"
    ]


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
    monkeypatch.setattr(access_log, "os", proxied_os)
    for name in ("one", "two"):  # of 13 bytes, with the end of the line
        log.write({"id": name})
    log.flush()
    disk.room = 1000
    log.reopen()  # the same file
    log.write({"id": "three"})
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
        access_log, "os", SimpleNamespace(**{**vars(os), "write": FullDisk(5).write})
    )
    log.write({"id": "one"})
    log.flush()
    monkeypatch.setattr(access_log, "os", os)
    path.rename(tmp_path / "old")
    log.reopen()
    log.write({"id": "two"})
    log.close()
    assert path.read_text() == '{"id":"two"}\n'


async def test_refused_lines_are_not_written_later(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    path.symlink_to(FULL)
    log = AccessLog(str(path))
    log.write({"id": "one"})
    path.unlink()
    log.reopen()
    log.write({"id": "two"})
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
    log.close()
    text = (tmp_path / "moved" / "access.log").read_text()
    assert text == '{"id":"one"}\n{"id":"two"}\n'


async def test_a_signal_and_a_stop_on_a_full_disk_are_whole(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    async with world(prefill=0, access_log=FULL) as w:
        assert (await w.post()).status == 200
        w.renew()
        assert "access log and certificates are opened anew" in caplog.text
        assert (await w.post()).status == 200
    assert len(losses(caplog)) == 2


async def test_a_pipe_that_nobody_reads_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="a pipe or socket that no process reads"):
        AccessLog(str(path))
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        written = AccessLog(str(path))
        written.write({"status": 200})
        written.close()
        assert json.loads(os.read(reader, 100)) == {"status": 200}
    finally:
        os.close(reader)
