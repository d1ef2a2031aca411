"""Sound: a clip becomes tokens of the prompt, which tell its length only, not what is heard.

Needs soundfile, with which vLLM decodes: `make wide` has it.
"""

from __future__ import annotations

import base64
import io
import math
import random
import wave
from array import array
from collections.abc import Iterator

import pytest
from asking import Body, english
from conftest import Machine
from test_images import chat, compare, compare_legs
from test_models import FLOAT32, Pair

pytest.importorskip("soundfile")
pytestmark = pytest.mark.wide

RATE = 16000  # samples a second, as the model's own: nothing is resampled
TONE_SECONDS = 0.1


@pytest.fixture(scope="module")
def pair(machine: Machine) -> Iterator[Pair]:
    machine.stop()  # all others, for the memory's sake
    made = Pair(machine, "audio", "audio", *FLOAT32)
    yield made
    made.legs.close()
    machine.stop()


def clip(seed: str, tones: int = 20) -> Body:
    """Returns a part of a message: so many random tones as a WAV file."""
    source = random.Random(seed)
    samples = array("h")
    for _ in range(tones):
        pitch = source.uniform(80, 7000)
        wave_length = 2 * math.pi * pitch / RATE
        samples.extend(
            int(20000 * math.sin(at * wave_length)) for at in range(int(RATE * TONE_SECONDS))
        )
    packed = io.BytesIO()
    with wave.open(packed, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes(samples.tobytes())
    data = base64.b64encode(packed.getvalue()).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def test_a_hundred_chats_through_the_proxy(pair: Pair, machine: Machine) -> None:
    """One text and many clips; different clips and texts; one clip and many texts; two clips."""
    asked = [chat(english(400, "one text"), clip(f"many {at}")) for at in range(32)]
    asked += [
        chat(english(40 + 35 * at, f"own {at}"), clip(f"own {at}", 1 + at)) for at in range(36)
    ]
    asked += [
        chat(english(700, "begins alike") + english(20 + 40 * at, f"ends {at}"), clip("one"))
        for at in range(24)
    ]
    asked += [
        chat(english(300, f"two {at}"), clip(f"1st {at}"), clip(f"2nd {at}")) for at in range(6)
    ]
    asked += [chat(english(500, f"no clip {at}")) for at in range(4)]
    plain = compare(pair, machine, asked)
    assert len({record.prompt_tokens for record in plain[:32]}) == 1, "clips differ in their tokens"
    assert len({record.texts for record in plain[:32]}) > 16, (
        "clips that change nothing show nothing"
    )


def test_legs_that_have_heard_different_clips(pair: Pair) -> None:
    words = english(900, "legs")
    compare_legs(pair, *(chat(words, clip(seed)) for seed in ("one leg", "the other leg")))
