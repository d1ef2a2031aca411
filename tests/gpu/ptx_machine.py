"""Runs compiled PTX on the CPU: the threads of a whole grid, side by side in numpy.

It has what our kernels compile to and refuses the rest. Each access must be aligned, as on a GPU,
and lie in memory that the kernel was given. A register is an array of 64-bit numbers, one for each
thread, of which narrower instructions use the low bits.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]

WARP_THREADS = 32
ALL_BITS = (1 << 64) - 1
SHARED_ADDRESS = 1 << 16
SHARED_BYTES = 1 << 12
MULTIPLIED_IN_32_BITS = re.compile(r"(mul|mad)\.lo\.[us]32|mul24\..*|mad24\..*")


@dataclass(frozen=True)
class Instruction:
    """One instruction: `@guard opcode operands`, as in `@!%p1 st.global.b64 [%rd1+8], {%rd2}`."""

    guard: str  # a predicate, "!" before it if negated; empty: always
    opcode: str
    operands: tuple[str, ...]

    @property
    def is_store(self) -> bool:
        """Returns whether the first operand is an address, and no result."""
        return self.opcode.startswith("st.")

    @property
    def address(self) -> str:
        """Returns the operand in square brackets; empty without one."""
        return next((operand for operand in self.operands if operand.startswith("[")), "")

    @property
    def results(self) -> list[str]:
        """Returns the registers that are written."""
        if self.is_store or not self.operands:
            return []
        return _registers(self.operands[0])

    @property
    def sources(self) -> list[str]:
        """Returns the registers that are read."""
        read = self.operands if self.is_store else self.operands[1:]
        return [register for operand in read for register in _registers(operand)]


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel."""

    name: str
    threads: int
    parameters: list[tuple[str, int]]  # name, bits
    instructions: list[Instruction]

    def narrow_products_in_addresses(self) -> list[Instruction]:
        """Returns the 32-bit products on which the address of any access depends."""
        wanted: set[str] = set()
        for instruction in self.instructions:
            wanted.update(_registers(instruction.address))
        found: list[Instruction] = []
        before = -1
        while len(wanted) > before:
            before = len(wanted)
            for instruction in self.instructions:
                if wanted.intersection(instruction.results):
                    wanted.update(instruction.sources)
        for instruction in self.instructions:
            is_narrow = MULTIPLIED_IN_32_BITS.fullmatch(instruction.opcode)
            if is_narrow and wanted.intersection(instruction.results):
                found.append(instruction)
        return found


def parse(ptx: str) -> Kernel:
    """Returns the kernel of a PTX file with one entry."""
    text = re.sub(r"//.*", "", ptx)
    entry = re.search(r"\.entry (\w+)\((.*?)\)\s*\.reqntid (\d+)[^{]*\{\n(.*?)\n\}", text, re.S)
    if entry is None:
        raise ValueError("no entry with a fixed number of threads in this PTX")
    name, parameters, threads, body = entry.groups()
    body = re.sub(r"^\s*(\.(loc|pragma).*|\$\w+:)$", "", body, flags=re.M)
    instructions = []
    for statement in body.split(";"):
        words = statement.split()
        if words and not words[0].startswith("."):
            instructions.append(_instruction(" ".join(words)))
    found = re.findall(r"\.param \.[a-z](\d+)[^,]*?(\w+)\s*(?:,|$)", parameters)
    return Kernel(name, int(threads), [(name, int(bits)) for bits, name in found], instructions)


def _instruction(statement: str) -> Instruction:
    found = re.fullmatch(r"(?:@(!?%\w+) )?([\w.]+)(?: (.*))?", statement)
    if found is None:
        raise ValueError(f"PTX that is not understood: {statement}")
    guard, opcode, rest = found.groups()
    operands = re.findall(r"\{.*?\}|\[.*?\]|[^,\s]+", rest or "")
    return Instruction(guard or "", opcode, tuple(operand.replace(" ", "") for operand in operands))


def _registers(operand: str) -> list[str]:
    return re.findall(r"%(?:p|r|rd|rs|f|fd)\d+", operand)


