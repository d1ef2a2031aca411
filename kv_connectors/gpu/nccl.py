"""NCCL between GPUs: a link of two ranks behind the code that Gloo runs under. Never run on a GPU
yet.

vLLM's wrapper finds the library; what it lacks is bound here: a communicator that does not block
its maker, the look at its state, and few CTAs. All calls are the mover's thread's, except for the
abort, which may wait and has a thread of its own. Every link has a stream of its own: a peer that
does not receive holds up nobody else. No environment variable is touched, and nothing of this is
ever captured into a CUDA graph: the calls are made by a thread that captures nothing, and none
before the first request, when vLLM's own captures are over.

NCCL finds its way by itself: P's end opens a TCP port for the meeting, on the interface that NCCL
chooses (NCCL_SOCKET_IFNAME says another); the 128 bytes that lead there go over the authenticated
control channel.
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

from .device import DeviceMemory, DeviceStaging

log = logging.getLogger("vllm_disagg.nccl")

SUCCESS, IN_PROGRESS = 0, 7
UINT8 = 1  # ncclDataType_t
UNIQUE_ID = 128  # bytes
MAGIC, UNDEFINED = 0xCAFEBEEF, -(2**31)  # NCCL_API_MAGIC, NCCL_CONFIG_UNDEF_INT
CTAS = (1, 4)  # the least and the most that a communicator takes from the forward pass


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * UNIQUE_ID),)


class CommConfig(ctypes.Structure):
    """ncclConfig_t as it was in 2.17; later versions only append, and take what is missing from
    their defaults.
    """

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
    return CommConfig(
        ctypes.sizeof(CommConfig), MAGIC, CommConfig.VERSION, 0, UNDEFINED, *CTAS, None
    )


class NcclError(RuntimeError):
    """NCCL refused; in its own words."""


class Library:
    """The functions we call. `path`: of libnccl.so.2; raises OSError or AttributeError for what it
    lacks.
    """

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)
        comm, stream = ctypes.c_void_p, ctypes.c_void_p
        move = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, comm, stream]
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
            "ncclSend": move,
            "ncclRecv": move,
        }
        self._functions: dict[str, Any] = {}
        for name, arguments in signatures.items():
            function = self._library[name]
            function.argtypes, function.restype = arguments, ctypes.c_int
            self._functions[name] = function
        self._words = self._library["ncclGetErrorString"]
        self._words.argtypes, self._words.restype = [ctypes.c_int], ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> int:
        """SUCCESS or IN_PROGRESS; anything else is an NcclError."""
        result = int(self._functions[name](*arguments))
        self.check(name, result)
        return result

    def check(self, name: str, result: int) -> None:
        if result not in (SUCCESS, IN_PROGRESS):
            raise NcclError(f"{name}: {self._words(result).decode()}")

    def version(self) -> str:
        found = ctypes.c_int()
        self.call("ncclGetVersion", ctypes.byref(found))
        return f"{found.value // 10000}.{found.value // 100 % 100}.{found.value % 100}"

    def unique_id(self) -> bytes:
        made = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(ctypes.string_at(ctypes.byref(made), UNIQUE_ID))

    def state(self, comm: ctypes.c_void_p) -> int:
        """SUCCESS when what was asked of it has been taken up; IN_PROGRESS before; else an
        NcclError.
        """
        found = ctypes.c_int()
        self.call("ncclCommGetAsyncError", comm, ctypes.byref(found))
        self.check("communicator", found.value)
        return found.value


class NcclLink:
    """See `worker.Link`. A call that NCCL has only begun (IN_PROGRESS) holds back the next one, of
    this link alone.
    """

    is_polled = True

    def __init__(
        self,
        library: Library,
        device: torch.device,
        rank: int,
        tell: Callable[[LinkEvent], None],
        epoch: int,
    ) -> None:
        self._library, self._device, self._rank = library, device, rank
        self._tell, self._epoch = tell, epoch
        self.is_gone = False
        self.stream = torch.cuda.Stream(device, priority=0)
        self._comm = ctypes.c_void_p()
        self._is_open = self._is_closing = self._has_failed = False
        self._todo: deque[tuple[str, int, Slot, int]] = deque()  # not yet given to NCCL
        self._begun: int | None = None  # seq of the call that NCCL has begun
        self._posted: deque[tuple[int, Any]] = deque()  # seq, the event behind it
        if rank == 0:
            unique_id = library.unique_id()
            tell(LinkBlob(epoch, unique_id))
            self._open(unique_id)

    def on_blob(self, blob: bytes) -> None:
        if self._rank == 1 and not self._comm:
            self._open(blob)

    def _open(self, unique_id: bytes) -> None:
        if len(unique_id) != UNIQUE_ID:
            raise NcclError(f"an id of {len(unique_id)} bytes")
        torch.cuda.set_device(self._device)  # of this thread
        made = UniqueId.from_buffer_copy(unique_id)
        config = comm_config()
        self._library.call(
            "ncclCommInitRankConfig",
            ctypes.byref(self._comm),
            2,
            made,
            self._rank,
            ctypes.byref(config),
        )

    def send(self, seq: int, slot: Slot, size: int) -> None:
        self._todo.append(("ncclSend", seq, slot, size))
        self._go_on()

    def receive(self, seq: int, slot: Slot, size: int) -> None:
        self._todo.append(("ncclRecv", seq, slot, size))
        self._go_on()

    def _go_on(self) -> None:
        """Give NCCL what is to be done, one call after the other, each with an event behind it."""
        while self._is_open and not self._is_closing and not self._has_failed:
            if self._library.state(self._comm) == IN_PROGRESS:
                return
            if self._begun is not None:
                self._posted.append((self._begun, self.stream.record_event()))
                self._begun = None
            if not self._todo:
                return
            name, self._begun, slot, size = self._todo.popleft()
            peer, stream = 1 - self._rank, ctypes.c_void_p(self.stream.cuda_stream)
            self._library.call(
                name, ctypes.c_void_p(slot.data_ptr()), size, UINT8, peer, self._comm, stream
            )

    def poll(self) -> bool:
        if self._is_closing:
            return not self.is_gone
        if self._has_failed or not self._comm:
            return False
        try:
            return self._look()
        except NcclError as error:
            self._tell(LinkFailed(self._epoch, str(error)))
            self._has_failed = True  # said once
            return False

    def _look(self) -> bool:
        if not self._is_open:
            if self._library.state(self._comm) == IN_PROGRESS:
                return True
            self._is_open = True
            self._tell(LinkUp(self._epoch))
        self._go_on()
        while self._posted and self._posted[0][1].query():
            self._tell(SlotCompleted(self._epoch, self._posted.popleft()[0]))
        return bool(self._posted or self._todo or self._begun is not None)

    def close(self) -> None:
        self._is_closing = True
        threading.Thread(target=self._abort, name="vllm-disagg-nccl-abort", daemon=True).start()

    def _abort(self) -> None:
        """Returns when NCCL's kernels have ended, so that nothing writes into our slots any more."""
        try:
            if self._comm:
                torch.cuda.set_device(self._device)
                self._library.call("ncclCommAbort", self._comm)
            self.stream.synchronize()
            self.is_gone = True
        except (
            Exception
        ) as error:  # then the slots are kept for ever: better lost memory than lost bytes
            log.error("aborting an NCCL communicator: %r; its memory stays taken", error)


