"""The machine code's source, PTX, executed for each architecture, as `python tests/gpu/ptx.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ptx_machine import parse

pytest.importorskip("triton", reason="there is no Triton here")

PROOF = Path(__file__).parent / "ptx.py"


def test_compiled_kernels_move_and_sum_the_right_bytes() -> None:
    """In a process of its own, because other tests interpret the kernels."""
    environment = {**os.environ, "TRITON_DEFAULT_FP_FUSION": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(PROOF), "--json", "--stop"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.stdout, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["narrow_products"] == 0
    assert found["wrong"] == 0
    assert found["architectures"] == [80, 90, 100, 120]
    # Four words in two directions, checksums of two words, sums of blocks.
    assert found["compiled"] >= 4 * 11
    assert done.returncode == 0


PTX = """
.visible .entry narrow(
	.param .u64 .ptr .global .align 1 narrow_param_0,
	.param .u32 narrow_param_1
)
.reqntid 32
{
	.reg .b32 	%r<4>;
	ld.param.b64 	%rd1, [narrow_param_0];
	ld.param.b32 	%r1, [narrow_param_1];
	mov.u32 	%r2, %ctaid.x;
	mul.lo.s32 	%r3, %r2, %r1;          // rows times their stride
	mul.lo.s32 	%r4, %r3, %r1;
	cvt.s64.s32 	%rd2, %r3;
	add.s64 	%rd3, %rd1, %rd2;
	st.global.b32 [ %rd3 + 0 ], { %r4 };
	ret;
}
"""


def test_a_32_bit_product_in_an_address_is_found() -> None:
    kernel = parse(PTX)
    assert kernel.parameters == [("narrow_param_0", 64), ("narrow_param_1", 32)]
    (found,) = kernel.narrow_products_in_addresses()  # the other one is stored
    assert found.operands == ("%r3", "%r2", "%r1")
    wide = parse(PTX.replace("mul.lo.s32 \t%r3", "mul.lo.s64 \t%r3"))
    assert wide.narrow_products_in_addresses() == []
