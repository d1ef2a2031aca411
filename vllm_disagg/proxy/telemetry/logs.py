"""Sets up the proxy's log on standard error: its level, and text or JSON lines.

Failed requests have one WARNING each (`FailedRequestLog`), and failed legs one INFO line. Both have
a limit: an outage that fails thousands of requests must not fill a disk or hide other lines. So
have refused registrations, which anyone can send. No request waits for a slow standard error
(`line_writer.py`).
"""

from __future__ import annotations

import asyncio
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

import msgspec

from ..flags import LogFormat
from ..http.request import HttpRequest
from .line_writer import LAST_SECONDS, LineWriter

TEXT_FORMAT = "%(asctime)s %(levelname)s %(message)s"
WORKER_FORMAT = "%%(asctime)s %%(levelname)s worker %d: %%(message)s"  # with --workers
MAX_FAILURE_LINES = 5  # in each period
FAILURE_PERIOD_SECONDS = 1.0

log = logging.getLogger(__name__)


class JsonFormatter(logging.Formatter):
    """Formats each record as one JSON object in one line; times are UTC, ISO 8601."""

    def __init__(self, worker: int | None = None) -> None:
        """`worker`: index of this process with `--workers`; None of a single one."""
        super().__init__()
        self._place = {} if worker is None else {"worker": worker}

    def format(self, record: logging.LogRecord) -> str:
        """Returns the line of a record."""
        at = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            **self._place,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


class LineHandler(logging.Handler):
    """Writes each record to a stream, and how many are lost as soon as others are written again."""

    def __init__(self, stream: TextIO) -> None:
        """`stream`: stays open. Raises ConfigError if there can be no more threads."""
        super().__init__()
        self._writer = LineWriter(stream, closes=False, line_of_loss=self._line_of_loss)
        self._is_closed = False

    @property
    def is_idle(self) -> bool:
        """Whether no line waits for the stream."""
        return self._writer.is_idle

    @property
    def lost(self) -> int:
        """How many lines are lost since the start."""
        return self._writer.lost

    def emit(self, record: logging.LogRecord) -> None:
        """Adds the line of a record; it is written soon, unless the stream is slow."""
        try:
            line = self._line(record)
            if self._is_closed:  # at the very end of the process
                self._writer.write_last(line)
            else:
                self._writer.write([line])
        except Exception:  # a wrong call of the log, as in logging's own handlers
            self.handleError(record)

    def close(self) -> None:
        """Writes the last lines, unless they take too long."""
        if not self._is_closed:
            self._is_closed = True
            self._writer.end()
            self._writer.join(LAST_SECONDS)
        super().close()

    def _line(self, record: logging.LogRecord) -> bytes:
        return self.format(record).encode(errors="backslashreplace")

    def _line_of_loss(self, lost: int, reason: str) -> bytes:
        words = "%d lines of this log are lost: %s"
        return self._line(
            log.makeRecord(log.name, logging.ERROR, "", 0, words, (lost, reason), None)
        )


def set_up(level: str, log_format: LogFormat, worker: int | None = None) -> None:
    """Sends the log of this process to standard error. `worker`: its index with `--workers`."""
    handler = LineHandler(sys.stderr)
    text = logging.Formatter(TEXT_FORMAT if worker is None else WORKER_FORMAT % worker)
    handler.setFormatter(JsonFormatter(worker) if log_format == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])


def lost_lines() -> int:
    """Returns how many lines of this process's log are lost since the start."""
    handlers = logging.getLogger().handlers
    return sum(handler.lost for handler in handlers if isinstance(handler, LineHandler))


class LimitedLog:
    """Writes a limited number of lines in each period, and a summary of those above the limit."""

    def __init__(self, level: int, summary: str) -> None:
        """`summary`: takes the number of lines left out, and the period in seconds."""
        self._level = level
        self._summary = summary
        self._lines = 0  # in the present period
        self._left_out = 0
        self._period: asyncio.TimerHandle | None = None

    def write_line(self, text: str, *values: object) -> None:
        """Logs a line, or counts it when the period has its lines."""
        if not self._period:
            loop = asyncio.get_running_loop()
            self._period = loop.call_later(FAILURE_PERIOD_SECONDS, self.end_period)
        if self._lines >= MAX_FAILURE_LINES:
            self._left_out += 1
            return
        self._lines += 1
        log.log(self._level, text, *values)

    def end_period(self) -> None:
        """Begins a new period; logs how many lines of the last one are left out."""
        left_out = self._left_out
        if self._period:
            self._period.cancel()
        self._period = None
        self._lines = 0
        self._left_out = 0
        if left_out:
            log.log(self._level, self._summary, left_out, FAILURE_PERIOD_SECONDS)


class FailedRequestLog(LimitedLog):
    """Writes one WARNING for each failed request."""

    def __init__(self) -> None:
        super().__init__(
            logging.WARNING,
            "%d more requests failed within %g s; the access log and"
            " vllm_disagg_requests_total have all of them",
        )

    def write(self, request: HttpRequest, status: int, pair: tuple[str, str], reason: str) -> None:
        """Logs a failed request. `pair`: URLs of P and D, empty where there was none."""
        prefill, decode = pair
        self.write_line(
            "request %s failed: %s %s answered %d; prefill %s, decode %s; rung %s; %s",
            request.request_id,
            request.method,
            request.logged_path,
            status,
            prefill or "-",
            decode or "-",
            request.rung or "first attempt",
            reason or "the instance's own answer",
        )


class FailedForwardLog(LimitedLog):
    """Writes one WARNING for each instance that failed a forwarded request."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING, "forward: %d more failures within %g s")

    def write(self, request: HttpRequest, url: str, detail: str, is_last: bool) -> None:
        """Logs a failure. `is_last`: no other instance is asked."""
        self.write_line(
            "forward: %s failed %s %s: %s; %s",
            url,
            request.method,
            request.path,
            detail,
            "the request fails" if is_last else "another instance is tried",
        )


class FailedLegLog(LimitedLog):
    """Writes one INFO line for each failed leg: another attempt may still serve its request."""

    def __init__(self) -> None:
        super().__init__(logging.INFO, "relay: %d more legs failed within %g s")

    def write(self, request: HttpRequest, url: str, leg: str, detail: str) -> None:
        """Logs a failed leg. If no attempt is left, the request's own line is a WARNING."""
        self.write_line(
            "relay: request %s: %s failed a %s leg: %s; another attempt follows, if one is left",
            request.request_id,
            url,
            leg,
            detail,
        )


class RefusedRegistrationLog(LimitedLog):
    """Writes one WARNING for each refused registration, which needs no key to be sent."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING, "admin: %d more registrations refused within %g s")

    def write(self, peer: str, reason: str) -> None:
        """Logs a refused registration. `peer`: the sender's address."""
        self.write_line(
            "admin: registration from %s refused: %s; its engine is not added", peer, reason
        )