class Memory:
    """The global memory that a kernel may use: byte ranges of this process."""

    def __init__(self) -> None:
        """Permits nothing yet."""
        self._ranges: list[tuple[int, npt.NDArray[np.uint8]]] = []

    def permit(self, address: int, size: int) -> None:
        """Permits access to `size` bytes of this process; the caller keeps them alive."""
        buffer = (ctypes.c_uint8 * size).from_address(address)
        self.add(address, np.frombuffer(memoryview(buffer).cast("B"), np.uint8))

    def add(self, address: int, content: npt.NDArray[np.uint8]) -> None:
        """Permits access to an array, at any address."""
        self._ranges.append((address, content))

    def load(self, addresses: Bits, width: int) -> Bits:
        """Returns one little-endian word of `width` bytes from each address."""
        words = np.zeros((len(addresses), 8), np.uint8)
        for found, content, places in self._places(addresses, width):
            words[found, :width] = content[places]
        return words.view("<u8").reshape(-1).astype(np.uint64)

    def store(self, addresses: Bits, values: Bits, width: int) -> None:
        """Writes the low `width` bytes of each value to its address."""
        words = values.astype("<u8").view(np.uint8).reshape(-1, 8)
        for found, content, places in self._places(addresses, width):
            content[places] = words[found, :width]

    def _places(
        self, addresses: Bits, width: int
    ) -> Iterator[tuple[Flags, npt.NDArray[np.uint8], npt.NDArray[np.int64]]]:
        """Yields, by range: whose addresses it holds, its bytes, and the places there."""
        if (addresses % np.uint64(width)).any():
            raise MemoryError(f"a word of {width} bytes at an address that is not aligned")
        count = 0
        for start, content in self._ranges:
            offsets = (addresses - np.uint64(start)).astype(np.int64)
            found = (offsets >= 0) & (offsets <= len(content) - width)
            count += int(found.sum())
            if found.any():
                yield found, content, offsets[found, None] + np.arange(width)
        if count != len(addresses):
            raise MemoryError(f"{len(addresses) - count} accesses outside the kernel's memory")


class Grid:
    """Executes a kernel at all places of a grid."""

    def __init__(
        self,
        kernel: Kernel,
        memory: Memory,
        size: Sequence[int],
        arguments: Sequence[int],
    ) -> None:
        """Creates the threads. `arguments`: numbers and addresses, by parameter."""
        places = np.indices(size, np.uint64).reshape(len(size), -1)  # by axis
        count = places.shape[1]
        self._kernel = kernel
        self._memory = memory
        self._threads = kernel.threads * count
        self._registers: dict[str, Bits] = {}
        # Each place has a part of it for itself.
        self._shared = Memory()
        self._shared.add(SHARED_ADDRESS, np.zeros(count * SHARED_BYTES, np.uint8))
        parts = np.arange(count, dtype=np.uint64) * np.uint64(SHARED_BYTES)
        self._shared_addresses = np.repeat(parts + np.uint64(SHARED_ADDRESS), kernel.threads)
        names = [name for name, _ in kernel.parameters]
        # Behind those of Triton's functions are two for scratch memory, which ours do not use.
        self._parameters = dict(zip(names, arguments, strict=False))
        numbers = np.arange(self._threads, dtype=np.uint64)
        self._specials = {"%tid.x": numbers % np.uint64(kernel.threads)}
        for axis, indices, places_of_axis in zip("xyz", places, size, strict=True):
            self._specials[f"%ctaid.{axis}"] = np.repeat(indices, kernel.threads)
            self._specials[f"%nctaid.{axis}"] = self._constant(places_of_axis)

    def run(self) -> None:
        """Executes all instructions, each for all threads; our kernels have no branches."""
        for instruction in self._kernel.instructions:
            if instruction.opcode == "ret":
                return
            self._execute(instruction)

    def _execute(self, instruction: Instruction) -> None:
        active = self._guard(instruction.guard)
        name, *kinds = instruction.opcode.split(".")
        kind = kinds[-1] if kinds else ""
        if name in ("ld", "st", "atom"):
            self._access(instruction, name, kinds, active)
            return
        if name == "bar":
            return  # all threads are at one instruction
        values = [self._value(operand) for operand in instruction.operands[1:]]
        if instruction.operands[0].startswith("{"):  # mov.b64 {%r1,%r2}, %rd1
            halves = (values[0] & np.uint64(0xFFFFFFFF), values[0] >> np.uint64(32))
            names = instruction.operands[0].strip("{}").split(",")
            for register, half in zip(names, halves, strict=True):
                if register != "_":
                    self._set(register, half, active)
            return
        if name == "setp":
            result = self._compare(kinds[0], kind, values).astype(np.uint64)
        elif name == "shfl":
            result = self._exchange(values)
        elif name == "redux":
            result = self._sum_of_warp(values[0])
        else:
            result = _calculate(name, kinds, values)
        self._set(instruction.operands[0], result, active)

    def _access(
        self, instruction: Instruction, name: str, kinds: Sequence[str], active: Flags
    ) -> None:
        width = int(kinds[-1].lstrip("bus")) // 8
        if kinds[0] == "param":
            number = self._parameters[instruction.address.strip("[]")]
            value = self._constant(number)
            if kinds[-1].startswith("s"):
                value = _signed(value, width * 8).astype(np.uint64)
            self._set(instruction.operands[0], value, active)
            return
        memory = self._shared if kinds[0] == "shared" else self._memory
        register, _, offset = instruction.address.strip("[]").partition("+")
        addresses = self._value(register) + np.uint64(int(offset or 0))
        if name == "atom":
            assert "add" in kinds, instruction
            self._add(instruction, memory, addresses, width, active)
            return
        data = instruction.operands[0 if name == "ld" else 1]
        for index, operand in enumerate(data.strip("{}").split(",")):
            places = addresses[active] + np.uint64(index * width)
            if name == "st":
                memory.store(places, self._value(operand)[active], width)
            else:
                result = np.zeros(self._threads, np.uint64)
                result[active] = memory.load(places, width)
                self._set(operand, result, active)

    def _add(
        self, instruction: Instruction, memory: Memory, addresses: Bits, width: int, active: Flags
    ) -> None:
        added = self._value(instruction.operands[2])
        for thread in np.flatnonzero(active):
            place = addresses[thread : thread + 1]
            before = memory.load(place, width)
            memory.store(place, before + added[thread], width)

    def _compare(self, relation: str, kind: str, values: Sequence[Bits]) -> Any:
        bits = int(kind[1:])
        convert = _signed if kind.startswith("s") else _unsigned
        left, right = (convert(value, bits) for value in values)
        relations = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
        relations |= {"eq": np.equal, "ne": np.not_equal}
        return relations[relation](left, right)

    def _exchange(self, values: Sequence[Bits]) -> Bits:
        """Returns for each thread the value of the thread whose number differs in `mask`."""
        value, mask = values[0], values[1]
        numbers = np.arange(self._threads, dtype=np.uint64)
        result: Bits = value[numbers ^ mask]
        return result

    def _sum_of_warp(self, value: Bits) -> Bits:
        warps = value.reshape(-1, WARP_THREADS).sum(axis=1, dtype=np.uint64)
        return np.repeat(warps, WARP_THREADS) & np.uint64(0xFFFFFFFF)

    def _guard(self, guard: str) -> Flags:
        if not guard:
            return np.ones(self._threads, np.bool_)
        flags = self._registers[guard.lstrip("!")] != 0
        return ~flags if guard.startswith("!") else flags

    def _set(self, register: str, value: Bits, active: Flags) -> None:
        before = self._registers.get(register)
        if before is None:
            before = np.zeros(self._threads, np.uint64)
        self._registers[register] = np.where(active, value, before)

    def _value(self, operand: str) -> Bits:
        if operand in self._specials:
            return self._specials[operand]
        if operand.startswith("%"):
            return self._registers[operand]
        if operand.startswith("{"):  # mov.b64 %rd1, {%r1,%r2}
            low, high = (self._value(register) for register in operand.strip("{}").split(","))
            return low | (high << np.uint64(32))
        if operand == "global_smem":
            return self._shared_addresses
        return self._constant(int(operand, 0))

    def _constant(self, number: int) -> Bits:
        return np.full(self._threads, number & ALL_BITS, np.uint64)


