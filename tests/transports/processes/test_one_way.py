"""Tests two workers of two machines between which the packets of one direction are lost.

A machine is a network namespace with an id of its own boot, so that no UNIX socket is used. Packets
to a wrong hardware address reach the other end of the link, which drops them without a word.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from peer import BLOCK_SIZE, BLOCKS, Peer, load

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")

LIMIT_SECONDS = 60.0
LEASE_SECONDS = 4.0
ROW = 400_000  # bytes; a whole load has about 100 MB
TOKENS = BLOCKS * BLOCK_SIZE
NOBODY = "02:00:00:00:00:99"  # hardware address
SETUP = """
mount --bind {boot_id} /proc/sys/kernel/random/boot_id
ip link set lo up
exec sleep infinity
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Machine:
    """A namespace with an address, and one worker in it."""

    def __init__(self, folder: Path, number: int, seed: int | None) -> None:
        self.address = f"10.77.0.{number}"
        boot_id = folder / f"{number}.id"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        setup = SETUP.format(boot_id=boot_id)
        self.process = subprocess.Popen(["unshare", "--net", "--mount", "sh", "-ec", setup])
        self._seed = seed
        self.worker: Peer

    @property
    def is_up(self) -> bool:
        """Whether the last step of its start is done."""
        return Path(f"/proc/{self.process.pid}/comm").read_text() == "sleep\n"

    def plug_in(self, end: str) -> None:
        """Takes an end of a link."""
        ip("link", "set", end, "netns", str(self.process.pid))
        self._ip("link", "set", end, "name", "eth0")
        self._ip("address", "add", f"{self.address}/24", "dev", "eth0")
        self._ip("link", "set", "eth0", "up")

    def start(self) -> None:
        """Starts the worker."""
        settings = {"host": self.address, "transport": "tcp", "lease": LEASE_SECONDS}
        inside = ["nsenter", "--net", "--mount", f"--target={self.process.pid}"]
        self.worker = Peer(ROW, self._seed, settings, within=inside)

    def lose_packets_to(self, other: Machine) -> None:
        """Loses all packets of this direction from now on."""
        neighbour = ["replace", other.address, "lladdr", NOBODY, "nud", "permanent"]
        self._ip("neigh", *neighbour, "dev", "eth0")

    def heal(self, other: Machine) -> None:
        """Lets packets through again."""
        self._ip("neigh", "del", other.address, "dev", "eth0")

    def _ip(self, *words: str) -> None:
        inside = ["nsenter", "--net", f"--target={self.process.pid}", "ip"]
        subprocess.run([*inside, *words], check=True)

    def end(self) -> None:
        """Ends the worker and the machine."""
        if hasattr(self, "worker"):
            self.worker.stop()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    made = Machine(tmp_path, 1, 1), Machine(tmp_path, 2, None)
    try:
        end = time.monotonic() + LIMIT_SECONDS
        while not all(machine.is_up for machine in made):
            assert time.monotonic() < end
            time.sleep(0.01)
        ends = [f"way{machine.process.pid}" for machine in made]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for machine, name in zip(made, ends, strict=True):
            machine.plug_in(name)
        for machine in made:
            machine.start()
        yield made
    finally:
        for machine in made:
            machine.end()


def until_loads_come_by_tcp(p: Peer, d: Peer) -> None:
    before = d("received").get("tcp", 0)  # type: ignore[attr-defined]
    end = time.monotonic() + LIMIT_SECONDS
    while d("received").get("tcp", 0) == before:  # type: ignore[attr-defined]
        assert time.monotonic() < end
        load(p, d, 48)


@pytest.mark.parametrize("lost", ["from P to D", "from D to P"])
@pytest.mark.parametrize("when", ["before a load", "in a load"])
def test_every_load_ends_while_packets_of_one_direction_are_lost(
    machines: tuple[Machine, Machine], lost: str, when: str
) -> None:
    """And P releases its blocks. When packets come again, so do loads."""
    p, d = (machine.worker for machine in machines)
    until_loads_come_by_tcp(p, d)
    here, there = machines if lost == "from P to D" else machines[::-1]
    transfer = secrets.token_hex(16)
    if when == "before a load":
        here.lose_packets_to(there)
    began = time.monotonic()
    p(f"prefill {transfer} {TOKENS}")
    d(f"want {transfer} {TOKENS} {msgspec.json.encode(p.worker).decode()}")
    if when == "in a load":
        here.lose_packets_to(there)
    said = str(d("outcome"))
    assert "LoadResult" in said and ("PEER_TIMEOUT" in said or when == "in a load"), said
    assert "ReleaseBlocks" in str(p("outcome"))
    assert time.monotonic() - began < LIMIT_SECONDS / 2
    here.heal(there)
    until_loads_come_by_tcp(p, d)
    assert p("digest 3") == d("digest 3")
