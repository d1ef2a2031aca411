"""Makes the digest of a prompt: a hash of all inputs of its KV.

The inputs are token ids, images and the like, and the LoRA adapter as vLLM has loaded it.

Theory of adapters. vLLM loads an adapter's files at the start, at `add_lora`, or at the first
request that names it, and may load them again later. The KV depends on the files as loaded. So
`note_load` records size, times and inode of the files before vLLM loads them. A prompt has a
digest only while the files are unchanged since; otherwise old and new files are both possible.
Equal contents do not suffice. Other files may have been there meanwhile, and vLLM may have loaded
them for a request without a transfer, which is not looked at. Only the times tell that.

Nor has it one after other files were loaded under the same cache name: vLLM then finds KV of the
earlier files in its prefix cache. A cache name is an adapter's name; as of vLLM 0.32 with its path.
Where adapters change what encoders make of images, it is the name alone: vLLM keeps that by name.
Files that vLLM could not load have made no KV: they may be a copy that was not whole yet.

A digest is made when its request arrives. Three things keep it true until the prompt is computed:

* An adapter that is loaded is not replaced in place: `note_load` refuses it.
* Workers note the files at each read (`note_read`). A step reads an adapter again that has left the
  worker's memory. If it had other files then, no KV that this worker has computed with it is sent.
* D looks at the files again before it begins a load (`has_certain_adapter`).

After that D may read other files for its answer, as a plain vLLM does behind its prefix cache.

An adapter that is named by its place on a hub has no digest. vLLM looks the name up at each load,
without a revision, so that two engines, or one at two times, may have two adapters of one name.
"""

from __future__ import annotations

import hashlib
import json
import logging
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_disagg.errors import ConfigError
from vllm_disagg.protocol.events import BlocksScheduled, ForSender

from . import compat
from .fingerprint import WEIGHTS, digest, sample_files

if TYPE_CHECKING:
    from vllm.v1.request import Request

log = logging.getLogger("vllm_disagg.prompt_digest")

ADAPTER_SETTINGS = "adapter_config.json"
MAX_ADAPTERS = 65536  # recorded; prompts of further adapters have no digest
MAX_CACHED_DIGESTS = 1024  # of adapters' files

FileStamps = list[tuple[str, int, int, int, int]]  # name, size, mtime, ctime in ns, inode
AdapterKey = tuple[str, int]  # path, vLLM's number of the adapter
_stamps_at_load: dict[AdapterKey, FileStamps] = {}
_first_files: dict[str, tuple[str, FileStamps]] = {}  # path and state, by cache name
_replaced: set[str] = set()  # cache names under which different files were loaded
_warned: set[tuple[AdapterKey, str]] = set()  # with the kind of warning


@dataclass
class _Caches:
    """What this process's caches tell adapters by."""

    tell_paths: bool = True


_caches = _Caches()


def note_lora_settings(lora_config: Any) -> None:
    """Notes, when an engine starts, whether its adapters change what encoders make of images."""
    if getattr(lora_config, "enable_tower_connector_lora", False):
        _caches.tell_paths = False


def cache_name(lora: Any) -> str:
    """Returns what vLLM's caches tell an adapter by; empty without an adapter."""
    if lora is None:
        return ""
    return compat.cache_name(lora) if _caches.tell_paths else str(lora.lora_name)


def digest_prompt(request: Request) -> str:
    """Returns the digest of a request's prompt; empty if engines cannot compare its inputs.

    Each engine tokenizes the body separately, and may get other tokens. A chat template may read
    the time, a tokenizer may have changed at one side, an image's address may return another image.
    """
    if request.prompt_token_ids is None or request.prompt_embeds is not None:
        return ""
    state = hashlib.blake2b(array("q", request.prompt_token_ids).tobytes(), digest_size=16)
    for item in request.mm_features or ():
        place = item.mm_position
        fields = [item.modality, item.identifier, place.offset, place.length]
        state.update(json.dumps(fields).encode())
    if request.lora_request is not None:
        adapter_digest = _digest_adapter(request.lora_request)
        if not adapter_digest:
            return ""
        state.update(adapter_digest.encode())
    return state.hexdigest()


@contextmanager
def note_load(lora: Any) -> Iterator[None]:
    """Records the state of an adapter's files before vLLM loads them, in the `with` block.

    Raises ConfigError for a load in the place of another one.
    """
    _refuse_replacement(lora)
    is_recorded = _record_stamps(lora)
    try:
        yield
    except Exception:
        if is_recorded:
            del _stamps_at_load[lora.lora_path, lora.lora_int_id]
        raise
    if is_recorded:
        _compare_with_first_files(lora, _stamps_at_load[lora.lora_path, lora.lora_int_id])


def _refuse_replacement(lora: Any) -> None:
    """Raises ConfigError if vLLM would give an adapter's number to other weights.

    Requests that were admitted before, and steps of those that run, would go on with these.
    """
    is_known = any(number == lora.lora_int_id for _, number in _stamps_at_load)
    if is_known and getattr(lora, "load_inplace", False):
        raise ConfigError(
            f"DisaggConnector does not replace a loaded adapter ({lora.lora_name}), because"
            " requests may be under way with it: load the new one under a new name, without"
            " load_inplace"
        )


