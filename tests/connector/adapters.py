"""LoRA adapters in folders, and the processes of the engines that load them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from kv_connectors import prompt_digest


def adapter(
    folder: Path, weights: bytes, number: int = 1, name: str = "one", *, is_in_place: bool = False
) -> SimpleNamespace:
    """Writes an adapter; returns vLLM's request for it. `number`: vLLM's, another at each load."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return SimpleNamespace(
        lora_name=name, lora_path=str(folder), lora_int_id=number, load_inplace=is_in_place
    )


@contextmanager
def engine_process() -> Iterator[None]:
    """Has the block know no adapter of another engine, as a process of its own."""
    with pytest.MonkeyPatch.context() as fresh:
        for records in ("_stamps_at_load", "_first_files"):
            fresh.setattr(prompt_digest, records, {})
        for notes in ("_replaced", "_warned"):
            fresh.setattr(prompt_digest, notes, set())
        fresh.setattr(prompt_digest, "_caches", prompt_digest._Caches())
        yield
