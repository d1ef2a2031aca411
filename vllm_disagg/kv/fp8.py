"""The setting `compress`: bf16 KV crosses the wire as fp8 (e4m3fn), half the bytes, rounded.
Answers are not exact then.

A bf16 has 16 bits, so a table of 65,536 bytes rounds it (to nearest, ties to even; finite values
beyond +-448 become +-448, infinities NaN) and one of 256 words brings it back. Both are made here
by arithmetic from the format's definition (Micikevicius et al., "FP8 formats for deep learning",
2022), without scales, as vLLM's own `--kv-cache-dtype fp8` without calibration.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .extents import Extent
from .layout import RemoteLayout
from .memory import Memory

log = logging.getLogger("vllm_disagg.kv.fp8")

LARGEST = 448.0
NAN, SIGN = 0x7F, 0x80  # codes


def _values() -> npt.NDArray[np.float32]:
    """What the codes 0 to 126 mean, in order: 4 bits of exponent, biased by 7, and 3 of mantissa."""
    exponent, mantissa = np.divmod(np.arange(NAN), 8)
    return np.where(
        exponent > 0, np.ldexp(8 + mantissa, exponent - 10), np.ldexp(mantissa, -9)
    ).astype(np.float32)


def _decoder() -> npt.NDArray[np.uint16]:
    """By code, the bf16 of its value: exact, since its mantissa is longer and its exponents reach
    further.
    """
    positive = (np.append(_values(), np.float32(np.nan)).view(np.uint32) >> 16).astype(np.uint16)
    return np.append(positive, positive | np.uint16(0x8000))


def _encoder() -> npt.NDArray[np.uint8]:
    """By bf16, the code of the nearest value, of two equally near the even one."""
    values = _values()
    given = (np.arange(0x8000, dtype=np.uint32) << 16).view(
        np.float32
    )  # all that are not negative, in order
    middles = (values[:-1] + values[1:]) / 2  # exact
    codes = np.searchsorted(middles, given, side="left")  # a middle itself goes to the lower one
    tie = np.isin(given, middles) & (codes % 2 == 1)
    positive = np.where(np.isfinite(given), codes + tie, NAN).astype(np.uint8)
    return np.append(positive, positive | np.uint8(SIGN))


ENCODE, DECODE = _encoder(), _decoder()


class Fp8:
    """A memory of bf16 KV whose frames, on the wire, are fp8: `read` rounds a copy, `write` widens
    before it lands.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory, self.shape = memory, memory.shape
        self._has_warned = False

    def read(self, extent: Extent, blocks: Sequence[int]) -> list[memoryview]:
        return [self._encoded(frame) for frame in self._memory.read(extent, blocks)]

    def write(
        self,
        extent: Extent,
        blocks: Sequence[int],
        frames: Sequence[memoryview],
        theirs: RemoteLayout | None = None,
    ) -> bool:
        wide = [
            memoryview(DECODE.take(np.frombuffer(frame, np.uint8)).view(np.uint8))  # type: ignore[arg-type]
            for frame in frames
        ]
        return self._memory.write(extent, blocks, wide, theirs)

    def _encoded(self, frame: memoryview) -> memoryview:
        codes = ENCODE.take(np.frombuffer(frame, np.uint16))
        if not self._has_warned and ((codes & NAN) >= NAN - 1).any():
            self._has_warned = True
            log.warning(
                "compress: this model's KV reaches %g, where fp8 ends, and is cut: answers may be far off",
                LARGEST,
            )
        return memoryview(codes)  # type: ignore[arg-type]
