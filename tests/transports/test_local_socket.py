"""The folders of UNIX sockets: those of killed workers are removed, those in use stay."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import numpy as np
import pytest

from vllm_disagg.config import Config
from vllm_disagg.errors import ConfigError
from vllm_disagg.fleet import dialling
from vllm_disagg.fleet.keys import KEY_BYTES, FleetKey
from vllm_disagg.kv.memory import HostMemory
from vllm_disagg.transports import local_socket
from vllm_disagg.transports.base import Counters, DriverPort
from vllm_disagg.transports.zmq import transport
from vllm_disagg.transports.zmq.control import Control
from vllm_disagg.transports.zmq.transport import ZmqTransport


def bound(folder: str, *, listens: bool, age: float) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    path = local_socket.path_in(folder)
    made.bind(path)
    if listens:
        made.listen()
    when = os.stat(path).st_mtime - age
    os.utime(path, (when, when))
    return made


@pytest.mark.parametrize(
    ("listens", "age", "stays"), [(True, 9.0, True), (False, 9.0, False), (False, 0.0, True)]
)
def test_only_folders_without_a_process_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listens: bool, age: float, stays: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = local_socket.create_folder()
    with bound(folder, listens=listens, age=age):
        local_socket.remove_stale()
        assert os.path.exists(folder) == stays
    local_socket.remove_folder(folder)
    assert not os.path.exists(folder)


def test_too_long_a_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = str(tmp_path) + "/" + "x" * (80 - len(str(tmp_path)))
    os.mkdir(longest)
    monkeypatch.setattr(tempfile, "tempdir", longest)
    local_socket.check_path()
    with bound(local_socket.create_folder(), listens=False, age=0.0):
        pass
    os.mkdir(longest + "y")
    monkeypatch.setattr(tempfile, "tempdir", longest + "y")
    with pytest.raises(ConfigError, match=r"^TMPDIR .*y is 1 B too long for the UNIX sockets"):
        local_socket.check_path()


def test_other_engines_dial_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for _ in range(20):
        folder = local_socket.create_folder()
        assert dialling.is_socket(local_socket.path_in(folder)[len(str(tmp_path)) :])
        assert os.stat(folder).st_mode & 0o777 == 0o700


def test_what_is_no_socket_of_ours_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("vllm-disagg-12345678", "vllm-disagg-up-12345678"):
        (tmp_path / name).mkdir()
        (tmp_path / name / local_socket.NAME).write_text("a file")
    before = sorted(tmp_path.rglob("*"))
    local_socket.remove_stale()
    assert sorted(tmp_path.rglob("*")) == before


def test_sockets_of_other_machines_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several machines may share the folder; a connection to another's socket is refused."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(local_socket, "machine_id", lambda: "another machine")
    folder = local_socket.create_folder()
    bound(folder, listens=False, age=9.0).close()
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    local_socket.remove_stale()
    assert os.path.exists(folder)


def control() -> Control:
    return Control(Config(transport="zmq"), FleetKey(b"k" * KEY_BYTES), "p/0")


def port_of(sockets: Control) -> DriverPort:
    return DriverPort(
        "p/0",
        sockets.config,
        HostMemory([[np.zeros((4, 64), np.uint8)]], 16),
        Counters(),
        sockets.poller,
        send_to_receiver=lambda receiver, data: None,
        send_to_sender=lambda sender, data: None,
        send_unordered=lambda receiver, data: None,
    )


def test_too_long_a_folder_is_refused_at_start_whatever_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links and TCP listen at a receiver's first note: there it ended the driver's thread."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 90)))
    monkeypatch.setattr(transport, "has_few_descriptors", lambda: True)
    sockets = control()
    with pytest.raises(ConfigError, match="too long for the UNIX sockets"):
        ZmqTransport(port_of(sockets), sockets)
    sockets.close()


def test_a_killed_worker_leaves_no_folder_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed = local_socket.create_folder()
    bound(killed, listens=True, age=9.0).close()  # its file stays, as after kill -9
    assert os.path.exists(killed)
    sockets = control()
    made = ZmqTransport(port_of(sockets), sockets)
    made.close()
    sockets.close()
    assert not os.path.exists(killed)
