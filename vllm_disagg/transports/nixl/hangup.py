"""SIGHUP in a process with UCX: it does what it did before UCX was loaded.

UCX catches SIGHUP when it is loaded, also under nohup. A closed terminal would not end the process,
but have UCX log all it does. While it logs UCX 1.23 can wait for its own lock for ever.

UCX_DEBUG_SIGNO=0 prevents that only where it is set before UCX is loaded. vLLM may have loaded UCX
already: on machines with CUDA it imports nixl_ep, which comes with nixl.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
from collections.abc import Mapping
from pathlib import Path

log = logging.getLogger("vllm_disagg.nixl")

DEBUG_SIGNAL = "UCX_DEBUG_SIGNO"
UCX_LIBRARY = "libucs"  # the one that catches signals; each copy of UCX has its own
MAPS_PATH = Path("/proc/self/maps")


def environment(given: Mapping[str, str]) -> dict[str, str]:
    """Returns what keeps UCX from catching SIGHUP, unless the user has `given` a signal."""
    # UCX that is loaded reads it no more, and would warn of an unused variable.
    if DEBUG_SIGNAL in given or UCX_LIBRARY.encode() in MAPS_PATH.read_bytes():
        return {}
    return {DEBUG_SIGNAL: "0"}


def restore(given: Mapping[str, str]) -> None:
    """Takes SIGHUP back from UCX, unless the user has `given` a signal. Any thread may call it."""
    if DEBUG_SIGNAL in given:
        return
    try:
        _restore()
    except (OSError, AttributeError) as error:  # a UCX that is loaded or built in another way
        log.warning(
            "nixl: UCX keeps SIGHUP (%s): a closed terminal does not end this engine; start it with"
            " %s=0 to change that",
            error,
            DEBUG_SIGNAL,
        )


def _restore() -> None:
    # UCX restores the handler that it has found. It may be that of another copy of UCX.
    previous = None
    handler = _handler()
    while handler != previous and (library := _library_of(handler)).name.startswith(UCX_LIBRARY):
        ctypes.CDLL(str(library), os.RTLD_NOLOAD).ucs_debug_disable_signal(int(signal.SIGHUP))
        previous, handler = handler, _handler()


def _handler() -> int:
    """Returns the address of SIGHUP's handler, or a small number for SIG_DFL and SIG_IGN."""
    # signal.getsignal does not know of handlers that were not set by Python.
    get_handler = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int)
    return get_handler(("PyOS_getsig", ctypes.pythonapi))(signal.SIGHUP) or 0


class _Location(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _library_of(address: int) -> Path:
    """Returns the file of the library that has this address; an empty path if none has."""
    location = _Location()
    ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(location))
    return Path(os.fsdecode(location.file or b""))
