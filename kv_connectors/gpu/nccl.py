"""NCCL between GPUs: a collective transport, under the same code as Gloo. Never run on a GPU yet.

vLLM's wrapper finds the library. This module binds the functions that the wrapper lacks: a
communicator that does not block its maker, the query of its state, and a limit on its CTAs.

Threads and streams. Each link has its own thread and its own stream, so a peer that does not
receive delays no other peer. Making a communicator and aborting it may wait for the GPU and for
the peer; only the link's thread waits. No call is captured into a CUDA graph: these threads capture
nothing, and make no call before the first request, when vLLM's own captures are over. No
environment variable is set.

Proof. A new communicator carries a piece of known bytes before any KV (`collective/proof.py`).

`transport: auto` leaves NCCL out; docs/explanation/transports.md has the reasons.

Addresses. NCCL makes its own connections: P's end opens a TCP port for the first contact, on the
interface that NCCL chooses (NCCL_SOCKET_IFNAME overrides it). The unique id, 128 bytes with that
address, goes over the authenticated control channel.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vllm_disagg.config import Config
from vllm_disagg.errors import ConfigError
from vllm_disagg.transports.base import DriverPort
from vllm_disagg.transports.collective.channel import (
    LinkBlob,
    LinkEvent,
    LinkFailed,
    LinkUp,
    SlotCompleted,
)
from vllm_disagg.transports.collective.link import Slot
from vllm_disagg.transports.collective.transport import CollectiveTransport
from vllm_disagg.transports.collective.worker import POLL_SECONDS

from .memory import DeviceMemory
from .runtime import Runtime
from .staging import DeviceStaging

log = logging.getLogger("vllm_disagg.nccl")

# From nccl.h.
SUCCESS = 0  # ncclResult_t
IN_PROGRESS = 7
UINT8 = 1  # ncclDataType_t
LINK_STREAMS = 16  # of torch's 32 a device: the others are for vLLM and for copies
UNIQUE_ID_BYTES = 128
API_MAGIC = 0xCAFEBEEF
UNDEFINED_INT = -(2**31)  # NCCL_CONFIG_UNDEF_INT
# A communicator takes at least and at most so many CTAs from the forward pass.
MIN_CTAS = 1
MAX_CTAS = 4
# Of one piece. Each costs about 1 ms of Python at both ends together, so smaller ones would bound
# the rate: 4 MiB to 5 GB/s. A communicator has four slots of this size at each end, 64 MiB. At most
# 16 of a worker are open, 1 GiB; with those that are being aborted, MAX_SLOTS_BYTES.
PIECE_BYTES = 16 << 20


class UniqueId(ctypes.Structure):
    """NCCL's ncclUniqueId: by it the two ranks of a communicator find each other."""

    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID_BYTES),)


class CommConfig(ctypes.Structure):
    """NCCL's ncclConfig_t of 2.17; later versions append fields, and take defaults for them."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cgaClusterSize", ctypes.c_int),
        ("minCTAs", ctypes.c_int),
        ("maxCTAs", ctypes.c_int),
        ("netName", ctypes.c_char_p),
    )
    VERSION = 21700


def comm_config() -> CommConfig:
    """Returns the configuration of a communicator that does not block, with few CTAs."""
    return CommConfig(
        size=ctypes.sizeof(CommConfig),
        magic=API_MAGIC,
        version=CommConfig.VERSION,
        blocking=0,
        cgaClusterSize=UNDEFINED_INT,
        minCTAs=MIN_CTAS,
        maxCTAs=MAX_CTAS,
        netName=None,
    )


class NcclError(RuntimeError):
    """An NCCL call has failed; the text is NCCL's."""


