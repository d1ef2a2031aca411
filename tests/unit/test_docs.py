"""The checks of the documents find each kind of fault; `make check` checks the tree itself."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts import check_docs, reference

README = check_docs.ROOT / "README.md"


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        ("docs/index.md", ""),
        ("docs/index.md#how-to", ""),
        ("#use-it", ""),
        ("docs/", ""),
        ("https://example.org/nothing", ""),
        ("docs/nothing", "no such file"),
        ("docs/index.md#nothing", "no such heading"),
        ("#nothing", "no such heading"),
    ],
)
def test_links_and_anchors(target: str, fault: str) -> None:
    found = check_docs.link_fault(README, target)
    assert fault in found and bool(fault) == bool(found)


@pytest.mark.parametrize(
    ("code", "is_fault"),
    [
        ("vllm_disagg/cli.py", False),
        ("tests/engine", False),
        ("python -m pytest tests/gpu", False),
        ("check_docs.py", False),
        ("docs/nothing", True),
        ("nothing.py", True),
        ("tests/nothing/", True),
        ("http/nothing", False),
        ("tests/unit/test_cli.py::test_version", False),
        ("tests/unit/test_cli.py::test_versio", True),
        ("tests/unit/test_clo.py::test_version", True),
    ],
)
def test_paths(code: str, is_fault: bool) -> None:
    assert bool(check_docs.path_fault(code)) == is_fault


@pytest.mark.parametrize(
    ("block", "fault"),
    [
        ("make check test\n", ""),
        ("make VLLM=0.28.0 setup  # minutes\n", ""),
        ("make nothing\n", "no target nothing"),
        ("vllm-disagg key fleet.key\n", ""),
        ("vllm-disagg proxy --port 8000 \\\n    --decode http://127.0.0.1:8200\n", ""),
        ("vllm-disagg up --model M -- --dtype float32\n", ""),
        ("vllm-disagg up --model M --nothing\n", "unrecognized arguments: --nothing"),
        ("vllm-disagg proxy --port many\n", "invalid int value"),
        ("vllm-disagg nothing\n", "invalid choice"),
        ("python scripts/nothing.py\n", "no file scripts/nothing.py"),
        ("curl localhost:8000/metrics\n", ""),
    ],
)
def test_commands(block: str, fault: str) -> None:
    (words,) = check_docs.commands(block)
    found = check_docs.command_fault(words)
    assert fault in found and bool(fault) == bool(found)


class Fields:
    """Fields with comments in each place where a formatter leaves them."""

    # above, in
    # two lines
    above: int = 1
    inside: str = "x"  # inside
    behind: int = 2  # behind
    none: int = 3


def test_comments_of_fields() -> None:
    assert reference._comments(Fields) == {
        "above": "above, in two lines",
        "inside": "inside",
        "behind": "behind",
        "none": "",
    }


def test_a_page_that_differs_from_the_code_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "paths.md"
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    monkeypatch.setattr(reference, "REFERENCE", tmp_path)
    monkeypatch.setattr(reference, "PAGES", {"paths.md": reference.paths})
    monkeypatch.setattr(sys, "argv", ["reference.py"])
    assert reference.main() == 0 and "/v1/completions" in page.read_text()
    monkeypatch.setattr(sys, "argv", ["reference.py", "--check"])
    assert reference.main() == 0 and not capsys.readouterr().out
    page.write_text(page.read_text().replace("/v1/completions", "/v1/completion"))
    assert reference.main() == 1
    assert capsys.readouterr().out.count("\n") == 1
