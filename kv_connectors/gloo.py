"""Gloo between the memories of two hosts: the collective transport that runs everywhere.

It runs under the same code as NCCL. A link is a ProcessGroupGloo of two ranks, made directly: no
default group, no TCPStore. The two ends find each other through a Store over our control channel,
so no port listens for that. Gloo's own device listens: one TCP port of `host` per worker, for as
long as the worker runs. Connections there are neither encrypted nor authenticated (Gloo's TLS needs
certificates). The checksum of each piece goes over the authenticated control channel.

Gloo posts an operation without waiting, but reports its end only to a waiting thread. So each link
has a thread that waits. If the peer's process dies, the wait ends at once. If the peer is frozen,
the channel has its deadline, and `close` aborts the wait.
"""

from __future__ import annotations

import logging
import queue
import struct
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
from vllm_disagg.transports.collective.link import Slot
from vllm_disagg.transports.collective.staging import HostStaging
from vllm_disagg.transports.collective.transport import CollectiveTransport

if is_gloo_available():
    from torch.distributed import ProcessGroupGloo

log = logging.getLogger("vllm_disagg.gloo")

NO_TIMEOUT = timedelta(days=1)  # the channel's state machine has the deadlines
# A wait that times out breaks the process group; Gloo has no other way to abort.
ABORT_TIMEOUT = timedelta(milliseconds=1)
MAX_ERROR_CHARACTERS = 120
LENGTH = struct.Struct("@N")  # size_t, as Gloo writes it
MAX_VALUES = 8  # of a store; Gloo sets one at each end