class NcclLibrary:
    """The functions of libnccl.so.2 that this transport calls."""

    def __init__(self, path: str) -> None:
        """Loads the library; OSError or AttributeError if it or a function is missing."""
        self._library = ctypes.CDLL(path)
        comm = ctypes.c_void_p
        stream = ctypes.c_void_p
        transfer = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, comm, stream]
        signatures: dict[str, list[Any]] = {
            "ncclGetVersion": [ctypes.POINTER(ctypes.c_int)],
            "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
            "ncclCommInitRankConfig": [
                ctypes.POINTER(comm),
                ctypes.c_int,
                UniqueId,
                ctypes.c_int,
                ctypes.POINTER(CommConfig),
            ],
            "ncclCommGetAsyncError": [comm, ctypes.POINTER(ctypes.c_int)],
            "ncclCommAbort": [comm],
            "ncclSend": transfer,
            "ncclRecv": transfer,
        }
        self._functions: dict[str, Any] = {}
        for name, arguments in signatures.items():
            function = self._library[name]
            function.argtypes = arguments
            function.restype = ctypes.c_int
            self._functions[name] = function
        self._error_string = self._library["ncclGetErrorString"]
        self._error_string.argtypes = [ctypes.c_int]
        self._error_string.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> int:
        """Calls a function; returns SUCCESS or IN_PROGRESS, raises NcclError otherwise."""
        result = int(self._functions[name](*arguments))
        self.check(name, result)
        return result

    def check(self, name: str, result: int) -> None:
        """Raises NcclError unless a result is SUCCESS or IN_PROGRESS."""
        if result not in (SUCCESS, IN_PROGRESS):
            raise NcclError(f"{name}: {self._error_string(result).decode()}")

    def version(self) -> str:
        """Returns the version of the library, as in 2.27.3."""
        version = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(version))
        return f"{version.value // 10000}.{version.value // 100 % 100}.{version.value % 100}"

    def unique_id(self) -> bytes:
        """Returns a new unique id; opens a TCP port for the other rank."""
        unique_id = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(unique_id))
        return bytes(ctypes.string_at(ctypes.byref(unique_id), UNIQUE_ID_BYTES))

    def state(self, comm: ctypes.c_void_p) -> int:
        """Returns IN_PROGRESS until a communicator has taken up its last call, then SUCCESS.

        Raises NcclError if the communicator has failed.
        """
        result = ctypes.c_int()
        self.call("ncclCommGetAsyncError", comm, ctypes.byref(result))
        self.check("communicator", result.value)
        return result.value


@dataclass(frozen=True)
class NcclCall:
    """A send or a receive that waits for the link's thread."""

    function: str
    seq: int
    slot: Slot
    size: int


class LinkStreams:
    """Streams of a worker's links: each link has one, and returns it when its work has ended.

    torch gives out 32 streams of a device, and then the first one again. If each link took a new
    one, some would share those of vLLM or of our copies, which a frozen peer's call would stop.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Creates no stream yet."""
        self.runtime = runtime
        self._made = 0
        self._free: deque[Any] = deque()

    def take(self) -> Any:
        """Returns a stream without work. Raises NcclError if there is none."""
        if self._free:
            return self._free.popleft()
        if self._made == LINK_STREAMS:
            raise NcclError(f"all {LINK_STREAMS} streams of links have work")
        self._made += 1
        return self.runtime.new_stream()

    def give_back(self, stream: Any) -> None:
        """Takes a stream whose work has ended, from any thread."""
        self._free.append(stream)


