"""Every kind of KV cache: plain vLLM's answers through a pair, or a refusal with its reason.

Prompts cross sliding windows, chunks and blocks. Half of them share a prefix in D's cache, and
several run at a time.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import drafts
import pytest
from asking import Body, Record, ask, body, expect_same, tokens
from conftest import Machine
from direct import Legs
from engines import BLOCK, CHUNK, ROOT, Engine, wait
from two_legs import ask_both

pytestmark = pytest.mark.wide

LENGTHS = [
    1,
    2,
    BLOCK - 1,
    BLOCK,
    BLOCK + 1,
    2 * BLOCK - 1,
    CHUNK,
    CHUNK + 1,
    300,
    383,
    384,
    385,
    511,
    512,
    513,
    700,
    900,
]
AT_ONCE = 12
NGRAM = (
    '{"method": "ngram", "num_speculative_tokens": 3,'
    ' "prompt_lookup_max": 4, "prompt_lookup_min": 1}'
)
NO_PREFIXES = "--no-enable-prefix-caching"
MODELS = ROOT / ".cache/models"
EXACT = {
    "sliding": ["sliding"],  # Gemma 3: windows and full attention
    "shared": ["shared"],  # Gemma 3n: layers that use other layers' KV
    "gemma4": ["gemma4"],  # the same, and heads of two sizes
    "oss": ["oss"],  # GPT-OSS: windows, full attention, sinks, experts
    "moe": ["moe"],  # Mixtral
    "mamba": ["mamba", NO_PREFIXES],  # Mamba 2: states
    # Zamba2: two blocks of attention in turn, so layers are not computed in the order of their
    # names. Layers announced too early would be read too early, with a checksum that fits.
    "zamba": ["zamba", NO_PREFIXES],
    "nemotron": ["nemotron", NO_PREFIXES],  # Nemotron-H: states, attention, MLPs in turn
    "granite": ["granite", NO_PREFIXES],  # Granite 4: states or attention, experts in each layer
    "falcon": ["falcon", NO_PREFIXES],  # Falcon-H1: states and attention in each layer
    "mla": [
        "mla",
        "--compilation-config",
        '{"custom_ops": ["-rotary_embedding"]}',
    ],  # docs/explanation/exactness.md
    "dense": ["dense"],
    "heavy": ["heavy", "--kv-cache-memory-bytes", str(1 << 30)],
    "fp8": ["dense", "--kv-cache-dtype", "fp8"],
    # vLLM's CPU build has them only with AVX-512 or AMX.
    "fp8_e4m3": ["dense", "--kv-cache-dtype", "fp8_e4m3"],
    "fp8_e5m2": ["dense", "--kv-cache-dtype", "fp8_e5m2"],
    "ngram": ["dense", "--speculative-config", NGRAM],
    # The model drafts for itself, so all tokens are accepted.
    "draft": ["dense", *drafts.flags("draft_model", MODELS / "dense")],
    "eagle": ["eagle", *drafts.flags("eagle", MODELS / "eagle-draft")],
    "eagle3": ["eagle3", *drafts.flags("eagle3", MODELS / "eagle3-draft")],
    "mtp": ["mtp", *drafts.flags("mtp", None, 1)],
}
# Of P alone: P and D may draft different numbers of tokens.
PREFILL_FLAGS = {"eagle": drafts.flags("eagle", MODELS / "eagle-draft", 1)}
# In bfloat16 two tokens of such models are sometimes equally probable, and how requests are batched
# decides.
FLOAT32 = ["--dtype", "float32"]
REFUSED = {
    "mamba": (
        ["mamba", "--enable-prefix-caching"],
        "does not support prefix caching of Mamba layers",
    ),
    "linear": (
        ["linear", "--enable-prefix-caching"],
        "does not support prefix caching of Mamba layers",
    ),
    "mamba-ngram": (
        ["mamba", NO_PREFIXES, "--speculative-config", NGRAM],
        "does not support speculative decoding with Mamba layers yet",
    ),
}


WITH_DRAFTS = {
    "eagle": lambda: drafts.write_eagle(MODELS / "eagle", MODELS / "eagle-draft"),
    "eagle3": lambda: drafts.write_eagle3(MODELS / "eagle3", MODELS / "eagle3-draft"),
    "mtp": lambda: drafts.write_mtp(MODELS / "mtp"),
}


def model(kind: str) -> str:
    folder = MODELS / kind
    if kind in WITH_DRAFTS:
        WITH_DRAFTS[kind]()
        return str(folder)
    command = [sys.executable, str(ROOT / "scripts/tiny_model.py"), kind, str(folder)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return str(folder)


class Pair:
    """P, D and a plain vLLM of one model."""

    def __init__(
        self, machine: Machine, name: str, kind: str, *flags: str, env: dict[str, str] | None = None
    ) -> None:
        made = model(kind)
        self.flags = flags
        first = [*flags, *PREFILL_FLAGS.get(name, [])]  # of two equal flags vLLM takes the last
        self.prefill = Engine(
            f"{name}-P", machine.folder, *first, role="kv_producer", cpu="0", model=made, env=env
        )
        self.decode = Engine(
            f"{name}-D", machine.folder, *flags, role="kv_consumer", cpu="1", model=made, env=env
        )
        self.plain = Engine(f"{name}-plain", machine.folder, *flags, cpu="1", model=made, env=env)
        machine.start(self.prefill, self.decode, self.plain)
        self.legs = Legs(machine.key, self.prefill, self.decode)
        self.loads = 0  # expected at D, where no prefix cache has a part of them

    def check(self, asked: list[Body]) -> list[Record]:
        """Returns plain vLLM's answers; fails unless the pair's are the same.

        Without prefix caches it fails, too, unless each prompt was loaded.
        """
        plain = several(lambda one: ask(self.plain.url, one), asked)
        for ours, expected, what in zip(several(self.legs.ask, asked), plain, asked, strict=True):
            expect_same(ours, expected, f"{len(what['prompt'])} tokens:")
        if NO_PREFIXES in self.flags:
            self.loads += sum(len(one["prompt"]) > 1 for one in asked)  # D computes the last token
            count = "vllm:disagg_load_seconds_count"
            wait("all are loaded", lambda: self.decode.metric(count) == self.loads)
        return plain


def several(do, bodies: list[Body]) -> list[Record]:  # type: ignore[no-untyped-def]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return list(pool.map(do, bodies))


def expect_accepted(decode: Engine, plain: Engine) -> None:
    """Asserts that D drafts, and that the model accepts as much of it as in the plain engine.

    Wrong KV of a draft's layers shows in no token, only here.
    """
    drafted = "vllm:spec_decode_num_draft_tokens_total"
    accepted = "vllm:spec_decode_num_accepted_tokens_total"
    for engine in (decode, plain):
        print(f"{engine.name} accepted {engine.metric(accepted)} of {engine.metric(drafted)}")
    assert decode.metric(drafted) > 100, "nothing was drafted"
    assert decode.metric(accepted) >= 0.95 * plain.metric(accepted) > 0


@pytest.fixture(scope="module", params=EXACT)
def pair(machine: Machine, request: pytest.FixtureRequest) -> Iterator[Pair]:
    machine.stop()  # all others, for the memory's sake
    kind, *flags = EXACT[request.param]
    made = Pair(machine, request.param, kind, *flags, *FLOAT32)
    yield made
    made.legs.close()
    machine.stop()


def test_prompts_of_all_lengths(pair: Pair) -> None:
    before = pair.decode.received
    pair.check(
        [
            body(tokens(LENGTHS[at % len(LENGTHS)], f"{time.time()} {at}"), 16, logprobs=3)
            for at in range(68)
        ]
    )
    wait("KV moves", lambda: pair.decode.received > before)
    if "--speculative-config" in pair.flags:
        expect_accepted(pair.decode, pair.plain)


def test_a_prefix_that_d_has(pair: Pair) -> None:
    common = tokens(300, "models common")
    pair.check(
        [body(common + tokens(1 + 23 * at, f"models {at}"), 24, logprobs=3) for at in range(34)]
    )
    for engine in (pair.prefill, pair.decode):
        engine.wait_free()
        engine.expect_alive()
    assert not pair.decode.metric("vllm:disagg_damaged_pieces_total")


def test_states_and_attention_in_one_model(machine: Machine) -> None:
    """Qwen3-Next, with linear layers that vLLM's CPU build computes in bfloat16 only.

    In bfloat16 the batch and the number of steps decide between tokens of nearly equal probability.
    So prompts run one at a time, with lengths for which plain vLLM too computes the last token in a
    separate step, as D does.
    """
    machine.stop()
    pair = Pair(machine, "linear", "linear", NO_PREFIXES, "--dtype", "bfloat16")
    for at in range(102):
        one = body(tokens(1 + CHUNK * (1 + at % 3), f"{time.time()} linear {at}"), 16, logprobs=3)
        expect_same(pair.legs.ask(one), ask(pair.plain.url, one), f"{len(one['prompt'])} tokens:")
    assert pair.decode.metric("vllm:disagg_load_seconds_count") == 102
    pair.legs.close()
    machine.stop()


@pytest.mark.parametrize("drafting", ["P", "D"])
def test_one_side_without_drafts(machine: Machine, drafting: str) -> None:
    """D computes each prompt and counts it: its layers are not those of P."""
    machine.stop()
    kind, *flags = EXACT["eagle"]
    made = model(kind)
    at_p, at_d = (flags, []) if drafting == "P" else ([], flags)
    name = f"only-{drafting}"
    prefill = Engine(
        f"{name}-P", machine.folder, *FLOAT32, *at_p, role="kv_producer", cpu="0", model=made
    )
    decode = Engine(
        f"{name}-D", machine.folder, *FLOAT32, *at_d, role="kv_consumer", cpu="1", model=made
    )
    plain = Engine(f"{name}-plain", machine.folder, *FLOAT32, *at_d, cpu="1", model=made)
    machine.start(prefill, decode, plain)
    asked = [body(tokens(length, f"{name} {length}"), 16, logprobs=3) for length in LENGTHS[1:]]
    ours = several(lambda one: ask_both(prefill.url, decode.url, one), asked)
    for one, expected in zip(ours, several(lambda one: ask(plain.url, one), asked), strict=True):
        expect_same(one, expected)
    assert not decode.received
    count = "vllm:disagg_refused_parameters_total"
    wait("D counts them", lambda: decode.metric(count) == len(asked))
    machine.stop()


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_words(machine: Machine, name: str) -> None:
    machine.stop()
    (kind, *flags), words = REFUSED[name]
    engine = Engine(
        f"{name}-refused", machine.folder, *flags, role="kv_producer", cpu="0", model=model(kind)
    )
    with pytest.raises(RuntimeError, match="ended"):
        machine.start(engine)
    assert words in engine.log.read_text()
