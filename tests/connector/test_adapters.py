"""LoRA adapters: what a prompt's digest says of them stays true until the prompt is computed."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from adapters import adapter, engine_process
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.lora.worker_manager import WorkerLoRAManager
from vllm.v1.core import kv_cache_utils
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.input_processor import InputProcessor
from vllm_release import IS_BEFORE_032, as_of_032

from kv_connectors import compat, connector, prompt_digest, supported
from kv_connectors.connector import DisaggConnector
from vllm_disagg.errors import ConfigError
from vllm_disagg.protocol import events


def asked(lora: Any) -> Any:
    return SimpleNamespace(
        prompt_token_ids=[1, 2],
        prompt_embeds=None,
        mm_features=[],
        lora_request=lora,
        cache_salt=None,
    )


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Loads an adapter by the call that vLLM's engine core gets, in a process of its own."""
    monkeypatch.setattr(EngineCore, "add_lora", EngineCore.add_lora)
    for _ in range(3):  # connectors of one process
        compat.around_adapter_loads(prompt_digest.note_load)
    taken: list[Any] = []
    core: Any = SimpleNamespace(
        model_executor=SimpleNamespace(add_lora=lambda lora: taken.append(lora) or True)
    )

    def told(lora: Any) -> Any:
        assert EngineCore.add_lora(core, lora) and taken.pop() is lora and not taken
        return lora

    with engine_process():
        yield told


def test_an_adapter_is_compared_by_its_files_at_load_time(load: Any, tmp_path: Path) -> None:
    digests = []
    for folder, number in (("a", 101), ("b", 102)):
        with engine_process():
            lora = load(adapter(tmp_path / folder, b"a", number))
            (tmp_path / folder / f"{folder}.log").write_text("vLLM reads no such files")
            digests.append(prompt_digest.digest_prompt(asked(lora)))
    ours, theirs = digests
    assert ours == theirs != prompt_digest.digest_prompt(asked(None))
    assert ours


@pytest.mark.parametrize("is_used", [False, True])
def test_an_adapter_with_changed_files_has_no_digest(
    load: Any, tmp_path: Path, is_used: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """New files may have the same length and times. At another path they are another adapter."""
    lora = load(adapter(tmp_path / "a", b"a", 201 + is_used))
    if is_used:
        assert prompt_digest.digest_prompt(asked(lora))
    times = (tmp_path / "a" / "adapter_model.safetensors").stat()
    adapter(tmp_path / "a", b"b", 0)
    os.utime(
        tmp_path / "a" / "adapter_model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns)
    )
    assert prompt_digest.digest_prompt(asked(lora)) == "", (
        "vLLM may have the old files or, after an eviction, the new ones"
    )
    # Older prefix caches tell adapters by their names alone.
    name = "another" if IS_BEFORE_032 else "one"
    moved = load(adapter(tmp_path / "b", b"b", 211 + is_used, name))
    assert prompt_digest.digest_prompt(asked(moved))
    adapter(tmp_path / "a", b"a", 0)
    assert prompt_digest.digest_prompt(asked(lora)) == "", (
        "equal to those of the load, but vLLM may have loaded the others meanwhile"
    )
    assert caplog.text.count("its files have changed since it was loaded") == 1


def test_an_adapter_whose_files_cannot_be_read_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: str) -> Any:
        raise PermissionError(f"no permission for {path}")

    monkeypatch.setattr(prompt_digest, "_stamp_files", fail)
    for number in (701, 702):
        lora = adapter(tmp_path / "a", b"a", number)
        for _ in range(3):
            assert prompt_digest.digest_prompt(asked(lora)) == ""
    assert caplog.text.count("its files cannot be read (no permission for") == 2


