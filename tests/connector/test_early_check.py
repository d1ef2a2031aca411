"""Mistakes in the connector's settings end vLLM before its weights are loaded."""

from __future__ import annotations

import json
import multiprocessing
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from transformers import Blip2Config
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, VllmConfig, replace
from vllm_release import IS_BEFORE_032

import kv_connectors
from kv_connectors import early_check, fingerprint
from vllm_disagg import descriptor_table
from vllm_disagg.errors import ConfigError
from vllm_disagg.fleet import keys

CHILD = {"kv_connector": "DisaggConnector", "kv_role": "kv_both"}


@pytest.fixture(autouse=True)
def unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives vLLM's own completion of a configuration back after each test."""
    complete = VllmConfig.__post_init__
    monkeypatch.setattr(VllmConfig, "__post_init__", getattr(complete, "__wrapped__", complete))


def use(extra: dict[str, Any], connector: str = "DisaggConnector") -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra
    )


def test_a_wrong_setting_ends_the_configuration() -> None:
    kv_connectors.register()
    with pytest.raises(ConfigError, match="did you mean transport"):
        VllmConfig(kv_transfer_config=use({"transprot": "zmq", "insecure": True}))


def test_an_api_server_has_room_for_its_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved: list[int] = []
    monkeypatch.setattr(descriptor_table, "reserve", reserved.append)
    kv_connectors.register()
    assert reserved == [descriptor_table.ENGINE_DESCRIPTORS]


def test_a_wrong_setting_of_a_child_ends_it_too() -> None:
    kv_connectors.register()
    child = {
        "kv_connector": "DisaggConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lease": "soon"},
    }
    with pytest.raises(ConfigError, match="lease is 'soon'"):
        VllmConfig(kv_transfer_config=use({"connectors": [child]}, "MultiConnector"))


def composed(outer: str | None, child: str | None) -> KVTransferConfig:
    """Returns a MultiConnector with these policies for failed loads; None: not named."""
    words = {"kv_connector_extra_config": {"insecure": True}}
    children = [{**CHILD, **words, **({"kv_load_failure_policy": child} if child else {})}]
    named: Any = {"kv_load_failure_policy": outer} if outer else {}
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": children},
        **named,
    )


@pytest.mark.parametrize(
    ("outer", "child", "expected"),
    [
        ("recompute", None, "recompute"),
        ("recompute", "recompute", "recompute"),
        (None, None, "fail"),
        (None, "recompute", ""),
        ("recompute", "fail", ""),
    ],
)
def test_a_child_has_the_policy_that_vllm_obeys(
    outer: str | None, child: str | None, expected: str
) -> None:
    """It told the fleet its own: a child with "recompute" alone promised what vLLM does not do."""
    kv_connectors.register()
    transfer = composed(outer, child)
    if not expected:
        with pytest.raises(ConfigError, match="vLLM obeys that of MultiConnector itself"):
            VllmConfig(kv_transfer_config=transfer)
        return
    made: Any = VllmConfig(kv_transfer_config=transfer)
    (ours,) = made.kv_transfer_config.kv_connector_extra_config["connectors"]
    assert ours["kv_load_failure_policy"] == expected


def test_a_key_file_that_is_missing_ends_it(tmp_path: Path) -> None:
    kv_connectors.register()
    gone = str(tmp_path / "gone.key")
    with pytest.raises(ConfigError, match="No such file"):
        VllmConfig(kv_transfer_config=use({"key_file": gone}))


