"""A few seconds of each campaign; `make fuzz` has the rest."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from random import Random
from typing import get_args

import pytest
from fuzz import TARGETS
from fuzz_campaign import Leak, PortTally, Tally, Target, Unit, run_batch
from fuzz_decoders import RECORD, WIRE, recorded_frames
from fuzz_values import KEPT_FRAMES
from hostile_peers import Strangers, expect_frames, ports_to_fire_at

from vllm_disagg.errors import BadGrant, BadMessage
from vllm_disagg.transports.nixl import notes as nixl_notes

SEED = 17
INPUTS = 400  # of each target
FILES = 40  # each is read by seven readers


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_input_ends_nothing_and_leaves_nothing(name: str) -> None:
    if name == "permission":
        pytest.importorskip("vllm")

    inputs = FILES if name == "file" else INPUTS

    def make(random: Random) -> Target:
        target = TARGETS[name](random)
        target.batch = inputs
        return target

    tally = Tally()
    run_batch(name, make, SEED, 0, tally)
    assert not tally.failures, tally.lines()
    assert tally.frames + tally.bodies == inputs


def test_kept_frames_are_decoded_or_refused_at_each_decoder() -> None:
    own = [recorded_frames(kind, encode) for kind, encode, *_ in WIRE]
    hostile = [b"", *KEPT_FRAMES, *(frame for frames in own for frame in frames)]
    for frames, (kind, encode, decode, is_same) in zip(own, WIRE, strict=True):
        # The recorded AgentInfo is of another memory than the decoder is told of.
        for frame in frames if is_same and kind is not nixl_notes.AgentInfo else ():
            assert encode(decode(frame)) == frame
        for frame in hostile:
            with contextlib.suppress(BadMessage, BadGrant):
                decode(frame)


def test_each_recorded_message_of_a_wire_has_a_decoder_here() -> None:
    """What travels in another one (`WorkerInfo`), or as JSON, has targets of its own."""
    found = {one.__name__ for kind, *_ in WIRE for one in get_args(kind) or (kind,)}
    elsewhere = {"RankLayout", "WorkerInfo", "EngineCard", "EngineInfo", "RegistrationNote"}
    assert json.loads(RECORD.read_text())["messages"].keys() - found == elsewhere


class FailingTarget:
    """A target that fails at one input, or leaves something."""

    unit: Unit = "frames"
    batch = 10

    def __init__(self, failure: Exception, after: int) -> None:
        self.closed = False
        self._failure = failure
        self._after = after
        self._values: list[float] = []

    def feed(self, random: Random) -> None:
        self._values.append(random.random())
        if len(self._values) == self._after:
            raise self._failure

    def finish(self) -> None:
        if self._after > self.batch:
            raise self._failure

    def close(self) -> None:
        self.closed = True


def test_a_failure_is_counted_and_can_be_repeated() -> None:
    tally = Tally()
    first, second = (FailingTarget(ZeroDivisionError("found"), after=3) for _ in range(2))
    run_batch("x", lambda _: first, 5, 7, tally)
    run_batch("x", lambda _: second, 5, 7, tally)
    assert first._values == second._values, "the same inputs"
    assert (tally.deaths, tally.leaks, tally.frames) == (2, 0, 4)
    assert first.closed and second.closed
    [line] = tally.lines()
    assert line.startswith("2 times: x: ZeroDivisionError at test_fuzz.py:")
    assert line.endswith(
        "after 2 inputs: found; python tests/fuzz/fuzz.py --target x --seed 5 --batch 7"
    )


def test_what_is_left_is_a_leak() -> None:
    tally = Tally()
    target = FailingTarget(Leak("an entry"), after=99)
    run_batch("x", lambda _: target, 5, 7, tally)
    assert (tally.deaths, tally.leaks, tally.frames) == (0, 1, 10)


@pytest.mark.parametrize(
    ("flooded", "calm", "slowdown"),
    [([], [], 0.0), ([1.9], [1.0], 1.9), ([1.0, 2.2, 9.0], [1.0], 2.2), ([2.2], [], 2.2)],
)
def test_good_answers_in_a_flood_have_twice_their_time(
    flooded: list[float], calm: list[float], slowdown: float
) -> None:
    """Without a window of its own a flood is compared with the windows before it."""
    fire = {False: [1.0], True: [1.5]}
    tally = PortTally(seconds=fire, flood_seconds={False: calm, True: flooded})
    assert tally.flood_slowdown == slowdown
    late = ["good answers took 2.20 times their time under a flood"] if slowdown > 2 else []
    assert tally.failures() == late
    tally.leaks.append("a descriptor")
    assert tally.failures() == ["a descriptor", *late]


def test_good_answers_under_fire_have_twice_their_time() -> None:
    tally = PortTally(seconds={False: [1.0], True: [2.5]})
    assert tally.failures() == ["good answers took 2.50 times their time under fire"]


def test_all_ports_are_fired_at_but_those_of_process_groups() -> None:
    """A transport's listener opens with the first transfer: it was left out once."""
    at_start = {"P worker": {1, 2, 7}, "P core": {8}, "proxy": {3}}
    now = {"P worker": {1, 2, 7, 9}, "P core": {8}, "proxy": {3}}
    own = {1, 2, 3}
    fired_at = ports_to_fire_at(at_start, now, own)
    assert fired_at == {"P worker": [1, 2, 9], "proxy": [3]}
    with pytest.raises(RuntimeError, match="no transport listens"):
        ports_to_fire_at(at_start, at_start, own)


def test_strangers_reach_each_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        ports = [server.getsockname()[1], closed.getsockname()[1]]
        strangers = Strangers(ports, Random(SEED))
        until = time.monotonic() + 60
        while not strangers.frames:
            assert time.monotonic() < until
            strangers.step()
        assert set(strangers.by_port) == {ports[0]}, "nothing was sent where nothing listens"
        strangers.close()
    told = json.loads(json.dumps(strangers.by_port))  # as the process tells it
    expect_frames(told, ports[:1])
    with pytest.raises(RuntimeError, match=f"no frame has met the ports .{ports[1]}"):
        expect_frames(told, ports)
