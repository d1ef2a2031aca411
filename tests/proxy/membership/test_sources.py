"""Tests the sources that are read again and again: the fleet file, and names in DNS."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_disagg.proxy.membership import sources
from vllm_disagg.proxy.membership.reconcile import Member
from vllm_disagg.proxy.routing.fleet import Role

ON_1, ON_2 = "decode: [http://d1]", "decode: [http://d1, http://d2]"


async def is_true(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(50):
        while not condition():
            await asyncio.sleep(0.001)


async def test_a_file_that_could_not_be_read_is_read_once_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After `chmod` it has the same time, size and inode."""
    path = tmp_path / "fleet.yaml"
    path.write_text(ON_1)
    read = Path.read_text
    reads: list[str] = []
    is_forbidden = False

    def read_text(file: Path, *args: Any, **options: Any) -> str:
        reads.append("")
        if is_forbidden:  # as for all users but root
            raise PermissionError(13, "Permission denied", str(file))
        return read(file, *args, **options)

    monkeypatch.setattr(Path, "read_text", read_text)
    counts: list[int] = []
    ignored: list[bool] = []
    task = asyncio.create_task(
        sources.follow_file(
            str(path), 0.001, lambda members: counts.append(len(set(members))), ignored.append
        )
    )
    await is_true(lambda: counts == [1])
    assert ignored == [False]
    is_forbidden = True
    path.write_text(ON_2)
    await is_true(lambda: "Permission denied" in caplog.text)
    seen = len(reads)
    await is_true(lambda: len(reads) > seen + 2)
    is_forbidden = False
    await is_true(lambda: counts == [1, 2])
    seen = len(reads)
    await asyncio.sleep(0.02)
    task.cancel()
    assert len(reads) == seen, "a file that was read is read again after a change only"
    assert caplog.text.count("the fleet stays as it is") == 1
    assert set(ignored[1:-1]) == {True} and not ignored[-1]


def answer(family: socket.AddressFamily, address: str) -> tuple[Any, ...]:
    return (family, socket.SOCK_STREAM, 6, "", (address, 8000))


V4, V6 = answer(socket.AF_INET, "10.1.0.7"), answer(socket.AF_INET6, "fd00:10:1::7")


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([[V6, V4]], "http://10.1.0.7:8000"),
        ([[V6]], "http://[fd00:10:1::7]:8000"),
        ([[V6, V4], [V6]], "http://10.1.0.7:8000"),  # one of two look-ups failed
        ([[V6], [V6, V4]], "http://[fd00:10:1::7]:8000"),
    ],
)
async def test_an_instance_with_two_addresses_is_one(
    answers: list[list[tuple[Any, ...]]], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each pod of a dual-stack headless Service has an address of both families."""
    asked = 0

    async def getaddrinfo(_: str, __: int, *, family: int = 0, **___: object) -> list[Any]:
        nonlocal asked
        found = [
            entry for entry in answers[min(asked, len(answers) - 1)] if family in (0, entry[0])
        ]
        asked += 1
        if not found:
            raise socket.gaierror("no address of this family")
        return found

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo, raising=False)
    named: list[set[Member]] = []
    names: list[tuple[Role, str, int]] = [("decode", "decode", 8000)]
    task = asyncio.create_task(
        sources.follow_names(names, 0.001, lambda members: named.append(set(members)))
    )
    await is_true(lambda: len(named) > len(answers))
    task.cancel()
    assert all(members == {Member(expected, "decode")} for members in named)