def test_right_settings_and_other_connectors_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    completed: list[object] = []
    monkeypatch.setattr(VllmConfig, "__post_init__", completed.append)
    kv_connectors.register()
    kv_connectors.register()  # vLLM loads plugins again in some processes
    path = str(tmp_path / "fleet.key")
    keys.create(path)
    VllmConfig(kv_transfer_config=use({"key_file": path}))
    VllmConfig(kv_transfer_config=use({"lease": "soon"}, "NixlConnector"))
    VllmConfig()
    assert len(completed) == 3


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a model that takes images; it has no weights."""
    folder = tmp_path_factory.mktemp("images")
    text = {"model_type": "opt", "hidden_size": 32, "num_attention_heads": 2}
    architectures = ["Blip2ForConditionalGeneration"]
    Blip2Config(text_config=text, architectures=architectures).save_pretrained(folder)
    return folder


def model(folder: Path, **flags: Any) -> ModelConfig:
    path = str(folder)
    return ModelConfig(
        model=path, tokenizer=path, skip_tokenizer_init=True, dtype="float32", **flags
    )


@pytest.mark.parametrize("chosen", [False, True])
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
@pytest.mark.parametrize("is_child", [False, True])
def test_images_as_embeddings_need_their_numbers(
    images: Path, role: Any, is_child: bool, chosen: bool
) -> None:
    """An engine that computes a prompt with an image without numbers would end."""
    kv_connectors.register()
    own = {"insecure": True}
    transfer = KVTransferConfig(
        kv_connector="MultiConnector" if is_child else "DisaggConnector",
        kv_role=role,
        kv_connector_extra_config=(
            {"connectors": [{**CHILD, "kv_connector_extra_config": own}]} if is_child else own
        ),
    )
    made = VllmConfig(
        model_config=model(images, enable_mm_embeds=chosen), kv_transfer_config=transfer
    )
    found: Any = made.model_config.multimodal_config
    assert found.enable_mm_embeds is chosen
    assert not found.allow_missing_mm_embeddings


def test_images_of_other_connectors_are_left_to_vllm(images: Path) -> None:
    kv_connectors.register()
    transfer = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_consumer")
    made: Any = VllmConfig(model_config=model(images), kv_transfer_config=transfer)
    found = made.model_config.multimodal_config
    assert found.allow_missing_mm_embeddings
    assert found.enable_mm_embeds is not IS_BEFORE_032, "older ones leave this flag to the user"


@pytest.mark.parametrize("is_child", [False, True])
def test_the_flag_that_replaces_the_connector_is_refused(is_child: bool) -> None:
    kv_connectors.register()
    own = {"insecure": True}
    transfer = use(own)
    if is_child:
        child = {**CHILD, "kv_connector_extra_config": own}
        transfer = use({"connectors": [child]}, "MultiConnector")
    cache = CacheConfig(kv_offloading_size=1)
    with pytest.raises(ConfigError, match="MultiConnector of DisaggConnector and Offloading"):
        VllmConfig(cache_config=cache, kv_transfer_config=transfer)
    VllmConfig(cache_config=cache, kv_transfer_config=use({}, "OffloadingConnector"))
    VllmConfig(cache_config=cache)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"connectors": None}, "connectors of MultiConnector is None, but must be a list"),
        ({"connectors": "x"}, "connectors of MultiConnector is 'x'"),
        ({"connectors": {"a": 1}}, "connectors of MultiConnector is {'a': 1}"),
        ({"connectors": [None]}, "connectors of MultiConnector has None, but each must be"),
        ([1], "kv_connector_extra_config is [1], but must be an object"),
        (
            {"connectors": [{**CHILD, "kv_connector_extra_config": [1]}]},
            "kv_connector_extra_config is [1], but must be an object",
        ),
        ({"connectors": [{**CHILD, "kv_connector_extra_config": None}]}, "no fleet key: set"),
    ],
)
def test_settings_of_another_shape_are_a_line(extra: object, words: str) -> None:
    transfer = SimpleNamespace(kv_connector="MultiConnector", kv_connector_extra_config=extra)
    with pytest.raises(ConfigError) as raised:
        for found in early_check.settings_in(transfer):
            early_check.check(found)
    assert words in str(raised.value)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("sibling", "words"),
    [
        ("NixlConnector", "NixlConnector also moves KV from P to D: leave one of them out"),
        ("NixlPushConnector", "NixlPushConnector also moves KV"),
        ("MooncakeConnector", "MooncakeConnector also moves KV"),
        ("MoRIIOConnector", "MoRIIOConnector also moves KV"),
        ("P2pNcclConnector", "P2pNcclConnector also moves KV"),
        ("HiSparseConnector", "HiSparseConnector keeps a part of the KV"),
        ("MultiConnector", "MultiConnector may not be inside another MultiConnector"),
        ("DisaggConnector", "DisaggConnector may be there only once"),
        ("DecodeBenchConnector", "numbers that no model computed"),
        ("LMCacheConnectorV1", "loads KV in the step that hands it over"),
        ("FlexKVConnectorV1", "writes over the reports of other connectors"),
    ],
)
def test_siblings_that_serve_the_same_requests_are_refused(
    sibling: str, words: str, first: bool
) -> None:
    children = [CHILD, {"kv_connector": sibling}]
    extra = {"connectors": children if first else children[::-1]}
    multi = SimpleNamespace(kv_connector="MultiConnector", kv_connector_extra_config=extra)
    with pytest.raises(ConfigError) as raised:
        early_check.settings_in(multi)
    assert words in str(raised.value)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_multi_connector_within_another_is_refused(depth: int) -> None:
    extra: dict[str, Any] = {"connectors": [CHILD]}
    for _ in range(depth):
        extra = {
            "connectors": [{"kv_connector": "MultiConnector", "kv_connector_extra_config": extra}]
        }
    multi = SimpleNamespace(kv_connector="MultiConnector", kv_connector_extra_config=extra)
    with pytest.raises(ConfigError, match="DisaggConnector is in a MultiConnector that may not be"):
        early_check.settings_in(multi)


@pytest.mark.parametrize(
    "sibling", ["OffloadingConnector", "LMCacheMPConnector", "MooncakeStoreConnector", "TheirOwn"]
)
def test_stores_of_kv_are_accepted_as_siblings(sibling: str) -> None:
    extra = {"connectors": [{"kv_connector": sibling}, CHILD]}
    multi = SimpleNamespace(kv_connector="MultiConnector", kv_connector_extra_config=extra)
    assert early_check.settings_in(multi) == [{}]


def test_connectors_of_others_may_be_together() -> None:
    extra = {"connectors": [{"kv_connector": "NixlConnector"}] * 2}
    multi = SimpleNamespace(kv_connector="MultiConnector", kv_connector_extra_config=extra)
    assert early_check.settings_in(multi) == []


def test_settings_may_be_null() -> None:
    multi = SimpleNamespace(kv_connector="MultiConnector", kv_connector_extra_config=None)
    assert early_check.settings_in(multi) == []
    own = SimpleNamespace(kv_connector="DisaggConnector", kv_connector_extra_config=None)
    assert early_check.settings_in(own) == [{}]


def engine(folder: Path, **flags: Any) -> Any:
    kv_connectors.register()
    transfers = use({"insecure": True})
    return VllmConfig(model_config=model(folder, **flags), kv_transfer_config=transfers)


@pytest.fixture
def folder(images: Path, tmp_path: Path) -> Path:
    """A model that only this test has: its facts are noted in the environment by its place."""
    return Path(shutil.copytree(images, tmp_path / "model"))


def test_the_states_of_the_models_files_are_noted_before_their_load(folder: Path) -> None:
    """In the environment: other processes load weights, minutes before this connector is made."""
    (folder / "pytorch_model.bin").write_text("1")
    made = engine(folder)
    assert not fingerprint.files_have_changed(made)
    (folder / "pytorch_model.bin").write_text("longer")
    assert fingerprint.files_have_changed(made)


def test_what_the_code_of_a_model_writes_into_its_configuration_is_left_out(folder: Path) -> None:
    """With one rank on a GPU it runs in the connector's process, with more ranks in others."""
    made = engine(folder)
    before = fingerprint.config_digest(made.model_config)
    made.model_config.hf_config.max_model_len = 4096  # as MiniMax-M2's
    assert fingerprint.config_digest(made.model_config) == before
    other = engine(folder, hf_overrides={"initializer_range": 0.5})
    assert fingerprint.config_digest(other.model_config) != before
    assert fingerprint.config_digest(made.model_config) == before


