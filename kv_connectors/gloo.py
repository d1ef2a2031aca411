"""Gloo between the memories of two hosts: the link that runs everywhere, with the code that NCCL
runs under.

A link is a ProcessGroupGloo of two ranks, made by hand: no default group, no TCPStore. The two ends
find each other through a Store that lives on our notes, so nothing listens for that. What listens
is Gloo's own device, one a worker: a TCP port of `host`, for as long as the worker lives.
Connections there are neither encrypted nor authenticated (Gloo's TLS needs certificates); the
checksum of each piece goes over the authenticated control channel.

Gloo posts without waiting, but says only to one who waits that something has ended: so each link
has a thread that does. A peer that dies ends the wait at once; for one that is frozen the pair has
its deadline, and `close` aborts.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import msgspec
import torch
from torch.distributed import Store, is_gloo_available

from vllm_disagg.config import Config
from vllm_disagg.errors import ConfigError
from vllm_disagg.transports.base import DriverPort
from vllm_disagg.transports.collective.channel import (
    PAIRING_SECONDS,
    LinkBlob,
    LinkEvent,
    LinkFailed,
    LinkUp,
    SlotCompleted,
)
from vllm_disagg.transports.collective.transport import CollectiveTransport
from vllm_disagg.transports.collective.worker import HostStaging, Slot

if is_gloo_available():
    from torch.distributed import ProcessGroupGloo

log = logging.getLogger("vllm_disagg.gloo")

NEVER = timedelta(days=1)  # the pair's machine has the deadlines
AT_ONCE = timedelta(milliseconds=1)  # a wait that ends so breaks the group: that is how Gloo aborts


class NoteStore(Store):  # type: ignore[misc]
    """What one end sets, the other gets: by notes, as (key, value)."""

    def __init__(self, say: Callable[[bytes], None]) -> None:
        super().__init__()
        self._say = say
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def on_blob(self, blob: bytes) -> None:
        key, value = msgspec.msgpack.decode(blob, type=tuple[str, bytes])
        self._put(key, value)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    # What ProcessGroupGloo asks of a Store
    def set(self, key: str, value: bytes) -> None:
        self._put(key, value)
        self._say(msgspec.msgpack.encode((key, bytes(value))))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(
        self, keys: list[str], timeout: timedelta = timedelta(seconds=PAIRING_SECONDS)
    ) -> None:
        with self._changed:
            there = self._changed.wait_for(
                lambda: self._is_closed or all(key in self._values for key in keys),
                timeout.total_seconds(),
            )
        if self._is_closed or not there:
            raise RuntimeError(
                "the pairing was given up" if self._is_closed else f"the peer did not say {keys}"
            )


class GlooLink:
    """`device`: Gloo's, shared by the links of a worker.  See `worker.Link`."""

    is_polled = False

    def __init__(
        self, device: Any, rank: int, tell: Callable[[LinkEvent], None], epoch: int
    ) -> None:
        self._device, self._rank, self._tell, self._epoch = device, rank, tell, epoch
        self._is_closing = False
        self._store = NoteStore(lambda blob: tell(LinkBlob(epoch, blob)))
        self._group: Any = None
        self._posted: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._waiting: deque[Any] = deque()  # what was posted and has not ended
        self._threads: list[threading.Thread] = []
        self._start(self._run)

    def _start(self, do: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=do, name="vllm-disagg-gloo", daemon=True))
        self._threads[-1].start()

    @property
    def is_gone(self) -> bool:
        """Ended threads only: one that is still in Gloo when Python ends takes the process down
        with it.
        """
        return not any(thread.is_alive() for thread in self._threads)

    # The mover's thread ---------------------------------------------------------------------------
    def on_blob(self, blob: bytes) -> None:
        self._store.on_blob(blob)

    def send(self, seq: int, slot: Slot, size: int) -> None:
        self._post(seq, self._group.send([torch.from_numpy(slot[:size])], 1, 0))

    def receive(self, seq: int, slot: Slot, size: int) -> None:
        self._post(seq, self._group.recv([torch.from_numpy(slot[:size])], 0, 0))

    def _post(self, seq: int, work: Any) -> None:
        self._waiting.append(work)
        self._posted.put((seq, work))

    def poll(self) -> bool:
        return False

    def close(self) -> None:
        self._is_closing = True
        self._store.close()
        self._posted.put(None)
        self._start(self._abort)

    def _abort(self) -> None:
        for work in list(self._waiting):
            try:
                work.wait(AT_ONCE)
            except RuntimeError as error:  # as meant
                log.debug("aborted: %s", error)

    # Its own thread -------------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            options = ProcessGroupGloo._Options()
            options._devices, options._threads, options._timeout = (
                [self._device],
                1,
                timedelta(seconds=PAIRING_SECONDS),
            )
            self._group = ProcessGroupGloo(self._store, self._rank, 2, options)
            self._tell(LinkUp(self._epoch))
            while (posted := self._posted.get()) is not None:
                seq, work = posted
                work.wait(NEVER)
                self._waiting.popleft()
                self._tell(SlotCompleted(self._epoch, seq))
        except Exception as error:  # Gloo has one kind
            if not self._is_closing:
                self._tell(LinkFailed(self._epoch, f"gloo: {str(error).rpartition('] ')[2]:.120}"))
        finally:
            self._waiting.clear()
            self._group = None


def transport_factory(config: Config) -> Callable[[DriverPort], CollectiveTransport]:
    """RuntimeError if this torch has no Gloo, or none for this host."""
    if not is_gloo_available():
        raise RuntimeError(f"torch {torch.__version__} was built without Gloo")
    if config.encrypt_data:
        raise ConfigError(
            "transport gloo cannot encrypt KV: set encrypt_data to false, or transport to zmq"
        )
    device = ProcessGroupGloo.create_device(hostname=config.host)

    def make_link(rank: int, tell: Callable[[LinkEvent], None], epoch: int) -> GlooLink:
        return GlooLink(device, rank, tell, epoch)

    return lambda port: CollectiveTransport("gloo", port, HostStaging(port.memory), make_link)
