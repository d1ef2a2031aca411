"""Listening sockets of an engine: those of plain vLLM, and the transport's, on the loopback."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from asking import body, tokens
from conftest import Main
from engines import Engine, wait
from listening import beyond_loopback, listening

# vLLM's own, on the CPU: the API server's port, and in the worker those of torch.distributed: a
# TCPStore and Gloo's devices, one for each process group, whose number differs by version: so a
# plain engine is counted beside.


def owners(engine: Engine) -> dict[int, list[tuple[str, int]]]:
    assert engine._process is not None
    return listening(engine._process.pid)


def more_than(plain: Engine, engine: Engine) -> Counter[str]:
    """Returns how many listening sockets an engine has beyond those of a plain one, by process."""
    found, alone = (
        Counter({name(pid): len(held) for pid, held in owners(one).items()})
        for one in (engine, plain)
    )
    assert found.keys() == alone.keys()
    return Counter({key: found[key] - alone[key] for key in found if found[key] != alone[key]})


def expect_listening(engine: Engine, plain: Engine, least: int, most: int) -> None:
    """Checks our own listening sockets, all in the worker; between the permitted numbers."""
    assert engine._process is not None
    wait(f"{engine.name} listens", lambda: more_than(plain, engine)["VLLM::Worker"] >= least)
    more = more_than(plain, engine)
    assert more.keys() == {"VLLM::Worker"} and more["VLLM::Worker"] <= most, more
    assert not beyond_loopback(engine._process.pid), engine.name


def name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def test_auto_listens_for_control_data_and_tcp(main: Main) -> None:
    for at in range(3):
        main.check(body(tokens(300 + at, "listening")))
    expect_listening(main.prefill, main.plain, 3, 3)
    expect_listening(main.decode, main.plain, 2, 3)  # TCP's door is open once P has read from it