def test_positions_are_those_of_the_length_with_which_vllm_loads_a_model(folder: Path) -> None:
    """`auto` lowers it later. LongRoPE takes one of its tables for good as the model is loaded."""
    settings = folder / "config.json"
    fields = json.loads(settings.read_text())
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 32}
    scales = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    text = {"rope_parameters": {**rope, **scales}, "max_position_embeddings": 64}
    fields["text_config"] |= text
    settings.write_text(json.dumps(fields))
    # Its length is the text's; vLLM 0.32 takes that of the rope settings if it is outside of them.
    fitted = engine(folder, max_model_len=-1)
    short = engine(folder, max_model_len=30)
    assert fitted.model_config.max_model_len == 64
    fitted.model_config.max_model_len = 30  # as vLLM does, where memory has room for no more
    assert fingerprint.positions(fitted.model_config) == "over 32"
    assert fingerprint.positions(short.model_config) == "up to 32"


def test_vllm_copies_a_configuration_that_was_checked(images: Path) -> None:
    """As for models with images and for drafts: a field that it does not know is an error."""
    made = engine(images)
    assert replace(made).model_config is made.model_config
    copied = made.with_hf_config(made.model_config.hf_config)
    assert copied.kv_transfer_config is made.kv_transfer_config
    pickle.loads(pickle.dumps(made))


@pytest.mark.parametrize("is_child", [False, True])
def test_a_copy_of_a_configuration_notes_no_files(
    is_child: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that has loaded the weights may complete one; a new engine is none."""
    parent = SimpleNamespace() if is_child else None
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    config = SimpleNamespace(
        model_config=SimpleNamespace(model=str(tmp_path)), speculative_config=None
    )
    monkeypatch.setenv(fingerprint._variable(config), "")  # so that it is removed at the end
    monkeypatch.delenv(fingerprint._variable(config))
    assert not fingerprint.files_have_changed(config), "nothing is noted"
    fingerprint.note_files(config)
    (tmp_path / "model.safetensors").write_text("new")
    assert fingerprint.files_have_changed(config)
    fingerprint.note_files(config)
    assert fingerprint.files_have_changed(config) is is_child
