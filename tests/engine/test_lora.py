"""LoRA adapters: both legs name one as their model, and answers equal plain vLLM's with it."""

from __future__ import annotations

import http.client
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from asking import ask, body, expect_exact_or_clean, expect_same, tokens
from conftest import Machine
from engines import Engine, wait
from safetensors.torch import save_file
from test_models import FLOAT32, Pair, model

pytestmark = pytest.mark.wide

RANK = 8
MAX_LORAS = 4  # also those in a worker's memory
NAMES = ["tiny", "first", "second"]  # the model itself, and two adapters
ENV = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}


def adapter(folder: Path, of: str, seed: int) -> str:
    """Writes a random adapter of a model's attention, strong enough to change answers."""
    config = json.loads((Path(of) / "config.json").read_text())
    hidden, width = config["hidden_size"], config["head_dim"]
    out = {
        "q_proj": config["num_attention_heads"] * width,
        "v_proj": config["num_key_value_heads"] * width,
    }
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in out.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(RANK, hidden, generator=random) * 0.2
            weights[f"{place}.lora_B.weight"] = torch.randn(size, RANK, generator=random) * 0.2
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": list(out),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


@pytest.fixture(scope="module")
def pair(machine: Machine) -> Iterator[Pair]:
    machine.stop()  # all others, for the memory's sake
    of = model("dense")
    modules = [
        f"{name}={adapter(machine.folder / name, of, seed)}" for seed, name in enumerate(NAMES[1:])
    ]
    flags = [
        "--enable-lora",
        "--max-lora-rank",
        str(RANK),
        "--max-loras",
        str(MAX_LORAS),
        "--lora-modules",
        *modules,
    ]
    made = Pair(machine, "lora", "dense", *flags, *FLOAT32, env=ENV)
    yield made
    made.legs.close()
    machine.stop()


def test_each_adapter_and_the_model_itself(pair: Pair) -> None:
    """The same prompts for all three, mixed, each with a prefix in D's cache."""
    before = pair.decode.received
    common = tokens(300, "lora common")
    prompts = [common + tokens(1 + 17 * at, f"lora {at}") for at in range(34)]
    asked = [body(prompt, 16, logprobs=3, model=name) for prompt in prompts for name in NAMES]
    plain = pair.check(asked)
    wait("KV moves", lambda: pair.decode.received > before)
    for at in range(0, len(asked), len(NAMES)):
        answers = {record.tokens for record in plain[at : at + len(NAMES)]}
        assert len(answers) == len(NAMES), "an adapter that changes nothing shows nothing"


def test_an_adapter_that_d_does_not_have_is_said_so(pair: Pair, machine: Machine) -> None:
    load(pair.prefill, "third", adapter(machine.folder / "third", model("dense"), 3))
    asked = body(tokens(300, "third"), 16, model="third")
    found = pair.legs.ask(asked)
    assert found.status == 404
    assert "third" in found.error
    expect_exact_or_clean(found, ask(pair.plain.url, asked))
    others = [body(tokens(200, f"after {at}"), 16, model=name) for at, name in enumerate(NAMES)]
    assert all(record.status == 200 for record in pair.check(others))


def test_another_adapter_of_the_same_name_gives_no_kv(pair: Pair, machine: Machine) -> None:
    """D computes the prompt, at once."""
    for engine, seed in ((pair.prefill, 4), (pair.decode, 5), (pair.plain, 5)):
        load(
            engine,
            "fourth",
            adapter(machine.folder / f"fourth-{engine.name}", model("dense"), seed),
        )
    asked = body(tokens(300, "fourth"), 16, logprobs=3, model="fourth")
    before = pair.decode.received
    expect_same(pair.legs.ask(asked), ask(pair.plain.url, asked))
    assert pair.decode.received == before
    for engine in (pair.prefill, pair.decode):
        engine.wait_free()


def test_an_adapter_whose_files_were_replaced_at_p_gives_no_kv(
    pair: Pair, machine: Machine
) -> None:
    """P gets the files that D has loaded, but still computes with the old ones."""
    old, new = (adapter(machine.folder / f"fifth-{seed}", model("dense"), seed) for seed in (6, 7))
    for engine, path in ((pair.prefill, old), (pair.decode, new), (pair.plain, new)):
        load(engine, "fifth", path)
    shutil.copytree(new, old, dirs_exist_ok=True)
    asked = body(tokens(300, "fifth"), 16, logprobs=3, model="fifth")
    before = pair.decode.received
    expect_same(pair.legs.ask(asked), ask(pair.plain.url, asked))
    assert pair.decode.received == before


def test_an_adapter_is_not_replaced_in_place(pair: Pair, machine: Machine) -> None:
    """Requests that wait would be computed with the new weights, and have the old ones' digest."""
    other = adapter(machine.folder / "other", model("dense"), 8)
    for engine in (pair.prefill, pair.decode):
        status, words = ask_to_load(engine, NAMES[1], other, load_inplace=True)
        assert status == 500
        assert f"DisaggConnector does not replace a loaded adapter ({NAMES[1]})" in words
    asked = [body(tokens(300, f"in place {at}"), 16, model=NAMES[1]) for at in range(4)]
    before = pair.decode.received
    assert all(record.status == 200 for record in pair.check(asked))
    wait("KV moves", lambda: pair.decode.received > before)


def test_an_adapter_that_p_has_read_from_another_folder_gives_no_kv(
    pair: Pair, machine: Machine
) -> None:
    """Its own is away while P reads it again, and back when its requests come."""
    folder = machine.folder / "sixth"
    path = adapter(folder, model("dense"), 9)
    for engine in (pair.prefill, pair.decode, pair.plain):
        load(engine, "sixth", path)
    for number in range(MAX_LORAS):  # P's memory has room for no more
        one = adapter(machine.folder / f"filler-{number}", model("dense"), 20 + number)
        load(pair.prefill, f"filler-{number}", one)
    folder.rename(machine.folder / "away")
    adapter(folder, model("dense"), 10)
    alone = ask(pair.prefill.url, body(tokens(40, "read again"), 4, model="sixth"))
    assert alone.status == 200
    folder.rename(machine.folder / "there")
    (machine.folder / "away").rename(folder)
    asked = body(tokens(300, "sixth"), 16, logprobs=3, model="sixth")
    before = pair.decode.received
    expect_same(pair.legs.ask(asked), ask(pair.plain.url, asked))
    assert pair.decode.received == before
    for engine in (pair.prefill, pair.decode):
        engine.wait_free()


def load(engine: Engine, name: str, path: str) -> None:
    status, words = ask_to_load(engine, name, path)
    assert status == 200, words


def ask_to_load(engine: Engine, name: str, path: str, **more: bool) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=60)
    try:
        connection.request(
            "POST",
            "/v1/load_lora_adapter",
            json.dumps({"lora_name": name, "lora_path": path, **more}),
            {"content-type": "application/json"},
        )
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()
