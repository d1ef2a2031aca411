"""Runs functions just before modules of vLLM or ours are imported, in each process of an engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType


class ImportHook(MetaPathFinder):
    """Runs a function when a module is about to be imported for the first time."""

    def __init__(self, module: str, run: Callable[[], None]) -> None:
        """Watches for `module`, by its full name."""
        self._module = module
        self._run = run
        self._has_run = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Finds nothing; the next finder imports the module."""
        if fullname == self._module and not self._has_run:
            self._has_run = True
            self._run()


def before_import(module: str, run: Callable[[], None]) -> None:
    """Has `run` called before `module` is imported."""
    sys.meta_path.insert(0, ImportHook(module, run))
