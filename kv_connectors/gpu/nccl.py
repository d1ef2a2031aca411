"""NCCL between GPUs: a collective transport, under the same code as Gloo. Never run on a GPU yet.

vLLM's wrapper finds the library. This module binds the functions that the wrapper lacks: a
communicator that does not block its maker, the query of its state, and a limit on its CTAs.

Threads and streams. The collective worker's thread makes all calls except the abort, which may
wait and has its own thread. Each link has its own stream, so a peer that does not receive delays
no other peer. No call is captured into a CUDA graph: this thread captures nothing, and makes no
call before the first request, when vLLM's own captures are over. No environment variable is set.

Addresses. NCCL makes its own connections: P's end opens a TCP port for the first contact, on the
interface that NCCL chooses (NCCL_SOCKET_IFNAME overrides it). The unique id, 128 bytes with that
address, goes over the authenticated control channel.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable
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
from vllm_disagg.transports.collective.transport import CollectiveTransport
from vllm_disagg.transports.collective.worker import Slot

from .memory import DeviceMemory
from .staging import DeviceStaging

log = logging.getLogger("vllm_disagg.nccl")

# From nccl.h.
SUCCESS = 0  # ncclResult_t
IN_PROGRESS = 7
UINT8 = 1  # ncclDataType_t
UNIQUE_ID_BYTES = 128
API_MAGIC = 0xCAFEBEEF
UNDEFINED_INT = -(2**31)  # NCCL_CONFIG_UNDEF_INT
# A communicator takes at least and at most so many CTAs from the forward pass.
MIN_CTAS = 1
MAX_CTAS = 4


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


class NcclLink:
    """One end of a link; see `collective.worker.CollectiveLink`.

    NCCL takes up one call at a time. While a call is IN_PROGRESS, the next one of this link waits;
    other links go on.
    """

    is_polled = True

    def __init__(
        self,
        library: NcclLibrary,
        device: torch.device,
        rank: int,
        report: Callable[[LinkEvent], None],
        epoch: int,
    ) -> None:
        """Starts to connect. `rank`: 0 is P's end, which makes the unique id."""
        self._library = library
        self._device = device
        self._rank = rank
        self._report = report
        self._epoch = epoch
        self.is_gone = False
        self.stream = torch.cuda.Stream(device, priority=0)
        self._comm = ctypes.c_void_p()
        self._is_open = False
        self._is_closing = False
        self._has_failed = False
        self._waiting_calls: deque[tuple[str, int, Slot, int]] = deque()  # not yet given to NCCL
        self._call_in_progress: int | None = None  # seq of the call that NCCL takes up now
        self._posted: deque[tuple[int, Any]] = deque()  # (seq, event that follows the call)
        if rank == 0:
            unique_id = library.unique_id()
            report(LinkBlob(epoch, unique_id))
            self._open(unique_id)

    def on_blob(self, blob: bytes) -> None:
        """Takes the unique id from the other end, once."""
        if self._rank == 1 and not self._comm:
            self._open(blob)

    def _open(self, unique_id: bytes) -> None:
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise NcclError(f"the peer sent a unique id of {len(unique_id)} bytes")
        torch.cuda.set_device(self._device)  # applies to this thread
        config = comm_config()
        self._library.call(
            "ncclCommInitRankConfig",
            ctypes.byref(self._comm),
            2,
            UniqueId.from_buffer_copy(unique_id),
            self._rank,
            ctypes.byref(config),
        )

    def send(self, seq: int, slot: Slot, size: int) -> None:
        """Posts a send of the slot's first `size` bytes; it ends in SlotCompleted(seq)."""
        self._waiting_calls.append(("ncclSend", seq, slot, size))
        self._make_calls()

    def receive(self, seq: int, slot: Slot, size: int) -> None:
        """Posts a receive of `size` bytes into the slot; it ends in SlotCompleted(seq)."""
        self._waiting_calls.append(("ncclRecv", seq, slot, size))
        self._make_calls()

    def _make_calls(self) -> None:
        """Gives NCCL the waiting calls, one after the other, each with an event behind it."""
        while self._is_open and not self._is_closing and not self._has_failed:
            if self._library.state(self._comm) == IN_PROGRESS:
                return
            if self._call_in_progress is not None:
                self._posted.append((self._call_in_progress, self.stream.record_event()))
                self._call_in_progress = None
            if not self._waiting_calls:
                return
            name, seq, slot, size = self._waiting_calls.popleft()
            self._call_in_progress = seq
            self._library.call(
                name,
                ctypes.c_void_p(slot.data_ptr()),
                size,
                UINT8,
                1 - self._rank,
                self._comm,
                ctypes.c_void_p(self.stream.cuda_stream),
            )

    def poll(self) -> bool:
        """Makes waiting calls and reports ended ones; returns whether to poll again soon."""
        if self._is_closing:
            return not self.is_gone
        if self._has_failed or not self._comm:
            return False
        try:
            return self._advance()
        except NcclError as error:
            self._report(LinkFailed(self._epoch, str(error)))
            self._has_failed = True  # reported once
            return False

    def _advance(self) -> bool:
        if not self._is_open:
            if self._library.state(self._comm) == IN_PROGRESS:
                return True
            self._is_open = True
            self._report(LinkUp(self._epoch))
        self._make_calls()
        while self._posted and self._posted[0][1].query():
            seq, _ = self._posted.popleft()
            self._report(SlotCompleted(self._epoch, seq))
        return bool(self._posted or self._waiting_calls or self._call_in_progress is not None)

    def close(self) -> None:
        """Aborts all calls, without waiting; `is_gone` reports the end."""
        self._is_closing = True
        threading.Thread(target=self._abort, name="vllm-disagg-nccl-abort", daemon=True).start()

    def _abort(self) -> None:
        """Returns when NCCL's kernels have ended, so that none writes into our slots any more."""
        try:
            if self._comm:
                torch.cuda.set_device(self._device)
                self._library.call("ncclCommAbort", self._comm)
            self.stream.synchronize()
            self.is_gone = True
        # The slots are kept forever then: memory is lost, which is better than wrong bytes.
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

        def make_link(rank: int, report: Callable[[LinkEvent], None], epoch: int) -> NcclLink:
            return NcclLink(library, memory.device, rank, report, epoch)

        return CollectiveTransport("nccl", port, DeviceStaging(memory), make_link)

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