@contextmanager
def note_read(lora: Any) -> Iterator[None]:
    """Compares the files that a worker reads of an adapter, in the `with` block, with its first.

    A worker's process has records of its own, unless it is the scheduler's.
    """
    stamps = [_stamps_or_none(lora)]
    yield  # a read that failed has made no KV
    stamps.append(_stamps_or_none(lora))  # they may have changed while they were read
    for each in stamps:
        if cache_name(lora) not in _replaced:
            _compare_with_first_files(lora, each)


def misread(sender_events: Iterable[ForSender]) -> list[str]:
    """Returns the transfers of prompts that this worker may have computed with other files."""
    return [
        event.transfer
        for event in sender_events
        if isinstance(event, BlocksScheduled) and event.adapter and _is_misread(event.adapter)
    ]


def _is_misread(name: str) -> bool:
    # Nothing is known of an adapter whose files could not be looked at, or of one too many.
    _, stamps = _first_files.get(name, ("", []))
    return name in _replaced or not stamps


def has_certain_adapter(request: Request) -> bool:
    """Returns whether the adapter of a request, if it has one, still has the files of its load."""
    return request.lora_request is None or bool(_digest_adapter(request.lora_request))


def _record_stamps(lora: Any) -> bool:
    """Records the state of an adapter's files; returns False if it has one, or cannot get one.

    For an adapter without `add_lora` call, the first request that names it is early enough.
    """
    key = lora.lora_path, lora.lora_int_id
    if key in _stamps_at_load:
        return False
    # No entry is dropped to make room: the adapter would be recorded anew, with later files.
    if len(_stamps_at_load) >= MAX_ADAPTERS:
        return False
    _stamps_at_load[key] = _stamps_or_none(lora)
    return True


def _stamps_or_none(lora: Any) -> FileStamps:
    """Returns the state of an adapter's files; empty if they cannot be read."""
    try:
        return _stamp_files(lora.lora_path)
    except OSError as error:
        _log_unreadable(lora, error)
        return []


def _compare_with_first_files(lora: Any, stamps: FileStamps) -> None:
    """Finds out whether other files were loaded under an adapter's cache name before."""
    name = cache_name(lora)
    files = (lora.lora_path, stamps)
    # Prompts of further adapters have no transfers.
    if name not in _first_files and len(_first_files) >= MAX_ADAPTERS:
        return
    if _first_files.setdefault(name, files) == files:
        return
    _replaced.add(name)
    log.warning(
        "LoRA adapter %s: other files were loaded under its name before, and their KV may be in the"
        " prefix cache; its requests run without KV transfers until this engine is restarted, or"
        " the adapter is loaded under a new name",
        lora.lora_name,
    )


def _digest_adapter(lora: Any) -> str:
    """Returns a digest of the adapter that vLLM has loaded; empty if that is uncertain."""
    if getattr(lora, "load_inplace", False):  # the files may be newer than the loaded adapter
        return ""
    try:
        if _record_stamps(lora):
            key = lora.lora_path, lora.lora_int_id
            _compare_with_first_files(lora, _stamps_at_load[key])
        adapter_digest = _digest_files(lora.lora_path, lora.lora_int_id)
        stamps = _stamp_files(lora.lora_path)
    except OSError as error:
        _log_unreadable(lora, error)
        return ""
    # vLLM may load the files again at any time, so after a change neither the old nor the new
    # ones are certain.
    if stamps != _stamps_at_load.get((lora.lora_path, lora.lora_int_id)):
        if _is_first_warning(lora, "changed"):
            log.warning(
                "LoRA adapter %s: its files have changed since it was loaded; its requests run"
                " without KV transfers until it is loaded under a new name, or this engine is"
                " restarted",
                lora.lora_name,
            )
        return ""
    if cache_name(lora) in _replaced:  # `_compare_with_first_files` has logged it
        return ""
    return adapter_digest


def _log_unreadable(lora: Any, error: OSError) -> None:
    if _is_first_warning(lora, "unreadable"):
        log.warning(
            "LoRA adapter %s: its files cannot be read (%s); its requests run without KV transfers",
            lora.lora_name,
            error,
        )


def _is_first_warning(lora: Any, kind: str) -> bool:
    """Returns whether an adapter has no warning of this kind yet; each of its requests asks."""
    warning = ((lora.lora_path, lora.lora_int_id), kind)
    # Of no more adapters than are recorded: clients name them.
    if warning in _warned or len(_warned) >= 2 * MAX_ADAPTERS:
        return False
    _warned.add(warning)
    return True


def _stamp_files(path: str) -> FileStamps:
    """Returns the state of the files that vLLM reads; empty for an adapter on a hub."""
    folder = Path(path).expanduser()
    stamps = []
    for pattern in (ADAPTER_SETTINGS, *WEIGHTS):
        for file in folder.glob(pattern):
            stat = file.stat()
            stamp = (file.name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)
            stamps.append(stamp)
    return sorted(stamps)


@lru_cache(maxsize=MAX_CACHED_DIGESTS)
def _digest_files(path: str, adapter_number: int) -> str:
    """Returns a digest of an adapter's files; empty without a folder.

    `adapter_number`: vLLM's, part of the cache key; an adapter loaded anew has a new number.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        log.warning(
            "LoRA adapter %s: it is no folder here, and a name on a hub may stand for other files"
            " at another engine; its requests run without KV transfers: download it, and load it"
            " from its folder",
            path,
        )
        return ""
    settings = folder / ADAPTER_SETTINGS
    settings_text = settings.read_text() if settings.is_file() else ""
    return digest([settings_text, sample_files(folder)])
