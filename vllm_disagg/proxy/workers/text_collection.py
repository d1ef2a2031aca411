"""Collects the texts of all proxy workers on one topic, in their supervisor.

Any client may ask for metrics, without a key and at any rate. So all that ask before a
collection has ended share it, and metrics are collected once a second. They are merged here, once:
this process serves no streams, which would stop meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from ..telemetry.merged_metrics import merge
from .bus import TEXTS_TIMEOUT_SECONDS, BusMessage, Topic

log = logging.getLogger(__name__)


class TextWorker(Protocol):
    """A proxy worker as a collection needs it."""

    ready: asyncio.Event

    def send(self, message: BusMessage) -> None:
        """Sends a message, or drops it when no process is connected."""


class TextCollection:
    """Collects the texts of all workers on one topic, for those that asked."""

    pause_seconds = 0.0  # between the beginnings of two collections

    def __init__(self, topic: Topic, workers: Sequence[TextWorker]) -> None:
        self.topic = topic
        self.last_texts: dict[TextWorker, str] = {}  # last text of each live process
        self._workers = workers
        self._answered: set[TextWorker] = set()
        self._rendering: set[TextWorker] = set()  # have not answered the last request yet
        self._asking: set[TextWorker] = set()
        self._is_running = False  # else none has asked, or the collection begins later
        self._earliest_start = 0.0
        self._timer: asyncio.TimerHandle | None = None  # of the end, or of a later beginning

    def texts(self) -> list[str]:
        """Returns the texts of the workers that have answered."""
        return [self.last_texts[worker] for worker in self._answered if worker in self.last_texts]

    def on_death(self, worker: TextWorker) -> None:
        """Drops the text of a process."""
        self._rendering.discard(worker)
        self.last_texts.pop(worker, None)

    def ask(self, worker: TextWorker) -> None:
        """Requests the texts of all workers; a request already running is shared."""
        self._asking.add(worker)
        if self._timer:
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._earliest_start:
            self._timer = loop.call_at(self._earliest_start, self._start)
        else:
            self._start()

    def on_rendered(self, worker: TextWorker, text: str) -> None:
        """Takes a worker's text; the last one ends the request."""
        self.last_texts[worker] = text
        self._rendering.discard(worker)
        if not self._is_running:
            return
        self._answered.add(worker)
        if len(self._answered) >= sum(w.ready.is_set() for w in self._workers):
            self._send()

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self._is_running = True
        self._earliest_start = loop.time() + self.pause_seconds
        self._answered = set()
        self._timer = loop.call_later(TEXTS_TIMEOUT_SECONDS, self._send)
        for other in self._workers:
            # One that is slow would have ever more requests to answer.
            if other.ready.is_set() and other not in self._rendering:
                self._rendering.add(other)
                other.send(BusMessage("render", topic=self.topic))

    def _send(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = None
        self._is_running = False
        asking = self._asking
        self._asking = set()
        message = BusMessage("texts", topic=self.topic, texts=self.texts())
        for worker in asking:
            worker.send(message)


class MetricsCollection(TextCollection):
    """Collects metrics. No sum ever falls: what a process has counted stays counted.

    That is the last text of a worker that is slow now, and of each process that has died.
    """

    pause_seconds = 1.0
    _dead_text = ""  # sums of the last metrics of each dead process

    def texts(self) -> list[str]:
        """Returns one text: the sums of all live processes, and the counters of dead ones."""
        return [_merged([*self.last_texts.values(), self._dead_text])]

    def on_death(self, worker: TextWorker) -> None:
        """Keeps the last known counts of a dead process."""
        text = self.last_texts.get(worker, "")
        super().on_death(worker)
        if text:
            self._dead_text = _merged([self._dead_text, text], gauges=False) or self._dead_text


def _merged(texts: list[str], *, gauges: bool = True) -> str:
    """Returns texts of metrics as one; empty for those that cannot be merged."""
    try:
        return merge(texts, gauges=gauges).decode()
    except ValueError:  # no worker's connection is to blame, nor one that asks
        log.exception("supervisor: the workers' metrics cannot be merged")
        return ""


def collection_of(topic: Topic, workers: Sequence[TextWorker]) -> TextCollection:
    """Returns a new collection of a topic."""
    return (
        MetricsCollection(topic, workers) if topic == "metrics" else TextCollection(topic, workers)
    )
