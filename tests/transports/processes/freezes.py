"""Freezes a sender, a receiver or both at random moments, by each transport: `make freezes`.

    python tests/transports/processes/freezes.py [--seconds S] [--seed N] [--transports NAME ...]

Two workers without vLLM, in processes of their own. Each round stops one or both amid a load
(SIGSTOP), for less or more than `peer_timeout`, and lets them go on. That load may fail; it must
end in time. Each load behind it must end in time, and KV must soon come by the transport again, and
right. One line of JSON a transport; exit status 1 if one of them broke a rule.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parents[3]), str(HERE.parents[2] / "gpu")]

from peer import BLOCK_SIZE, BLOCKS, Peer  # noqa: E402

TRANSPORTS = ("zmq", "tcp", "gloo", "nixl")
ROW = 100_000  # about 26 MB a load
TOKENS = BLOCKS * BLOCK_SIZE
PEER_TIMEOUT = 3.0
MOMENTS = (0.0, 0.002, 0.01, 0.03, 0.1)  # seconds of a load before the freeze
FREEZES = (0.1, 0.5, 1.0, 2.5, 3.0, 3.3, 4.0, 6.0, 8.0)
LATE_SECONDS = 10.0  # for a load, from the end of the freeze on
BACK_SECONDS = 90.0  # until KV comes by the transport again; a pause before a new try may be 60


class BrokenRule(Exception):
    """A load ended too late, failed without cause, or left wrong bytes."""


class Pair:
    """A sender and a receiver."""

    def __init__(self, transport: str, seed: int) -> None:
        self.transport = transport
        self.random = random.Random(seed)
        settings = {
            "transport": transport,
            "peer_timeout": PEER_TIMEOUT,
            "keepalive_interval": PEER_TIMEOUT / 10,
        }
        env = {"NIXL_ANYWHERE": "1"}
        self.p = Peer(ROW, settings=settings, env=env)
        self.d = Peer(ROW, None, settings, env=env)
        self.worker = msgspec.json.encode(self.p.worker).decode()
        self.expected = self.p(f"digest {BLOCKS}")
        self.reasons: Counter[str] = Counter()
        self.loads = self.freezes = 0
        self.slowest = self.slowest_return = 0.0

    def begin(self, tokens: int) -> None:
        transfer = f"{self.loads:032x}"
        self.loads += 1
        self.p(f"prefill {transfer} {tokens}")
        self.d(f"want {transfer} {tokens} {self.worker}")

    def end(self, due: float) -> bool:
        """Waits for the load's outcome; returns whether the load succeeded."""
        try:
            outcome = str(self.d("outcome"))
        except json.JSONDecodeError:
            raise BrokenRule(f"load {self.loads} had no outcome within 60 s") from None
        late = time.monotonic() - due
        if late > 0:
            raise BrokenRule(f"load {self.loads} ended {late:.1f} s too late: {outcome}")
        found = re.search(r"reason=(None|<Reason.\w+)", outcome)
        reason = found[1].removeprefix("<Reason.") if found else outcome
        self.reasons[reason] += 1
        return reason == "None"

    def bytes_by_transport(self) -> int:
        received = self.d("received")
        assert isinstance(received, dict)
        return int(received.get(self.transport, 0))

    def freeze(self) -> None:
        """Stops one or both workers amid a load, and waits for its end."""
        stopped = self.random.choice([[self.p], [self.d], [self.p, self.d]])
        seconds = self.random.choice(FREEZES)
        self.begin(TOKENS)
        time.sleep(self.random.choice(MOMENTS))
        for worker in stopped:
            worker.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        for worker in self.random.sample(stopped, len(stopped)):
            worker.process.send_signal(signal.SIGCONT)
            time.sleep(self.random.choice([0.0, 0.5, 3.5]) if len(stopped) == 2 else 0.0)
        self.end(time.monotonic() + LATE_SECONDS)
        self.freezes += 1

    def go_on(self) -> None:
        """Loads until KV comes by the transport again, and compares it."""
        before = self.bytes_by_transport()
        began = time.monotonic()
        while self.bytes_by_transport() == before:
            if time.monotonic() > began + BACK_SECONDS:
                raise BrokenRule(f"load {self.loads}: no KV by {self.transport} again")
            at = time.monotonic()
            self.begin(self.random.choice([3 * BLOCK_SIZE, TOKENS]))
            if not self.end(at + LATE_SECONDS):
                raise BrokenRule(f"load {self.loads} failed though both workers ran")
            self.slowest = max(self.slowest, time.monotonic() - at)
            time.sleep(0.1)
        self.slowest_return = max(self.slowest_return, time.monotonic() - began)
        self.d("clear")
        self.begin(TOKENS)
        is_good = self.end(time.monotonic() + LATE_SECONDS)
        if is_good and self.d(f"digest {BLOCKS}") != self.expected:
            raise BrokenRule(f"load {self.loads}: wrong bytes")

    def result(self, broken: str) -> dict[str, object]:
        return {
            "transport": self.transport,
            "freezes": self.freezes,
            "loads": self.loads,
            "reasons": dict(self.reasons),
            "slowest_load_after_s": round(self.slowest, 1),
            "slowest_return_s": round(self.slowest_return, 1),
            "broken": broken,
        }


def main() -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=300.0, help="of each transport")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=TRANSPORTS)
    args = parser.parse_args()
    is_broken = False
    for transport in args.transports:
        broken = ""
        pair = Pair(transport, args.seed)
        end = time.monotonic() + args.seconds
        try:
            while time.monotonic() < end:
                pair.freeze()
                pair.go_on()
        except BrokenRule as error:
            broken = str(error)
            is_broken = True
        finally:
            pair.p.stop()
            pair.d.stop()
        print(json.dumps(pair.result(broken)), flush=True)
    return int(is_broken)


if __name__ == "__main__":
    sys.exit(main())
