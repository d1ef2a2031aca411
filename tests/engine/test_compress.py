"""`compress: fp8` with real engines: half the bytes, nearly equal answers, no mixed pairs."""

from __future__ import annotations

import pytest
from asking import ask, at_once, body, tokens
from conftest import Machine
from engines import Engine, Proxy, wait

pytestmark = pytest.mark.wide

FP8: dict[str, object] = {"compress": "fp8"}
BFLOAT16 = ["--dtype", "bfloat16"]  # the only one that is compressed
LENGTHS = [129, 256, 300, 500, 700, 900, 1100, 1500]


def test_half_the_bytes_and_nearly_the_answers(machine: Machine) -> None:
    machine.stop()  # all others, for the memory's sake
    folder = machine.folder
    prefill = Engine("fp8-P", folder, *BFLOAT16, role="kv_producer", cpu="0", settings=FP8)
    decode = Engine("fp8-D", folder, *BFLOAT16, role="kv_consumer", cpu="1", settings=FP8)
    other = Engine("off-D", folder, *BFLOAT16, role="kv_consumer", cpu="1")
    proxy = Proxy(machine.folder, prefill, [decode, other], name="fp8-proxy")
    machine.start(prefill, decode, other)
    machine.start(proxy)
    words = (
        f"{prefill.url} and {other.url} are never paired:"
        " compress is fp8 on one side and off on the other"
    )
    wait("the pair that does not fit is named", lambda: words in proxy.log.read_text())
    machine.stop(other)
    wait(
        "the pair that fits is ready",
        lambda: proxy.members() == {prefill.url: True, decode.url: True, other.url: False},
        10,
    )
    asked = [
        body(tokens(length, f"fp8 {length} {turn}"), 8) for length in LENGTHS for turn in range(4)
    ]
    ours = at_once(lambda one: ask(proxy.url, one), asked)
    plain = [ask(prefill.url, one) for one in asked]  # it computes everything
    assert [(one.status, one.finishes, one.usage) for one in ours] == [
        (one.status, one.finishes, one.usage) for one in plain
    ]
    same = sum(
        one.tokens[0][0] == right.tokens[0][0] for one, right in zip(ours, plain, strict=True)
    )
    assert same >= len(asked) * 3 // 4, "KV is worse than rounded"
    wait(
        "all loads are counted",
        lambda: decode.metric("vllm:disagg_load_seconds_count") == len(asked),
        5,
    )
    on_the_wire = decode.metric("vllm:disagg_received_wire_bytes_total", 'transport="zmq"')
    assert decode.received == 2 * on_the_wire > 0
    assert prefill.metric("vllm:disagg_sent_bytes_total") * 2 == decode.received
    assert not decode.metric("vllm:disagg_damaged_pieces_total")
    for engine in (prefill, decode):
        engine.wait_free()
        assert "answers are NOT exactly a plain vLLM's" in engine.log.read_text()
    machine.stop()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--dtype", "float32"],
            "compress fp8 is for KV in bfloat16, and this model's is torch.float32",
        ),
        (
            ["--kv-cache-dtype", "fp8"],
            "compress fp8 is for KV in bfloat16, and this model's is torch.uint8",
        ),
    ],
)
def test_refused_in_words(machine: Machine, flags: list[str], words: str) -> None:
    machine.stop()
    engine = Engine(
        f"fp8-refused-{flags[1]}", machine.folder, *flags, role="kv_producer", cpu="0", settings=FP8
    )
    with pytest.raises(RuntimeError, match="ended"):
        machine.start(engine)
    assert words in engine.log.read_text()