class NcclLink:
    """One end of a link; see `collective.link.CollectiveLink`.

    The link's own thread makes all of its NCCL calls, from the unique id to the abort. So a call
    that waits, for a GPU or a peer, holds up this link alone. NCCL permits one thread at a time in
    a communicator, and an abort frees what another thread's call may be using.
    """

    def __init__(
        self,
        library: NcclLibrary,
        streams: LinkStreams,
        rank: int,
        report: Callable[[LinkEvent], None],
        epoch: int,
    ) -> None:
        """Starts to connect. `rank`: 0 is P's end, which makes the unique id.

        Raises NcclError if all streams have work, and RuntimeError without a thread.
        """
        self._library = library
        self._runtime = streams.runtime
        self._streams = streams
        self._rank = rank
        self._report = report
        self._epoch = epoch
        self.is_gone = False
        self.stream = streams.take()
        self._comm = ctypes.c_void_p()
        self._is_closing = False
        # Calls and the other end's blob; None wakes the thread for the close.
        self._inbox: queue.SimpleQueue[NcclCall | bytes | None] = queue.SimpleQueue()
        self._posted: deque[tuple[int, Any]] = deque()  # (seq, event that follows the call)
        # A daemon: a call into NCCL that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="vllm-disagg-nccl", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # this process may have no more threads
            streams.give_back(self.stream)
            raise

    # The collective worker's thread ---------------------------------------------------------------
    def on_blob(self, blob: bytes) -> None:
        """Takes the unique id from the other end."""
        self._inbox.put(blob)

    def send(self, seq: int, slot: Slot, size: int) -> None:
        """Posts a send of the slot's first `size` bytes; it ends in SlotCompleted(seq)."""
        self._inbox.put(NcclCall("ncclSend", seq, slot, size))

    def receive(self, seq: int, slot: Slot, size: int) -> None:
        """Posts a receive of `size` bytes into the slot; it ends in SlotCompleted(seq)."""
        self._inbox.put(NcclCall("ncclRecv", seq, slot, size))

    # Also the driver's thread ---------------------------------------------------------------------
    def close(self) -> None:
        """Has the link's thread abort all calls; `is_gone` reports the end."""
        self._is_closing = True
        self._inbox.put(None)

    # The link's own thread ------------------------------------------------------------------------
    def _run(self) -> None:
        try:
            self._runtime.use_device()
            self._connect()
            while not self._is_closing:
                self._advance()
        except Exception as error:  # NCCL's errors, and those of CUDA
            self._report(LinkFailed(self._epoch, str(error)))
        # After a failure the channel decides, and closes both ends.
        while not self._is_closing:
            self._inbox.get()
        self._abort()

    def _connect(self) -> None:
        """Makes the communicator; returns early if the link is closed meanwhile."""
        if self._rank == 0:
            unique_id = self._library.unique_id()
            self._report(LinkBlob(self._epoch, unique_id))
        else:
            blob = self._inbox.get()
            if not isinstance(blob, bytes):
                return  # closed before the other end has sent it
            unique_id = blob
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise NcclError(f"the peer sent a unique id of {len(unique_id)} bytes")
        config = comm_config()
        self._library.call(
            "ncclCommInitRankConfig",
            ctypes.byref(self._comm),
            2,
            UniqueId.from_buffer_copy(unique_id),
            self._rank,
            ctypes.byref(config),
        )
        if self._wait_until_taken_up():
            self._report(LinkUp(self._epoch))

    def _advance(self) -> None:
        """Makes the next call, if one comes soon, and reports the calls that have ended."""
        try:
            # Without a timeout when nothing is under way: an idle link wakes no thread.
            call = self._inbox.get(timeout=POLL_SECONDS if self._posted else None)
        except queue.Empty:
            call = None
        if isinstance(call, NcclCall) and not self._is_closing:
            self._make(call)
        if not self._is_closing:
            # Raises what has gone wrong since: NCCL's kernels do not end by themselves then.
            self._library.state(self._comm)
            self._report_completed()

    def _make(self, call: NcclCall) -> None:
        self._library.call(
            call.function,
            ctypes.c_void_p(call.slot.data_ptr()),
            call.size,
            UINT8,
            1 - self._rank,
            self._comm,
            ctypes.c_void_p(self.stream.cuda_stream),
        )
        # The kernel is on the stream only then, and only an event behind it shows its end.
        if self._wait_until_taken_up():
            self._posted.append((call.seq, self._runtime.record_event(self.stream)))

    def _wait_until_taken_up(self) -> bool:
        """Waits while the last call is IN_PROGRESS; returns False if the link is closed first.

        NCCL takes up one call at a time.
        """
        while not self._is_closing:
            if self._library.state(self._comm) == SUCCESS:
                return True
            self._report_completed()
            time.sleep(POLL_SECONDS)
        return False

    def _report_completed(self) -> None:
        while self._posted and self._posted[0][1].query():
            seq, _ = self._posted.popleft()
            self._report(SlotCompleted(self._epoch, seq))

    def _abort(self) -> None:
        """Returns when NCCL's kernels have ended, so that none writes into our slots any more."""
        try:
            if self._comm:
                self._library.call("ncclCommAbort", self._comm)
            self._runtime.record_event(self.stream).synchronize()
            self._streams.give_back(self.stream)
            self.is_gone = True
        # Slots and stream are kept forever then: memory is lost, which is better than wrong bytes.
        except Exception as error:
            log.error(
                "nccl: aborting a communicator failed: %r; the memory of its slots stays in use",
                error,
            )


def transport_factory(
    config: Config, kv_device: str
) -> Callable[[DriverPort], CollectiveTransport]:
    """Returns the maker of the transport.

    Raises RuntimeError without a GPU or NCCL, and ConfigError for `encrypt_data`. The maker raises
    ConfigError if KV is in host memory.
    """
    if config.encrypt_data:
        raise ConfigError(
            "transport nccl cannot encrypt KV: set encrypt_data to false, or transport to zmq"
        )
    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU here")
    library = load()
    log.info("nccl: library version %s", library.version())

    def make(port: DriverPort) -> CollectiveTransport:
        memory = port.memory
        if not isinstance(memory, DeviceMemory):
            raise ConfigError(
                "transport nccl moves KV in GPU memory, and this engine's is in host memory: set"
                " transport to zmq or gloo"
            )

        streams = LinkStreams(memory.runtime)

        def make_link(rank: int, report: Callable[[LinkEvent], None], epoch: int) -> NcclLink:
            return NcclLink(library, streams, rank, report, epoch)

        piece_bytes = max(PIECE_BYTES, config.piece_bytes)
        return CollectiveTransport("nccl", port, DeviceStaging(memory), make_link, piece_bytes)

    return make


def load() -> NcclLibrary:
    """Returns the library that vLLM would load; RuntimeError if there is none, or an old one."""
    from vllm.distributed.device_communicators.pynccl_wrapper import (  # noqa: PLC0415 - loads NCCL
        NCCLLibrary,
    )

    try:
        return NcclLibrary(NCCLLibrary().lib._name)
    except (OSError, AttributeError, RuntimeError) as error:
        raise RuntimeError(f"no NCCL: {error}") from None