def _calculate(name: str, kinds: Sequence[str], values: Sequence[Bits]) -> Bits:
    """Returns the result of an arithmetic instruction, in the low bits."""
    kind = kinds[-1]
    bits = int(kind[1:]) if kind[1:].isdigit() else 64
    convert = _signed if kind.startswith("s") else _unsigned
    operands = [convert(value, bits).astype(np.uint64) for value in values]
    if name == "cvt":
        bits = int(kinds[0][1:])
        result = operands[0]
    elif name == "mov":
        result = operands[0]
    elif name in ("add", "sub", "and", "or", "xor"):
        function = {
            "add": np.add,
            "sub": np.subtract,
            "and": np.bitwise_and,
            "or": np.bitwise_or,
            "xor": np.bitwise_xor,
        }[name]
        result = function(operands[0], operands[1])
    elif name in ("mul", "mad"):
        product_bits = 2 * bits if kinds[0] == "wide" else bits
        result = operands[0] * operands[1]
        if name == "mad":
            result = result + (values[2] if kinds[0] == "wide" else operands[2])
        bits = product_bits
    elif name == "shl":
        result = operands[0] << values[1]
    elif name == "shr":
        if kind.startswith("s"):  # then the sign comes in from the left
            shifted = _signed(values[0], bits) >> values[1].astype(np.int64)
            result = shifted.astype(np.uint64)
        else:
            result = operands[0] >> values[1]
    elif name == "selp":
        result = np.where(values[2] != 0, operands[0], operands[1])
    else:
        raise ValueError(f"PTX that is not understood: {name}.{'.'.join(kinds)}")
    return _unsigned(result, bits)


def _unsigned(value: Bits, bits: int) -> Bits:
    return value & np.uint64((1 << bits) - 1)


def _signed(value: Bits, bits: int) -> npt.NDArray[np.int64]:
    unused = np.int64(64 - bits)
    return (value.astype(np.int64) << unused) >> unused


def launch(kernel: Kernel, memory: Memory, grid: Sequence[int], arguments: Sequence[int]) -> None:
    """Executes a kernel at all places of a grid, whose size by axis is `grid`."""
    Grid(kernel, memory, grid, arguments).run()
