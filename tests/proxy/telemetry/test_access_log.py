"""An access log that cannot be written loses lines, and nothing else."""

from __future__ import annotations

import logging
from pathlib import Path

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
