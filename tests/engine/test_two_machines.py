"""Types the guide for two machines as it stands, on two machines that share nothing but a link.

A machine is a network namespace with the guide's address, a host name, an id of its boot, and a
folder for its files and temporary files, which lies at the same path on both. Only the model's name
is replaced, and `scp` copies into the other machine's folder.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from engines import BIN, ROOT, wait
from test_readme import MODEL, PATIENCE, commands

GUIDE = ROOT / "docs" / "how-to" / "start-by-hand.md"
FIRST, SECOND = "10.0.0.1", "10.0.0.2"
SERVERS = ("vllm serve", "vllm-disagg proxy")  # commands that run until they are ended
SETUP = """
mount --bind {files} {home}
mount --bind {boot_id} /proc/sys/kernel/random/boot_id
hostname {name}
ip link set lo up
exec sleep infinity
"""
SCP = """#!/bin/sh
test "$1 $2 $3" = "-p fleet.key {second}:" && cp -p fleet.key {files}
"""
pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]


class Machine:
    """One machine; commands are typed in its folder."""

    def __init__(self, folder: Path, address: str) -> None:
        name = f"machine-{address.rpartition('.')[2]}"
        self.address = address
        self.files = folder / name
        self.files.mkdir()
        self._home = folder / "home"
        self._home.mkdir(exist_ok=True)
        boot_id = folder / f"{name}.id"
        boot_id.write_text(f"{uuid.uuid4()}\n")
        setup = SETUP.format(files=self.files, home=self._home, boot_id=boot_id, name=name)
        self.process = subprocess.Popen(
            ["unshare", "--net", "--uts", "--mount", "sh", "-ec", setup], start_new_session=True
        )
        self.env = {
            **os.environ,
            "PATH": f"{folder}:{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self._home),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self.servers: list[tuple[subprocess.Popen[bytes], Path]] = []

    def join(self, other: Machine) -> None:
        """Connects two machines with a link."""
        ends = [f"link{self.process.pid}", f"link{other.process.pid}"]
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for machine, end in zip((self, other), ends, strict=True):
            ip("link", "set", end, "netns", str(machine.process.pid))
            inside = ["nsenter", "--net", f"--target={machine.process.pid}", "ip"]
            for words in (
                ["link", "set", end, "name", "eth0"],
                ["address", "add", f"{machine.address}/24", "dev", "eth0"],
                ["link", "set", "eth0", "up"],
            ):
                subprocess.run([*inside, *words], check=True)

    def words(self, command: str) -> list[str]:
        """Returns the words that type a command here."""
        text = re.sub(r"\bMODEL\b", str(MODEL), command)
        place = ["--net", "--uts", "--mount", f"--target={self.process.pid}"]
        return ["nsenter", *place, f"--wdns={self._home}", "bash", "-c", text]

    def run(self, command: str, statuses: tuple[int, ...] = (0,)) -> str:
        """Runs a command to its end; returns its output."""
        done = subprocess.run(
            self.words(command), env=self.env, capture_output=True, text=True, timeout=120
        )
        assert done.returncode in statuses, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def start(self, command: str, sign: str) -> None:
        """Starts a server in a terminal of its own, and waits until it prints the sign."""
        log = self.files / f"terminal-{len(self.servers)}.log"
        with log.open("wb") as output:
            started = subprocess.Popen(
                self.words(command),
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
            )
        self.servers.append((started, log))

        def shown() -> bool:
            text = log.read_text(errors="replace")
            assert started.poll() is None, text[-6000:]
            return sign in text

        wait(f"{sign!r} after {command}", shown, PATIENCE)

    def link_bytes(self) -> int:
        """Returns the bytes that its link has received."""
        statistics = self.run("cat /proc/net/dev")
        found = re.search(r"eth0: *(\d+)", statistics)
        assert found, statistics
        return int(found[1])

    def end(self) -> None:
        """Ends the servers as Ctrl-C does, then the machine."""
        for server, _ in self.servers[::-1]:
            os.killpg(server.pid, signal.SIGINT)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def two_machines() -> Iterator[dict[str, Machine]]:
    # A short path: that of a UNIX socket has 107 bytes at most.
    with tempfile.TemporaryDirectory(prefix="two-", dir="/tmp") as name, ExitStack() as ends:
        folder = Path(name)
        made = {}
        for address in (FIRST, SECOND):
            made[address] = Machine(folder, address)
            ends.callback(made[address].end)
        scp = folder / "scp"
        scp.write_text(SCP.format(second=SECOND, files=made[SECOND].files))
        scp.chmod(0o755)
        for machine in made.values():
            wait("the machine is up", lambda m=machine: is_up(m), 10)  # type: ignore[misc]
        made[FIRST].join(made[SECOND])
        yield made


def is_up(machine: Machine) -> bool:
    """Returns whether the last step of a machine's start is done."""
    return Path(f"/proc/{machine.process.pid}/comm").read_text() == "sleep\n"


def typed() -> list[tuple[list[str], str]]:
    """Returns the guide's commands in their order, each with the addresses of its machines."""
    _, _, section = GUIDE.read_text().partition("\n## On two machines\n")
    section = section.partition("\n## ")[0]
    found = []
    for where, block in re.findall(r"^```\n# on (\S+)\n(.*?)^```$", section, re.M | re.S):
        addresses = [FIRST, SECOND] if where == "both" else [where]
        found += [(addresses, command) for command in commands(block)]
    assert section.count("```") == 2 * len(re.findall(r"^```\n# on ", section, re.M))
    return found


def test_the_guide(machine: object) -> None:
    with two_machines() as machines:
        said: dict[str, str] = {}
        for addresses, command in typed():
            for address in addresses:
                said[" ".join(command.split()[:2])] = type_in(machines[address], command)
        assert [m.run("stat -c %a fleet.key").strip() for m in machines.values()] == ["600"] * 2
        answer = json.loads(said["curl --noproxy"])
        assert answer["usage"]["completion_tokens"] == 16, answer
        assert "FAIL" not in said["vllm-disagg doctor"]
        page = machines[SECOND].run(f"curl -s --noproxy '*' {SECOND}:8200/metrics")
        found = re.search(r"^vllm:disagg_received_bytes_total\S* (\S+)$", page, re.MULTILINE)
        assert found and float(found[1]) > 0, "KV was transferred"
        assert machines[SECOND].link_bytes() > float(found[1]), "and over the link"
        refused = machines[SECOND].run(f"curl -s --noproxy '*' {FIRST}:8000/v1/models")
        assert "error" in json.loads(refused), "the proxy serves nobody without the key"


def type_in(machine: Machine, command: str) -> str:
    """Types a command; returns the output of one that ends."""
    words = shlex.split(command, comments=True)
    if words[0] == "export":
        name, _, machine.env[name] = words[1].partition("=")
        return ""
    if command.startswith(SERVERS):
        is_engine = command.startswith("vllm serve")
        machine.start(command, "Application startup complete" if is_engine else "listening on")
        return ""
    return machine.run(command, (0, 1) if "doctor" in words else (0,))  # 1: warnings
