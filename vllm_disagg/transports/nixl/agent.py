"""One NIXL agent with UCX underneath: registered memory, peers, reads. No thread of ours, none of
NIXL's.

Facts of NIXL 1.5 and UCX that shape this file (docs/explanation/transports.md tells how they were
found):

* Without a progress thread nothing happens between calls, so an idle agent costs nothing.  A read
  through shared memory
  (CMA) ends within the call that posts it; others go on in the hardware or need `progress` at the
  other end.
* A read cannot be taken back: releasing its handle cancels "what it can".  Nor does an error say
  that the other
  descriptors of the read have ended.  Only when the whole agent is gone (`close`) can nothing be
  written any more.
* UCX asks nobody who they are.  What it listens on is therefore kept to the loopback or to RDMA
  devices, unless the user
  has said otherwise (`environment`).
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import ipaddress
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import zmq

from ...config import Config
from ...kv.memory import FRAME_BYTES
from .notes import Run

RDMA_DEVICES_PATH = Path("/sys/class/infiniband")

_environment = threading.Lock()
T = TypeVar("T")


class NixlError(Exception):
    """NIXL or UCX cannot; the text says what."""


def unavailable_reason(config: Config) -> str:
    """Why there can be no NIXL here; empty where there can."""
    if importlib.util.find_spec("nixl") is None:
        return "nixl is not installed (pip install 'vllm-disagg[nixl]')"
    if config.encrypt_data:
        return "encrypt_data is on, and NIXL does not encrypt"
    if config.transport == "auto" and not rdma_devices():
        return "this machine has no RDMA device; TCP is as fast here, and lets in readers with a ticket only"
    if config.transport == "auto" and ipaddress.ip_address(config.host).is_loopback:
        return "host is loopback, where no RDMA device is; TCP is as fast there, and lets in readers with a ticket only"
    return ""


def rdma_devices() -> list[str]:
    return sorted(os.listdir(RDMA_DEVICES_PATH)) if RDMA_DEVICES_PATH.is_dir() else []


def environment(config: Config, given: Mapping[str, str]) -> dict[str, str]:
    """What UCX is told besides what the user tells it."""
    if "UCX_TLS" in given or "UCX_NET_DEVICES" in given:
        return {}
    if ipaddress.ip_address(config.host).is_loopback:
        return {"UCX_NET_DEVICES": "lo"}
    return {"UCX_TLS": "^tcp"} if config.transport == "auto" else {}


class Read:
    """One that was posted and has not ended."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle


class Agent:
    """Made by `make`, in whatever thread has the time; then used by one thread only, until `close`."""

    def __init__(self, name: str, config: Config, regions: Sequence[Run]) -> None:
        self.name = name
        self.regions = list(regions)
        with _translated(), _told(config):
            api = importlib.import_module("nixl._api")
            self._agent: Any = api.nixl_agent(
                name, api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            )
            if "UCX" not in self._agent.backends:
                raise NixlError("this build of NIXL has no UCX")
            self._agent.register_memory([(*region, 0, "") for region in regions], "DRAM")
        self._kept: list[npt.NDArray[np.uint8]] = []  # what is registered besides
        self._open: set[Read] = set()

    def buffer(self, size: int) -> npt.NDArray[np.uint8]:
        """Registered memory, as long as the agent lives."""
        made = np.zeros(size, np.uint8)
        with _translated():
            self._agent.register_memory([(made.ctypes.data, size, 0, "")], "DRAM")
        self._kept.append(made)
        return made

    def metadata(self) -> bytes:
        with _translated():
            return bytes(self._agent.get_agent_metadata())

    def add(self, metadata: bytes) -> str:
        """The name of the agent whose metadata these are; it can be read from now on."""
        with _translated():
            name = self._agent.add_remote_agent(metadata)
        return name.decode(errors="replace") if isinstance(name, bytes) else str(name)

    def remove(self, peer: str) -> None:
        with contextlib.suppress(NixlError), _translated():  # it may have gone by itself
            self._agent.remove_remote_agent(peer)

    def read(self, peer: str, ours: Sequence[Run], theirs: Sequence[Run]) -> Read | None:
        """Start to read their runs into ours, one by one of the same length; None: done.

        `Refused` before anything was posted, any other NixlError after.
        """
        try:
            with _translated():
                local = self._agent.get_xfer_descs(_rows(ours), "DRAM")
                remote = self._agent.get_xfer_descs(_rows(theirs), "DRAM")
                handle = self._agent.initialize_xfer("READ", local, remote, peer)
        except NixlError as error:
            raise NixlRefused(str(error)) from None
        read = Read(handle)
        self._open.add(read)
        with _translated():
            return None if self._ended(read, self._agent.transfer(handle)) else read

    def is_done(self, read: Read) -> bool:
        """NixlError when it has failed; then some of it may still be under way."""
        with _translated():
            return self._ended(read, self._agent.check_xfer_state(read.handle))

    def _ended(self, read: Read, status: str) -> bool:
        if status == "ERR":
            raise NixlError("the read failed")
        if status == "DONE":
            self._open.discard(read)
            read.handle.release()
            read.handle = None  # it holds the agent
        return status == "DONE"

    def progress(self) -> None:
        """Let UCX answer peers that need it."""
        with _translated():
            self._agent.get_new_notifs()

    def close(self) -> None:
        """When this returns, nothing can be written into registered memory any more. May take long,
        or for ever.
        """
        for read in self._open:
            with (
                contextlib.suppress(NixlError),
                _translated(),
            ):  # what cannot be cancelled dies with the agent
                read.handle.release()
            read.handle = None
        self._open.clear()
        alive = weakref.ref(self._agent.agent)
        self._agent = (
            None  # nobody else has it: UCX's worker, its connections and registrations go with it
        )
        end = time.monotonic() + 5
        while alive() is not None:  # somebody else has it, as an exception's traceback might
            gc.collect()
            if time.monotonic() > end:
                raise NixlError("NIXL's agent is still in use")
            time.sleep(0.02)
        self._kept.clear()


