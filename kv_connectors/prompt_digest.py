"""A digest of what the KV of a prompt is made from: tokens, images, the LoRA adapter as vLLM has
loaded it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .fingerprint import WEIGHTS, digest, sampled

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logging.getLogger("vllm_disagg.prompt_digest")


def prompt(request: Request) -> str:
    """A digest of all that its KV is made from: token ids, images and the like, the LoRA adapter.

    Each engine makes tokens of the same body by itself, and may come to others: a chat template
    knows the time, a tokenizer was changed on one side, an image's address gives another image.
    Empty where it cannot be told.
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return ""
    state = hashlib.blake2b(array("q", request.prompt_token_ids).tobytes(), digest_size=16)
    for item in request.mm_features or ():
        state.update(
            json.dumps(
                [item.modality, item.identifier, item.mm_position.offset, item.mm_position.length]
            ).encode()
        )
    if (lora := request.lora_request) is not None:
        if getattr(lora, "load_inplace", False):  # its files may be newer than what is loaded
            return ""
        try:
            if (fingerprint := _adapter(lora)) is None:
                log.warning(
                    "the files of the LoRA adapter %s have changed since it was loaded",
                    lora.lora_name,
                )
                return ""
        except OSError as error:
            log.warning("the LoRA adapter %s cannot be read: %s", lora.lora_name, error)
            return ""
        state.update(fingerprint.encode())
    return state.hexdigest()


ADAPTER_SETTINGS = "adapter_config.json"
Files = list[tuple[str, int, int, int, int]]
MAX_ADAPTERS = 65536  # remembered; those beyond are served alone
_loaded: dict[tuple[str, int], Files] = {}  # the adapters' files as they were when vLLM loaded them


def note_adapter(lora: Any) -> None:
    """Before vLLM loads an adapter. Those that it was not told to load it loads for the first
    request that names them.
    """
    key = lora.lora_path, lora.lora_int_id
    if (
        key in _loaded or len(_loaded) >= MAX_ADAPTERS
    ):  # to forget one would make its files of now those that were loaded
        return
    try:
        _loaded[key] = _files(lora.lora_path)
    except OSError as error:
        log.warning("the LoRA adapter %s cannot be read: %s", lora.lora_name, error)
        _loaded[key] = []


def _adapter(lora: Any) -> str | None:
    """A fingerprint of what vLLM has loaded. None if its files have changed since: vLLM reads them
    again when it likes, so neither the old nor the new ones are sure to be what it computes with.
    """
    note_adapter(lora)
    found = _read(lora.lora_path, lora.lora_int_id)
    return (
        found if _files(lora.lora_path) == _loaded.get((lora.lora_path, lora.lora_int_id)) else None
    )


def _files(path: str) -> Files:
    """What vLLM reads of an adapter; none if it is on the hub."""
    folder = Path(path).expanduser()
    stats = [
        (file.name, file.stat())
        for pattern in (ADAPTER_SETTINGS, *WEIGHTS)
        for file in folder.glob(pattern)
    ]
    return sorted((name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in stats)


@lru_cache(maxsize=1024)
def _read(path: str, loaded: int) -> str:
    """Of an adapter's files, else of its name on the hub; `loaded`: its number, which vLLM gives."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return digest(path)
    settings = folder / ADAPTER_SETTINGS
    return digest([settings.read_text() if settings.is_file() else "", sampled(folder)])
