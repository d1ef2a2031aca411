"""One NIXL agent over UCX: registered memory, peers, reads. No thread of this project or of NIXL.

Facts of NIXL 1.5 and UCX that shape this file (docs/explanation/transports.md has how they were
found):

* Without a progress thread nothing happens between calls, so an idle agent costs nothing. A read
  through shared memory (CMA) ends within the call that posts it. Other reads go on in the hardware,
  or need `progress` at the other end.
* A read cannot be cancelled: releasing its handle cancels "what it can". An error of a read does
  not mean that the other descriptors of the read have ended. Only when the whole agent is gone
  (`close`), nothing can be written any more.
* UCX authenticates no peer. So UCX is restricted to the loopback or to RDMA devices, unless the
  user has set UCX's variables (`environment`).
* Between two GPUs of one machine UCX copies by CUDA's own means (cuda_ipc), and still needs TCP or
  RDMA to set the connection up: its shared memory cannot report a peer that has died.
* A GPU may go on with copies when UCX is gone, so `close` waits for the device as well.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import importlib.util
import ipaddress
import os
import tempfile
import threading
import time
import weakref
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import zmq

from ...config import Config
from ...kv.memory import FRAME_BYTES, ByteBuffer, DirectMemory, MemoryPlace
from ...kv.runs import RunList, Runs, joined, runs_of
from . import hangup

RDMA_DEVICES_PATH = Path("/sys/class/infiniband")
VERBS_PATH = Path("/sys/class/infiniband_verbs")
VERBS_FILES_PATH = Path("/dev/infiniband")
AGENT_GONE_SECONDS = 5.0  # until a closed agent must have no reference any more
AGENT_GONE_POLL_SECONDS = 0.02
SPEED_TEST_MILLISECONDS = 2000  # after which measuring ZMQ fails
IN_HOST_MEMORY = MemoryPlace()
ZERO_COPY_READS = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"

_environment_lock = threading.Lock()
# Agents that may still write: they keep their buffers, whose memory would be used again.
_not_gone: list[Agent] = []
T = TypeVar("T")


def _installed_release() -> str:
    """Returns NIXL's installed release; empty where it is not known."""
    for name in ("nixl", "nixl-cu12", "nixl-cu13"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


# Read at the start: an installation later changes no library that this process has loaded.
RELEASE = _installed_release()


class NixlError(Exception):
    """A failure of NIXL or UCX; the text is the library's."""


def unavailable_reason(config: Config, kv_device: str) -> str:
    """Returns why NIXL is not used here; empty where it can be."""
    if importlib.util.find_spec("nixl") is None:
        return "nixl is not installed (pip install 'vllm-disagg[nixl]')"
    if config.encrypt_data:
        return "encrypt_data is on, and NIXL does not encrypt"
    # The operator has chosen NIXL, with what UCX accepts from strangers; `auto` must not. On a GPU
    # it does: the others are slower by far there, and only this machine reaches UCX's port.
    if config.transport != "auto" or kv_device != "cpu":
        return ""
    tcp_is_better = "TCP is as fast here, and accepts only receivers with a token"
    if not rdma_devices():
        return f"{no_rdma_reason()}; {tcp_is_better}"
    if ipaddress.ip_address(config.host).is_loopback:
        return f"host is loopback, which no RDMA device serves; {tcp_is_better}"
    return ""


def rdma_devices() -> list[str]:
    """Returns the names of the RDMA devices that UCX can use here."""
    return [name for name, obstacle in rdma_obstacles().items() if not obstacle]


def no_rdma_reason() -> str:
    """Returns why UCX can use no RDMA device here."""
    found = rdma_obstacles()
    if not found:
        return "this machine has no RDMA device"
    why = "; ".join(f"{name}: {obstacle}" for name, obstacle in found.items())
    return f"no RDMA device can be used here ({why})"


def rdma_obstacles() -> dict[str, str]:
    """Returns why UCX cannot use each RDMA device of this machine; empty for those that it can."""
    # A container may see the devices of its host without their files.
    if not RDMA_DEVICES_PATH.is_dir():
        return {}
    files: dict[str, Path] = {}
    for verbs in VERBS_PATH.glob("uverbs*"):
        files[_content(verbs / "ibdev")] = VERBS_FILES_PATH / verbs.name
    return {
        name: _rdma_obstacle(name, files.get(name))
        for name in sorted(os.listdir(RDMA_DEVICES_PATH))
    }


def _rdma_obstacle(name: str, file: Path | None) -> str:
    ports = (RDMA_DEVICES_PATH / name / "ports").glob("*/state")
    if not any(_content(state).endswith(": ACTIVE") for state in ports):
        return "no active port"
    if file is None or not os.access(file, os.R_OK | os.W_OK):
        return f"no access to {file or VERBS_FILES_PATH}"
    return ""


def _content(file: Path) -> str:
    # Devices may go while they are looked at.
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def environment(
    config: Config,
    given: Mapping[str, str],
    place: MemoryPlace = IN_HOST_MEMORY,
) -> dict[str, str]:
    """Returns environment variables for UCX, beside those that the user has `given`."""
    settings = _allowed_transports(config, given, place)
    # Without NVLink UCX emulates reads between GPUs, through host memory and with the peer's help.
    if place.kind == "VRAM" and ZERO_COPY_READS not in given:
        settings[ZERO_COPY_READS] = "y"
    return settings


def _allowed_transports(
    config: Config, given: Mapping[str, str], place: MemoryPlace
) -> dict[str, str]:
    # None if the user has set one: one of ours beside it could leave UCX without any transport.
    if "UCX_TLS" in given or "UCX_NET_DEVICES" in given:
        return {}
    if ipaddress.ip_address(config.host).is_loopback:
        return {"UCX_NET_DEVICES": "lo"}
    if config.transport != "auto":
        return {}
    # UCX would have no transport at all. GPUs of this machine are reached all the same.
    if place.kind == "VRAM" and not rdma_devices():
        return {"UCX_NET_DEVICES": "lo"}
    # All transports but TCP, which would listen on every interface and serve any host's reads.
    return {"UCX_TLS": "^tcp"}


class Read:
    """A read that was posted and has not ended."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle


class Agent:
    """A NIXL agent and the memory registered with it.

    Making one takes seconds, so any thread may do that. Then one thread uses the agent until
    `close`. Any method may raise NixlError.
    """

    # One thread, because NIXL takes no locks in an agent without a listener (sync mode NONE).

    def __init__(self, name: str, config: Config, memory: DirectMemory) -> None:
        self.name = name
        self.place = memory.place
        # One each for the whole backing storage, however many layers it holds: registering pins
        # pages, and costs a network card an entry. Allocations of a GPU that touch stay apart: a
        # key of CUDA's is for one allocation.
        self.regions = memory.regions()
        if self.place.kind != "VRAM":
            self.regions = joined(self.regions)
        self._memory = memory
        memory.prepare_thread()
        # Imported here: the package is optional, and its agent loads UCX.
        with _NIXL_ERRORS, _ucx_environment(config, memory.place):
            api = importlib.import_module("nixl._api")
            settings = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            self._agent: Any = api.nixl_agent(name, settings)
            if "UCX" not in self._agent.backends:
                raise NixlError("this build of NIXL has no UCX")
            self._register(self.regions)
        # Registered besides the regions. Referred to until the agent is gone: their memory would
        # be freed while UCX may still write into it.
        self._buffers: list[ByteBuffer] = []
        self._open: set[Read] = set()

    def _register(self, regions: Runs) -> None:
        place = self.place
        rows = [(address, size, place.device, "") for address, size in regions.tolist()]
        try:
            self._agent.register_memory(rows, place.kind)
        except Exception as error:
            where = f"{int(regions[:, 1].sum())} bytes of {place.kind} {place.device}"
            needs = ": UCX needs CUDA, and a GPU whose memory other processes may map (not MIG)"
            hint = needs if place.kind == "VRAM" else ""
            raise NixlError(f"UCX does not register {where} ({error}){hint}") from None

    def buffer(self, size: int) -> ByteBuffer:
        """Returns new memory, registered as long as the agent exists."""
        with _NIXL_ERRORS:
            made = self._memory.new_buffer(size)
            self._register(runs_of([(made.address, size)]))
        self._buffers.append(made)
        return made

    def metadata(self) -> bytes:
        """Returns the data that a peer needs to read from this agent."""
        with _NIXL_ERRORS:
            return bytes(self._agent.get_agent_metadata())

    def add(self, metadata: bytes) -> str:
        """Adds a peer to read from, by its metadata; returns its name."""
        with _NIXL_ERRORS:
            name = self._agent.add_remote_agent(metadata)
        # A name of the peer's choice, in any bytes: the caller compares it with the expected one.
        return name.decode(errors="replace") if isinstance(name, bytes) else str(name)

    def remove(self, peer: str) -> None:
        """Removes a peer, from which no read is open."""
        # NIXL may have removed the peer already.
        with contextlib.suppress(NixlError), _NIXL_ERRORS:
            self._agent.remove_remote_agent(peer)

    def read(self, peer: str, local: RunList, remote: RunList, place: MemoryPlace) -> Read | None:
        """Starts to read the peer's runs, which are at `place`, into local ones, pair by pair.

        Both have the same lengths. Returns None if the read has ended already. Raises NixlRefused
        before anything was posted, any other NixlError after.
        """
        # Until `transfer` nothing is posted, so a failure up to there costs this read only, and not
        # the whole agent.
        try:
            handle = self.request(peer, local, remote, place)
        except NixlError as error:
            raise NixlRefused(str(error)) from None
        read = Read(handle)
        # Before posting: a read whose posting fails may be under way, and `close` must release it.
        self._open.add(read)
        with _NIXL_ERRORS:
            return None if self._ended(read, self._agent.transfer(handle)) else read

    def request(self, peer: str, local: RunList, remote: RunList, place: MemoryPlace) -> Any:
        """Returns NIXL's handle of a read that is not posted; see `read`."""
        # No prepared lists of all blocks: they save a tenth of a millisecond of 8,192 descriptors
        # (benchmarks/gpu_descriptors.py), and both ends would have to lay blocks out alike.
        with _NIXL_ERRORS:
            local_descriptors = self._descriptors(local, self.place)
            remote_descriptors = self._descriptors(remote, place)
            return self._agent.initialize_xfer("READ", local_descriptors, remote_descriptors, peer)

    def _descriptors(self, runs: RunList, place: MemoryPlace) -> Any:
        if isinstance(runs, list):
            # By an array of plain numbers: less code than of a list, in NIXL and in numpy.
            numbers = array("Q", [n for run in runs for n in (*run, place.device)])
            rows = np.frombuffer(numbers, np.uint64).reshape(-1, 3)
            return self._agent.get_xfer_descs(rows, place.kind)
        # Of an array: of a list of tuples each number would be converted as a Python object.
        rows = np.empty((len(runs), 3), np.uint64)
        rows[:, :2] = runs
        rows[:, 2] = place.device
        return self._agent.get_xfer_descs(rows, place.kind)

    def is_done(self, read: Read) -> bool:
        """Returns whether a read has ended well.

        Raises NixlError if it has failed; then parts of it may still be under way.
        """
        with _NIXL_ERRORS:
            return self._ended(read, self._agent.check_xfer_state(read.handle))

    def _ended(self, read: Read, status: str) -> bool:
        # The read stays in `_open`: only `close` may give up its handle.
        if status == "ERR":
            raise NixlError("the read failed")
        if status == "DONE":
            self._open.discard(read)
            read.handle.release()
            read.handle = None  # a handle refers to the agent
        return status == "DONE"

    def progress(self) -> None:
        """Lets UCX work for peers that need it."""
        # NIXL has no call for progress alone; looking for notifications includes it.
        with _NIXL_ERRORS:
            self._agent.get_new_notifs()

    def close(self) -> None:
        """Closes the agent; then nothing can be written into registered memory any more.

        May take long, or for ever. Raises NixlError if the agent is still referred to. After any
        error it may still write; so it is kept for good, with its buffers.
        """
        try:
            self._close()
        except Exception:
            _not_gone.append(self)
            raise

    def _close(self) -> None:
        self._memory.prepare_thread()
        for read in self._open:
            # Raises for an active read. One that cannot be cancelled ends with the agent.
            with contextlib.suppress(NixlError), _NIXL_ERRORS:
                read.handle.release()
            read.handle = None
        self._open.clear()
        # The library's own object, inside its Python wrapper, is the one that must go.
        alive = weakref.ref(self._agent.agent)
        # The last reference: UCX's worker, its connections and registrations end with the agent.
        self._agent = None
        end = time.monotonic() + AGENT_GONE_SECONDS
        # Another reference may exist, for instance in an exception's traceback.
        while alive() is not None:
            gc.collect()
            if time.monotonic() > end:
                raise NixlError("NIXL's agent is still in use")
            time.sleep(AGENT_GONE_POLL_SECONDS)
        # UCX does not wait for copies that a GPU has begun.
        self._memory.wait_for_device()
        # After the agent only: until then UCX may write there.
        self._buffers.clear()


class NixlRefused(NixlError):
    """NIXL refused a read before anything was posted."""


class Job(Generic[T]):
    """A slow call, made once by a thread started for it.

    After the end, either `result` is set, or `error` is the reason why not. `error` is text only: a
    traceback would refer to the agent. `has_begun` is False where no thread could be started.
    """

    def __init__(self, do: Callable[[], T]) -> None:
        self.started_at = time.monotonic()
        self.result: T | None = None
        self.error = ""
        self.has_begun = True
        # A daemon: a call into UCX that never returns must not keep the process from ending.
        self._thread = threading.Thread(
            target=self._run, args=(do,), name="vllm-disagg-nixl", daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError as error:  # this process may have no more threads
            self.error = str(error)
            self.has_begun = False

    def _run(self, do: Callable[[], T]) -> None:
        try:
            self.result = do()
        except Exception as error:
            self.error = str(error) or type(error).__name__

    @property
    def is_over(self) -> bool:
        """Whether the call has returned or raised."""
        # Not by `result`: a call may return None.
        return not self._thread.is_alive()

    def ends(self, seconds: float) -> bool:
        """Waits for so many seconds at most; returns whether the call has ended well."""
        if not self.is_over:  # a thread that was never started cannot be joined
            self._thread.join(max(0.0, seconds))
        return self.is_over and not self.error

    def next_deadline(self, now: float) -> float:
        """Returns when to check the job: later, the longer it runs; after 1 s at most."""
        # Nothing signals the end. A quarter of the time so far delays it by a quarter at most.
        return now + min(1.0, max(0.01, (now - self.started_at) / 4))


def zmq_speed(size: int = 8 << 20, times: int = 3) -> float:
    """Measures how many bytes a second ZMQ moves between two sockets of this process.

    NIXL is preferred only if it is not slower. The figure is an upper bound of ZMQ's speed between
    two workers: nothing is checked, copied into blocks or shared with other connections.
    """
    data = memoryview(np.zeros(FRAME_BYTES, np.uint8))  # type: ignore[arg-type]
    count = size // FRAME_BYTES
    best_seconds = float("inf")
    with (
        tempfile.TemporaryDirectory(prefix="vllm-disagg-") as folder,
        zmq.Context(io_threads=1) as context,
        context.socket(zmq.PULL) as pull,
        context.socket(zmq.PUSH) as push,
    ):
        pull.rcvhwm = 0
        # A failure and no hang: the agent for reading waits for this figure.
        pull.rcvtimeo = SPEED_TEST_MILLISECONDS
        push.sndhwm = 0
        push.linger = 0
        pull.bind(f"ipc://{folder}/speed")
        push.connect(f"ipc://{folder}/speed")
        for _ in range(times + 1):  # one more for the connection
            started_at = time.monotonic()
            push.send_multipart([data] * count, copy=False)
            pull.recv_multipart(copy=False)
            # The best, not the mean: engines on the same cores only make it slower.
            best_seconds = min(best_seconds, time.monotonic() - started_at)
    return size / best_seconds


class _NixlErrors:
    """Turns all exceptions of the library, which have no common base, into NixlError."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, NixlError):
            raise NixlError(f"{type(error).__name__}: {error}") from error


# One for all calls: it has no state, and a read enters it three times.
_NIXL_ERRORS = _NixlErrors()


@contextlib.contextmanager
def _ucx_environment(config: Config, place: MemoryPlace) -> Iterator[None]:
    """Sets UCX's variables while an agent is made: UCX reads them then, and never again.

    Then SIGHUP does again what it did before UCX was loaded (hangup.py).

    Other users of UCX in this process keep their settings. The user's variables are read with the
    lock held; otherwise another agent's settings would look like the user's.
    """
    with _environment_lock:
        settings = environment(config, os.environ, place)
        settings |= hangup.environment(os.environ)
        os.environ.update(settings)
        try:
            yield
        finally:
            for name in settings:
                os.environ.pop(name, None)
            hangup.restore(os.environ)
