"""KV compressed to fp8 on the wire: the setting `compress`.

bf16 KV crosses the wire as fp8 (e4m3fn), in half the bytes and rounded: answers are not exact.

A table of 65,536 bytes rounds each bf16 to the nearest code, ties to even.  Finite values beyond
+-448 become +-448, infinities become NaN.  A table of 256 entries widens a code again.  Both tables
are computed here from the definition of the format (Micikevicius et al., "FP8 formats for deep
learning", 2022).  There are no scales, as in vLLM's `--kv-cache-dtype fp8` without calibration.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..errors import CopyFailed
from .extents import Extent
from .layout import RemoteLayout
from .memory import Memory

log = logging.getLogger("vllm_disagg.kv.fp8")

LARGEST = 448.0  # finite value
NAN = 0x7F  # the code
SIGN = 0x80  # the bit of a code


def _values() -> npt.NDArray[np.float32]:
    """Returns the values of codes 0 to 126: 4 bits of exponent with bias 7, 3 bits of mantissa."""
    exponent, mantissa = np.divmod(np.arange(NAN), 8)
    normal = np.ldexp(8 + mantissa, exponent - 10)
    subnormal = np.ldexp(mantissa, -9)
    return np.where(exponent > 0, normal, subnormal).astype(np.float32)


def _decoder() -> npt.NDArray[np.uint16]:
    """Returns the bf16 of each code.

    It is exact: bf16 has the longer mantissa and the larger range of exponents.
    """
    positive = (np.append(_values(), np.float32(np.nan)).view(np.uint32) >> 16).astype(np.uint16)
    return np.append(positive, positive | np.uint16(0x8000))


def _encoder() -> npt.NDArray[np.uint8]:
    """Returns the nearest code of each bf16; of two equally near codes, the even one."""
    values = _values()
    # All bf16 values that are not negative, in order.
    given = (np.arange(0x8000, dtype=np.uint32) << 16).view(np.float32)
    middles = (values[:-1] + values[1:]) / 2  # exact
    codes = np.searchsorted(middles, given, side="left")  # a middle goes to the lower code
    is_odd_tie = np.isin(given, middles) & (codes % 2 == 1)
    positive = np.where(np.isfinite(given), codes + is_odd_tie, NAN).astype(np.uint8)
    return np.append(positive, positive | np.uint8(SIGN))


ENCODE = _encoder()
DECODE = _decoder()


class Fp8:
    """A memory of bf16 KV whose frames on the wire are fp8.

    `read` returns rounded copies; `write` widens the frames before they are written.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.shape = memory.shape
        self._has_warned = False

    def prepare_thread(self) -> None:
        """Prepares the calling thread, as `Memory.prepare_thread`."""
        self._memory.prepare_thread()

    def read(self, extent: Extent, blocks: Sequence[int]) -> list[memoryview]:
        """Returns the extent's bytes as fp8: half as many as in memory. Raises CopyFailed."""
        try:
            return [self._encoded(frame) for frame in self._memory.read(extent, blocks)]
        except MemoryError:
            raise CopyFailed("no memory for a copy in fp8") from None

    def write(
        self,
        extent: Extent,
        blocks: Sequence[int],
        frames: Sequence[memoryview],
        remote_layout: RemoteLayout | None = None,
    ) -> bool:
        """Writes fp8 frames, as `Memory.write`. Raises CopyFailed."""
        try:
            wide = [
                DECODE.take(np.frombuffer(frame, np.uint8)).view(np.uint8).data for frame in frames
            ]
        except MemoryError:
            raise CopyFailed("no memory for a copy of a piece in fp8") from None
        return self._memory.write(extent, blocks, wide, remote_layout)

    def _encoded(self, frame: memoryview) -> memoryview:
        codes = ENCODE.take(np.frombuffer(frame, np.uint16))
        if not self._has_warned and ((codes & NAN) >= NAN - 1).any():
            self._has_warned = True
            log.warning(
                "compress: values of this model's KV reach %g, the largest of fp8, and are "
                "clipped: answers may differ much from those without compress",
                LARGEST,
            )
        return memoryview(codes)  # type: ignore[arg-type]