class NixlRefused(NixlError):
    """Nothing was read."""


class Job(Generic[T]):
    """Something slow, done once by a thread of its own."""

    def __init__(self, do: Callable[[], T]) -> None:
        self.began = time.monotonic()
        self.result: T | None = None
        self.error = ""
        self._thread = threading.Thread(
            target=self._run, args=(do,), name="vllm-disagg-nixl", daemon=True
        )
        self._thread.start()

    def _run(self, do: Callable[[], T]) -> None:
        try:
            self.result = do()
        except Exception as error:
            self.error = (
                str(error) or type(error).__name__
            )  # words only: the traceback would hold the agent

    @property
    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def ends(self, seconds: float) -> bool:
        """Whether it ends well within so many seconds."""
        self._thread.join(max(0.0, seconds))
        return self.is_over and not self.error

    def next_look(self, now: float) -> float:
        return now + min(1.0, max(0.01, (now - self.began) / 4))


def zmq_speed(size: int = 8 << 20, times: int = 3) -> float:
    """Bytes a second that ZMQ moves between two sockets of this process: what NIXL must not fall
    below to be preferred.

    An upper bound of what ZMQ will do between two workers: nothing is checked, copied into blocks
    or shared with others.
    """
    data = memoryview(np.zeros(FRAME_BYTES, np.uint8))  # type: ignore[arg-type]
    count, best = size // FRAME_BYTES, float("inf")
    with (
        tempfile.TemporaryDirectory(prefix="vllm-disagg-") as folder,
        zmq.Context(io_threads=1) as context,
        context.socket(zmq.PULL) as pull,
        context.socket(zmq.PUSH) as push,
    ):
        pull.rcvhwm = push.sndhwm = 0
        pull.rcvtimeo, push.linger = 2000, 0
        pull.bind(f"ipc://{folder}/speed")
        push.connect(f"ipc://{folder}/speed")
        for _ in range(times + 1):  # once for the connection
            began = time.monotonic()
            push.send_multipart([data] * count, copy=False)
            pull.recv_multipart(copy=False)
            best = min(best, time.monotonic() - began)
    return size / best


def _rows(runs: Sequence[Run]) -> npt.NDArray[np.uint64]:
    rows = np.zeros((len(runs), 3), np.uint64)
    rows[:, :2] = runs
    return rows


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Whatever the library raises (its errors have no common base) is a NixlError from here on."""
    try:
        yield
    except NixlError:
        raise
    except Exception as error:
        raise NixlError(f"{type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _told(config: Config) -> Iterator[None]:
    """UCX reads its settings from the environment when an agent is made; others in this process
    keep theirs.

    What the user has set is looked at with the lock held: else another agent's settings look like
    the user's.
    """
    with _environment:
        settings = environment(config, os.environ)
        os.environ.update(settings)
        try:
            yield
        finally:
            for name in settings:
                os.environ.pop(name, None)
