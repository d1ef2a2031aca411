"""Data parallel ranks of D on two machines, behind one API server, and computing in step.

A machine is a network namespace, as in `test_two_machines.py`. P, D's API server and its first
rank are on the first one, D's second rank on the other. The proxy and the clients are here, and
reach the first one alone. Mixtral in float32, with the stand-in of `test_expert_ranks.py`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest
import test_two_machines
from asking import ask, expect_exact_or_clean, expect_same
from conftest import Machine
from engines import Engine, Proxy, free_port, wait
from test_balancing import Headless, engine
from test_expert_ranks import (
    STAND_IN,
    WITH_EXPERTS,
    ask_while_it_dies,
    prompts,
    wait_until_free,
)
from test_models import FLOAT32, model, several
from test_two_machines import FIRST, SECOND, ip, two_machines

pytestmark = test_two_machines.pytestmark

HERE, THERE = "10.0.1.2", "10.0.1.1"  # of the link from here to the first machine


class Placed(Engine):
    """An engine on another machine."""

    address = ""

    @property
    def url(self) -> str:
        return f"http://{self.address}:{self.port}"


class PlacedHeadless(Placed, Headless):
    """Ranks on another machine, without an API server."""


def place(
    at: test_two_machines.Machine,
    folder: Machine,
    name: str,
    *flags: str,
    role: str,
    cpu: str,
    kind: type[Placed] = Placed,
) -> Placed:
    """Returns an engine on a machine, with the variables that vLLM asks for on several."""
    made = kind(
        name,
        folder.folder,
        *FLOAT32,
        *flags,
        role=role,
        cpu=cpu,
        model=model("moe"),
        env={**STAND_IN, "VLLM_HOST_IP": at.address, "GLOO_SOCKET_IFNAME": "eth0"},
        settings={"host": at.address},
    )
    made.address = at.address
    made.command[made.command.index("--host") + 1] = at.address
    made.command[:0] = ["nsenter", "--net", "--uts", "--mount", f"--target={at.process.pid}"]
    return made


def reach(first: test_two_machines.Machine) -> None:
    """Connects the first machine with this one."""
    name = f"here{first.process.pid}"
    ip("link", "add", name, "type", "veth", "peer", "name", "eth1", "netns", str(first.process.pid))
    inside = ["nsenter", "--net", f"--target={first.process.pid}", "ip"]
    subprocess.run([*inside, "address", "add", f"{THERE}/24", "dev", "eth1"], check=True)
    subprocess.run([*inside, "link", "set", "eth1", "up"], check=True)
    ip("address", "add", f"{HERE}/24", "dev", name)
    ip("link", "set", name, "up")
    ip("route", "add", f"{FIRST}/32", "dev", name)


@pytest.fixture
def machines() -> Iterator[dict[str, test_two_machines.Machine]]:
    with two_machines() as made:
        reach(made[FIRST])
        yield made


def test_every_rank_receives_and_one_that_dies_ends_its_engine(
    machine: Machine, machines: dict[str, test_two_machines.Machine]
) -> None:
    machine.stop()  # all others, for the memory's sake
    plain = engine(machine, "machines-plain")
    machine.start(plain)
    asked = prompts()
    right = several(lambda one: ask(plain.url, one), asked)
    assert {one.status for one in right} == {200}
    machine.stop(plain)

    first, second = machines[FIRST], machines[SECOND]
    shared = [WITH_EXPERTS, "--data-parallel-address", FIRST]
    shared += ["--data-parallel-rpc-port", str(free_port())]
    shared += ["--data-parallel-size", "2", "--data-parallel-size-local", "1"]
    p = place(first, machine, "machines-P", role="kv_producer", cpu="0")
    head = place(first, machine, "machines-D0", *shared, role="kv_consumer", cpu="1")
    head.ranks = 2
    other = place(
        second,
        machine,
        "machines-D1",
        *shared,
        "--headless",
        "--data-parallel-start-rank",
        "1",
        role="kv_consumer",
        cpu="1",
        kind=PlacedHeadless,
    )
    proxy = Proxy(machine.folder, p, head, name="machines-proxy")
    machine.start(p, head, other)
    machine.start(proxy)
    members = dict.fromkeys([p.url, *head.urls], True)
    wait("every rank is known", lambda: proxy.members() == members)

    before = second.link_bytes()
    for one, expected in zip(several(lambda one: ask(proxy.url, one), asked), right, strict=True):
        expect_same(one, expected)
    name = "vllm:disagg_received_bytes_total"
    received = [head.metric(name, f'engine="{rank}"') for rank in range(2)]
    assert all(received), f"a rank received nothing: {received}"
    assert second.link_bytes() - before > received[1], "its KV came over the link"
    for server in (p, head):
        wait_until_free(server)
    assert p.metric("vllm:disagg_unclaimed_prefills_total") == 0

    salted = [{**one, "cache_salt": "death"} for one in asked[:24]]
    found = ask_while_it_dies(proxy.url, salted, other.child("EngineCore"))
    for one, expected in zip(found, right, strict=False):
        expect_exact_or_clean(one, expected)
    wait("vLLM ends D", lambda: not head.is_alive(), 60)
    machine.stop()