class ChannelStore(Store):  # type: ignore[misc]
    """A Store shared by the two ends of a link: each end sends what it sets to the other.

    ProcessGroupGloo calls `set`, `get` and `wait` while it is made.
    """

    def __init__(self, send_blob: Callable[[bytes], None]) -> None:
        """Creates an empty store. `send_blob`: takes an encoded (key, value) to the other end."""
        super().__init__()
        self._send_blob = send_blob
        self._values: dict[str, bytes] = {}
        self._own = b""  # that this end has set last
        self._changed = threading.Condition()
        self._is_closed = False

    def receive_blob(self, blob: bytes) -> None:
        """Takes a (key, value) that the other end has set.

        Raises msgspec.DecodeError if the blob is none, and ValueError if there are too many.
        """
        key, value = msgspec.msgpack.decode(blob, type=tuple[str, bytes])
        if len(self._values) >= MAX_VALUES and key not in self._values:
            raise ValueError("the peer sets more values than Gloo does")
        self._put(key, value)

    def close(self) -> None:
        """Ends all waits, with an error."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    # The interface of Store -----------------------------------------------------------------------
    def set(self, key: str, value: bytes) -> None:
        """Sets a value here and at the other end."""
        self._own = bytes(value)
        self._put(key, value)
        self._send_blob(msgspec.msgpack.encode((key, bytes(value))))

    def get(self, key: str) -> bytes:
        """Returns a value, as soon as one end has set it.

        Raises as `wait` does, and ValueError if its form is not that of this end's own value.
        """
        self.wait([key])
        value = self._values[key]
        # Gloo trusts the lengths in a value: a wrong one has it read beyond the value, which may
        # end this process. A wrong address in the right place only fails its connection.
        if lengths(value) != lengths(self._own):
            raise ValueError("the peer's address is not of this Gloo's form")
        return value

    def wait(
        self, keys: list[str], timeout: timedelta = timedelta(seconds=PAIRING_SECONDS)
    ) -> None:
        """Waits until all keys are set; RuntimeError after the timeout or a `close`."""
        with self._changed:
            has_all = self._changed.wait_for(
                lambda: self._is_closed or all(key in self._values for key in keys),
                timeout.total_seconds(),
            )
        if self._is_closed:
            raise RuntimeError("the pairing was given up")
        if not has_all:
            raise RuntimeError(f"the peer did not send {keys}")


def lengths(value: bytes) -> tuple[int, int]:
    """Returns the bytes of the address in what Gloo sets for one end, and of all behind it.

    Its form: a host's name and an address, each behind its length, then the identifiers of all
    connections. The second number is negative if the address is cut off. Raises ValueError if the
    value ends before the address.
    """
    at = 0
    length = 0
    for _ in range(2):
        at += length
        if at + LENGTH.size > len(value):
            raise ValueError("an address of Gloo is cut off")
        (length,) = LENGTH.unpack_from(value, at)
        at += LENGTH.size
    return length, len(value) - at - length


class GlooLink:
    """One end of a link; see `collective.link.CollectiveLink`.

    Threads: the collective worker's thread calls all public methods, the driver's `close`. The
    link's own thread makes the group and waits for the end of each operation. Another one aborts.
    """

    def __init__(
        self, device: Any, rank: int, report: Callable[[LinkEvent], None], epoch: int
    ) -> None:
        """Starts to connect. `device`: Gloo's, common to all links of a worker."""
        self._device = device
        self._rank = rank
        self._report = report
        self._epoch = epoch
        self._is_closing = False
        self._store = ChannelStore(lambda blob: report(LinkBlob(epoch, blob)))
        self._group: Any = None
        self._posted: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
        self._unfinished: deque[Any] = deque()  # posted operations, the oldest first
        self._threads: list[threading.Thread] = []
        self._start_thread(self._run)

    def _start_thread(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name="vllm-disagg-gloo", daemon=True)
        self._threads.append(thread)
        thread.start()

    @property
    def is_gone(self) -> bool:
        """Whether all threads have ended.

        A thread that is inside Gloo when Python exits would crash the process.
        """
        return not any(thread.is_alive() for thread in self._threads)

    # The collective worker's thread ---------------------------------------------------------------
    def on_blob(self, blob: bytes) -> None:
        """Takes a blob of the other end's store."""
        self._store.receive_blob(blob)

    def send(self, seq: int, slot: Slot, size: int) -> None:
        """Posts a send of the slot's first `size` bytes; it ends in SlotCompleted(seq)."""
        self._post(seq, self._group.send([torch.from_numpy(slot[:size])], 1, 0))

    def receive(self, seq: int, slot: Slot, size: int) -> None:
        """Posts a receive of `size` bytes into the slot; it ends in SlotCompleted(seq)."""
        self._post(seq, self._group.recv([torch.from_numpy(slot[:size])], 0, 0))

    def _post(self, seq: int, work: Any) -> None:
        self._unfinished.append(work)
        self._posted.put((seq, work))

    def close(self) -> None:
        """Aborts all operations, without waiting; `is_gone` reports the end."""
        self._is_closing = True
        self._store.close()
        self._posted.put(None)
        self._start_thread(self._abort)

    def _abort(self) -> None:
        for work in list(self._unfinished):
            try:
                work.wait(ABORT_TIMEOUT)
            except RuntimeError as error:  # the intended effect
                log.debug("gloo: link %d: operation aborted: %s", self._epoch, error)

    # The link's own thread ------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            options = ProcessGroupGloo._Options()
            options._devices = [self._device]
            options._threads = 1
            options._timeout = timedelta(seconds=PAIRING_SECONDS)
            self._group = ProcessGroupGloo(self._store, self._rank, 2, options)
            self._report(LinkUp(self._epoch))
            while (posted := self._posted.get()) is not None:
                seq, work = posted
                work.wait(NO_TIMEOUT)
                self._unfinished.popleft()
                self._report(SlotCompleted(self._epoch, seq))
        except Exception as error:  # Gloo raises RuntimeError for everything
            if not self._is_closing:
                # Gloo puts "[FILE:LINE] " in front of its message.
                message = str(error).rpartition("] ")[2][:MAX_ERROR_CHARACTERS]
                self._report(LinkFailed(self._epoch, f"gloo: {message}"))
        finally:
            self._unfinished.clear()
            self._group = None


def transport_factory(
    config: Config, kv_device: str
) -> Callable[[DriverPort], CollectiveTransport]:
    """Returns the maker of the transport, with one Gloo device for all links of this worker.

    Raises RuntimeError if this torch has no Gloo or Gloo cannot use the setting `host`, and
    ConfigError for `encrypt_data`.
    """
    if not is_gloo_available():
        raise RuntimeError(f"torch {torch.__version__} was built without Gloo")
    if config.encrypt_data:
        raise ConfigError(
            "transport gloo cannot encrypt KV: set encrypt_data to false, or transport to zmq"
        )
    device = ProcessGroupGloo.create_device(hostname=config.host)

    def make_link(rank: int, report: Callable[[LinkEvent], None], epoch: int) -> GlooLink:
        return GlooLink(device, rank, report, epoch)

    return lambda port: CollectiveTransport("gloo", port, HostStaging(port.memory), make_link)
