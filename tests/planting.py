"""Plants a fault in a module while Python imports it: no file changes.

For forked processes: the parent has imported vLLM and the like, but no module of this project.
"""

from __future__ import annotations

from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType


def plant(path: Path, old: str, new: str) -> None:
    """Has this process import the module at `path` with `new` in place of `old`."""
    text = path.read_text().replace(old, new)
    read = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, name: str) -> CodeType | None:
        # Compiled bytecode in a cache has no fault.
        if Path(loader.path) != path:
            return read(loader, name)
        return loader.source_to_code(text.encode(), str(path))

    SourceFileLoader.get_code = get_code  # type: ignore[assignment,method-assign]
