"""The measures of words, density and rooms, on made-up sources with known figures."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"

SOURCES = {
    "vllm_disagg/__init__.py": '"""A package."""\n',
    "vllm_disagg/base.py": "from .proxy import server  # a circle of two rooms\n",
    "vllm_disagg/proxy/__init__.py": "",
    "vllm_disagg/proxy/server.py": "from .. import base\nfrom . import pool\n\n\nclass Worker:\n    pass\n",
    "vllm_disagg/proxy/pool.py": (
        "class Worker:\n"
        '    """A process that says what it wants."""\n'
        "\n"
        "    def start(self):  # why\n"
        "        a, b = 1, 2\n"
        "        return a if b else None\n"
        "\n"
        "    def stop(self):\n"
        '        """Stop."""\n'
        "        return [x for x in self]\n"
        "\n"
        "    def _inner(self):\n"
        "        def public_but_inside():\n"
        "            pass\n"
    ),
    "vllm_disagg/protocol/sender.py": "# Subtle.\nx = 1\n",
    "kv_connectors/__init__.py": "",
    "kv_connectors/worker.py": f"import vllm_disagg.base\nfrom .scheduler import x\n\ny = '{'x' * 100}'\n",
    "kv_connectors/scheduler.py": "x = 1\n",
}
DOCUMENTS = {"README.md": "Nobody reads `what is` here.\n\n| whoever |\n\n```\nsays\n```\n"}


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return import_module("house")


def test_density_of_one_file(house: ModuleType) -> None:
    found = house.measure_file("pool.py", SOURCES["vllm_disagg/proxy/pool.py"])
    assert (found.code_lines, found.comments, found.long_lines) == (9, 1, 0)
    assert (found.tuple_assignments, found.conditional_expressions, found.comprehensions) == (
        1,
        1,
        1,
    )
    assert found.tokens == 3 + 6 + 7 + 6 + 6 + 8 + 6 + 5 + 1
    assert found.public_names == 3
    assert found.undocumented == ["pool.py:4 Worker.start"]


def test_figures_of_a_tree(house: ModuleType) -> None:
    figures = house.measure(SOURCES, DOCUMENTS)
    assert figures["rooms"] == 5  # the package itself, base, protocol, proxy, the plugin
    assert figures["arrows"] == 3
    assert figures["circle_members"] == [["vllm_disagg.base", "vllm_disagg.proxy"]]
    assert figures["circles"] == 1
    inside = figures["rooms_and_arrows_inside"]
    assert inside == {"vllm_disagg.proxy": [3, 1], "kv_connectors": [3, 1]}
    assert figures["lines_over_100"] == 1
    assert figures["comments_per_100_protocol_and_transports"] == 100
    assert figures["class_names_with_several_meanings"] == ["Worker"]
    assert figures["relative_words_per_1000_docstrings"] == pytest.approx(
        1000 * 2 / 10
    )  # says, wants
    assert figures["relative_words_per_1000_docs"] == pytest.approx(1000 / 3, abs=0.1)


def test_a_tree_without_the_folders_and_without_documents(house: ModuleType) -> None:
    figures = house.measure({"vllm_disagg/base.py": "x = 1\n"}, {})
    assert figures["comments_per_100_protocol_and_transports"] == 0
    assert figures["circles"] == 0


def test_the_last_line_is_json_of_what_git_tracks(tmp_path: Path) -> None:
    for path, text in {**SOURCES, **DOCUMENTS}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    for command in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "vllm_disagg/untracked.py").write_text("x = 1\n")
    (tmp_path / "kv_connectors/scheduler.py").unlink()  # deleted, not yet committed
    script = [sys.executable, str(SCRIPTS / "house.py"), str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["rooms"] == 5
    assert figures["rooms_and_arrows_inside"]["kv_connectors"] == [2, 0]
    listed = subprocess.run([*script, "--undocumented"], capture_output=True, text=True, check=True)
    assert listed.stdout.splitlines() == [
        "vllm_disagg/proxy/pool.py:4 Worker.start",
        "vllm_disagg/proxy/server.py:5 Worker",
    ]
