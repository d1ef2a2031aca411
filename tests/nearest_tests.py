"""Tells which tests look for a planted fault: those that are nearest to it come first.

Where a fault names no test, `TESTS` has those of its file, else the tests of the same name or room.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from planting import ROOT

# After which a test with a fault is killed: one that hangs notices it, too.
LIMIT_SECONDS = 10.0
WORLDS_LIMIT_SECONDS = 120.0  # for each 100 seeds; worlds bound what they do themselves
FEW, MORE, MANY = 100, 1000, int(os.environ.get("SEEDS", "10000"))  # worlds


SCHEDULER_WORLDS = "tests/scheduler_worlds"  # slow beside the others, and sharper
LUCK = (
    "tests/simulation",
    "tests/property",
    "tests/kv/test_reshard.py",
    "tests/transports/collective",
)  # seeded


class Mutant(NamedTuple):
    what: str
    file: str  # of vllm_disagg, or from the root
    old: str
    new: str
    tests: str = ""


class Run(NamedTuple):
    """Of pytest."""

    tests: Sequence[str]
    seeds: int = FEW
    limit_seconds: float = LIMIT_SECONDS  # of each test, for each 100 seeds


def worlds(tests: Sequence[str], *seeds: int) -> list[Run]:
    """Returns a run of seeded tests with so many seeds, and the next."""
    return [Run(tests, number, WORLDS_LIMIT_SECONDS) for number in seeds]


MACHINES = (
    "protocol/sender.py",
    "protocol/receiver.py",
    "protocol/outgoing_transfer.py",
    "protocol/replies.py",
    "protocol/engine_steps.py",
    "protocol/endings.py",
    "protocol/lease.py",
    "protocol/served_blocks.py",
    "protocol/confirmed_sums.py",
    "protocol/incoming_transfer.py",
    "protocol/load_ends.py",
    "protocol/block_comparison.py",
    "protocol/read_window.py",
    "protocol/piece_reads.py",
    "protocol/repeated_aborts.py",
    "protocol/lookup.py",
    "protocol/read_plan.py",
    "kv/extents.py",
    "kv/reshard.py",
)
LEGS = (
    "protocol/legs.py",
    "protocol/prefill_leg.py",
    "protocol/decode_leg.py",
    "protocol/request_leg.py",
)
OF_MACHINES = [
    "tests/protocol/test_sender.py",
    "tests/protocol/test_receiver.py",
    "tests/protocol/test_lookup.py",
]
WORLD = ["tests/simulation/test_world.py"]
TESTS = {
    **{file: [Run(OF_MACHINES), *worlds(WORLD, FEW, MORE, MANY)] for file in MACHINES},
    "driver.py": [Run(["tests/unit/test_driver.py"])],
    "protocol/fact_queue.py": [
        Run(["tests/protocol/test_fact_queue.py"]),
        *worlds(WORLD, FEW, MORE),
    ],
    "outcomes.py": [Run(["tests/unit/test_outcomes.py", "tests/unit/test_driver.py"])],
    "trace.py": [Run(["tests/unit/test_trace.py"])],
    "transports/selection.py": [Run(["tests/transports/test_selection.py"])],
    "transports/set.py": [Run(["tests/transports/test_transport_set.py"])],
    "transports/posted_reads.py": [
        Run(["tests/transports/test_posted_reads.py"]),
        *worlds(WORLD, FEW, MORE, MANY),
    ],
    "kv/block_sums.py": [Run(["tests/kv/test_block_sums.py"])],
    "kv/relayout.py": [
        Run(["tests/kv/test_memory.py", "tests/connector/test_kv_layout.py"]),
        Run(["tests/kv/test_reshard.py"]),
    ],
    **{
        f"transports/collective/{end}.py": worlds(
            ["tests/transports/collective/test_channel.py"], 160
        )
        for end in ("sender_end", "receiver_end")
    },
    "transports/nixl/path.py": [Run(["tests/transports/nixl/test_nixl_path.py"])],
    "transports/nixl/reads.py": [
        Run(["tests/transports/nixl/test_nixl_reads.py"]),
        Run(["tests/transports/processes/test_nixl.py"]),
    ],
    "transports/nixl/notes.py": [Run(["tests/transports/processes/test_nixl.py"])],
    "transports/nixl/agent.py": [Run(["tests/transports/processes/test_nixl.py"])],
    "transports/nixl/sender.py": [Run(["tests/transports/processes/test_nixl.py"])],
    "transports/nixl/paths.py": [Run(["tests/transports/processes/test_nixl.py"])],
    "transports/nixl/pairing.py": [Run(["tests/transports/processes/test_nixl.py"])],
    "transports/nixl/transport.py": [Run(["tests/transports/processes/test_nixl.py"])],
    "transports/tcp/transport.py": [
        Run(["tests/transports/tcp"]),
        Run(["tests/transports/processes/test_tcp.py"]),
    ],
    "transports/tcp/piece_stream.py": [
        Run(["tests/transports/tcp"]),
        Run(["tests/transports/processes/test_tcp.py"]),
    ],
    "transports/tcp/sender.py": [Run(["tests/transports/processes/test_tcp.py"])],
    "transports/tcp/notes.py": [Run(["tests/transports/processes/test_tcp.py"])],
    "transports/collective/transport.py": [Run(["tests/transports/processes/test_collective.py"])],
    "transports/collective/worker.py": [Run(["tests/transports/processes/test_collective.py"])],
    "transports/collective/staging.py": [Run(["tests/transports/processes/test_collective.py"])],
    "transports/zmq/control.py": [Run(["tests/transports/zmq", "tests/unit/test_driver.py"])],
    "transports/zmq/transport.py": [
        Run(["tests/transports/zmq/test_zmq_transport.py", "tests/unit/test_driver.py"])
    ],
    "transports/zmq/half_open.py": [
        Run(
            [
                "tests/transports/zmq/test_zmq_transport.py",
                "tests/transports/processes/test_floods.py",
            ]
        )
    ],
    **{file: [Run(["tests/protocol/test_legs.py"]), *worlds(WORLD, FEW, MORE)] for file in LEGS},
    "kv_connectors/admission.py": [Run(["tests/connector/test_scheduler_side.py"])],
    "kv_connectors/scheduler.py": [Run(["tests/connector/test_scheduler_side.py"])],
    "kv_connectors/worker.py": [
        Run(["tests/connector/test_scheduler_side.py", "tests/connector/test_worker_side.py"])
    ],
}


def runs(mutant: Mutant) -> list[Run]:
    """Of pytest, until one fails."""
    named = mutant.tests.split()
    if any(test.startswith(SCHEDULER_WORLDS) for test in named):
        return worlds(named, FEW, MORE)
    if any(test.startswith(LUCK) for test in named):
        return worlds(named, FEW, MANY)
    if named:
        return [Run(named)]
    if mutant.file in TESTS:
        return TESTS[mutant.file]
    path = Path(mutant.file)
    room = "connector" if path.parts[0] == "kv_connectors" else path.parts[0]
    folder = Path("tests", room) if (ROOT / "tests" / room).is_dir() else Path("tests/unit")
    nearest = [
        str(found.relative_to(ROOT))
        for found in sorted((ROOT / folder).rglob(f"test_{path.stem}.py"))
    ]
    return [*([Run(nearest)] if nearest else []), Run([str(folder)])]
