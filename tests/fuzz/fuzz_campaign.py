"""Campaigns: many batches of random input for many targets, each of which can be repeated alone.

A batch is one target, made anew, with some thousand inputs of one seed. Its inputs depend on
nothing but the seed, the target's name and the batch's number.

    death   an exception that the target's code must not raise, or a process that has ended
    leak    an entry, a descriptor, a task or memory that is left when all that began has ended
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal, Protocol

CORPUS = Path(__file__).parent / "corpus"
# Of a whole campaign: allocators keep some, and caches fill.
MAX_GROWTH_BYTES = 64 << 20
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

Unit = Literal["frames", "bodies"]


class Leak(AssertionError):
    """Something is left after the end of all that a batch began."""


class Target(Protocol):
    """Code that takes input of strangers."""

    unit: Unit
    batch: int  # inputs in a batch

    def feed(self, random: Random) -> None:
        """Gives the code one input. Raises what the code must not raise."""

    def finish(self) -> None:
        """Ends all that began, and raises Leak for what is left."""

    def close(self) -> None:
        """Gives back what the target holds, also after a failure."""


MAX_SLOWDOWN = 2.0  # of good answers under fire, and in a flood

MakeTarget = Callable[[Random], Target]


@dataclass
class Tally:
    """Totals of a campaign."""

    frames: int = 0
    bodies: int = 0
    deaths: int = 0
    leaks: int = 0
    inputs: dict[str, int] = field(default_factory=dict)  # by target
    # By kind and place: how often, and the line of the first one.
    failures: dict[str, tuple[int, str]] = field(default_factory=dict)

    def fail(self, kind: str, line: str) -> None:
        """Adds a failure."""
        times, first = self.failures.get(kind, (0, line))
        self.failures[kind] = (times + 1, first)

    def lines(self) -> list[str]:
        """Returns a line for each kind of failure."""
        return [f"{times} times: {line}" for times, line in self.failures.values()]

    def count(self, name: str, unit: Unit, inputs: int) -> None:
        """Adds inputs that were given to a target."""
        self.inputs[name] = self.inputs.get(name, 0) + inputs
        if unit == "frames":
            self.frames += inputs
        else:
            self.bodies += inputs


def _no_seconds() -> dict[bool, list[float]]:
    return {False: [], True: []}


@dataclass
class PortTally:
    """What a campaign at the ports of processes has sent and found."""

    frames: int = 0
    bodies: int = 0
    good: int = 0
    # Of good answers: those in windows without fire, and those under it.
    seconds: dict[bool, list[float]] = field(default_factory=_no_seconds)
    flood_seconds: dict[bool, list[float]] = field(default_factory=_no_seconds)
    deaths: list[str] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)

    @property
    def slowdown(self) -> float:
        """Median time of good answers under fire, by that without."""
        return statistics.median(self.seconds[True]) / statistics.median(self.seconds[False])

    @property
    def flood_slowdown(self) -> float:
        """The same of a flood; 0 without one.

        A flood that was too short for a window without it is compared with those before it.
        """
        if not self.flood_seconds[True]:
            return 0.0
        calm = self.flood_seconds[False] or self.seconds[False]
        return statistics.median(self.flood_seconds[True]) / statistics.median(calm)

    def failures(self) -> list[str]:
        """Returns a line for each death and leak, and for good answers that were too slow."""
        found = [*self.deaths, *self.leaks]
        for what, slowdown in (("fire", self.slowdown), ("a flood", self.flood_slowdown)):
            if slowdown > MAX_SLOWDOWN:
                found.append(f"good answers took {slowdown:.2f} times their time under {what}")
        return found


def run_batch(name: str, make: MakeTarget, seed: int, number: int, tally: Tally) -> None:
    """Runs one batch; counts a failure, with the line that repeats it."""
    random = Random(f"{seed}/{name}/{number}")
    target = make(random)
    given = 0
    try:
        for _ in range(target.batch):
            target.feed(random)
            given += 1
        target.finish()
    except Leak as leak:
        tally.leaks += 1
        _record(tally, leak, name, seed, number, given)
    except Exception as error:
        tally.deaths += 1
        _record(tally, error, name, seed, number, given)
    finally:
        target.close()
    tally.count(name, target.unit, given)


def _record(
    tally: Tally, error: BaseException, name: str, seed: int, number: int, given: int
) -> None:
    where = ""
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        where = f"{Path(frame.f_code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    repeat = f"python tests/fuzz/fuzz.py --target {name} --seed {seed} --batch {number}"
    kind = f"{name}: {type(error).__name__} at {where}"
    tally.fail(kind, f"{kind} after {given} inputs: {error!s:.300}; {repeat}")


def run(
    targets: Mapping[str, MakeTarget],
    seed: int,
    batches: Iterator[int],
    on_batch: Callable[[int], bool],
    tally: Tally,
) -> None:
    """Runs each target's batch of each number, until `on_batch` returns False or none is left."""
    before = 0
    for number in batches:
        for name, make in targets.items():
            run_batch(name, make, seed, number, tally)
        # The first batches fill caches of the interpreter and of libraries.
        if number == 1:
            before = resident_bytes()
        if not on_batch(number):
            break
    if before and (grown := resident_bytes() - before) > MAX_GROWTH_BYTES:
        tally.leaks += 1
        tally.fail("memory", f"the memory of this process has grown by {grown} bytes")


def resident_bytes(pid: int | str = "self") -> int:
    """Returns the resident memory of a process."""
    if pid == "self":
        gc.collect()
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def descriptors(pid: int | str = "self") -> int:
    """Returns the number of open descriptors of a process."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def corpus(name: str) -> list[bytes]:
    """Returns the kept inputs of a target: one in a line, with Python's escapes."""
    lines = (CORPUS / f"{name}.txt").read_text().splitlines()
    found = []
    for line in lines:
        if line and not line.startswith("#"):
            found.append(line.encode("latin-1").decode("unicode_escape").encode("latin-1"))
    return found


class Clock:
    """A clock that the target moves, in place of a module's `time`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """Returns the time in seconds."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Moves the clock instead of waiting."""
        self.now += seconds

    time = staticmethod(time.time)
