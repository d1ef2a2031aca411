"""fp8 on the wire: its tables against torch's, for every bf16 and every code."""

from __future__ import annotations

import logging

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from vllm_disagg.errors import CopyFailed
from vllm_disagg.kv import fp8
from vllm_disagg.kv.extents import Extent
from vllm_disagg.kv.fp8 import DECODE, ENCODE, Fp8
from vllm_disagg.kv.memory import HostMemory

ALL = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
CODES = torch.arange(256, dtype=torch.uint8)


def test_every_bf16_is_rounded_as_torch_does() -> None:
    finite = ALL.isfinite()
    rounded = ALL.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert (torch.from_numpy(ENCODE)[finite] == rounded[finite]).all()
    assert (ENCODE[~finite.numpy()] & 0x7F == 0x7F).all(), "what is not a number must stay none"


def test_every_code_comes_back_as_torch_says() -> None:
    expected = CODES.view(torch.float8_e4m3fn).to(torch.bfloat16)
    found = torch.from_numpy(DECODE).view(torch.bfloat16)
    assert found.isnan().sum() == 2 and torch.equal(found.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    assert torch.equal(found.view(torch.uint16)[numbers], expected.view(torch.uint16)[numbers])


def test_what_was_rounded_once_stays() -> None:
    """Decode engines may pass KV on, and what lies in a prefix cache may travel again."""
    assert (ENCODE[DECODE] == np.arange(256)).all()


def cache(values: float) -> HostMemory:
    row = torch.full((4, 20_000), values, dtype=torch.bfloat16).view(torch.uint8).numpy()
    return HostMemory([[row, row.copy()]], 16)


def test_half_the_bytes_travel_and_a_wrong_number_of_them_is_not_written() -> None:
    source, target = cache(1.0625), cache(0)
    extent = Extent(0, 1, 0, 32)
    frames = Fp8(source).read(extent, [1, 3])
    assert sum(frame.nbytes for frame in frames) == 2 * 2 * 20_000
    compressed = Fp8(target)
    for wrong in (frames[:-1], [*frames, frames[0]], source.read(extent, [1, 3])):
        assert not compressed.write(extent, [0, 1], wrong)
    assert not target.write(extent, [0, 1], frames), "an end that does not compress would take it"
    assert not any(plane.any() for plane in target.planes[0])
    assert compressed.write(extent, [0, 1], frames)
    for plane in target.planes[0]:
        assert (torch.from_numpy(plane).view(torch.bfloat16)[:2] == 1.0).all() and not plane[
            2:
        ].any()


@pytest.mark.parametrize(
    ("value", "warns"), [(400.0, False), (-440.0, True), (float("nan"), True), (0.0, False)]
)
def test_values_beyond_fp8_are_logged_once(
    value: float, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("vllm_disagg").propagate = True
    memory = Fp8(cache(value))
    for _ in range(2):
        memory.read(Extent(0, 1, 0, 32), [1, 3])
    assert caplog.text.count("the largest of fp8") == warns


def test_a_lack_of_memory_costs_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended the thread of all transfers."""

    class Lacking:
        def take(self, _: object) -> None:
            raise MemoryError

    memory = Fp8(HostMemory([[np.zeros((2, 16), np.uint8)]], 4))
    piece = (Extent(0, 1, 0, 4), [0])
    frames = memory.read(*piece)
    with monkeypatch.context() as patched:
        patched.setattr(fp8, "ENCODE", Lacking())
        patched.setattr(fp8, "DECODE", Lacking())
        with pytest.raises(CopyFailed, match="no memory for a copy in fp8"):
            memory.read(*piece)
        with pytest.raises(CopyFailed, match="no memory for a copy of a piece in fp8"):
            memory.write(*piece, frames)
    assert memory.write(*piece, frames)
