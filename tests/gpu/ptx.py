"""Compiles our kernels for GPUs and executes the PTX on the CPU; no GPU is needed.

    python tests/gpu/ptx.py [--json] [--stop] [ARCHITECTURE ...]   without one: 80, 90, 100 and 120

`kernels.move`, `kernels.checksum` and `block_sums.sum_blocks` run as they are, but their launches
go to `PtxLauncher`: it compiles what Triton would, for one architecture, checks that no 32-bit
product is a part of an address, and executes. Bytes must be those of the planes' arithmetic, sums
those of torch, and no other byte may change.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import plane_arithmetic
import ptx_machine
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from kv_connectors.gpu import block_sums, kernels
from vllm_disagg.kv.planes import Plane

ARCHITECTURES = (80, 90, 100, 120)
KERNELS = [(kernels, "_move_words"), (kernels, "_sum_words"), (block_sums, "_sum_words")]
BLOCKS = 5
SOURCE, TARGET = [4, 0, 2], [1, 3, 0]
FAR_BYTES = (1 << 30) + 4096  # twice this distance is more than a 32-bit number holds
FAR_ROWS = 3
# A row of more than one program, with a masked tail.
LONG_WORDS = kernels.MAX_WORDS_PER_PROGRAM + 77


class PtxLauncher:
    """Stands in for a kernel: `launcher[grid](*args)` executes its PTX for one architecture."""

    def __init__(self, kernel: Any, architecture: int, found: dict[str, int]) -> None:
        """Counts in `found` what was compiled, executed, and found wrong."""
        self._kernel = kernel
        self._target = GPUTarget("cuda", architecture, 32)
        self._backend = make_backend(self._target)
        self._bind = create_function_from_signature(kernel.signature, kernel.params, self._backend)
        self._compiled: dict[str, ptx_machine.Kernel] = {}
        self._found = found
        self.memory: list[torch.Tensor | mmap.mmap] = []  # that the kernel may use

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        """Returns the function that launches the kernel on a grid."""

        def launch(*args: Any) -> None:
            memory = ptx_machine.Memory()
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            for held in [*tensors, *self.memory]:
                memory.permit(*_place(held))
            arguments = [
                arg.data_ptr() if isinstance(arg, torch.Tensor) else arg
                for arg, parameter in zip(args, self._kernel.params, strict=True)
                if not parameter.is_constexpr
            ]
            ptx_machine.launch(self._compile(args), memory, [*grid, 1, 1][:3], arguments)
            self._found["executed"] += 1

        return launch

    def _compile(self, args: Sequence[Any]) -> ptx_machine.Kernel:
        bound, specialization, _ = self._bind(*args)
        options, signature, constants, attributes = self._kernel._pack_args(
            self._backend, {}, bound, specialization, {}
        )
        key = f"{signature} {constants} {attributes}"
        if key not in self._compiled:
            source = ASTSource(self._kernel, signature, constants, attributes)
            compiled = triton.compile(source, target=self._target, options=options.__dict__)
            assert compiled.asm["cubin"], "ptxas made no machine code"
            parsed = ptx_machine.parse(compiled.asm["ptx"])
            self._found["compiled"] += 1
            self._found["narrow_products"] += len(parsed.narrow_products_in_addresses())
            self._compiled[key] = parsed
        return self._compiled[key]


def _place(held: torch.Tensor | mmap.mmap) -> tuple[int, int]:
    """Returns (address, bytes)."""
    if isinstance(held, mmap.mmap):
        return ctypes.addressof(ctypes.c_uint8.from_buffer(held)), len(held)
    return held.data_ptr(), held.numel() * held.element_size()


@contextmanager
def on_ptx(architecture: int, found: dict[str, int]) -> Iterator[list[PtxLauncher]]:
    """Has the product launch all its kernels as PTX of one architecture."""
    originals = [getattr(module, name) for module, name in KERNELS]
    launchers = [PtxLauncher(kernel, architecture, found) for kernel in originals]
    for (module, name), launcher in zip(KERNELS, launchers, strict=True):
        setattr(module, name, launcher)
    try:
        yield launchers
    finally:
        for (module, name), kernel in zip(KERNELS, originals, strict=True):
            setattr(module, name, kernel)


def planes_in(cache: torch.Tensor, word_bytes: int) -> list[Plane]:
    """Returns planes of each form, most of them for words of this size."""
    start = cache.data_ptr() + word_bytes  # so that no larger word is aligned
    short = Plane(start, 16 * word_bytes, 1, 0, 5 * word_bytes)
    beside = short._replace(base=short.base + 8 * word_bytes)  # in one launch with it
    even = Plane(start + 128 * word_bytes, 16 * word_bytes, 1, 0, 8 * word_bytes)
    rows = Plane(start + 256 * word_bytes, 3 * word_bytes, 3, 32 * word_bytes, 3 * word_bytes)
    long_bytes = LONG_WORDS * word_bytes
    long = Plane(start + 512 * word_bytes, 2 * long_bytes, 2, long_bytes, long_bytes)
    # Leaves the wire unaligned for the last one.
    odd = Plane(start + 384 * word_bytes, 16, 1, 0, 5)
    last = even._replace(base=even.base + 8 * word_bytes)
    return [short, beside, even, rows, long, odd, last]


def prove_moves(launchers: Sequence[PtxLauncher], word_bytes: int) -> bool:
    """Returns whether gather and scatter move the right bytes and leave all others alone."""
    size = (512 + (2 * BLOCKS + 1) * LONG_WORDS) * word_bytes
    source, target = (torch.randint(256, (size,), dtype=torch.uint8) for _ in "st")
    expected = target.clone()
    there = planes_in(source, word_bytes)
    wire_bytes = sum(plane.block_bytes for plane in there) * len(SOURCE)
    wire, right = (torch.zeros(wire_bytes + 64, dtype=torch.uint8) for _ in "wr")
    for launcher in launchers:
        launcher.memory = [source, target, expected]
    numbers = torch.tensor(kernels.table(there, SOURCE))
    moved = kernels.move(there, numbers, wire, gather=True)
    plane_arithmetic.move(there, numbers, right, gather=True)
    is_gathered = moved == wire_bytes and torch.equal(wire, right)
    for place, move in ((target, kernels.move), (expected, plane_arithmetic.move)):
        planes = planes_in(place, word_bytes)
        move(planes, torch.tensor(kernels.table(planes, TARGET)), wire, gather=False)
    return is_gathered and torch.equal(target, expected)


def far_region() -> mmap.mmap:
    """Returns memory with 256 bytes at each multiple of FAR_BYTES."""
    # Only the pages in use exist.
    region = mmap.mmap(-1, FAR_ROWS * FAR_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for number in range(FAR_ROWS):
        start = number * FAR_BYTES
        region[start : start + 256] = bytes((number * 64 + at) % 251 for at in range(256))
    return region


def prove_far_rows(launchers: Sequence[PtxLauncher]) -> bool:
    """Returns whether rows and blocks more than 2 GiB apart are found."""
    region = far_region()
    address, _ = _place(region)
    for launcher in launchers:
        launcher.memory = [region]
    planes = [Plane(address, 64, FAR_ROWS, FAR_BYTES, 64), Plane(address, FAR_BYTES, 1, 0, 128)]
    wire, right = (torch.zeros(2 * (FAR_ROWS * 64 + 128), dtype=torch.uint8) for _ in "wr")
    numbers = torch.tensor(kernels.table(planes, [2, 1]))
    kernels.move(planes, numbers, wire, gather=True)
    plane_arithmetic.move(planes, numbers, right, gather=True)
    return torch.equal(wire, right)


def prove_checksum() -> bool:
    """Returns whether the sum is that of the definition, and notices exchanged words."""
    is_right = True
    for size in (4 * 5000, 4 * 77, 333):
        wire = torch.randint(256, (size,), dtype=torch.uint8)
        words = wire.view(torch.int32 if size % 4 == 0 else torch.uint8).tolist()
        expected = sum(word * (2 * place + 3) for place, word in enumerate(words))
        total = torch.tensor([5])
        kernels.checksum(wire, total)
        is_right = is_right and (total.item() - 5 - expected) % (1 << 64) == 0
    return is_right


def sums_of(planes: Sequence[Sequence[Plane]], blocks: Sequence[int]) -> torch.Tensor:
    """Returns the sums of blocks by the kernel, (layers, blocks)."""
    sums = torch.full((len(planes), len(blocks)), -1)
    launches = block_sums.summed_planes(planes, torch.tensor)
    block_sums.sum_blocks(launches, torch.tensor(blocks), sums)
    return sums


def sums_by_torch(planes: Sequence[Sequence[Plane]], blocks: Sequence[int]) -> torch.Tensor:
    """Returns the same from the bytes of each block, by torch."""
    sums = []
    for layer in planes:
        size = sum(plane.block_bytes for plane in layer)
        for block in blocks:
            content = torch.zeros(size, dtype=torch.uint8)
            numbers = torch.tensor(kernels.table(layer, [block]))
            plane_arithmetic.move(layer, numbers, content, gather=True)
            sums.append(block_sums.sum_of_bytes(content))
    return torch.stack(sums).view(len(planes), len(blocks))


def prove_block_sums(launchers: Sequence[PtxLauncher]) -> bool:
    """Returns whether sums of blocks are those of torch, also of rows more than 2 GiB apart."""
    word = block_sums.WORD_BYTES
    cache = torch.randint(256, ((512 + 12 * LONG_WORDS) * word,), dtype=torch.uint8)
    short, beside, even, rows, long, _, last = planes_in(cache, word)
    near = [[short, rows], [beside], [even, last], [long]]
    region = far_region()
    address, _ = _place(region)
    far = [[Plane(address, 64, FAR_ROWS, FAR_BYTES, 64)], [Plane(address, FAR_BYTES, 1, 0, 128)]]
    for launcher in launchers:
        launcher.memory = [cache, region]
    return all(
        torch.equal(sums_of(planes, blocks), sums_by_torch(planes, blocks))
        for planes, blocks in ((near, SOURCE), (far, [2, 1]))
    )


def _holds(name: str, proof: Callable[[], bool]) -> bool:
    """Returns whether a proof holds; prints which one does not."""
    try:
        is_right = proof()
    except MemoryError as error:  # an access that a GPU would not forgive either
        print(f"{name}: {error}", file=sys.stderr)
        return False
    if not is_right:
        print(f"{name}: wrong bytes", file=sys.stderr)
    return is_right


def prove(architectures: Sequence[int], *, stop: bool = False) -> dict[str, Any]:
    """Returns counts of all proofs: compiled, executed, 32-bit products in addresses, wrong.

    `stop`: the first proof that fails is the last one.
    """
    found = {"compiled": 0, "executed": 0, "narrow_products": 0, "wrong": 0}
    torch.manual_seed(1)
    for architecture in architectures:
        with on_ptx(architecture, found) as launchers:
            proofs: dict[str, Callable[[], bool]] = {
                f"words of {size} bytes": functools.partial(prove_moves, launchers, size)
                for size in kernels.WORD_TYPES
            }
            proofs["far rows"] = functools.partial(prove_far_rows, launchers)
            proofs["checksum"] = prove_checksum
            proofs["block sums"] = functools.partial(prove_block_sums, launchers)
            for name, proof in proofs.items():
                found["wrong"] += not _holds(f"sm_{architecture}, {name}", proof)
                if stop and is_bad(found):
                    return {"architectures": list(architectures), **found}
    return {"architectures": list(architectures), **found}


def is_bad(found: dict[str, Any]) -> bool:
    """Returns whether a kernel is wrong, or addresses memory by a 32-bit product."""
    return bool(found["wrong"] or found["narrow_products"])


def main() -> None:
    """Prints the counts; exits with 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON only")
    parser.add_argument("--stop", action="store_true", help="end at the first proof that fails")
    parser.add_argument("architectures", nargs="*", type=int, default=ARCHITECTURES)
    args = parser.parse_args()
    if triton.knobs.runtime.interpret:
        raise SystemExit("ptx: nothing is compiled while TRITON_INTERPRET is set; unset it")
    found = prove(args.architectures, stop=args.stop)
    if args.json:
        print(json.dumps(found))
    else:
        print(", ".join(f"{name.replace('_', ' ')}: {value}" for name, value in found.items()))
    raise SystemExit(is_bad(found))


if __name__ == "__main__":
    main()
