"""LoRA adapters of the scheduler worlds: tiny files, which the product reads and compares."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from vllm.lora.request import LoRARequest
from world_config import EngineSetup, world_folder

FIRST_OTHER_FILES = 100


def adapter_files(setup: EngineSetup, adapter: int) -> int:
    """Returns the number of the files that an engine has under an adapter's number.

    0, the base model, has none. The KV of a prompt depends on these files.
    """
    if adapter and adapter == setup.other_adapter:
        return FIRST_OTHER_FILES + adapter
    return adapter


def adapter_request(setup: EngineSetup, adapter: int) -> LoRARequest | None:
    """Returns vLLM's description of an adapter; None for the base model."""
    if not adapter:
        return None
    path = str(_adapter_folder(adapter_files(setup, adapter)))
    # Named by its path: the engines share a process here, and the product takes other files under
    # one name for a replacement.
    return LoRARequest(path, adapter, path)


@cache
def _adapter_folder(files: int) -> Path:
    """Makes a folder with these files."""
    path = world_folder().path / f"adapter{files}"
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").write_bytes(bytes([files]))
    return path