def transport_factory(config: Config) -> Callable[[DriverPort], CollectiveTransport]:
    """RuntimeError where there is no GPU or no NCCL."""
    if config.encrypt_data:
        raise ConfigError(
            "transport nccl cannot encrypt KV: set encrypt_data to false, or transport to zmq"
        )
    if not torch.cuda.is_available():
        raise RuntimeError("there is no GPU here")
    library = load()
    log.info("NCCL %s", library.version())

    def make(port: DriverPort) -> CollectiveTransport:
        memory = port.memory
        if not isinstance(memory, DeviceMemory):
            raise ConfigError(
                "transport nccl moves KV in GPU memory; this engine's is in host memory: use zmq or gloo"
            )

        def make_link(rank: int, tell: Callable[[LinkEvent], None], epoch: int) -> NcclLink:
            return NcclLink(library, memory.device, rank, tell, epoch)

        return CollectiveTransport("nccl", port, DeviceStaging(memory), make_link)

    return make


def load() -> Library:
    """The library that vLLM would load; RuntimeError if there is none, or too old a one."""
    from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary  # noqa: PLC0415 - loads NCCL

    try:
        return Library(NCCLLibrary().lib._name)
    except (OSError, AttributeError, RuntimeError) as error:
        raise RuntimeError(f"no NCCL: {error}") from None
