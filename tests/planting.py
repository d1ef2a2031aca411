"""Plants a fault in a module while Python imports it: no file changes.

For forked processes: the parent has imported vLLM and the like, but no module of this project.
Pythons that such a process starts plant the same fault: `planted_children/sitecustomize.py`.
"""

from __future__ import annotations

import json
import linecache
import os
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).resolve().parent.parent
# The fault of a process's children: JSON of path, old and new text.
VARIABLE = "PLANTED_FAULT"


def plant(path: Path, old: str, new: str) -> None:
    """Has this process import the module at `path` with `new` in place of `old`."""
    text = path.read_text().replace(old, new)
    # For those that read a function's text, as Triton does. Without a time it is never checked.
    lines = text.splitlines(keepends=True)
    linecache.cache[str(path)] = (len(text), None, lines, str(path))
    read = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
        # Compiled bytecode in a cache has no fault.
        if Path(loader.path) != path:
            return read(loader, name)
        return loader.source_to_code(text.encode(), str(path))

    SourceFileLoader.get_code = get_code  # type: ignore[assignment,method-assign]


def plant_in_children(path: Path, old: str, new: str) -> None:
    """Plants a fault in each Python that this process starts and that inherits its environment."""
    os.environ[VARIABLE] = json.dumps([str(path), old, new])
    folders = [ROOT / "tests/planted_children", ROOT, ROOT / "tests"]
    os.environ["PYTHONPATH"] = os.pathsep.join(map(str, folders))


def plant_inherited() -> None:
    """Plants the fault that the environment names, if any."""
    if fault := os.environ.get(VARIABLE):
        path, old, new = json.loads(fault)
        plant(Path(path), old, new)
