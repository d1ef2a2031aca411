"""On the PYTHONPATH of one decode engine: makes it write what it received wrongly, as the file
$FAULT says.

Python runs this at its start, before anything of vLLM. A fault hits one block of each transfer, the
one that holds the prompt's tokens from 128 on, in all layers or in the one that the fault names,
and all else is as it was. Two blocks that trade places are no fault that anybody could see:
attention does not ask where a key lies.
"""

import os
from pathlib import Path

import prepare_engine  # noqa: F401 - of the folder `steady`, whose sitecustomize.py this one hides

from vllm_disagg.kv.memory import HostMemory

BLOCK = 128
write = HostMemory.write


def hit(memory, extent, blocks, fault, only):
    at = (BLOCK - extent.token) // BLOCK
    if extent.token % BLOCK or not 0 <= at < len(blocks):
        return
    for layer in range(extent.layer, extent.layer_end):
        for plane in memory.planes[layer] if only in ("", str(layer)) else ():
            row = plane[blocks[at]]
            if fault == "corrupted":
                row ^= 0x80  # in bfloat16: other signs, other exponents
            elif fault == "misplaced" and at:
                plane[blocks[at - 1]] = row
            if fault != "corrupted":
                row[:] = 0


def faulty(self, extent, blocks, frames, remote_layout=None):
    done = write(self, extent, blocks, frames, remote_layout)
    fault, _, only = Path(os.environ["FAULT"]).read_text().partition(" ")
    if done and fault:
        hit(self, extent, blocks, fault, only)
    return done


if "FAULT" in os.environ:
    HostMemory.write = faulty