@pytest.mark.parametrize(
    "has_path",
    [False, pytest.param(True, marks=as_of_032("names blocks by the adapter's name alone"))],
)
def test_an_adapter_has_no_digest_while_the_cache_may_have_kv_of_other_files(
    load: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    has_path: bool,
) -> None:
    """vLLM names blocks by the adapter's name, as of 0.32 by its path too. D would get P's."""
    if not has_path:
        monkeypatch.setattr(
            kv_cache_utils, "_gen_lora_extra_hash_keys", lambda r: [r.lora_request.lora_name]
        )

    def keys(lora: Any) -> Any:
        return kv_cache_utils.generate_block_hash_extra_keys(asked(lora), 0, 16, 0)

    first = load(adapter(tmp_path / "a", b"a", 501))
    again = load(SimpleNamespace(**{**vars(first), "lora_int_id": 502}))
    digest = prompt_digest.digest_prompt(asked(first))
    assert digest and digest == prompt_digest.digest_prompt(asked(again))
    moved = load(adapter(tmp_path / "b", b"b", 503))
    assert (keys(moved) != keys(first)) == has_path
    assert bool(prompt_digest.digest_prompt(asked(moved))) == has_path
    caplog.clear()
    replaced = load(adapter(tmp_path / "a", b"c", 504))
    assert keys(replaced) == keys(first)
    for _ in range(3):
        assert prompt_digest.digest_prompt(asked(replaced)) == ""
    assert caplog.text.count("other files were loaded under its name before") == 1


def test_a_loaded_adapter_is_not_replaced_in_place(load: Any, tmp_path: Path) -> None:
    """Requests that were admitted before name its number, and would get other weights."""
    first = load(adapter(tmp_path / "a", b"a", 1))
    digest = prompt_digest.digest_prompt(asked(first))
    for folder in ("b", "a"):  # other files, and the same place
        in_place = adapter(tmp_path / folder, folder.encode(), 1, is_in_place=True)
        with pytest.raises(ConfigError, match="load the new one under a new name, without"):
            load(in_place)
    assert set(prompt_digest._stamps_at_load) == {(first.lora_path, 1)}
    # No such load: its number is new. Each of its requests has vLLM read the files again.
    other = load(adapter(tmp_path / "c", b"c", 2, "another", is_in_place=True))
    assert prompt_digest.digest_prompt(asked(other)) == ""
    assert digest


def test_an_adapter_whose_replacement_was_refused_goes_on(load: Any, tmp_path: Path) -> None:
    first = load(adapter(tmp_path / "a", b"a", 1))
    digest = prompt_digest.digest_prompt(asked(first))
    with pytest.raises(ConfigError, match="does not replace a loaded adapter"):
        load(adapter(tmp_path / "b", b"b", 1, is_in_place=True))
    assert prompt_digest.digest_prompt(asked(first)) == digest != ""
    again = load(first)  # as each of several API servers does at the start
    assert prompt_digest.digest_prompt(asked(again)) == digest


@pytest.fixture
def worker_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Reads an adapter as a worker does, in a process of its own; `during` runs meanwhile."""
    steps: list[Any] = []

    def read(self: Any, lora: Any) -> Any:
        steps.pop()()
        return lora

    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", read)
    made: Any = SimpleNamespace(lora_config=SimpleNamespace())
    for _ in range(2):  # connectors of one process
        compat.around_adapter_reads(made, prompt_digest.note_read)
    assert inspect.unwrap(WorkerLoRAManager._load_adapter) is read

    def read_during(lora: Any, during: Any = lambda: None) -> None:
        steps.append(during)
        assert WorkerLoRAManager._load_adapter(None, lora) is lora  # type: ignore[arg-type]

    with engine_process():
        yield read_during


def scheduled(lora: Any, transfer: str = "t") -> list[Any]:
    name = prompt_digest.cache_name(lora)
    return [
        events.PrefillFinished("another"),
        events.BlocksScheduled(transfer, 16, [[1]], adapter=name),
        events.BlocksScheduled("of the base model", 16, [[1]]),
    ]


@pytest.mark.parametrize("change", ["other files", "while it is read", "there and back"])
def test_a_worker_knows_what_it_may_have_computed_with_other_files_of_an_adapter(
    worker_reads: Any, tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM reads an adapter again that has left a worker's memory, here with others in its place.

    The times of files do not tell of a folder that was moved away and back.
    """
    lora = adapter(tmp_path / "a", b"a")
    worker_reads(lora)
    worker_reads(lora)
    other = adapter(tmp_path / "b", b"b", 2, "another")
    worker_reads(other)
    assert prompt_digest.misread(scheduled(lora)) == []
    match change:
        case "other files":
            adapter(tmp_path / "a", b"new")
            worker_reads(lora)
        case "while it is read":
            worker_reads(lora, lambda: adapter(tmp_path / "a", b"new"))
        case "there and back":
            before = prompt_digest._stamp_files(lora.lora_path)
            (tmp_path / "a").rename(tmp_path / "away")
            adapter(tmp_path / "a", b"new")
            worker_reads(lora)
            (tmp_path / "a").rename(tmp_path / "new")
            (tmp_path / "away").rename(tmp_path / "a")
            assert prompt_digest._stamp_files(lora.lora_path) == before
    assert prompt_digest.misread(scheduled(lora)) == ["t"]
    worker_reads(lora)
    worker_reads(lora)
    assert prompt_digest.misread(scheduled(lora)) == ["t"]
    assert prompt_digest.misread(scheduled(other)) == []
    assert caplog.text.count("other files were loaded under its name before") == 1


