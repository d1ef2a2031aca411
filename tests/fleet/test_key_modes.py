"""Key files and keys of the environment: who may read them, and what is no key."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_disagg import bearer_keys
from vllm_disagg.errors import ConfigError
from vllm_disagg.fleet import keys


@pytest.mark.parametrize(
    ("owner", "mode", "warned"),
    [
        (1000, 0o600, False),
        (1000, 0o640, True),
        (0, 0o440, False),  # a Kubernetes Secret with fsGroup
        (0, 0o400, False),
        (0, 0o460, True),
        (0, 0o444, True),
        (7, 0o440, True),
    ],
)
def test_a_secret_of_root_may_be_read_by_the_group_of_a_pod(
    owner: int,
    mode: int,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    path = str(tmp_path / "fleet.key")
    status = SimpleNamespace(st_uid=owner, st_mode=0o100000 | mode)
    with monkeypatch.context() as scripted:  # pytest itself needs these to report a failure
        scripted.setattr(keys.os, "stat", lambda _: status)
        scripted.setattr(os, "geteuid", lambda: 1000)
        keys.warn_of_mode(path)
    assert bool(caplog.records) == warned


def test_a_name_that_no_file_can_have_is_a_line() -> None:
    with pytest.raises(ConfigError, match="no file can have this name"):
        keys.load("a\0b")
    with pytest.raises(ConfigError, match=r"^--api-key-file .a.+ no file can have this name"):
        keys.read_lines("a\0b", "--api-key-file")


@contextmanager
def room_in_files(size: int) -> Iterator[None]:
    """No file may become longer: a write fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_no_file_without_a_key(tmp_path: Path) -> None:
    path = tmp_path / "fleet.key"
    with room_in_files(10), pytest.raises(ConfigError, match=r"fleet\.key: File too large$"):
        keys.create(str(path))
    keys.create(str(path))
    assert keys.load(str(path)).is_set


def test_a_key_of_the_environment_loses_its_line_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """`echo KEY | base64` in a Secret adds one; a file from Windows has two characters."""
    monkeypatch.setenv("ONE", " \r\n")
    monkeypatch.setenv("TWO", "schl\u00fcssel\r\n")
    assert bearer_keys.from_environment("ZERO", "ONE", "TWO") == "schl\u00fcssel"
    assert bearer_keys.from_environment() == ""


@pytest.mark.parametrize("key", ["secret\nX-Other: 1", "secret\x7f", "secret\udcff"])
def test_no_key_is_a_line_that_does_not_show_it(key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--api-key has characters") as refused:
        bearer_keys.clean(key, "--api-key")
    assert "secret" not in str(refused.value)
    (tmp_path / "keys").write_bytes(b"good\nsecret\x01\n")
    with pytest.raises(ConfigError, match=r"^--api-key-file .+keys: has characters") as refused:
        keys.read_lines(str(tmp_path / "keys"), "--api-key-file")
    assert "secret" not in str(refused.value)
