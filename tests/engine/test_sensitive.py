"""Checks the tests: a decode engine with one wrong block of a transfer must turn them red."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from asking import Record, ask, at_once, body, difference, tokens
from conftest import Machine, Main
from direct import Legs
from engines import BLOCK, PEER_TIMEOUT_SECONDS, Engine, wait
from test_exact import needed

PROMPTS = 8


class Faulty:
    """The main prefill engine with a decode engine that writes wrong bytes on command."""

    def __init__(self, machine: Machine, main: Main) -> None:
        self.fault = machine.folder / "fault"
        self.fault.write_text("")
        self.rounds = 0
        env = {"PYTHONPATH": str(Path(__file__).parent / "faulty"), "FAULT": str(self.fault)}
        settings: dict[str, object] = {
            "transport": "zmq",  # the fault is in `write`, which others go without
            "peer_timeout": PEER_TIMEOUT_SECONDS,
        }
        self.decode = Engine(
            "faulty-D", machine.folder, role="kv_consumer", cpu="1", env=env, settings=settings
        )
        machine.start(self.decode)
        self.main = main
        self.legs = Legs(machine.key, main.prefill, self.decode)

    def count_wrong(self, fault: str) -> int:
        """Returns how many of eight answers the comparison finds wrong."""
        self.fault.write_text(fault)
        self.rounds += 1
        asked = [
            body(tokens(2 * BLOCK + 60 * at, f"faulty {self.rounds} {at}"), 32)
            for at in range(PROMPTS)
        ]
        target = self.decode.received + needed(len(one["prompt"]) for one in asked)
        ours: list[Record] = [self.legs.ask(one) for one in asked]
        plain = at_once(lambda one: ask(self.main.plain.url, one), asked)
        wait("all KV arrives", lambda: self.decode.received == target)
        return sum(
            bool(difference(one, expected)) for one, expected in zip(ours, plain, strict=True)
        )


@pytest.fixture(scope="module")
def faulty(machine: Machine, main: Main) -> Iterator[Faulty]:
    made = Faulty(machine, main)
    yield made
    made.legs.close()
    machine.stop(made.decode)


@pytest.mark.parametrize("where", ["", " 0", " 3"])
@pytest.mark.parametrize("fault", ["corrupted", "missing", "misplaced"])
def test_one_wrong_block_turns_the_tests_red(faulty: Faulty, fault: str, where: str) -> None:
    """In all layers, or in one."""
    found = faulty.count_wrong(fault + where)
    assert found >= PROMPTS - 2, (
        f"{fault}{where}: only {found} of {PROMPTS} wrong answers were found"
    )


def test_without_a_fault_the_same_engine_is_green(faulty: Faulty) -> None:
    assert faulty.count_wrong("") == 0