def test_prompts_of_more_adapters_than_are_noted_are_not_sent(
    worker_reads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_digest, "MAX_ADAPTERS", 1)
    first, second = (adapter(tmp_path / name, b"", ord(name), name) for name in "ab")
    for lora in (first, second):
        worker_reads(lora)
    assert prompt_digest.misread(scheduled(first)) == []
    assert prompt_digest.misread(scheduled(second)) == ["t"]
    assert len(prompt_digest._first_files) == 1


def test_prompts_of_an_adapter_that_a_worker_does_not_find_are_not_sent(
    worker_reads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path, in a process with another folder."""
    adapter(tmp_path / "a", b"a")
    lora = SimpleNamespace(lora_name="one", lora_path="a", lora_int_id=1)
    monkeypatch.chdir(tmp_path)
    with engine_process():
        worker_reads(lora)
        assert prompt_digest.misread(scheduled(lora)) == []
    monkeypatch.chdir("/")
    worker_reads(lora)
    assert prompt_digest.misread(scheduled(lora)) == ["t"]


def test_an_adapter_that_could_not_be_read_has_made_no_kv(
    worker_reads: Any, tmp_path: Path
) -> None:
    def fail() -> None:
        raise ValueError("a file is cut")

    lora = adapter(tmp_path / "a", b"half")
    with pytest.raises(ValueError, match="a file is cut"):
        worker_reads(lora, fail)
    worker_reads(adapter(tmp_path / "a", b"whole"))
    assert prompt_digest.misread(scheduled(lora)) == []


def test_a_vllm_that_reads_adapters_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(WorkerLoRAManager, "_load_adapter")
    compat.around_adapter_reads(SimpleNamespace(lora_config=None), nullcontext)
    with pytest.raises(ConfigError, match="how this vLLM reads adapters: start without --enable"):
        compat.around_adapter_reads(SimpleNamespace(lora_config=object()), nullcontext)


@as_of_032("names blocks by the adapter's name alone")
@pytest.mark.parametrize("is_of_encoders", [False, True])
def test_a_new_adapter_has_no_digest_while_encoders_may_have_an_earlier_ones_images(
    load: Any, tmp_path: Path, is_of_encoders: bool
) -> None:
    """vLLM keeps the outputs of encoders by the adapter's name, without its path."""
    flags: Any = SimpleNamespace(enable_tower_connector_lora=is_of_encoders)
    prompt_digest.note_lora_settings(flags)
    made: Any = SimpleNamespace(lora_config=flags)
    first, moved = (adapter(tmp_path / name, name.encode(), ord(name)) for name in "ab")
    names = [InputProcessor._get_mm_identifier(made, "image", lora) for lora in (first, moved)]
    assert names == [("one:" if is_of_encoders else "") + "image"] * 2
    assert prompt_digest.digest_prompt(asked(load(first)))
    assert bool(prompt_digest.digest_prompt(asked(load(moved)))) is not is_of_encoders
    another = load(adapter(tmp_path / "c", b"c", 3, "another"))
    assert prompt_digest.digest_prompt(asked(another))


def test_files_that_vllm_could_not_load_are_no_earlier_files(load: Any, tmp_path: Path) -> None:
    """An adapter is named before its copy is whole, then again. Nothing has computed with it."""

    def fail(lora: Any) -> bool:
        raise ValueError("a file is cut")

    core: Any = SimpleNamespace(model_executor=SimpleNamespace(add_lora=fail))
    for number in range(3):  # vLLM numbers each try anew
        with pytest.raises(ValueError, match="a file is cut"):
            EngineCore.add_lora(core, adapter(tmp_path / "a", b"half", 601 + number))
    assert not prompt_digest._stamps_at_load, "clients name adapters, and could fill it"
    whole = load(adapter(tmp_path / "a", b"whole", 604))
    assert prompt_digest.digest_prompt(asked(whole))
    with pytest.raises(ValueError, match="a file is cut"):
        EngineCore.add_lora(core, whole)
    assert set(prompt_digest._stamps_at_load) == {(whole.lora_path, 604)}
    adapter(tmp_path / "a", b"later files", 0)
    assert prompt_digest.digest_prompt(asked(whole)) == "", "those of the first load count"


def test_no_adapter_is_forgotten_above_the_limit(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forgotten adapter would be recorded again with its present files."""
    monkeypatch.setattr(prompt_digest, "MAX_ADAPTERS", 1)
    first, second = (
        load(adapter(tmp_path / "a", b"a", 401)),
        load(adapter(tmp_path / "b", b"b", 402)),
    )
    assert (
        prompt_digest.digest_prompt(asked(first))
        and prompt_digest.digest_prompt(asked(second)) == ""
    )
    adapter(tmp_path / "a", b"c", 0)
    prompt_digest._digest_files.cache_clear()
    assert prompt_digest.digest_prompt(asked(first)) == ""


def test_an_adapter_in_a_home_folder_is_compared_by_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = adapter(tmp_path / "a", b"a", 301)
    monkeypatch.setenv("HOME", str(tmp_path))
    digests = []
    for path in (one.lora_path, "~/a"):
        lora = SimpleNamespace(lora_name="one", lora_path=path, lora_int_id=302)
        with engine_process():
            digests.append(prompt_digest.digest_prompt(asked(lora)))
    assert digests[0] == digests[1] != ""


def test_the_wrapped_add_lora_keeps_its_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM converts a client's arguments by the signature."""
    before = EngineCore.add_lora
    monkeypatch.setattr(EngineCore, "add_lora", before)
    compat.around_adapter_loads(lambda lora: nullcontext())
    assert EngineCore.add_lora is not before
    assert inspect.signature(EngineCore.add_lora) == inspect.signature(before)


@pytest.mark.parametrize("role", list(KVConnectorRole))
def test_each_half_of_the_connector_notes_what_it_must(
    role: KVConnectorRole, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers read adapters. What caches tell adapters by, both halves must name alike."""
    monkeypatch.setattr(supported, "refuse_unsupported", lambda *_, **__: None)
    monkeypatch.setattr(connector, "WorkerSide", lambda *_: None)
    monkeypatch.setattr(DisaggConnector, "_create_scheduler", lambda *_: None)
    read = inspect.unwrap(WorkerLoRAManager._load_adapter)
    monkeypatch.setattr(WorkerLoRAManager, "_load_adapter", read)
    transfer = KVTransferConfig(
        kv_connector="DisaggConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"insecure": True},
    )
    made: Any = SimpleNamespace(
        kv_transfer_config=transfer,
        lora_config=SimpleNamespace(enable_tower_connector_lora=True, max_loras=1),
        parallel_config=SimpleNamespace(rank=0, pipeline_parallel_size=2),
        shutdown_timeout=60,
    )
    with engine_process():
        DisaggConnector(made, role, None)  # type: ignore[arg-type]
        lora = SimpleNamespace(lora_name="one", lora_path="/a")
        assert prompt_digest.cache_name(lora) == "one"
    noted_by = getattr(WorkerLoRAManager._load_adapter, "noted_by", None)
    is_worker = role is KVConnectorRole.WORKER
    assert ("--enable-lora with pipeline stages" in caplog.text) is not is_worker, "told once"
    assert noted_by is (prompt_digest.note_read if is_worker else None)
