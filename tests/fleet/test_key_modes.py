"""Who may read a key file: a warning names each file that too many may read."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

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
    monkeypatch.setattr(keys.os, "stat", lambda _: status)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    keys.warn_of_mode(path)
    assert bool(caplog.records) == warned


def test_a_name_that_no_file_can_have_is_a_line() -> None:
    with pytest.raises(ConfigError, match="no file can have this name"):
        keys.load("a\0b")
    with pytest.raises(ConfigError, match=r"^--api-key-file .a.+ no file can have this name"):
        keys.read_lines("a\0b", "--api-key-file")
