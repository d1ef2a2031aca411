"""Changes an engine of these tests before anything of vLLM runs, when imported at Python's start.

ENGINE_CHANGES names further modules of this folder, separated by spaces.
"""

from __future__ import annotations

import importlib
import os

import no_amx  # noqa: F401 - imported for its effect

for name in os.environ.get("ENGINE_CHANGES", "").split():
    importlib.import_module(name)
